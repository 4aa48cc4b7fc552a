import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_predict_is_usable_without_mindspore():
    code = "import sys, mindformers_ext.predict; sys.exit('mindspore' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
