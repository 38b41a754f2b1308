"""Seeds, and environments that change what they are given, return their own state, or no number."""

from itertools import count, pairwise

import conftest
import numpy as np
import pytest
import torch
from conftest import DISCRETE, DQN, OFF_POLICY, SAVED, SHORT, instances, play, run, world
from envs import Faulty

FAULTS = [(name, "observation") for name in conftest.NOT_ATARI]
FAULTS += [(name, fault) for name in ("dqn", "ppo_continuous_action") for fault in ("reward", "reset")]
# A twin draws and computes what its eager script does (tests/test_twins.py).
every = pytest.mark.parametrize("name", conftest.SCRIPTS)


@every
def test_no_two_seeds_share_an_environment(name):
    small = ("--num-steps", 7, "--num-minibatches", 1) if name in conftest.ON_POLICY else ("--batch-size", 8)
    options = (*SHORT[name], "--num-envs", 8, *small, "--total-timesteps", 56)
    first, other = (play(name, *options, "--seed", seed) for seed in (1, 2))
    actions = [np.array([env.actions[:7] for env in instances(result)]) for result in (first, other)]
    assert actions[0].shape == actions[1].shape and not np.array_equal(*actions)
    seeds = [env.seeds for result in (first, other) for env in instances(result)]
    if name in conftest.ATARI:
        seeds = [[seed] for of_games in seeds for seed in of_games]
    assert len({begin for begin, *_ in seeds}) == 16 and max(begin for begin, *_ in seeds) < 2**31
    # A seed at a later reset would repeat an episode, and EnvPool count up from one seed.
    assert all(seed is None for _, *later in seeds for seed in later)
    assert not any(second == [first[0] + 1] for first, second in pairwise(seeds))


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name not in conftest.ATARI])
def test_what_is_stored_is_what_was_though_the_environment_changes_its_action_and_its_observation(name):
    result = run(name, *world(name, "Careless"), *SHORT[name], "--num-envs", "2", "--batch-size", "8")
    rows = result["buffer"][:300].numpy().reshape(150, 2, -1)
    action, seen = 2 if name in DQN else slice(2, 4), [0, 1, -2, -1]
    episode, step = np.divmod(np.arange(150), 3)
    for index, env in enumerate(instances(result)):
        given = np.stack(env.given)
        # As the script has it: an index from 0, or from -1 to 1 in place of -0.5 to 1.
        expected = given - 5 if name in DQN else (given - 0.25) / 0.75
        np.testing.assert_allclose(rows[:, index, action], expected, rtol=0, atol=1e-6)
        assert len(np.unique(given)) >= 3
        assert np.array_equal(rows[:, index, seen], np.stack([episode, step, episode, step + 1], axis=1))


@pytest.mark.parametrize("name", ["ppo", "pqn"])
def test_what_is_learnt_from_a_rollout_is_what_was_though_the_environment_returns_its_own_state(name):
    result = run(name, *world(name, "Careless"), *SHORT[name], "--num-envs", 2)
    rows = conftest.named(torch.from_numpy(result["rollout"]), result["columns"])  # the last 50 of 150 steps
    steps = np.arange(100, 150)
    seen = np.stack([steps // 3, steps % 3, steps // 3, steps % 3 + 1], axis=1)
    for env in range(2):
        shown = np.concatenate([rows["obs"][:, env], rows["next_obs"][:, env]], axis=1)
        assert np.array_equal(shown, seen)


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_what_is_not_finite_ends_the_run_and_is_told_with_its_step(name, fault, monkeypatch, tmp_path):
    monkeypatch.setattr(Faulty, "made", count())
    monkeypatch.setattr(Faulty, "fault", fault)
    # What is seen after a reset is stored with the step after it, but for those that look at it before.
    late = name in OFF_POLICY or (name in DISCRETE and name not in conftest.MEMORY)
    step = 14 if fault == "reset" and late else 12
    # A message as the status is printed, and the status is 1.
    with pytest.raises(SystemExit, match=f"^a row is not finite at step {step}$"):
        run(name, *world(name, "Faulty"), *SHORT[name], "--num-envs", "2", *SAVED, directory=tmp_path)
    assert not [*tmp_path.glob("runs/*/*.pt")]


@every
def test_a_loss_that_is_not_finite_ends_the_run_at_its_log_entry(name, tmp_path):
    """By a learning rate with which the first gradient step goes beyond all numbers."""
    args = (*SHORT[name], *conftest.rates(name, 1e38), *SAVED)
    args += ("--log-every", 1) if name in OFF_POLICY else ()
    args += ("--policy-frequency", 1) if conftest.takes(name, "policy_frequency") else ()
    with pytest.raises(SystemExit, match=r"^\w+ is (nan|-?inf) at step \d+$"):
        play(name, *args, directory=tmp_path)
    assert not [*tmp_path.glob("runs/*/*.pt")]
