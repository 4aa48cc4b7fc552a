"""The YAML of a run as checked dataclasses. Never imports MindSpore."""

from mindformers_ext.config.errors import ConfigError
from mindformers_ext.config.generation import GenerationSection
from mindformers_ext.config.loading import load_config
from mindformers_ext.config.overrides import parse_overrides
from mindformers_ext.config.rules import DATALOADERS, LR_SCHEDULERS, batch_size_mistake
from mindformers_ext.config.schema import InferenceSection, TrainConfig
from mindformers_ext.config.section import UNSET

__all__ = [
    "DATALOADERS",
    "LR_SCHEDULERS",
    "UNSET",
    "ConfigError",
    "GenerationSection",
    "InferenceSection",
    "TrainConfig",
    "batch_size_mistake",
    "load_config",
    "parse_overrides",
]
