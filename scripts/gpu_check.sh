#!/usr/bin/env bash
# What only a GPU shows: ./scripts/gpu_check.sh [pytest arguments]
#
# 1. The runtime's scenarios with 2 and 4 ranks on ONE GPU: gloo carries CUDA tensors, so streams, events and buffer
#    lifetimes are real. Newton-Schulz runs in float16 and is held to float16 tolerances; what must be bitwise is.
# 2. The tests marked gpu: kernels, random host delays on one rank.
# 3. With 2 or more GPUs, tests/gpu/nccl.py under torchrun over NCCL.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "error: gpu_check.sh needs a CUDA device"'

status=0
DMUON_TEST_DEVICE=cuda "$PYTHON" -m pytest -q -p no:cacheprovider -m "dist and not cpu_only" "$@" \
    tests/dmuon/test_muon.py tests/dmuon/test_schedule.py tests/dmuon/test_meshes.py tests/dmuon/test_storage.py \
    tests/dmuon/test_state_dict.py tests/dmuon/test_materialize.py || status=$?
DMUON_TEST_DEVICE=cuda "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu "$@" tests || status=$?
exit "$status"
