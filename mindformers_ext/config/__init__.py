"""The YAML of a run as checked dataclasses. Never imports MindSpore."""

from mindformers_ext.config.errors import ConfigError, ConfigFileNotFoundError
from mindformers_ext.config.generation import GenerationSection
from mindformers_ext.config.loading import load_config
from mindformers_ext.config.overrides import parse_overrides
from mindformers_ext.config.schema import (
    CallbackSection,
    CheckpointSection,
    ContextSection,
    DataloaderSection,
    InferenceSection,
    LoraSection,
    LrSchedulerSection,
    ModelSection,
    MonitorSection,
    OptimizerSection,
    ParallelismSection,
    PredictSection,
    ProfilerSection,
    RecomputeCommSection,
    RecomputeSection,
    SwapSection,
    TrainConfig,
    TrainDatasetSection,
    TrainingSection,
)
from mindformers_ext.config.section import UNSET, Section, Unset

__all__ = [
    "UNSET",
    "CallbackSection",
    "CheckpointSection",
    "ConfigError",
    "ConfigFileNotFoundError",
    "ContextSection",
    "DataloaderSection",
    "GenerationSection",
    "InferenceSection",
    "LoraSection",
    "LrSchedulerSection",
    "ModelSection",
    "MonitorSection",
    "OptimizerSection",
    "ParallelismSection",
    "PredictSection",
    "ProfilerSection",
    "RecomputeCommSection",
    "RecomputeSection",
    "Section",
    "SwapSection",
    "TrainConfig",
    "TrainDatasetSection",
    "TrainingSection",
    "Unset",
    "load_config",
    "parse_overrides",
]
