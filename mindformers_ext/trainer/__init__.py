"""The Trainer: from a configuration to a trained model or to answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindformers_ext.trainer.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """Imports the Trainer, and MindSpore with it, when it is asked for: ``--validate`` needs neither."""
    if name == "Trainer":
        from mindformers_ext.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
