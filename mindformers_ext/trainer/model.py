"""From a configuration to a model."""

from __future__ import annotations

from mindformers_ext.checkpoint import model_files_folder
from mindformers_ext.checkpoint.files import read_json_object
from mindformers_ext.config import TrainConfig
from mindformers_ext.generate import GenerateMixin
from mindformers_ext.models import TransformerConfig, transformer_config
from mindformers_ext.models.gpt_model import GPTModel


class CausalLM(GenerateMixin, GPTModel):
    """`GPTModel` with ``generate()``."""


def resolve_model_config(config: TrainConfig) -> TransformerConfig:
    """Joins the ``model`` section with the ``config.json`` that lies beside the weights, if there is one.

    Raises:
        ValueError: unknown family, missing or contradictory keys, or an unreadable ``config.json``.
    """
    hf_config = None
    if config.checkpoint.load_path:
        path = model_files_folder(config.checkpoint.load_path) / "config.json"
        if path.is_file():
            hf_config = read_json_object(path)
    section = dict(config.model.extra)
    for key in ("model_type", "architectures"):
        if getattr(config.model, key) is not None:
            section[key] = getattr(config.model, key)
    if not section and hf_config is None:
        raise ValueError(
            f"model: the section is missing and {config.checkpoint.load_path or 'checkpoint.load_path'} "
            "has no config.json that would describe the model"
        )
    return transformer_config(section, hf_config)
