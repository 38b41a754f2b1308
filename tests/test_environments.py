"""Environments less kind than most: they change what they are given, return their own state, or what is no finite number."""

import json
import re
from functools import cache
from itertools import count

import numpy as np
import pytest
import torch
from conftest import ACTOR_CRITIC, DISCRETE, NOT_ATARI, OFF_POLICY, SCRIPTS, SHORT, run, world
from envs import Faulty
from gymnasium.envs.classic_control import PendulumEnv

EAGER_OFF_POLICY = [name for name in OFF_POLICY if name in SCRIPTS]


@cache
def run_carelessly(name: str) -> dict:
    return run(name, *world(name, "Careless"), *SHORT[name], "--num-envs", "2", "--batch-size", "8")


def columns(name: str) -> tuple[slice, slice, slice]:
    """Those of the observation, the action and the next observation in the rows of a replay buffer."""
    return (slice(3, 5), slice(0, 1), slice(5, 7)) if name in DISCRETE else (slice(0, 2), slice(2, 4), slice(6, 8))


@pytest.mark.parametrize("name", EAGER_OFF_POLICY)
def test_an_action_is_stored_as_the_environment_was_given_it(name):
    done = run_carelessly(name)
    given = np.stack([env.unwrapped.given for env in done["envs"].envs], axis=1).reshape(300, -1)
    _, actions, _ = columns(name)
    assert np.array_equal(done["buffer"][:300, actions].numpy(), given - (5 if name in DISCRETE else 0))
    assert len(np.unique(given)) >= 3


@pytest.mark.parametrize("name", EAGER_OFF_POLICY)
def test_the_end_of_an_episode_is_stored_though_the_environment_returns_its_own_state(name):
    rows = run_carelessly(name)["buffer"][:300].numpy().reshape(150, 2, -1)
    seen, _, next_seen = columns(name)
    episode, step = np.divmod(np.arange(150), 3)
    expected = np.stack([episode, step, episode, step + 1], axis=1)
    for env in range(2):
        assert np.array_equal(np.hstack([rows[:, env, seen], rows[:, env, next_seen]]), expected)


@pytest.fixture
def faulty(monkeypatch):
    """Environments of envs.Faulty are counted anew."""
    monkeypatch.setattr(Faulty, "made", count())
    return lambda fault: (monkeypatch.setattr(Faulty, "fault", fault), monkeypatch.setattr(Faulty, "made", count()))


@pytest.mark.parametrize("fault", ["reward", "observation", "reset"])
@pytest.mark.parametrize("name", NOT_ATARI)
def test_what_is_not_finite_ends_the_run_and_is_told_with_its_step_and_environment(name, fault, faulty, tmp_path):
    faulty(fault)
    options = (*world(name, "Faulty"), "--num-envs", "2", "--checkpoint-every", "1")
    with pytest.raises(SystemExit) as raised:
        run(name, *SHORT[name], *options, directory=tmp_path)
    # A message as the status is printed, and the status is 1.
    assert raised.value.code == f"{name}.py: error: environment 1, step 12: a number is not finite"


@pytest.mark.parametrize("name", [name for name in DISCRETE if name in SCRIPTS])
def test_a_reward_beyond_float32_is_told_where_rows_are_bytes(name, monkeypatch):
    monkeypatch.setattr("envs.reward", lambda episode, step: 1e39)
    with pytest.raises(SystemExit) as raised:
        run(name, *world(name, "Bytes"), *SHORT[name], "--num-envs", "2")
    assert raised.value.code == f"{name}.py: error: environment 0, step 2: a number is not finite"


