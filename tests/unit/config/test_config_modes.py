"""What each run mode needs, what is refused because it would change results, and what is only named in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindformers_ext.config import ConfigError, load_config

PREDICT: dict[str, Any] = {"run_mode": "predict", "checkpoint": {"load_path": "w"}, "inference": {}}


def refused(source: Any, overrides: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, **options)
    return str(caught.value)


def test_a_minimal_predict_file_needs_nothing_of_training(data: Path):
    config = load_config(data / "predict.yaml")
    assert config.inference is not None
    assert (config.inference.batch_size, config.inference.max_new_tokens) == (8, 50)
    assert config.inference.output == "inference_result.jsonl"
    assert config.predict.dataset_field == "instruction" and config.model.extra == {} and config.warnings == []


@pytest.mark.parametrize("name", ["pretrain_mla", "pretrain_hybrid"])
def test_a_stock_training_file_with_an_inference_section_predicts(name: str, data: Path, load):
    text = (data / f"{name}.yaml").read_text().replace('load_path: ""', "load_path: w")
    config = load(f"run_mode: predict\n{text}\ninference:\n  input_data: [a, b]\n")
    assert config.inference.input_data == ["a", "b"]
    assert config.model.extra["seq_length"] == 128
    (summary,) = config.warnings
    assert summary.startswith("no effect in predict: optimizer, lr_scheduler, train_dataset, training.steps")
    assert ("recompute" in summary, "eval_dataset" in summary) == ((name == "pretrain_hybrid"),) * 2
    assert "seed" not in summary and "load_path" not in summary and "dataloader" not in summary


def test_a_training_file_trains_and_with_inference_added_predicts(data: Path):
    config = load_config(data / "train.yaml")
    assert config.run_mode == "train" and config.inference is None and config.warnings == []
    assert config.lr_scheduler.learning_rate == 1e-3
    assert config.model.architectures == "Qwen3ForCausalLM"
    assert config.model.extra["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    assert load_config(data / "train.yaml", {"inference.batch_size": 2}).run_mode == "train"
    predict = {"run_mode": "predict", "checkpoint.load_path": "w", "inference": {"input_data": "a"}}
    assert load_config(data / "train.yaml", predict).inference is not None


def test_training_is_the_default_mode(data: Path):
    assert "model.model_type: is missing; training needs it" in refused({"training": {}})


def test_predict_needs_inference_and_a_load_path():
    assert refused(PREDICT, {"inference": None}).startswith("override inference: is missing; run_mode: predict needs")
    assert "is missing; run_mode: predict needs this section" in refused({**PREDICT, "inference": None})
    for path in ("", "  "):
        message = refused({**PREDICT, "checkpoint": {"load_path": path}})
        assert message.startswith("checkpoint.load_path: is missing; run_mode: predict needs the folder")
    assert "checkpoint.load_path: is missing" in refused({"run_mode": "predict", "inference": {}})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "model.model_type: is missing"),
        ("train_dataset", None, "train_dataset.dataloader.type: is missing; training needs one of JsonlDataset"),
        (
            "train_dataset.dataloader.type",
            "MindDataset",
            "'MindDataset' is not supported in training; use JsonlDataset",
        ),
        ("train_dataset.dataloader.path", None, "train_dataset.dataloader.path: is missing"),
        ("train_dataset.dataloader.path", [], "train_dataset.dataloader.path: expected text that is not empty, or a l"),
        ("train_dataset.dataloader.tokenizer_path", None, "train_dataset.dataloader.tokenizer_path: is missing"),
        ("train_dataset.dataloader.prompt_field", "q", "response_field: is missing; prompt_field and response_field"),
        ("train_dataset.dataloader.response_field", "q", "prompt_field: is missing; prompt_field and response_field"),
        ("train_dataset.dataloader.text_fild", "q", "did you mean train_dataset.dataloader.text_field?"),
        ("train_dataset.dataloader.sizes", [1], "train_dataset.dataloader.sizes: unknown key"),
        ("lr_scheduler.type", None, "lr_scheduler.type: is missing; training needs one of ConstantWarmUpLR"),
        ("lr_scheduler.type", "Cosine", "lr_scheduler.type: 'Cosine' is not supported in training"),
        ("lr_scheduler.num_cycles", 2, "lr_scheduler.num_cycles: unknown key"),
        ("lr_scheduler.warmup_ratio", 0.1, "lr_scheduler.warmup_ratio: excludes warmup_steps"),
        ("optimizer.type", "Muon", "optimizer.type: 'Muon' is not supported in training; use AdamW"),
        ("optimizer.momentum", 0.9, "optimizer.momentum: unknown key"),
        ("training.global_batch_size", 3, "training.global_batch_size: 3 is not a multiple of local_batch_size 2"),
        ("training.rampup_batch_size", [1, 1, 8], "rampup_batch_size: start 1 and increment 1 must be multiples of l"),
        ("training.rampup_batch_size", [6, 2, 8], "rampup_batch_size: steps of 2 from 6 do not lead to global_batch"),
        ("checkpoint.save_path", " ", "checkpoint.save_path: is missing; give the folder to save to, or set"),
        ("callbacks", [{"every": 1}], "callbacks[0].type: is missing"),
    ],
)
def test_training_refuses_what_it_cannot_do(key: str, value: Any, message: str, data: Path):
    assert message in refused(data / "train.yaml", {key: value})


def test_a_prompt_field_needs_records(data: Path):
    fields = {"prompt_field": "q", "response_field": "a", "type": "TextDataset"}
    overrides = {f"train_dataset.dataloader.{key}": value for key, value in fields.items()}
    assert "prompt_field: needs type JsonlDataset" in refused(data / "train.yaml", overrides)
    assert load_config(data / "train.yaml", {**overrides, "train_dataset.dataloader.type": "JsonlDataset"})


def test_the_load_path_stands_in_for_model_and_tokenizer(data: Path):
    overrides = {"checkpoint.load_path": "w", "model": None, "train_dataset.dataloader.tokenizer_path": None}
    assert load_config(data / "train.yaml", overrides).model.model_type is None


def test_nothing_is_required_of_sections_whose_object_is_provided():
    provided = ("model", "train_dataset", "optimizer", "lr_scheduler")
    source = {"optimizer": {"type": "Mine", "a": 1}, "checkpoint": {"enable_save": False}}
    assert load_config(source, provided=provided).run_mode == "train"
    assert "lr_scheduler.type" in refused({}, provided=provided[:3])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"lora_config": {"target_modules": ".*"}}, "lora_config: adapters are not supported yet"),
        ({"lora_config": {"target_modules": "("}}, "lora_config.target_modules: expected text that is a regular expr"),
        ({"checkpoint": {"load_path": "w", "base_load_path": "b"}}, "checkpoint.base_load_path: adapter checkpoints"),
        ({"checkpoint": {"load_path": "w", "save_trainable_only": True}}, "checkpoint.save_trainable_only: adapter"),
        (
            {"generation": {"num_return_sequences": 2}},
            "generation.num_return_sequences: 2 answers need do_sample: true",
        ),
        ({"parallelism": {"tensor_parallel": 2}}, "parallelism.tensor_parallel: 2 needs parallelism.sequence_parallel"),
        (
            {"parallelism": {"moe_token_dispatcher_type": "alltoall_deredundancy"}},
            "parallelism.moe_token_dispatcher_type: 'alltoall_deredundancy' needs expert_parallel (1) >= ",
        ),
        ({"profiler": {"start_step": 3}}, "profiler.start_step: 3 is after end_step 1"),
    ],
)
def test_what_would_change_results_is_refused_in_predict_too(section: dict[str, Any], message: str):
    assert refused({**PREDICT, **section}).startswith(message)


IGNORED: dict[str, Any] = {
    "recompute": {"mode": "select"},
    "recompute_comm": {"enable": True},
    "swap": {"enable": True},
    "profiler": {"enable_profiling": True},
    "context": {"mode": 0, "device_target": "Ascend"},
}


def test_what_has_no_effect_is_named_once_in_predict():
    warnings = load_config({**PREDICT, **IGNORED}).warnings
    named = "recompute, recompute_comm, swap, profiler, context.mode, context.device_target"
    assert warnings == [f"no effect in predict: {named}"]


def test_what_has_no_effect_is_named_with_the_reason_in_training(data: Path):
    written = {
        "checkpoint.async_save": True,
        "checkpoint.load_worker_number": 1,
        "train_dataset.num_parallel_workers": 8,
        "train_dataset.drop_remainder": True,
        "train_dataset.dataloader.column_names": ["input_ids", "labels"],
        "monitor.tensorboard.log_interval": 2,
        "eval_dataset": {},
        **IGNORED,
    }
    assert load_config(data / "train.yaml", written).warnings == [
        "no effect: checkpoint.async_save (checkpoints are written before the next step)",
        "no effect: checkpoint.load_worker_number (every process reads its own part of a checkpoint)",
        "no effect: train_dataset.drop_remainder (an epoch's last blocks are followed by the next epoch's first)",
        "no effect: train_dataset.num_parallel_workers, train_dataset.dataloader.column_names "
        "(the data is read and packed before the first step)",
        "no effect: monitor (the training log holds step, loss, learning rate, gradient norm and tokens/s)",
        "no effect: eval_dataset (the callback EvaluationCallback evaluates)",
        "no effect: recompute, recompute_comm, swap, profiler (not supported yet)",
        "no effect: context.mode, context.device_target "
        "(the device is the one that MindSpore finds, the mode is PyNative)",
    ]


def test_a_setting_that_asks_for_what_happens_anyway_is_not_named(data: Path):
    written = {
        "checkpoint.async_save": False,
        "train_dataset.numa_enable": False,
        "recompute": {"mode": "None", "exclude_op": {}},
        "swap": {"enable": False, "default_prefetch": 2},
        "profiler": {"enable_profiling": False, "end_step": 5},
        "context": {"mode": 1},
        "monitor": {},
    }
    assert load_config(data / "train.yaml", written).warnings == []
    assert load_config(PREDICT, {"checkpoint.async_save": False, "context.mode": 1, "training.seed": 3}).warnings == []


def test_warnings_are_the_same_after_a_round_trip(data: Path):
    written = {"checkpoint.async_save": True, "context.device_target": "Ascend"}
    config = load_config(data / "train.yaml", written)
    again = load_config(config.to_dict())
    assert again.warnings == config.warnings != []
    assert again.context.given == {"device_target"} and "profiler" not in config.to_dict()


def test_the_batch_may_grow(data: Path):
    config = load_config(data / "train.yaml", {"training.rampup_batch_size": [2, 2, 8]})
    assert config.training.rampup_batch_size == [2, 2, 8]
