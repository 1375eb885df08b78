"""The optimizer: Muon on the matrices this rank owns, AdamW on everything FSDP2 (or nobody) shards."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from . import adamw
from .fsdp2 import sharded_parameters
from .newton_schulz import NewtonSchulz
from .param_groups import lower_param_groups
from .runtime import runtime_of
from .storage import Piece

# Elements of one float32 stack in the update; the workspace of a step is a small multiple of it.
_STACK_ELEMENTS = 1 << 27

SCALES: dict[str, Callable[[int, int], float]] = {
    # The update's RMS matches AdamW's (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982).
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    # Keller Jordan's, "Muon", 2024: tall matrices move more.
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    # Bernstein, "Deriving Muon", 2025: the update has spectral norm sqrt(out / in).
    "spectral": lambda m, n: math.sqrt(m / n),
    "unit": lambda m, n: 1.0,
}


class MatrixStack:
    """The owned matrices of one shape in one parameter group: one momentum tensor, one Newton-Schulz.

    Attributes:
        pieces: each [m, n], or [E, m, n] with E matrices.
        momentum: [B, m, n] in ``optim_dtype``.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.matrix_shape = pieces[0].shape[-2:]
        self._ends = list(itertools.accumulate(piece.numel // math.prod(self.matrix_shape) for piece in pieces))
        first = pieces[0]
        self.momentum = torch.zeros(
            (self._ends[-1], *self.matrix_shape), dtype=first.spec.optim_dtype, device=first.master.device
        )

    def momentum_of(self, index: int) -> torch.Tensor:
        """The momentum of one piece, in its shape."""
        start = self._ends[index - 1] if index else 0
        return self.momentum[start : self._ends[index]].view(self.pieces[index].shape)

    def chunks(self) -> Iterator[tuple[list[Piece], torch.Tensor]]:
        """Runs of pieces that fit the workspace (or one piece that does not), with their momentum."""
        first = begin = 0
        for index, end in enumerate(self._ends):
            following = self._ends[index + 1] if index + 1 < len(self._ends) else None
            if following is None or (following - begin) * math.prod(self.matrix_shape) > _STACK_ELEMENTS:
                yield self.pieces[first : index + 1], self.momentum[begin:end]
                first, begin = index + 1, end


class Muon(torch.optim.Optimizer):
    """Muon for dedicated parameters and AdamW for the others, in one optimizer.

    Group 0 holds the matrices on the Muon route and group 1 the rest; both have the same content on every rank, while
    state exists on owners only. The momentum is heavy-ball, ``M = mu M + G``; the Nesterov input is ``G + mu M``.
    A step decays first, ``W *= 1 - lr * weight_decay``, then ``W -= lr * scale * U`` with, by default,
    ``scale = 0.2 * sqrt(max(m, n))`` (Liu et al., arXiv 2502.16982). Defaults are the guide's.

    ``step`` consumes the gradients: a second ``step`` without a backward in between does nothing.

    Args:
        model: after ``dedicate_params`` (and ``fully_shard`` if used), all weights materialised.
        lr, momentum, ns_steps, nesterov, weight_decay: of the Muon group.
        adamw_lr, adamw_betas, adamw_weight_decay, adamw_eps: of the AdamW group.
        param_groups: semantic groups, each lowered into ``<name>/muon`` and ``<name>/adamw``: see ``param_groups.py``.
            Its keys override the arguments above.
        ns_backend: ``gram``, ``direct`` or a ``NewtonSchulz``, whose own number of steps then counts.
        scale: per-matrix factor of the update, a name of ``SCALES``.
        adamw_implementation: ``fused``, ``foreach`` or ``for-loop``.

    Raises:
        ValueError: a value out of range. RuntimeError: not dedicated, or still on meta.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        ns_steps: int = 5,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_weight_decay: float = 0.01,
        adamw_eps: float = 1e-8,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        ns_backend: str | NewtonSchulz = "gram",
        scale: str = "match_rms_adamw",
        adamw_implementation: str = "fused",
    ) -> None:
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {tuple(SCALES)}, got {scale!r}")
        self.runtime = runtime_of(model)
        for piece in self.runtime.owned:
            if piece.master is None:
                raise RuntimeError(
                    f"{piece.fqn} has no weight yet: call dmuon.materialize before building the optimizer"
                )
        if not isinstance(ns_backend, NewtonSchulz):
            ns_backend = NewtonSchulz(ns_backend, steps=ns_steps)
        self.newton_schulz = ns_backend
        self._scale = SCALES[scale]
        dedicated = {dp.param for dp in self.runtime.params}
        trainable = {name: p for name, p in sharded_parameters(model) if p.requires_grad}
        others = [param for param in trainable.values() if param not in dedicated]
        groups = lower_param_groups(
            param_groups,
            trainable,
            self.runtime.params,
            {
                "muon_lr": lr,
                "adamw_lr": adamw_lr,
                "muon_weight_decay": weight_decay,
                "adamw_weight_decay": adamw_weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "adamw_betas": adamw_betas,
                "adamw_eps": adamw_eps,
            },
        )
        super().__init__(groups, defaults={})
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._undedicated = {id(param) for param in others}
        self.plain_adamw = self._build_adamw(adamw_implementation)
        self._stacks, self._adamw_pieces = self._build_owned()

    def _build_adamw(self, implementation: str) -> list[tuple[dict[str, Any], torch.optim.AdamW]]:
        """For each AdamW group, PyTorch's own AdamW over its parameters that are not dedicated, on the same state. Its
        groups keep DTensors of different meshes apart, which no fused kernel takes together."""
        built = []
        for group in self.param_groups:
            kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
            for param in group["params"]:
                if id(param) in self._undedicated:
                    kinds[param.device_mesh if isinstance(param, DTensor) else None].append(param)
            if kinds:
                options = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
                plain = torch.optim.AdamW([{"params": params} for params in kinds.values()], **options)
                plain.state = self.state
                built.append((group, plain))
        return built

    def _build_owned(
        self,
    ) -> tuple[list[tuple[dict[str, Any], MatrixStack]], list[tuple[dict[str, Any], Piece]]]:
        """The stacks and the AdamW pieces of this rank, each with its group; their state is created here."""
        pieces: dict[nn.Parameter, list[Piece]] = defaultdict(list)
        for piece in self.runtime.owned:
            if piece.spec.trainable:
                pieces[piece.param].append(piece)
        stacks, adamw_pieces = [], []
        for group in self.param_groups:
            by_shape: dict[tuple, list[Piece]] = defaultdict(list)
            for piece in (piece for param in group["params"] for piece in pieces.get(param, ())):
                if piece.spec.route == "muon":
                    by_shape[(piece.shape[-2:], piece.spec.optim_dtype)].append(piece)
                else:
                    state = adamw.new_state(piece.master, piece.master.device, piece.spec.optim_dtype)
                    self.state[piece.param].update(state)
                    adamw_pieces.append((group, piece))
            for stacked in by_shape.values():
                stack = MatrixStack(stacked)
                for index, piece in enumerate(stacked):
                    self.state[piece.param][state_key(piece, "momentum_buffer")] = stack.momentum_of(index)
                stacks.append((group, stack))
        return stacks, adamw_pieces

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The state of one owned piece, by its plain names."""
        names = ("momentum_buffer",) if piece.spec.route == "muon" else ("step", "exp_avg", "exp_avg_sq")
        return {name: self.state[piece.param][state_key(piece, name)] for name in names}

    @torch.no_grad()
    def step(
        self, closure: Callable[[], torch.Tensor] | None = None, *, found_inf: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Wait for the gradients, update what this rank owns and its AdamW shards, and publish the new weights.

        Args:
            closure: evaluated first, as in every PyTorch optimizer.
            found_inf: 0-D float tensor on the device. Where it is not zero nothing moves, without the host having to
                know. Needs ``adamw_implementation="fused"``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self.runtime
        runtime.wait_gradients()
        if runtime.schedule.has_gradients:
            runtime.wait_publish()  # sources may be masters
            for group, stack in self._stacks:
                for pieces, momentum in stack.chunks():
                    self._update(group, pieces, momentum, found_inf)
            for group, piece in self._adamw_pieces:
                adamw.update(piece, self.state[piece.param], group, found_inf)
            runtime.publish()
        for group, plain in self.plain_adamw:
            for inner in plain.param_groups:
                inner.update({key: group[key] for key in ("lr", "betas", "weight_decay", "eps")})
            if found_inf is not None:
                # The protocol of torch.amp.GradScaler, which the fused kernels implement.
                plain.found_inf, plain.grad_scale = found_inf, None
            plain.step()
            if found_inf is not None:
                del plain.found_inf, plain.grad_scale
        self.zero_grad()
        for module in self._fsdp_modules:
            module.reshard()  # FSDP2 leaves its root unsharded after a forward without backward: stale from here on
        if os.environ.get("DMUON_ISOLATED_PG_BARRIER") == "1":
            runtime.barrier()
        return loss

    def _update(
        self,
        group: dict[str, Any],
        pieces: list[Piece],
        momentum: torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Momentum, Newton-Schulz and weight update of B equal matrices [m, n]. What depends on the data (was there
        any gradient, is everything finite) stays on the device as 0/1 factors, so the host never waits."""
        shape = momentum.shape[1:]
        grads = torch.cat([piece.grad.view(-1, *shape) for piece in pieces]).to(momentum.dtype)
        counts = torch.cat([piece.grad_count.expand(piece.numel // shape.numel()) for piece in pieces])
        moves = counts.ne(0).float()  # [B]
        if found_inf is not None:
            moves = moves * (found_inf == 0)
            grads.masked_fill_(moves.eq(0)[:, None, None], 0.0)
        mu = group["momentum"]
        momentum.mul_((1.0 - (1.0 - mu) * moves).to(momentum.dtype)[:, None, None]).add_(grads)
        update = grads.add_(momentum, alpha=mu) if group["nesterov"] else momentum
        update = self.newton_schulz(update)
        update.mul_((group["lr"] * self._scale(*shape) * moves)[:, None, None])
        decay = 1.0 - group["lr"] * group["weight_decay"] * moves
        start = 0
        for piece in pieces:
            stop = start + piece.numel // shape.numel()
            master = piece.master.view(-1, *shape)
            master.mul_(decay[start:stop, None, None]).sub_(update[start:stop])
            start = stop

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient: reduced, in flight, and of FSDP2 parameters."""
        self.runtime.zero_grad()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def state_key(piece: Piece, name: str) -> str:
    """Key of a piece's state in ``optimizer.state[param]``; parts of a stack are told apart by their range."""
    return name if piece.is_whole or piece.spec.route == "sharded_adamw" else f"{name}[{piece.start}:{piece.stop}]"
