"""Every script that learns within minutes really learns."""

import json
import math
import statistics

import pytest
from conftest import cli

INVERTED_PENDULUM = ("--env-id", "InvertedPendulum-v4")
# A pendulum to be swung up, which random actions leave at -1200 or so. No episode of it terminates: that
# terminated steps have no future, tests/test_off_policy.py checks, and SAC's four agents below learn it.
PENDULUM = ("--env-id", "Pendulum-v1", "--learning-starts", "1000")
# Steps, the floor for the mean of the last ten episodes, and arguments.
RUNS = {
    # With faster learning than by default 8000 steps are enough: seeds 1 to 4 of the compiled twins are at
    # -236 to -120.
    "sac_continuous_action": (8_000, -300, (*PENDULUM, "--policy-lr", "1e-3")),
    "td3_continuous_action": (8_000, -300, (*PENDULUM, "--learning-rate", "1e-3", "--tau", "0.02")),
    "ppo_continuous_action": (60_000, 850, INVERTED_PENDULUM),
    # CartPole-v1, where random actions reach 22. Seeds 1 to 6 are at 108 to 294 after so few steps.
    "dqn": (40_000, 100, ("--learning-starts", "1000")),
}
# With batches of 64, which take a third of the time: steps, floors for the mean and for the worst of four
# agents, and arguments.
SEEDS_RUNS = {
    # To where the pole no longer falls at once; idle it stands for 58.
    "sac_continuous_action_seeds": (15_000, 300, 75, (*INVERTED_PENDULUM, "--learning-starts", "1000")),
    # Seeds 1 to 4 and 11 to 14 are at -205 to -105.
    "td3_continuous_action_seeds": (8_000, -250, -350, RUNS["td3_continuous_action"][2]),
}


def learn(name: str, *args) -> dict:
    """The summary of a run."""
    process = cli(name, *args, "--no-cuda")
    assert process.returncode == 0, process.stderr
    summary = json.loads(process.stdout.splitlines()[-1])
    assert summary["updates"] > 0
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--compile",)], ids=["eager", "compile"])
@pytest.mark.parametrize("script", RUNS)
def test_learns(script, flags):
    steps, floor, args = RUNS[script]
    reached = []
    # A seed may fall short, and which one depends on the rounding of the machine.
    while len(reached) < 2 and max(reached, default=-math.inf) < floor:
        seed = ("--seed", len(reached) + 1)
        name = f"{script}_torchcompile" if flags else script
        summary = learn(name, "--total-timesteps", steps, *args, *seed, *flags)
        assert summary["compile"] == bool(flags)
        reached.append(summary["episodic_return_10"])
    assert max(reached) >= floor, reached


@pytest.mark.slow
@pytest.mark.parametrize("script", SEEDS_RUNS)
def test_four_agents_at_once_learn(script):
    steps, mean, worst, args = SEEDS_RUNS[script]
    options = ("--batch-size", "64", "--total-timesteps", steps, "--seeds", "1", "2", "3", "4", "--compile")
    reached = learn(script, *args, *options)["episodic_return_10"]
    assert statistics.mean(reached) >= mean, reached
    assert min(reached) >= worst, reached
