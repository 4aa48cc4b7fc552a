"""Where the options of a run's decoding come from."""

import json
from pathlib import Path

import pytest

from mindformers_ext.config import load_config
from mindformers_ext.predict import Tokenizer
from mindformers_ext.trainer.inference import resolve_generation

CHECKPOINT = Path(__file__).parents[2] / "data" / "checkpoints" / "llama"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(CHECKPOINT)


@pytest.fixture
def resolve(tmp_path, tokenizer):
    """Resolves a generation section beside the content of generation_config.json."""

    def call(generation=None, stored=None, vocab_size=1000, **arguments):
        if stored is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(stored), encoding="utf-8")
        tree = {
            "run_mode": "predict",
            "checkpoint": {"load_path": "w"},
            "inference": {},
            "generation": generation or {},
        }
        section = load_config(tree).generation
        return resolve_generation(section, 30, tokenizer, tmp_path, vocab_size, arguments)

    return call


SAMPLING_FILE = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


def test_a_file_that_asks_for_sampling_stays_greedy_and_says_so(resolve, log):
    resolved = resolve(stored=SAMPLING_FILE)
    assert (resolved.config.do_sample, resolved.config.seed, resolved.config.top_k) == (False, None, 50)
    assert "asks for another mode (do_sample True, temperature 0.7, top_k 20, top_p 0.8)" in log.text
    assert "decoding is greedy all the same" in log.text


def test_penalties_of_the_file_hold_in_greedy_decoding_too(resolve):
    resolved = resolve(stored=SAMPLING_FILE)
    assert resolved.config.repetition_penalty == 1.05
    assert resolved.origins["repetition_penalty"] == "generation_config.json"


def test_sampling_that_the_yaml_asks_for_takes_the_numbers_of_the_file(resolve):
    resolved = resolve({"do_sample": True, "top_p": 0.5}, SAMPLING_FILE)
    config = resolved.config
    assert (config.temperature, config.top_k, config.top_p) == (0.7, 20, 0.5)
    text = resolved.describe()
    assert "temperature 0.7 (generation_config.json)" in text
    assert "top_k 20 (generation_config.json)" in text
    assert "top_p 0.5 (yaml)" in text
    assert "max_new_tokens 30 (inference)" in text


def test_arguments_win_over_yaml_and_yaml_over_file(resolve):
    resolved = resolve({"do_sample": True, "temperature": 0.3, "top_p": 0.5}, SAMPLING_FILE, temperature=2)
    assert (resolved.config.temperature, resolved.config.top_p, resolved.config.top_k) == (2.0, 0.5, 20)
    assert resolved.origins["temperature"] == "argument"
    assert resolve({"do_sample": True}, SAMPLING_FILE, do_sample=False).config.do_sample is False


def test_a_default_that_is_written_in_the_yaml_wins_over_the_file(resolve):
    resolved = resolve({"do_sample": True, "temperature": 1.0, "repetition_penalty": 1}, SAMPLING_FILE)
    assert (resolved.config.temperature, resolved.config.repetition_penalty) == (1.0, 1.0)


def test_defaults_that_act_in_sampling_are_shown(resolve):
    assert "top_k 50 (default)" in resolve({"do_sample": True}, {}).describe()
    assert "top_k" not in resolve({}, {}).describe()


def test_leftovers_of_a_greedy_file_do_not_turn_sampling_on(resolve):
    config = resolve(stored={"do_sample": False, "temperature": 0.6, "top_p": 0.9}).config
    assert (config.do_sample, config.temperature, config.top_p) == (False, 1.0, 1.0)


def test_a_seed_is_drawn_when_sampling_has_none(resolve):
    seeds = {resolve({"do_sample": True}, {}).config.seed for _ in range(5)}
    assert len(seeds) > 3
    resolved = resolve({"do_sample": True}, {})
    assert f"seed {resolved.config.seed} (drawn for this run)" in resolved.describe()
    assert "seed 7 (yaml)" in resolve({"do_sample": True, "seed": 7}, {}).describe()
    assert resolve({}, {}).config.seed is None


def test_a_null_eos_in_the_yaml_ends_no_answer_early(resolve):
    stored = {"eos_token_id": [2, 9]}
    assert resolve({"eos_token_id": None}, stored).config.eos_token_ids == ()
    assert set(resolve({}, stored).config.eos_token_ids) >= {2, 9}
    assert resolve({"eos_token_id": [3]}, stored).config.eos_token_ids == (3,)


