"""Types, ranges, names of keys, free keys and the way back to plain data."""

from __future__ import annotations

import copy
import pickle

import pytest

from mindformers_ext.config import UNSET, ConfigError, load_config
from mindformers_ext.config.generation import GenerationSection

PREDICT = "run_mode: predict\ncheckpoint: {load_path: w}\ninference: {}\n"


def tree(**sections):
    return {"run_mode": "predict", "checkpoint": {"load_path": "w"}, "inference": {}, **sections}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inference: {batch_size: eight}", "inference.batch_size: expected an integer >= 1, got the text 'eight'"),
        ("inference: {batch_size: '8'}", "inference.batch_size: expected an integer >= 1, got the text '8'; remove"),
        ("inference: {batch_size: true}", "inference.batch_size: expected an integer >= 1, got true"),
        ("inference: {batch_size: 1.5}", "inference.batch_size: expected an integer >= 1, got the number 1.5"),
        ("inference: {batch_size: 0}", "inference.batch_size: expected an integer >= 1, got the number 0"),
        ("inference: {max_new_tokens: -3}", "inference.max_new_tokens: expected an integer >= 1, got the number -3"),
        ("inference: {max_new_tokens: }", "expected an integer >= 1, got nothing (null); leave the key out"),
        ("inference: {max_new_tokens: 1e400}", "expected an integer >= 1, got the text '1e400'"),
        ("inference: {max_new_tokens: 1.0e+30}", "expected an integer >= 1, got the number 1e+30"),
        ("inference: {input_data: 12}", "inference.input_data: expected text, or a list, or a mapping, or null, got"),
        ("inference: {input_data: 12}", "if it is meant as text, put it in quotes"),
        (
            "inference: {output: a.xml}",
            "inference.output: expected text naming a file that ends in .jsonl, .json, .txt",
        ),
        ("inference: {output: ''}", "inference.output: expected text naming a file"),
        ("inference: {output: ' '}", "inference.output: expected text naming a file"),
        ("inference: 5", "inference: expected a section with keys, got the number 5"),
        ("inference: [1]", "inference: expected a section with keys, got the list [1]"),
        ("run_mode: finetune", "run_mode: expected one of 'train', 'predict', got the text 'finetune'"),
        ("run_mode: ", "run_mode: expected one of 'train', 'predict', got nothing (null)"),
        ("predict: {task: rank}", "predict.task: expected one of 'generate', 'score', got the text 'rank'"),
        ("predict: {dataset_field: ' '}", "predict.dataset_field: expected text that is not empty"),
        ("predict: {refill: 8}", "predict.refill: expected true or false, got the number 8"),
        ("predict: {progress: 1}", "predict.progress: expected true or false, got the number 1"),
        (
            "predict: {progress: 'true'}",
            "predict.progress: expected true or false, got the text 'true'; remove the quo",
        ),
        ("checkpoint: {load_path: 5}", "checkpoint.load_path: expected text, got the number 5; if it is meant as text"),
        ("training: {max_norm: .nan}", "training.max_norm: expected a number, got the number nan"),
        ("training: {max_norm: .inf}", "training.max_norm: expected a number, got the number inf"),
        ("training: {seed: -1}", "training.seed: expected an integer from 0 to 2**32 - 1"),
        ("training: {rampup_batch_size: [1, 0, 5]}", "training.rampup_batch_size: expected a list (each entry an int"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas: expected a list (each entry a number >= 0 and < 1) with exac"),
        ("optimizer: {betas: [0.9, 1.0]}", "optimizer.betas: expected a list"),
        ("optimizer: {betas: 0.9}", "optimizer.betas: expected a list"),
        ("optimizer: {eps: 0}", "optimizer.eps: expected a number > 0"),
        ("lr_scheduler: {warmup_ratio: 1.1}", "lr_scheduler.warmup_ratio: expected a number from 0 to 1, or null"),
        ("parallelism: {tensor_parallel: 0}", "parallelism.tensor_parallel: expected an integer >= 1"),
        ("parallelism: {data_parallel_shard: 0}", "parallelism.data_parallel_shard: expected an integer >= 1, or -1"),
        ("parallelism: {pipeline_parallel_schedule: 2f}", "expected one of '1f1b', 'interleaved_1f1b', 'gpipe'"),
        ("generation: {eos_token_id: []}", "generation.eos_token_id: expected an integer >= 0, or a list"),
        ("generation: {eos_token_id: -1}", "generation.eos_token_id: expected an integer >= 0, or a list"),
        ("generation: {use_cache: 'no'}", "generation.use_cache: expected true or false, got the text 'no'"),
        ("callbacks: 3", "callbacks: expected a list of sections, got the number 3"),
        ("callbacks: [3]", "callbacks[0]: expected a section with keys, got the number 3"),
        (
            "model: {architectures: [A, B]}",
            "model.architectures: expected text that is not empty, or null, got the list",
        ),
        (
            "monitor: {moe_monitor: {target_layers: true}}",
            "monitor.moe_monitor.target_layers: expected an integer >= 1",
        ),
    ],
)
def test_a_wrong_value_names_key_expected_type_and_value(text, message, refuse):
    refused = refuse(text + "\n")
    assert refused.startswith("run.yaml:1: ")
    assert message in refused


