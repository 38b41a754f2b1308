"""EnvPool's tasks: its physics is Gymnasium's, and pool.py and Atari's scripts take it as it is."""

import json
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import LEANRL, SHORT, assert_same_numbers, cli, draws_of_a_twin, in_double, run

sys.path.append(str(LEANRL))
import pool

SAC, TD3, PPO = "sac_continuous_action", "td3_continuous_action", "ppo_continuous_action"
# How many coordinates of the position, which can be 0, an observation leaves out.
HIDDEN = {"HalfCheetah": 1, "Hopper": 1, "Walker2d": 1, "Ant": 2, "Humanoid": 2, "InvertedPendulum": 0}


def make(task: str, num_envs: int, **options) -> pool.Pool:
    """Environments as the scripts make them."""
    return gym.make_vec(f"EnvPool/{task}", num_envs, vectorization_mode="vector_entry_point", **options)


@pytest.mark.parametrize("version", ["v4", "v5"])
@pytest.mark.parametrize("task", HIDDEN)
def test_physics_is_that_of_gymnasium(task, version):
    """With the same actions, from the same state at a reset and again after 20 steps.

    A step agrees to 1e-13, but contacts multiply a difference, tenfold in some ten steps, and Humanoid's
    solver stops elsewhere: EnvPool has another version of MuJoCo. Its Humanoid-v4 shows no contact forces.
    """
    envs, env = make(f"{task}-{version}", 1), gym.make(f"{task}-{version}")
    env.reset(seed=1)
    model, actions = env.unwrapped.model, np.random.default_rng(3)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if task == "Humanoid" else {"rtol": 1e-5, "atol": 1e-5}
    shown = 292 if (task, version) == ("Humanoid", "v4") else None
    obs, ended, since = envs.reset(seed=[7])[0][0], True, 0
    for _ in range(200):
        fast = np.abs(obs[model.nq - HIDDEN[task] :][: model.nv]).max() >= 10  # Walker2d and Hopper clip it
        if ended or (since >= 20 and not fast):
            state, since = np.concatenate([np.zeros(HIDDEN[task]), obs]), 0
            env.unwrapped.set_state(state[: model.nq], state[model.nq :][: model.nv])
        action = actions.uniform(-1.5, 1.5, model.nu)  # sometimes beyond the bounds
        theirs, ours = envs.step(action[None]), env.step(action)
        obs, ended, since = theirs[0][0], ours[2], since + 1
        final = theirs[4]["final_obs"][0] if ended else obs
        np.testing.assert_allclose(final[:shown], ours[0][:shown], **tolerance)
        assert theirs[2][0] == ended
        if since > 1:  # in the first step Ant and Humanoid count from where the state was set
            np.testing.assert_allclose(theirs[1][0], ours[1], **tolerance)


# ---- pool.py -----------------------------------------------------------------------------------------------
def test_many_environments_are_as_many_of_one():
    """Those that end in one step begin anew in it, each with its own random numbers."""
    seeds = np.random.default_rng(0).integers(2**31, size=16).tolist()
    envs, alone = make("CartPole-v1", 16, num_threads=3), [make("CartPole-v1", 1) for _ in seeds]
    seen = [envs.reset(seed=seeds)[0]]
    assert (envs.options["num_threads"], alone[0].options["num_threads"]) == (3, 1)
    for index, env in enumerate(alone):
        assert np.array_equal(env.reset(seed=[seeds[index]])[0][0], seen[0][index])
    ended = np.zeros(16, int)
    for actions in np.random.default_rng(1).integers(2, size=(100, 16)):
        obs, *results, infos = envs.step(actions)
        assert obs.shape == envs.observation_space.shape and obs.dtype == envs.observation_space.dtype
        before = seen[-1].copy()
        for index, env in enumerate(alone):
            own, *others, own_infos = env.step(actions[index : index + 1])
            assert np.array_equal(own[0], obs[index])
            assert [values[index] for values in results] == [values[0] for values in others]
            if results[1][index] or results[2][index]:
                ended[index] += 1
                assert np.array_equal(infos["final_obs"][index], own_infos["final_obs"][0])
                assert np.abs(obs[index]).max() <= 0.05 < np.abs(infos["final_obs"][index]).max()
        assert np.array_equal(seen[-1], before)  # EnvPool's memory is not what it gave before
        seen.append(obs)
    assert ended.min() >= 2
    assert len({*map(tuple, seen[0])}) == 16
    assert np.array_equal(envs.reset(seed=seeds)[0], seen[0])  # made anew
    assert not np.isin(envs.reset()[0], seen[0]).any()  # goes on with its random numbers


