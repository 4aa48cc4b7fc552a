"""Command line of the Trainer: one YAML, trained or predicted with by its run_mode.

    python run_mindformer.py --config predict.yaml --predict_data "first prompt" "second" --inference.max_new_tokens 64

Exit code: 0 done; 3 predicted, but some records ended in an error; 4 a prediction, or an evaluation in training, was
stopped: the same command goes on; 1 refused or failed; 5 ended because another process of the job failed; 6 ended by
the watchdog, because nothing moved; 130 interrupted.
A mistake of the user is one line on stderr: an error whose innermost line is a `raise` of this package, which wrote its
message for the user. What a library or a built-in raises, also when we call it directly, keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_ERROR_RECORDS = 3
EXIT_STOPPED = 4
EXIT_PEER_FAILED = 5
EXIT_INTERRUPTED = 130

# Flags that set one key of the YAML.
FLAG_KEYS = {
    "run_mode": "run_mode",
    "load_checkpoint": "checkpoint.load_path",
    "predict_data": "inference.input_data",
    "predict_batch_size": "inference.batch_size",
    "output": "inference.output",
    "seed": "training.seed",
}
OTHER_FLAGS = ("config", "mode", "register_path", "save_checkpoint", "validate", "help")
PREDICT_FLAGS = ("predict_data", "predict_batch_size", "output", "save_checkpoint")

# Flags of MindSpore Transformers that have no effect on its PyNative route. Here they are refused, with what to use.
REFUSED_FLAGS = {
    "adapter_id": "merge the adapter into the checkpoint first",
    "auto_trans_ckpt": "leave it out: a checkpoint is fitted to the parallel layout while it is loaded",
    "batch_size": "use --training.local_batch_size to train, --predict_batch_size to predict",
    "device_id": "leave it out: msrun gives every worker its device",
    "device_target": "leave it out: the device is detected",
    "do_eval": "predict the evaluation set with run_mode: predict after training",
    "do_sample": "use --generation.do_sample",
    "epochs": "use --training.steps",
    "eval_dataset_dir": "predict the evaluation set with run_mode: predict after training",
    "gradient_accumulation_steps": "use --training.global_batch_size and --training.local_batch_size",
    "modal_type": "leave it out: prompts are text",
    "num_samples": "use --training.steps to train, a shorter input file to predict",
    "only_save_strategy": "leave it out: PyNative has no strategy files",
    "options": "write --section.key value",
    "output_dir": "use --output for results, --checkpoint.save_path for checkpoints",
    "profile": "leave it out: profiling is not supported",
    "remote_save_url": "copy the files after the job",
    "resume_training": "use --load_checkpoint with the folder of the checkpoints: training goes on from it",
    "sink_mode": "leave it out: PyNative has no data sink",
    "src_strategy_path_or_dir": "leave it out: a checkpoint is fitted to the parallel layout while it is loaded",
    "strategy_load_checkpoint": "use --load_checkpoint: no strategy file is needed",
    "train_dataset_dir": "use --train_dataset.dataloader.path",
    "transform_process_num": "leave it out: a checkpoint is fitted to the parallel layout while it is loaded",
    "trust_remote_code": "leave it out: code that comes with a checkpoint is never run",
    "use_parallel": "start the workers with scripts/msrun_launcher.sh, set --parallelism.tensor_parallel and so on",
}

_OVERRIDE = re.compile(r"--[A-Za-z_]\w*(\.\w+)+(=.*)?", re.DOTALL)


class UsageError(ValueError):
    """A command line that cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _StoreOnce(argparse.Action):
    """Store, and refuse a second time: the last one would win in silence."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in given:
            raise UsageError(f"{option_string} is given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def build_parser() -> argparse.ArgumentParser:
    """The flags that work. Dotted overrides are taken out before the parser sees them."""
    parser = _Parser(
        prog="run_mindformer.py",
        allow_abbrev=False,
        description="Train a model, or predict with one, as a YAML says.",
        epilog="Any key of the YAML can be set: --section.key value or --section.key=value, the value in YAML's form, "
        "e.g. --inference.max_new_tokens 64. Relative paths are relative to the folder you call from. "
        "Exit code: 0 done, 3 done with error records, 4 stopped and resumable, 1 refused or failed, 5 ended because "
        "another process failed, 6 ended because nothing moved.",
    )

    def add(flag: str, **options: Any) -> None:
        parser.add_argument(flag, action=_StoreOnce, **options)

    add("--config", metavar="FILE", help="the YAML of the job (required)")
    add("--mode", type=int, default=1, help="1, the PyNative route, is the only one (default)")
    add("--run_mode", help="train or predict; overrides run_mode")
    add("--load_checkpoint", metavar="DIR", help="weights and tokenizer; overrides checkpoint.load_path")
    add(
        "--predict_data",
        nargs="+",
        metavar="DATA",
        help="a prompt, several prompts, one .jsonl, .json or .txt file (.gz too), a quoted pattern of files, or - for "
        "lines of JSON on standard input; overrides inference.input_data",
    )
    add("--predict_batch_size", type=int, metavar="N", help="prompts decoded together; overrides inference.batch_size")
    add("--output", metavar="FILE", help="result file, .jsonl, .json or .txt; overrides inference.output")
    add("--seed", type=int, metavar="N", help="overrides training.seed")
    add(
        "--save_checkpoint",
        metavar="DIR",
        help="with run_mode: predict, save the loaded weights in the layout of the job instead of predicting",
    )
    add("--register_path", metavar="DIR", help="folder with Python code of yours, imported before the model is built")
    parser.add_argument(
        "--validate", action="store_true", help="check YAML, files, tokenizer and weights, estimate memory, run nothing"
    )
    return parser


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--a.b v` and `--a.b=v` from the rest.

    Returns:
        (the other arguments, the override tokens), each in the order of the command line.
    """
    rest: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        if not _OVERRIDE.fullmatch(token):
            rest.append(token)
            continue
        overrides.append(token)
        if "=" not in token and position < len(argv) and not argv[position].startswith("--"):
            overrides.append(argv[position])
            position += 1
    return rest, overrides


