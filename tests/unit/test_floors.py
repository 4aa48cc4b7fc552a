"""Imports go down only, and the floors that must be instant do not import mindspore."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "mindformers_ext"
FLOORS = {
    "lm_eval_adapter": 7,
    "trainer": 6,
    "predict": 5,
    "generate": 4,
    "checkpoint": 3,
    "models": 3,
    "parallel": 2,
    "ops": 1,
    "config": 1,
    "runtime": 0,
}
# Rooms of one floor that may know another room of it: a checkpoint asks the model's layout of weights.
SAME_FLOOR = {("checkpoint", "models")}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "mindformers_ext" and len(parts) > 1 and parts[1] in FLOORS:
                yield parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    here = room(path)
    for there in set(imported_rooms(path)) - {here}:
        allowed = FLOORS[there] < FLOORS[here] or (here, there) in SAME_FLOOR
        assert allowed, f"{here} (floor {FLOORS[here]}) imports {there} (floor {FLOORS[there]})"


@pytest.mark.parametrize("module", ["config", "predict", "checkpoint", "models"])
def test_module_does_not_import_mindspore(module):
    code = f"import sys, mindformers_ext.{module}; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def calls_of(path, *names):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_ops_and_runtime_ask_for_the_device(path):
    if room(path) not in ("ops", "runtime"):
        assert not calls_of(path, "get_context", "set_device")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_checkpoint_floor_opens_weights(path):
    if room(path) != "checkpoint":
        assert "safetensors" not in {name.split(".")[0] for name in _modules(path)}


def _modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            docstring = ast.get_docstring(node, clean=False) or ""
            assert length - len(docstring.splitlines()) <= 60, f"{node.name} has {length} lines"
