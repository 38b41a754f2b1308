#!/usr/bin/env bash
# Everything that needs a CUDA device, with no network, in the order of its worth: does each script run in every mode, and how
# fast (a sweep, with its table); does it compute what it should (the tests marked `gpu`); where does its time go (a profile).
#
#   bash benchmark/gpu_check.sh [SCRIPT ...]      by default sac_continuous_action td3_continuous_action
#
# One script after the other, each at most SECONDS_EACH (270) in all: 120 for the sweep, of one seed, cold starts included, 120 for
# the tests, 30 for the profile. What a part has done before it is cut off is printed as it goes, and kept: the table, results, logs
# and traces are in FOLDER, by default a new one in sweeps/. A second call with the same FOLDER does the runs that are missing.
# Exit status: 0 all parts are done and well, 1 some are not. Uses .venv if ./run.sh has made one, else the python3 at hand.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
folder=${FOLDER:-sweeps/gpu-$(date +%m%d-%H%M%S)}
each=${SECONDS_EACH:-270}
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

# part SHARE TITLE COMMAND...: run a command for at most so many 270ths of the script's time, and tell how it ended.
part() {
  local limit=$((each * $1 / 270)) title=$2 code=0
  shift 2
  echo "== $title, at most $limit s"
  timeout --signal=INT --kill-after=15 "$limit" "$@" || code=$?
  echo "== $title: exit status $code$([ $code = 124 ] && echo ', cut off')"
  [ $code = 0 ] || status=1
}

for name in "$@"; do
  part 120 "speed of $name" "$python" benchmark/sweep.py --scripts "$name" --seeds 1 \
    --modes both eager compile cudagraphs twin --folder "$folder"
  "$python" benchmark/report.py "$folder" # what there is of it
  part 120 "tests of $name" "$python" -m pytest -m gpu -v -rs -k "$name"
  part 30 "profile of $name" "$python" benchmark/profile_run.py "${name}_torchcompile" \
    --trace "$folder/$name-trace.json.gz" --compile --cudagraphs
done
exit $status
