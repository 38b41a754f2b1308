"""Every script learns: the known values of tiny environments, and to balance a pole."""

import json
from unittest.mock import patch

import conftest
import numpy as np
import pytest
import torch
from conftest import (
    DISCRETE,
    MEMORY,
    NOT_ATARI,
    OFF_POLICY,
    Q_LEARNING,
    RAINBOW,
    algorithm,
    run,
    takes,
    world,
)
from envs import LitGames

# How many steps are enough to learn to balance, and to learn values, and arguments.
FAST = ("--batch-size", 64, "--learning-starts", 100, "--tau", 0.05)
EACH_STEP = ("--train-frequency", 1, "--target-network-frequency", 1, "--exploration-fraction", 0.3)
ROLLOUTS = ("--num-steps", 256, "--num-minibatches", 8, "--update-epochs", 5)
LEARN = {
    (False, "continuous"): (1600, 500, 1e-3, *FAST),
    (False, "discrete"): (3000, 1000, 1e-3, *FAST, *EACH_STEP),
    (True, "continuous"): (8192, 5000, 3e-3, *ROLLOUTS, "--num-envs", 1),
    (True, "discrete"): (8192, 5000, 3e-3, *ROLLOUTS, "--num-envs", 1),
}
# Of a script with a memory a minibatch is whole environments.
WHOLE = ("--num-envs", 32, "--num-steps", 8, "--num-minibatches", 4, "--update-epochs", 5)
# One of what is alike; with a memory they learn a cue instead.
BALANCE = ("sac_continuous_action", "ppo_continuous_action", "ppo", "pqn")
# Compiled, by its command line: every twin computes what its eager script does (tests/test_twins.py).
COMPILED = "dqn_torchcompile"
# Values near those that there are.
SUPPORT = ("--v-min", -2, "--v-max", 3)


def learn(name: str) -> tuple[int, int, list]:
    """The steps of a script to learn to balance, those to learn values, and its arguments."""
    steps, of_values, rate, *args = LEARN[algorithm(name).on_policy, algorithm(name).actions]
    args = [*WHOLE] if name in MEMORY else args
    return steps, of_values, [*args, *conftest.rates(name, rate), *(SUPPORT if takes(name, "v_max") else ())]


VALUES = {0: 0.25, 1: 0.5, 2: 1, -1: 2}


@pytest.mark.parametrize("name", NOT_ATARI)
def test_learnt_values_are_the_known_ones(name):
    _, steps, args = learn(name)
    steps += 3000 if takes(name, "q_lambda") else 0  # for errors below 0.01; PPO's 0.05
    args += ["--no-autotune", "--alpha", 0] if takes(name, "autotune") else []  # no entropy in the values
    result = run(name, *world(name, "Probe"), *args, "--gamma", 0.5, "--total-timesteps", steps)
    state = result["state"]
    obs, expected = torch.tensor([*VALUES.items()]).float().split(1, dim=1)
    # An agent with a memory sees them one after the other: an episode of the first three, and another one.
    keep = (obs >= 0).float()[:, None]
    with torch.no_grad():
        if name in Q_LEARNING:
            values = state["q_network"](obs).T
        elif name in OFF_POLICY:
            seen = state.get("obs_normalizer", torch.nn.Identity())(obs)
            actions = [torch.full_like(obs, action) for action in (-1, 0, 1)]
            values = [state[critic](seen, each) for critic in conftest.critics(result) for each in actions]
            if takes(name, "v_max"):  # distributions of values
                support = torch.linspace(*SUPPORT[1::2], 101)[:, None]
                values = [logits.softmax(1) @ support for logits in values]
            values = torch.cat(values, dim=1).T
        else:
            scale = 1
            if name not in DISCRETE:  # rewards, and so values, are in units of the deviation of returns
                obs = torch.from_numpy(result["obs_moments"].standardise(obs.numpy())).float()
                scale = result["return_moments"].std()
            if name in MEMORY:
                *_, values, _ = state["agent"](obs[:, None], keep, conftest.empty_memory(state["agent"], 1))
            else:
                *_, values = state["agent"](obs)
            values = values.view(1, -1) * scale
    torch.testing.assert_close(values.float(), expected.T.expand_as(values), rtol=0, atol=0.1)


def test_actions_of_several_parts_are_learnt():
    codes = ("--env-id", "envs:Codes-v0", "--learning-rate", 3e-3, "--total-timesteps", 8192)
    result = run("ppo", *codes, "--eval-every", 8192)
    assert np.mean(result["returns"][-100:]) > 1.8
    assert result["summary"]["eval_returns"] == [2] * 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BALANCE, COMPILED])
def test_learns_to_balance(name):
    """At random a return is 3 or so; seeds 1 to 3 reach 87 to 99."""
    steps, _, args = learn(name)
    options = (*world(name, "Balance"), *args, "--gamma", 0.95, "--total-timesteps", steps)
    if name == COMPILED:
        process = conftest.cli(name, *options, "--compile", "--no-cuda")
        assert process.returncode == 0, process.stderr
        summary = json.loads(process.stdout.splitlines()[-1])
    else:
        summary = run(name, *options)["summary"]
    assert summary["episodic_return_10"] > 83


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEMORY if name in NOT_ATARI])
def test_a_cue_of_the_first_step_is_remembered(name):
    """Eleven steps: without a memory the first earns 1 at most, and the others 0 together."""
    sizes = ("--num-envs", 16, "--num-steps", 22, "--num-minibatches", 2, "--total-timesteps", 15_000)
    result = run(name, *world(name, "Cue"), *sizes, "--learning-rate", 3e-3, "--eval-every", 15_000)
    assert min(result["summary"]["eval_returns"]) > 9


@pytest.mark.slow
def test_rainbow_learns_what_a_frame_asks_for():
    """At random a game earns 3.3, at best 10."""
    options = ("--num-envs", 4, "--buffer-size", 2000, "--learning-starts", 200, "--batch-size", 16)
    options += ("--total-timesteps", 1600, "--learning-rate", 3e-4, "--target-network-frequency", 100)
    with patch("envpool.make", LitGames):
        result = run(RAINBOW[0], *options, "--gamma", 0.5, "--eval-every", 10**6)
    assert result["summary"]["episodic_return_10"] > 7
    assert np.mean(result["summary"]["eval_returns"]) > 9
    losses = [value for _, value in result["logged"]["losses/td_loss"]]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
