"""Every configuration key: its type, default, allowed values and meaning, declared once.

The declarations are also the `--help` text and the checks of each key by itself (`key` says how); `conflicts` has
the checks between keys and `loading` reads TOML and the command line. What a key does to a run is in the module that
uses it.
"""
# ruff: noqa: RUF009  (`key` is dataclasses.field with the rules of a configuration key)

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torchtitan_dmuon.config.key import KeySpec, key, key_specs
from torchtitan_dmuon.config.source_tables import DATASETS, Source, Stage


@dataclass(frozen=True)
class Job:
    """The run as a whole."""

    config_file: str | None = key(None, "TOML file to read; command line only", path=True, compare=False)
    dump_folder: str = key(
        "./outputs", "folder of everything the run writes; {section.key} is replaced by that key's value", path=True
    )
    description: str = key("default job", "free text for the log; {section.key} is replaced as in dump_folder")
    print_config: bool = key(False, "print the resolved config at start")


@dataclass(frozen=True)
class Profiling:
    """torch.profiler traces and CUDA memory snapshots."""

    enable_profiling: bool = key(False, "write a torch.profiler trace every profile_freq steps")
    save_traces_folder: str = key("profile_traces", "trace folder inside job.dump_folder", path=True)
    profile_freq: int = key(10, "steps from one trace (or memory snapshot) to the next", minimum=1)
    profiler_active: int = key(1, "steps recorded in one trace", minimum=1)
    profiler_warmup: int = key(3, "steps the profiler runs before it records", minimum=0)
    enable_memory_snapshot: bool = key(False, "write CUDA memory snapshots, also when memory runs out")
    save_memory_snapshot_folder: str = key("memory_snapshot", "snapshot folder inside job.dump_folder", path=True)


@dataclass(frozen=True)
class Metrics:
    """Log lines, TensorBoard and Weights & Biases."""

    log_freq: int = key(10, "steps between two log lines", minimum=1)
    enable_tensorboard: bool = key(False, "write TensorBoard event files")
    enable_wandb: bool = key(False, "write to Weights & Biases; WANDB_PROJECT names the project")
    disable_color_printing: bool = key(False, "log without ANSI colors")
    save_tb_folder: str = key("tb", "TensorBoard folder inside job.dump_folder", path=True)
    save_for_all_ranks: bool = key(False, "write metrics on every rank instead of rank 0 only")
    peak_tflops: float | None = key(
        None, "peak dense bf16 TFLOP/s of one device, for MFU; none looks the device up by its name", above=0
    )
    enable_progress_bar: bool = key(
        False, "show a bar below the log lines, or in each of them where stderr is no terminal"
    )


@dataclass(frozen=True)
class Model:
    """Which model, and its tokenizer."""

    name: str = key("llama3", "model family, a folder of models/")
    flavor: str = key("debugmodel", "size of the family to build")
    hf_assets_path: str | None = key(None, "folder with tokenizer.json; none is the byte-level tokenizer", path=True)


@dataclass(frozen=True)
class ParamGroup:
    """One `[[optimizer.param_groups]]`: what is left out is as in `[optimizer]` and `[dmuon]`. A parameter belongs to
    the first group with a pattern for it, and those of no group to one called base. AdamW alone (optimizer.name)
    takes the values that this table gives for AdamW."""

    patterns: list[str] = key(None, "FQN globs of the parameters; each must match one", min_items=1)
    group_name: str | None = key(None, "name of the group; none is group and its number")
    lr: float | None = key(None, "peak learning rate of both halves", minimum=0)
    weight_decay: float | None = key(None, "weight decay of both halves", minimum=0)
    muon_lr: float | None = key(None, "peak learning rate of the matrices", minimum=0)
    adamw_lr: float | None = key(None, "peak learning rate of the rest", minimum=0)
    muon_weight_decay: float | None = key(None, "weight decay of the matrices", minimum=0)
    adamw_weight_decay: float | None = key(None, "weight decay of the rest", minimum=0)
    momentum: float | None = key(None, "Muon momentum", minimum=0, below=1)
    nesterov: bool | None = key(None, "Nesterov momentum")
    adamw_betas: list[float] | None = key(None, "AdamW decay of both moments", item=float, minimum=0, below=1, items=2)
    adamw_eps: float | None = key(None, "AdamW term added to the denominator", minimum=0)
    dmuon_route: str | None = key(
        None, "route of all its dedicated parameters", choices=("muon", "adamw", "sharded_adamw")
    )


