"""``NamedState``: the half of ``Muon`` that gives and takes its state by parameter name, for checkpoints.

A state dict is ``{"state": {fqn: {name: tensor}}, "param_groups": [...], "muon": {...}}``; ``muon`` is the recipe: the
form of the momentum and what turned it into updates. One made from other optimizers may also have ``fresh``: names of
parameters whose state starts from zero, because those optimizers make none before a first gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..ownership.spec import ParamSpec
from ..runtime.param import DedicatedParam, Piece
from ..state.optimizer import HEAVY_BALL, ByName, State, adamw_state, tell_frozen
from ..state.pieces import PartialTensor, logical_tensor, pair_parts, parts_of
from ..transport.torch_private import state_dict_hooks
from .amp import ScaledGradients
from .groups import saved_hyperparameters
from .normuon import NorMuon
from .stack import UpdateRule

logger = logging.getLogger(__name__)


class NamedState(ScaledGradients):
    """``names`` has the canonical name of every parameter of the groups, ``frozen`` those of all that are not trained.
    ``state`` (PyTorch's) has, of a ``dedicated`` parameter, what this rank owns."""

    dedicated: list[DedicatedParam]
    names: dict[torch.Tensor, str]
    frozen: set[str]
    rule: UpdateRule
    normuon: NorMuon | None
    _plain_adamw: torch.optim.AdamW | None

    def _layout(self, spec: ParamSpec, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of each state, by name, of a dedicated parameter or a piece of it of this shape."""
        if spec.route != "muon":
            moment = (shape, spec.optim_dtype)
            return {"step": ((), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}
        layout = {"momentum_buffer": (shape, spec.optim_dtype)}
        return layout if self.normuon is None else layout | self.normuon.state_layout(spec, shape)

    def _create_state(self, piece: Piece) -> None:
        for name, (shape, dtype) in self._layout(piece.spec, piece.shape).items():
            zeros = torch.zeros(shape, dtype=dtype, device=piece.master.device)
            self.state[piece.param].setdefault(_key(piece, name), zeros)

    def state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """The state of one owned piece, by its plain names."""
        return {name: self.state[piece.param][_key(piece, name)] for name in self._layout(piece.spec, piece.shape)}

    def named_state(self) -> State:
        """All state by parameter name, whoever owns it, with live tensors: see ``state/optimizer.py``. Nothing of a
        frozen parameter. Not collective."""
        self.runtime.verify()
        state: State = {dp.fqn: {} for dp in self.dedicated}
        for dp in (dp for dp in self.dedicated if dp.spec.trainable):
            for name, (shape, dtype) in self._layout(dp.spec, dp.shape).items():
                state[dp.fqn][name] = PartialTensor.of(shape, [], dtype)
            owned = [(piece, self.state_of(piece)) for piece in dp.pieces if piece.is_owned]
            for name in owned[0][1] if owned else ():
                state[dp.fqn][name] = logical_tensor([(piece, held[name]) for piece, held in owned])
        return state if self._plain_adamw is None else state | adamw_state(self._plain_adamw, self.names)

    def state_dict(self) -> dict[str, Any]:
        """State by parameter name, hyperparameters by group, and the recipe: see ``named_state.py``. The same keys on
        every rank; tensors are live. For DCP: ``dcp.save({"optimizer": optimizer.state_dict()})``, and to load,
        ``dcp.load`` into the same and then :meth:`load_state_dict`. Not collective."""
        for hook in state_dict_hooks(self, "state_dict_pre"):
            hook(self)
        groups = [{**group, "params": [self.names[p] for p in group["params"]]} for group in self.param_groups]
        state = ByName((fqn, values) for fqn, values in self.named_state().items() if values)
        taken = {"state": state, "param_groups": groups, "muon": muon_recipe(self)}
        for hook in state_dict_hooks(self, "state_dict_post"):
            taken = _unless_none(hook(self, taken), taken)
        return taken

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state and, where the dict has ``param_groups``, hyperparameters. Not collective.

        Args:
            state_dict: of :meth:`state_dict`, on the same mesh or loaded by DCP, or with whole tensors, as of one
                process or from :func:`state_dict_from_torch`; every rank passes it. It may have been made before some
                parameters were frozen: their state is left out, and a warning says so.

        Raises:
            ValueError: other groups, parameters or shapes, or momentum of another form; nothing has changed then.
        """
        for hook in state_dict_hooks(self, "load_state_dict_pre"):
            state_dict = _unless_none(hook(self, state_dict), state_dict)
        if "state" not in state_dict:
            raise ValueError(f"this is no state dict of Muon: it has no 'state', only {sorted(state_dict)}")
        check_muon_recipe(state_dict.get("muon", {}), self)
        updates = []
        if "param_groups" in state_dict:
            updates = saved_hyperparameters(self.param_groups, self.names, state_dict["param_groups"], self.frozen)
        for part, values in self._paired(state_dict["state"], set(state_dict.get("fresh", ()))):
            part.copy_(values)
        for group, values in updates:
            group.update(values)
        tell_frozen(state_dict["state"], self.frozen)
        for hook in state_dict_hooks(self, "load_state_dict_post"):
            hook(self)

    def _paired(self, saved: State, fresh: set[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each part that this rank holds with its values in ``saved``, or zeros."""
        live, pairs = self.named_state(), []
        for fqn, name, tensor in ((fqn, *entry) for fqn, values in live.items() for entry in values.items()):
            if fqn in fresh:
                pairs += [(part, torch.zeros_like(part)) for part, _ in parts_of(tensor)[1]]
            elif name in saved.get(fqn, {}):
                pairs += pair_parts(f"{fqn}.{name}", tensor, saved[fqn][name])
            else:
                there = sorted(saved.get(fqn, {})) or "nothing"
                raise ValueError(f"{fqn}: the state dict has {there} of it, {name} is missing")
        if unknown := sorted(saved.keys() - live.keys() - self.frozen):
            raise ValueError(f"the state dict has {unknown[0]}, which this optimizer has not")
        return pairs


def _unless_none(result: Any, before: Any) -> Any:
    """A hook gives another state dict, or ``None`` for the one it was given."""
    return before if result is None else result


def _key(piece: Piece, name: str) -> str:
    """Of a piece's state in ``optimizer.state[param]``. Pieces are told apart by their range, ``exp_avg[4:8]``. They
    share one step count, so that whoever loads it loads all."""
    shared = name == "step" or piece.is_whole
    return name if shared else f"{name}[{piece.start}:{piece.stop}]"


def muon_recipe(optimizer: NamedState) -> dict[str, Any]:
    """How ``optimizer``, a :class:`Muon`, makes its state: plain data."""
    return {
        "momentum_form": HEAVY_BALL,
        "coefficients": [list(abc) for abc in optimizer.rule.newton_schulz.coefficients],
        "scale": optimizer.rule.scale,
        "normuon_beta2": None if optimizer.normuon is None else optimizer.normuon.beta2,
        "cautious_weight_decay": optimizer.rule.cautious_weight_decay,
    }


def check_muon_recipe(saved: Mapping[str, Any], optimizer: NamedState, saved_in: str = "the state dict") -> None:
    """Compare a saved recipe with that of ``optimizer``, a :class:`Muon`. ``saved_in`` names its place in messages.

    Raises:
        ValueError: the momentum has another form. A difference that only changes the next updates is a warning.
    """
    form = saved.get("momentum_form", HEAVY_BALL)
    if form != HEAVY_BALL:
        raise ValueError(
            f"{saved_in} holds {form!r} momentum, this optimizer keeps {HEAVY_BALL!r} (M = mu M + G): convert it with "
            "dmuon.convert_ema_momentum"
        )
    for key, here in muon_recipe(optimizer).items():
        if key in saved and saved[key] != here:
            logger.warning("%s was made with %s %s, this optimizer has %s", saved_in, key, saved[key], here)
