"""Trainer.train(): exact resumption, and prediction from what it saved."""

import json
import pathlib

import numpy as np
import pytest

from mindformers_ext.checkpoint import load_weights
from mindformers_ext.models import transformer_config
from mindformers_ext.models.gpt_model import GPTModel
from mindformers_ext.trainer import Trainer, checks, saving, setup
from mindformers_ext.trainer.causal_lm import CausalLM

TOKENIZER = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
MODEL = {
    "model_type": "qwen3",
    "architectures": "Qwen3ForCausalLM",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"question": f"{a} + {b} =", "answer": f" {a + b}"} for a in range(5) for b in range(5)]
    pathlib.Path("train.jsonl").write_text("\n".join(map(json.dumps, lines)))


def config(**sections):
    base = {
        "checkpoint": {"save_path": "saved", "save_interleaved_steps": 10},
        "training": {"steps": 20, "local_batch_size": 2, "global_batch_size": 4, "seed": 7},
        "optimizer": {"type": "AdamW"},
        "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 1e-2, "warmup_steps": 3, "total_steps": 20},
        "train_dataset": {
            "dataloader": {
                "type": "JsonlDataset",
                "path": "train.jsonl",
                "tokenizer_path": str(TOKENIZER),
                "prompt_field": "question",
                "response_field": "answer",
                "seq_length": 24,
                "shuffle": True,
            }
        },
        "model": dict(MODEL),
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return base


def weights(trainer):
    return {name: parameter.asnumpy().copy() for name, parameter in trainer.model.parameters_dict().items()}


def losses(state):
    return {line["step"]: line["loss"] for line in state.log_history}


def same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_loss_falls_without_an_inference_section():
    state = Trainer(config()).train()
    history = losses(state)
    assert len(history) == 20 and history[20] < 0.7 * history[1]


def test_same_seed_same_run_and_other_seed_another():
    first, second = (Trainer(config(checkpoint={"save_path": name})) for name in ("first", "second"))
    assert losses(first.train()) == losses(second.train())
    same(weights(first), weights(second))
    assert losses(Trainer(config(training={"seed": 8}, checkpoint={"enable_save": False})).train()) != losses(
        first.state
    )


@pytest.mark.parametrize("load_path", ["saved", "saved/iteration_00000010"])
def test_ten_steps_and_ten_more_equal_twenty_to_the_last_digit(load_path):
    whole = Trainer(config(checkpoint={"save_path": "whole"}))
    whole.train()
    half = Trainer(config(training={"steps": 10}))
    half.train()
    resumed = Trainer(config(checkpoint={"load_path": load_path}))
    assert resumed.state.global_step == 10
    resumed.train()
    history = losses(whole.state)
    assert losses(resumed.state) == {step: history[step] for step in range(11, 21)}
    same(weights(resumed), weights(whole))


def test_a_growing_batch_resumes_in_the_middle_of_its_growth_to_the_last_digit():
    from mindformers_ext.trainer.callbacks import TrainerCallback

    class Sizes(TrainerCallback):
        def __init__(self):
            self.sizes = []

        def on_step_end(self, args, state, **kwargs):
            self.sizes.append(state.global_batch_size)

    def run(**sections):
        log = Sizes()
        trainer = Trainer(config(**sections), callbacks=[log])
        trainer.train()
        return trainer, log.sizes

    training = {"steps": 9, "global_batch_size": 6, "rampup_batch_size": [2, 2, 14]}
    whole, sizes = run(training=training, checkpoint={"save_path": "whole"})
    assert sizes == [2, 2, 2, 2, 4, 4, 6, 6, 6]
    assert whole.state.consumed_samples == sum(sizes)
    half, first = run(training={**training, "steps": 5})
    resumed, rest = run(training=training, checkpoint={"load_path": "saved"})
    assert (first, rest) == (sizes[:5], sizes[5:])
    assert losses(half.state) | losses(resumed.state) == losses(whole.state)
    assert resumed.state.to_common() == whole.state.to_common()
    same(weights(resumed), weights(whole))


def test_predicting_from_the_saved_folder_equals_predicting_in_memory():
    trainer = Trainer(config())
    trainer.train()
    prompts = ["1 + 2 =", "4 + 4 =", "0 + 3 ="]
    in_memory = trainer.inference(prompts, max_new_tokens=8, output="memory.jsonl", batch_size=2)
    predict = {
        "run_mode": "predict",
        "checkpoint": {"load_path": "saved"},
        "inference": {"max_new_tokens": 8, "batch_size": 2, "output": "folder.jsonl"},
    }
    assert Trainer(predict).inference(prompts) == in_memory
    assert pathlib.Path("folder.jsonl").read_bytes() == pathlib.Path("memory.jsonl").read_bytes()
    # A training YAML with an inference section added says the same.
    with_training_sections = {**config(), **predict}
    assert Trainer(with_training_sections).inference(prompts) == in_memory


def test_inference_between_steps_leaves_training_as_it_was():
    whole = Trainer(config(checkpoint={"enable_save": False}))
    whole.train()
    from mindformers_ext.trainer.callbacks import TrainerCallback

    class Ask(TrainerCallback):
        def on_step_end(self, args, state, **kwargs):
            if state.global_step % 5 == 0:
                asked.inference(["1 + 2 ="], max_new_tokens=4, output="")
                assert kwargs["model"].training

    asked = Trainer(config(checkpoint={"enable_save": False}), callbacks=[Ask()])
    asked.train()
    assert losses(asked.state) == losses(whole.state)
    same(weights(asked), weights(whole))


def test_save_max_keeps_the_newest_checkpoints():
    Trainer(config(checkpoint={"save_interleaved_steps": 5, "save_max": 2})).train()
    assert sorted(path.name for path in pathlib.Path("saved").glob("iteration_*")) == [
        "iteration_00000015",
        "iteration_00000020",
    ]
    assert pathlib.Path("saved/latest_checkpointed_iteration.txt").read_text() == "20"


def test_weights_alone_start_a_new_run():
    first = Trainer(config())
    first.train()
    fresh = Trainer(config(checkpoint={"load_path": "saved", "save_path": "new", "no_load_optim": True}))
    assert fresh.state.global_step == 0
    same(weights(fresh), weights(first))


@pytest.mark.parametrize("load", [{}, {"load_path": "saved", "no_load_optim": True}])
def test_a_new_run_is_not_saved_among_the_checkpoints_of_another(load):
    Trainer(config(training={"steps": 1})).train()
    before = {path: path.read_bytes() for path in pathlib.Path("saved").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"saved holds checkpoints of another run, up to iteration_00000001; set "):
        Trainer(config(checkpoint=load))
    assert {path: path.read_bytes() for path in pathlib.Path("saved").rglob("*") if path.is_file()} == before
    Trainer(config(checkpoint={**load, "enable_save": False}))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"save_path": "train.jsonl"}, "save_path"),
        ({"save_path": "train.jsonl/below"}, "save_path"),
        ({"save_path": "/proc/x"}, "save_path"),
        ({"prefix": "a/b"}, "prefix"),
        ({"prefix": ".x"}, "prefix"),
        ({"prefix": "x" * 250}, "save_path"),
    ],
)
def test_a_folder_that_cannot_be_saved_to_is_refused_before_the_first_step(settings, key, monkeypatch):
    monkeypatch.setattr(checks, "build_dataset", lambda *_, **__: pytest.fail("data was read"))
    before = sorted(pathlib.Path().rglob("*"))
    with pytest.raises(ValueError, match=rf"^checkpoint.{key}\b"):
        Trainer(config(checkpoint=settings))
    assert sorted(pathlib.Path().rglob("*")) == before


