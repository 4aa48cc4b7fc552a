"""EvaluationCallback: when it evaluates, what it writes, what it keeps, and what it refuses before training."""

import json
import pathlib

import pytest

from mindformers_ext.config import ConfigError, load_config
from mindformers_ext.predict import JobStoppedError
from mindformers_ext.trainer import Trainer, evaluation
from mindformers_ext.trainer.callbacks import TrainerCallback
from mindformers_ext.trainer.evaluation import EvaluationCallback
from mindformers_ext.trainer.validate import validate
from tests.unit.trainer.test_trainer_train import _folder, config, losses, same, weights  # noqa: F401

RECORDS = [{"instruction": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(2)]


@pytest.fixture(autouse=True)
def _data(_folder):  # noqa: F811
    pathlib.Path("dev.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))


def settings(checkpoint=None, training=None, **options):
    entry = {"type": "EvaluationCallback", "input_data": "dev.jsonl", "max_new_tokens": 3, "metrics": ["exact_match"]}
    built = config(training={"steps": 6, **(training or {})}, checkpoint=checkpoint or {})
    return {**built, "callbacks": [{**entry, "output_dir": "eval", **options}]}


def lines(folder="eval"):
    return [json.loads(line) for line in pathlib.Path(folder, "eval_metrics.jsonl").read_text().splitlines()]


def rows(step, folder="eval"):
    return [json.loads(line) for line in pathlib.Path(folder, f"eval_step_{step}.jsonl").read_text().splitlines()]


def test_it_evaluates_at_its_steps_and_at_the_end_and_changes_nothing_of_the_training(log):
    plain = config(training={"steps": 6}, checkpoint={"enable_save": False})
    whole = Trainer(plain)
    whole.train()
    trainer = Trainer(settings(checkpoint={"enable_save": False}, eval_steps=4, eval_on_start=True))
    trainer.train()
    assert losses(trainer.state) == losses(whole.state)
    same(weights(trainer), weights(whole))
    assert [line["step"] for line in lines()] == [0, 4, 6]
    assert all(line["records"] == 6 and line["errors"] == 0 and not line["best"] for line in lines())
    assert [row["answer"] for row in rows(6)] == [record["answer"] for record in RECORDS]
    right = sum(row["generated_text"].strip() == row["answer"] for row in rows(6))
    assert lines()[-1]["metrics"] == {"exact_match": right / 6}
    assert f"evaluation of step 6: exact_match {right / 6:.4f} (6 records, 0 errors" in log.text


def test_an_evaluation_equals_the_prediction_from_the_checkpoint_of_its_step():
    Trainer(settings(checkpoint={"save_interleaved_steps": 2}, eval_steps=2)).train()
    predict = {"run_mode": "predict", "checkpoint": {"load_path": "saved/iteration_00000004"}, "inference": {}}
    Trainer(predict).inference("dev.jsonl", max_new_tokens=3, output="again.jsonl")
    assert pathlib.Path("again.jsonl").read_bytes() == pathlib.Path("eval/eval_step_4.jsonl").read_bytes()


def test_a_run_that_goes_on_neither_loses_nor_repeats_an_evaluation(log):
    saving = {"save_interleaved_steps": 3, "save_path": "whole"}
    Trainer(settings(checkpoint=saving, training={"steps": 8}, eval_steps=2, output_dir="whole_eval")).train()
    # Ends at step 7 with a checkpoint of step 6: the evaluation of the end of that run is none of the longer one.
    saving["save_path"] = "saved"
    Trainer(settings(checkpoint=saving, training={"steps": 7}, eval_steps=2)).train()
    assert [line["step"] for line in lines()] == [2, 4, 6, 7]
    saving["load_path"] = "saved/iteration_00000006"
    Trainer(settings(checkpoint=saving, training={"steps": 8}, eval_steps=2)).train()
    assert "eval/eval_metrics.jsonl: dropped 1 evaluations of steps after 6" in log.text
    fields = ("step", "metrics", "records", "epoch")
    assert [[line[name] for name in fields] for line in lines()] == [
        [line[name] for name in fields] for line in lines("whole_eval")
    ]
    assert rows(8) == rows(8, "whole_eval")


def test_an_evaluation_that_a_stop_cut_off_is_made_when_training_goes_on(monkeypatch):
    saving = {"save_interleaved_steps": 2}
    built = settings(checkpoint=saving, eval_steps=2)
    del built["callbacks"]
    late = EvaluationCallback(input_data="dev.jsonl", max_new_tokens=3, output_dir="eval", eval_steps=2)
    trainer = Trainer(built, callbacks=[late])  # after the checkpoint of its step
    original = trainer.inference

    def stopped(*arguments, **options):
        if trainer.state.global_step == 4:
            raise JobStoppedError("SIGTERM")
        return original(*arguments, **options)

    monkeypatch.setattr(trainer, "inference", stopped)
    with pytest.raises(JobStoppedError, match="SIGTERM"):
        trainer.train()
    assert [line["step"] for line in lines()] == [2]
    resumed = {**settings(checkpoint={**saving, "load_path": "saved"}, eval_steps=2), "run_mode": "train"}
    Trainer(resumed).train()
    assert [line["step"] for line in lines()] == [2, 4, 6]


def test_a_complete_run_evaluates_nothing_again(monkeypatch):
    Trainer(settings(eval_steps=3)).train()
    before = lines()
    again = Trainer(settings(checkpoint={"load_path": "saved"}, eval_steps=3))
    monkeypatch.setattr(again, "inference", lambda *_, **__: pytest.fail("evaluated again"))
    again.train()
    assert lines() == before and [line["step"] for line in before] == [3, 6]


@pytest.mark.parametrize("greater", [True, False])
def test_the_best_checkpoint_alone_is_kept(greater, monkeypatch):
    values = iter([0.2, 0.6, 0.6, 0.4])  # of steps 1 to 4; only better ones replace
    monkeypatch.setattr(evaluation, "metric_values", lambda _: {"exact_match": next(values)})
    options = {"eval_steps": 1, "metric_for_best_model": "exact_match", "greater_is_better": greater}
    trainer = Trainer(settings(training={"steps": 4}, **options))
    trainer.train()
    best = 2 if greater else 1
    assert [line["best"] for line in lines()] == (
        [True, True, False, False] if greater else [True, False, False, False]
    )
    folder = pathlib.Path("eval/best")
    assert [path.name for path in folder.glob("iteration_*")] == [f"iteration_0000000{best}"]
    assert json.loads((folder / "best.json").read_text()) == {
        "metric": "exact_match",
        "value": 0.6 if greater else 0.2,
        "step": best,
    }
    predict = {"run_mode": "predict", "checkpoint": {"load_path": "eval/best"}, "inference": {}}
    Trainer(predict).inference("dev.jsonl", max_new_tokens=3, output="again.jsonl")
    assert pathlib.Path("again.jsonl").read_bytes() == pathlib.Path(f"eval/eval_step_{best}.jsonl").read_bytes()
    # It can be trained on.
    assert Trainer(config(checkpoint={"load_path": "eval/best", "save_path": "more"})).state.global_step == best


def test_the_best_value_holds_when_training_goes_on_and_not_in_a_new_run(monkeypatch):
    def train(value, steps, **checkpoint):
        monkeypatch.setattr(evaluation, "metric_values", lambda _: {"exact_match": value})
        options = {"eval_steps": 1, "metric_for_best_model": "exact_match"}
        Trainer(settings(checkpoint=checkpoint, training={"steps": steps}, **options)).train()
        return json.loads(pathlib.Path("eval/best/best.json").read_text())

    assert train(0.5, 1)["step"] == 1
    assert train(0.4, 2, load_path="saved")["step"] == 1
    assert train(0.7, 3, load_path="saved")["step"] == 3
    assert train(0.1, 1, save_path="new")["value"] == 0.1


def test_the_old_best_checkpoint_is_there_until_the_new_one_is_complete(monkeypatch):
    values = iter([0.2, 0.6])
    monkeypatch.setattr(evaluation, "metric_values", lambda _: {"exact_match": next(values)})
    options = {"eval_steps": 1, "metric_for_best_model": "exact_match", "eval_on_end": False}
    trainer = Trainer(settings(training={"steps": 2}, **options))
    original = trainer.save_checkpoint

    def full(*arguments, **keywords):
        if trainer.state.global_step == 2:
            raise OSError(28, "No space left on device")
        return original(*arguments, **keywords)

    monkeypatch.setattr(trainer, "save_checkpoint", full)
    trainer.train()
    assert json.loads(pathlib.Path("eval/best/best.json").read_text())["step"] == 1
    assert [path.name for path in pathlib.Path("eval/best").glob("iteration_*")] == ["iteration_00000001"]


def test_a_disk_that_fails_between_is_told_and_at_the_end_it_counts(monkeypatch, log):
    trainer = Trainer(settings(eval_steps=3))

    def full(*_, **__):
        raise JobStoppedError("eval: No space left on device") from OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "inference", full)
    with pytest.raises(JobStoppedError, match="No space left"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert "no evaluation of step 3: eval: No space left on device; training goes on" in log.text


def test_a_journal_of_an_evaluation_that_was_killed_is_in_nobodys_way():
    pathlib.Path("eval").mkdir()
    pathlib.Path("eval/eval_step_3.jsonl.journal").write_text('{"journal": 1, "identity": {}, "facts": {}}\n')
    pathlib.Path("eval/eval_step_3.jsonl").write_text("of another run\n")
    Trainer(settings(eval_steps=3)).train()
    assert len(rows(3)) == 6 and not pathlib.Path("eval/eval_step_3.jsonl.journal").exists()


def test_metrics_and_options_of_the_yaml_hold_where_the_callback_says_nothing():
    built = settings(generation={"do_sample": True, "seed": 3, "num_return_sequences": 2})
    del built["callbacks"][0]["metrics"]
    built["predict"] = {"metrics": [{"type": "regex", "pattern": "."}], "metrics_in_rows": True}
    Trainer(built).train()
    assert lines()[0]["metrics"].keys() == {"regex", "regex_any"}
    assert all("regex" in row["answer_metrics"] for row in rows(6)) and len(rows(6)) == 12


def test_without_output_dir_evaluations_go_beside_the_checkpoints():
    built = settings()
    del built["callbacks"][0]["output_dir"]
    Trainer(built).train()
    assert [line["step"] for line in lines("saved_evaluation")] == [6]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eval_step": 3}, r"callbacks\[0\].eval_step: unknown key; did you mean callbacks\[0\].eval_steps\?"),
        ({"eval_steps": 0}, r"callbacks\[0\].eval_steps: expected an integer >= 1"),
        ({"input_data": None}, r"callbacks\[0\].input_data: is missing"),
        ({"input_data": "-"}, r"callbacks\[0\].input_data: standard input can be read once only"),
        ({"eval_on_end": False}, r"callbacks\[0\]: never evaluates"),
        ({"metrics": ["exact"]}, r"callbacks\[0\].metrics\[0\]: unknown metric 'exact'; did you mean exact_match\?"),
        ({"metric_for_best_model": "exact_mach"}, "'exact_mach' is none of the metrics; did you mean exact_match"),
        ({"metric_for_best_model": "exact_match", "metrics": None}, "'exact_match' needs metrics"),
        ({"best_dir": "best"}, "best_dir: needs metric_for_best_model"),
        ({"generation": {"top_q": 3}}, r"callbacks\[0\].generation.top_q: unknown key; did you mean"),
        ({"generation": {"num_beams": 2, "do_sample": True, "num_return_sequences": 3}}, r"callbacks\[0\].generation."),
        ({"task": "guess"}, r"callbacks\[0\].task: expected one of 'generate', 'score'"),
        ({"task": "score", "answer_field": "answer"}, r"callbacks\[0\].answer_field: needs predict.target_field"),
        ({"task": "score", "metric_for_best_model": "acc_norms"}, "did you mean acc_norm"),
    ],
)
def test_mistakes_in_the_yaml_are_refused_with_key_and_nearest_name(options, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(settings(**options))


def test_two_evaluations_do_not_share_a_folder():
    built = settings()
    built["callbacks"] *= 2
    with pytest.raises(ConfigError, match=r"callbacks\[1\].output_dir: is that of another EvaluationCallback"):
        load_config(built)


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ({"output_dir": "eval"}, {"output_dir": "./eval/"}, "output_dir"),
        ({"output_dir": "a", "best_dir": "best"}, {"output_dir": "b", "best_dir": "x/../best"}, "best_dir"),
        ({"output_dir": "a", "best_dir": "b"}, {"output_dir": "b", "best_dir": "c"}, "output_dir"),
        ({"output_dir": None}, {"output_dir": "saved_evaluation"}, "output_dir"),
    ],
)
def test_two_evaluations_share_no_folder_however_it_is_called(one, other, key):
    built = settings(**one, metric_for_best_model="exact_match")
    built["callbacks"] += settings(**other, metric_for_best_model="exact_match")["callbacks"]
    with pytest.raises(ConfigError, match=rf"callbacks\[1\].{key}: is that of another EvaluationCallback"):
        load_config(built)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"metrics": None, "reference_field": "a"}, "no effect in callbacks[0] without metrics: reference_field"),
        ({"rolling": True}, "no effect in callbacks[0] with task: generate: rolling"),
        (
            {"task": "score", "generation": {"do_sample": True}},
            "no effect in callbacks[0] with task: score: metrics, max_new_tokens, generation.do_sample",
        ),
    ],
)
def test_what_has_no_effect_in_an_evaluation_is_named(options, warning):
    assert warning in load_config(settings(**options)).warnings


