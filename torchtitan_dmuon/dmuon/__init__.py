"""Distributed Muon with dedicated ownership. The public names are listed in ``dmuon.py`` at the repository's root."""

from .dedicate import dedicate_params
from .extras.controls import (
    get_dedicated_params,
    get_owned_params,
    ignored_params,
    no_sync,
    set_gradient_divide_factor,
    set_requires_all_reduce,
    set_timeout,
)
from .extras.qk_clip import HeadWeights, QKClip, QKClipLayer, attention_heads, latent_attention_heads
from .extras.reports import (
    OwnershipRow,
    format_owners,
    format_ownership_table,
    ownership_table,
    summarize_comm_plan,
    summarize_param_groups,
)
from .kernels.newton_schulz import COEFFICIENTS, NewtonSchulz, newton_schulz
from .kernels.select import get_backend_status, get_ns_backend
from .optimizer.amp import scale_gradients_, unscale_
from .optimizer.clip import (
    GradientEntry,
    clip_grad_norm_,
    clip_gradients_,
    clip_total_grad_norm_,
    register_muon_grad_clip_strategy,
    try_clip_optimizer_grad_norm_buckets_,
)
from .optimizer.muon import Muon
from .optimizer.named_state import check_muon_recipe, muon_recipe
from .ownership.assignment import Assignment
from .ownership.blocks import split_equal, split_heads, split_interleaved, split_sizes
from .ownership.classify import Decision, canonical_fqn, classify
from .ownership.spec import Block, BlockSplit
from .runtime.param import DedicatedParam, Piece
from .state.materialize import materialize, summon_full_params
from .state.model import (
    get_model_shapes,
    get_model_state_dict,
    get_optimizer_state_dict,
    publish_weights,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from .state.optimizer import convert_ema_momentum, state_dict_from_torch
from .transport.lane import Lane
from .transport.torch_private import set_group_timeout

# fmt: off
__all__ = [
    "COEFFICIENTS", "Assignment", "Block", "BlockSplit", "Decision", "DedicatedParam", "GradientEntry", "HeadWeights",
    "Lane", "Muon", "NewtonSchulz", "OwnershipRow", "Piece", "QKClip", "QKClipLayer", "attention_heads",
    "canonical_fqn", "check_muon_recipe", "classify", "clip_grad_norm_", "clip_gradients_", "clip_total_grad_norm_",
    "convert_ema_momentum", "dedicate_params", "format_owners", "format_ownership_table", "get_backend_status",
    "get_dedicated_params", "get_model_shapes", "get_model_state_dict", "get_ns_backend", "get_optimizer_state_dict",
    "get_owned_params", "ignored_params", "latent_attention_heads", "materialize", "muon_recipe", "newton_schulz",
    "no_sync", "ownership_table", "publish_weights", "register_muon_grad_clip_strategy", "scale_gradients_",
    "set_gradient_divide_factor", "set_group_timeout", "set_model_state_dict", "set_optimizer_state_dict",
    "set_requires_all_reduce", "set_timeout", "split_equal", "split_heads", "split_interleaved", "split_sizes",
    "state_dict_from_torch", "summarize_comm_plan", "summarize_param_groups", "summon_full_params",
    "try_clip_optimizer_grad_norm_buckets_", "unscale_",
]
# fmt: on
