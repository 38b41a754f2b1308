#!/usr/bin/env bash
# All that a CUDA device can tell in ten minutes, with no network, the most telling first:
#
#   1. driver, compiler, versions, and whether all is there that the tests import
#   2. the tests that need a GPU, several at a time: 69 of them took some 120 s on 16 cores
#   3. a short run of every twin with both flags, all at once, which also fills the caches of compiled code of
#      part 4: 80 s there
#   4. the sweep, each run tried once: both flags and eager, then --cudagraphs, --compile, both with TF32 and
#      with bfloat16; a run takes 20 to 30 s with both flags, and 15 to 70 s eager
#   5. of the first script for continuous actions and the first for Atari: a profile with both flags, and the
#      speed of a copy compiled with mode="reduce-overhead" in place of capture around compiled code
#
#   bash benchmark/gpu_check.sh [SCRIPT ...]      by default all eager scripts, whose twins are checked; ten
#                                                 minutes are enough for the speed of some four
#
# SECONDS_IN_ALL (580) is its time limit; for all parts of all scripts it should be 3600. FOLDER, by default a
# new one in sweeps/, gets results.jsonl, plots, logs and traces; a second call with the same folder does what
# is missing. PYTHON names an interpreter, else the first that sees CUDA of .venv/bin/python, python3 and
# python is taken.
# Exit status: 0 all is well or there is no GPU, 1 a part failed or had no time, 2 nothing sees the GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${FOLDER:-sweeps/gpu-$(date +%m%d-%H%M%S)}
deadline=$((SECONDS + ${SECONDS_IN_ALL:-580}))
export PYTHONUNBUFFERED=1
status=0

reasons=""
[ -n "${PYTHON:-}" ] && candidates=("$PYTHON") || candidates=(.venv/bin/python python3 python)
for candidate in "${candidates[@]}"; do
  command -v "$candidate" >/dev/null || continue
  if reason=$(timeout 90 "$candidate" -c 'import torch; torch.zeros(1, device="cuda")' 2>&1); then
    python=$(realpath --no-symlinks "$(command -v "$candidate")")
    break
  fi
  reasons+="  $candidate: $(tail -n 1 <<<"$reason")"$'\n'
done
if [ -z "${python:-}" ] && [[ $(timeout 30 nvidia-smi --list-gpus 2>/dev/null) == *GPU* ]]; then
  echo "gpu_check.sh: error: there is a GPU, and no interpreter sees it:" >&2
  printf %s "$reasons" >&2
  exit 2
elif [ -z "${python:-}" ]; then
  echo "gpu_check.sh: skipped, for want of a CUDA device" >&2
  exit 0
fi
mkdir -p "$folder" && folder=$(realpath "$folder") || exit 2
# A line a script: its name, kind of actions, environment, whether it is on-policy or off-policy, steps.
collection=$("$python" -m benchmark.collection) || exit 2
# shellcheck disable=SC2046 # names are words
[ $# -gt 0 ] || set -- $(cut -d ' ' -f 1 <<<"$collection")

# begin MOST KEPT TITLE: set `limit` to at most MOST seconds, so that KEPT are left for the parts after it.
# Fails where there are none.
begin() {
  local left=$((deadline - SECONDS - $2))
  limit=$(($1 < left ? $1 : left))
  if [ "$limit" -lt 1 ]; then
    echo "== $3: no time left"
    status=1
    return 1
  fi
  echo "== $3, at most $limit s"
}

# part MOST KEPT TITLE COMMAND...: run a command within its time, and tell how it ended.
part() {
  begin "$1" "$2" "$3" || return
  local title=$3 code=0
  shift 3
  timeout --signal=INT --kill-after=10 "$limit" "$@" || code=$?
  echo "== $title: exit status $code$([ $code = 124 ] && echo ', cut off'), $SECONDS s in all"
  [ $code = 0 ] || status=1
}

# known NAME FIELD: what the collection says of a script: 2 is its kind of actions, 3 its environment in the
# sweep, 4 whether it is on-policy, 5 its steps there.
known() {
  grep "^$1 " <<<"$collection" | cut -d ' ' -f "$2"
}

# cache NAME MODE: the folder of compiled code of a script and mode of the sweep, which is then a warm one.
cache() {
  local folder_of_code=$folder/cache/$1-$2-$(known "$1" 3)
  mkdir -p "$folder_of_code" && touch "$folder_of_code/used" "$folder_of_code/whole"
  echo "$folder_of_code"
}

# short_run NAME MODE FLAGS: 16 to 640 gradient steps of a twin, for at most `limit` seconds.
short_run() {
  local name=$1 code steps
  code=$(cache "$1" "$2")
  shift 2
  case $(known "$name" 4) in
    on-policy) steps="--total-timesteps 4096" ;;
    *) steps="--learning-starts 1000 --total-timesteps 1500" ;;
  esac
  # shellcheck disable=SC2086 # they are words
  TORCHINDUCTOR_CACHE_DIR=$code TRITON_CACHE_DIR=$code timeout --signal=INT --kill-after=10 "$limit" \
    "$python" "leanrl/${name}_torchcompile.py" --env-id "$(known "$name" 3)" $steps "$@"
}

