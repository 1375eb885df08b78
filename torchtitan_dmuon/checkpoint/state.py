"""What a checkpoint holds: the tensors of a run (``Contents``), and ``trainer.json`` beside them (``TrainState``)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.checkpoint.directory import STATE_FILE, CheckpointError
from torchtitan_dmuon.config import JobConfig, config_to_toml
from torchtitan_dmuon.families import HFNameMap, get_model_args, get_model_spec

Tensors = dict[str, torch.Tensor]

# Values of TrainState.contents.
FULL, MODEL_ONLY, HUGGINGFACE = "full", "model", "huggingface"


@dataclass
class TrainState:
    """``trainer.json``.

    Attributes:
        step: optimizer steps done.
        loader: the data loader's state.
        lr_scheduler: steps the schedule has made, ``{"last_epoch": int}``.
        optimizer: name of the optimizer that wrote it.
        model: name and flavor of the model.
        world_size: number of ranks that wrote it.
        contents: ``full``, ``model`` (weights only) or ``huggingface``; only a full one can be resumed from.
        hf_config: content of a HuggingFace ``config.json`` for the model.
        muon: how the momentum was made (``dmuon.muon_recipe``).
    """

    step: int
    loader: dict[str, Any]
    lr_scheduler: dict[str, int]
    optimizer: str
    model: str
    world_size: int = 1
    contents: str = FULL
    hf_config: dict[str, Any] = field(default_factory=dict)
    muon: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> TrainState:
        """Read that of the checkpoint ``path``. Raises CheckpointError."""
        try:
            state = cls(**json.loads((path / STATE_FILE).read_text()))
            if state.contents not in (FULL, MODEL_ONLY, HUGGINGFACE):
                raise ValueError(f"contents is {state.contents!r}")
            return state
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: {STATE_FILE} cannot be read ({error})") from None


@dataclass
class Contents:
    """A run as the checkpointer sees it. None of the functions is collective.

    Attributes:
        model: the live model tensors of this rank, by name (``dmuon.get_model_state_dict``).
        optimizer: the same of the optimizer (``dmuon.get_optimizer_state_dict``).
        shapes: the global shape of every tensor of the model, by name, the same on every rank.
        frozen: names of the parameters that are not trained, the same on every rank.
        loaded: called after the tensors were filled.
        model_name, optimizer_name: as in ``TrainState``.
        config_toml: the resolved config.
        seed: ``debug.seed``; ranks that a checkpoint has no random state of start from it.
        hf_names: the model family's HuggingFace names.
        hf_config: the content of ``config.json``.
    """

    model: Callable[[], Tensors]
    optimizer: Callable[[], Tensors]
    shapes: Callable[[], dict[str, tuple[int, ...]]]
    frozen: Callable[[], set[str]]
    loaded: Callable[[], None]
    model_name: str
    optimizer_name: str
    config_toml: str
    seed: int
    hf_names: HFNameMap
    hf_config: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, model_args: Any, config: JobConfig) -> Contents:
        """The contents of a run. ``model`` is parallelized and built from ``model_args``."""
        spec = get_model_spec(config.model.name)
        # The run's longest sequence sizes its rotary table; the weights are for the flavor's.
        made_for = get_model_args(config.model.name, config.model.flavor).max_seq_len
        return cls(
            model=lambda: dmuon.get_model_state_dict(model),
            optimizer=lambda: dmuon.get_optimizer_state_dict(model, optimizer),
            shapes=lambda: dmuon.get_model_shapes(model),
            frozen=lambda: {dmuon.canonical_fqn(name) for name, p in model.named_parameters() if not p.requires_grad},
            loaded=lambda: dmuon.publish_weights(model),
            model_name=f"{config.model.name} {config.model.flavor}",
            optimizer_name=config.optimizer.name,
            config_toml=config_to_toml(config),
            seed=config.debug.seed,
            hf_names=spec.hf,
            hf_config=spec.hf.hf_config(dataclasses.replace(model_args, max_seq_len=made_for)),
        )