def refuse_unknown(unknown: Sequence[str]) -> None:
    """Raise a UsageError about the first argument that no flag takes, if there is one."""
    if not unknown:
        return
    token = unknown[0]
    if not token.startswith("-"):
        raise UsageError(f"unexpected argument {token!r}: quote a value that has spaces")
    flag = token.split("=", 1)[0]
    name = flag.lstrip("-").replace("-", "_")
    if name in REFUSED_FLAGS:
        raise UsageError(f"--{name} is not supported: {REFUSED_FLAGS[name]}")
    nearest = difflib.get_close_matches(name, (*FLAG_KEYS, *OTHER_FLAGS), n=1)
    hint = (
        f"did you mean --{nearest[0]}?" if nearest else "see --help; a key of the YAML is written --section.key value"
    )
    raise UsageError(f"unknown flag {flag}: {hint}")


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Returns:
        (flags, tokens of dotted overrides).

    Raises:
        UsageError: a flag that is unknown, refused, missing or given twice.
    """
    rest, tokens = split_overrides(argv)
    flags, unknown = build_parser().parse_known_args(rest)
    refuse_unknown(unknown)
    if flags.config is None:
        raise UsageError("--config FILE is missing: the YAML of the job")
    if flags.mode != 1:
        raise UsageError(f"--mode {flags.mode} is not supported: --mode 1, the PyNative route, is the only one")
    return flags, tokens


def collect_overrides(flags: argparse.Namespace, dotted: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys and values of all flags and overrides together.

    Raises:
        UsageError: one key set by a flag and by an override.
    """
    overrides = dict(dotted)
    for flag, key in FLAG_KEYS.items():
        value = getattr(flags, flag)
        if value is None:
            continue
        if key in dotted:
            raise UsageError(f"--{flag} and --{key} set the same key: leave one out")
        if flag == "predict_data" and len(value) == 1:
            value = value[0]
        overrides[key] = value
    return overrides


