#!/bin/bash
# A Slurm epilog: when a job has ended, it verifies what the job saved. Put it on each node, and name it in slurm.conf:
#   ckptguard-daemon --example slurm-epilog > /etc/slurm/ckptguard-epilog
#   chmod 755 /etc/slurm/ckptguard-epilog
#   Epilog=/etc/slurm/ckptguard-epilog
# A job names its runs in its comment, one word each:
#   #SBATCH --comment="ckptguard=/scratch/me/runs/exp1"
# It works as the job's user, with the settings (ckptguard.toml) of the job's folder, on the first node of the job.
# It always ends with 0: Slurm drains a node whose epilog fails.
BIN=/opt/ckptguard/bin
# The node gets its next job when this is over. What has no verdict by then stays pending.
LIMIT=10m
LOG=/var/log/ckptguard-epilog.log
# For Prometheus: a folder that one node exporter reads (textfile collector), and in which users may write (mode 1777).
METRICS=

export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
exec </dev/null >/dev/null 2>&1
exec >>"$LOG" 2>&1

runs=()
read -r -d '' -a words <<<"$SLURM_JOB_COMMENT"
for word in "${words[@]}"; do
    [[ $word == ckptguard=?* ]] && runs+=("${word#ckptguard=}")
done
[ ${#runs[@]} -gt 0 ] || exit 0
first=$(scontrol show hostnames "$SLURM_NODELIST" 2>/dev/null | head -n 1)
[ "${first:-$SLURMD_NODENAME}" = "$SLURMD_NODENAME" ] || exit 0

printf '%(%F %T)T  job %s of %s on %s saved into:%s\n' -1 "$SLURM_JOB_ID" "$SLURM_JOB_USER" "$SLURMD_NODENAME" \
    "$(printf ' %q' "${runs[@]}")"
as_user=()
if [ "$(id -u)" != "$SLURM_JOB_UID" ]; then
    as_user=(setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups --no-new-privs)
fi
HOME=$(getent passwd "$SLURM_JOB_UID" | cut -d: -f6)
export HOME
for run in "${runs[@]}"; do
    metrics=()
    if [ -n "$METRICS" ]; then
        metrics=(--metrics-file "$METRICS/ckptguard-$(printf %s "$run" | sha256sum | cut -c 1-12).prom")
    fi
    # shellcheck disable=SC2016 # the inner shell is to see these
    "${as_user[@]}" /bin/sh -c 'cd "$0" 2>/dev/null || cd /; exec "$@"' "$SLURM_JOB_WORK_DIR" \
        "$BIN/ckptguard-daemon" --once --limit "$LIMIT" --log-format text "${metrics[@]}" -- "$run" &
done
wait
exit 0
