"""Distributed Muon with dedicated ownership. The public names are listed in ``dmuon.py`` at the repository's root."""

from .assignment import Assignment
from .blocks import Block, BlockSplit, split_equal, split_heads, split_interleaved, split_sizes
from .classify import Decision, canonical_fqn, classify
from .clip import (
    GradientEntry,
    clip_grad_norm_,
    clip_grad_norm_buckets_,
    clip_gradients_,
    clip_total_grad_norm_,
    register_muon_grad_clip_strategy,
    try_clip_optimizer_grad_norm_buckets_,
)
from .diagnostics import (
    OwnershipRow,
    format_ownership_table,
    ownership_table,
    summarize_comm_plan,
    summarize_param_groups,
)
from .fsdp2 import set_group_timeout
from .lanes import Lane
from .materialize import initialize_undedicated, materialize
from .muon import Muon
from .newton_schulz import COEFFICIENTS, NewtonSchulz, newton_schulz
from .ns_backend import get_backend_status, get_ns_backend
from .optimizer_state import check_muon_recipe, convert_ema_momentum, muon_recipe, state_dict_from_torch
from .qk_clip import HeadWeights, QKClip, QKClipLayer, attention_heads, latent_attention_heads
from .runtime import (
    dedicate_params,
    get_dedicated_params,
    get_owned_params,
    ignored_params,
    no_sync,
    set_gradient_divide_factor,
    set_requires_all_reduce,
    set_timeout,
)
from .state_dict import (
    get_model_shapes,
    get_model_state_dict,
    get_optimizer_state_dict,
    publish_weights,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from .storage import DedicatedParam, Piece

__all__ = [
    "COEFFICIENTS",
    "Assignment",
    "Block",
    "BlockSplit",
    "Decision",
    "DedicatedParam",
    "GradientEntry",
    "HeadWeights",
    "Lane",
    "Muon",
    "NewtonSchulz",
    "OwnershipRow",
    "Piece",
    "QKClip",
    "QKClipLayer",
    "attention_heads",
    "canonical_fqn",
    "check_muon_recipe",
    "classify",
    "clip_grad_norm_",
    "clip_grad_norm_buckets_",
    "clip_gradients_",
    "clip_total_grad_norm_",
    "convert_ema_momentum",
    "dedicate_params",
    "format_ownership_table",
    "get_backend_status",
    "get_dedicated_params",
    "get_model_shapes",
    "get_model_state_dict",
    "get_ns_backend",
    "get_optimizer_state_dict",
    "get_owned_params",
    "ignored_params",
    "initialize_undedicated",
    "latent_attention_heads",
    "materialize",
    "muon_recipe",
    "newton_schulz",
    "no_sync",
    "ownership_table",
    "publish_weights",
    "register_muon_grad_clip_strategy",
    "set_gradient_divide_factor",
    "set_group_timeout",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_requires_all_reduce",
    "set_timeout",
    "split_equal",
    "split_heads",
    "split_interleaved",
    "split_sizes",
    "state_dict_from_torch",
    "summarize_comm_plan",
    "summarize_param_groups",
    "try_clip_optimizer_grad_norm_buckets_",
]
