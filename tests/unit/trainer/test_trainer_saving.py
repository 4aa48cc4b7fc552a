"""`Trainer.save_checkpoint` and ``--save_checkpoint`` on one process: what they write is a model to predict with."""

import json
import pathlib
import sys

import pytest

from mindformers_ext.trainer import Trainer

ROOT = pathlib.Path(__file__).parents[3]
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
REFERENCE = json.loads((CHECKPOINT / "reference.json").read_text())["cases"][0]["prompt"]


def config(load_path):
    return {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(load_path)},
        "inference": {"input_data": [REFERENCE], "max_new_tokens": 6},
        "predict": {"progress": False},
    }


def answer(load_path):
    return Trainer(config(load_path)).inference(output="")


def test_a_predicting_trainer_saves_what_it_loaded_once_a_folder(tmp_path):
    expected = answer(CHECKPOINT)
    trainer = Trainer(config(CHECKPOINT))
    folder = trainer.save_checkpoint(tmp_path / "saved")
    assert folder == tmp_path / "saved" / "iteration_00000000"
    assert trainer.save_checkpoint(tmp_path / "saved") == folder
    assert answer(tmp_path / "saved") == expected
    with pytest.raises(ValueError, match="holds checkpoints of another run, up to iteration_00000000"):
        Trainer(config(CHECKPOINT)).save_checkpoint(tmp_path / "saved")


def test_the_command_line_saves_instead_of_predicting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    import run_mindformer

    pathlib.Path("predict.yaml").write_text(json.dumps(config(CHECKPOINT)))
    assert run_mindformer.main(["--config", "predict.yaml", "--save_checkpoint", "saved"]) == 0
    assert pathlib.Path("saved/iteration_00000000/checkpoint-model-0000000-0000001.safetensors").is_file()
    assert not pathlib.Path("inference_result.jsonl").exists()
    assert answer("saved") == answer(CHECKPOINT)
    sys.modules.pop("run_mindformer", None)
