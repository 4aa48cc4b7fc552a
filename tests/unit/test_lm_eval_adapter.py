"""The model of lm-evaluation-harness, with stand-ins for that package: what it asks, cuts, stops at and refuses."""

import json
import logging
import pathlib
import re
import subprocess
import sys
import types

import pytest
import yaml

from mindformers_ext import lm_eval_adapter
from mindformers_ext.config import load_config
from mindformers_ext.lm_eval_adapter import Decoding, HarnessModel, open_model, register
from mindformers_ext.trainer import Trainer
from mindformers_ext.trainer.answering import answer_ids

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
PAGE = (ROOT / "docs" / "lm_eval.md").read_text(encoding="utf-8")
COMPARED = json.loads((ROOT / "tests" / "data" / "lm_eval" / "compared.json").read_text(encoding="utf-8"))
PREDICT = {"run_mode": "predict", "checkpoint": {"load_path": str(CHECKPOINT)}, "inference": {"batch_size": 4}}
CONTEXTS = ["1 + 1 =", "The quick brown fox jumps over", "a"]


@pytest.fixture(scope="module")
def trainer():
    return Trainer(PREDICT)


@pytest.fixture(scope="module")
def model(trainer):
    return HarnessModel(trainer)


def test_likelihoods_are_those_of_the_joined_text(trainer, model):
    requests = [(context, continuation) for context in CONTEXTS for continuation in (" 2", " lazy dog.")]
    found = model.loglikelihood(requests)
    alone = HarnessModel(trainer, 1).loglikelihood(requests)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in alone], abs=1e-4)
    for (context, continuation), (total, _) in zip(requests, found, strict=True):
        encode = trainer.tokenizer.encode
        ids, start = encode(context + continuation), len(encode(context))
        (single,) = trainer.score([(ids[:start], ids[start:])])
        assert total == pytest.approx(single.total, abs=1e-4)


def test_a_greedy_answer_is_flagged_as_greedy(model):
    (answer,) = model.generate_until([("The quick brown fox", {"max_gen_toks": 3})])
    ids = model.tokenizer.encode("The quick brown fox" + answer)
    assert len(ids) > len(model.tokenizer.encode("The quick brown fox"))
    (_, greedy), (_, other) = model.loglikelihood([("The quick brown fox", answer), ("The quick brown fox", "zzz")])
    assert greedy is True and other is False


def test_a_context_that_is_too_long_loses_its_beginning(trainer, model):
    long = "abc " * 300
    ids = trainer.tokenizer.encode(long.rstrip())
    whole = trainer.tokenizer.encode(long + "x")
    (single,) = trainer.score([(ids[-(model.max_length + 1 - len(whole) + len(ids)) :], whole[len(ids) :])])
    assert model.loglikelihood([(long, "x")])[0][0] == pytest.approx(single.total, abs=1e-4)


def test_texts_longer_than_the_model_roll(trainer, model):
    text = "one two three four five. " * 60
    ids = trainer.tokenizer.encode(text)
    assert len(ids) > 2 * model.max_length
    expected, start = 0.0, 0
    tokens = [0, *ids]  # 0 is the EOS, which stands before a text where there is no BOS
    while start < len(ids):
        end = min(start + model.max_length, len(ids))
        first = 0 if start == 0 else end - model.max_length
        expected += trainer.score([(tokens[first : start + 1], tokens[start + 1 : end + 1])])[0].total
        start = end
    assert model.loglikelihood_rolling([text, ""]) == pytest.approx([expected, 0.0], abs=1e-2)


