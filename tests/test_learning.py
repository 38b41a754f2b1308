"""Every script that learns within minutes really learns."""

import json
import math
import statistics

import pytest
from conftest import cli

PENDULUM = ("--env-id", "InvertedPendulum-v4")
# Steps, the floor for the mean of the last ten episodes, and arguments.
RUNS = {
    "sac_continuous_action": (20_000, 900, (*PENDULUM, "--learning-starts", "1000")),
    # With the default step sizes it takes 45,000 steps or more: docs/td3.md.
    "td3_continuous_action": (
        25_000,
        900,
        (*PENDULUM, "--learning-starts", "1000", "--learning-rate", "1e-3", "--tau", "0.02"),
    ),
    "ppo_continuous_action": (60_000, 850, PENDULUM),
    # CartPole-v1, where random actions reach 22. Seeds 1 to 6 are at 108 to 294 after so few steps.
    "dqn": (40_000, 100, ("--learning-starts", "1000")),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--compile",)], ids=["eager", "compile"])
@pytest.mark.parametrize("script", RUNS)
def test_learns(script, flags):
    name = f"{script}_torchcompile" if flags else script
    steps, floor, args = RUNS[script]
    reached = []
    # One seed in eight of TD3 falls short, and which one depends on the rounding of the machine.
    while len(reached) < 2 and max(reached, default=-math.inf) < floor:
        seed = ("--seed", len(reached) + 1)
        process = cli(name, "--total-timesteps", steps, *args, *seed, "--no-cuda", *flags)
        assert process.returncode == 0, process.stderr
        summary = json.loads(process.stdout.splitlines()[-1])
        assert summary["updates"] > 0
        assert summary["compile"] == bool(flags)
        reached.append(summary["episodic_return_10"])
    assert max(reached) >= floor, reached


@pytest.mark.slow
def test_four_agents_at_once_learn_inverted_pendulum():
    """With small batches, which take a third of the time, to where the pole no longer falls at once; idle it stands for 58."""
    options = ("--learning-starts", "1000", "--batch-size", "64", "--total-timesteps", "15000", "--seeds", "1", "2", "3", "4")
    process = cli("sac_continuous_action_seeds", *PENDULUM, "--no-cuda", "--compile", *options)
    assert process.returncode == 0, process.stderr
    reached = json.loads(process.stdout.splitlines()[-1])["episodic_return_10"]
    assert statistics.mean(reached) >= 300, reached
    assert min(reached) >= 75, reached