def test_a_task_shows_the_parts_that_are_asked_for_in_the_order_of_their_names():
    task, shown = "Go1JoystickFlatTerrain-v1", {}
    for keys in ((), ("state",), ("state", "privileged_state")):
        envs = make(task, 2, keys=keys)
        shown[keys], _ = envs.reset(seed=[1, 2])
        assert shown[keys].shape == envs.observation_space.shape
    whole = shown[()]
    assert whole.shape == (2, 123 + 48) and np.array_equal(shown["state", "privileged_state"], whole)
    assert np.array_equal(shown[("state",)], whole[:, 123:])


# A task with actions of one kind or the other of each collection, and its observations.
TASKS = [(SAC, "CheetahRun-v1", 17), (PPO, "Go1JoystickFlatTerrain-v1", 171), (TD3, "FetchReach-v4", 16)]
TASKS += [("ppo", "CartPole-v1", 4), ("dqn", "Catch-v0", 50)]


@pytest.mark.filterwarnings("error:overflow encountered:RuntimeWarning")  # of actions in float64
@pytest.mark.parametrize(("name", "task", "size"), TASKS)
def test_scripts_learn_in_tasks_of_each_kind(name, task, size):
    done = run(name, "--env-id", f"pool:EnvPool/{task}", *SHORT[name], "--num-envs", 4)
    assert done["updates"] > 0 and done["envs"].single_observation_space.shape == (size,)


def test_a_run_is_counted_seeded_stored_and_evaluated_as_others_are(tmp_path):
    """In InvertedPendulum-v4 an episode of n steps has the return n, and begins within 0.01 of the middle."""
    options = ("--env-id", "pool:EnvPool/InvertedPendulum-v4", "--num-envs", 4, *SHORT[SAC])
    first = run(SAC, *options, "--checkpoint-every", 1000, directory=tmp_path)
    again, other = (run(SAC, *options, "--seed", seed) for seed in (1, 2))
    assert_same_numbers(first, again, rtol=0, atol=0)
    begins = torch.cat([result["buffer"][:4, :4] for result in (first, other)])
    assert len({*map(tuple, begins.tolist())}) == 8
    lengths = first["logged"]["charts/episodic_length"]
    assert len(lengths) > 20 and lengths == first["logged"]["charts/episodic_return"]
    # What follows a transition is what it ended with, or where a new episode begins.
    rows = first["buffer"][:300].numpy().reshape(75, 4, -1)
    before, after, terminated = rows[1:, :, :4], rows[:-1, :, -4:], rows[:-1, :, 6] > 0
    assert np.array_equal((before == after).all(axis=2), ~terminated)
    assert (np.abs(before[terminated]) <= 0.01).all() and (np.abs(after[terminated]) > 0.01).any(axis=1).all()
    assert np.count_nonzero(rows[:, :, 6]) == len(lengths)
    # A command finds pool.py beside the script.
    [file] = tmp_path.glob("runs/*/checkpoint.pt")
    process = cli(SAC, "--evaluate", file, "--eval-episodes", 3, "--no-cuda")
    assert process.returncode == 0, process.stderr
    evaluated = json.loads(process.stdout)
    assert evaluated["env_id"] == options[1] and len(evaluated["eval_returns"]) == 3
    assert min(evaluated["eval_returns"]) >= 1


# ---- FastTD3 and FastSAC -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fast_td3", "fast_sac"])
def test_only_critics_see_a_privileged_state(name):
    """In EnvPool's own environments, with a replay buffer that is full; eager and twin compute the same."""
    task = ("--env-id", "pool:EnvPool/Go1JoystickFlatTerrain-v1", "--privileged-dim", 123, "--num-envs", 2)
    small = ("--batch-size", 16, "--buffer-size", 40, "--learning-starts", 20, "--total-timesteps", 60)
    with in_double():
        with draws_of_a_twin(name):
            eager = run(name, *task, *small)
        assert_same_numbers(eager, run(f"{name}_torchcompile", *task, *small))
    state, seen = eager["state"], np.ones((1, 123 + 48))
    assert (state["actor"].fc1.in_features, state["qf1"].fc1.in_features) == (48, 123 + 48 + 12)
    rows = eager["buffer"]
    assert torch.equal(rows[:, :48], rows[:, 123:171])  # a privileged state begins with the state
    action = eager["best_actions"](seen)
    seen[:, :123] = -1
    assert np.array_equal(eager["best_actions"](seen), action)
    seen[:, 123:] = -1
    assert not np.array_equal(eager["best_actions"](seen), action)
