"""The command line: which flags act, which are refused, what a mistake looks like, and the exit codes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import run_mindformer

ROOT = Path(run_mindformer.__file__).parent

# Stands in for mindformers_ext.trainer. `plan` decides what each call does.
FAKE_TRAINER = """
import json
import numpy
from mindformers_ext.predict import JobStoppedError

calls, plan = [], {}

def act(name, config):
    calls.append((name, config))
    step = plan.get(name)
    if step == "mistake":
        raise ValueError(
            "checkpoint.load_path: no tokenizer.json in x;\\n give the folder of the model"
        )
    if step == "diverged":
        raise RuntimeError("step 3: loss nan. Lower the learning rate")
    if step == "stopped":
        raise JobStoppedError("SIGTERM was received")
    if step == "own bug":
        raise KeyError("x")
    if step == "library":
        json.loads("{")
    if step == "re-raised":
        try:
            json.loads("{")
        except ValueError:
            raise
    if step == "bug":
        numpy.zeros(2) + numpy.zeros(3)
    if step == "bad int":
        int("x")
    if step == "missing file":
        open("/nowhere/at/all.jsonl")
    if step == "no module":
        import a_module_that_is_not_here
    if step == "ctrl-c":
        raise KeyboardInterrupt

class Summary:
    num_errors = 0

class Trainer:
    def __init__(self, config):
        act("init", config)
        self.config = config
        self.is_inference = config.run_mode == "predict"

    def train(self):
        act("train", self.config)

    def inference(self, collect):
        act("inference", self.config)
        self.last_summary = Summary()
        self.last_summary.num_errors = plan.get("errors", 0)
        return []

def validate(config):
    act("validate", config)
"""

PREDICT = "run_mode: predict\ncheckpoint: {load_path: weights}\ninference: {input_data: prompts.jsonl}\n"
TRAIN = """
checkpoint: {save_path: checkpoints}
model: {model_type: qwen3, architectures: Qwen3ForCausalLM}
lr_scheduler: {type: ConstantWarmUpLR}
train_dataset: {dataloader: {type: JsonlDataset, path: data.jsonl, tokenizer_path: t}}
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A fake trainer, and a folder with predict.yaml and train.yaml that is the working directory."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "trainer.py").write_text(FAKE_TRAINER)
    spec = importlib.util.spec_from_file_location("mindformers_ext.trainer", tmp_path / "fake" / "trainer.py")
    trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    monkeypatch.setitem(sys.modules, "mindformers_ext.trainer", trainer)
    monkeypatch.setitem(sys.modules, "mindformers_ext.trainer.validate", trainer)
    monkeypatch.chdir(tmp_path)
    Path("predict.yaml").write_text(PREDICT)
    Path("train.yaml").write_text(TRAIN)
    return SimpleNamespace(calls=trainer.calls, plan=trainer.plan)


def run(*argv):
    return run_mindformer.main(list(argv))


def test_a_training_that_is_stopped_in_an_evaluation_can_go_on_and_says_so(fake, capsys):
    fake.plan["train"] = "stopped"
    assert run("--config", "train.yaml") == run_mindformer.EXIT_STOPPED
    message = "stopped: SIGTERM was received; training goes on from its last checkpoint"
    assert capsys.readouterr().err.strip() == message


def test_flags_and_overrides_reach_the_config_of_the_trainer(fake):
    code = run(
        *("--config", "predict.yaml", "--mode", "1", "--load_checkpoint", "other", "--predict_data", "a b  c", "d"),
        *("--predict_batch_size", "3", "--output", "o.txt", "--seed", "7", "--inference.max_new_tokens", "64"),
        "--generation.use_cache=false",
    )
    assert code == 0
    assert [name for name, _ in fake.calls] == ["init", "inference"]
    config = fake.calls[0][1]
    assert config.checkpoint.load_path == "other"
    assert config.inference.input_data == ["a b  c", "d"]
    assert (config.inference.batch_size, config.inference.output, config.inference.max_new_tokens) == (3, "o.txt", 64)
    assert config.training.seed == 7
    assert config.generation.use_cache is False