# short_runs MODE FLAGS -- NAME...: short runs at the same time; tells of each what it printed.
short_runs() {
  local mode=$1 flags=() name code log=$folder/short-$1
  shift
  while [ "$1" != -- ]; do
    flags+=("$1")
    shift
  done
  shift
  mkdir -p "$log"
  for name in "$@"; do
    {
      short_run "$name" "$mode" "${flags[@]}" >"$log/$name.out" 2>"$log/$name.err"
      echo $? >"$log/$name.status"
    } &
  done
  wait
  for name in "$@"; do
    code=$(cat "$log/$name.status")
    echo "$name ${flags[*]}: exit status $code"
    tail -n 1 "$log/$name.out"
    [ "$code" = 0 ] || tail -n 15 "$log/$name.err"
    [ "$code" = 0 ] || status=1
  done
}

part 90 0 "what there is" "$python" - <<'EOF'
import importlib
import shutil
import sysconfig
from pathlib import Path

import torch

print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
print("compilers:", *filter(None, map(shutil.which, ("gcc", "g++", "clang"))))
print("Python.h:", Path(sysconfig.get_path("include"), "Python.h").exists())
names = "triton tensordict gymnasium mujoco envpool pydantic tyro filelock tqdm tensorboard moviepy xdist"
missing = []
for name in [*names.split(), *"yaml matplotlib scipy psutil pynvml pytest submitit".split()]:
    try:
        print(name, getattr(importlib.import_module(name), "__version__", ""), end=", ")
    except Exception as error:
        missing.append(f"{name}: {type(error).__name__}: {error}")
raise SystemExit("\n".join(missing) or None)
EOF
timeout 30 nvidia-smi --query-gpu=driver_version,name,memory.total --format=csv,noheader
# The other cores are for Inductor's processes. A run takes 1.5 to 2.2 GiB of the GPU.
processes=$((($(nproc) * 2 + 2) / 3))
part 240 110 "tests on the GPU" "$python" -m pytest -q -rfE -m gpu -n $processes tests/test_capture.py \
  tests/test_gpu.py
begin 180 110 "twins with both flags" && short_runs both --compile --cudagraphs -- "$@"
for name in "$@"; do # without graphs the code is the same
  cp -r "$(cache "$name" both)/." "$(cache "$name" compile)"
done
for modes in "both eager" cudagraphs compile tf32 bfloat16_both; do
  case $modes in tf32 | bfloat16_both)
    precision=${modes%_both}
    begin 120 120 "twins with both flags, $precision" &&
      short_runs "$modes" --compile --cudagraphs --precision "$precision" -- "$@"
    ;;
  esac
  # shellcheck disable=SC2086 # they are words
  part 1200 120 "speed of $modes" "$python" -m benchmark.sweep --scripts "$@" --seeds 1 --modes $modes \
    --attempts 1 --time-limit 1.5 --folder "$folder"
done
part 30 90 "the table" "$python" -m benchmark.report "$folder"
for kind in continuous atari; do # of each the first script
  for name in "$@"; do
    [ "$(known "$name" 2)" != $kind ] || break
  done
  [ "$(known "$name" 2)" = $kind ] || continue
  code=$(cache "$name" both)
  part 40 30 "profile of $name" env TORCHINDUCTOR_CACHE_DIR="$code" TRITON_CACHE_DIR="$code" \
    "$python" -m benchmark.profile_run "${name}_torchcompile" --trace "$folder/$name-trace.json.gz" \
    --env-id "$(known "$name" 3)" --compile --cudagraphs
  code=$(cache "$name" reduce-overhead)
  starts=""
  [ "$(known "$name" 4)" = on-policy ] || starts="--learning-starts 1000"
  copy=$folder/${name}_reduce_overhead
  # As many calls to warm up as capture takes.
  sed 's/map(Compiled,/(torch.compile(f, fullgraph=True, mode="reduce-overhead") for f in/
    s/6 if cudagraphs else 1/6/' "leanrl/${name}_torchcompile.py" >"$copy.py"
  # shellcheck disable=SC2086 # they are words
  part 60 30 "speed of $name with mode=\"reduce-overhead\"" \
    env TORCHINDUCTOR_CACHE_DIR="$code" TRITON_CACHE_DIR="$code" TORCH_LOGS=perf_hints \
    "$python" "$copy.py" --env-id "$(known "$name" 3)" $starts --total-timesteps "$(known "$name" 5)" \
    --compile >"$copy.log" 2>&1
  grep "^==" "$copy.log"
  grep -o '"sps": [0-9.]*' "$copy.log"
  # Inductor leaves functions uncaptured that change what it does not take for static: then this says nothing.
  echo "functions that were not captured: $(grep -c "skipping cudagraphs" "$copy.log")"
done
echo "results: $folder/results.jsonl; added to benchmark/results/gpu.jsonl, ./run.sh report shows them"
exit $status
