"""Every script really learns."""

import json

import pytest
from conftest import cli

# Steps and floor, the mean of the last ten episodes of seed 1.
RUNS = {
    "sac_continuous_action": (20_000, 600),
    # Slow to take off with these hyper-parameters, and so it is in Stable-Baselines3: docs/td3.md.
    "td3_continuous_action": (45_000, 600),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--compile",)], ids=["eager", "compile"])
@pytest.mark.parametrize("script", RUNS)
def test_learns_inverted_pendulum(script, flags):
    name = f"{script}_torchcompile" if flags else script
    steps, floor = RUNS[script]
    task = ("--env-id", "InvertedPendulum-v4", "--learning-starts", "1000", "--total-timesteps", steps)
    process = cli(name, *task, "--no-cuda", *flags)
    assert process.returncode == 0, process.stderr
    summary = json.loads(process.stdout.splitlines()[-1])
    assert summary["updates"] > 0
    assert summary["compile"] == bool(flags)
    assert summary["episodic_return_10"] >= floor
