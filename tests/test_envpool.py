"""EnvPool's MuJoCo is Gymnasium's, and runs with it are counted and seeded as others are."""

import json
from unittest.mock import patch

import envpool
import numpy as np
import pytest
import torch
from conftest import assert_same_numbers, draws_of_a_twin, load, run

from benchmark.studies import go1

# How many coordinates of the position, which can be 0, an observation leaves out.
HIDDEN = {"HalfCheetah": 1, "Hopper": 1, "Walker2d": 1, "Ant": 2, "Humanoid": 2, "InvertedPendulum": 0}


@pytest.mark.parametrize("version", ["v4", "v5"])
@pytest.mark.parametrize("task", HIDDEN)
def test_physics_is_that_of_gymnasium(task, version):
    """With the same actions, from the same state at a reset and again after 20 steps.

    A step agrees to 1e-13, but contacts multiply a difference, tenfold in some ten steps, and Humanoid's
    solver stops elsewhere: EnvPool has another version of MuJoCo. Its Humanoid-v4 shows no contact forces.
    """
    script = load("ppo_continuous_action")
    args, env_id = script["Args"], f"{task}-{version}"
    pool = script["make_envs"](args(env_id=env_id, env_backend="envpool"), [7], None)
    env = script["make_env"](args(env_id=env_id))
    env.reset(seed=1)
    model, actions = env.unwrapped.model, np.random.default_rng(3)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if task == "Humanoid" else {"rtol": 1e-5, "atol": 1e-5}
    shown = 292 if (task, version) == ("Humanoid", "v4") else None
    obs, ended, since = pool.reset()[0][0], True, 0
    for _ in range(200):
        fast = np.abs(obs[model.nq - HIDDEN[task] :][: model.nv]).max() >= 10  # Walker2d and Hopper clip it
        if ended or (since >= 20 and not fast):
            state, since = np.concatenate([np.zeros(HIDDEN[task]), obs]), 0
            env.unwrapped.set_state(state[: model.nq], state[model.nq :][: model.nv])
        action = actions.uniform(-1.5, 1.5, model.nu)  # sometimes beyond the bounds
        theirs, ours = pool.step(action[None]), env.step(action)
        obs, ended, since = theirs[0][0], ours[2], since + 1
        final = theirs[4][0]["final_obs"] if ended else obs
        np.testing.assert_allclose(final[:shown], ours[0][:shown], **tolerance)
        assert theirs[2][0] == ended
        if since > 1:  # in the first step Ant and Humanoid count from where the state was set
            np.testing.assert_allclose(theirs[1][0], ours[1], **tolerance)


@pytest.mark.parametrize(
    ("name", "env_id"),
    [("ppo_continuous_action", "InvertedPendulum-v4"), ("ppo_torchcompile", "CartPole-v1")],
)
def test_steps_and_episodes_are_counted_and_no_seed_shares_an_environment(name, env_id):
    """In both an episode of n steps has the return n, but that CartPole counts the step that it falls in."""
    options = ("--env-id", env_id, "--env-backend", "envpool", "--num-envs", 4, "--num-steps", 64)
    options += ("--num-minibatches", 2, "--update-epochs", 1, "--total-timesteps", 1000, "--seed")
    first, again, other = (run(name, *options, seed) for seed in (1, 1, 2))
    assert_same_numbers(first, again, rtol=0, atol=0)
    lengths = first["logged"]["charts/episodic_length"]
    assert len(lengths) > 20
    for (step, length), (same, total) in zip(lengths, first["logged"]["charts/episodic_return"], strict=True):
        assert step == same and total in (length, length - 1)
    assert first["global_step"] == 768  # three rollouts
    seen = [tuple(row) for result in (first, other) for row in result["envs"].reset()[0]]
    assert len({*seen}) == 8


ENVPOOL = {"env_backend": "envpool"}


@pytest.mark.parametrize(
    ("name", "seeds", "options"),
    [
        ("ppo_continuous_action", [1, 2, 3, 4], {"env_id": "Ant-v4", **ENVPOOL}),
        ("ppo", [1, 2, 3, 4], {"env_id": "CartPole-v1", **ENVPOOL}),
        ("ppo_atari_envpool", 0, {"env_id": "Pong-v5"}),
    ],
)
def test_envpool_has_as_many_threads_as_asked_for(name, seeds, options):
    script = load(name)
    with patch("envpool.make", wraps=envpool.make) as make:
        script["make_envs"](script["Args"](num_envs=4, env_threads=3, **options), seeds, None)
    assert make.call_args.kwargs["num_threads"] == 3


