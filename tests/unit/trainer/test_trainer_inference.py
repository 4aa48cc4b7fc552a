"""Trainer.inference() from a YAML to the rows of a file, on a checkpoint that transformers wrote."""

import json
import os
import pathlib
import shutil
import stat
import threading

import pytest

from mindformers_ext.trainer import Trainer, watchdog
from mindformers_ext.trainer.batch_job import BatchJob

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
CASES = json.loads((CHECKPOINT / "reference.json").read_text())["cases"]
PROMPT = CASES[0]["prompt"]
ANSWER = CASES[0]["input_ids"] + CASES[0]["greedy"][:6]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def config(**sections):
    base = {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(CHECKPOINT)},
        "inference": {"max_new_tokens": 6, "batch_size": 2},
        "generation": {"eos_token_id": None},
        "predict": {"progress": False},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return base


def rows(path="inference_result.jsonl"):
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]


def write(path, text):
    pathlib.Path(path).write_text(text, encoding="utf-8")
    return path


def test_every_input_form_gives_the_same_ids():
    trainer = Trainer(config())
    inputs = [
        PROMPT,
        write("prompts.txt", PROMPT + "\n"),
        write("prompts.jsonl", json.dumps({"instruction": PROMPT}) + "\n"),
        {"instruction": PROMPT},
        [PROMPT],
        [{"instruction": PROMPT}],
    ]
    for form in inputs:
        assert trainer.inference(form) == [(0, ANSWER)]
        assert rows()[0]["generated_ids"] == ANSWER


def test_rows_have_the_documented_keys_and_the_users_own_fields():
    Trainer(config()).inference([{"id": 7, "instruction": PROMPT, "error": "mine"}])
    (row,) = rows()
    assert list(row) == [
        "sample_idx",
        "generated_ids",
        "generated_text",
        "id",
        "instruction",
        "record",
        "finish_reason",
        "num_prompt_tokens",
        "num_new_tokens",
    ]
    assert (row["id"], row["record"]) == (7, {"error": "mine"})
    assert (row["finish_reason"], row["num_prompt_tokens"], row["num_new_tokens"]) == ("length", len(ANSWER) - 6, 6)


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize("name", ["out.jsonl", "out.json", "out.txt", "out"])
def test_every_format_is_written_readable_by_owner_and_group_only(name):
    Trainer(config()).inference([case["prompt"] for case in CASES], output=f"deep/er/{name}")
    text = pathlib.Path("deep/er", name).read_text(encoding="utf-8")
    assert stat.S_IMODE(os.stat(f"deep/er/{name}").st_mode) == 0o640
    if name.endswith("json"):
        assert [row["sample_idx"] for row in json.loads(text)] == list(range(len(CASES)))
    else:
        assert len(text.splitlines()) == len(CASES)


def test_yaml_gives_what_the_call_leaves_out():
    trainer = Trainer(config(inference={"input_data": PROMPT, "output": "a.jsonl"}))
    trainer.inference()
    assert rows("a.jsonl")[0]["generated_ids"] == ANSWER
    trainer.inference(max_new_tokens=2, output="b.jsonl")
    assert rows("b.jsonl")[0]["generated_ids"] == ANSWER[:-4]


def test_no_file_is_written_for_an_empty_output():
    assert Trainer(config()).inference(PROMPT, output="") == [(0, ANSWER)]
    assert os.listdir() == []


def test_dataset_field_comes_from_the_call_or_the_yaml():
    trainer = Trainer(config(predict={"dataset_field": "question"}))
    assert trainer.inference([{"question": PROMPT}]) == [(0, ANSWER)]
    assert trainer.inference([{"q": PROMPT}], dataset_field="q") == [(0, ANSWER)]
    assert trainer.inference(PROMPT) == [(0, ANSWER)]


def test_bad_records_become_error_rows_and_the_others_are_answered():
    lines = [
        json.dumps({"instruction": PROMPT}),
        "{not json",
        json.dumps({"instruction": ""}),
        json.dumps({"other": PROMPT}),
        json.dumps({"instruction": 5}),
        json.dumps({"instruction": PROMPT * 80}),
        json.dumps({"instruction": PROMPT}),
    ]
    trainer = Trainer(config())
    results = trainer.inference(write("mixed.jsonl", "\n".join(lines)))
    assert results == [(0, ANSWER), (6, ANSWER)]
    found = rows()
    assert [row["sample_idx"] for row in found] == list(range(7))
    assert [row.get("error_type") for row in found] == [None, "parse", "schema", "schema", "schema", "too_long", None]
    assert trainer.last_summary.num_errors == 5


