#!/usr/bin/env bash
# Starts a job of one or more workers and waits for it. See usage() below; docs of the YAML are in docs/yaml.md.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/msrun_launcher.sh CMD
       bash scripts/msrun_launcher.sh CMD WORKER_NUM
       bash scripts/msrun_launcher.sh CMD WORKER_NUM MASTER_PORT LOG_DIR JOIN CLUSTER_TIME_OUT
       bash scripts/msrun_launcher.sh CMD WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR JOIN CLUSTER_TIME_OUT

CMD               one argument: "python run_mindformer.py --config F ..." or "run_mindformer.py --config F ...".
                  Quotes inside it are kept; nothing in it is expanded or executed by a shell.
WORKER_NUM        workers of the whole job, default 8. One worker is plain python, without msrun.
LOCAL_WORKER      workers of this node
MASTER_ADDR       address of node 0, which runs the scheduler, as all nodes see it; default 127.0.0.1
MASTER_PORT       1024 to 65535; "auto" or nothing picks a free one (single node only)
NODE_RANK         number of this node, from 0
LOG_DIR           default output/msrun_log: worker_<rank>.log, scheduler.log, msrun.log, and heartbeats/, in which every
                  worker notes what it does. Nodes that share a file system may share the folder.
JOIN              True (default): wait, show worker 0, return the exit code of the job.
                  False: return at once; the workers go on in the background and their exit code is lost.
CLUSTER_TIME_OUT  seconds that workers wait for each other at the start, default 7200

Relative paths are relative to the folder you call from. The python and msrun on PATH are used; if there is no msrun,
those of the repository's .venv.
Environment: MF_LOG_SUFFIX=x appends _x to LOG_DIR. GLOG_v=2 shows MindSpore's warnings (default 3, errors only).
PLOG_REDIRECT_TO_OUTPUT=1 puts Ascend's logs into output/plog.
Exit code: 0 the job is done; 3 done, with error records; 4 a prediction was stopped, and the same command goes on from
there; 1 refused or failed; 6 a worker stood still; otherwise that of the worker that failed first, 5 where it failed only
because a worker of another node did.
Signals: SIGTERM and SIGINT are passed on to the workers; a second one kills them.
TEXT
}

fail() {
    echo "error: $*" >&2
    exit 1
}

require_integer() { # name in capitals, lowest, highest; checks the variable of that name, takes off its leading zeros
    local variable=${1,,}
    local value=${!variable}
    [[ "$value" =~ ^-?[0-9]{1,9}$ ]] && [ "$value" -ge "$2" ] && [ "$value" -le "$3" ] ||
        fail "$1 must be an integer from $2 to $3, not '$value'. Run the launcher without arguments for its usage."
    # To arithmetic, 08 is a bad octal number and 010 is eight.
    printf -v "$variable" %d "$((${value%%[0-9]*}10#${value#-}))"
}

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$scripts")

worker_num=8 local_worker='' master_addr=127.0.0.1 master_port=auto node_rank=0
log_dir=output/msrun_log join=True cluster_time_out=7200
case $# in
    1) ;;
    2) worker_num=$2 ;;
    6) worker_num=$2 master_port=$3 log_dir=$4 join=$5 cluster_time_out=$6 ;;
    9)
        worker_num=$2 local_worker=$3 master_addr=$4 master_port=$5 node_rank=$6
        log_dir=$7 join=$8 cluster_time_out=$9
        ;;
    *)
        usage >&2
        [ $# -eq 0 ] || fail "expected 1, 2, 6 or 9 arguments, got $#. Is CMD one quoted argument?"
        exit 1
        ;;
esac

require_integer WORKER_NUM 1 1000000
local_worker=${local_worker:-$worker_num}
require_integer LOCAL_WORKER 1 "$worker_num"
require_integer NODE_RANK 0 1000000
require_integer CLUSTER_TIME_OUT -1 999999999
if [ "$local_worker" -eq "$worker_num" ]; then
    node_rank=0
elif [ $(((node_rank + 1) * local_worker)) -gt "$worker_num" ]; then
    fail "node $node_rank with $local_worker workers a node does not fit into WORKER_NUM $worker_num:" \
        "ranks would go up to $(((node_rank + 1) * local_worker - 1))."
fi
case $join in
    [Tt]rue | 1) join=True ;;
    [Ff]alse | 0) join=False ;;
    *) fail "JOIN must be True or False, not '$join'." ;;
esac
[ -n "$log_dir" ] || log_dir=output/msrun_log
[ -n "$master_addr" ] || fail "MASTER_ADDR is empty."

