"""--validate: what it prints, what it refuses, and that a predict YAML is answered without MindSpore."""

import json
import pathlib
import subprocess
import sys

import pytest

from mindformers_ext.config import load_config
from mindformers_ext.trainer import validate as validate_module
from mindformers_ext.trainer.validate import validate

ROOT = pathlib.Path(__file__).parents[3]
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
PREDICT = {
    "run_mode": "predict",
    "checkpoint": {"load_path": str(CHECKPOINT)},
    "inference": {"input_data": ["a", "b"], "max_new_tokens": 20, "batch_size": 3, "output": "out.jsonl"},
}


def training(**options):
    loader = {"type": "JsonlDataset", "path": "train.jsonl", "tokenizer_path": str(CHECKPOINT)}
    return {
        "training": {"steps": 2, **options},
        "checkpoint": {"enable_save": False},
        "optimizer": {"type": "AdamW"},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
        "train_dataset": {"dataloader": loader},
        "model": json.loads((CHECKPOINT / "config.json").read_text()),
    }


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.jsonl").write_text('{"text": "one two three"}')


def test_the_cache_of_a_usual_prompt_stands_beside_the_largest(capsys, monkeypatch):
    stored = json.loads((CHECKPOINT / "config.json").read_text())
    per_token = 2 * 4 * stored["num_hidden_layers"] * stored["num_key_value_heads"] * stored["head_dim"]
    longest = stored["max_position_embeddings"]
    monkeypatch.setattr(validate_module, "_USUAL_PROMPT", 30)
    validate(load_config(PREDICT))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("cache: "))
    usual, most = (f"{3 * length * per_token / 2**20:,.1f} MiB" for length in (50, longest))
    assert line == (
        f"cache: {per_token:,} bytes a token; 3 rows of 50 tokens {usual}, at most {most} (3 rows of {longest})"
    )


def test_parameters_are_those_of_the_checkpoint_or_counted_without_one(capsys):
    validate(load_config(PREDICT))
    validate(load_config(training()))
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("model: "))
    assert first == second
    assert " 0 parameters" not in first


def test_batch_sizes_that_training_would_refuse_are_refused():
    config = load_config(training())
    config.training.local_batch_size, config.training.global_batch_size = 4, 6
    with pytest.raises(ValueError, match=r"training.global_batch_size\b.*\b6\b.* multiple"):
        validate(config)


def test_a_predict_yaml_is_checked_without_mindspore():
    code = (
        "import sys\n"
        "from mindformers_ext.config import load_config\n"
        "from mindformers_ext.trainer.validate import validate\n"
        f"validate(load_config({PREDICT!r}))\n"
        "sys.exit('mindspore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": {"save_path": "train.jsonl"}}, "checkpoint.save_path: "),
        ({"checkpoint": {"save_path": "new", "prefix": ".x"}}, "checkpoint.prefix "),
        ({"checkpoint": {"save_path": "old"}}, "holds checkpoints of another run"),
    ],
)
def test_a_training_that_could_not_save_is_refused_and_nothing_is_made(change, message):
    pathlib.Path("old/iteration_00000003").mkdir(parents=True)
    before = sorted(pathlib.Path().rglob("*"))
    with pytest.raises(ValueError, match=message):
        validate(load_config({**training(), **change}))
    assert sorted(pathlib.Path().rglob("*")) == before


def test_blocks_longer_than_the_model_takes_are_refused():
    settings = training()
    settings["train_dataset"]["dataloader"]["seq_length"] = 100_000
    with pytest.raises(ValueError, match=r"train_dataset.dataloader.seq_length \(100000\) exceeds"):
        validate(load_config(settings))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ("model", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ("callbacks", [{"type": "Nowhere"}], r"callbacks\[0\]: unknown callback 'Nowhere'"),
        ("parallelism", {"pipeline_parallel": 2}, "must divide the number of processes, which is 1"),
    ],
)
def test_what_the_run_would_refuse_is_refused(section, values, message):
    settings = training()
    if section == "model":
        del settings["model"]["rope_parameters"]
        values = {**settings["model"], **values}
    with pytest.raises(ValueError, match=message):
        validate(load_config({**settings, section: values}))


def test_the_training_data_is_read():
    settings = training()
    settings["train_dataset"]["dataloader"]["path"] = "."
    with pytest.raises(ValueError, match="^train_dataset.dataloader.path: . is a directory"):
        validate(load_config(settings))
    pathlib.Path("bad.jsonl").write_text('{"txt": 1}')
    settings["train_dataset"]["dataloader"]["path"] = "bad.jsonl"
    with pytest.raises(ValueError, match=r"bad.jsonl:1: field 'text'"):
        validate(load_config(settings))


def test_the_checkpoint_to_continue_is_read(capsys):
    from mindformers_ext.trainer import Trainer

    settings = training()
    settings["checkpoint"] = {"save_path": "saved"}
    Trainer(settings).train()
    settings["checkpoint"]["load_path"] = "saved"
    validate(load_config(settings))
    assert "continues: saved/iteration_00000002 after step 2\n" in capsys.readouterr().out
    common = pathlib.Path("saved/iteration_00000002/common.json")
    common.write_text(json.dumps({**json.loads(common.read_text()), "consumed_samples": "x"}))
    with pytest.raises(ValueError, match="iteration_00000002/common.json: consumed_samples must be a whole number"):
        validate(load_config(settings))