@pytest.mark.parametrize("refill", [True, False])
def test_a_forward_that_fails_costs_its_record_only(monkeypatch, refill):
    trainer = Trainer(config(inference={"batch_size": 2 if refill else 5}, predict={"refill": refill}))
    guilty = tuple(CASES[2]["input_ids"])
    import mindformers_ext.trainer.inference as inference

    original = inference.generate_rows

    def failing(model, prompts, *rest, **options):
        if guilty in map(tuple, prompts):
            raise RuntimeError("kernel failed")
        return original(model, prompts, *rest, **options)

    advance = inference.RefilledBatch.advance
    stretches = []

    def failing_stretch(self, prompts, *rest, **options):
        stretches.append(len(prompts))
        if guilty in map(tuple, prompts):
            raise RuntimeError("kernel failed")
        return advance(self, prompts, *rest, **options)

    monkeypatch.setattr(inference, "generate_rows", failing)
    monkeypatch.setattr(inference.RefilledBatch, "advance", failing_stretch)
    results = dict(trainer.inference([case["prompt"] for case in CASES]))
    assert sorted(results) == [0, 1, 3, 4]
    assert all(results[i] == CASES[i]["input_ids"] + CASES[i]["greedy"][:6] for i in results)
    assert (rows()[2]["error_type"], rows()[2]["error"]) == ("forward", "RuntimeError: kernel failed")
    assert bool(stretches) == refill


def test_eos_ids_come_from_generation_config_and_tokenizer_together(tmp_path):
    shutil.copytree(CHECKPOINT, tmp_path / "copy")
    third = CASES[0]["greedy"][2]
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps({"eos_token_id": [third]}))
    settings = config(checkpoint={"load_path": str(tmp_path / "copy")})
    del settings["generation"]
    assert Trainer(settings).inference(PROMPT) == [(0, ANSWER[:-3])]
    assert rows()[0]["finish_reason"] == "eos"


def test_ids_without_a_token_can_be_kept_out_of_answers():
    prompts = [case["prompt"] for case in CASES]
    plain = Trainer(config()).inference(prompts, max_new_tokens=24, output="")
    named = Trainer(config(predict={"suppress_unnamed_tokens": True})).inference(prompts, max_new_tokens=24, output="")
    assert max(max(ids) for _, ids in plain) >= 300 > max(max(ids) for _, ids in named)


def test_inference_can_be_called_again_and_again():
    trainer = Trainer(config())
    prompts = [case["prompt"] for case in CASES]
    first = trainer.inference(prompts)
    assert trainer.inference(prompts, batch_size=3) == first
    assert trainer.inference(prompts, batch_size=1) == first


def test_the_model_of_a_trainer_can_generate():
    import numpy as np
    from mindspore import Tensor

    trainer = Trainer(config())
    trainer.inference(PROMPT, output="")
    ids = Tensor(np.array([CASES[0]["input_ids"]], np.int32))
    assert trainer.model.generate(ids, max_new_tokens=6).asnumpy().tolist() == [ANSWER]


