"""setup.py says what the package really imports, and nothing of one machine is in the repository's settings."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# The name to import where it differs from the name to install.
IMPORT_NAMES = {"pyyaml": "yaml"}


def call_arguments():
    tree = ast.parse((ROOT / "setup.py").read_text())
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "setup")
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords if not isinstance(k.value, ast.Call)}


def imported_packages():
    found = set()
    for path in [*(ROOT / "mindformers_ext").rglob("*.py"), ROOT / "run_mindformer.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"mindformers_ext", "__future__"}


def test_the_package_imports_exactly_what_it_declares():
    arguments = call_arguments()
    names = [re.match(r"[\w-]+", requirement).group() for requirement in arguments["install_requires"]]
    # Only lm_eval_adapter.py imports it, and says how to install it.
    assert imported_packages() - {"lm_eval"} == {IMPORT_NAMES.get(name, name) for name in names}
    assert any(requirement.startswith("lm_eval>=") for requirement in arguments["extras_require"]["lm_eval"])


def test_numpy_2_cannot_be_installed_beside_mindspore():
    assert "numpy>=1.26,<2" in call_arguments()["install_requires"]


def test_every_test_has_a_time_limit():
    assert re.search(r"^timeout = \d+$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert any(name.startswith("pytest-timeout") for name in call_arguments()["extras_require"]["test"])