def test_answers_are_those_of_inference_cut_at_the_first_stop_text(trainer, model):
    outputs = trainer.inference(CONTEXTS, max_new_tokens=12, output="")
    prompts = [len(trainer.tokenizer.encode(context)) for context in CONTEXTS]
    texts = [trainer.tokenizer.decode(ids[n:]) for (_, ids), n in zip(outputs, prompts, strict=True)]
    assert model.generate_until([(context, {"max_gen_toks": 12}) for context in CONTEXTS]) == texts
    stop = texts[1][len(texts[1]) // 2]
    requests = [(context, {"max_gen_toks": 12, "until": [stop]}) for context in CONTEXTS]
    cut = model.generate_until(requests)
    assert cut == [text.split(stop)[0] for text in texts] and cut != texts


def test_answers_leave_room_for_themselves_in_the_model(trainer, model, caplog):
    trainer_logger = logging.getLogger("mindformers_ext")
    trainer_logger.addHandler(caplog.handler)
    long = "abc " * 300
    ids = trainer.tokenizer.encode(long)
    room = model.max_length - 5
    (completion,) = answer_ids(trainer, [ids[-room:]], max_new_tokens=5)
    try:
        answers = model.generate_until([(long, {"max_gen_toks": 5}), ("a", {"max_gen_toks": 5})])
    finally:
        trainer_logger.removeHandler(caplog.handler)
    assert answers[0] == trainer.tokenizer.decode(completion.token_ids)
    assert f"1 of 2 contexts are longer than {room} tokens" in caplog.text
    with pytest.raises(ValueError, match="256 new tokens leave no room"):
        model.generate_until([("a", {})])


def test_sampling_has_a_seed_and_other_requests_do_not_matter(model):
    request = ("a", {"max_gen_toks": 8, "do_sample": True, "temperature": 0.9})
    one, other = model.generate_until([request, ("b", {"max_gen_toks": 2})]), model.generate_until([request])
    assert one[0] == other[0] != model.generate_until([("a", {"max_gen_toks": 8})])[0]
    with pytest.raises(ValueError, match="needs a seed"):
        answer_ids(model.trainer, [[5]], max_new_tokens=2, do_sample=True)


def test_an_option_that_decoding_does_not_have_is_refused(model):
    with pytest.raises(ValueError, match="temperatur"):
        model.generate_until([("a", {"max_gen_toks": 2, "temperatur": 0.5})])


@pytest.mark.parametrize(
    ("arguments", "until", "number", "options"),
    [
        ({}, (), 256, {"do_sample": False}),
        ({"until": "x", "max_new_tokens": 3}, ("x",), 3, {"do_sample": False}),
        ({"until": ["x", ""], "max_tokens": 4, "max_gen_toks": "5"}, ("x",), 5, {"do_sample": False}),
        ({"until": None, "temperature": 0.0, "top_p": 0.5}, (), 256, {"do_sample": False}),
        ({"temperature": 0.7, "top_k": 3}, (), 256, {"do_sample": True, "temperature": 0.7, "top_k": 3}),
        ({"do_sample": False, "temperature": 0.7}, (), 256, {"do_sample": False}),
        ({"do_sample": True, "temperature": 0}, (), 256, {"do_sample": True}),
        ({"do_sample": False, "repetition_penalty": 1.2}, (), 256, {"do_sample": False, "repetition_penalty": 1.2}),
    ],
)
def test_generation_arguments_are_read_as_lm_eval_reads_them(arguments, until, number, options):
    assert Decoding.of(arguments) == Decoding(until, number, options)


def test_stop_texts_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="until must be a text or a list of texts, not 7"):
        Decoding.of({"until": 7})


def test_model_arguments_are_keys_of_the_yaml(tmp_path, caplog):
    path = tmp_path / "predict.yaml"
    path.write_text(yaml.safe_dump({**PREDICT, "predict": {"prompt_template": "Q: {{ question }}"}}))
    logging.getLogger("mindformers_ext").addHandler(caplog.handler)
    try:
        model = open_model(str(path), 1, device="cpu", max_batch_size=None, **{"inference.batch_size": 3})
    finally:
        logging.getLogger("mindformers_ext").removeHandler(caplog.handler)
    assert model.batch_size == 3 and model.trainer.config.predict.prompt_template is None
    assert "no effect on this model: device" in caplog.text and "max_batch_size" not in caplog.text
    assert "no effect under lm-eval" in caplog.text
    with pytest.raises(ValueError, match="pretrained is neither config nor section.key"):
        open_model(str(path), pretrained="x")
    for size in ("x", 0, -2):
        with pytest.raises(ValueError, match=f"--batch_size must be a positive integer or auto, not {size}"):
            open_model(str(path), size)
    with pytest.raises(ValueError, match="run_mode"):
        open_model(str(path), **{"run.mode": "train"})
    path.write_text("run_mode: train\ncheckpoint: {load_path: x}\n")
    with pytest.raises(ValueError):
        open_model(str(path))


@pytest.mark.parametrize(
    ("given", "size"), [(None, 4), (1, 4), ("1", 4), ("auto", 4), ("auto:4", 4), (2, 2), ("16", 16)]
)
def test_the_batch_size_of_the_command_wins_unless_it_is_the_default(monkeypatch, tmp_path, trainer, given, size):
    path = tmp_path / "predict.yaml"
    path.write_text(yaml.safe_dump(PREDICT))
    monkeypatch.setattr("mindformers_ext.trainer.Trainer", lambda config: trainer)
    assert open_model(str(path), given).batch_size == size


