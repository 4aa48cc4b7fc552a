"""Templates and standard input in Trainer.inference()."""

import gzip
import io
import json
import pathlib
import shutil
from types import SimpleNamespace

import pytest

from mindformers_ext.config import load_config
from mindformers_ext.parallel.groups import single
from mindformers_ext.trainer import Trainer, request
from mindformers_ext.trainer import trainer as trainer_module
from mindformers_ext.trainer.validate import validate

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
CHAT = "{% for m in messages %}<|im_end|>{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}bot:"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINT, "model")
    pathlib.Path("model/chat_template.jinja").write_text(CHAT)
    return tmp_path


def config(input_data=None, **predict):
    inference = {"max_new_tokens": 1, "input_data": input_data}
    predict = {"progress": False, **predict}
    return {"run_mode": "predict", "checkpoint": {"load_path": "model"}, "inference": inference, "predict": predict}


def prompt_ids(trainer, data=None):
    return [ids[:-1] for _, ids in trainer.inference(data)]


def test_templates_make_the_prompts_and_the_rows_keep_the_fields(folder):
    pathlib.Path("prompt.jinja").write_text("Q: {{ q }}\n")
    trainer = Trainer(config(prompt_template="prompt.jinja", chat_template="auto"))
    expected = trainer.tokenizer.encode("<|im_end|>user: Q: 1 + 1\n<|endoftext|>bot:", add_special_tokens=False)
    assert prompt_ids(trainer, [{"q": "1 + 1"}, {"no": "q"}]) == [expected]
    good, bad = [json.loads(line) for line in pathlib.Path("inference_result.jsonl").read_text().splitlines()]
    assert good["q"] == "1 + 1" and good["num_prompt_tokens"] == len(expected)
    assert bad == {
        "sample_idx": 1,
        "error": "prompt_template: 'q' is undefined",
        "error_type": "template",
        "no": "q",
    }
    assert trainer.last_summary.num_errors == 1


def test_without_templates_a_prompt_is_continued_as_it_is(folder):
    trainer = Trainer(config())
    assert prompt_ids(trainer, "1 + 1") == [trainer.tokenizer.encode("1 + 1")]


def test_a_broken_template_is_refused_before_the_model_is_built(folder, monkeypatch):
    monkeypatch.setattr(trainer_module, "build_causal_lm", None)
    with pytest.raises(ValueError, match="a template is not valid: line 1"):
        Trainer(config(prompt_template="{{ q"))
    with pytest.raises(FileNotFoundError, match=r"predict\.chat_template: there is no file 'gone\.jinja'"):
        Trainer(config(chat_template="gone.jinja"))


def test_validation_counts_the_records_that_a_template_fits(folder, capsys):
    pathlib.Path("in.jsonl.gz").write_bytes(gzip.compress(b'{"q": "a"}\n{"p": "a"}\n'))
    validate(load_config(config("in.jsonl.gz", prompt_template="{{ q }}")))
    assert "input: 2 records, 1 of them without a usable prompt" in capsys.readouterr().out


def test_validation_leaves_standard_input_to_the_run(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    validate(load_config(config("-")))
    assert "standard input, which is not read here" in capsys.readouterr().out


def test_standard_input_is_for_a_job_of_one_process(folder, monkeypatch, log):
    trainer = Trainer(config("-"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"instruction": "1 + 1"}')))
    assert len(prompt_ids(trainer)) == 1
    assert "a run that is stopped starts over" in log.text
    monkeypatch.setattr(request, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="standard input belongs to one process"):
        trainer.inference()
    with pytest.raises(ValueError, match="standard input belongs to one process"):
        Trainer(config("-"))


def test_ranks_with_different_templates_are_refused_by_name(folder, monkeypatch):
    compared = {}
    monkeypatch.setattr(request, "require_same", lambda context, values: compared.update(values))
    trainer = Trainer(config(chat_template="auto"))
    two_ranks = SimpleNamespace(dims=SimpleNamespace(world_size=2))
    options = request.inference_options(trainer.config, ["a"], None, None, None)
    seen = set()
    for text in (CHAT, CHAT + "!", CHAT + "{{ strftime_now('%d') }}"):
        pathlib.Path("model/chat_template.jinja").write_text(text)
        asked = request.read_request(trainer.config, trainer.tokenizer, None, single(), options, None, {})
        request.require_same_request(two_ranks, asked)
        seen.add(compared["the templates"])
    assert len(seen) == 3