def test_the_model_files_come_after_the_first_checkpoint(monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(saving, "save_checkpoint", fail)
    with pytest.raises(OSError, match="disk full"):
        Trainer(config(training={"steps": 1})).train()
    assert not pathlib.Path("saved", "config.json").exists()


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"model_type": "qwen2", "architectures": "Qwen2ForCausalLM", "add_qkv_bias": False}, "add_qkv_bias"),
        ({"qk_layernorm": False}, "qk_layernorm"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM", "qk_layernorm": True}, "qk_layernorm"),
        ({"mlp_bias": True}, "add_mlp_bias"),
        ({"add_proj_bias": True}, "add_proj_bias"),
    ],
)
def test_a_model_that_its_own_checkpoint_could_not_describe_is_refused(model, field):
    with pytest.raises(ValueError, match=rf"config.json cannot say {field} "):
        Trainer(config(model=model))


def test_blocks_longer_than_the_model_takes_are_refused_before_data_is_read():
    settings = config(model={"seq_length": 20})
    settings["train_dataset"]["dataloader"]["path"] = "nowhere.jsonl"
    with pytest.raises(ValueError, match=r"train_dataset.dataloader.seq_length \(24\) exceeds .* 20"):
        Trainer(settings)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({"seq_length": 32}, r"seq_length 32 instead of 24, blocks \d+ instead of \d+"),
        ({"packing": False}, "blocks 25 "),
    ],
)
def test_a_position_in_other_blocks_is_refused(loader, message):
    Trainer(config(training={"steps": 2})).train()
    settings = config(checkpoint={"load_path": "saved"})
    settings["train_dataset"]["dataloader"].update(loader)
    with pytest.raises(ValueError, match=rf"iteration_00000002 \({message}.*no_load_optim: true"):
        Trainer(settings)


