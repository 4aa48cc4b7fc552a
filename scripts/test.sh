#!/usr/bin/env bash
# Runs the whole test suite in .venv, which is made when it is missing. Arguments go to pytest: scripts/test.sh -k writers
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/setup_env.sh
source "$root/scripts/setup_env.sh" test
cd "$root"
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# Unit tests side by side, a file in one process; jobs of several processes one after another, as they fill the cores.
code=0
python -m pytest tests/unit -n auto --maxprocesses 4 --dist loadfile || code=$?
python -m pytest tests/distributed || code=$?
exit "$code"
