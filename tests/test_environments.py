"""Environments less kind than most: they change what they are given, return their own state, or no number."""

from functools import cache
from itertools import count

import numpy as np
import pytest
from conftest import DISCRETE, NOT_ATARI, OFF_POLICY, SCRIPTS, SHORT, checkpoints, run, world
from envs import Faulty

EAGER_OFF_POLICY = [name for name in OFF_POLICY if name in SCRIPTS]


@cache
def run_carelessly(name: str) -> dict:
    return run(name, *world(name, "Careless"), *SHORT[name], "--num-envs", "2", "--batch-size", "8")


def columns(name: str) -> tuple[slice, slice, slice]:
    """Those of the observation, the action and the next observation in the rows of a replay buffer."""
    if name in DISCRETE:
        return slice(3, 5), slice(0, 1), slice(5, 7)
    return slice(0, 2), slice(2, 4), slice(6, 8)


@pytest.mark.parametrize("name", EAGER_OFF_POLICY)
def test_an_action_is_stored_as_the_environment_was_given_it(name):
    done = run_carelessly(name)
    given = np.stack([env.unwrapped.given for env in done["envs"].envs], axis=1).reshape(300, -1)
    # As the script has it: an index from 0, or from -1 to 1 in place of -0.5 to 1.
    expected = given - 5 if name in DISCRETE else (given - 0.25) / 0.75
    np.testing.assert_allclose(done["buffer"][:300, columns(name)[1]], expected, rtol=0, atol=1e-6)
    assert len(np.unique(given)) >= 3


@pytest.mark.parametrize("name", EAGER_OFF_POLICY)
def test_the_end_of_an_episode_is_stored_though_the_environment_returns_its_own_state(name):
    rows = run_carelessly(name)["buffer"][:300].numpy().reshape(150, 2, -1)
    seen, _, next_seen = columns(name)
    episode, step = np.divmod(np.arange(150), 3)
    expected = np.stack([episode, step, episode, step + 1], axis=1)
    for env in range(2):
        assert np.array_equal(np.hstack([rows[:, env, seen], rows[:, env, next_seen]]), expected)


@pytest.mark.parametrize("fault", ["reward", "observation", "reset"])
@pytest.mark.parametrize("name", NOT_ATARI)
def test_what_is_not_finite_ends_the_run_and_is_told_with_its_step(name, fault, monkeypatch, tmp_path):
    monkeypatch.setattr(Faulty, "made", count())
    monkeypatch.setattr(Faulty, "fault", fault)
    options = (*world(name, "Faulty"), "--num-envs", "2", "--save-model")
    with pytest.raises(SystemExit) as raised:
        run(name, *SHORT[name], *options, directory=tmp_path)
    # An off-policy script stores what is seen after a reset with the step after it.
    step = 14 if fault == "reset" and name in OFF_POLICY else 12
    # A message as the status is printed, and the status is 1.
    assert raised.value.code == f"{name}.py: error: a transition is not finite at step {step}"
    assert not list(tmp_path.glob("runs/*/*.pt"))


@pytest.mark.parametrize("name", [name for name in DISCRETE if name in SCRIPTS])
def test_a_reward_beyond_float32_is_told_where_rows_are_bytes(name, monkeypatch):
    monkeypatch.setattr("envs.reward", lambda episode, step: 1e39)
    with pytest.raises(SystemExit) as raised:
        run(name, *world(name, "Bytes"), *SHORT[name], "--num-envs", "2")
    assert raised.value.code == f"{name}.py: error: a transition is not finite at step 2"


@pytest.mark.parametrize(
    ("name", "loss", "step"), [("dqn", "q_values", 200), ("ppo_continuous_action", "policy_loss", 70)]
)
def test_a_loss_that_is_not_finite_ends_the_run(name, loss, step, tmp_path):
    """With an endless learning rate, of which DQN suffers only after its first log entry."""
    options = (*SHORT[name], "--learning-rate", "1e30", "--checkpoint-every", "1")
    options += ("--learning-starts", "98") if name in OFF_POLICY else ()
    with pytest.raises(SystemExit) as raised:
        run(name, *world(name, "Scripted"), *options, directory=tmp_path)
    assert raised.value.code == f"{name}.py: error: {loss} is nan at step {step}"
    assert [path.stem for path in checkpoints(tmp_path)] == (["100"] if name in OFF_POLICY else [])