def test_another_order_of_the_same_blocks_is_told(caplog):
    Trainer(config(training={"steps": 2})).train()
    settings = config(checkpoint={"load_path": "saved"}, training={"global_batch_size": 2})
    settings["train_dataset"]["dataloader"]["packing"] = True
    Trainer(settings)
    assert "another order" not in caplog.text
    common = pathlib.Path("saved/iteration_00000002/trainer_state.json")
    stored = json.loads(common.read_text())
    stored["data"]["seed"] = 8
    common.write_text(json.dumps(stored))
    Trainer(settings)
    assert "another order of data than in saved/iteration_00000002: seed 7 instead of 8" in caplog.text


def test_a_missing_folder_is_named_by_its_key():
    with pytest.raises(FileNotFoundError, match="^checkpoint.load_path: the folder nope does not exist$"):
        Trainer({"run_mode": "predict", "checkpoint": {"load_path": "nope"}, "inference": {}})
    with pytest.raises(FileNotFoundError, match="^checkpoint.load_path: the folder nope "):
        Trainer(config(checkpoint={"load_path": "nope"}))
    settings = config()
    settings["train_dataset"]["dataloader"]["tokenizer_path"] = "nope"
    with pytest.raises(FileNotFoundError, match="^train_dataset.dataloader.tokenizer_path: the folder nope "):
        Trainer(settings)


def test_a_checkpoint_without_optimizer_cannot_be_continued():
    Trainer(config(checkpoint={"no_save_optim": True})).train()
    with pytest.raises(ValueError, match="saved without optimizer .*set checkpoint.no_load_optim: true"):
        Trainer(config(checkpoint={"load_path": "saved"}))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("common.json", "holds no training checkpoint .*checkpoint.no_load_optim: true"),
        ("checkpoint-opt-0000000-0000001.safetensors", "saved without optimizer .*checkpoint.no_load_optim: true"),
    ],
)
def test_a_checkpoint_that_cannot_be_continued_is_refused_before_its_weights_are_read(file, message, monkeypatch):
    Trainer(config(training={"steps": 1})).train()
    pathlib.Path("saved/iteration_00000001", file).unlink()
    monkeypatch.setattr(setup, "load_model_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        Trainer(config(checkpoint={"load_path": "saved"}))


def test_weights_and_optimizer_come_from_one_step_when_the_tracker_moves_meanwhile(monkeypatch):
    Trainer(config(training={"steps": 20})).train()
    tracker = pathlib.Path("saved/latest_checkpointed_iteration.txt")
    tracker.write_text("10")
    original = checks.load_training_state

    def load_then_move(path):
        state = original(path)
        tracker.write_text("20")
        return state

    monkeypatch.setattr(checks, "load_training_state", load_then_move)
    resumed = Trainer(config(checkpoint={"load_path": "saved"}))
    assert resumed.state.global_step == 10
    saved = {}
    load_weights("saved/iteration_00000010", resumed.model.weight_layout(), saved.__setitem__)
    same(weights(resumed), saved)


def test_a_given_model_without_layout_keeps_its_weights(monkeypatch):
    monkeypatch.delattr(GPTModel, "weight_layout")
    given = CausalLM(transformer_config(MODEL, None))
    given.init_weights(3)
    before = {name: parameter.asnumpy().copy() for name, parameter in given.parameters_dict().items()}
    settings = config(checkpoint={"load_path": str(TOKENIZER), "enable_save": False}, training={"steps": 1})
    trainer = Trainer(settings, model=given)
    same(weights(trainer), before)
    trainer.train()


def test_inference_of_a_training_trainer_writes_no_file_unless_asked():
    trainer = Trainer(config(checkpoint={"enable_save": False}))
    before = sorted(pathlib.Path().iterdir())
    trainer.inference("1 + 1 =", max_new_tokens=2)
    assert sorted(pathlib.Path().iterdir()) == before
    trainer = Trainer(config(checkpoint={"enable_save": False}, inference={"max_new_tokens": 2}))
    trainer.inference("1 + 1 =")
    assert pathlib.Path("inference_result.jsonl").is_file()


def test_training_starts_from_huggingface_weights():
    settings = config(checkpoint={"load_path": str(TOKENIZER)}, training={"steps": 1})
    del settings["model"]
    settings["train_dataset"]["dataloader"]["seq_length"] = 32
    trainer = Trainer(settings)
    loaded = {}
    load_weights(TOKENIZER, trainer.model.weight_layout(), loaded.__setitem__)
    same(weights(trainer), loaded)
    trainer.train()
    assert Trainer({"run_mode": "predict", "checkpoint": {"load_path": "saved"}, "inference": {}}).inference(
        "1 + 1 =", max_new_tokens=2, output=""
    )


def test_a_missing_training_file_is_named():
    settings = config()
    settings["train_dataset"]["dataloader"]["path"] = "nowhere.jsonl"
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        Trainer(settings)
