#!/usr/bin/env bash
# Starts training: ./run_train.sh [--section.key value ...]
#
#   CONFIG_FILE  TOML file (default ./train_configs/debug_model.toml)
#   NGPU         processes on this node (default: its GPUs; without any, 2 on the CPU)
#   LOG_RANK     local ranks whose output is shown, as 0,1 (default 0)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several nodes: the same call on each
#   PYTHON       interpreter to start from (default python3; see scripts/setup.sh)
#
# SIGTERM and SIGINT save and end the run with exit code 0, SIGUSR1 saves. Under Slurm: `#SBATCH --signal=TERM@180` and
# `srun ./run_train.sh` (one task a node); checkpoint.grace_seconds should be less than the 180. Slurm signals every
# process, and the end of a data loader's worker ends the run: leave training.dataloader.num_workers at 0 there.
set -euo pipefail
trap '' USR1  # ignored, here and in what starts below, until the training takes it

CONFIG_FILE=${CONFIG_FILE:-./train_configs/debug_model.toml}
if [[ -f $CONFIG_FILE ]]; then  # a path as the caller sees it, else one in the repository
    # Without CDPATH, in which cd would also look, and print what it found.
    CONFIG_FILE=$(CDPATH= cd -- "$(dirname -- "$CONFIG_FILE")" >/dev/null && pwd)/$(basename -- "$CONFIG_FILE")
fi
CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null
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
read -r NGPU gpus cores <<<"$machine"

NNODES=${NNODES:-1}
if ((gpus == 0)); then  # glibc would keep freed buffers of collectives in its arenas: hand large ones back
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1048576}
fi
if ((gpus == 0)) && [[ -z ${OMP_NUM_THREADS:-} ]]; then
    export OMP_NUM_THREADS=$((cores > NGPU ? cores / NGPU : 1))
fi
if [[ -z ${PYTORCH_ALLOC_CONF:-} && -z ${PYTORCH_CUDA_ALLOC_CONF:-} ]]; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True
fi

if ((NNODES == 1)); then
    rendezvous=(--standalone)  # on a free port, so that two runs on one host do not meet
else
    if [[ -z ${MASTER_ADDR:-} || -z ${NODE_RANK:-} ]]; then
        echo "error: NNODES=$NNODES needs MASTER_ADDR (host of node 0) and NODE_RANK (0 to $((NNODES - 1)))" >&2
        exit 1
    fi
    # Node 0 serves the rendezvous even where its own name for itself is not MASTER_ADDR.
    rendezvous=(
        --nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "${MASTER_PORT:-29500}"
        --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-conf "is_host=$((NODE_RANK == 0))"
    )
fi

# exec: signals reach the launcher, which passes SIGTERM, SIGINT (save and end) and SIGUSR1 (save) on to the processes of
# this node; its exit code is ours.
exec "$PYTHON" -m torchtitan_dmuon.launch "${rendezvous[@]}" --nproc-per-node "$NGPU" \
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 \
    train.py --job.config_file "$CONFIG_FILE" "$@"