def register(folder: str) -> None:
    """Import the user's code in `folder` and export REGISTER_PATH: the package if it is one, otherwise all its modules.

    Raises:
        UsageError: no such folder, or no Python file in it.
    """
    path = Path(folder).resolve()
    if not path.is_dir():
        raise UsageError(f"--register_path {folder}: no such folder")
    os.environ["REGISTER_PATH"] = str(path)
    if (path / "__init__.py").is_file():
        sys.path.append(str(path.parent))
        modules = [path.name]
    else:
        sys.path.append(str(path))
        modules = sorted(file.stem for file in path.glob("*.py"))
    if not modules:
        raise UsageError(f"--register_path {folder}: there is no Python file in the folder")
    for name in modules:
        importlib.import_module(name)


def run(flags: argparse.Namespace, tokens: Sequence[str]) -> int:
    """Do what the command line asks for and return the exit code. MindSpore is imported once the YAML is good."""
    from mindformers_ext.config import load_config, parse_overrides

    config = load_config(flags.config, collect_overrides(flags, parse_overrides(tokens)))
    if config.run_mode != "predict":
        for flag in PREDICT_FLAGS:
            if getattr(flags, flag) is not None:
                raise UsageError(f"--{flag} needs run_mode: predict, the YAML says {config.run_mode}")
    if flags.register_path is not None:
        register(flags.register_path)
    if flags.validate:
        from mindformers_ext.trainer.validate import validate

        validate(config)
        return EXIT_OK

    from mindformers_ext.predict import JobStoppedError
    from mindformers_ext.trainer import Trainer

    trainer = Trainer(config)
    if not trainer.is_inference:
        try:
            trainer.train()
        except JobStoppedError as reason:  # during an evaluation
            print(f"stopped: {reason}; training goes on from its last checkpoint", file=sys.stderr)
            return EXIT_STOPPED
        return EXIT_OK
    if flags.save_checkpoint is not None:
        trainer.save_checkpoint(flags.save_checkpoint)
        return EXIT_OK
    try:
        trainer.inference(collect=False)
    except JobStoppedError as reason:
        print(f"stopped: {reason}; finished records are kept, the next run goes on from here", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_ERROR_RECORDS if trainer.last_summary.num_errors else EXIT_OK


def _raised_by_our_code(trace: TracebackType | None) -> bool:
    """Whether the innermost line of the traceback is a `raise` statement of this package."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals)
    return package in ("mindformers_ext", __name__) and line.split()[:1] == ["raise"]


def user_message(error: Exception) -> str | None:
    """The sentence for a mistake of the user, on one line; None for anything that deserves a traceback."""
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").split(".")[0]
        if name not in ("mindspore", "numpy", "yaml", "safetensors", "tokenizers", "jinja2", "tqdm"):
            return None
        return f"{sys.executable} has no package {name!r}: activate the environment, or install with pip install -e ."
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.filename}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error.strerror
    kinds = (ValueError, TypeError, OSError, RuntimeError, FloatingPointError)
    if isinstance(error, kinds) and _raised_by_our_code(error.__traceback__):
        return " ".join(line.strip() for line in str(error).splitlines())
    return None


def guarded(action: Callable[[], int]) -> int:
    """Run `action`; turn a mistake of the user into one line on stderr and exit code 1."""
    try:
        return action()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return EXIT_PEER_FAILED if _is_of_a_peer(error) else EXIT_FAILED


def _is_of_a_peer(error: Exception) -> bool:
    from mindformers_ext.parallel.mesh import PeerError, PeerLostError

    return isinstance(error, PeerError | PeerLostError)


def leave(action: Callable[[], int]) -> NoReturn:
    """Run `action` and end the process with the code that it returns.

    MindSpore's own way out waits for the other processes of a job, so a process that failed leaves without it.
    """
    try:
        code = action()
    except SystemExit:  # --help
        raise
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    if code not in (EXIT_OK, EXIT_ERROR_RECORDS) and int(os.environ.get("MS_WORKER_NUM", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; `argv` without the program's name."""
    arguments = sys.argv[1:] if argv is None else argv
    return guarded(lambda: run(*parse_arguments(arguments)))


if __name__ == "__main__":
    leave(main)
