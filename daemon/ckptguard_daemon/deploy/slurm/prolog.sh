#!/bin/bash
# A Slurm prolog: it keeps a job from starting from a checkpoint that is not good. It is off until you set GATE=on.
# Slurm drains a node whose prolog fails, and holds the job. The gate in the job script does the same without that:
#   ckptguard-daemon --example slurm-job
# Use one of the two, for each call of the gate counts as a start.
#   ckptguard-daemon --example slurm-prolog > /etc/slurm/ckptguard-prolog
#   chmod 755 /etc/slurm/ckptguard-prolog
#   Prolog=/etc/slurm/ckptguard-prolog        PrologFlags=Alloc
# A job names its runs in its comment, one word each:
#   #SBATCH --comment="ckptguard=/scratch/me/runs/exp1"
GATE=off
BIN=/opt/ckptguard/bin
# A gate that takes longer, or cannot tell, lets the job start.
LIMIT=10m
LOG=/var/log/ckptguard-prolog.log

[ "$GATE" = on ] || exit 0
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
exec </dev/null >/dev/null 2>&1
exec >>"$LOG" 2>&1

runs=()
read -r -d '' -a words <<<"$SLURM_JOB_COMMENT"
for word in "${words[@]}"; do
    [[ $word == ckptguard=?* ]] && runs+=("${word#ckptguard=}")
done
first=$(scontrol show hostnames "$SLURM_NODELIST" 2>/dev/null | head -n 1)
[ "${first:-$SLURMD_NODENAME}" = "$SLURMD_NODENAME" ] || exit 0

as_user=()
if [ "$(id -u)" != "$SLURM_JOB_UID" ]; then
    as_user=(setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups --no-new-privs)
fi
HOME=$(getent passwd "$SLURM_JOB_UID" | cut -d: -f6)
export HOME
for run in "${runs[@]}"; do
    # shellcheck disable=SC2016 # the inner shell is to see these
    timeout --kill-after=10 "$LIMIT" \
        "${as_user[@]}" /bin/sh -c 'cd "$0" 2>/dev/null || cd /; exec "$@"' "$SLURM_JOB_WORK_DIR" \
        "$BIN/ckptguard" gate -- "$run"
    case $? in
        # Bad, undecided, no start left, nothing good: 3, 4, 12, 13.
        3 | 4 | 12 | 13) exit 1 ;;
    esac
done
exit 0
