from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import mindformers_ext.config
heavy = {"mindspore", "numpy", "safetensors", "tokenizers", "torch", "transformers"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_the_configuration_is_loaded_without_any_heavy_package():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
