#!/bin/bash
# A Slurm epilog: when a job has ended, it verifies what the job saved. Put it on each node, and name it in slurm.conf:
#   ckptguard-daemon --example slurm-epilog > /etc/slurm/ckptguard-epilog
#   chmod 755 /etc/slurm/ckptguard-epilog
#   Epilog=/etc/slurm/ckptguard-epilog
# A job names its runs in its comment, one word each:
#   #SBATCH --comment="ckptguard=/scratch/me/runs/exp1-%a"
# It works as the job's user, with the settings (ckptguard.toml) of the job's folder, on the first node of the job.
# It always ends with 0: Slurm drains a node whose epilog fails.
BIN=/opt/ckptguard/bin
# Seconds. The node gets its next job when this is over. What has no verdict by then stays pending.
LIMIT=600
LOG=/var/log/ckptguard-epilog.log
# For Prometheus: a folder that one node exporter reads (textfile collector), and in which users may write (mode 1777).
METRICS=

trap 'exit 0' EXIT
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH LC_ALL=C.UTF-8
exec </dev/null >/dev/null 2>&1

#include common.sh
first=$(timeout 30 scontrol show hostnames "$SLURM_NODELIST" 2>/dev/null | head -n 1)
[ "${first:-$SLURMD_NODENAME}" = "$SLURMD_NODENAME" ] || exit 0
read_runs
for run in "${runs[@]}"; do
    metrics=()
    if [ -n "$METRICS" ]; then
        metrics=(--metrics-file "$METRICS/ckptguard-$(printf %s "$run" | sha256sum | cut -c 1-12).prom")
    fi
    note <<<"$name of user $SLURM_JOB_UID on $SLURMD_NODENAME saved into $run"
    {
        code_of $((LIMIT + 60)) /bin/sh -c "$INNER" "$SLURM_JOB_WORK_DIR" "$run" \
            "$BIN/ckptguard-daemon" --once --limit "${LIMIT}s" --log-format text "${metrics[@]}" -- "$run"
        case $code in
            90) note <<<"$run belongs to another user" ;;
            91) note <<<"there is no run $run" ;;
        esac
    } &
done
wait