if ! command -v msrun >/dev/null && [ -x "$root/.venv/bin/msrun" ]; then
    PATH="$root/.venv/bin:$PATH"
fi
command -v python >/dev/null ||
    fail "there is no python on PATH. Activate the environment that the package is installed in."

# CMD is split as a shell would split it, but without expansions: a prompt on the command line is data.
split=$(mktemp) || exit 1
python -c 'import shlex, sys
try:
    words = shlex.split(sys.argv[1])
except ValueError as error:
    sys.exit(f"error: CMD cannot be split into words: {error}")
sys.stdout.write("".join(word + "\0" for word in words))' "$1" >"$split" || {
    rm -f "$split"
    exit 1
}
mapfile -d '' -t words <"$split"
rm -f "$split"
[ ${#words[@]} -gt 0 ] || fail "CMD is empty."
if [[ "${words[0]}" == *.py ]]; then
    [ -f "${words[0]}" ] || fail "CMD starts with '${words[0]}', which is not a file (from $PWD)."
    words=(python "${words[@]}")
elif ! command -v "${words[0]}" >/dev/null; then
    fail "CMD starts with '${words[0]}', which is neither a program nor a .py file." \
        "Environment variables are set in front of the launcher, not in CMD."
fi

suffix=${MF_LOG_SUFFIX:+_$MF_LOG_SUFFIX}
log_dir=$log_dir$suffix
case ${PLOG_REDIRECT_TO_OUTPUT:-} in
    [Tt]rue | [Tt]RUE | 1) export ASCEND_PROCESS_LOG_PATH=$PWD/output/plog$suffix ;;
esac
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export GLOG_v=${GLOG_v:-3}
# 64 Ascend workers start more threads than many default limits allow; where the limit is fixed, it stays.
ulimit -u unlimited 2>/dev/null

if [ "$worker_num" -eq 1 ]; then
    [ "$join" = False ] || exec "${words[@]}"
    mkdir -p "$log_dir" || fail "LOG_DIR '$log_dir' cannot be made."
    nohup "${words[@]}" >"$log_dir/worker_0.log" 2>&1 </dev/null &
    echo "worker 0 runs in the background (process $!), log: $log_dir/worker_0.log"
    exit 0
fi

command -v msrun >/dev/null ||
    fail "there is no msrun on PATH. Activate the environment that MindSpore is installed in."
if [ -z "$master_port" ] || [ "$master_port" = auto ]; then
    [ "$local_worker" -eq "$worker_num" ] ||
        fail "a job of several nodes needs a MASTER_PORT that all of them know."
    master_port=$(python -c 'import socket
s = socket.socket()
s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])') || exit 1
else
    require_integer MASTER_PORT 1024 65535
    # Only node 0 runs the scheduler, so only its port has to be free.
    if [ "$node_rank" -eq 0 ]; then
        python -c 'import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    s.bind(("", int(sys.argv[1])))
except OSError:
    sys.exit(1)' "$master_port" || fail "MASTER_PORT $master_port is in use on this node; give another one, or auto."
    fi
fi

mkdir -p "$log_dir" || fail "LOG_DIR '$log_dir' cannot be made."
first_rank=$((node_rank * local_worker))
# Logs of an earlier job would be shown as if they were of this one.
for ((rank = first_rank; rank < first_rank + local_worker; rank++)); do
    { : >"$log_dir/worker_$rank.log"; } 2>/dev/null || fail "LOG_DIR '$log_dir' is not writable."
    rm -f "$log_dir/heartbeats/rank_$rank.json"
done
# The address may be that of the host of several launchers, but one scheduler is enough.
export MSRUN_NODE_RANK=$node_rank MSRUN_HEARTBEATS
MSRUN_HEARTBEATS=$(cd "$log_dir" && pwd)/heartbeats

options=(--worker_num="$worker_num" --local_worker_num="$local_worker" --master_port="$master_port"
    --log_dir="$log_dir" --join="$join" --cluster_time_out="$cluster_time_out")
[ "$local_worker" -eq "$worker_num" ] || options+=(--master_addr="$master_addr" --node_rank="$node_rank")
# Pinning helps Ascend hosts. On a CPU it would squeeze MindSpore's spinning threads onto one core.
command -v npu-smi >/dev/null && options+=(--bind_core=True)

if [ "$join" = False ]; then
    nohup msrun "${options[@]}" "$scripts/msrun_worker.py" "${words[@]}" >"$log_dir/msrun.log" 2>&1 </dev/null || {
        tail -n 20 "$log_dir/msrun.log" >&2
        fail "msrun did not start the workers, log: $log_dir/msrun.log"
    }
    echo "$local_worker workers run in the background, logs: $log_dir/worker_<rank>.log"
    exit 0
