"""The registry of model families.

A family describes itself to the trainer by a `ModelSpec`; this module finds it by name and flavor. Each family is a
folder whose `__init__.py` defines `spec`, and the folder's name is the family's; the other files of `models/` are
shared. The registry imports a family on its first use, so that the users of one family do not pay for another one that
is broken or heavy.

Nothing in `models` imports `torchtitan_dmuon`: a model is a plain `nn.Module` without any parallelism.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "AttentionHeads",
    "HFNameMap",
    "HeadRows",
    "ModelSpec",
    "Parts",
    "TensorParallelPlan",
    "get_model_args",
    "get_model_spec",
    "model_names",
]

# Module name -> how torch.distributed.tensor.parallel.parallelize_module splits the module.
TensorParallelPlan = dict[str, Any]


class HFNameMap(Protocol):
    """A family's parameter names in HuggingFace checkpoints. Names only: tensors are never permuted.

    Attributes:
        embedding, head: our FQNs of the two weights that are one tensor in a tied model.
    """

    embedding: str
    head: str

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
class Parts:
    """The modules of a model that parallelisms treat apart.

    Attributes:
        blocks: the repeated blocks; wrappers replace the elements in place.
        embeddings: every module that is read by token or position.
        norm: the norm after the last block.
        head: the linear layer from the residual stream to logits. In a tied model its weight is an embedding's.
        block_inputs: tokens of a sequence -> what every block takes beside the residual stream.
    """

    blocks: nn.ModuleList
    embeddings: Sequence[nn.Module]
    norm: nn.Module
    head: nn.Linear
    block_inputs: Callable[[int], Sequence[Tensor]]

    @property
    def is_tied(self) -> bool:
        """Whether the head has a parameter that an embedding has, too."""
        shared = {id(param) for module in self.embeddings for param in module.parameters()}
        return any(id(param) in shared for param in self.head.parameters())


@dataclass(frozen=True)
class HeadRows:
    """The rows of one weight that make one part of each head's query or key: of head h the `size` rows from
    `start + h * stride` on. QK-clip multiplies them by gamma_h to the power `exponent`.

    Attributes:
        weight: the weight's name inside the attention layer.
    """

    weight: str
    start: int
    size: int
    stride: int
    exponent: float


@dataclass(frozen=True)
class AttentionHeads:
    """One attention layer, as QK-clip and the split of its weights into heads see it.

    Attributes:
        attention: the layer, a module of the model.
        n_heads: query heads.
        clipped: the rows by which QK-clip lowers a head's logits. None where a norm follows the projections: there the
            size of the weights does not reach the logits.
        split: name of a weight inside the layer -> rows of one head, for weights that hold one head below the other.
        track_max_logits: (device, tensor-parallel degree) -> the buffer in which every forward from then on notes the
            largest logit of each head: fp32 [n_heads / degree].
    """

    attention: nn.Module
    n_heads: int
    clipped: tuple[HeadRows, ...] | None
    split: Mapping[str, int]
    track_max_logits: Callable[[torch.device, int], Tensor]


def _no_rules(args: Any) -> list[dict[str, Any]]:
    return []


def _no_hooks(model: nn.Module, optimizer: torch.optim.Optimizer, meshes: Any) -> None:
    pass


@dataclass(frozen=True)
class ModelSpec:
    """One model family.

    Attributes:
        name: the family's name, as in `[model] name`.
        flavors: flavor name -> a frozen dataclass of model args. The `vocab_size` of a flavor for any tokenizer is
            None; the caller sets it with `dataclasses.replace` before `build`.
        build: args -> the model, whose `args` they are. Under `torch.device("meta")` `build` allocates nothing; the
            caller then materialises the parameters and calls the model's `tie_weights`, `init_buffers` and
            `init_parameter`.
        parts: model -> its modules. Also of a model whose blocks are wrapped.
        flops_per_token: (model, args, seq_len) -> FLOPs of one token's forward and backward, the numerator of MFU. The
            model may be on meta. `models/flops.py` has what families share.
        hf: the map between our parameter names and HuggingFace's.
        tensor_parallel_plan: (args, loss_parallel) -> (the plan outside the blocks, the plan of each block).
        divisible: args -> name of a size -> the size, which the tensor-parallel degree must divide.
        qk_heads: model -> its attention layers, in order. Also of a model whose blocks are wrapped.
        matrices: args -> rules of `dmuon.dedicate_params(param_policy={"overrides": ...})` for weights that are stored
            fused or transposed. A weight that no rule names is one matrix [out, in], or a stack of them.
        after_build: called on every rank with model, optimizer and meshes before the first step: hooks that act on
            optimizer steps go here.
    """

    name: str
    flavors: Mapping[str, Any]
    build: Callable[[Any], nn.Module]
    parts: Callable[[nn.Module], Parts]
    flops_per_token: Callable[[nn.Module, Any, int], int]
    hf: HFNameMap
    tensor_parallel_plan: Callable[[Any, bool], tuple[TensorParallelPlan, list[TensorParallelPlan]]]
    divisible: Callable[[Any], Mapping[str, int]]
    qk_heads: Callable[[nn.Module], Sequence[AttentionHeads]]
    matrices: Callable[[Any], list[dict[str, Any]]] = _no_rules
    after_build: Callable[[nn.Module, torch.optim.Optimizer, Any], None] = _no_hooks


def model_names() -> tuple[str, ...]:
    """The names `get_model_spec` knows: those of the folders here."""
    return tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py")))


def get_model_spec(name: str) -> ModelSpec:
    """Return the family called `name`. Raises ValueError naming the known families if there is none."""
    if name not in (known := model_names()):
        raise ValueError(_unknown("model", name, known))
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
