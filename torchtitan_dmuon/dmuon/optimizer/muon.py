"""The optimizer: Muon on the matrices this rank owns, AdamW on everything else."""

from __future__ import annotations

import inspect
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from ..kernels.newton_schulz import NewtonSchulz
from ..migration import refuse
from ..ownership.classify import canonical_fqn
from ..runtime.handle import Runtime, runtime_of
from ..runtime.param import Piece
from ..transport.torch_private import drop_fsdp_gradients, sharded_parameters
from . import adamw
from .groups import lower_param_groups
from .matrices import MatrixView
from .named_state import NamedState
from .normuon import NorMuon
from .stack import SCALES, MatrixStack, UpdateRule


class AfterUpdate(Protocol):
    """What ``qk_clip`` must be able to do."""

    def check(self, runtime: Runtime) -> None:
        """Raises ValueError, on every rank, for a model it cannot work on."""

    def after_update(self, runtime: Runtime, found_inf: torch.Tensor | None) -> None:
        """Change masters and compute weights that this rank owns, before they are published. May be collective."""


class Muon(NamedState):
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
        param_groups: semantic groups, each lowered into ``<name>/muon`` and ``<name>/adamw``: see ``groups.py``. Their
            keys override the arguments above.
        ns_backend: ``gram``, ``direct`` or a ``NewtonSchulz``, whose own number of steps then counts.
        scale: per-matrix factor of the update, a name of ``SCALES``.
        normuon: NorMuon's equalised neurons (``normuon.py``), with ``normuon_beta2``.
        cautious_weight_decay: matrices decay only where the update does not oppose it (Chen et al., arXiv 2510.12402).
        qk_clip: a ``QKClip``, which bounds attention logits after every update.
        adamw_implementation: ``fused``, ``foreach`` or ``for-loop``.
        gradients_reduced_elsewhere: the caller averages gradients of parameters without owner, shards or DDP.
        replicate_async: new weights travel to replicas and tensor-parallel shards while the next step begins.

    Raises:
        ValueError: a value out of range, or a parameter whose gradient nobody averages over the ranks.
        RuntimeError: not dedicated, still on meta, or frozen or unfrozen since it was dedicated.
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
        normuon: bool = False,
        normuon_beta2: float = 0.95,
        cautious_weight_decay: bool = False,
        qk_clip: AfterUpdate | None = None,
        adamw_implementation: str = "fused",
        gradients_reduced_elsewhere: bool = False,
        replicate_async: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            refuse("Muon", unknown, inspect.signature(Muon).parameters)
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {tuple(SCALES)}, got {scale!r}")
        if adamw_implementation not in adamw.IMPLEMENTATIONS:
            known = f"one of {adamw.IMPLEMENTATIONS}"
            raise ValueError(f"adamw_implementation must be {known}, got {adamw_implementation!r}")
        if not isinstance(ns_backend, NewtonSchulz):
            ns_backend = NewtonSchulz(ns_backend, steps=ns_steps)
        adjust = NorMuon(normuon_beta2)  # checks its argument also where it is not used
        self.normuon = adjust if normuon else None
        self.newton_schulz = ns_backend
        self.rule = UpdateRule(ns_backend, scale, cautious_weight_decay, self.normuon)
        self.runtime = runtime_of(model)
        self._check_runtime()
        self.runtime.replicate_async = replicate_async
        self.qk_clip = qk_clip
        if qk_clip is not None:
            qk_clip.check(self.runtime)
        trainable = {canonical_fqn(name): p for name, p in sharded_parameters(model) if p.requires_grad}
        if not gradients_reduced_elsewhere:
            adamw.check_reduced(model, {param: name for name, param in trainable.items()}, self.runtime.grid)
        defaults = {
            "muon_lr": lr,
            "adamw_lr": adamw_lr,
            "muon_weight_decay": weight_decay,
            "adamw_weight_decay": adamw_weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        self.dedicated = dedicated = self.runtime.params
        groups = lower_param_groups(param_groups, trainable, dedicated, self.runtime.specs, defaults)
        if self.normuon is not None:  # on every rank, not on the owner alone
            self.normuon.check(dedicated)
        super().__init__(groups, defaults={})
        self.names = {param: name for name, param in trainable.items()} | {dp.param: dp.fqn for dp in dedicated}
        self.frozen = {canonical_fqn(name) for name, _ in model.named_parameters()} - trainable.keys()
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._adamw_implementation = adamw_implementation
        left_out = {dp.param for dp in dedicated}
        self._plain_adamw = adamw.build_plain(self.param_groups, left_out, adamw_implementation, self.state)
        self._lay_out()

    def _check_runtime(self) -> None:
        self.runtime.check_usable("building the optimizer")
        for dp in self.runtime.params:
            if dp.spec.trainable != dp.param.requires_grad:
                told = f"requires_grad is {dp.param.requires_grad} and was {dp.spec.trainable} when it was dedicated"
                raise RuntimeError(f"{dp.fqn}: {told}; set it before dedicate_params")

    def _lay_out(self) -> None:
        """Create the state of what this rank owns and set the order of its updates. The largest stack comes first, and
        what arrives last in backward comes last in its stack: the step begins meanwhile."""
        # The state of no rank is empty, which PyTorch would take for an optimizer that has made no step.
        self.state.update((dp.param, {}) for dp in self.dedicated)
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        views: dict[tuple, list[MatrixView]] = defaultdict(list)
        adamw_pieces: dict[torch.Tensor, list[Piece]] = defaultdict(list)
        arriving = (piece for unit in self.runtime.schedule.reduce_order for piece in unit.owned)
        for piece in (piece for piece in arriving if piece.spec.trainable):
            self._create_state(piece)
            if piece.spec.route != "muon":
                adamw_pieces[piece.param].append(piece)
                continue
            sent = None if piece.compute_weight is None else piece.compute_weight.dtype
            alike = (id(group_of[piece.param]), piece.spec.transposed, piece.spec.optim_dtype, sent)
            for block in (None,) if piece.spec.blocks is None else piece.spec.blocks.blocks:
                view = MatrixView(piece, block, self.state_of(piece))
                views[(view.shape, *alike)].append(view)
        stacks = [MatrixStack(found, group_of[found[0].piece.param], self.rule) for found in views.values()]
        self._stacks = sorted(stacks, key=lambda stack: stack.count * math.prod(stack.shape), reverse=True)
        self._adamw_pieces = [(group_of[param], pieces) for param, pieces in adamw_pieces.items()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For PyTorch's constructor. Raises RuntimeError afterwards: the state is laid out once."""
        if "_stacks" in vars(self):
            raise RuntimeError("Muon takes no further parameters: build it anew with all of its param_groups")
        super().add_param_group(param_group)

    @property
    def newton_schulz_flops(self) -> int:
        """Floating-point operations of Newton-Schulz in one step on this rank."""
        return sum(stack.count * self.newton_schulz.flops(*stack.shape) for stack in self._stacks)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], torch.Tensor] | None = None, *, found_inf: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Wait for the gradients, update what this rank owns and its AdamW shards, and publish the new weights.

        Args:
            closure: evaluated first, as in every PyTorch optimizer.
            found_inf: 0-D float tensor on the device. Where it is not zero (or NaN) nothing moves, and the host does
                not wait. Needs ``adamw_implementation="fused"``.

        Raises:
            ValueError: ``found_inf`` with an AdamW that is not fused.
            RuntimeError: ``torch.amp.GradScaler`` has unscaled only a part of the gradients.
        """
        found_inf, grad_scale = self._scaler_orders(found_inf)
        if found_inf is not None:
            if self._plain_adamw is not None and self._adamw_implementation != "fused":
                raise ValueError(
                    f"found_inf needs adamw_implementation='fused', this optimizer has {self._adamw_implementation!r}"
                )
            # A summed flag may be 2; PyTorch's fused AdamW skips at 1 only, and takes the flag off its step count.
            found_inf = (found_inf != 0).float()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.runtime.collect_gradients()
        if self.runtime.schedule.has_gradients:
            if grad_scale is not None:
                self._scale_owned(1.0 / grad_scale)
            self._update_owned(found_inf)
            self.runtime.publish()
        if self._plain_adamw is not None:
            with record_function("dmuon/adamw (FSDP2)"):
                adamw.step_plain(self._plain_adamw, found_inf, grad_scale)
        self.zero_grad()
        for module in self._fsdp_modules:
            module.reshard()  # FSDP2 leaves its root unsharded after a forward without backward: stale from here on
        if os.environ.get("DMUON_ISOLATED_PG_BARRIER") == "1":
            self.runtime.barrier()
        return loss

    def _update_owned(self, found_inf: torch.Tensor | None) -> None:
        self.runtime.begin_update()
        for stack in self._stacks:
            with record_function(f"dmuon/newton_schulz {stack}"):
                stack.update(found_inf)
        for group, pieces in self._adamw_pieces:
            with record_function(f"dmuon/adamw {pieces[0].fqn}"):
                adamw.update_pieces(pieces, [self.state_of(piece) for piece in pieces], group, found_inf)
        if self.qk_clip is not None:
            self.qk_clip.after_update(self.runtime, found_inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient: reduced, in flight, held back for accumulation, and of FSDP2 parameters."""
        self.runtime.schedule.drop_gradients()
        self._unscaled = False
        drop_fsdp_gradients(self._fsdp_modules)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None
