#!/usr/bin/env bash
# Answers the quickstart prompts with the trained checkpoint of the repository, then prints prompt, answer and right or wrong.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/setup_env.sh
source "$root/scripts/setup_env.sh" base
cd "$root"
bash scripts/msrun_launcher.sh "python run_mindformer.py --config configs/quickstart/predict.yaml --mode 1" 1
exec python scripts/check_quickstart.py
