"""Imported once, in the process that the workers of tests/support/pool.py are forked from: everything that a test or a
run of the trainer would import by itself."""

# ruff: noqa: F401
import gc

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import tests.support.harness
import tests.support.toy
import tests.support.training
import train

gc.collect()
gc.freeze()  # the workers' collections leave alone what is here, and its memory stays shared