def test_the_default_device_of_lm_eval_is_passed_over(monkeypatch, tmp_path, trainer, caplog):
    path = tmp_path / "predict.yaml"
    path.write_text(yaml.safe_dump(PREDICT))
    monkeypatch.setattr("mindformers_ext.trainer.Trainer", lambda config: trainer)
    logging.getLogger("mindformers_ext").addHandler(caplog.handler)
    try:
        open_model(str(path), 1, device="cuda:0")
    finally:
        logging.getLogger("mindformers_ext").removeHandler(caplog.handler)
    assert "no effect" not in caplog.text


class StubLM:
    """Stands for lm_eval.api.model.LM."""

    def __init__(self):
        self.cache_hook = types.SimpleNamespace(added=[])
        self.cache_hook.add_partial = lambda *entry: self.cache_hook.added.append(entry)


@pytest.fixture
def stub(monkeypatch):
    """Stands for lm_eval; holds the classes that were registered."""
    registered = {}

    def register_model(name):
        return lambda cls: registered.setdefault(name, cls)

    for name, contents in {
        "lm_eval": {},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": StubLM},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.__main__": {"cli_evaluate": lambda: registered.setdefault("command", list(sys.argv))},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return registered


def test_the_registered_class_answers_requests_in_parts_and_fills_the_cache(stub, monkeypatch, tmp_path, model):
    monkeypatch.setattr(lm_eval_adapter, "open_model", lambda config, batch_size, **rest: model)
    monkeypatch.setattr(lm_eval_adapter, "_BATCHES_AT_ONCE", 1)
    register()
    lm = stub["mindformers_ext"]("predict.yaml", batch_size=1, device=None)
    pairs = [(f"{n} + 1 =", f" {n}") for n in range(6)]
    found = lm.loglikelihood([types.SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in model.loglikelihood(pairs)], abs=1e-4)
    assert lm.cache_hook.added == [("loglikelihood", pair, one) for pair, one in zip(pairs, found, strict=True)]
    rolled = lm.loglikelihood_rolling([types.SimpleNamespace(args=("some text",))], disable_tqdm=True)
    assert rolled == model.loglikelihood_rolling(["some text"])
    assert lm.cache_hook.added[-1] == ("loglikelihood_rolling", ("some text",), rolled[0])
    request = ("a", {"max_gen_toks": 4})
    assert lm.generate_until([types.SimpleNamespace(args=request)], disable_tqdm=True) == model.generate_until(
        [request]
    )
    assert "/" not in lm.tokenizer_name and lm.chat_template(False) == ""


def test_the_command_registers_the_model_and_leaves_the_rest_to_lm_eval(stub, monkeypatch):
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "mindformers_ext"])
    assert lm_eval_adapter.main() == 0
    assert stub["command"] == ["lm_eval", "--model", "mindformers_ext"] and "mindformers_ext" in stub
    assert lm_eval_adapter.os.environ["LOCAL_RANK"] == "3"


def test_without_lm_eval_the_command_says_how_to_install_it():
    code = (
        "import sys; sys.modules['lm_eval'] = None; from mindformers_ext.lm_eval_adapter import main; sys.exit(main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1 and "pip install 'mindformers_ext[lm_eval]'" in result.stderr


def test_a_chat_template_is_that_of_the_checkpoint(monkeypatch, tmp_path, model):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (tmp_path / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("mindformers_ext.trainer.model.tokenizer_folder", lambda config: tmp_path)
    fresh = HarnessModel(model.trainer)
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert (
        fresh.apply_chat_template(history) == "<user>hi<assistant>yes<assistant>" and fresh.chat_template() == template
    )
    with pytest.raises(NotImplementedError, match="gen_prefix"):
        fresh.apply_chat_template(history, add_generation_prompt=False)


def test_the_stored_comparison_agrees_and_is_the_one_of_the_page():
    for found in COMPARED["results"]:
        ours, theirs = found["mindformers_ext"], found["lm_eval_hf"]
        assert ours.keys() == theirs.keys() and len(ours) == 6
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, abs=1e-3, rel=1e-3)
            assert f"| {value:.7g} | {ours[name]:.7g} |" in PAGE, name
        assert max(found["largest_distance"].values()) <= 1e-3
        # transformers knows of no EOS of the quickstart's model, and does not end its answers there.
        has_eos = "eos_token_id" in json.loads((ROOT / found["checkpoint"] / "config.json").read_text())
        assert found["texts_and_flags_equal"] == {"choices": True, "prompts": has_eos, "texts": True}
        assert found["requests"] == {"choices": 96, "prompts": 12, "texts": 6}
    for name, version in COMPARED["versions"].items():
        assert f"{name} {version.split('+')[0]}" in PAGE


def test_the_yaml_of_the_page_loads():
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        assert load_config(yaml.safe_load(text)).run_mode == "predict"
