"""The optimizer: Muon on the matrices this rank owns, AdamW on everything FSDP2 (or nobody) shards."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..extras.qk_clip import QKClip
from ..kernels.newton_schulz import NewtonSchulz
from ..ownership.classify import canonical_fqn
from ..runtime.handle import runtime_of
from ..runtime.param import DedicatedParam, Piece
from ..state.optimizer import load_optimizer_state_dict, optimizer_state_dict
from ..transport.torch_private import drop_fsdp_gradients, sharded_parameters
from . import adamw
from .groups import lower_param_groups
from .stack import SCALES, MatrixStack, MatrixView, UpdateRule, check_normuon, neuron_dim

ADAMW_IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


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
        param_groups: semantic groups, each lowered into ``<name>/muon`` and ``<name>/adamw``: see ``groups.py``.
            Its keys override the arguments above.
        ns_backend: ``gram``, ``direct`` or a ``NewtonSchulz``, whose own number of steps then counts.
        scale: per-matrix factor of the update, a name of ``SCALES``.
        normuon: NorMuon's equalised neurons (Li et al., arXiv 2510.05491), with ``normuon_beta2``.
        cautious_weight_decay: matrices decay only where the update does not oppose it (Chen et al., arXiv 2510.12402).
        qk_clip: bounds attention logits after every update (``qk_clip.py``).
        adamw_implementation: ``fused``, ``foreach`` or ``for-loop``.

    Raises:
        ValueError: a value out of range.
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
        qk_clip: QKClip | None = None,
        adamw_implementation: str = "fused",
    ) -> None:
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {tuple(SCALES)}, got {scale!r}")
        if adamw_implementation not in ADAMW_IMPLEMENTATIONS:
            raise ValueError(
                f"adamw_implementation must be one of {ADAMW_IMPLEMENTATIONS}, got {adamw_implementation!r}"
            )
        if not 0.0 <= normuon_beta2 < 1.0:
            raise ValueError(f"normuon_beta2 is out of range: {normuon_beta2}")
        self.runtime = runtime_of(model)
        self.runtime.check_materialised("building the optimizer")
        for dp in self.runtime.params:
            if dp.spec.trainable != dp.param.requires_grad:
                raise RuntimeError(
                    f"{dp.fqn}: requires_grad is {dp.param.requires_grad} and was {dp.spec.trainable} when it was "
                    "dedicated, for which everything is built; set it before dedicate_params"
                )
        if not isinstance(ns_backend, NewtonSchulz):
            ns_backend = NewtonSchulz(ns_backend, steps=ns_steps)
        self.newton_schulz = ns_backend
        beta2 = normuon_beta2 if normuon else None
        self.rule = UpdateRule(scale, beta2, cautious_weight_decay)
        self.qk_clip = qk_clip
        if qk_clip is not None:
            qk_clip.check(self.runtime)
        dedicated = {dp.param for dp in self.runtime.params}
        trainable = {name: p for name, p in sharded_parameters(model) if p.requires_grad}
        others = [param for param in trainable.values() if param not in dedicated]
        groups = lower_param_groups(
            param_groups,
            trainable,
            self.runtime.params,
            self.runtime.specs,
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
        if normuon:  # on every rank, not on the owner alone
            for dp in self.runtime.params:
                check_normuon(dp)
        super().__init__(groups, defaults={})
        frozen = {dp.param: dp.fqn for dp in self.runtime.params if not dp.spec.trainable}
        # Every parameter of the groups -> its canonical name.
        self.names = {param: canonical_fqn(name) for name, param in trainable.items()} | frozen
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._adamw_implementation = adamw_implementation
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
    ) -> tuple[list[tuple[dict[str, Any], MatrixStack]], list[tuple[dict[str, Any], list[Piece]]]]:
        """The stacks and, by parameter, the AdamW pieces of this rank, each with its group; their state is created
        here. What arrives last in backward comes last in its stack, and the largest stack first: the step begins
        meanwhile."""
        arriving = [piece for unit in self.runtime.schedule.reduce_order for piece in unit.owned]
        stacks, adamw_pieces = [], []
        for group in self.param_groups:
            by_shape: dict[tuple, list[MatrixView]] = defaultdict(list)
            by_param: dict[torch.Tensor, list[Piece]] = defaultdict(list)
            params = set(group["params"])
            for piece in (piece for piece in arriving if piece.spec.trainable and piece.param in params):
                if piece.spec.route == "muon":
                    for view in self._matrix_views(piece):
                        dtypes = (
                            piece.spec.optim_dtype,
                            None if piece.compute_weight is None else piece.compute_weight.dtype,
                        )
                        by_shape[(view.shape, piece.spec.transposed, dtypes)].append(view)
                else:
                    state = adamw.new_state(piece.master, piece.master.device, piece.spec.optim_dtype)
                    if runs := by_param[piece.param]:  # one count a parameter, so that whoever loads it loads all
                        state["step"] = self.state_of(runs[0])["step"]
                    runs.append(piece)
                    self.state[piece.param].update({state_key(piece, name): value for name, value in state.items()})
            adamw_pieces += [(group, pieces) for pieces in by_param.values()]
            stacks += [(group, MatrixStack(views)) for views in by_shape.values()]
        stacks.sort(key=lambda entry: entry[1].count * math.prod(entry[1].shape), reverse=True)
        return stacks, adamw_pieces

    def _matrix_views(self, piece: Piece) -> list[MatrixView]:
        """The matrices of one piece, on their state, which is created here."""
        state = {"momentum_buffer": torch.zeros_like(piece.master, dtype=piece.spec.optim_dtype)}
        if self.rule.normuon_beta2 is not None:
            inputs = -1 if neuron_dim(piece) == -2 else -2
            like = piece.master.narrow(inputs, 0, 1)
            state["second_moment"] = torch.zeros_like(like, dtype=torch.float32, memory_format=torch.contiguous_format)
        self.state[piece.param].update({state_key(piece, name): value for name, value in state.items()})
        blocks = (None,) if piece.spec.blocks is None else piece.spec.blocks.blocks
        return [MatrixView(piece, block, state["momentum_buffer"], state.get("second_moment")) for block in blocks]

    @property
    def newton_schulz_flops(self) -> int:
        """Floating-point operations of Newton-Schulz in one step on this rank."""
        return sum(stack.count * self.newton_schulz.flops(*stack.shape) for _, stack in self._stacks)

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The state of one owned piece, by its plain names."""
        names = ("step", "exp_avg", "exp_avg_sq")
        if piece.spec.route == "muon":
            names = ("momentum_buffer",) if self.rule.normuon_beta2 is None else ("momentum_buffer", "second_moment")
        return {name: self.state[piece.param][state_key(piece, name)] for name in names}

    def state_layout(self, dp: DedicatedParam) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the state of a dedicated parameter, by name, whoever owns it."""
        shape, dtype = dp.shape, dp.spec.optim_dtype
        if dp.spec.route != "muon":
            return {"step": ((), torch.float32), "exp_avg": (shape, dtype), "exp_avg_sq": (shape, dtype)}
        layout = {"momentum_buffer": (shape, dtype)}
        if self.rule.normuon_beta2 is not None:
            neurons = list(shape)
            neurons[-2 if dp.spec.transposed else -1] = 1
            layout["second_moment"] = (tuple(neurons), torch.float32)
        return layout

    def state_dict(self) -> dict[str, Any]:
        """State by parameter name, hyperparameters by group, and how the momentum was made: see
        ``state/optimizer.py``. The same keys on every rank; tensors are live. For DCP:
        ``dcp.save({"optimizer": optimizer.state_dict()})``, and to load, ``dcp.load`` into the same and then
        :meth:`load_state_dict`. Not collective."""
        return optimizer_state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state and, where the dict has ``param_groups``, hyperparameters. Not collective.

        Args:
            state_dict: of :meth:`state_dict`, on the same mesh or loaded by DCP, or with whole tensors, as of one
                process or from :func:`state_dict_from_torch`; every rank passes it.

        Raises:
            ValueError: other groups, parameters or shapes, or momentum of another form; nothing has changed then.
        """
        load_optimizer_state_dict(self, state_dict)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], torch.Tensor] | None = None, *, found_inf: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Wait for the gradients, update what this rank owns and its AdamW shards, and publish the new weights.

        Args:
            closure: evaluated first, as in every PyTorch optimizer.
            found_inf: 0-D float tensor on the device. Where it is not zero (NaN is not) nothing moves, without the host
                having to know. Needs ``adamw_implementation="fused"``.

        Raises:
            ValueError: ``found_inf`` with an AdamW that is not fused.
        """
        if found_inf is not None and self.plain_adamw and self._adamw_implementation != "fused":
            raise ValueError(
                f"found_inf needs adamw_implementation='fused', this optimizer has {self._adamw_implementation!r}"
            )
        if found_inf is not None:
            # A summed flag may be 2; PyTorch's fused AdamW skips at 1 only, and takes the flag off its step count.
            found_inf = (found_inf != 0).float()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self.runtime
        runtime.collect_gradients()
        if runtime.schedule.has_gradients:
            runtime.begin_update()
            for group, stack in self._stacks:
                stack.update(group, self.rule, self.newton_schulz, found_inf)
            for group, pieces in self._adamw_pieces:
                for piece in pieces:
                    piece.wait_gradient()
                adamw.update(pieces, [self.state_of(piece) for piece in pieces], group, found_inf)
                for piece in pieces:
                    piece.refresh_compute_weight()
            if self.qk_clip is not None:
                self.qk_clip.apply(runtime, found_inf)
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is built, for PyTorch's constructor: its state is laid out then.

        Raises:
            RuntimeError: afterwards.
        """
        if "_stacks" in vars(self):
            raise RuntimeError("Muon takes no further parameters: build it anew with all of its param_groups")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient: reduced, in flight, held back for accumulation, and of FSDP2 parameters."""
        self.runtime.zero_grad()
        drop_fsdp_gradients(self._fsdp_modules)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def state_key(piece: Piece, name: str) -> str:
    """Key of a piece's state in ``optimizer.state[param]``; parts of a stack are told apart by their range."""
    return name if piece.is_whole else f"{name}[{piece.start}:{piece.stop}]"
