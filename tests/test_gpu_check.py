"""benchmark/gpu_check.sh without a GPU: its order, and what becomes of failures."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

# In place of an interpreter: notes what it is asked to do, and does what a part named by MISBEHAVES does.
INTERPRETER = """#!/usr/bin/env bash
[ "$1" = -c ] && exec bash -c "$SEES"
echo "$*" >> "$NOTES"
case "$*" in
  *"${MISBEHAVES:-nothing}"*) echo why >&2; exit 3 ;;
  *"--scripts ppo_atari_envpool --modes both"*) mkdir -p "$RUN" && touch "$RUN/checkpoint.pt" ;;
esac
"""


def check(folder: Path, *scripts: str, **variables: str) -> tuple[int, str, list[str]]:
    """Run a copy: exit status, output, and what its interpreter was asked for."""
    (folder / "benchmark").mkdir(parents=True)
    program = shutil.copy(ROOT / "benchmark" / "gpu_check.sh", folder / "benchmark")
    for name, content in {"python": INTERPRETER, "nvidia-smi": "#!/bin/sh\n$SMI\n"}.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    run = folder / "out/jobs/ppo_atari_envpool-both-Breakout-v5-250000-seed1/1/runs/one"
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SEES": "exit 0", "SMI": "echo GPU 0"}
    env |= {"PYTHON": str(folder / "python"), "NOTES": str(folder / "notes"), "FOLDER": "out"}
    env |= {"RUN": str(run)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", program, *scripts], env=env | variables, **streams)
    notes = (folder / "notes").read_text() if (folder / "notes").exists() else ""
    return done.returncode, done.stdout, notes.replace(str(folder / "out"), "OUT").splitlines()


@pytest.mark.parametrize(("misbehaves", "status"), [("nothing", 0), ("--modes eager", 1), ("-m pytest", 1)])
def test_all_parts_are_done_in_order_whatever_fails(misbehaves, status, tmp_path):
    scripts = ("td3_continuous_action", "ppo_atari_envpool")
    found, printed, notes = check(tmp_path, *scripts, MISBEHAVES=misbehaves)
    assert found == status, printed
    assert printed.count("exit status 3") == printed.count("why") == sum(misbehaves in note for note in notes)
    expected = ["-m pytest -q -rfE -m gpu"]
    for name, steps in zip(scripts, (150_000, 250_000), strict=True):
        for mode, length in (("both", steps), ("eager", steps // 10)):
            sweep = f"-m benchmark.sweep --profile speed --scripts {name} --modes {mode}"
            expected.append(f"{sweep} --total-timesteps {length} ")
    flags = "--compile --cudagraphs"
    trained = f"leanrl/ppo_atari_envpool_torchcompile.py {flags} --resume OUT/trained-ppo_atari_envpool"
    expected.append(f"{trained} --total-timesteps 500000")
    expected.append("-m benchmark.sweep --profile speed --scripts td3_continuous_action --modes both")
    expected.append(f"-m benchmark.profile_run td3_continuous_action_torchcompile {flags} --trace OUT/td3")
    assert len(notes) == len(expected)
    assert all(note.startswith(start) for note, start in zip(notes, expected, strict=True)), notes
    assert notes[-2].endswith("--folder OUT/four --seeds 1 2 3 4 --runs-per-gpu 4")
    assert (tmp_path / "out" / "trained-ppo_atari_envpool" / "checkpoint.pt").exists()


def test_without_a_gpu_nothing_is_run_and_an_unseen_one_is_an_error(tmp_path):
    for smi, status, says in (("false", 0, "skipped"), ("echo GPU 0", 2, "does not see it: no driver")):
        found, printed, notes = check(tmp_path / smi, SMI=smi, SEES="echo; echo no driver; exit 1")
        assert (found, notes) == (status, [])
        assert says in printed
