"""The registry of model families.

A family describes itself to the trainer by a `ModelSpec`; this module finds it by name and flavor. Each family is a
folder whose `__init__.py` defines `spec`; `models/layers.py` has the layers that families share. The registry imports a
family on its first use, so that the users of one family do not pay for another one that is broken or heavy.

Nothing in `models` imports `torchtitan_dmuon`: a model is a plain `nn.Module` without any parallelism.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from torch import nn

__all__ = ["HFNameMap", "ModelSpec", "get_model_args", "get_model_spec", "model_names"]

# Families by the name used in `[model] name`; each is the package `models.<name>`.
_FAMILIES = ("llama3",)


class HFNameMap(Protocol):
    """A family's parameter names in HuggingFace checkpoints. Names only: tensors are never permuted."""

    def to_hf(self, fqn: str) -> str:
        """Our FQN -> the HuggingFace name. Raises ValueError for a name the family does not have."""
        ...

    def from_hf(self, name: str) -> str | None:
        """The HuggingFace name -> our FQN; None for a tensor that is no weight, such as a saved rotary buffer."""
        ...

    def hf_config(self, args: Any) -> dict[str, Any]:
        """The content of `config.json` for a model of these args."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """One model family.

    Attributes:
        name: the family's name, as in `[model] name`.
        flavors: flavor name -> a frozen dataclass of model args. The `vocab_size` of a flavor for any tokenizer is
            None; the caller sets it with `dataclasses.replace` before `build`.
        build: args -> the model. Under `torch.device("meta")` `build` allocates nothing; the caller then materialises
            the parameters and calls the model's `tie_weights`, `init_buffers` and `init_parameter`.
        hf: the map between our parameter names and HuggingFace's.
        tensor_parallel_plan: loss_parallel -> (plan outside the blocks, plan of one block) for
            `torch.distributed.tensor.parallel.parallelize_module`.
    """

    name: str
    flavors: Mapping[str, Any]
    build: Callable[[Any], nn.Module]
    hf: HFNameMap
    tensor_parallel_plan: Callable[[bool], tuple[dict[str, Any], dict[str, Any]]]


def model_names() -> tuple[str, ...]:
    """The names `get_model_spec` knows."""
    return _FAMILIES


def get_model_spec(name: str) -> ModelSpec:
    """Return the family called `name`. Raises ValueError naming the known families if there is none."""
    if name not in _FAMILIES:
        raise ValueError(_unknown("model", name, _FAMILIES))
    return import_module(f"models.{name}").spec


def get_model_args(name: str, flavor: str) -> Any:
    """Return the args of a family's flavor. Raises ValueError naming the known ones if there is none."""
    flavors = get_model_spec(name).flavors
    if flavor not in flavors:
        raise ValueError(_unknown(f"flavor of {name}", flavor, flavors))
    return flavors[flavor]


def _unknown(what: str, given: str, known: Iterable[str]) -> str:
    known = list(known)
    by_lowercase = {item.lower(): item for item in known}
    # cutoff 0: among a handful of names the message always names the nearest one.
    nearest = difflib.get_close_matches(given.lower(), by_lowercase, n=1, cutoff=0.0)
    return f"unknown {what} {given!r}: did you mean {by_lowercase[nearest[0]]!r}? Known: {', '.join(known)}"
