"""predict.metrics through the Trainer: resume, complete outputs, rows, and what is refused."""

import json
import pathlib

import pytest

from mindformers_ext.config import ConfigError, load_config
from mindformers_ext.predict import JobStoppedError
from mindformers_ext.trainer import Trainer
from mindformers_ext.trainer.validate import validate

CHECKPOINT = pathlib.Path(__file__).parents[2] / "data" / "checkpoints" / "qwen3"
RECORDS = [{"instruction": text, "answer": "x"} for text in ("one", "two", "three", "four", "", "five")]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))


def config(output="out.jsonl", **predict):
    return {
        "run_mode": "predict",
        "checkpoint": {"load_path": str(CHECKPOINT)},
        "inference": {"max_new_tokens": 2, "batch_size": 1, "output": output, "input_data": "in.jsonl"},
        "predict": {"progress": False, "metrics": [{"type": "regex", "pattern": "."}, "exact_match"], **predict},
    }


def read(path="out.jsonl"):
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]


def stored(path="out.jsonl"):
    return json.loads(pathlib.Path(path + ".metrics.json").read_text())["answers"]


def expected():
    shares = [float("error" not in row and row["generated_text"] != "") for row in read()]
    return sum(shares) / len(shares)


def with_references():
    """Makes the answer of the first record the reference of all."""
    Trainer(config(metrics=None)).inference()
    answer = read()[0]["generated_text"]
    records = [{**record, "answer": answer} for record in RECORDS]
    pathlib.Path("in.jsonl").write_text("\n".join(map(json.dumps, records)))
    pathlib.Path("out.jsonl").unlink()


def test_the_summary_the_log_and_the_file_have_the_metrics(log):
    with_references()
    trainer = Trainer(config())
    trainer.inference()
    found = trainer.last_summary.metrics
    assert found == stored()
    right = sum(row.get("generated_text", "").strip() == row["answer"].strip() for row in read() if "error" not in row)
    assert found["metrics"]["exact_match"]["value"] == right / 6 >= 1 / 6
    assert found["metrics"]["regex"]["value"] == expected() <= 5 / 6  # the empty prompt counts as wrong
    assert (found["records"], found["errors"]) == (6, 1)
    assert f"exact_match: {right / 6:.4f} +- " in log.text


def test_rows_of_an_earlier_run_count():
    whole = Trainer(config("whole.jsonl"))
    whole.inference()
    with pytest.raises(JobStoppedError):
        Trainer(config(on_error="abort")).inference()
    assert pathlib.Path("out.jsonl.journal").exists()
    resumed = Trainer(config())
    resumed.inference()
    assert resumed.last_summary.num_resumed == 4
    assert resumed.last_summary.metrics == whole.last_summary.metrics == stored()


def test_a_complete_output_is_judged_by_other_metrics_without_decoding(monkeypatch):
    Trainer(config(metrics=None)).inference()
    assert "answers" not in json.loads(pathlib.Path("out.jsonl.metrics.json").read_text())
    rows = read()
    again = Trainer(config())
    monkeypatch.setattr(again, "_answer", lambda *_: pytest.fail("decoded again"))
    again.inference(collect=False)
    assert read() == rows and stored() == again.last_summary.metrics
    assert stored()["metrics"]["regex"]["value"] == expected()
    assert json.loads(pathlib.Path("out.jsonl.metrics.json").read_text())["records"]["total"] == 6


def test_a_complete_text_output_cannot_be_judged_again_and_says_so(log):
    Trainer(config("out.txt", metrics=None)).inference(collect=False)
    again = Trainer(config("out.txt"))
    again.inference(collect=False)
    assert again.last_summary.metrics == {}
    assert "out.txt has texts only: its answers cannot be judged without their records" in log.text


def test_rows_have_their_values_where_that_is_asked_for_and_are_then_of_another_job(log):
    Trainer(config()).inference(collect=False)
    plain = read()
    Trainer(config(metrics_in_rows=True)).inference(collect=False)
    rows = read()
    assert [{key: row[key] for key in row if key != "answer_metrics"} for row in rows] == plain
    assert rows[4]["answer_metrics"] == {"regex": 0.0, "exact_match": 0.0}
    assert [row["answer_metrics"]["regex"] for row in rows if "error" not in row] == [
        float(row["generated_text"] != "") for row in plain if "error" not in row
    ]
    Trainer(config(metrics_in_rows=True, metrics=["exact_match"])).inference(collect=False)
    assert read()[0]["answer_metrics"].keys() == {"exact_match"}


def test_references_that_no_record_has_are_missed_before_anything_is_answered():
    sentence = r"predict.reference_field: none of the 6 records has a reference in the field 'answr'"
    wrong = config(metrics=["exact_match"], reference_field="answr")
    with pytest.raises(ValueError, match=sentence):
        Trainer(wrong).inference()
    with pytest.raises(ValueError, match=sentence):
        validate(load_config(wrong))
    Trainer(config(metrics=[{"type": "regex", "pattern": "."}], reference_field="answr")).inference()
    assert stored()["metrics"]["regex"]["records"] == 6


def test_values_in_rows_have_no_effect_in_texts_and_that_is_told(log):
    Trainer(config(output="out.txt", metrics_in_rows=True)).inference()
    assert "predict.metrics_in_rows: no effect in out.txt, which keeps the texts alone" in log.text


def test_keys_that_need_metrics_are_named_without_them():
    assert load_config(config(metrics=[], metrics_in_rows=True, reference_field="a")).warnings == [
        "no effect without predict.metrics: predict.reference_field, predict.metrics_in_rows"
    ]


def test_keys_of_predict_may_differ_in_one_call(log):
    trainer = Trainer(config(metrics=None))
    trainer.inference(output="one.jsonl", predict={"metrics": ["contains"], "reference_field": "instruction"})
    assert trainer.last_summary.metrics["metrics"].keys() == {"contains"}
    assert trainer.last_summary.metrics["reference_field"] == "instruction"
    trainer.inference(output="two.jsonl")
    assert trainer.last_summary.metrics == {}
    with pytest.raises(ConfigError, match=r"predict.metric: unknown key; did you mean predict.metrics\?"):
        trainer.inference(output="three.jsonl", predict={"metric": ["contains"]})


def test_without_an_output_metrics_have_no_effect_and_that_is_told(log):
    trainer = Trainer(config())
    trainer.inference(["one"], output="")
    assert trainer.last_summary.metrics == {}
    assert "predict.metrics: no effect without an output" in log.text


@pytest.mark.parametrize("check", [Trainer, lambda built: validate(load_config(built))], ids=["Trainer", "validate"])
def test_a_function_that_cannot_be_imported_is_refused_before_the_model_is_built(check):
    with pytest.raises(ValueError, match="the metric no_such_package:f cannot be imported"):
        check(config(metrics=["no_such_package:f"]))


def test_validate_counts_references(capsys):
    validate(load_config(config()))
    assert "metrics: 6 records have a reference in the field 'answer'" in capsys.readouterr().out


def test_metrics_have_no_effect_on_scores_and_that_is_told():
    built = config(task="score")
    assert any("predict.metrics" in warning for warning in load_config(built).warnings)