def test_one_prompt_is_a_prompt_and_not_a_list(fake):
    assert run("--config", "predict.yaml", "--predict_data", "- a prompt that starts with a dash") == 0
    assert fake.calls[0][1].inference.input_data == "- a prompt that starts with a dash"


def test_run_mode_decides_between_training_and_prediction(fake):
    assert run("--config", "train.yaml") == 0
    assert [name for name, _ in fake.calls] == ["init", "train"]
    fake.calls.clear()
    assert run("--config", "train.yaml", "--run_mode", "predict", "--load_checkpoint", "w", "--predict_data", "hi") == 0
    assert [name for name, _ in fake.calls] == ["init", "inference"]


def test_validate_runs_nothing_else(fake):
    assert run("--config", "predict.yaml", "--validate") == 0
    assert [name for name, _ in fake.calls] == ["validate"]


def test_error_records_give_exit_code_3(fake):
    fake.plan["errors"] = 2
    assert run("--config", "predict.yaml") == 3


def test_a_stopped_run_gives_exit_code_4_and_one_line_that_says_how_to_go_on(fake, capsys):
    fake.plan["inference"] = "stopped"
    assert run("--config", "predict.yaml") == 4
    told = "stopped: SIGTERM was received; finished records are kept, the next run goes on from here\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("step", ["init", "inference", "validate"])
def test_a_mistake_of_the_user_is_one_line_and_exit_code_1(fake, capsys, step):
    fake.plan[step] = "mistake"
    assert run("--config", "predict.yaml", *(["--validate"] if step == "validate" else [])) == 1
    expected = "error: checkpoint.load_path: no tokenizer.json in x; give the folder of the model\n"
    assert capsys.readouterr().err == expected


def test_a_file_that_cannot_be_opened_is_named_on_one_line(fake, capsys):
    fake.plan["inference"] = "missing file"
    assert run("--config", "predict.yaml") == 1
    assert capsys.readouterr().err == "error: /nowhere/at/all.jsonl: No such file or directory\n"


def test_a_training_that_diverges_is_one_line(fake, capsys):
    fake.plan["train"] = "diverged"
    assert run("--config", "train.yaml") == 1
    assert capsys.readouterr().err == "error: step 3: loss nan. Lower the learning rate\n"


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ("bug", ValueError),
        ("bad int", ValueError),
        ("no module", ImportError),
        ("own bug", KeyError),
        ("library", ValueError),
        ("re-raised", ValueError),
    ],
)
def test_a_bug_keeps_its_traceback(fake, step, kind):
    fake.plan["inference"] = step
    with pytest.raises(kind):
        run("--config", "predict.yaml")


