"""Arguments of other libraries, and of earlier versions, with what does their job here."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NoReturn

from .ownership.policy import nearest

# Pattern of a name -> advice; the first pattern that fits counts.
_INSTEAD = {
    "mode": "use reshard_after_forward: True was 'z3', False was 'z2'",
    "strict_hook_boundary": "use hook_boundary_strict",
    "hook_boundary_resolver": "use hook_boundary_predicate",
    "compute_dtype": "use param_policy={'defaults': {'param_dtype': dtype}}",
    "mp_policy": "use param_policy={'defaults': {'param_dtype': dtype}}",
    "replicate_async": "pass it to Muon",
    "ignored_params": "use predicate, which selects the parameters that get an owner",
    "*owner*": "leave it out: owners are chosen by the cost of their work",
    "assignment_group_key_fn": "leave it out: every unit is balanced by itself",
    "hsdp_column_balance": "leave it out: the whole grid is balanced",
    "*prefetch_*": "pass prefetch to dedicate_params",
    "record_step_profile": "use torch.profiler: its traces name every unit and stack",
    "tp_distributed_gram*": "leave it out: the owner has the whole matrix",
    "betas": "use adamw_betas, and momentum for matrices",
    "eps": "use adamw_eps",
    "fused": "use adamw_implementation='fused'",
    "foreach": "use adamw_implementation='foreach'",
    "backend": "use ns_backend",
    "ns_coefficients": "use ns_backend=dmuon.NewtonSchulz(coefficients=...)",
    "adjust_lr_fn": "use scale",
}
_NOT_NEEDED = (
    *("pack_small_params", "tp_buffer_reuse", "delay_stage2_to_optimizer", "replicate_broadcast_bucket_mb"),
    *("muon_forward_unshard", "group_prepare_ahead", "sharded_adamw_unshard_separate_stream"),
    *("first_step_progress_log", "first_step_progress_log_limit"),
)


def refuse(call: str, given: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Raises TypeError for the first argument of ``given``, which ``call`` does not take."""
    name = next(iter(given))
    advice = next((f": {told}" for pattern, told in _INSTEAD.items() if fnmatchcase(name, pattern)), None)
    if name in _NOT_NEEDED:
        advice = ": leave it out, there is nothing to choose"
    raise TypeError(f"{call}() takes no argument {name!r}{advice or nearest(name, known)}")
