#!/bin/bash
# A Slurm prolog: it keeps a job from starting from a checkpoint that is not good. It is off until you set GATE=on.
#   ckptguard-daemon --example slurm-prolog > /etc/slurm/ckptguard-prolog
#   chmod 755 /etc/slurm/ckptguard-prolog
#   Prolog=/etc/slurm/ckptguard-prolog        PrologFlags=Alloc
# A job names its runs in its comment, one word each:
#   #SBATCH --comment="ckptguard=/scratch/me/runs/exp1-%a"
# It always ends with 0: Slurm drains a node whose prolog fails. A job that must not start is put back into the queue
# and held. Its AdminComment and the log say why. The user puts it right, and then lets it go: scontrol release JOB.
GATE=off
BIN=/opt/ckptguard/bin
# Seconds. A gate that takes longer, or cannot tell, lets the job start.
LIMIT=600
LOG=/var/log/ckptguard-prolog.log

[ "$GATE" = on ] || exit 0
trap 'exit 0' EXIT
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH LC_ALL=C.UTF-8
exec </dev/null >/dev/null 2>&1

#include common.sh
hold() { # with the user's own rights: whatever went wrong here, no other user's job is touched
    note <<<"it is held: $1"
    timeout 30 scontrol update JobId="$name" AdminComment="ckptguard: $1" 2>&1 | note
    code_of 60 scontrol requeuehold "$name"
    if [ "$code" != 0 ]; then
        note <<<"it cannot be put back into the queue, and is cancelled"
        code_of 60 scancel "$name"
        [ "$code" = 0 ] || note <<<"it cannot be cancelled, and starts"
    fi
    # Without PrologFlags=Alloc this node has the job's script already, and must hear of it before this prolog ends.
    sleep 5
    exit 0
}

first=$(timeout 30 scontrol show hostnames "$SLURM_NODELIST" 2>/dev/null | head -n 1)
[ "${first:-$SLURMD_NODENAME}" = "$SLURMD_NODENAME" ] || exit 0
read_runs
[ ${#unreadable[@]} -eq 0 ] || hold "${unreadable[0]}; correct the comment"
for run in "${runs[@]}"; do
    code_of "$LIMIT" /bin/sh -c "$INNER" "$SLURM_JOB_WORK_DIR" "$run" "$BIN/ckptguard" gate -- "$run"
    case $code in
        3) hold "$run: what is there is bad" ;;
        4) hold "$run: it is not decided what is good" ;;
        10 | 91) hold "$run: there is no such run; make the folder, or correct the comment" ;;
        12) hold "$run: no start is left" ;;
        13) hold "$run: nothing good is there to start from" ;;
        90) hold "$run: it belongs to another user" ;;
        0) note <<<"$run: it starts" ;;
        *) note <<<"$run: the gate could not tell (${code:-no answer}), so the job starts" ;;
    esac
done
