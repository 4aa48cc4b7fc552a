"""inference() that is stopped and called again, with a model that transformers wrote."""

import datetime
import json
import os
import pathlib
import shutil
import signal
import types

import pytest

from mindformers_ext.generate.forward import BatchForward
from mindformers_ext.predict import JobStoppedError, templates
from mindformers_ext.trainer import Trainer, inference

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
PROMPTS = ["one", "two two", "", "three three three", "four", "five five", "six", "seven"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(load_path=CHECKPOINT, predict=None, **generation):
    return {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(load_path)},
        "inference": {"input_data": PROMPTS, "max_new_tokens": 4, "batch_size": 1, "output": "o.jsonl"},
        "generation": {"eos_token_id": None} | generation,
        "predict": {"progress": False, "refill": False} | (predict or {}),
    }


@pytest.fixture
def stopped(monkeypatch):
    """Stops a run by a signal before the third batch has its first token."""
    calls = []
    generate_rows = inference.generate_rows

    def counting(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate_rows(*arguments, **options)

    monkeypatch.setattr(inference, "generate_rows", counting)
    return calls


def rows(path="o.jsonl"):
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]


def journal():
    return [line["index"] for line in rows("o.jsonl.journal")[1:]]


def test_a_signal_stops_within_the_batch_and_the_next_call_goes_on(stopped):
    trainer = Trainer(config())
    with pytest.raises(JobStoppedError, match="SIGTERM was received"):
        trainer.inference()
    assert len(journal()) == 3 and not pathlib.Path("o.jsonl").exists()  # two answers and the record without a prompt
    again = Trainer(config())
    outputs = again.inference()
    assert len(stopped) == 3 + 5 and again.last_summary.num_resumed == 3
    assert again.inference() == outputs and len(stopped) == 8
    assert again.last_summary.num_errors == 1
    assert again.inference(output="undisturbed.jsonl") == outputs
    assert pathlib.Path("o.jsonl").read_bytes() == pathlib.Path("undisturbed.jsonl").read_bytes()


def test_a_stopped_run_without_a_seed_goes_on_with_the_one_that_it_drew(stopped):
    first = Trainer(config(do_sample=True))
    with pytest.raises(JobStoppedError):
        first.inference()
    second = Trainer(config(do_sample=True))
    outputs = second.inference()
    seed = second.last_summary.seed
    assert Trainer(config(do_sample=True, seed=seed)).inference(output="expected.jsonl") == outputs
    assert pathlib.Path("o.jsonl").read_bytes() == pathlib.Path("expected.jsonl").read_bytes()


def test_a_run_that_goes_on_the_next_day_shows_its_templates_the_day_of_the_first(stopped, monkeypatch):
    def tell(day):
        now = datetime.datetime(2031, 5, day, 23)
        monkeypatch.setattr(templates, "datetime", types.SimpleNamespace(now=lambda: now))

    template = {"prompt_template": "{{ strftime_now('%d.%m.%Y %H') }} {{ record.instruction }}"}
    tell(6)
    with pytest.raises(JobStoppedError):
        Trainer(config(predict=template)).inference()
    expected = Trainer(config(predict=template)).inference(output="expected.jsonl")
    tell(7)
    again = Trainer(config(predict=template))
    assert again.inference() == expected and again.last_summary.num_resumed == 2
    assert again.inference() == expected
    assert again.inference(output="later.jsonl") != expected


def test_a_tokenizer_for_training_in_the_yaml_is_not_taken_for_that_of_the_prediction(stopped, tmp_path):
    for name in ("model", "other"):
        shutil.copytree(CHECKPOINT, tmp_path / name)
    described = config("model") | {"train_dataset": {"dataloader": {"type": "JsonlDataset", "tokenizer_path": "other"}}}
    with pytest.raises(JobStoppedError):
        Trainer(described).inference()
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer\.tokenizer_config\.json was"):
        Trainer(described).inference()


