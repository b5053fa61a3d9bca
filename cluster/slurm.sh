#!/bin/bash
# Train on the nodes of a Slurm job. They form a Ray cluster that lasts as long as the job:
#
#   sbatch --nodes 2 --exclusive --gpus-per-node 8 cluster/slurm.sh imagenet --data /shared/imagenet --gpu
#
# The arguments are those of `raydali train`. See docs/clusters.md#slurm.
#
#SBATCH --ntasks-per-node=1
# After the failure of a node the job starts again, continues its log, and resumes its run.
#SBATCH --requeue --open-mode=append
# Two minutes before the time limit, Slurm signals this script, which lets the run save a checkpoint.
#SBATCH --signal=B:USR1@120
# shellcheck disable=SC2016,SC2317 # other shells call the functions

set -euo pipefail

# The run is named after the job: a job that is requeued keeps its id.
if [[ ! " $* " =~ " --name"[\ =] ]]; then set -- "$@" --name "slurm-$SLURM_JOB_ID"; fi

# The first node, on which this script runs, is Ray's head. The second one knows the address by which it is reached.
others=$((SLURM_JOB_NUM_NODES - 1))
host=127.0.0.1
if ((others)); then
    host=$(srun --quiet --relative=1 --nodes=1 --ntasks=1 printenv SLURM_LAUNCH_NODE_IPADDR)
fi
# Jobs that share a node use different ports.
port=$((20000 + SLURM_JOB_ID % 4000 * 3))
export RAY_ADDRESS=$host:$port
PORTS="--dashboard-port=$((port + 1)) --ray-client-server-port=$((port + 2))"
PORTS+=" --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0"
# Only who has this token can use the cluster.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export PORTS RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# Python packages on a shared file system may take minutes to load.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 RAY_NUM_REDIS_GET_RETRIES=150 RAY_raylet_start_wait_time_s=60
export RAY_gcs_server_port_wait_time_s=300 RAY_worker_register_timeout_seconds=300 RAY_worker_niceness=0

# Start a Ray node with what Slurm has allocated of this machine. On the head, also run the command in the arguments.
node() {
    # This refuses to start beside another job's Ray, and in the end it would stop that, too. So it gets a process
    # namespace, in which it sees none. Where users may not make one, two jobs cannot share a node.
    local alone=(unshare --map-current-user --pid --fork --kill-child --mount-proc)
    "${alone[@]}" true 2>/dev/null || alone=()
    # `exit` keeps bash, which takes care of orphans.
    # shellcheck disable=SC2086
    "${alone[@]}" bash -c 'ray symmetric-run "$@"; exit $?' bash \
        --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" $PORTS --temp-dir "$folder/ray" --disable-usage-stats \
        --num-cpus "$SLURM_CPUS_ON_NODE" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" -- "$@"
}

# On the head, below Ray: train. Its input is the job's log. A line through the pipe asks the run to end, since its
# process id is another one outside of the namespace.
drive() {
    raydali train "$@" >&0 2>&0 </dev/null &
    local driver=$! status=0
    { read -r <"$folder/stop" && kill -TERM "$driver"; } &
    wait "$driver" || status=$?
    echo "$status" >"$folder/status"
}

# Ray gives a part of its node 15 seconds to start, without an option. Where this is too short, it starts again.

# On the head: run the job in the arguments.
lead() {
    for _ in 1 2 3; do
        node bash -c 'drive "$@"' bash "$@" || true
        if [[ -e $folder/status ]]; then return; fi
    done
}

# On another node: be a part of the cluster until Slurm ends the job.
follow() {
    local ended=false
    trap 'ended=true' TERM
    folder=$(mktemp -d /tmp/ray-slurm-XXXXXX)
    until $ended; do
        node true
        sleep 1
    done
    rm -rf "$folder"
}
export -f node drive follow

# The path is short, since that of a socket is limited to 107 bytes. Others may not read it, unlike Ray's own.
folder=$(mktemp -d /tmp/ray-slurm-XXXXXX)
export folder
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/stop"
exec 3<>"$folder/stop"
requeue=false
trap 'echo >&3' TERM
trap 'requeue=true; echo >&3' USR1

if ((others)); then
    srun --relative=1 --nodes="$others" --ntasks="$others" --cpu-bind=none bash -c follow >>"$folder/log" 2>&1 &
fi
lead "$@" 0>&1 >>"$folder/log" 2>&1 &
head=$!
while kill -0 "$head" 2>/dev/null; do wait "$head" || true; done

if [[ ! -e $folder/status ]]; then # Ray has not started
    cat "$folder/log" >&2
    exit 1
fi
status=$(<"$folder/status")
if $requeue && ((status == 130)); then
    rm -rf "$folder" # now, since this ends the script, too
    scontrol requeue "$SLURM_JOB_ID" || true # --no-requeue forbids it
fi
exit "$status"
