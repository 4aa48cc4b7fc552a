"""The Trainer: from a configuration to a trained model or to answers."""

from mindformers_ext.trainer.trainer import Trainer

__all__ = ["Trainer"]
