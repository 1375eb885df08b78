import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank starts compilers that import torch
if not torch.cuda.is_available():
    # Before Triton is imported: kernels are interpreted, so that their tests run on the CPU, too.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support.pool import stop_all


def pytest_sessionfinish(session, exitstatus):
    stop_all()
