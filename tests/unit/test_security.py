"""Nothing that is read is ever run, and nothing that is private is ever shown."""

import ast
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from mindformers_ext.checkpoint import CheckpointError
from mindformers_ext.trainer import Trainer

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "qwen3"
SOURCES = [*sorted((ROOT / "mindformers_ext").rglob("*.py")), ROOT / "run_mindformer.py"]

# Modules that turn bytes into objects or code.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch", "runpy", "code"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
# Places that import by name, and whose name it is.
IMPORTERS = {
    "run_mindformer.py": "--register_path",
    "callbacks.py": "callbacks[].type of the user's YAML",
    "answer_metrics.py": "predict.metrics[].function of the user's YAML",
}
MARK = "zebra9173"


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_and_no_pickle_comes_out_of_data(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & UNSAFE_MODULES
    for node, name in calls(tree):
        assert name not in UNSAFE_CALLS, ast.unparse(node)
        assert not name.endswith(("yaml.load", "yaml.unsafe_load", "yaml.full_load", "np.load", "torch.load")), name
        assert name not in ("mindspore.load_checkpoint", "ms.load_checkpoint", "os.system"), name
        assert name != "importlib.import_module" or path.name in IMPORTERS, ast.unparse(node)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert options.get("trust_remote_code", "False") == "False"
        assert options.get("allow_pickle", "False") == "False"
        assert options.get("shell", "False") == "False"
    assert "trust_remote_code" not in text or path.name == "run_mindformer.py"  # which refuses the flag


def test_yaml_is_read_by_the_safe_loader_alone():
    loaders = [path for path in SOURCES if re.search(r"yaml\.\w*Loader", path.read_text(encoding="utf-8"))]
    assert [path.name for path in loaders] == ["yaml_reader.py"]
    assert set(re.findall(r"yaml\.(\w*Loader)", loaders[0].read_text(encoding="utf-8"))) == {"SafeLoader"}


class Bomb:
    """Unpickling makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_by_any_name_is_refused_and_never_opened(tmp_path, name, zipped):
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT, folder)
    (folder / "model.safetensors").unlink()
    data = pickle.dumps(Bomb(tmp_path / "exploded"))
    (folder / name).write_bytes(data)
    if zipped:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", data)
    with pytest.raises(CheckpointError, match="only safetensors is read") as caught:
        Trainer({"run_mode": "predict", "checkpoint": {"load_path": str(folder)}, "inference": {}})
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_beside_the_weights_is_left_alone(tmp_path):
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pkl"):
        (tmp_path / "model" / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    config = {"run_mode": "predict", "checkpoint": {"load_path": str(tmp_path / "model")}}
    config["inference"] = {"max_new_tokens": 1, "output": str(tmp_path / "o.jsonl")}
    assert Trainer(config).inference("a")
    assert not (tmp_path / "exploded").exists()


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    return tmp_path


def run(*arguments, stdin=""):
    # A relative entry would make the folder of the test one that Python imports from.
    given = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join([str(ROOT), *given])
    return subprocess.run(
        [sys.executable, str(ROOT / "run_mindformer.py"), *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_code_that_a_checkpoint_brings_along_is_never_imported(folder, monkeypatch):
    code = f"import os; os.mkdir({str(folder / 'exploded')!r})\n"
    names = ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "sitecustomize.py", "jinja2.py")
    for name in (*names, "resource.py", "json.py", "mindformers_ext.py"):
        (folder / "model" / name).write_text(code)
    auto_map = {
        "AutoConfig": "configuration_x.X",
        "AutoModelForCausalLM": "modeling_x.X",
        "AutoTokenizer": "tokenization_x.X",
    }
    change(folder / "model" / "config.json", auto_map=auto_map, trust_remote_code=True)
    change(folder / "model" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", None]})
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(folder / "model")
    pathlib.Path("../run.yaml").write_text(
        "run_mode: predict\ncheckpoint: {load_path: ../model}\npredict: {chat_template: auto}\n"
        "inference: {input_data: [a], max_new_tokens: 1, output: ../result.jsonl}\n"
    )
    result = run("--config", "../run.yaml")
    assert result.returncode == 0, result.stderr
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("source", ["stdin", "yaml"])
def test_neither_prompts_nor_answers_are_logged_or_printed(folder, source):
    change(folder / "model" / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    fields = [f"{MARK} one", f"{MARK} " * 300, "\ud800" + MARK, ""]  # good, too long, not Unicode, empty
    lines = [json.dumps({"instruction": text, "own": MARK}) for text in fields]
    lines += [f"{MARK}, no JSON", json.dumps({MARK: MARK}), json.dumps({"instruction": [MARK]})]
    data = "-" if source == "stdin" else [text for text in fields if "\ud800" not in text]
    config = {
        "run_mode": "predict",
        "checkpoint": {"load_path": "model"},
        "model": {"seq_length": 128},
        "inference": {"input_data": data, "max_new_tokens": 2, "batch_size": 2},
        "predict": {"prompt_template": "{{ instruction }} {{ instruction.upper() }}", "chat_template": "auto"},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    result = run("--config", "run.yaml", stdin="\n".join(lines))
    assert result.returncode == 3, result.stderr
    rows = [json.loads(line) for line in (folder / "inference_result.jsonl").read_text().splitlines()]
    assert len(rows) == (3 if source == "yaml" else len(lines))
    assert "generated_ids" in rows[0] and MARK in json.dumps(rows[0])
    for shown in (result.stdout, result.stderr):
        assert MARK not in shown and MARK.upper() not in shown
    for path in folder.glob("**/*.log*"):
        assert MARK not in path.read_text(errors="replace")