def test_a_missing_dependency_says_what_to_install(fake, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mindformers_ext.config", None)
    with pytest.raises(ModuleNotFoundError):  # our own module missing is a bug
        run("--config", "predict.yaml")
    error = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    assert "pip install -e ." in (run_mindformer.user_message(error) or "")


def test_an_interrupted_run_has_its_own_exit_code(fake, capsys):
    fake.plan["inference"] = "ctrl-c"
    assert run("--config", "predict.yaml") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--config FILE is missing"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "nope.yaml"], "nope.yaml"),
        (["--config", "predict.yaml", "--mode", "0"], "--mode 0 is not supported"),
        (["--config", "predict.yaml", "--mode", "one"], "argument --mode: invalid int value: 'one'"),
        (["--config", "predict.yaml", "--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["--config", "predict.yaml", "--predict_date", "x"], "did you mean --predict_data?"),
        (["--config", "predict.yaml", "--run-mode", "train"], "did you mean --run_mode?"),
        (["--config", "predict.yaml", "more"], "unexpected argument 'more'"),
        (["--config", "predict.yaml", "--inference.batch_size"], "--inference.batch_size: has no value"),
        (["--config", "predict.yaml", "--inference.batch_sise", "2"], "batch_size"),
        (["--config", "predict.yaml", "--inference.batch_size", "0"], "inference.batch_size"),
        (["--config", "predict.yaml", "--run_mode", "eval"], "run_mode"),
        (["--config", "predict.yaml", "--output", "o.xml"], "inference.output"),
        (["--config", "predict.yaml", "--seed", "1", "--training.seed", "1"], "--seed and --training.seed"),
        (["--config", "train.yaml", "--predict_data", "x"], "--predict_data needs run_mode: predict"),
        (["--config", "predict.yaml", "--register_path", "nope"], "--register_path nope: no such folder"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused_before_the_trainer_exists(fake, capsys, argv, said):
    assert run(*argv) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert fake.calls == []


@pytest.mark.parametrize("flag", sorted(run_mindformer.REFUSED_FLAGS))
def test_flags_that_have_no_effect_are_refused_by_name(fake, capsys, flag):
    for form in (f"--{flag} value", f"--{flag}=value", f"--{flag}", f"--{flag.replace('_', '-')}"):
        assert run(*form.split(), "--config", "predict.yaml") == 1
        assert capsys.readouterr().err.startswith(f"error: --{flag} is not supported: ")
    assert fake.calls == []


def test_relative_paths_are_those_of_the_caller_and_help_needs_no_mindspore(tmp_path):
    (tmp_path / "bad.yaml").write_text("run_mode: predict\ninferrence: {}\n")
    program = (
        "import sys, run_mindformer\n"
        "code = run_mindformer.main(['--config', 'bad.yaml'])\n"
        "assert code == 1 and 'mindspore' not in sys.modules, code\n"
        "run_mindformer.main(['--help'])\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bad.yaml:2" in done.stderr
    assert "--predict_batch_size" in done.stdout


def test_register_path_imports_the_modules_of_a_folder_and_exports_it(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("REGISTER_PATH", "")
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "launch_test_plugin.py").write_text("import os\nSEEN = os.environ['REGISTER_PATH']\n")
    assert run("--config", "predict.yaml", "--register_path", "plain") == 0
    seen = sys.modules.pop("launch_test_plugin").SEEN
    assert seen == str(folder)


def test_register_path_imports_a_package_as_one(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("REGISTER_PATH", "")
    folder = tmp_path / "launch_test_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import VALUE\n")
    (folder / "inner.py").write_text("VALUE = 5\n")
    assert run("--config", "predict.yaml", "--register_path", str(folder)) == 0
    assert sys.modules.pop("launch_test_package").VALUE == 5
    sys.modules.pop("launch_test_package.inner")


LEAVING = """
import atexit, sys
atexit.register(lambda: print("the slow way out"))
from run_mindformer import leave
def action():
    print("done")
    if sys.argv[1] == "raise":
        raise KeyError("x")
    return int(sys.argv[1])
leave(action)
"""


@pytest.mark.parametrize(
    ("argument", "workers", "code", "slow"),
    [("0", "2", 0, True), ("3", "2", 3, True), ("1", "2", 1, False), ("raise", "2", 1, False), ("1", "1", 1, True)],
)
def test_only_a_process_that_failed_in_a_job_of_several_leaves_without_waiting_for_the_others(
    argument, workers, code, slow
):
    env = os.environ | {"PYTHONPATH": str(ROOT), "MS_WORKER_NUM": workers}
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, argument], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code and done.stdout.startswith("done")
    assert ("the slow way out" in done.stdout) == slow
    assert ("KeyError: 'x'" in done.stderr) == (argument == "raise")


def test_help_ends_without_a_traceback():
    command = [sys.executable, str(ROOT / "run_mindformer.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage:" in done.stdout and not done.stderr
