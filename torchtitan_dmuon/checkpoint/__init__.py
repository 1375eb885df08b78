"""Saving and resuming: directories of ``torch.distributed.checkpoint`` that are complete or not there.

A checkpoint ``step-N`` holds, whatever the ranks that wrote them:

- logical tensors by name: ``model.<fqn>`` (float32 masters), ``optimizer.<fqn>.<state>``, ``rng.<rank>.<generator>``;
- ``trainer.json``: step, position in the data, schedule, and which model and optimizer it is of;
- ``config.toml``: the resolved config; ``checksums.json``: size and CRC-32 of every file, written last.

``directory`` knows folders, ``saving`` and ``loading`` move tensors, ``huggingface`` converts, ``checkpointer``
decides.
"""

from torchtitan_dmuon.checkpoint.checkpointer import Checkpointer
from torchtitan_dmuon.checkpoint.directory import CheckpointError
from torchtitan_dmuon.checkpoint.saving import check_shared
from torchtitan_dmuon.checkpoint.state import Contents, Tensors, TrainState

__all__ = ["CheckpointError", "Checkpointer", "Contents", "Tensors", "TrainState", "check_shared"]
