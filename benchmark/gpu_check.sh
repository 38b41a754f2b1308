#!/usr/bin/env bash
# Everything that needs a CUDA device, with no network: the tests marked `gpu`, a sweep over each script in every mode, and a
# profile of the captured steps. Two scripts take at most nine minutes, where each part is cut off.
#
#   bash benchmark/gpu_check.sh [SCRIPT ...]      by default sac_continuous_action td3_continuous_action
#
# The sweep's folder is FOLDER, by default a new one in sweeps/. Uses .venv if ./run.sh has made one, else the python3 at hand.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
folder=${FOLDER:-sweeps/gpu-$(date +%m%d-%H%M%S)}
[ $# -gt 0 ] || set -- sac_continuous_action td3_continuous_action
export PYTHONUNBUFFERED=1

"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
  echo "gpu_check.sh: skipped, for want of a CUDA device" >&2
  exit 0
}
"$python" -c 'import matplotlib, psutil, pynvml, pytest, submitit, tensordict, typeguard, tyro' || {
  echo "gpu_check.sh: error: that module of requirements/ is missing" >&2
  exit 2
}
status=0
scripts=$(printf ' or %s' "$@")
modes=(eager twin compile cudagraphs both)
timeout 240 "$python" -m pytest -m gpu -rs -k "${scripts# or }" || status=1
timeout 220 "$python" benchmark/sweep.py --scripts "$@" --modes "${modes[@]}" --folder "$folder" || {
  status=1
  "$python" benchmark/report.py "$folder" # what there is of it
}
for name in "$@"; do
  timeout 40 "$python" benchmark/profile_run.py "${name}_torchcompile" --trace "$folder/$name-trace.json.gz" \
    --compile --cudagraphs || status=1
done
exit $status
