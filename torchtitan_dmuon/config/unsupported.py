"""Sections and keys of TorchTitan v0.2.2 whose feature does not exist here, each with the reason.

They are refused by name, also when set to their default: a config brought over from TorchTitan must never
appear to use a feature that is not there. An entry covers everything below it. Keys that work live in
`job_config`.
"""

_NOT_YET = "not built yet"


def _not_yet(section: str, *names: str) -> dict[str, str]:
    return {f"{section}.{name}": _NOT_YET for name in names}


UNSUPPORTED: dict[str, str] = {
    "job.save_config_file": "the resolved config is written beside every checkpoint",
    "job.custom_config_module": "every key is declared in torchtitan_dmuon/config/job_config.py",
    "model.tokenizer_path": "use model.hf_assets_path",
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
    "checkpoint.enable_ft_dataloader_checkpoints": "the loader's state is one number, the same on every rank",
    **_not_yet("checkpoint", "initial_load_in_hf_quantized"),
    **_not_yet(
        "activation_checkpoint",
        "per_op_sac_force_recompute_mm_shapes_by_fqns",
        "memory_budget",
        "visualize_memory_budget_pareto",
        "determinism_check",
        "debug",
    ),
    "dmuon.mode": "use dmuon.reshard_after_forward: true was z3, false was z2",
    "quantize": _NOT_YET,
    **_not_yet("comm", "mode"),
    "memory_estimation": _NOT_YET,
    "fault_tolerance": _NOT_YET,
    "validation.dataloader": "validation reads with the settings of training.dataloader",
    "debug.moe_force_load_balance": _NOT_YET,
    "experimental": "models and keys are added in the source tree, not by import hooks",
}