fi

records=$(mktemp -d) || exit 1
trap 'rm -rf "$records"' EXIT
echo "starting $local_worker workers on port $master_port, logs: $log_dir; this is worker $first_rank:"
# The launcher shows the log itself: msrun's own tail loses first and last lines, and mixes all workers.
MSRUN_RECORDS=$records setsid msrun "${options[@]}" --tail_worker_log=-2 "$scripts/msrun_worker.py" "${words[@]}" \
    >"$log_dir/msrun.log" 2>&1 </dev/null &
msrun_pid=$!
tail -n +1 -s 0.2 -f --pid="$msrun_pid" "$log_dir/worker_$first_rank.log" </dev/null &
tail_pid=$!

# A session of its own keeps a Ctrl-C away from msrun, which would kill the workers: they get the first signal from here
# and end by themselves. On a second one, or while not all of them are there, msrun has to kill them; it does so on
# SIGINT alone, and only once it has started all of them: ask until it is gone.
interrupted=0 killed=0
stop() {
    local pids
    pids=$(cat "$records"/*.pid 2>/dev/null)
    if [ "$interrupted" -eq 0 ] && [ "$(wc -w <<<"$pids")" -eq "$local_worker" ]; then
        interrupted=$1
        # shellcheck disable=SC2086
        kill -TERM $pids 2>/dev/null
        return
    fi
    interrupted=$1 killed=1
    trap '' INT TERM
    while kill -INT "$msrun_pid" 2>/dev/null; do sleep 0.5; done
}
trap 'stop 130' INT
trap 'stop 143' TERM
while true; do
    wait "$msrun_pid"
    code=$?
    kill -0 "$msrun_pid" 2>/dev/null || break
done
# msrun may have been ended by the signal that the workers are still obeying.
for file in "$records"/*.pid; do
    while [ -f "$file" ] && [ -e "/proc/$(<"$file")/exe" ]; do sleep 0.2; done
done
wait "$tail_pid" 2>/dev/null
trap - INT TERM
if [ "$killed" -ne 0 ] || { [ "$interrupted" -ne 0 ] && [ "$code" -ne 0 ] && ! grep -qsx 4 "$records"/*; }; then
    echo "error: interrupted, the workers are stopped." >&2
    exit "$interrupted"
fi

# Each worker left its exit code in a file named by its rank. The oldest failure is the cause, the rest are its victims;
# 5 says of itself that it is a victim.
with_errors=0 stopped=0 failed='' victim=''
while IFS= read -r rank; do
    case $(<"$records/$rank") in
        0) ;;
        3) with_errors=3 ;;
        4) stopped=4 ;;
        5) victim=${victim:-$rank} ;;
        *) failed=${failed:-$rank} ;;
    esac
done < <(ls -tr "$records" | grep -E '^[0-9]+$')

show_failure() { # rank, what happened
    echo "error: worker $1 $2. The end of $log_dir/worker_$1.log:" >&2
    tail -n 20 "$log_dir/worker_$1.log" >&2
}

if [ -n "$failed" ]; then
    worker_code=$(<"$records/$failed")
    reason="failed with exit code $worker_code"
    if [ "$worker_code" -gt 128 ] && name=$(kill -l "$worker_code" 2>/dev/null); then
        reason+=", ended by SIG$name"
    fi
    show_failure "$failed" "$reason"
    exit "$worker_code"
fi
if [ -n "$victim" ]; then
    # msrun ends the others as soon as one has ended, so the cause may have had no time to leave its code.
    cause=$(grep -oE 'rank [0-9]+ (failed|has ended)' "$log_dir/worker_$victim.log" | tail -n 1 | grep -oE '[0-9]+')
    show_failure "$victim" "failed because another one did"
    if [ -n "$cause" ] && [ "$cause" != "$victim" ] && [ -s "$log_dir/worker_$cause.log" ]; then
        show_failure "$cause" "was the one that failed"
    fi
    exit 5
fi
[ "$stopped" -eq 0 ] || exit "$stopped"
if [ "$code" -ne 0 ]; then
    echo "error: msrun failed, though no worker on this node did. The end of $log_dir/msrun.log and scheduler.log:" >&2
    tail -n 20 "$log_dir/msrun.log" >&2
    [ ! -f "$log_dir/scheduler.log" ] || tail -n 20 "$log_dir/scheduler.log" >&2
    exit "$code"
fi
exit "$with_errors"
