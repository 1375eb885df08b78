"""The optimizer: Muon on the matrices this rank owns, AdamW on everything FSDP2 (or nobody) shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .fsdp2 import sharded_parameters
from .newton_schulz import NewtonSchulz
from .runtime import runtime_of
from .storage import DedicatedParam

# Elements of one float32 stack in the update; the workspace of a step is a small multiple of it.
_STACK_ELEMENTS = 1 << 27

SCALES: dict[str, Callable[[int, int], float]] = {
    # The update's RMS matches AdamW's (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982).
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


class MatrixStack:
    """The owned matrices of one shape in one parameter group: one momentum tensor, one Newton-Schulz.

    Attributes:
        params: B dedicated parameters [m, n].
        momentum: [B, m, n] in ``optim_dtype``.
    """

    def __init__(self, params: list[DedicatedParam]) -> None:
        self.params = params
        first = params[0]
        self.momentum = torch.zeros(
            (len(params), *first.shape), dtype=first.spec.optim_dtype, device=first.master.device
        )

    def chunks(self) -> Iterable[tuple[list[DedicatedParam], torch.Tensor]]:
        """Parts that fit the workspace, with their momentum."""
        size = max(1, _STACK_ELEMENTS // math.prod(self.params[0].shape))
        for start in range(0, len(self.params), size):
            yield self.params[start : start + size], self.momentum[start : start + size]


class Muon(torch.optim.Optimizer):
    """Muon for dedicated parameters and AdamW for the others, in one optimizer.

    Group 0 holds the dedicated parameters and group 1 the rest; both have the same content on every rank, while
    state exists on owners only. The momentum is heavy-ball, ``M = mu M + G``; the Nesterov input is ``G + mu M``.
    A step decays first, ``W *= 1 - lr * weight_decay``, then ``W -= lr * 0.2 * sqrt(max(m, n)) * U`` (Liu et al.,
    arXiv 2502.16982). Defaults are the guide's.

    ``step`` consumes the gradients: a second ``step`` without a backward in between does nothing.

    Args:
        model: after ``dedicate_params`` (and ``fully_shard`` if used), all weights materialised.
        lr, momentum, ns_steps, nesterov, weight_decay: of the Muon group.
        adamw_lr, adamw_betas, adamw_weight_decay, adamw_eps: of the AdamW group.
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
        ns_backend: str | NewtonSchulz = "gram",
        scale: str = "match_rms_adamw",
        adamw_implementation: str = "fused",
    ) -> None:
        _check_hyperparameters(lr=lr, weight_decay=weight_decay, momentum=momentum, adamw_lr=adamw_lr)
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {tuple(SCALES)}, got {scale!r}")
        self.runtime = runtime_of(model)
        for dp in self.runtime.owned:
            if dp.master is None:
                raise RuntimeError(f"{dp.fqn} has no weight yet: call dmuon.materialize before building the optimizer")
        if not isinstance(ns_backend, NewtonSchulz):
            ns_backend = NewtonSchulz(ns_backend, steps=ns_steps)
        self.newton_schulz = ns_backend
        self._scale = SCALES[scale]
        muon_group = {
            "params": [dp.param for dp in self.runtime.params],
            "group_name": "muon",
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        dedicated = {id(dp.param) for dp in self.runtime.params}
        others = [param for _, param in sharded_parameters(model) if id(param) not in dedicated and param.requires_grad]
        self._adamw: torch.optim.AdamW | None = None
        groups: list[dict[str, Any]] = [muon_group]
        if others:
            self._adamw = torch.optim.AdamW(
                [{"params": others, "group_name": "adamw"}],
                lr=adamw_lr,
                betas=adamw_betas,
                weight_decay=adamw_weight_decay,
                eps=adamw_eps,
                fused=adamw_implementation == "fused",
                foreach=adamw_implementation == "foreach",
            )
            groups += self._adamw.param_groups
        super().__init__(groups, defaults={})
        if self._adamw is not None:
            # One set of groups and one state for both, so schedulers and checkpoints see a single optimizer.
            self._adamw.param_groups = self.param_groups[1:]
            self._adamw.state = self.state
        self._by_param = {dp.param: dp for dp in self.runtime.params}
        self._stacks = self._build_stacks()

    def _build_stacks(self) -> list[tuple[dict[str, Any], MatrixStack]]:
        stacks = []
        for group in self.param_groups:
            by_shape: dict[tuple, list[DedicatedParam]] = defaultdict(list)
            for dp in (self._by_param[param] for param in group["params"] if param in self._by_param):
                if dp.is_owned and dp.spec.trainable:
                    by_shape[(dp.shape, dp.spec.optim_dtype)].append(dp)
            for params in by_shape.values():
                stack = MatrixStack(params)
                for index, dp in enumerate(params):
                    self.state[dp.param] = {"momentum_buffer": stack.momentum[index]}
                stacks.append((group, stack))
        return stacks

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
        self.runtime.wait_gradients()
        if self.runtime.schedule.has_gradients:
            for group, stack in self._stacks:
                for params, momentum in stack.chunks():
                    self._update(group, params, momentum, found_inf)
            self.runtime.publish()
        if self._adamw is not None:
            if found_inf is not None:
                # The protocol of torch.amp.GradScaler, which the fused kernels implement.
                self._adamw.found_inf, self._adamw.grad_scale = found_inf, None
            self._adamw.step()
            if found_inf is not None:
                del self._adamw.found_inf, self._adamw.grad_scale
        self.zero_grad()
        return loss

    def _update(
        self,
        group: dict[str, Any],
        params: list[DedicatedParam],
        momentum: torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Momentum, Newton-Schulz and weight update of B equal matrices [m, n]. What depends on the data (was there
        any gradient, is everything finite) stays on the device as 0/1 factors, so the host never waits."""
        grads = torch.stack([dp.grad for dp in params]).to(momentum.dtype)
        moves = torch.stack([dp.grad_count for dp in params]).ne(0).float()  # [B]
        if found_inf is not None:
            moves = moves * (found_inf == 0)
            grads.masked_fill_(moves.eq(0)[:, None, None], 0.0)
        mu = group["momentum"]
        momentum.mul_((1.0 - (1.0 - mu) * moves).to(momentum.dtype)[:, None, None]).add_(grads)
        update = grads.add_(momentum, alpha=mu) if group["nesterov"] else momentum
        update = self.newton_schulz(update)
        update.mul_((group["lr"] * self._scale(*params[0].shape) * moves)[:, None, None])
        decay = 1.0 - group["lr"] * group["weight_decay"] * moves
        for index, dp in enumerate(params):
            dp.master.mul_(decay[index]).sub_(update[index])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient: reduced, in flight, and of FSDP2 parameters."""
        self.runtime.zero_grad()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def _check_hyperparameters(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < math.inf or (name == "momentum" and value >= 1.0):
            raise ValueError(f"{name} is out of range: {value}")
