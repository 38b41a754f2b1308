"""benchmark/gpu_check.sh without a GPU: its order, its time limits and what becomes of failures."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from benchmark.collection import COLLECTION

# In place of an interpreter: notes what it is asked to do, and does what a part named by MISBEHAVES does.
INTERPRETER = """#!/usr/bin/env bash
[ "$1" = -c ] && exec bash -c "$SEES"
[ "$*" = "-m benchmark.collection" ] && exec "$PYTHON_OF_TESTS" "$@"
echo "${TORCHINDUCTOR_CACHE_DIR##*/} $*" >> "$NOTES"
case "<$*>" in *"${MISBEHAVES:-nothing}"*) eval "$MISBEHAVIOUR" ;; esac
echo '{"sps": 1}'
"""
SAC = ("sac_continuous_action",)
BOTH = "--compile --cudagraphs"


def check(folder: Path, *scripts: str, **variables: str) -> tuple[int, str, list[str]]:
    """Run a copy: exit status, output, and what an interpreter was asked for, sorted where all at once."""
    (folder / "benchmark").mkdir()
    for name in ("__init__.py", "collection.py", "gpu_check.sh"):
        program = shutil.copy(ROOT / "benchmark" / name, folder / "benchmark")
    (folder / "leanrl").symlink_to(ROOT / "leanrl")
    programs = {"interpreter": INTERPRETER, "python": INTERPRETER, "python3": "#!/bin/sh\nexit 1\n"}
    for name, content in (programs | {"nvidia-smi": "#!/bin/sh\n$SMI\n"}).items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    left_out = ("TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")  # nproc prints the latter where it is set
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "SEES": "exit 0", "SMI": "echo GPU 0"}
    env |= {"PYTHON_OF_TESTS": sys.executable}
    env |= {"PYTHON": "interpreter", "NOTES": str(folder / "notes"), "FOLDER": "out", **variables}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", program, *scripts], env=env, **streams)
    noted = (folder / "notes").read_text() if (folder / "notes").exists() else ""
    notes = noted.replace(str(folder / "out"), "FOLDER").splitlines()
    groups = itertools.groupby(notes, key=lambda note: "leanrl/" in note and note.split("-")[1])
    in_order = [note for runs, group in groups for note in (sorted(group) if runs else group)]
    return done.returncode, done.stdout, in_order


def expected(*scripts: str) -> list[str]:
    """What the interpreter is asked to do if all goes well."""

    def short_runs(mode: str, flags: str) -> list[str]:
        asked = []
        for name in sorted(scripts):
            env_id, off_policy = COLLECTION[name].env_id, "--learning-starts 1000 --total-timesteps 1500"
            steps = "--total-timesteps 4096" if COLLECTION[name].on_policy else off_policy
            command = f"leanrl/{name}_torchcompile.py --env-id {env_id} {steps} {flags}"
            asked.append(f"{name}-{mode}-{env_id} {command}")
        return asked

    processes = (2 * len(os.sched_getaffinity(0)) + 2) // 3
    tests = f" -m pytest -q -rfE -m gpu -n {processes} tests/test_capture.py tests/test_gpu.py"
    asked = [" -", tests, *short_runs("both", BOTH)]
    for modes in ("both eager", "cudagraphs", "compile", "tf32", "bfloat16_both"):
        precision = {"tf32": "tf32", "bfloat16_both": "bfloat16"}.get(modes)
        asked += short_runs(modes, f"{BOTH} --precision {precision}") if precision else []
        options = f"--seeds 1 --modes {modes} --attempts 1 --time-limit 1.5 --folder FOLDER"
        asked.append(f" -m benchmark.sweep --scripts {' '.join(scripts)} {options}")
    asked.append(" -m benchmark.report FOLDER")
    for kind in ("continuous", "atari"):
        for name in [name for name in scripts if COLLECTION[name].actions == kind][:1]:
            env_id = COLLECTION[name].env_id
            options = f"--trace FOLDER/{name}-trace.json.gz --env-id {env_id} {BOTH}"
            asked.append(f"{name}-both-{env_id} -m benchmark.profile_run {name}_torchcompile {options}")
            starts = "" if COLLECTION[name].on_policy else " --learning-starts 1000"
            options = f"--env-id {env_id}{starts} --total-timesteps {COLLECTION[name].quick} --compile"
            asked.append(f"{name}-reduce-overhead-{env_id} FOLDER/{name}_reduce_overhead.py {options}")
    return asked


def test_all_parts_are_done_in_order_with_the_compile_caches_of_the_sweep(tmp_path):
    makes_code = {"MISBEHAVES": "_torchcompile.py", "MISBEHAVIOUR": 'touch "$TORCHINDUCTOR_CACHE_DIR/code"'}
    status, printed, notes = check(tmp_path, **makes_code)
    assert status == 0, printed
    assert notes == expected(*COLLECTION)
    # They count as warm, and compiled code is there without graphs, too.
    for mode in ("both", "compile", "tf32", "bfloat16_both"):
        cache = tmp_path / "out" / "cache" / f"sac_continuous_action-{mode}-HalfCheetah-v4"
        assert {path.name for path in cache.iterdir()} == {"used", "whole", "code"}
    copies = [*(tmp_path / "out").glob("*_reduce_overhead.py")]
    assert len(copies) == 2
    for copy in copies:
        content = copy.read_text()
        assert content.count('(torch.compile(f, fullgraph=True, mode="reduce-overhead") for f in (act,') == 1
        assert "(6 if cudagraphs" not in content


@pytest.mark.parametrize(("parts", "count"), [("<->", 1), ("-m ", 8), ("leanrl/", 3)])
def test_parts_that_fail_are_told_and_the_others_are_done(parts, count, tmp_path):
    status, printed, notes = check(tmp_path, *SAC, MISBEHAVES=parts, MISBEHAVIOUR="echo why >&2; exit 3")
    assert (status, notes) == (1, expected(*SAC))
    assert printed.count("exit status 3") == printed.count("why") == count


def test_time_is_kept_for_the_parts_that_follow(tmp_path):
    # Without PYTHON: python3, which sees no GPU, is passed over for python.
    status, printed, notes = check(tmp_path, *SAC, SECONDS_IN_ALL="120", PYTHON="")
    assert status == 1
    assert "speed of both eager: no time left" in printed and "tests on the GPU: exit status 0" in printed
    assert notes == [part for part in expected(*SAC) if "sweep" not in part and "precision" not in part]


def test_a_part_that_hangs_is_cut_off_and_none_is_begun_after_the_end(tmp_path):
    hangs = {"MISBEHAVES": "<->", "MISBEHAVIOUR": "exec sleep 60", "SECONDS_IN_ALL": "5"}
    status, printed, notes = check(tmp_path, *SAC, **hangs)
    assert (status, notes) == (1, [" -"])
    assert "what there is: exit status 124, cut off" in printed
    assert "the table: no time left" in printed


def test_without_a_gpu_nothing_is_run_and_an_unseen_one_is_an_error(tmp_path):
    for smi, status, says in (("false", 0, "skipped"), ("echo GPU 0", 2, "interpreter: no driver")):
        (folder := tmp_path / str(status)).mkdir()
        found, printed, notes = check(folder, SMI=smi, SEES="echo; echo no driver; exit 1")
        assert (found, notes) == (status, [])
        assert says in printed
