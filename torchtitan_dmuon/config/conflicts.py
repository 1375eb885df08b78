"""What is wrong between keys that are each valid alone. The keys are declared in `job_config`."""

from collections.abc import Iterator

from torchtitan_dmuon.config.job_config import KEYS, JobConfig
from torchtitan_dmuon.config.sources import SourcesError, path_problem, plan_sources


def schedule_conflicts(warmup_steps: int, total_steps: int, decay_ratio: float | None) -> Iterator[tuple[str, str]]:
    """What is wrong with a learning-rate schedule, as (key, problem) pairs."""
    if not 0 <= warmup_steps <= total_steps:
        yield (
            "lr_scheduler.warmup_steps",
            f"found {warmup_steps}, expected 0 to {total_steps}, the length of the schedule",
        )
    if decay_ratio is not None and not 0 <= decay_ratio <= 1:
        yield "lr_scheduler.decay_ratio", f"found {decay_ratio}, expected 0 to 1"


def conflicts(config: JobConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong between keys that are each valid alone: the keys it is about, first the one to be named, and the
    problem."""
    schedule, training, profiling = config.lr_scheduler, config.training, config.profiling
    total_steps = training.steps if schedule.total_steps is None else schedule.total_steps
    for key, problem in schedule_conflicts(schedule.warmup_steps, total_steps, schedule.decay_ratio):
        yield (key, "lr_scheduler.total_steps", "training.steps"), problem

    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        expected = f"at least profiler_warmup + profiler_active = {cycle}"
        yield ("profiling.profile_freq", "profiling"), f"found {profiling.profile_freq}, expected {expected}"

    yield from _checkpoint_conflicts(config)

    if training.skip_sigma is not None and training.skip_max_steps == 0:
        keys = ("training.skip_sigma", "training.skip_max_steps")
        yield keys, f"found {training.skip_sigma}, expected training.skip_max_steps > 0 with it"

    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) >= 1):
        problem = f"found {option!r}, expected 'op' or a positive integer as a string"
        yield ("activation_checkpoint.selective_ac_option",), problem

    used = [("training", training)] + ([("validation", config.validation)] if config.validation.enable else [])
    for section, data in used:
        if problem := path_problem(data.dataset, data.dataset_path):
            keys = (f"{section}.dataset_path", f"{section}.dataset")
            yield keys, problem.replace("dataset is", f"{section}.dataset is")
    try:
        plan_sources(training)
    except SourcesError as error:
        yield (error.key, "training.sources", "training.stages"), str(error)

    loader = training.dataloader
    for name, value in (
        ("persistent_workers", loader.persistent_workers),
        ("prefetch_factor", loader.prefetch_factor),
    ):
        if value and loader.num_workers == 0:
            keys = (f"training.dataloader.{name}", "training.dataloader.num_workers")
            yield keys, f"found {value}, expected training.dataloader.num_workers > 0 with it"


# What a run starts from and what it writes: left out of a run without checkpoints, this would go unnoticed. How and how
# often they are written may stay in a file where they are switched off.
_NEEDS_CHECKPOINTS = (
    *("load_step", "load_only", "exclude_from_loading"),
    *("initial_load_path", "initial_load_model_only", "initial_load_in_hf"),
    *("enable_first_step_checkpoint", "create_seed_checkpoint"),
)


def _checkpoint_conflicts(config: JobConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        for name in _NEEDS_CHECKPOINTS:
            if (value := vars(checkpoint)[name]) != KEYS[f"checkpoint.{name}"].default:
                keys = (f"checkpoint.{name}", "checkpoint.enable")
                yield keys, f"found {value!r}, expected checkpoint.enable = true with it"
    if checkpoint.load_only and checkpoint.create_seed_checkpoint:
        keys = ("checkpoint.create_seed_checkpoint", "checkpoint.load_only")
        yield keys, "found true, expected checkpoint.load_only = false with it"
    if checkpoint.initial_load_in_hf:
        if not checkpoint.initial_load_model_only:
            problem = "found false, expected true because HuggingFace folders hold only weights (initial_load_in_hf)"
            yield ("checkpoint.initial_load_model_only", "checkpoint.initial_load_in_hf"), problem
        if checkpoint.initial_load_path is None and config.model.hf_assets_path is None:
            keys = ("checkpoint.initial_load_in_hf", "checkpoint.initial_load_path", "model.hf_assets_path")
            yield keys, "found true, expected a folder in checkpoint.initial_load_path or model.hf_assets_path"
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        keys = ("checkpoint.last_save_in_hf", "checkpoint.last_save_model_only")
        yield keys, "found true, expected checkpoint.last_save_model_only = true with it"
    if checkpoint.export_dtype != "float32" and not checkpoint.last_save_model_only:
        problem = f"found {checkpoint.export_dtype!r}, expected checkpoint.last_save_model_only = true with it"
        yield ("checkpoint.export_dtype", "checkpoint.last_save_model_only"), problem