def test_special_tokens_that_stand_only_in_config_json_count(resolve, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 8], "pad_token_id": 9, "min_length": 5}))
    resolved = resolve()
    assert set(resolved.config.eos_token_ids) >= {7, 8} and resolved.config.pad_token_id == 9
    assert resolved.origins["pad_token_id"] == "config.json" and "config.json" in resolved.origins["eos_token_id"]
    assert resolved.config.min_length == 0
    assert not {7, 8} & set(resolve(stored={"eos_token_id": 2}).config.eos_token_ids)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("eos_token_id", value) for value in (["0", "2"], [[0, 2]], {"a": 1}, True, 0.0, "x", [True], 2**70)]
    + [("pad_token_id", value) for value in ("x", 1.5, False)],
)
def test_special_tokens_that_are_no_ids_are_refused_with_file_and_key(resolve, tmp_path, file, key, value):
    (tmp_path / file).write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=rf"/{file}: {key}: expected an integer"):
        resolve()


@pytest.mark.parametrize("text", ["{", "[1]", "", "\udcff"])
def test_a_file_that_is_no_object_is_refused_by_name(resolve, tmp_path, text):
    (tmp_path / "generation_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"/generation_config\.json"):
        resolve()


def test_an_eos_below_zero_stops_nothing_and_is_warned_about(resolve, log):
    ids = resolve(stored={"eos_token_id": [-1, 5]}).config.eos_token_ids
    assert 5 in ids and -1 not in ids
    assert "eos_token_id [-1, 5]: no token has an id below 0" in log.text


def test_the_length_of_the_file_does_not_count(resolve):
    config = resolve(stored={"max_length": 20, "max_new_tokens": 5}).config
    assert (config.max_new_tokens, config.max_length) == (30, None)


def test_beams_take_length_penalty_and_early_stopping_of_the_file(resolve):
    stored = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"}
    config = resolve({"num_beams": 2}, stored).config
    assert (config.num_beams, config.length_penalty, config.early_stopping) == (2, 2.0, "never")
    assert resolve({}, stored).config.num_beams == 1


def test_what_the_file_wants_and_nothing_implements_is_named(resolve, log):
    resolve(stored={"guidance_scale": 1.5, "num_beam_groups": 1, "token_healing": False})
    assert "guidance_scale 1.5: not supported" in log.text
    assert "token_healing" not in log.text


def test_a_value_of_the_file_out_of_range_is_refused_with_the_file(resolve):
    with pytest.raises(
        ValueError, match=r"generation_config\.json: repetition_penalty: expected a number from 1e-6 to 1e6"
    ):
        resolve(stored={"repetition_penalty": -1})


def test_arguments_without_effect_are_named(resolve, log):
    resolve({}, {}, top_p=0.5, temperature=2.0)
    assert "temperature, top_p have no effect without do_sample: true" in log.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0}, "generation.temperature: expected a number from 1e-38 to 1e38"),
        ({"top_q": 0.5}, "generation.top_q: unknown key; did you mean generation.top_p?"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2 answers need do_sample: true"),
        ({"suppress_tokens": [5000]}, r"suppress_tokens: \[5000\] are not among the model's token ids 0 to 999"),
        ({"eos_token_id": 5000}, "generation.eos_token_id 5000 is not among the model's 1000 token ids"),
    ],
)
def test_arguments_that_cannot_hold_are_refused(arguments, message, resolve):
    with pytest.raises(ValueError, match=message):
        resolve({}, {}, **arguments)


def test_plugins_are_arguments_too(resolve):
    def keep(input_ids, scores):
        return scores

    resolved = resolve({}, {}, logits_processor=[keep])
    assert resolved.config.logits_processor == (keep,)
    assert resolved.origins["logits_processor"] == "argument"


def test_a_copy_of_the_configuration_does_not_freeze_its_defaults():
    tree = {"run_mode": "predict", "checkpoint": {"load_path": "w"}, "inference": {}, "generation": {"top_k": 50}}
    section = load_config(load_config(tree).to_dict()).generation
    assert section.explicit() == {"top_k": 50}
