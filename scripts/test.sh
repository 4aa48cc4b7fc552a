#!/usr/bin/env bash
# Runs the whole test suite in .venv, which is made when it is missing. Arguments go to pytest: scripts/test.sh -k writers
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/setup_env.sh
source "$root/scripts/setup_env.sh" test
cd "$root"
exec python -m pytest "$@"
