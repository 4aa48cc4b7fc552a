"""Layers of multi-token prediction: cut in prediction, named in training; and a DeepSeek-V3 that learns."""

import json
import pathlib

import pytest

from mindformers_ext.config import load_config
from mindformers_ext.trainer import Trainer
from mindformers_ext.trainer.inference import configure_inference
from mindformers_ext.trainer.model import resolve_model_config
from mindformers_ext.trainer.mtp import without_mtp_layers
from mindformers_ext.trainer.validate import validate

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "deepseek_v3"
CASE = json.loads((CHECKPOINT / "reference.json").read_text())["cases"][0]
MODEL = {
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"question": f"{a} + {b} =", "answer": f" {a + b}"} for a in range(5) for b in range(5)]
    pathlib.Path("train.jsonl").write_text("\n".join(map(json.dumps, lines)))


def predict(folder=CHECKPOINT, **model):
    return {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(folder)},
        "inference": {"max_new_tokens": 6},
        "generation": {"eos_token_id": None},
        "predict": {"progress": False},
        "model": model,
    }


def train():
    loader = {
        "type": "JsonlDataset",
        "path": "train.jsonl",
        "tokenizer_path": str(CHECKPOINT),
        "prompt_field": "question",
        "response_field": "answer",
        "seq_length": 24,
    }
    return {
        "checkpoint": {"save_path": "saved"},
        "training": {"steps": 20, "local_batch_size": 4, "global_batch_size": 4, "seed": 7},
        "optimizer": {"type": "AdamW"},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2, "warmup_steps": 3, "total_steps": 20},
        "train_dataset": {"dataloader": loader},
        "model": dict(MODEL),
    }


def mtp_lines(log, level):
    return [r.getMessage() for r in log.records if r.levelname == level and "multi-token" in r.getMessage()]


@pytest.mark.parametrize(
    "count", ["num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", "mtp_num_hidden_layers"]
)
@pytest.mark.parametrize("entries", ["compress_ratios", "csa_compress_ratios", "layer_types", "mlp_layer_types"])
@pytest.mark.parametrize("layers", ["num_hidden_layers", "num_layers"])
def test_every_name_of_the_layers_is_cut_in_every_source(count, entries, layers):
    stored = {layers: 3, count: 1, entries: [0, 4, 128, 7], "other": [1, 2, 3, 4]}
    for sources in ([stored, {}], [{}, stored], [{layers: 5}, stored], [stored, {count: 2}]):
        before = json.loads(json.dumps(sources))
        cut, changes = without_mtp_layers(sources)
        assert sources == before
        for source, original in zip(cut, sources, strict=True):
            assert source.get(count, 0) == 0
            assert source.keys() == original.keys()
        holder = next(source for source in cut if entries in source)
        assert (holder[entries], holder["other"]) == ([0, 4, 128], [1, 2, 3, 4])
        assert f"{entries} of 4 entries -> 3" in changes and f"{count} 1 -> 0" in changes


def test_the_text_model_of_a_composite_is_cut_too():
    text = {"num_hidden_layers": 2, "mtp_num_hidden_layers": 1, "layer_types": ["linear_attention"] * 3}
    cut, changes = without_mtp_layers([{"model_type": "qwen3_5", "text_config": text}, {}])
    assert cut[0]["text_config"] == text | {"mtp_num_hidden_layers": 0, "layer_types": ["linear_attention"] * 2}
    assert changes == ["mtp_num_hidden_layers 1 -> 0", "layer_types of 3 entries -> 2"]
    assert text["mtp_num_hidden_layers"] == 1


def test_nothing_is_said_about_a_model_without_such_layers():
    sources = [{"num_layers": 2, "layer_types": ["full_attention"] * 2, "num_nextn_predict_layers": 0}, {}]
    assert without_mtp_layers(sources) == (sources, [])


def test_prediction_cuts_them_from_config_json_and_yaml_with_one_line(log):
    config = load_config(predict(mtp_num_layers=1, mlp_layer_types=["dense", "moe", "moe", "moe", "moe"]))
    assert configure_inference(config).mlp_layer_types == ("dense", "moe", "moe", "moe")
    assert mtp_lines(log, "INFO") == [
        "model: layers of multi-token prediction are not used: num_nextn_predict_layers 1 -> 0, mtp_num_layers 1 -> 0, "
        "mlp_layer_types of 5 entries -> 4"
    ]


def test_prediction_needs_its_run_mode():
    with pytest.raises(ValueError, match="run_mode: prediction needs predict, not 'train'"):
        configure_inference(load_config(train()))


def test_a_published_checkpoint_predicts_and_its_cache_is_that_of_latents(log, capsys):
    assert Trainer(predict()).inference(CASE["prompt"]) == [(0, CASE["input_ids"] + CASE["greedy"][:6])]
    assert len(mtp_lines(log, "INFO")) == 1
    capsys.readouterr()
    validate(load_config(predict() | {"inference": {"max_new_tokens": 6, "output": "out.jsonl"}}))
    assert f"cache: {4 * (32 + 8) * 4:,} bytes a token" in capsys.readouterr().out


def test_training_warns_of_them_learns_and_what_it_saved_predicts(log):
    config = train()
    assert resolve_model_config(load_config(config)).num_layers == 2
    assert mtp_lines(log, "WARNING") == [
        "model: layers of multi-token prediction are not trained: num_nextn_predict_layers 1 -> 0"
    ]
    trainer = Trainer(config)
    losses = [line["loss"] for line in trainer.train().log_history]
    assert len(losses) == 20
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    again = Trainer(predict("saved"))
    prompts = ["1 + 1 =", "3 + 4 ="]
    assert again.inference(prompts) == trainer.inference(prompts, max_new_tokens=6, eos_token_id=None)