@dataclass(frozen=True)
class Optimizer:
    """The optimizer. With DMuon, the AdamW keys are for what Muon leaves out: embeddings, norms, head."""

    name: str = key("DMuon", "optimizer", choices=("DMuon", "AdamW"))
    lr: float = key(8e-4, "peak learning rate, for DMuon also the AdamW one unless dmuon.adamw_lr is set", minimum=0)
    beta1: float = key(0.9, "AdamW decay of the first moment", minimum=0, below=1)
    beta2: float = key(0.95, "AdamW decay of the second moment", minimum=0, below=1)
    eps: float = key(1e-8, "AdamW term added to the denominator", minimum=0)
    weight_decay: float = key(0.1, "decoupled weight decay", minimum=0)
    implementation: str = key("fused", "AdamW implementation", choices=("for-loop", "foreach", "fused"))
    param_groups: list[dict[str, Any]] = key(
        [],
        "groups of parameters with values of their own, each an [[optimizer.param_groups]]",
        item=dict,
        table=ParamGroup,
    )


@dataclass(frozen=True)
class LRScheduler:
    """Learning rate: linear warm-up, stable phase, decay."""

    warmup_steps: int = key(200, "steps of linear warm-up; the last of them is at the peak", minimum=0)
    total_steps: int | None = key(None, "length of the schedule; none is training.steps", minimum=1)
    decay_ratio: float | None = key(
        None, "share of all steps that decay; none decays over everything after warm-up", minimum=0, maximum=1
    )
    decay_type: str = key("linear", "shape of the decay", choices=("linear", "sqrt", "cosine"))
    min_lr_factor: float = key(0.0, "factor of the peak that the decay approaches", minimum=0, maximum=1)


@dataclass(frozen=True)
class DataLoader:
    """The training data loader."""

    num_workers: int = key(0, "worker processes; 0 loads in the trainer's own process", minimum=0)
    persistent_workers: bool = key(False, "keep workers alive between epochs; needs num_workers > 0")
    pin_memory: bool = key(False, "copy batches to page-locked memory")
    prefetch_factor: int | None = key(None, "batches loaded ahead by a worker; needs num_workers > 0", minimum=1)


_PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True)
class Training:
    """Data, batch, length and precision of the training loop."""

    dataset: str = key("stdlib", "kind of data; stdlib is the source of Python's own library", choices=DATASETS)
    dataset_path: str | None = key(None, "glob or folder of the data; none for stdlib", path=True)
    text_key: str = key("text", "field of a jsonl record, or column of a table, that holds the text")
    add_bos: bool = key(True, "begin each document with the bos_token of tokenizer_config.json, if it names one")
    add_eos: bool = key(True, "end each document with the tokenizer's end-of-text token")
    sources: list[dict[str, Any]] = key(
        [], "in place of dataset: several corpora, each a [[training.sources]]", item=dict, table=Source
    )
    stages: list[dict[str, Any]] = key(
        [], "other weights from a step on, each a [[training.stages]]", item=dict, table=Stage
    )
    accept_changed_data: bool = key(
        False, "resume although the data are not those of the checkpoint; each source goes on at its share of an epoch"
    )
    local_batch_size: int = key(8, "sequences of one micro-batch on one data-parallel rank", minimum=1)
    global_batch_size: int = key(
        -1,
        "sequences of one optimizer step over all ranks; -1 is one micro-batch on each",
        minimum=1,
        special=-1,
    )
    seq_len: int = key(2048, "tokens of one sequence", minimum=1)
    max_norm: float = key(1.0, "gradient norm above which gradients are clipped", above=0)
    steps: int = key(10000, "optimizer steps of the run", minimum=1)
    mixed_precision_param: str = key("bfloat16", "dtype of weights in forward and backward", choices=_PRECISIONS)
    mixed_precision_reduce: str = key("float32", "dtype of gradient reduction", choices=_PRECISIONS)
    skip_max_steps: int = key(
        0,
        "most steps in a row whose update is skipped because the loss or the gradient norm is not finite (or a spike);"
        " one more ends the run",
        minimum=0,
    )
    skip_sigma: float | None = key(
        None,
        "skip a step, too, whose loss or gradient norm is more than so many standard deviations above its mean over"
        " skip_window steps; needs skip_max_steps > 0",
        above=0,
    )
    skip_window: int = key(100, "steps over which skip_sigma takes mean and deviation", minimum=2)
    skip_samples_on_resume: int = key(
        0,
        "samples of the data, over all ranks, that are left out when the run resumes; not again by a checkpoint of the"
        " run that has left out as many",
        minimum=0,
    )
    gc_freq: int = key(50, "steps between two Python garbage collections", minimum=1)
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(frozen=True)
class Parallelism:
    """How ranks divide the work."""

    data_parallel_replicate_degree: int = key(
        1, "replicas of the sharded model (HSDP); a matrix still has one owner in all of them", minimum=1
    )
    data_parallel_shard_degree: int = key(
        -1, "ranks that shard the model; -1 is all that the other degrees leave", minimum=1, special=-1
    )
    fsdp_reshard_after_forward: str = key(
        "default", "free unsharded FSDP2 weights after forward", choices=("default", "always", "never")
    )
    tensor_parallel_degree: int = key(1, "ranks that split each layer, with sequence parallelism", minimum=1)
    disable_loss_parallel: bool = key(False, "gather the logits of tensor parallelism before the loss")


_STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng")


@dataclass(frozen=True)
class Checkpoint:
    """Saving and resuming."""

    enable: bool = key(False, "save checkpoints, and resume from the folder when it holds one")
    folder: str = key("checkpoint", "checkpoint folder inside job.dump_folder", path=True)
    interval: int = key(500, "steps between two checkpoints", minimum=1)
    keep_latest_k: int = key(10, "checkpoints kept; 0 keeps all", minimum=0)
    async_mode: str = key(
        "disabled",
        "disabled writes before the next step; async copies to host memory, then writes behind the training;"
        " async_with_pinned_mem also copies behind the next forward and backward, into page-locked memory it keeps",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    load_step: int = key(-1, "step to resume from, later checkpoints are moved aside; -1 is the latest", minimum=-1)
    load_only: bool = key(False, "load, but never save")
    exclude_from_loading: list[str] = key([], "parts of a checkpoint that are not loaded", choices=_STATES)
    initial_load_path: str | None = key(
        None, "checkpoint (a step-N folder, or a HuggingFace one) to start from while the folder holds none", path=True
    )
    initial_load_model_only: bool = key(True, "of the initial checkpoint take only the weights")
    initial_load_in_hf: bool = key(
        False, "the initial weights are HuggingFace safetensors, in initial_load_path or else model.hf_assets_path"
    )
    enable_first_step_checkpoint: bool = key(False, "save after step 1, too")
    create_seed_checkpoint: bool = key(False, "save step 0 on one process and exit")
    last_save_model_only: bool = key(
        False, "the last checkpoint holds only the weights, in export_dtype; no run can be prolonged from it"
    )
    last_save_in_hf: bool = key(False, "the last checkpoint is a HuggingFace folder; needs last_save_model_only")
    export_dtype: str = key(
        "float32", "dtype of a model-only last checkpoint", choices=("float16", "bfloat16", "float32")
    )
    grace_seconds: int = key(
        120, "after SIGTERM or SIGINT: most seconds until the run has saved and ended, else it is ended", minimum=1
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recomputing activations in backward."""

    mode: str = key("selective", "what is recomputed", choices=("selective", "full", "none"))
    selective_ac_option: str = key(
        "2",
        "'op' keeps attention and every second matrix product, an integer n recomputes every n-th layer",
    )
    early_stop: bool = key(False, "stop recomputing once everything needed is there")
    preserve_rng_state: bool = key(True, "recompute with the random state of the forward")


@dataclass(frozen=True)
class Compile:
    """torch.compile."""

    enable: bool = key(False, "compile the components")
    components: list[str] = key(["model", "loss"], "what is compiled", choices=("model", "loss"))
    backend: str = key("inductor", "torch.compile backend")


@dataclass(frozen=True)
class Comm:
    """Process group timeouts, and NCCL's flight recorder."""

    init_timeout_seconds: int = key(300, "timeout of collectives up to the first finished step", minimum=1)
    train_timeout_seconds: int = key(100, "timeout of collectives after the first step", minimum=1)
    trace_buf_size: int = key(
        20000, "collectives that NCCL's flight recorder remembers, and writes at a timeout; 0 is off", minimum=0
    )
    save_traces_folder: str = key("comm_traces", "folder of what it writes, inside job.dump_folder", path=True)
    save_traces_file_prefix: str = key("rank_", "file of each rank in that folder, before the rank's number")


@dataclass(frozen=True)
class Validation:
    """Loss on held-out data."""

    enable: bool = key(False, "run validation")
    dataset: str = key("stdlib", "kind of data, as training.dataset", choices=DATASETS)
    dataset_path: str | None = key(None, "glob or folder of the data; none for stdlib", path=True)
    local_batch_size: int = key(8, "sequences of one batch on one data-parallel rank", minimum=1)
    seq_len: int = key(2048, "tokens of one sequence", minimum=1)
    freq: int = key(10, "training steps between two validations", minimum=1)
    steps: int = key(-1, "batches of one validation; -1 is all the data", minimum=1, special=-1)


@dataclass(frozen=True)
class Debug:
    """Reproducibility."""

    seed: int = key(0, "seed of initial weights and data order", minimum=0, maximum=2**63 - 1)
    deterministic: bool = key(False, "use deterministic algorithms; slower")
    deterministic_warn_only: bool = key(False, "warn instead of failing where there is no deterministic algorithm")


@dataclass(frozen=True)
class DMuon:
    """The distributed Muon optimizer and its ownership runtime; used when optimizer.name is DMuon."""

    momentum: float = key(0.95, "Muon momentum", minimum=0, below=1)
    nesterov: bool = key(True, "Nesterov momentum")
    ns_steps: int | None = key(None, "Newton-Schulz iterations; none is all of the coefficients' own", minimum=1)
    ns_backend: str = key("gram", "Newton-Schulz form", choices=("gram", "direct"))
    ns_coefficients: str = key(
        "polar_express", "Newton-Schulz coefficients", choices=("polar_express", "kj", "you", "deepseek_v4")
    )
    scale: str = key(
        "match_rms_adamw",
        "scale of an [m, n] update: match_rms_adamw 0.2 * sqrt(max(m, n)), original sqrt(max(1, m / n)), spectral"
        " sqrt(m / n), unit 1; each wants a learning rate of its own",
        choices=("match_rms_adamw", "original", "spectral", "unit"),
    )
    ns_kernel: str = key(
        "auto",
        "products of Newton-Schulz: cublas in full, triton (or quack, if installed) half of each symmetric one; auto"
        " is the environment's DMUON_NS_KERNEL, else a fixed rule on the GPU and the size",
        choices=("auto", "cublas", "triton", "quack"),
    )
    ns_restart_iterations: list[int] | None = key(
        None, "iterations after which the Gram form restarts; none is the coefficients' own", item=int, minimum=1
    )
    adamw_lr: float | None = key(None, "peak AdamW learning rate; none is optimizer.lr", minimum=0)
    normuon: bool = key(False, "NorMuon: every neuron of an update moves alike")
    normuon_beta2: float = key(0.95, "decay of NorMuon's second moment", minimum=0, below=1)
    cautious_weight_decay: bool = key(False, "matrices decay only where the update does not oppose it")
    qk_clip_threshold: float | None = key(
        None, "QK-clip: heads whose attention logits exceed it are scaled down; none is off (100 in Kimi K2)", above=0
    )
    clip: str = key(
        "joint",
        "what training.max_norm bounds: joint the norm of all gradients, buckets that of the matrices and that of the"
        " rest, each by itself",
        choices=("joint", "buckets"),
    )
    split_heads: bool = key(False, "orthogonalise query, key and value of each head by itself")
    reshard_after_forward: bool | None = key(
        None,
        "free unsharded weights after use (Z3); false keeps them until the optimizer changes them (Z2); none is as"
        " parallelism.fsdp_reshard_after_forward: Z2 for never, else Z3",
    )
    prefetch: int = key(1, "units unsharded ahead of the one that computes", minimum=0)
    include: list[str] = key([], "FQN globs of parameters to train with Muon beside the default ones")
    exclude: list[str] = key([], "FQN globs of parameters to leave out of Muon")
    others: str = key(
        "fsdp2",
        "what Muon leaves out: fsdp2 shards it, dedicated gives small ones an AdamW owner and shares the rows of"
        " embedding and head",
        choices=("fsdp2", "dedicated"),
    )
    min_matrix_dim: int = key(128, "smaller side a matrix needs to go to Muon by default", minimum=1)
    replicate_async: bool = key(True, "send new weights to replicas and shards while the next step begins")
    process_group_policy: str = key(
        "isolated", "DMuon's own process groups, or those of the trainer", choices=("isolated", "shared")
    )


@dataclass(frozen=True)
class JobConfig:
    """The resolved configuration of a run, one field a TOML section. Immutable; made by `load_config`."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)
    dmuon: DMuon = field(default_factory=DMuon)


def _sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    for f in fields(cls):
        if is_dataclass(f.type):
            yield path + f.name, f.type
            yield from _sections(f.type, f"{path}{f.name}.")


SECTIONS: dict[str, type] = dict(_sections(JobConfig, ""))
KEYS: dict[str, KeySpec] = {
    spec.name: spec for section, cls in SECTIONS.items() for spec in key_specs(cls, f"{section}.")
}
