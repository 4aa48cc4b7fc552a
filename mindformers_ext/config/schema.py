"""Every section of the YAML as a dataclass: keys, types, ranges and defaults.

The training sections keep the keys and defaults of MindSpore Transformers' PyNative `TrainConfig`; docs/yaml.md says
what each key does. Rules that need more than one key are in rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal

from mindformers_ext.config.generation import GenerationSection
from mindformers_ext.config.section import (
    Check,
    Count,
    CountOrAll,
    Fraction,
    FractionBelowOne,
    Name,
    Natural,
    NonNegativeFloat,
    OpenSection,
    PositiveFloat,
    Section,
    Seed,
)

OUTPUT_SUFFIXES = ("", ".jsonl", ".json", ".txt")


def _is_regex(value: str) -> bool:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError):
        return False
    return bool(value.strip())


def _is_output(value: str) -> bool:
    return bool(value.strip()) and PurePath(value).suffix.lower() in OUTPUT_SUFFIXES


Regex = Annotated[str, Check("that is a regular expression", _is_regex)]
Output = Annotated[str, Check("naming a file that ends in .jsonl, .json, .txt or has no suffix", _is_output)]
Betas = Annotated[list[FractionBelowOne], Check("with exactly 2 entries", lambda value: len(value) == 2)]
Rampup = Annotated[
    list[int],
    Check(
        "with 3 entries: start batch size >= 1, increment >= 1, samples >= 0",
        lambda value: len(value) == 3 and value[0] >= 1 and value[1] >= 1 and value[2] >= 0,
    ),
]
PathList = Annotated[list[Name], Check("with at least one entry", lambda value: len(value) > 0)]


@dataclass(slots=True, kw_only=True)
class CheckpointSection(Section):
    """Where weights are read from and saved to."""

    enable_save: bool = True
    save_path: str = ""
    save_max: Count = 5
    save_interleaved_steps: Count = 1000
    no_save_optim: bool = False
    async_save: bool = False
    prefix: Name | None = "checkpoint"
    remove_redundancy: bool = False
    load_path: str = ""
    weight_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    save_trainable_only: bool = False
    base_load_path: str = ""
    load_balanced: bool = False
    no_load_optim: bool = False
    load_worker_number: Count = 1
    save_global_layout_cache: bool = True
    reshard_worker_num: Count = 1

    def save_folder(self) -> Path:
        """Returns where checkpoints go."""
        return Path(self.save_path or "output/checkpoint")


@dataclass(slots=True, kw_only=True)
class TrainingSection(Section):
    """Length, batch sizes and reproducibility of a run."""

    steps: Count = 1000
    local_batch_size: Count = 1
    global_batch_size: Count = 1
    max_norm: float = 1.0
    use_skip_step_on_nan: bool = False
    max_consecutive_skipped_steps: Natural = 0
    seed: Seed = 42
    deterministic: bool = False
    rampup_batch_size: Rampup | None = None


@dataclass(slots=True, kw_only=True)
class ParallelismSection(Section):
    """Parallel degrees; the trainer works out the data-parallel rest from the number of processes."""

    data_parallel_shard: CountOrAll = -1
    data_parallel_shard_strategy: str = "optim_grads_params"
    reshard_after_forward_policy: Literal["always", "never", "default"] = "default"
    cpu_offload: bool = False
    disable_gradient_division: bool = True
    dense_fsdp_shard_size: Count | None = None
    tensor_parallel: Count = 1
    context_parallel: Count = 1
    context_parallel_method: Literal["colossal", "ulysses", "hybrid"] = "colossal"
    context_parallel_async: bool = False
    ulysses_degree_in_cp: Count | None = None
    context_parallel_mask_type: Literal["causal"] = "causal"
    pipeline_parallel: Count = 1
    pipeline_parallel_layers_per_stage: list[list[int]] | list[str] | str | None = "auto"
    pipeline_parallel_schedule: Literal["1f1b", "interleaved_1f1b", "gpipe"] = "1f1b"
    pipeline_parallel_microbatch_size: Count = 1
    pipeline_parallel_interleave_num: Count = 1
    pipeline_parallel_overlap_p2p: bool = False
    pipeline_parallel_overlap_b_f: bool = False
    pipeline_parallel_enable_dxdw_split: bool = False
    pipeline_parallel_p2p_transport: Literal["plain", "auto"] = "plain"
    sequence_parallel: bool = False
    enable_mc2: bool = False
    enable_loss_parallel: bool = False
    expert_parallel: Count = 1
    npu_nums_per_device: Count = 8
    moe_token_dispatcher_type: Literal["alltoall", "alltoall_deredundancy"] = "alltoall"
    expert_parallel_async_d2h: bool = False
    expert_parallel_use_safe_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class OptimizerSection(OpenSection):
    """The optimizer of a training run."""

    type: Name = "AdamW"
    betas: Betas = field(default_factory=lambda: [0.9, 0.95])
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    weight_decay_include: list[str] | None = None
    weight_decay_exclude: list[str] | None = None


@dataclass(slots=True, kw_only=True)
class LrSchedulerSection(OpenSection):
    """The learning rate as a function of the step."""

    type: Name | None = None
    learning_rate: NonNegativeFloat = 1e-5
    warmup_steps: Natural | None = None
    warmup_ratio: Fraction | None = None
    warmup_lr_init: NonNegativeFloat = 0.0
    total_steps: CountOrAll | None = None
    lr_end: NonNegativeFloat = 0.0


@dataclass(slots=True, kw_only=True)
class DataloaderSection(OpenSection):
    """Where training text comes from and how it becomes blocks of tokens."""

    type: Name | None = None
    shuffle: bool = False
    column_names: list[str] = field(default_factory=lambda: ["input_ids", "labels"])
    python_multiprocessing: bool = False
    path: Name | PathList | None = None
    tokenizer_path: Name | None = None
    text_field: Name = "text"
    prompt_field: Name | None = None
    response_field: Name | None = None
    seq_length: Count | None = None
    packing: bool = True


@dataclass(slots=True, kw_only=True)
class TrainDatasetSection(Section):
    """The training data."""

    dataloader: DataloaderSection = field(default_factory=DataloaderSection)
    drop_remainder: bool = True
    num_parallel_workers: Count = 8
    prefetch_size: Count = 1
    numa_enable: bool = False
    use_distribute_dataset: bool = False
    balance_enabled: bool = False


@dataclass(slots=True, kw_only=True)
class ModelSection(OpenSection):
    """The network. Every key but two is free and kept in `extra`: its family gives it a meaning."""

    model_type: Name | None = None
    architectures: Name | None = None


@dataclass(slots=True, kw_only=True)
class HealthCheckpointSection(Section):
    """Thresholds of the training health check."""

    embedding_local_norm_threshold: float = 100.0
    global_norm_skip_threshold: float = 100.0
    global_norm_skip_time: Natural = 10


@dataclass(slots=True, kw_only=True)
class TrainStateSection(Section):
    """Norms and losses to watch."""

    local_norm: bool | str | list[str] = ""
    local_loss: bool = False
    device_norm: bool | str | list[str] = False
    device_loss: bool = False


@dataclass(slots=True, kw_only=True)
class TensorboardSection(Section):
    """TensorBoard output."""

    output_dir: str = ""
    log_interval: Count = 1
    queue_size: Count = 1000


@dataclass(slots=True, kw_only=True)
class MoeMonitorSection(Section):
    """Tokens per expert."""

    save_tokens_per_expert_interval: Count | None = None
    target_layers: Count | list[Natural] | None = None


@dataclass(slots=True, kw_only=True)
class MonitorSection(Section):
    """Training monitors."""

    health_checkpoint: HealthCheckpointSection = field(default_factory=HealthCheckpointSection)
    train_state: TrainStateSection = field(default_factory=TrainStateSection)
    tensorboard: TensorboardSection = field(default_factory=TensorboardSection)
    moe_monitor: MoeMonitorSection = field(default_factory=MoeMonitorSection)


@dataclass(slots=True, kw_only=True)
class CallbackSection(OpenSection):
    """One training callback; the free keys are its arguments."""

    type: Name | None = None


@dataclass(slots=True, kw_only=True)
class ContextSection(Section):
    """MindSpore context."""

    mode: int = 1
    max_device_memory: str = "59GB"
    device_target: str = "Ascend"


@dataclass(slots=True, kw_only=True)
class ProfilerSection(Section):
    """Training profiler."""

    enable_profiling: bool = False
    start_step: Count = 1
    end_step: Count = 1
    output_path: str | None = None
    profiler_rank: list[Natural] | None = None
    profiler_level: Natural = 0
    mstx: bool = False
    profile_memory: bool = False
    profile_cpu: bool = True
    with_stack: bool = True


@dataclass(slots=True, kw_only=True)
class RecomputeSection(Section):
    """Activation recomputation in training."""

    mode: Literal["None", "full", "select"] = "None"
    full_recompute_layer: list[Any] | None = None
    select_module: dict[str, Any] | list[Any] | None = None
    exclude_op: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class RecomputeCommSection(Section):
    """Recomputation of communication in training."""

    enable: bool = False
    select_module: dict[str, Any] | list[Any] | None = None


@dataclass(slots=True, kw_only=True)
class SwapSection(Section):
    """Offload of activations in training."""

    enable: bool = False
    default_prefetch: Count = 1
    layer_swap: list[Any] | dict[str, Any] | None = None
    op_swap: list[Any] | dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class LoraSection(Section):
    """Low-rank adapters."""

    target_modules: Regex = ""
    exclude_layers: Regex | None = None
    lora_rank: Count = 8
    lora_alpha: Count = 16
    lora_dropout: FractionBelowOne = 0.0
    lora_a_std: NonNegativeFloat = 0.01
    lora_b_std: NonNegativeFloat = 0.0


@dataclass(slots=True, kw_only=True)
class InferenceSection(Section):
    """What to answer, how much at a time, and where the answers go."""

    max_new_tokens: Count = 50
    batch_size: Count = 8
    output: Output = "inference_result.jsonl"
    input_data: str | list[Any] | dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class PredictSection(Section):
    """How a predict run treats records and reports."""

    task: Literal["generate", "score"] = "generate"
    dataset_field: Name = "instruction"
    target_field: Name | None = None
    answer_field: Name | None = None
    target_delimiter: str = ""
    truncation: Literal["none", "left"] = "none"
    rolling: bool = False
    token_logprobs: bool = True
    prompt_template: Name | None = None
    chat_template: Name = "none"
    skip_special_tokens: bool = True
    suppress_unnamed_tokens: bool = False
    progress: bool = True
    metrics_file: bool = True
    resume: bool | Literal["auto"] = "auto"
    share_prefix: bool | Literal["auto"] = "auto"
    on_error: Literal["record", "abort"] = "record"
    max_errors: Count | None = None
    metrics: list[Any] | None = None
    reference_field: Name = "answer"
    metrics_in_rows: bool = False
    refill: bool = True
    start_timeout: NonNegativeFloat = 1800.0
    step_timeout: NonNegativeFloat = 600.0


@dataclass(slots=True, kw_only=True)
class TrainConfig(Section):
    """The whole configuration. `warnings` lists what is set but has no effect; the trainer logs it.

    `extra` holds the user's own top-level keys (those that start with `x-` or `x_`) and `eval_dataset`.
    """

    reserved: ClassVar[Mapping[str, str]] = {
        "load_checkpoint": "a key of graph mode; use checkpoint.load_path",
        "pretrained_model_dir": "a key of graph mode; use checkpoint.load_path",
        "predict_data": "a key of graph mode; use inference.input_data",
        "predict_batch_size": "a key of graph mode; use inference.batch_size",
        "parallel_config": "a key of graph mode; use parallelism",
        "parallel": "a key of graph mode; use parallelism",
        "use_parallel": "a key of graph mode; start the job with msrun and set the degrees in parallelism",
        "runner_config": "a key of graph mode; use training",
        "generation_config": "a key of graph mode; use generation",
    }

    run_mode: Literal["train", "predict"] = "train"
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lr_scheduler: LrSchedulerSection = field(default_factory=LrSchedulerSection)
    train_dataset: TrainDatasetSection = field(default_factory=TrainDatasetSection)
    model: ModelSection = field(default_factory=ModelSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)
    context: ContextSection = field(default_factory=ContextSection)
    profiler: ProfilerSection = field(default_factory=ProfilerSection)
    recompute: RecomputeSection = field(default_factory=RecomputeSection)
    recompute_comm: RecomputeCommSection = field(default_factory=RecomputeCommSection)
    swap: SwapSection = field(default_factory=SwapSection)
    callbacks: list[CallbackSection] = field(default_factory=list)
    lora_config: LoraSection | None = None
    inference: InferenceSection | None = None
    generation: GenerationSection = field(default_factory=GenerationSection)
    predict: PredictSection = field(default_factory=PredictSection)
    extra: dict[str, Any] = field(default_factory=dict, metadata={"yaml": False})
    warnings: list[str] = field(default_factory=list, compare=False, metadata={"yaml": False})

    def to_dict(self) -> dict[str, Any]:
        """What was written and what differs from the defaults, as plain data that `load_config` reads back."""
        return self.written()
