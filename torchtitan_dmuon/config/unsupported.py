"""Sections and keys of TorchTitan v0.2.2 whose feature does not exist here, and the older names of keys that do.

A key of a missing feature is accepted where it asks for nothing: at the value that switches the feature off, or when it
only shapes a feature that another key switches on. Any other value is refused by name. Keys that work live in
`job_config`.
"""

from typing import Any

_NOT_YET = "not built yet"


def _not_yet(section: str, *names: str) -> dict[str, str]:
    return {f"{section}.{name}": _NOT_YET for name in names}


UNSUPPORTED: dict[str, str] = {
    "job.save_config_file": "the resolved config is written to config.toml in job.dump_folder",
    "job.custom_config_module": "every key is declared in torchtitan_dmuon/config/job_config.py",
    **_not_yet("model", "converters", "print_after_conversion"),
    "optimizer.early_step_in_backward": "the update needs the gradient norm of all parameters first",
    "training.enable_cpu_offload": _NOT_YET,
    "training.dtype": "master weights are always float32; see training.mixed_precision_param",
    "training.gc_debug": _NOT_YET,
    **_not_yet(
        "parallelism",
        "enable_async_tensor_parallel",
        "pipeline_parallel_degree",
        "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_expert_parallel_overlap",
        "context_parallel_degree",
        "context_parallel_load_balancer",
        "context_parallel_rotate_method",
        "expert_parallel_degree",
        "expert_tensor_parallel_degree",
        "expert_parallel_comm_backend",
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": "the loader's state is a few numbers, the same on every rank",
    **_not_yet("checkpoint", "initial_load_in_hf_quantized"),
    **_not_yet(
        "activation_checkpoint",
        "per_op_sac_force_recompute_mm_shapes_by_fqns",
        "memory_budget",
        "visualize_memory_budget_pareto",
        "determinism_check",
        "debug",
    ),
    "quantize": _NOT_YET,
    **_not_yet("comm", "mode"),
    "memory_estimation": _NOT_YET,
    "fault_tolerance": _NOT_YET,
    "validation.dataloader": "validation reads with the settings of training.dataloader",
    "debug.moe_force_load_balance": _NOT_YET,
    "experimental": "models and keys are added in the source tree, not by import hooks",
}

_ANYTHING: list[Any] = []  # the key only shapes a feature that another key switches on

# The values of unsupported keys and sections that ask for nothing.
_OFF: dict[str, list[Any]] = {
    "job.custom_config_module": [""],
    "model.converters": [[]],
    "model.print_after_conversion": [False],
    "optimizer.early_step_in_backward": [False],
    "training.enable_cpu_offload": [False],
    "training.dtype": ["float32"],
    "training.gc_debug": [False],
    "parallelism.enable_async_tensor_parallel": [False],
    **{f"parallelism.{name}_parallel_degree": [1] for name in ("pipeline", "context", "expert", "expert_tensor")},
    "parallelism": _ANYTHING,
    "checkpoint.enable_ft_dataloader_checkpoints": _ANYTHING,
    "checkpoint.initial_load_in_hf_quantized": [False],
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": [[], ["moe.router.gate"]],
    "activation_checkpoint.memory_budget": _ANYTHING,
    "activation_checkpoint.visualize_memory_budget_pareto": [False],
    "activation_checkpoint.determinism_check": ["default"],
    "activation_checkpoint.debug": [False],
    "quantize": _ANYTHING,  # model.converters
    "comm.mode": ["default"],
    "memory_estimation.enable": [False],
    "memory_estimation": _ANYTHING,
    "fault_tolerance.enable": [False],
    "fault_tolerance": _ANYTHING,
    "validation.dataloader.num_workers": [0],
    "validation.dataloader.persistent_workers": [False],
    "validation.dataloader.pin_memory": [False],
    "debug.moe_force_load_balance": [False],
    "experimental.custom_import": [""],
    "experimental.custom_args_module": [""],
}

# Names of TorchTitan v0.1 and the names that replaced them.
RENAMED: dict[str, str] = {
    "activation_checkpoint.type": "activation_checkpoint.mode",
    "checkpoint.convert_to_hf_on_save": "checkpoint.last_save_in_hf",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "dmuon.mode": "dmuon.reshard_after_forward",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "metrics.rank_0_only": "metrics.save_for_all_ranks",
    "model.tokenizer_path": "model.hf_assets_path",
    "optimizer.fused": "optimizer.implementation",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.deterministic": "debug.deterministic",
    "training.enable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.seed": "debug.seed",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "validation.enabled": "validation.enable",
}


def unsupported_because(name: str) -> str | None:
    """Why the key or section ``name`` does not exist here; ``None`` where TorchTitan has none either."""
    parts = name.split(".")
    names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return next((UNSUPPORTED[found] for found in names if found in UNSUPPORTED), None)


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether the unsupported key ``name`` may have this value."""
    while name not in _OFF:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False
    off = _OFF[name]
    return off is _ANYTHING or any(type(value) is type(nothing) and value == nothing for nothing in off)
