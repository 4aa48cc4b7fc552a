"""`EvaluationCallback`: answers a file during training, judges the answers, and keeps the best checkpoint."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindformers_ext.checkpoint import has_iterations
from mindformers_ext.config import TrainConfig
from mindformers_ext.config.evaluation import EvaluationSection, best_metric_mistake, build_evaluation
from mindformers_ext.parallel.groups import single
from mindformers_ext.predict import JobStoppedError, Tokenizer, check_output
from mindformers_ext.predict.answer_metrics import metric_values
from mindformers_ext.predict.output_files import replace_file
from mindformers_ext.runtime import logger
from mindformers_ext.trainer.callbacks import TrainerCallback
from mindformers_ext.trainer.model import protected_files
from mindformers_ext.trainer.request import PredictionRequest, inference_options, read_request
from mindformers_ext.trainer.train_state import TrainerState

METRICS_FILE = "eval_metrics.jsonl"
BEST_FILE = "best.json"


class EvaluationCallback(TrainerCallback):
    """Evaluates every ``eval_steps`` steps and after the last one; docs/evaluation.md has the keys.

    A step is evaluated once in a run, whatever the run is made of: what an interrupted evaluation left out is done when
    training goes on from a checkpoint of that step, and evaluations of steps that are trained again are made again.

    Args:
        **options: the keys of `EvaluationSection`.

    Raises:
        ValueError: an unknown key or a value out of range.
    """

    def __init__(self, **options: Any) -> None:
        self.section = build_evaluation(options, ("EvaluationCallback",))
        # Known once there is a Trainer.
        self._trainer: Any
        self._folder: Path
        self._best_folder: Path
        self._log: EvaluationLog
        self._best: float | None = None

    def on_init_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Finds what would make an evaluation fail; see `check_evaluation`."""
        self._trainer = kwargs["trainer"]
        check_evaluation(self.section, args, self._trainer.tokenizer, getattr(self._trainer.model, "config", None))
        self._folder, self._best_folder = self.section.folders(args.checkpoint.save_folder())
        self._log = EvaluationLog(self._folder / METRICS_FILE)

    def on_train_begin(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Takes up the evaluations of the run that is continued."""
        step = state.global_step
        self._log.forget_after(step)
        self._best = None if step == 0 else stored_best(self._best_folder, self.section.metric_for_best_model)
        if (self.section.eval_on_start and step == 0) or (step and self._is_due(step)):
            self._evaluate(state)

    def on_step_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Evaluates when it is time. A disk that fails now need not end a long run: the error is logged."""
        if not self._is_due(state.global_step):
            return
        try:
            self._evaluate(state)
        except (OSError, JobStoppedError) as error:
            if not _is_of_the_disk(error):
                raise
            logger.error("no evaluation of step %d: %s; training goes on", state.global_step, error)

    def on_train_end(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
        """Evaluates the end of the run unless that is done; here an error counts."""
        if self.section.eval_on_end:
            self._evaluate(state)

    def _is_due(self, step: int) -> bool:
        return self.section.eval_steps is not None and step % self.section.eval_steps == 0

    def _evaluate(self, state: TrainerState) -> None:
        section, step = self.section, state.global_step
        if step in self._log.lines:
            return
        started = time.perf_counter()
        output = self._folder / f"eval_step_{step}.jsonl"
        self._trainer.inference(
            section.input_data,
            section.max_new_tokens,
            output,
            section.batch_size,
            collect=False,
            resume=False,  # the weights are others, whatever is there
            predict=section.predict_options(),
            **section.generation.explicit(),
        )
        summary = self._trainer.last_summary
        values = metric_values(summary.metrics) if summary.metrics else dict(summary.scores)
        line = {
            "step": step,
            "epoch": state.epoch,
            "output": output.name,
            "records": summary.num_records,
            "errors": summary.num_errors,
            "metrics": values,
            "best": self._keep_best(step, values),
            "seconds": round(time.perf_counter() - started, 3),
        }
        self._log.add(line)
        shown = ", ".join(f"{name} {'none' if value is None else f'{value:.4f}'}" for name, value in values.items())
        logger.info(
            "evaluation of step %d: %s (%d records, %d errors, %.1f s)%s",
            *(step, shown or "answered", line["records"], line["errors"], line["seconds"]),
            ", the best so far" if line["best"] else "",
        )

    def _keep_best(self, step: int, values: Mapping[str, float | None]) -> bool:
        """Saves the checkpoint if it is better than all before; the one before goes when the new one is complete."""
        name = self.section.metric_for_best_model
        value = None if name is None else values.get(name)
        if value is None or not _is_better(value, self._best, self.section.prefers_greater()):
            return False
        if not (self._best_folder / BEST_FILE).exists():  # says whose folder it is, before anything else is in it
            _write_json(self._best_folder / BEST_FILE, {"metric": name, "value": None, "step": None})
        self._trainer.save_checkpoint(self._best_folder, only=True)
        _write_json(self._best_folder / BEST_FILE, {"metric": name, "value": value, "step": step})
        self._best = value
        return True


class EvaluationLog:
    """The lines of ``eval_metrics.jsonl``, by step.

    Args:
        path: the file; it need not exist.

    Raises:
        ValueError: it is another file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: dict[int, dict[str, Any]] = {}
        if not path.is_file():
            return
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
                self.lines[int(line["step"])] = line
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{path}:{number} is no line of an evaluation; move the file away, or give another output_dir"
                ) from None

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that are going to be trained again, or that belong to another run."""
        later = [known for known in self.lines if known > step]
        if later:
            logger.warning("%s: dropped %d evaluations of steps after %d", self._path, len(later), step)
            for known in later:
                del self.lines[known]
            self._write()

    def add(self, line: dict[str, Any]) -> None:
        """Adds the line of a step; the file changes as a whole."""
        self.lines[line["step"]] = line
        self._write()

    def _write(self) -> None:
        text = "".join(json.dumps(self.lines[step], ensure_ascii=False) + "\n" for step in sorted(self.lines))
        replace_file(self._path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def check_evaluation(
    section: EvaluationSection, config: TrainConfig, tokenizer: Tokenizer | None, model_config: Any
) -> None:
    """Finds mistakes before training: files, folders, options, metrics, and records without references.

    Args:
        section: the arguments of the callback.
        config: the whole configuration.
        tokenizer: of the training.
        model_config: of the model; None if it has none.

    Raises:
        ValueError: one sentence.
        FileNotFoundError: the file to evaluate on does not exist.
        PermissionError: a folder is not writable.
    """
    if tokenizer is None:
        raise ValueError("EvaluationCallback needs a tokenizer: set train_dataset.dataloader.tokenizer_path")
    folder, best = section.folders(config.checkpoint.save_folder())
    try:
        for name in (METRICS_FILE, "eval_step_0.jsonl"):
            check_output(folder / name, section.input_data, protected_files(config))
        output = os.fspath(folder / "eval_step_0.jsonl")
        options = inference_options(config, section.input_data, section.max_new_tokens, output, section.batch_size)
        request = read_request(
            *(config, tokenizer, model_config, single(), options, None),
            section.generation.explicit(),
            section.predict_options(),
        )
        _check_records(request)
        _check_best(section, request.config, best)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"EvaluationCallback: {error}") from error
    except PermissionError as error:
        raise PermissionError(f"EvaluationCallback: {error}") from error
    except ValueError as error:
        raise ValueError(f"EvaluationCallback: {error}") from error


def _check_records(request: PredictionRequest) -> None:
    """Refuses an input without a usable record."""
    total = usable = 0
    for record in request.records:
        total += 1
        usable += record.error is None
    if not usable:
        reason = f"none of the {total} records has a prompt in the field '{request.dataset_field}'"
        raise ValueError(f"input_data: {reason if total else 'there is no record'}")


def _check_best(section: EvaluationSection, config: TrainConfig, best: Path) -> None:
    """Refuses a metric that is not there, and a folder in which other checkpoints would be removed."""
    if section.metric_for_best_model is None:
        return
    mistake = best_metric_mistake(section.metric_for_best_model, config.predict)
    if mistake is not None:
        raise ValueError(f"metric_for_best_model: {mistake}")
    place = Path(os.path.realpath(best))
    for key, other in (("save_path", config.checkpoint.save_folder()), ("load_path", config.checkpoint.load_path)):
        if other and Path(os.path.realpath(other)) in (place, *place.parents):
            raise ValueError(f"best_dir: {best} is, or is inside, checkpoint.{key}; give a folder of its own")
    loaded = Path(os.path.realpath(config.checkpoint.load_path or os.devnull))
    if place in loaded.parents:
        raise ValueError(f"best_dir: checkpoint.load_path is inside {best}, where it would be removed; give another")
    if has_iterations(best) and not (best / BEST_FILE).is_file():
        raise ValueError(f"best_dir: {best} holds other checkpoints, which would be removed; give another folder")


def stored_best(folder: Path, metric: str | None) -> float | None:
    """Returns the value of the best checkpoint that an earlier run kept, None if there is none for this metric."""
    try:
        content = json.loads((folder / BEST_FILE).read_bytes())
        value = content["value"] if content["metric"] == metric else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return float(value) if isinstance(value, int | float) else None


def _is_better(value: float, best: float | None, greater: bool) -> bool:
    if not math.isfinite(value):
        return False
    return best is None or (value > best if greater else value < best)


def _is_of_the_disk(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__
    return False


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write((json.dumps(content) + "\n").encode()))