@pytest.mark.parametrize(
    ("text", "key", "known"),
    [
        ("inferense: {}", "inferense", "did you mean inference?"),
        ("Inference: {}", "Inference", "did you mean inference?"),
        ("inference: {max_new_token: 3}", "inference.max_new_token", "did you mean inference.max_new_tokens?"),
        ("inference: {batch-size: 3}", "inference.batch-size", "did you mean inference.batch_size?"),
        ("inference: {do_sample: true}", "inference.do_sample", "did you mean generation.do_sample?"),
        ("inference: {dataset_field: a}", "inference.dataset_field", "did you mean predict.dataset_field?"),
        ("batch_size: 3", "batch_size", "did you mean inference.batch_size?"),
        ("seed: 3", "seed", "did you mean training.seed or generation.seed?"),
        ("training: {batch_size: 3}", "training.batch_size", "did you mean inference.batch_size?"),
        ("parallelism: {tensor_paralel: 3}", "parallelism.tensor_paralel", "did you mean parallelism.tensor_parallel?"),
        ("monitor: {tensorbord: {}}", "monitor.tensorbord", "did you mean monitor.tensorboard?"),
        ("optimizer: {weight_decy: 1}", "optimizer.weight_decy", "did you mean optimizer.weight_decay?"),
        ("model: {model_typ: llama}", "model.model_typ", "did you mean model.model_type?"),
        ("callbacks: [{typ: A}]", "callbacks[0].typ", "did you mean callbacks[0].type?"),
        (
            "predict: {qqq: 1}",
            "predict.qqq",
            "known here: task, dataset_field, target_field, answer_field, target_delimiter, truncation",
        ),
        ("qqq: 1", "qqq", "keys of your own start with x-"),
        ("training: {1: 2}", "training[1]", "the key 1 must be text"),
        ("load_checkpoint: a", "load_checkpoint", "use checkpoint.load_path"),
        ("parallel_config: {}", "parallel_config", "use parallelism"),
        ("generation: {guidance_scale: 2}", "generation.guidance_scale", "not supported; remove this key"),
        ("generation: {num_beam_groups: null}", "generation.num_beam_groups", "not supported; remove this key"),
        ("generation: {max_new_tokens: 5}", "generation.max_new_tokens", "use inference.max_new_tokens"),
        ("generation: {max_length: 5}", "generation.max_length", "use inference.max_new_tokens"),
        ("generation: {numbeams: 5}", "generation.numbeams", "unknown key"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(text, key, known, refuse):
    message = refuse(text + "\n")
    assert message.startswith(f"run.yaml:1: {key}: ")
    assert known in message


def test_control_characters_and_length_of_a_key_do_not_reach_the_terminal(refuse):
    message = refuse('"a\\n\\e[31mb": 1\n')
    assert "\x1b" not in message and r"a\n\x1b[31mb" in message
    assert len(refuse(f"{'k' * 900}: 1\n")) < 500


def test_numbers_are_read_where_numbers_belong(load):
    config = load(
        PREDICT + "optimizer: {eps: 1e-6, weight_decay: 0}\ntraining: {steps: 1e3, seed: 7.0, max_norm: 2}\n"
        "model: {rms_norm_eps: 1e-6, layers: ['1', 2e0, {x: -1E+2}], name: 1e, hash: 0x1e5, text: '12'}\n"
    )
    assert (config.optimizer.eps, config.optimizer.weight_decay) == (1e-6, 0.0)
    assert isinstance(config.optimizer.weight_decay, float) and isinstance(config.training.max_norm, float)
    assert (config.training.steps, config.training.seed) == (1000, 7) and isinstance(config.training.seed, int)
    assert config.model.extra == {
        "rms_norm_eps": 1e-6,
        "layers": ["1", 2.0, {"x": -100.0}],
        "name": "1e",
        "hash": 0x1E5,
        "text": "12",
    }


def test_text_that_looks_like_a_number_stays_text_where_text_belongs(load):
    config = load("run_mode: predict\ncheckpoint: {load_path: 1e5}\ninference: {input_data: [1e-6, '5']}\n")
    assert config.checkpoint.load_path == "1e5"
    assert config.inference.input_data == ["1e-6", "5"]


def test_null_is_not_the_same_as_not_given():
    assert load_config(tree()).generation.eos_token_id is UNSET
    assert load_config(tree(generation={"eos_token_id": None})).generation.eos_token_id is None
    assert load_config(tree(generation={"eos_token_id": [1, 2]})).generation.eos_token_id == [1, 2]


def test_unset_stays_itself_through_copies():
    section = GenerationSection()
    assert copy.deepcopy(section).eos_token_id is UNSET
    assert pickle.loads(pickle.dumps(section)).eos_token_id is UNSET


def test_given_tells_what_the_user_wrote_from_defaults():
    config = load_config(tree(generation={"do_sample": False}), {"inference.batch_size": 3})
    assert config.generation.given == {"do_sample"}
    assert config.inference is not None and config.inference.given == {"batch_size"}
    assert config.training.given == frozenset()


def test_no_reserved_decoding_name_is_also_a_field():
    assert not GenerationSection.reserved.keys() & set(GenerationSection().to_dict()) - {"max_new_tokens"}


@pytest.mark.parametrize("section", ["training", "parallelism", "generation", "predict", "model", "callbacks"])
def test_an_empty_section_has_its_defaults(section, load):
    assert load(f"{PREDICT}{section}:\n") == load(PREDICT)


def test_a_one_element_list_of_architectures_is_its_element():
    assert load_config(tree(model={"architectures": ["A"]})).model.architectures == "A"


def test_free_keys_are_kept_in_extra_and_own_top_level_keys_too():
    config = load_config(
        tree(
            **{"x-note": [1], "x_b": 2, "eval_dataset": {}},
            optimizer={"momentum": 0.9},
            callbacks=[{"type": "A", "n": 1}],
        )
    )
    assert config.extra == {"x-note": [1], "x_b": 2, "eval_dataset": {}}
    assert config.optimizer.extra == {"momentum": 0.9}
    assert config.callbacks[0].type == "A" and config.callbacks[0].extra == {"n": 1}


def test_a_mapping_is_copied_and_left_as_it_was():
    source = tree(model={"a": [1]}, inference={"input_data": ["x"]})
    before = copy.deepcopy(source)
    config = load_config(source, {"model.b": 1, "inference.batch_size": 2})
    config.model.extra["a"].append(2)
    assert config.inference is not None and isinstance(config.inference.input_data, list)
    config.inference.input_data.append("y")
    assert source == before


def test_sections_do_not_share_defaults():
    first, second = load_config(tree()), load_config(tree())
    first.optimizer.betas.append(1.0)
    first.model.extra["a"] = 1
    assert second == load_config(tree())


def test_a_misspelt_attribute_cannot_be_set():
    config = load_config(tree())
    with pytest.raises(AttributeError):
        config.training.stesp = 3


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (tree(training={"seed": object()}), "training.seed: an object of type object cannot be part"),
        (tree(training={True: 1}), "training: the key True must be text"),
        (tree(training={"seed": 2**70}), "training.seed: this integer does not fit in 64 bits"),
        (tree(model={"\ud800": 1}), "half of a surrogate pair"),
        (tree(training={"seed": "x"}), "training.seed: expected an integer"),
        (tree(x={}), "x: unknown key"),
    ],
)
def test_errors_about_a_mapping_name_the_key_alone(source, part):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert str(caught.value).startswith(part.split(":")[0]) or part in str(caught.value)
    assert part in str(caught.value)


def test_a_mapping_that_contains_itself_is_refused():
    source = tree()
    source["x-a"] = source
    with pytest.raises(ConfigError, match="or contains itself"):
        load_config(source)


@pytest.mark.parametrize("name", ["pretrain_mla", "pretrain_hybrid", "predict", "train"])
def test_plain_data_is_read_back_to_the_same_configuration(name, data):
    overrides = {"run_mode": "predict", "inference.batch_size": 2, "checkpoint.load_path": "w"}
    config = load_config(data / f"{name}.yaml", overrides)
    again = load_config(config.to_dict())
    assert again == config
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize("output", ["a.jsonl", "a.JSON", "a.b.Txt", "dir.x/answers", "answers"])
def test_an_output_with_a_known_suffix_in_any_case_or_with_none_is_accepted(output):
    config = load_config(tree(), {"inference.output": output})
    assert config.inference is not None and config.inference.output == output