def test_choices_and_texts_are_scored_and_a_smaller_perplexity_is_better():
    choices = [{**record, "choices": [" 1", " 2", " 3"], "answer": 0} for record in RECORDS]
    pathlib.Path("dev.jsonl").write_text("\n".join(map(json.dumps, choices)))
    options = {"task": "score", "metrics": None, "max_new_tokens": None, "eval_steps": 3}
    built = settings(**options, target_field="choices", answer_field="answer", metric_for_best_model="acc")
    texts = settings(**options, metric_for_best_model="token_perplexity", output_dir="texts")
    built["callbacks"] += texts["callbacks"]
    Trainer(built).train()
    assert [line["step"] for line in lines()] == [line["step"] for line in lines("texts")] == [3, 6]
    assert all(row["best"] in (0, 1, 2) and len(row["loglikelihood"]) == 3 for row in rows(6))
    assert lines()[-1]["metrics"]["acc"] == sum(row["best"] == 0 for row in rows(6)) / 6
    best = min(lines("texts"), key=lambda line: line["metrics"]["token_perplexity"])
    assert json.loads(pathlib.Path("texts/best/best.json").read_text())["step"] == best["step"]
    # What it says is what the checkpoint says.
    predict = {"run_mode": "predict", "checkpoint": {"load_path": "saved"}, "inference": {}}
    again = Trainer({**predict, "predict": {"task": "score"}})
    again.inference("dev.jsonl", output="again.jsonl")
    assert lines("texts")[-1]["metrics"]["nll"] == pytest.approx(again.last_summary.scores["nll"], rel=1e-4)