@pytest.mark.parametrize("name", NOT_ATARI)
def test_an_infinite_return_is_null_in_a_summary_of_strict_json(name, faulty, tmp_path, capfd):
    faults = world(name, "Faulty")
    small = ("--batch-size", "8") if name in OFF_POLICY else ()
    run(name, *faults, *SHORT[name], *small, "--save-model", directory=tmp_path)
    [path] = tmp_path.glob("runs/*/*.pt")
    faulty("reward")
    capfd.readouterr()
    run(name, *faults, "--evaluate", path, "--eval-episodes", "3", directory=tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(capfd.readouterr().out, parse_constant=refuse)["eval_returns"] == [3, None, 3]


@pytest.mark.parametrize("name", NOT_ATARI)
def test_a_checkpoint_that_is_not_finite_is_never_written(name, tmp_path):
    """One update with an endless learning rate: the losses before it are finite, the parameters are not."""
    if name in EAGER_OFF_POLICY:
        rate = "q-lr" if name.startswith("sac") else "learning-rate"
        options = (*SHORT[name][:-1], "102")
    else:
        rate, options = "learning-rate", ("--num-steps", "50", "--total-timesteps", "50")
        options += ("--num-minibatches", "1", "--update-epochs", "1")
    with pytest.raises(SystemExit) as raised:
        run(name, *world(name, "Scripted"), *options, f"--{rate}", "1e39", "--save-model", directory=tmp_path)
    assert re.fullmatch(
        rf"{name}\.py: error: (actor|agent|q_network)\.params\.\S+ is not finite at step \d+", raised.value.code
    )
    assert not list(tmp_path.glob("runs/*/*.pt"))


@pytest.mark.parametrize("name", [name for name in ACTOR_CRITIC if name in SCRIPTS])
def test_the_widest_bounds_overflow_nowhere(name):
    """The environments check that actions are within their bounds."""
    options = ("--learning-starts", "20", "--batch-size", "8", "--total-timesteps", "200", "--eval-episodes", "3")
    done = run(name, "--env-id", "envs:Wide-v0", *options)
    assert done["global_step"] == 200
    assert done["updates"] == 179
    assert all(loss.isfinite().all() for loss in done["losses"].values())
    scale, bias = done["action_scale"].cpu(), done["action_bias"].cpu()
    torch.testing.assert_close(scale, torch.tensor([0.75, 3.2e38, 3.2e38]), rtol=1e-6, atol=0)
    torch.testing.assert_close(bias, torch.tensor([-0.25, 2e37, -2e37]), rtol=1e-6, atol=0)
    actions = done["buffer"][:200, 4:7]
    assert actions.isfinite().all()
    assert (actions.abs() > 1e37).any(dim=0).tolist() == [False, True, True]


def test_images_can_be_evaluated_without_room_for_a_replay_buffer(tmp_path):
    """Nor need the arguments for training fit together; the 226 GB of the default buffer are more than there are."""
    name, images = "td3_continuous_action", ("--env-id", "envs:Images-v0")
    options = ("--batch-size", "4", "--learning-starts", "10", "--total-timesteps", "14", "--buffer-size", "14")
    run(name, *images, *options, "--save-model", directory=tmp_path)
    [path] = tmp_path.glob("runs/*/*.pt")
    done = run(name, *images, "--evaluate", path, "--eval-episodes", "2", directory=tmp_path)
    assert len(done["eval_returns"]) == 2


@pytest.mark.parametrize("name", ["sac_continuous_action", "ppo_continuous_action"])
def test_a_simulator_that_dies_is_no_end_of_a_run(name, monkeypatch, tmp_path):
    def step(*_) -> None:
        raise BrokenPipeError("the simulator is gone")

    run(name, "--env-id", "Pendulum-v1", *SHORT[name], "--save-model", directory=tmp_path)
    monkeypatch.setattr(PendulumEnv, "step", step)
    with pytest.raises(BrokenPipeError):
        run(name, "--env-id", "Pendulum-v1", *SHORT[name], directory=tmp_path)
    # Evaluation has to tell it from a progress bar that nobody reads.
    [path] = tmp_path.glob("runs/*/*.pt")
    ended = pytest.warns(UserWarning, match="the evaluation has ended: the simulator is gone")
    with ended, pytest.raises(SystemExit) as raised:
        run(name, "--env-id", "Pendulum-v1", "--evaluate", path, directory=tmp_path)
    assert raised.value.code == 141
