#!/usr/bin/env bash
# What only a CUDA device can tell: the tests that need one, the speed of captured scripts, and a profile.
#
#   bash benchmark/gpu_check.sh [SCRIPT ...]      by default SAC, FastTD3, PPO for continuous actions, for Atari,
#                                             on the device
#
#   1. the tests that are marked gpu, several at a time
#   2. a sweep: each script with both flags, for about a minute on an H100, and eager for a tenth of the steps
#   3. Atari's run of that, taken up from its checkpoint for as many steps: a trained agent loses fewer lives,
#      and EnvPool starts games anew more seldom
#   4. four runs of the first script at a time on one GPU
#   5. a profile of the first script with both flags
#
# TIMES=10 makes all runs ten times as long. FOLDER, by default a new one in sweeps/, gets results.jsonl, plots,
# logs and a trace; a second call with the same folder does what is missing. PYTHON names an interpreter, by
# default .venv/bin/python. Each part goes on where one before it has failed.
# Exit status: 0 all is well or there is no GPU, 1 a part failed, 2 the interpreter does not see the GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
folder=${FOLDER:-sweeps/gpu-$(date +%m%d-%H%M%S)}
status=0

if ! reason=$("$python" -c 'import torch; torch.zeros(1, device="cuda")' 2>&1); then
  [[ $(nvidia-smi --list-gpus 2>/dev/null) == *GPU* ]] || { echo "gpu_check.sh: no GPU: skipped" >&2; exit 0; }
  echo "gpu_check.sh: error: there is a GPU, and $python does not see it: $(tail -n 1 <<<"$reason")" >&2
  exit 2
fi
mkdir -p "$folder" && folder=$(realpath "$folder") || exit 2
[ $# -gt 0 ] || set -- sac_continuous_action fast_td3 ppo_continuous_action ppo_atari_envpool ppo_on_device

# part TITLE COMMAND...: run a command, and tell how it ended.
part() {
  local title=$1 code=0
  shift
  echo "== $title"
  "$@" || code=$?
  echo "== $title: exit status $code, $SECONDS s in all"
  [ $code = 0 ] || status=1
}

# steps NAME: agent steps of about a minute with both flags on an H100.
steps() {
  case $1 in
    ppo_on_device) echo $((200000000 * ${TIMES:-1})) ;;
    fast_*) echo $((5000000 * ${TIMES:-1})) ;;
    sac_* | td3_*) echo $((150000 * ${TIMES:-1})) ;;
    *atari*) echo $((250000 * ${TIMES:-1})) ;;
    *) echo $((500000 * ${TIMES:-1})) ;;
  esac
}

# sweep FOLDER NAME MODE STEPS [ARGS]: times a script.
sweep() {
  local out=$1 name=$2 mode=$3 steps=$4
  shift 4
  part "speed of $name, $mode" "$python" -m benchmark.sweep --profile speed --scripts "$name" --modes "$mode" \
    --total-timesteps "$steps" --attempts 1 --time-limit $((20 * ${TIMES:-1})) --folder "$out" "$@"
}

# trained NAME STEPS: takes a copy of the sweep's run up, for as many steps as it has made.
trained() {
  local runs=("$folder/jobs/$1-both-"*"-$2-seed1"/*/runs/*/) copy=$folder/trained-$1
  rm -rf "$copy" && cp -r "${runs[-1]}" "$copy"
  part "speed of $1 from its checkpoint" "$python" "leanrl/$1_torchcompile.py" --compile --cudagraphs \
    --resume "$copy" --total-timesteps $((2 * $2))
}

nvidia-smi --query-gpu=driver_version,name,memory.total --format=csv,noheader
# The other cores are for Inductor's processes. A run takes 1.5 to 2.2 GiB of the GPU.
part "tests on the GPU" "$python" -m pytest -q -rfE -m gpu -n $((($(nproc) * 2 + 2) / 3)) tests
for name in "$@"; do
  n=$(steps "$name")
  sweep "$folder" "$name" both "$n" --seeds 1 --checkpoint-every "$n"
  sweep "$folder" "$name" eager $((n / 10)) --seeds 1
  [[ $name != *atari* ]] || trained "$name" "$n"
done
sweep "$folder/four" "$1" both "$(steps "$1")" --seeds 1 2 3 4 --runs-per-gpu 4
part "profile of $1" "$python" -m benchmark.profile_run "$1_torchcompile" --compile --cudagraphs \
  --trace "$folder/$1-trace.json.gz"
echo "results: $folder/results.jsonl and $folder/four/results.jsonl; added to benchmark/results/gpu.jsonl," \
  "./run.sh report shows them"
exit $status