def test_the_head_runs_on_the_last_position_of_a_prompt_only(monkeypatch):
    trainer, shapes = Trainer(config()), []
    run_head = type(trainer.model).run_head

    def watched(model, *args, **options):
        logits = run_head(model, *args, **options)
        shapes.append(logits.shape)
        return logits

    monkeypatch.setattr(type(trainer.model), "run_head", watched)
    trainer.inference([PROMPT, PROMPT])
    assert len(CASES[0]["input_ids"]) > 1
    assert {shape[:2] for shape in shapes} == {(2, 1)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be a positive integer, not 0"),
        ({"batch_size": -1}, ValueError, "batch_size must be a positive integer, not -1"),
        ({"max_new_tokens": True}, ValueError, "max_new_tokens must be a positive integer, not True"),
        ({"output": 5}, TypeError, "output must be a path, not int"),
        ({"output": "x.xml"}, ValueError, "must end in .jsonl, .json or .txt"),
        ({"input_data": "missing/prompts.jsonl"}, FileNotFoundError, "does not exist"),
        ({"input_data": 5}, TypeError, "must be a path, a string, a dict or a list"),
        ({"input_data": None}, ValueError, "no input_data was given"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_the_weights_are_read(arguments, error, message, monkeypatch):
    trainer = Trainer(config())
    monkeypatch.setattr(trainer, "_load_inference_checkpoint", lambda: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        trainer.inference(**{"input_data": PROMPT, **arguments})


def test_arguments_may_be_numpys_and_paths():
    import numpy as np

    trainer = Trainer(config())
    assert trainer.inference(PROMPT, np.int64(6), pathlib.Path("o.jsonl"), np.int32(1)) == [(0, ANSWER)]
    assert rows("o.jsonl")[0]["generated_ids"] == ANSWER


def test_an_output_inside_the_checkpoint_is_refused_at_once(tmp_path):
    from mindformers_ext.config import load_config
    from mindformers_ext.trainer.validate import validate

    shutil.copytree(CHECKPOINT, tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    settings = config(checkpoint={"load_path": "link"}, inference={"output": "model/config.json"})
    before = (tmp_path / "model" / "config.json").read_bytes()
    for action in (Trainer, lambda tree: validate(load_config(tree))):
        with pytest.raises(ValueError, match=r"output .*model/config\.json' is inside checkpoint\.load_path 'link'"):
            action(settings)
    trainer = Trainer(config(checkpoint={"load_path": "link"}))
    with pytest.raises(ValueError, match="is inside checkpoint.load_path"):
        trainer.inference(PROMPT, output="link/new.jsonl")
    assert (tmp_path / "model" / "config.json").read_bytes() == before


def test_a_bad_generation_config_is_refused_by_validate_and_before_the_weights_are_read(tmp_path, monkeypatch):
    from mindformers_ext.config import load_config
    from mindformers_ext.trainer.validate import validate

    shutil.copytree(CHECKPOINT, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": "x"}')
    settings = config(checkpoint={"load_path": "model"})
    trainer = Trainer(settings)
    monkeypatch.setattr(trainer, "_load_inference_checkpoint", lambda: pytest.fail("weights were read"))
    for action in (lambda: validate(load_config(settings)), lambda: trainer.inference(PROMPT)):
        with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id: expected an integer"):
            action()


def test_an_eos_that_the_model_does_not_have_is_refused_before_the_weights_are_read(monkeypatch):
    trainer = Trainer(config(generation={"eos_token_id": [5, 100000]}))
    monkeypatch.setattr(trainer, "_load_inference_checkpoint", lambda: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"generation\.eos_token_id 100000 is not among"):
        trainer.inference(PROMPT)


def test_a_tied_checkpoint_with_a_head_of_its_own_is_refused_and_can_be_untied(tmp_path):
    from safetensors.numpy import load_file, save_file

    shutil.copytree(CHECKPOINT, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, file)
    settings = config(checkpoint={"load_path": "model"})
    with pytest.raises(ValueError, match=r"lm_head\.weight .* differs .*model\.tie_word_embeddings: false"):
        Trainer(settings).inference(PROMPT)
    (untied,) = Trainer(settings | {"model": {"tie_word_embeddings": False}}).inference(PROMPT)
    assert untied != (0, ANSWER)


def test_the_answers_are_not_collected_on_demand():
    assert Trainer(config()).inference(PROMPT, collect=False) == []
    assert rows()[0]["generated_ids"] == ANSWER


def test_training_a_predicting_trainer_is_refused():
    with pytest.raises(RuntimeError, match="needs run_mode: train"):
        Trainer(config()).train()


def test_a_layout_that_needs_more_processes_is_refused():
    settings = config(parallelism={"tensor_parallel": 2, "sequence_parallel": True})
    with pytest.raises(ValueError, match=r"tensor_parallel \(2\) .* must divide the number of processes, which is 1"):
        Trainer(settings)


def test_a_rank_that_waits_for_the_others_after_a_batch_is_watched(monkeypatch, capfd):
    ended = threading.Event()
    trainer = Trainer(config(predict={"step_timeout": 5}))
    monkeypatch.setattr(trainer._watch.watchdog, "_leave", lambda code: ended.set())
    monkeypatch.setattr(watchdog, "_INTERVAL_SECONDS", 0.01)

    def agree(job, reason):
        trainer._watch.watchdog._still = 5.0
        assert ended.wait(60)

    monkeypatch.setattr(BatchJob, "agree", agree)
    trainer.inference([PROMPT], output="")
    message = capfd.readouterr().err.splitlines()[-1]
    assert "in phase 'waiting for all ranks after a batch'" in message and "predict.step_timeout 5 s" in message
