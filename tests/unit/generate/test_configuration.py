"""GenerationConfig: ranges, all mistakes at once, and nothing of the caller's is changed."""

import copy
import dataclasses

import numpy as np
import pytest

from mindformers_ext.config import GenerationSection
from mindformers_ext.config.generation import UNSUPPORTED
from mindformers_ext.config.section import yaml_fields
from mindformers_ext.generate import GenerationConfig


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temperature", 0.0, "a number from 1e-38 to 1e38 (greedy decoding is do_sample: false), got the number 0.0"),
        ("temperature", -1, "a number from 1e-38 to 1e38"),
        ("temperature", float("nan"), "a number from 1e-38 to 1e38"),
        ("temperature", 1e-46, "a number from 1e-38 to 1e38"),
        ("temperature", 1e39, "a number from 1e-38 to 1e38"),
        ("top_p", 1.5, "a number from 0 to 1, got the number 1.5"),
        ("top_p", -0.1, "a number from 0 to 1"),
        ("top_k", -2, "an integer >= 1, or 0 or -1 for all tokens, got the number -2"),
        ("top_k", 2.5, "an integer >= 1"),
        ("top_k", True, "an integer >= 1, or 0 or -1 for all tokens, got true"),
        ("min_p", 2, "a number from 0 to 1, or null"),
        ("top_h", 0.0, "a number > 0 and <= 1, or null"),
        ("typical_p", 0, "a number > 0 and <= 1"),
        ("epsilon_cutoff", 1.0, "a number >= 0 and < 1"),
        ("eta_cutoff", -0.1, "a number >= 0 and < 1"),
        ("repetition_penalty", 0.0, "a number from 1e-6 to 1e6, got the number 0.0"),
        ("repetition_penalty", 1e39, "a number from 1e-6 to 1e6"),
        ("length_penalty", -50, "a number from -8 to 8"),
        ("no_repeat_ngram_size", -1, "an integer >= 0"),
        ("max_new_tokens", 0, "an integer >= 1, or null, got the number 0"),
        ("max_new_tokens", True, "an integer >= 1, or null, got true"),
        ("max_length", -3, "an integer >= 1, or null"),
        ("min_new_tokens", -1, "an integer >= 0, or null"),
        ("max_time", 0, "a number > 0, or null"),
        ("eos_token_id", -1, "an integer >= 0"),
        ("eos_token_id", [], "with at least one entry"),
        ("eos_token_id", 2.5, "an integer >= 0"),
        ("pad_token_id", -1, "an integer >= 0, or null"),
        ("bad_words_ids", [[]], "with at least one entry"),
        ("bad_words_ids", [1, 2], "each entry a list"),
        ("suppress_tokens", [-1], "an integer >= 0"),
        ("sequence_bias", [[1, 2.0]], "a list of pairs [[token ids], bias], or null"),
        ("sequence_bias", {(1,): float("inf")}, "a list of pairs [[token ids], bias]"),
        ("exponential_decay_length_penalty", [1.5, 2], "a list [start, factor]"),
        ("stop_strings", "", "text with at least one character"),
        ("stop_strings", ["a", 3], "each entry text"),
        ("num_beams", 0, "an integer >= 1"),
        ("num_return_sequences", 0, "an integer >= 1"),
        ("early_stopping", "always", "true or false, or 'never', got the text 'always'"),
        ("early_stopping", 1, "true or false, or 'never'"),
        ("length_penalty", "1", "a number from -8 to 8, got the text '1'"),
        ("length_penalty", float("inf"), "a number"),
        ("beam_score", "hf", "one of 'transformers', 'vllm', got the text 'hf'"),
        ("seed", -1, "an integer from 0 to 2**32 - 1, or null"),
        ("seed", "7", "an integer from 0 to 2**32 - 1, or null, got the text '7'; remove the quotes"),
        ("do_sample", 1, "true or false, got the number 1"),
        ("use_cache", "yes", "true or false"),
        ("output_logprobs", 1001, "an integer from 0 to 1000, or null"),
        ("prefill_chunk_size", 0, "an integer >= 1"),
        ("cache_implementation", "quantized", "one of 'dynamic', 'static', or null"),
        ("logits_processor", [3], "a list of callables, got [3]"),
        ("stopping_criteria", "no", "a list of callables, got 'no'"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(name, value, wanted):
    with pytest.raises(ValueError) as caught:
        GenerationConfig(**{name: value})
    assert str(caught.value).startswith(f"{name}: expected ")
    assert wanted in str(caught.value)
    assert ";" not in str(caught.value).replace("; remove the quotes", "").replace("; if it is meant as text", "")


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ValueError) as caught:
        GenerationConfig(top_p=1.5, temperature=0, top_k=True, max_new_tokens=0, logits_processor=3)
    names = ("top_p", "temperature", "top_k", "max_new_tokens", "logits_processor")
    assert all(f"{name}: expected" in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_return_sequences": 2},
            "num_return_sequences: 2 answers need do_sample: true or num_beams of at least 2",
        ),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences: 3 is more than num_beams 2"),
        (
            {"forced_eos_token_id": [1, 2], "suppress_tokens": [1, 2, 3]},
            r"forced_eos_token_id: \[1, 2\] are all among suppress_tokens",
        ),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**options)


