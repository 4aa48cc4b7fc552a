"""docs/models.md: every family is listed, the worked example runs, and the cache costs what the table says."""

import json
import pathlib
import re
import types

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.models import families, transformer_config
from mindformers_ext.models.gpt_model import GPTModel

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"


def test_every_family_is_in_the_table():
    listed = re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)
    assert sorted(name for name in listed if name in families.FAMILIES) == sorted(families.FAMILIES)


def test_the_worked_example_reads_a_checkpoint(monkeypatch, tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    module = types.ModuleType("mistral")
    exec(compile(code, "mistral.py", "exec"), module.__dict__)
    monkeypatch.setitem(families.FAMILIES, "mistral", module.FAMILY)
    folder = CHECKPOINTS / "llama"
    keys = json.loads((folder / "config.json").read_text())
    keys |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    config = transformer_config({}, keys)
    model = GPTModel(config)
    load_weights(folder, model.weight_layout(), model.set_weight)
    case = json.loads((folder / "reference.json").read_text())["cases"][0]
    logits = model(Tensor(np.array([case["input_ids"]], np.int32)))["logits"].asnumpy()
    np.testing.assert_allclose(logits[0, -1], case["logits_last"], atol=5e-4)
    assert transformer_config({}, families.hf_config(config)) == config
    with pytest.raises(ValueError, match="sliding_window: 4096 is not supported for mistral"):
        transformer_config({}, keys | {"sliding_window": 4096})


def bytes_a_token(config, kind):
    """The first column of the page's table."""
    sparse = config.sparse_attention
    if kind == "linear_attention" or kind == "sliding_attention":
        return 0
    if kind == "compressed_sparse_attention":
        return 4 * (config.kv_channels + sparse.dsa_indexer_head_dim) / sparse.csa_compress_rate
    if kind == "heavily_compressed_attention":
        return 4 * config.kv_channels / sparse.hca_compress_rate
    if config.mla is not None:
        return 4 * (config.mla.kv_lora_rank + config.mla.qk_pos_emb_head_dim)
    return 8 * config.num_query_groups * config.kv_channels


def bytes_besides(config, kind):
    """The second column, for the layers whose bytes do not depend on how buffers grow."""
    if kind == "linear_attention":
        sizes = config.delta_net
        keys = sizes.linear_num_key_heads * sizes.linear_key_head_dim
        values = sizes.linear_num_value_heads * sizes.linear_value_head_dim
        matrix = sizes.linear_num_value_heads * sizes.linear_key_head_dim * sizes.linear_value_head_dim
        return 4 * (matrix + (sizes.linear_conv_kernel_dim - 1) * (2 * keys + values))
    if kind == "sliding_attention":
        return 4 * config.kv_channels * config.sparse_attention.csa_window_size
    return None


@pytest.mark.parametrize("family", sorted(folder.name for folder in CHECKPOINTS.iterdir()))
def test_a_token_costs_what_the_table_says(family):
    config = transformer_config({}, json.loads((CHECKPOINTS / family / "config.json").read_text()))
    states = GPTModel(config).new_cache(1, 4096)
    for kind, state in zip(config.layer_types, states, strict=True):
        state.reserve(1024)
        before = state.nbytes
        state.reserve(2048)
        assert state.nbytes - before == 1024 * bytes_a_token(config, kind), kind
        assert bytes_a_token(config, kind) == 4 * config.cache_width(kind)
        besides = bytes_besides(config, kind)
        if besides is not None:
            assert state.nbytes == besides, kind
