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
RUN = "out/jobs/ppo_atari_envpool-both-Breakout-v5-250000-seed1/1/runs/one"
DONE = """-m pytest -q -rfE -m gpu
-m benchmark.sweep --profile speed --scripts td3_continuous_action --modes both --total-timesteps 150000
-m benchmark.sweep --profile speed --scripts td3_continuous_action --modes eager --total-timesteps 15000
-m benchmark.sweep --profile speed --scripts ppo_atari_envpool --modes both --total-timesteps 250000
-m benchmark.sweep --profile speed --scripts ppo_atari_envpool --modes eager --total-timesteps 25000
leanrl/ppo_atari_envpool_torchcompile.py --compile --cudagraphs --resume out/trained-ppo_atari_envpool
-m benchmark.sweep --profile speed --scripts td3_continuous_action --modes both --total-timesteps 150000
-m benchmark.profile_run td3_continuous_action_torchcompile --compile --cudagraphs --trace out/td3"""


def check(folder: Path, **variables: str) -> tuple[int, str, list[str]]:
    """Run a copy for two scripts: exit status, output, and what its interpreter was asked for."""
    (folder / "benchmark").mkdir(parents=True)
    program = shutil.copy(ROOT / "benchmark" / "gpu_check.sh", folder / "benchmark")
    for name, content in {"python": INTERPRETER, "nvidia-smi": "#!/bin/sh\n$SMI\n"}.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    (folder / "notes").touch()
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SEES": "exit 0", "SMI": "echo GPU 0"}
    env |= {"PYTHON": str(folder / "python"), "NOTES": str(folder / "notes"), "FOLDER": "out", "RUN": RUN}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["bash", program, "td3_continuous_action", "ppo_atari_envpool"]
    done = subprocess.run(command, env=env | variables, **streams)
    return done.returncode, done.stdout, (folder / "notes").read_text().replace(f"{folder}/", "").splitlines()


@pytest.mark.parametrize(("misbehaves", "status"), [("nothing", 0), ("--modes eager", 1)])
def test_all_parts_are_done_in_order_whatever_fails(misbehaves, status, tmp_path):
    found, printed, notes = check(tmp_path, MISBEHAVES=misbehaves)
    assert found == status, printed
    assert printed.count("exit status 3") == printed.count("why") == sum(misbehaves in note for note in notes)
    expected = DONE.splitlines()
    assert [note[: len(start)] for note, start in zip(notes, expected, strict=True)] == expected
    assert notes[-2].endswith("--folder out/four --seeds 1 2 3 4 --runs-per-gpu 4")


def test_without_a_gpu_nothing_is_run_and_an_unseen_one_is_an_error(tmp_path):
    for smi, status, says in (("false", 0, "skipped"), ("echo GPU 0", 2, "does not see it: no driver")):
        found, printed, notes = check(tmp_path / smi, SMI=smi, SEES="echo; echo no driver; exit 1")
        assert (found, notes) == (status, []) and says in printed
