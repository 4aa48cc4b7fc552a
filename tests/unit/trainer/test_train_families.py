"""Every family can be trained, and predicts from what training saved."""

import json
import pathlib

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.models import transformer_config
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.predict import Tokenizer
from mindformers_ext.trainer import Trainer
from mindformers_ext.trainer.dataset import build_dataset

ROOT = pathlib.Path(__file__).parents[3]
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"
FAMILIES = sorted(folder.name for folder in CHECKPOINTS.iterdir())
QUICKSTART = ROOT / "configs" / "quickstart"
STEPS = 20


def configuration(family):
    model = json.loads((CHECKPOINTS / family / "config.json").read_text())
    return {
        "checkpoint": {"save_path": "saved", "save_interleaved_steps": STEPS},
        "training": {"steps": STEPS, "local_batch_size": 4, "global_batch_size": 4, "seed": 1},
        "optimizer": {"type": "AdamW"},
        "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 5e-3, "warmup_steps": 2, "total_steps": STEPS},
        "train_dataset": {
            "dataloader": {
                "type": "JsonlDataset",
                "path": str(QUICKSTART / "facts.jsonl"),
                "tokenizer_path": str(QUICKSTART / "tokenizer"),
                "prompt_field": "prompt",
                "response_field": "response",
                "seq_length": 32,
                "shuffle": True,
            }
        },
        "model": model | {"vocab_size": 1536, "initializer_range": 0.05},
    }


def loss(model):
    """Mean loss over some documents of the quickstart data."""
    path, tokenizer = str(QUICKSTART / "facts.jsonl"), Tokenizer.from_folder(QUICKSTART / "tokenizer")
    data = build_dataset(
        "JsonlDataset", path, tokenizer, 32, prompt_field="prompt", response_field="response", packing=False
    )
    batch = data.batch(0, 32)
    return float(model(Tensor(batch.input_ids), labels=Tensor(batch.labels)).asnumpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_falls_all_that_is_trained_moves_and_the_saved_folder_predicts(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(configuration(family))
    assert len(trainer.train().log_history) == STEPS
    saved = GPTModel(transformer_config({}, json.loads(pathlib.Path("saved/config.json").read_text())))
    load_weights("saved", saved.weight_layout(), saved.set_weight)
    trained = trainer.model.parameters_dict()
    fresh = GPTModel(saved.config)
    fresh.init_weights(1)
    assert loss(trainer.model) < 0.9 * loss(fresh)
    for name, parameter in fresh.parameters_dict().items():
        moved = np.any(trained[name].asnumpy() != parameter.asnumpy())
        assert moved == parameter.requires_grad, name

    for name, parameter in saved.parameters_dict().items():
        np.testing.assert_array_equal(parameter.asnumpy(), trained[name].asnumpy(), err_msg=name)

    predicting = {
        "run_mode": "predict",
        "checkpoint": {"load_path": "saved"},
        "inference": {"input_data": ["Paris", "1 + 1 ="], "max_new_tokens": 4, "batch_size": 2},
    }
    results = Trainer(predicting).inference()
    assert [index for index, _ in results] == [0, 1]
