#!/usr/bin/env bash
# The entry point to LeanRL.
#
#   ./run.sh [ARGS]               the benchmark: in twenty minutes every script, eager and compiled, with a
#                                 table and plots; ARGS are those of `sweep`, such as --profile speed
#   ./run.sh sweep --help         all options of the benchmark
#   ./run.sh train NAME [ARGS]    train, e.g. ./run.sh train sac_continuous_action_torchcompile --compile;
#                                 logs to runs/. Without NAME it lists the scripts, NAME --help the options
#   ./run.sh profile NAME [ARGS]  profile 50 steps of a training run, and print where the time of a step goes;
#                                 writes a trace to --trace FILE, or to a new file in profiles/
#   ./run.sh test [ARGS]          run the tests; ARGS go to pytest
#   ./run.sh peers [ARGS]         the benchmark with CleanRL, Stable-Baselines3, SBX and RLtools, installed
#                                 into .venv-peers; ARGS as for sweep, --leanrl CLONE adds the original LeanRL,
#                                 --cleanrl CLONE what CleanRL's package does not have
#   ./run.sh report [FOLDER]      the tables and plots of a sweep; without FOLDER those of README.md and docs/
#   ./run.sh python [ARGS]        Python itself, for any other program, such as -m benchmark.studies.tricks
#
# The first call creates .venv and installs what is needed. PYTHON names another interpreter (3.11 or newer).
# VENV=FOLDER takes an environment of your own as it is, with all of requirements/dev.txt in it; of one that is
# active, VENV=$VIRTUAL_ENV.
# On an AMD processor, MKL runs the code that it has for Intel's; MKL_AS_ON_INTEL=0 turns that off
# (docs/benchmark.md#amd-processors).
set -euo pipefail
venv=${VENV:+$(cd "$VENV" && pwd)} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")"
venv=${venv:-$PWD/.venv}

die() {
  echo "run.sh: error: $*" >&2
  exit 2
}

usage() {
  sed -n '/^#!/d; /^[^#]/q; s/^# \{0,1\}//p' run.sh
}

# install VENV REQUIREMENTS...: make VENV if there is none, and install unless these very requirements are
# there already. Of two first calls at once one waits for the other.
install() {
  local venv=$1 python=${PYTHON:-python3} wanted
  shift
  wanted=$(cat "$@" | cksum)
  is_installed && return
  exec 9>>run.sh  # NFS locks only what is open for writing
  if ! flock -n 9; then
    echo "Waiting for another call that installs ..." >&2
    flock 9 || true # a file system may have no locks
  fi
  is_installed || install_anew "$@"
  exec 9<&-
}

is_installed() {
  [ "$(cat "$venv/requirements.cksum" 2>/dev/null)" = "$wanted" ] && [ -x "$venv/bin/python" ]
}

install_anew() {
  echo "Installing into $venv (once; some minutes, 3 GB) ..." >&2
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none, or a call before was stopped early
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
      die "needs Python 3.11 or newer, and $python is not: set PYTHON"
    "$python" -m venv "$venv" || {
      rm -rf "$venv"
      die "$python cannot make a virtual environment: its venv module or ensurepip is missing"
    }
  fi
  # Python compiles what scripts import, a fraction of all; now, or the first run would pay for it.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    "${@/#/--requirement=}" >&2
  "$venv/bin/python" -c 'import tensordict.nn, torch._inductor.compile_fx' 2>/dev/null || true
  echo "$wanted" >"$venv/requirements.cksum"
}

# MKL, which multiplies matrices for PyTorch, keeps to AVX2 on AMD's processors, unless a function that is
# found before its own tells it that they are Intel's. MKL_AS_ON_INTEL=0 leaves it to itself.
mkl_as_on_intel() {
  local library=$venv/lib/mkl_as_on_intel.so function='int mkl_serv_intel_cpu_true(void) { return 1; }'
  grep -qs AuthenticAMD /proc/cpuinfo && [ "${MKL_AS_ON_INTEL:-1}" != 0 ] || return 0
  if [[ $library == *[[:space:]:]* ]]; then # which end a name in LD_PRELOAD
    echo "MKL keeps to AVX2 in a folder with a space or a colon in its path" >&2
  elif [ -s "$library" ] || make_library "$library" "$function"; then
    export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
    echo "MKL runs its code for Intel's processors on this AMD one; MKL_AS_ON_INTEL=0 turns that off" >&2
  else
    echo "MKL keeps to AVX2: there is no C compiler (cc), or $venv cannot be written to" >&2
  fi
}

make_library() {
  ${CC:-cc} -shared -fPIC -x c -o "$1.$$" - <<<"$2" 2>/dev/null && mv "$1.$$" "$1"
}

main() {
  if [ -z "${VENV:-}" ]; then
    install "$venv" requirements/{requirements,mujoco,classic_control,envpool,benchmark,dev}.txt
  elif ! "$venv/bin/python" -c 'import tensordict, mujoco, pygame, envpool, submitit, pytest' &>/dev/null; then
    die "VENV=$VENV lacks something: $venv/bin/python -m pip install -r requirements/dev.txt"
  fi
  mkl_as_on_intel
  exec "$venv/bin/python" "$@"
}

case ${1:-} in
  "" | --help | -h) ;;
  -*) set -- sweep "$@" ;;
esac
command=${1:-sweep}
[ $# -gt 0 ] && shift
case $command in
  sweep)
    main -m benchmark.sweep "$@"
    ;;
  train | profile)
    name=${1:-}
    [ -n "$name" ] && [ -f "leanrl/$name.py" ] ||
      die "$command takes one of: $(cd leanrl && echo *.py | sed 's/\.py//g; s/ pool//'), got ${name:-nothing}"
    shift
    [ "$command" = train ] && main "leanrl/$name.py" "$@"
    main -m benchmark.profile_run "$name" "$@"
    ;;
  test)
    # Two at a time, on one thread each (tests/conftest.py). After a crash pytest-xdist would wait for ever.
    main -m pytest -n 2 --dist loadgroup --max-worker-restart 0 "$@"
    ;;
  peers)
    if [[ " $* " == *" --leanrl"* ]]; then
      "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' ||
        die "--leanrl needs Python 3.11 or 3.12, for which its old libraries are built: set PYTHON"
      install .venv-leanrl requirements/leanrl.txt
    fi
    install .venv-peers requirements/peers.txt
    .venv-peers/bin/python -c 'import cleanrl' 2>/dev/null ||
      .venv-peers/bin/python -m pip install --quiet --no-deps --ignore-requires-python cleanrl==1.2.0 >&2
    main -m benchmark.sweep --peers .venv-peers/bin/python "$@"
    ;;
  report)
    main -m benchmark.report "$@"
    ;;
  python)
    main "$@"
    ;;
  help | -h | --help)
    usage
    ;;
  *)
    usage >&2
    die "unknown command $command"
    ;;
esac