def test_numbers_become_what_the_option_is():
    config = GenerationConfig(
        do_sample=True,
        temperature=2,
        top_k=5.0,
        top_p=1,
        repetition_penalty=2,
        max_new_tokens=np.int64(3),
        eos_token_id=np.array([2, 9]),
        bad_words_ids=((1, 2), (3,)),
        sequence_bias={(1, 2): -1},
    )
    assert (config.temperature, config.top_k, config.top_p, config.repetition_penalty) == (2.0, 5, 1.0, 2.0)
    assert [type(value) for value in (config.temperature, config.top_k, config.max_new_tokens)] == [float, int, int]
    assert config.eos_token_ids == (2, 9)
    assert config.bad_words_ids == [[1, 2], [3]]
    assert config.biases == [([1, 2], -1.0)]


@pytest.mark.parametrize("name", [*UNSUPPORTED, "max_tokens"])
def test_options_that_are_not_supported_are_refused_by_name(name):
    with pytest.raises(TypeError, match=name):
        GenerationConfig(**{name: 1})
    with pytest.raises(TypeError, match=f"{name} is no"):
        GenerationConfig().updated(**{name: 1})


def test_all_unsupported_options_are_named_at_once():
    with pytest.raises(TypeError, match="guidance_scale is not supported; max_tokens is no option"):
        GenerationConfig.from_options({"guidance_scale": 2, "max_tokens": 3, "top_k": 2})


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({}, []),
        ({"do_sample": True, "top_p": 0.5, "seed": 3}, []),
        ({"top_p": 0.5}, ["top_p has no effect without do_sample: true"]),
        ({"top_p": 0.5, "seed": 3}, ["top_p, seed have no effect without do_sample: true"]),
        ({"length_penalty": 2.0}, ["length_penalty has no effect without num_beams above 1"]),
        ({"num_beams": 2, "length_penalty": 2.0, "early_stopping": "never"}, []),
        ({"max_new_tokens": 3, "max_length": 9}, ["max_length has no effect beside max_new_tokens"]),
        ({"bos_token_id": 1}, ["bos_token_id has no effect here"]),
    ],
    ids=str,
)
def test_options_without_effect_are_named_in_one_warning(options, sentences, log):
    GenerationConfig(**options)
    messages = log.messages
    assert len(messages) == len(sentences)
    assert all(sentence in message for sentence, message in zip(sentences, messages, strict=True))


def test_what_the_caller_gave_is_never_changed():
    words, eos = [(1, 2), [3]], [2, 9]
    config = GenerationConfig(bad_words_ids=words, eos_token_id=eos, top_k=7, do_sample=True)
    before = copy.deepcopy(config)
    other = config.updated(do_sample=False, top_k=50, eos_token_id=None)
    assert (words, eos, config) == ([(1, 2), [3]], [2, 9], before)
    assert (other.do_sample, other.top_k, other.eos_token_ids) == (False, 50, ())
    assert config.bad_words_ids is not words


def test_length_of_an_answer():
    assert GenerationConfig().row_budget(10) == 256
    assert GenerationConfig(max_new_tokens=3).row_budget(10) == 3
    assert GenerationConfig(max_length=12).row_budget(10) == 2
    assert GenerationConfig(max_length=12).row_budget(13) < 1
    assert GenerationConfig(max_length=12, max_new_tokens=30).row_budget(15) == 30


@pytest.mark.parametrize(("pad", "eos", "filler"), [(None, None, 0), (None, [5, 2], 5), (0, 5, 0), (7, 5, 7)])
def test_the_filler_is_the_pad_id_or_the_first_eos_id(pad, eos, filler):
    assert GenerationConfig(pad_token_id=pad, eos_token_id=eos).filler == filler


def test_defaults_are_those_of_the_yaml():
    section, config = GenerationSection(), GenerationConfig()
    own = {"max_new_tokens", "max_length", "output_scores", "return_dict_in_generate"}
    plugins = {"logits_processor", "stopping_criteria"}
    names = {field.name for field in dataclasses.fields(config)}
    assert names == yaml_fields(GenerationSection).keys() | own | plugins
    for name in yaml_fields(GenerationSection).keys() - {"eos_token_id", "pad_token_id"}:
        assert getattr(config, name) == getattr(section, name), name
