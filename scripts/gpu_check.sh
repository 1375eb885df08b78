#!/usr/bin/env bash
# What only a GPU shows: ./scripts/gpu_check.sh [pytest arguments]
#
# 1. With two GPUs or more: the runtime's scenarios over NCCL, tensor parallelism and 200 steps with random delays among
#    them. Newton-Schulz runs in float16 and is held to float16 tolerances; what must be bitwise is.
# 2. The scenarios with 2 and 4 ranks on ONE GPU: gloo carries CUDA tensors, so streams, events and buffer lifetimes are
#    real.
# 3. The tests marked gpu: kernels, random host delays on one rank.
#
# On H200: 2, 2 and 7 minutes, the last most of it in Triton's compiler.
set -euo pipefail

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "error: gpu_check.sh needs a CUDA device"'

status=0
if (($("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') > 1)); then
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.nccl_scenarios || status=$?
fi
# Tensor parallelism is left to NCCL: DTensor's collectives crash over gloo on CUDA (torch 2.11).
DMUON_TEST_DEVICE=cuda "$PYTHON" -m pytest -q -p no:cacheprovider -m dist -k "not tp and not 1x2" "$@" \
    tests/dmuon/optimizer/test_muon.py tests/dmuon/optimizer/test_amp.py tests/dmuon/test_guards.py tests/dmuon/runtime/test_programs.py tests/dmuon/runtime/test_schedule.py tests/dmuon/transport/test_grid.py \
    tests/dmuon/runtime/test_param.py tests/dmuon/state/test_model.py tests/dmuon/state/test_materialize.py || status=$?
DMUON_TEST_DEVICE=cuda "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu "$@" tests || status=$?
exit "$status"
