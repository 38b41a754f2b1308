#!/usr/bin/env bash
# Everything that needs a CUDA device, cut off after nine minutes and with no network: the tests marked `gpu`, the speed of every
# script in every mode, and a profile of the captured steps.
#
#   bash benchmark/gpu_check.sh [FILE]      appends the speeds to FILE, by default benchmark/results/gpu.jsonl
#
# Uses .venv if ./run.sh has made one, else the python3 at hand.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
results=${1:-benchmark/results/gpu.jsonl}
export PYTHONUNBUFFERED=1

"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
  echo "gpu_check.sh: skipped, for want of a CUDA device" >&2
  exit 0
}
status=0
timeout 240 "$python" -m pytest -m gpu -rs || status=1
timeout 220 "$python" benchmark/sweep.py --modes eager twin compile cudagraphs both --total-timesteps 4000 --output "$results" || status=1
for name in sac_continuous_action td3_continuous_action; do
  timeout 40 "$python" benchmark/profile_update.py "${name}_torchcompile" --compile --cudagraphs || status=1
done
exit $status
