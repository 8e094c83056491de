# The comment is a user's text. Only a word `ckptguard=RUN` means something, and RUN is a path from the root or the URL
# of a bucket or an SFTP server, of letters, digits and ./_%+=@:,~- alone. Nothing else is a folder of this machine:
# file:///PATH and local:///PATH are read as PATH. What names no run is in `unreadable`, and in the log. In it %j is the job's id, %A the array's id, %a the task's number in
# the array, %u the user's name, and %% a percent sign.
note() { # each line of stdin, with the time and the job's id
    local line
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%(%F %T)T job %s: %s\n' -1 "$SLURM_JOB_ID" "${line//[^[:print:]]/?}"
    done >>"$LOG"
}
read_runs() {
    local word text sign user words=() row array=${SLURM_ARRAY_JOB_ID-} task=${SLURM_ARRAY_TASK_ID-}
    runs=() unreadable=() name=$SLURM_JOB_ID
    read -r -d '' -a words <<<"$SLURM_JOB_COMMENT"
    for word in "${words[@]}"; do
        [[ $word =~ ^ckptguard=(/|[a-z][a-z0-9+]*:)[[:alnum:]./_%+=@:,~-]{1,1000}$ ]] || continue
        text=${word#ckptguard=}
        case $text in
            file:///* | local:///*) text=/${text#*:///} ;;
        esac
        if [[ $text =~ ^(/|(s3|s3a|gs|gcs|az|abfs|abfss|ssh|sftp)://[[:alnum:]%]) && $text != [!/]*::* ]]; then
            runs+=("$text")
        else
            unreadable+=("$text: not a path from the root, nor a URL of a bucket")
        fi
        [ ${#runs[@]} -lt 8 ] || break
    done
    [ $((${#runs[@]} + ${#unreadable[@]})) -gt 0 ] || return 0
    user=$(timeout 10 id -nu -- "$SLURM_JOB_UID") || user=$SLURM_JOB_UID
    if [ -z "$task" ]; then # an older Slurm does not say it; these columns hold numbers alone
        while read -r -a row; do
            [ "${row[0]}" = "$SLURM_JOB_ID" ] && array=${row[1]} task=${row[2]}
        done < <(timeout 30 squeue --noheader --states=all --jobs "$SLURM_JOB_ID" --format '%A %F %K')
    fi
    [[ $array =~ ^[0-9]+$ && $task =~ ^[0-9]+$ ]] && name=${array}_$task || task=
    [[ $array =~ ^[0-9]+$ ]] || array=$SLURM_JOB_ID
    for word in "${!runs[@]}"; do
        text=${runs[word]} sign=
        while [[ $text =~ ^([^%]*)%(.)(.*)$ ]]; do
            case ${BASH_REMATCH[2]} in
                a)
                    [ -n "$task" ] || break
                    sign+=${BASH_REMATCH[1]}$task
                    ;;
                A) sign+=${BASH_REMATCH[1]}$array ;;
                j) sign+=${BASH_REMATCH[1]}$SLURM_JOB_ID ;;
                u) sign+=${BASH_REMATCH[1]}$user ;;
                %) sign+=${BASH_REMATCH[1]}% ;;
                *) break ;;
            esac
            text=${BASH_REMATCH[3]}
        done
        if [[ $text == *%* ]]; then
            unreadable+=("${runs[word]}: no such % sign, or no array")
            unset "runs[word]"
        else
            runs[word]=$sign$text
        fi
    done
    for text in "${unreadable[@]}"; do
        note <<<"it names no run: $text"
    done
}
# A command with the rights of the job's user, in the job's folder, without root's environment. It ends with 90 where
# the run is another user's, and with 91 where there is none.
# shellcheck disable=SC2016 # the inner shell is to see these
INNER='case $1 in /*)
    cd -- "$1" 2>/dev/null || case $(stat -L -- "$1" 2>&1) in
        *": No such file or directory" | *": Not a directory" | *"regular "*file*) exit 91 ;;
        *) echo "$1 cannot be entered"; exit 1 ;;
    esac
    [ "$(stat -c %u .)" = "$(id -u)" ] || exit 90 ;;
esac
cd "$0" 2>/dev/null || cd /
shift; exec "$@"'
as_user() { # SECONDS COMMAND...
    local limit=$1 home drop=()
    shift
    home=$(timeout 10 getent passwd "$SLURM_JOB_UID" | cut -d: -f6)
    if [ "$(id -u)" != "$SLURM_JOB_UID" ]; then
        drop=(setpriv --reuid "$SLURM_JOB_UID" --regid "$SLURM_JOB_GID" --init-groups --no-new-privs)
    fi
    env -i PATH="$PATH" HOME="${home:-/}" LC_ALL=C.UTF-8 ${SLURM_CONF:+"SLURM_CONF=$SLURM_CONF"} \
        SLURM_JOB_ID="$SLURM_JOB_ID" SLURM_JOB_RESTART_COUNT="${SLURM_JOB_RESTART_COUNT:-0}" \
        SLURM_CLUSTER_NAME="${SLURM_CLUSTER_NAME-}" SLURM_SCRIPT_CONTEXT="${SLURM_SCRIPT_CONTEXT-}" \
        timeout --kill-after=5 "$limit" "${drop[@]}" "$@"
}
# What a user can stop, or a storage that hangs keeps even when it is killed, is not waited for longer than this.
code_of() { # SECONDS COMMAND...: have its exit code in `code`, or nothing
    local answer
    exec {answer}< <(
        as_user "$@" 2>&1 </dev/null | head -c 65536 | note
        echo "${PIPESTATUS[0]}"
    )
    code=
    read -r -t $(($1 + 10)) -u "$answer" code
    exec {answer}<&-
}