def test_everything_that_rows_depend_on_is_told_apart(stopped, tmp_path):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    with pytest.raises(JobStoppedError):
        Trainer(config("model")).inference()

    def refused(changed, **arguments):
        with pytest.raises(ValueError, match="records of another job") as caught:
            Trainer(changed).inference(**arguments)
        return str(caught.value)

    assert "generation.top_k was 50, is 3" in refused(config("model", do_sample=True, top_k=3, seed=1))
    assert "max_new_tokens was 4, is 5" in refused(config("model"), max_new_tokens=5)
    assert "predict.skip_special_tokens was true" in refused(config("model", {"skip_special_tokens": False}))
    assert "input.data was" in refused(config("model"), input_data=[*PROMPTS, "eight"])
    assert "generation.plugins was not there" in refused(config("model"), logits_processor=[lambda ids, scores: scores])

    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "weights.model.safetensors was" in refused(config("model"))
    content[-1] ^= 1
    weights.write_bytes(content)
    tokenizer = tmp_path / "model" / "tokenizer_config.json"
    before = tokenizer.read_text()
    tokenizer.write_text(before + " ")
    assert "tokenizer.tokenizer_config.json was" in refused(config("model"))
    tokenizer.write_text(before)

    assert len(journal()) == 3
    shutil.move("model", "elsewhere")
    Trainer(config("elsewhere")).inference(batch_size=4, prefill_chunk_size=7)
    assert len(rows()) == len(PROMPTS)


def test_a_model_in_memory_is_like_no_other(stopped):
    model = Trainer(config()).model
    with pytest.raises(JobStoppedError):
        Trainer(config(), model=model).inference()
    with pytest.raises(ValueError, match="weights was .*weights in memory of one process"):
        Trainer(config(), model=model).inference()
    done = Trainer(config(), model=model).inference(resume=False)
    calls = len(stopped)
    assert Trainer(config(), model=model).inference() == done and len(stopped) > calls


def test_weights_that_cannot_be_read_are_not_taken_for_failing_records(monkeypatch):
    trainer = Trainer(config())

    def broken():
        raise ValueError("the file changed")

    monkeypatch.setattr(trainer, "_load_inference_checkpoint", broken)
    with pytest.raises(ValueError, match="the file changed"):
        trainer.inference()
    assert not pathlib.Path("o.jsonl").exists()


def test_an_interrupt_of_a_run_without_output_is_an_interrupt(monkeypatch):
    trainer = Trainer(config())

    def interrupt(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(inference, "generate_rows", interrupt)
    # A shell ignores the signal in what it starts in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.inference(output="")
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.listdir() == []


def test_a_refilled_run_that_is_stopped_goes_on_as_batches_and_the_other_way_round(monkeypatch):
    steps = []
    step = BatchForward.step

    def counting(self, tokens):
        steps.append(len(tokens))
        if len(steps) == 5:
            signal.raise_signal(signal.SIGTERM)
        return step(self, tokens)

    def settings(refill, output="o.jsonl"):
        made = config(predict={"refill": refill}, do_sample=True, seed=4, eos_token_id=list(range(0, 320, 6)))
        made["inference"] |= {"batch_size": 3, "max_new_tokens": 12, "output": output}
        return made

    Trainer(settings(False, "expected.jsonl")).inference()
    expected = pathlib.Path("expected.jsonl").read_bytes()
    monkeypatch.setattr(BatchForward, "step", counting)
    for refill in (True, False):
        steps.clear()
        with pytest.raises(JobStoppedError, match="SIGTERM"):
            Trainer(settings(refill)).inference()
        assert 0 < len(journal()) < len(PROMPTS)
        Trainer(settings(not refill)).inference()
        assert pathlib.Path("o.jsonl").read_bytes() == expected
        os.remove("o.jsonl")


@pytest.mark.parametrize("asked", [True, False])
def test_refill_without_effect_is_told_to_those_who_asked_for_it(log, asked):
    settings = config(predict={"refill": True}, num_beams=2)
    if not asked:
        del settings["predict"]["refill"]
    settings["inference"] |= {"input_data": PROMPTS[:1], "max_new_tokens": 2}
    Trainer(settings).inference(output="")
    assert ("predict.refill has no effect, batches are answered one after the other: the beams" in log.text) == asked