def test_only_critics_see_a_privileged_state():
    """In EnvPool's own environments, with a replay buffer that is full; eager and twin compute the same."""
    go1 = ("--env-id", "Go1JoystickFlatTerrain-v1", "--env-backend", "envpool", "--num-envs", 2)
    small = ("--batch-size", 16, "--buffer-size", 40, "--learning-starts", 20, "--total-timesteps", 60)
    with draws_of_a_twin("fast_td3"):
        eager = run("fast_td3", *go1, *small)
    assert_same_numbers(eager, run("fast_td3_torchcompile", *go1, *small))
    state, seen = eager["state"], np.ones(123 + 48)
    assert (state["actor"].fc1.in_features, state["qf1"].fc1.in_features) == (48, 123 + 48 + 12)
    rows = eager["buffer"]
    assert torch.equal(rows[:, :48], rows[:, 123:171])  # a privileged state begins with the state
    action = eager["best_action"](seen)
    seen[:123] = -1
    assert np.array_equal(eager["best_action"](seen), action)
    seen[123:] = -1
    assert not np.array_equal(eager["best_action"](seen), action)
    alone = run("fast_td3", *go1, *small, "--obs-keys", "state")
    assert alone["state"]["qf1"].fc1.in_features == 48 + 12


def test_what_envpool_lacks_is_refused(refusal):
    for name, env_id in (("ppo", "envs:ScriptedChoices-v0"), ("ppo_continuous_action", "envs:Scripted-v0")):
        line = refusal(name, run, "--env-backend", "envpool", "--env-id", env_id)
        assert line.startswith(f"--env-id {env_id}: {env_id} is not supported")


# ---- The study of Go1 --------------------------------------------------------------------------------------
def test_go1_is_played_until_each_episode_ends(monkeypatch):
    """Some fall over at once; each alone, with the same seed and actions, has the same return and length."""
    monkeypatch.setattr(go1, "EPISODES", 4)
    monkeypatch.setattr(go1, "LONGEST", 60)
    drawn = np.random.default_rng(0).uniform(-2, 2, (60, 4, 12)) * [[[1], [1], [0.1], [0.1]]]
    actions = iter(drawn)
    found = go1.play(lambda obs: next(actions), seed=5)
    returns, lengths, velocities, errors = [], [], [], []
    for index, seed in enumerate(np.random.SeedSequence(5).generate_state(4) >> 1):
        env = envpool.make(go1.ENV_ID, "gymnasium", num_envs=1, seed=[int(seed)])
        rewards, (_, info) = [], env.reset()
        for step in range(60):
            velocities.append(np.linalg.norm(info["command"][0, :2]))
            _, reward, terminated, _, info = env.step(drawn[step, index : index + 1])
            rewards.append(reward[0])
            errors.append(-np.log(info["reward_tracking_lin_vel"][0]) / 4)
            if terminated[0]:
                break
        returns, lengths = [*returns, sum(rewards)], [*lengths, len(rewards)]
    assert min(lengths) < 60 == max(lengths)
    expected = {"episodic_return": returns, "episodic_length": lengths}
    expected |= {"velocity": velocities, "velocity_error": np.sqrt(errors)}
    assert found == pytest.approx({key: np.mean(values) for key, values in expected.items()}, rel=1e-5)


def test_go1_goes_on_where_it_was_and_with_its_own_penalties(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(go1, "run_for_summary", lambda command, folder: commands.append(command))
    go1.train(tmp_path, 3, True, go1.MILLION)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path.parent)
    for softer in (True, False):
        go1.train(tmp_path.relative_to(tmp_path.parent), 3, softer, 2 * go1.MILLION)
    softer = f"--env-kwargs={json.dumps(go1.SOFTER)}"
    assert {"--seed=3", softer, f"--env-id={go1.ENV_ID}"} <= {*commands[0]}
    resumed = f"--resume={tmp_path / 'runs' / 'one'}"
    assert {softer, resumed} <= {*commands[1]} and {"--env-kwargs={}", resumed} <= {*commands[2]}