@pytest.mark.parametrize("check", [Trainer, lambda built: validate(load_config(built))], ids=["Trainer", "validate"])
@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"input_data": "nowhere.jsonl"}, FileNotFoundError, "EvaluationCallback: .*nowhere.jsonl"),
        ({"dataset_field": "question"}, ValueError, "none of the 6 records has a prompt in the field 'question'"),
        ({"reference_field": "truth"}, ValueError, "none of the 6 records has a reference in the field 'truth'"),
        ({"input_data": []}, ValueError, "there is no record"),
        ({"metrics": ["no_such_package:f"]}, ValueError, "no_such_package:f cannot be imported: ModuleNotFoundError"),
        ({"output_dir": "dev.jsonl"}, ValueError, "dev.jsonl' is a file, not a folder"),
        (
            {"metric_for_best_model": "exact_match", "best_dir": "saved"},
            ValueError,
            "or is inside, checkpoint.save",
        ),
        ({"metric_for_best_model": "exact_match", "best_dir": "other"}, ValueError, "other holds other checkpoints"),
    ],
)
def test_what_would_fail_later_is_refused_before_training(options, error, problem, check):
    pathlib.Path("other/iteration_00000001").mkdir(parents=True)
    with pytest.raises(error, match=problem):
        check(settings(**options))


def test_a_metrics_file_of_something_else_is_not_replaced():
    pathlib.Path("eval").mkdir()
    pathlib.Path("eval/eval_metrics.jsonl").write_text("my notes\n")
    with pytest.raises(ValueError, match=r"eval_metrics.jsonl:1 is no line of an evaluation"):
        Trainer(settings())


def test_any_callback_is_given_the_trainer_when_that_is_complete():
    class Asks(TrainerCallback):
        def on_init_end(self, args, state, **kwargs):
            self.trainer = kwargs["trainer"]

        def on_train_end(self, args, state, **kwargs):
            self.answers = self.trainer.inference(["1 + 1 ="], max_new_tokens=2, output="")

    asks = Asks()
    trainer = Trainer(config(training={"steps": 1}, checkpoint={"enable_save": False}), callbacks=[asks])
    trainer.train()
    assert asks.answers == trainer.inference(["1 + 1 ="], max_new_tokens=2, output="")
