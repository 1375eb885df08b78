#!/usr/bin/env bash
# Starts training: ./run_train.sh [--section.key value ...], or with --plan tells what that run needs (docs/scaling.md)
#
#   CONFIG_FILE  TOML file (default ./train_configs/debug_model.toml)
#   NGPU         processes on this node (default: its GPUs; without any, 2 on the CPU)
#   LOG_RANK     local ranks whose output is shown, as 0,1 (default 0)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several nodes: the same call on each. Under Slurm, `srun ./run_train.sh`
#                with one task a node needs none of them (scripts/slurm_train.sbatch)
#   MAX_RESTARTS times that the ranks are started again after one failed, and the launcher of a node after it was killed
#                (default 0); they resume from the newest checkpoint
#   PYTHON       interpreter to start from (default python3; see scripts/setup.sh)
#
# SIGTERM and SIGINT save and end the run with exit code 0, SIGUSR1 saves. The output of every rank is in logs/ of the
# run's folder, job.dump_folder.
set -euo pipefail
trap '' USR1  # ignored, here and in what starts below, until the training takes it

CONFIG_FILE=${CONFIG_FILE:-./train_configs/debug_model.toml}
if [[ -f $CONFIG_FILE ]]; then  # a path as the caller sees it, else one in the repository
    # Without CDPATH, in which cd would also look, and print what it found.
    CONFIG_FILE=$(CDPATH='' cd -- "$(dirname -- "$CONFIG_FILE")" >/dev/null && pwd)/$(basename -- "$CONFIG_FILE")
fi
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null

fail() {
    echo "error: $1" >&2
    exit 1
}

if [[ -n ${SLURM_STEP_NUM_NODES:-} ]]; then  # started by srun
    if ((${SLURM_STEP_NUM_TASKS:-$SLURM_STEP_NUM_NODES} != SLURM_STEP_NUM_NODES)); then
        fail "srun has started $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes, but run_train.sh starts the \
ranks of a node itself: give srun --ntasks-per-node=1"
    fi
    if ((${NNODES:-$SLURM_STEP_NUM_NODES} == 1 && SLURM_STEP_NUM_NODES > 1)); then
        fail "NNODES=1, but srun has started run_train.sh on $SLURM_STEP_NUM_NODES nodes: they would be runs of their \
own in one folder. Leave NNODES out, or give srun --nodes=1"
    fi
    NNODES=${NNODES:-$SLURM_STEP_NUM_NODES}
    NODE_RANK=${NODE_RANK:-$SLURM_NODEID}
    # The first host of a list like rack[2-3]n[01-04,7],login1 is rack2n01.
    MASTER_ADDR=${MASTER_ADDR:-$(sed -E 's/\[([0-9]+)[^]]*\]/\1/g; s/,.*//' <<<"$SLURM_STEP_NODELIST")}
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}  # two jobs on one node do not meet
elif ((${SLURM_JOB_NUM_NODES:-1} > 1)) && [[ -z ${NNODES:-} ]]; then
    fail "the Slurm job has $SLURM_JOB_NUM_NODES nodes and this is one of them: start all with srun ./run_train.sh, or \
set NNODES=1 to train on this one"
fi
export NNODES=${NNODES:-1}
MAX_RESTARTS=${MAX_RESTARTS:-0}
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS: found '$MAX_RESTARTS', expected a number of at least 0"

source scripts/setup.sh train

for argument in "$@"; do
    if [[ $argument == --help || $argument == -h ]]; then
        exec "$PYTHON" -m torchtitan_dmuon.config --help
    elif [[ $argument == --plan || $argument == --plan=* ]]; then  # what this run needs, instead of the run
        exec "$PYTHON" -m torchtitan_dmuon.plan --job.config_file "$CONFIG_FILE" "$@"
    fi
done
# Mistakes are told once, all of them, before torchrun starts a process that would tell them again.
machine=$("$PYTHON" -m torchtitan_dmuon.preflight --job.config_file "$CONFIG_FILE" "$@")
read -r NGPU gpus cores folder <<<"$machine"

if ((gpus == 0)); then  # glibc would keep freed buffers of collectives in its arenas: hand large ones back
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1048576}
fi
if ((gpus == 0)) && [[ -z ${OMP_NUM_THREADS:-} ]]; then
    export OMP_NUM_THREADS=$((cores > NGPU ? cores / NGPU : 1))
fi
if [[ -z ${PYTORCH_ALLOC_CONF:-} && -z ${PYTORCH_CUDA_ALLOC_CONF:-} ]]; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True
fi

MASTER_PORT=${MASTER_PORT:-29500}
if ((NNODES == 1)); then
    rendezvous=(--standalone)  # on a free port, so that two runs on one host do not meet
else
    if [[ -z ${MASTER_ADDR:-} || -z ${NODE_RANK:-} ]]; then
        fail "NNODES=$NNODES needs MASTER_ADDR (host of node 0) and NODE_RANK (0 to $((NNODES - 1)))"
    fi
    export RUN_ID=${RUN_ID:-${SLURM_JOB_ID:-$MASTER_ADDR:$MASTER_PORT}}  # tells nodes of this run from those of others
    # Node 0 serves the rendezvous even where its own name for itself is not MASTER_ADDR.
    rendezvous=(
        --nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "$MASTER_PORT"
        --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-conf "is_host=$((NODE_RANK == 0))"
    )
fi

launch=(
    "$PYTHON" -m torchtitan_dmuon.launch "${rendezvous[@]}" --max-restarts "$MAX_RESTARTS" --nproc-per-node "$NGPU"
    --log-dir "$folder/logs" --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3
    train.py --job.config_file "$CONFIG_FILE" "$@"
)
# Signals reach the launcher, which passes SIGTERM, SIGINT (save and end) and SIGUSR1 (save) on to the processes of this
# node; its exit code is ours.
if ((MAX_RESTARTS == 0)); then
    exec "${launch[@]}"
fi

# The launcher restarts ranks. Here it is started again itself: after it was killed, or has lost the other nodes' (75).
pass_on() {
    signalled=1
    [[ $1 == USR1 ]] || stopping=1
    kill "-$1" "$launcher" 2>/dev/null || true
}
stopping=
for ((left = MAX_RESTARTS; ; left--)); do
    "${launch[@]}" &
    launcher=$!
    for name in TERM INT USR1; do
        # shellcheck disable=SC2064  # the name of now
        trap "pass_on $name" "$name"
    done
    signalled=1
    while [[ -n $signalled ]]; do  # a signal ends wait, not the launcher
        signalled=
        code=0
        wait "$launcher" || code=$?
    done
    if [[ -n $stopping ]] || ((left == 0 || (code <= 128 && code != 75))); then
        exit "$code"
    fi
    echo "run_train.sh: the launcher of this node has ended with exit code $code; $left restarts are left" >&2
    trap '' USR1
    launch+=(--checkpoint.load_step -1)  # the newest checkpoint is this run's own by now
done
