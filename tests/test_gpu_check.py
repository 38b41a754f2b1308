"""benchmark/gpu_check.sh without a GPU: its order, its time limits and what becomes of failures."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

# In place of an interpreter: notes what it is asked to do, and does what a part named by MISBEHAVES does.
INTERPRETER = """#!/usr/bin/env bash
[ "$1" = -c ] && exec bash -c "$SEES"
echo "${TORCHINDUCTOR_CACHE_DIR##*/} $*" >> "$NOTES"
case "<$*>" in *"${MISBEHAVES:-nothing}"*) eval "$MISBEHAVIOUR" ;; esac
echo '{"sps": 1}'
"""
SAC = ("sac_continuous_action",)
BOTH = "--compile --cudagraphs"


def check(folder: Path, *scripts: str, **variables: str) -> tuple[int, str, list[str]]:
    """Run a copy of the program: its exit status, what it printed, what the interpreter was asked to do."""
    (folder / "benchmark").mkdir()
    program = shutil.copy(ROOT / "benchmark" / "gpu_check.sh", folder / "benchmark")
    programs = {"interpreter": INTERPRETER, "python": INTERPRETER, "python3": "#!/bin/sh\nexit 1\n"}
    for name, content in (programs | {"nvidia-smi": "#!/bin/sh\n$SMI\n"}).items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    env = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "SEES": "exit 0", "SMI": "echo GPU 0"}
    env |= {"PYTHON": "interpreter", "NOTES": str(folder / "notes"), "FOLDER": "out", **variables}
    command = ["bash", program, *scripts]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    notes = folder / "notes"
    return done.returncode, done.stdout, notes.read_text().splitlines() if notes.exists() else []


def expected(*scripts: str) -> list[str]:
    """What the interpreter is asked to do if all goes well, the short runs sorted."""

    def short(name: str, mode: str, flags: str) -> str:
        env_id = {"ppo_atari_envpool": "Breakout-v5", "dqn": "CartPole-v1"}.get(name, "HalfCheetah-v4")
        steps = (
            "--total-timesteps 4096"
            if name.startswith("ppo")
            else "--learning-starts 1000 --total-timesteps 1500"
        )
        cache = f"{name}-{mode}-{env_id}"
        return f"{cache} leanrl/{name}_torchcompile.py --env-id {env_id} {steps} {flags}"

    asked = [" -", " -m pytest -q -m gpu tests/test_capture.py"]
    for mode, flags in (("both", BOTH), ("cudagraphs", "--cudagraphs")):
        asked += [short(name, mode, flags) for name in sorted(scripts)]
    for mode in ("both", "eager", "cudagraphs", "compile", "tf32"):
        tf32 = f"{BOTH} --matmul-precision high"
        asked += [short(name, mode, tf32) for name in sorted(scripts)] if mode == "tf32" else []
        options = f"--seeds 1 --modes {mode} --attempts 1 --time-limit 0.75 --folder FOLDER"
        asked.append(f" -m benchmark.sweep --scripts {' '.join(scripts)} {options}")
    asked.append(" -m benchmark.report FOLDER")
    for name, env_id in (("sac_continuous_action", "HalfCheetah-v4"), ("ppo_atari_envpool", "Breakout-v5")):
        if name not in scripts:
            continue
        options = f"--trace FOLDER/{name}-trace.json.gz --env-id {env_id} {BOTH}"
        asked.append(f"{name}-both-{env_id} -m benchmark.profile_run {name}_torchcompile {options}")
    return [*asked, " -m pytest -v -rs -m gpu tests/test_gpu.py"]


def in_order(notes: list[str], folder: Path) -> list[str]:
    """Notes with the folder left out, and those of runs at the same time sorted."""
    notes = [note.replace(str(folder / "out"), "FOLDER") for note in notes]
    groups = itertools.groupby(notes, key=lambda note: "leanrl/" in note and note.split("-")[1])
    return [note for key, group in groups for note in (sorted(group) if key else group)]


@pytest.mark.parametrize("scripts", [(), SAC])
def test_all_parts_are_done_in_order_with_the_compile_caches_of_the_sweep(scripts, tmp_path):
    status, printed, notes = check(tmp_path, *scripts)
    assert status == 0, printed
    order = ["sac_continuous_action", "td3_continuous_action", "ppo_continuous_action", "ppo_atari_envpool"]
    assert {*order, "dqn"} == {*SCRIPTS}
    scripts = scripts or (*order, "dqn")
    assert in_order(notes, tmp_path) == expected(*scripts)


@pytest.mark.parametrize(
    ("part", "misbehaviour", "says"),
    [
        ("test_capture", "exit 1", "graphs of the stand-in and real ones: exit status 1"),
        ("sac_continuous_action_torchcompile.py", "echo why >&2; exit 3", "exit status 3"),
        ("--modes eager", "exit 1", "speed of eager: exit status 1"),
        ("profile_run", "exit 1", "profile of sac_continuous_action: exit status 1"),
        ("<->", "exit 1", "what there is: exit status 1"),
        ("test_gpu", "exit 1", "tests on the GPU: exit status 1"),
    ],
)
def test_a_part_that_fails_is_told_and_the_others_are_done(part, misbehaviour, says, tmp_path):
    status, printed, notes = check(tmp_path, *SAC, MISBEHAVES=part, MISBEHAVIOUR=misbehaviour)
    assert status == 1
    assert says in printed and ("why" in misbehaviour) == ("why" in printed)
    assert in_order(notes, tmp_path) == expected(*SAC)


def test_a_part_that_hangs_is_cut_off_and_leaves_time_for_others(tmp_path):
    hangs = {"MISBEHAVES": "-m benchmark.sweep", "MISBEHAVIOUR": "exec sleep 60", "SECONDS_IN_ALL": "123"}
    status, printed, notes = check(tmp_path, *SAC, **hangs)
    assert status == 1
    assert "speed of both: exit status 124, cut off" in printed
    assert "speed of tf32: no time left" in printed
    assert notes[-1] == expected(*SAC)[-1]


def test_where_no_time_is_left_a_part_is_not_begun(tmp_path):
    status, printed, notes = check(tmp_path, *SAC, SECONDS_IN_ALL="0")
    assert (status, notes) == (1, [])
    assert "what there is: no time left" in printed and "tests on the GPU: no time left" in printed


def test_the_caches_count_as_warm_and_compiled_code_is_there_without_graphs_too(tmp_path):
    makes_code = 'touch "$TORCHINDUCTOR_CACHE_DIR/code"'
    assert check(tmp_path, *SAC, MISBEHAVES="_torchcompile.py", MISBEHAVIOUR=makes_code)[0] == 0
    for mode in ("both", "compile", "tf32", "cudagraphs"):
        cache = tmp_path / "out" / "cache" / f"sac_continuous_action-{mode}-HalfCheetah-v4"
        assert {path.name for path in cache.iterdir()} == {"used", "code"}


def test_without_a_gpu_nothing_is_run_and_an_unseen_one_is_an_error(tmp_path):
    blind = {"SEES": "echo; echo no driver; exit 1"}
    for smi, status, says in (("false", 0, "skipped"), ("echo GPU 0", 2, "interpreter: no driver")):
        (folder := tmp_path / str(status)).mkdir()
        found, printed, notes = check(folder, SMI=smi, **blind)
        assert (found, notes) == (status, [])
        assert says in printed


def test_the_first_interpreter_that_sees_the_gpu_is_taken(tmp_path):
    status, _, notes = check(tmp_path, *SAC, PYTHON="")  # python3 does not, python does
    assert status == 0 and in_order(notes, tmp_path) == expected(*SAC)
