"""The model that the Trainer builds."""

from __future__ import annotations

from mindformers_ext.generate import GenerateMixin
from mindformers_ext.models.gpt_model import GPTModel


class CausalLM(GenerateMixin, GPTModel):
    """`GPTModel` with ``generate()``."""
