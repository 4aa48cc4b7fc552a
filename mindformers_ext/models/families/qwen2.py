"""Qwen2 and Qwen2.5: dense, bias on the query, key and value projections."""

from __future__ import annotations

from typing import Any

from mindformers_ext.models.families import dense
from mindformers_ext.models.families.family import Family

# transformers gives Qwen2 its biases whatever these keys say, and published files hold attention_bias: false.
_ALIASES = {key: target for key, target in dense.ALIASES.items() if key not in ("attention_bias", "mlp_bias")}


def _defaults(values: dict[str, Any]) -> dict[str, Any]:
    return {"add_qkv_bias": True, "max_position_embeddings": 32768}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _ALIASES, _defaults, dense.weight_layout, dense.hf_config)
