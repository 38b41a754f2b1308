"""What users bring: observations of all kinds, infos, tasks of EnvPool, frozen and normalising layers."""

from contextlib import nullcontext
from unittest.mock import patch

import conftest
import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    DISCRETE,
    DQN,
    MEMORY,
    NOT_ATARI,
    OFF_POLICY,
    SHORT,
    changed,
    draws_of_a_twin,
    instances,
    load,
    run,
    world,
)
from envs import TERMINATED, Scripted, ScriptedPool
from torch import nn

from benchmark.no_velocity import POSITIONS

SAC, TD3, PPO = "sac_continuous_action", "td3_continuous_action", "ppo_continuous_action"
TWO = ("--num-envs", 2)
# With forty gradient steps, where learning is not what counts.
LATE = SHORT | {name: (*SHORT[name], "--learning-starts", 260) for name in OFF_POLICY}
every = pytest.mark.parametrize("name", NOT_ATARI)


# ---- Observations and infos --------------------------------------------------------------------------------
@every
def test_observations_of_parts_are_flattened_and_success_is_logged(name, tmp_path):
    """Though infos change their types and have an "episode" of their own; also in evaluation."""
    result = run(name, *world(name, "Parts"), *LATE[name], *TWO, "--eval-episodes", 4, directory=tmp_path)
    space = instances(result)[0].observation_space
    assert result["envs"].observation_space.shape == (2, gym.spaces.flatdim(space)) == (2, 11)
    if name in OFF_POLICY:  # what is "seen", "at", of three choices and two bits, and "of", of two choices
        rows = result["buffer"][:300, 3 if name in DQN else 0 :].numpy()
        step = rows[:, 2].astype(int)
        assert np.array_equal(rows[:, 4:7], np.eye(3)[step % 3])
        assert np.array_equal(rows[:, 7:9], np.stack([step % 2, np.ones(300)], axis=1))
        assert np.array_equal(rows[:, 9:11], np.eye(2)[step % 2]) and 0 < step.mean() < step.max()
    lengths = [length for _, length in result["logged"]["charts/episodic_length"]]
    successes = [length > 1 for length in lengths]
    expected = [np.mean(successes[: end + 1][-100:]) for end in range(len(successes))]
    assert [rate for _, rate in result["logged"]["charts/success_rate"]] == pytest.approx(expected)
    assert result["summary"]["success_rate"] == pytest.approx(expected[-1]) != 0
    assert 0 < result["summary"]["eval_success_rate"] < 1


@every
def test_the_agent_may_see_some_parts_only(name):
    """Then the run is that of the environment which shows nothing else."""
    parts = run(name, *world(name, "Parts"), *LATE[name], *TWO, "--obs-keys", "seen", "seen")
    conftest.assert_same_numbers(run(name, *world(name, "Scripted"), *LATE[name], *TWO), parts, 0, 0)


# ---- EnvPool -----------------------------------------------------------------------------------------------
@every
@pytest.mark.parametrize("kind", ["Scripted", "Boxes"])
def test_a_pool_gives_what_gymnasium_gives(name, kind, monkeypatch, tmp_path):
    """To the bit, in training, and in evaluation of what was saved; EnvPool takes other seeds."""
    env_id, reset = world(name, kind), Scripted.reset
    monkeypatch.setattr(Scripted, "reset", lambda self, **_: reset(self, seed=None if self.seeds else 0))
    monkeypatch.setattr("envs.TRUNCATED", [1 - terminated for terminated in TERMINATED])  # never both at once
    monkeypatch.setattr("envpool.make", ScriptedPool)
    several = ("--num-envs", 3, "--save-model", "--eval-episodes", 3)
    several += ("--num-minibatches", 3) if name in MEMORY else ()
    results = []
    for backend in ("gymnasium", "envpool"):
        options = (*env_id, *LATE[name], *several, "--env-backend", backend)
        (tmp_path / backend).mkdir()
        results.append(run(name, *options, directory=tmp_path / backend))
    conftest.assert_same_numbers(*results, rtol=0, atol=0)
    evaluated = [result["summary"]["eval_returns"] for result in results]
    assert evaluated[0] == pytest.approx(evaluated[1]) and len(evaluated[0]) == 3


# A task with named parts, with actions of one kind or the other, of each collection; and its observations.
TASKS = [(SAC, "CheetahRun-v1", 17), (PPO, "Go1JoystickFlatTerrain-v1", 171), (TD3, "FetchReach-v4", 16)]
TASKS += [("ppo", "CartPole-v1", 4), ("dqn", "Catch-v0", 50)]


@pytest.mark.filterwarnings("error:overflow encountered:RuntimeWarning")  # of actions in float64
@pytest.mark.parametrize(("name", "env_id", "size"), TASKS)
def test_tasks_that_only_envpool_has_are_learnt_and_evaluated_there(name, env_id, size, tmp_path):
    options = ("--env-id", env_id, "--env-backend", "envpool", *SHORT[name], "--num-envs", 4)
    done = run(name, *options, "--save-model", directory=tmp_path)
    assert done["updates"] > 0 and done["envs"].observation_space.shape == (size,)
    [path] = conftest.checkpoints(tmp_path)
    again = run(name, "--evaluate", path, "--eval-episodes", 1, directory=tmp_path)
    assert again["args"].env_backend == "envpool" and np.isfinite(again["summary"]["eval_returns"]).all()


def test_a_step_that_ends_an_episode_of_envpool_also_resets_it():
    """In Hopper-v4: what follows a transition is what it ended with, or where a new episode begins."""
    options = ("--env-id", "Hopper-v4", "--env-backend", "envpool", *SHORT[TD3], "--total-timesteps", 400)
    done = run(TD3, *options, "--num-envs", 4)
    rows = done["buffer"][:400].numpy().reshape(100, 4, -1)
    before, after, terminated = rows[1:, :, :11], rows[:-1, :, -11:], rows[:-1, :, 15] > 0
    same = (before == after).all(axis=2)
    assert np.array_equal(same, ~terminated) and terminated.sum() >= 8
    assert (np.abs(before[terminated][:, 1:5]) < 0.01).all()  # joints as a Hopper has them when it begins
    assert len(done["returns"]) == np.count_nonzero(rows[:, :, 15])


def test_what_envpool_cannot_make_is_refused(refusal):
    cases = {"NoSuch-v0": "NoSuch-v0 is not supported", "CartPole-v1": "not Discrete(2)"}
    cases |= {"BigfishEasy-v0": "Qt"} if "BigfishEasy-v0" in envpool.list_all_envs() else {}
    for env_id, told in cases.items():
        line = refusal(PPO, run, "--env-backend", "envpool", "--env-id", env_id)
        assert line.startswith("--env-id ") and told in line
    assert "more than one player" in refusal("ppo", run, "--env-backend", "envpool", "--env-id", "Go9x9-v1")
    line = refusal("dqn", run, "--env-backend", "envpool", "--env-id", "Catch-v0", "--capture-video")
    assert line.endswith(
        "Catch-v0 does not render: RuntimeError: render not implemented for this environment"
    )


@pytest.mark.parametrize("env_id", POSITIONS)
def test_tasks_without_velocities_show_positions(env_id):
    name, version = env_id.split("-")
    env, hidden = gym.make(env_id), gym.make(f"benchmark.no_velocity:{name}NoVel-{version}")
    action = env.action_space.sample()
    seen = [hidden.reset(seed=1)[0], hidden.step(action)[0]]
    whole = np.stack([env.reset(seed=1)[0], env.step(action)[0]])
    assert np.array_equal(seen, whole[:, POSITIONS[env_id]])
    if "mujoco" in env.spec.entry_point:
        assert np.array_equal(seen[1], env.unwrapped.data.qpos[1:])
    elif name == "CartPole":
        assert np.array_equal(seen[1], np.float32([env.unwrapped.state[0], env.unwrapped.state[2]]))
    else:  # Of Pendulum-v1 the angle's cosine and sine, of MountainCarContinuous-v0 the place.
        assert whole.shape[1] == len(seen[1]) + 1


@every
@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_environments_take_arguments_of_their_own(name, backend, tmp_path, capfd, refusal):
    """An evaluation takes those of the run, and so does a run that goes on, unless it is given others."""
    env_id = "CartPole-v1" if name in DISCRETE else "InvertedPendulum-v4"  # rewards are 1
    options = ("--env-id", env_id, "--env-backend", backend, *LATE[name], "--save-model")
    done = run(name, *options, "--env-kwargs", '{"max_episode_steps": 2}', directory=tmp_path)
    assert {length for _, length in done["logged"]["charts/episodic_length"]} == {2}
    [path] = conftest.checkpoints(tmp_path)
    for more, length in ((), 2), (("--env-kwargs", '{"max_episode_steps": 1}'), 1):
        again = run(name, "--evaluate", path, "--eval-episodes", 2, *more, directory=tmp_path)
        assert again["args"].env_kwargs == {"max_episode_steps": length}
        assert again["summary"]["eval_returns"] == [length, length]
    again = run(name, "--resume", path, "--total-timesteps", done["args"].total_timesteps + 100)
    assert {length for _, length in again["logged"]["charts/episodic_length"]} == {2}
    told = "--env-kwargs {'max_episode_steps': 1}, it was {'max_episode_steps': 2}"
    assert told in capfd.readouterr().err
    refused = {"gravitas": "unexpected keyword argument 'gravitas'"}
    refused |= {key: f"multiple values for keyword argument '{key}'" for key in ("batch_size", "num_envs")}
    for key in refused if backend == "envpool" else ["gravitas"]:
        assert refused[key] in refusal(name, run, *options, "--env-kwargs", f'{{"{key}": 1}}')
    assert refusal(name, run, "--env-kwargs", "[4]").startswith("--env-kwargs: Input should be a valid dict")


@every
def test_what_does_not_render_or_has_no_such_parts_is_refused(name, refusal):
    assert "render_mode" in refusal(name, run, *world(name, "Scripted"), "--capture-video")
    for kind in ("Scripted", "Parts"):
        assert refusal(name, run, *world(name, kind), "--obs-keys", "none").startswith("--obs-keys: ")


def test_the_parts_that_are_seen_stay(tmp_path, refusal):
    run(
        "dqn", *world("dqn", "Parts"), *SHORT["dqn"], "--save-model", "--obs-keys", "seen", directory=tmp_path
    )
    for option in ("--resume", "--evaluate"):
        line = refusal("dqn", run, option, *conftest.checkpoints(tmp_path), "--obs-keys", "seen", "of")
        assert line.startswith("--obs-keys has to stay ('seen',), as in ")


# ---- Layers of one's own -----------------------------------------------------------------------------------
NORM = {
    SAC: ("x = F.relu(self.fc2(x))\n        mean", "x = self.norm(F.relu(self.fc2(x)))\n        mean"),
    PPO: ("            nn.Tanh(),\n", "            nn.Tanh(),\n            nn.Dropout(0.5),\n"),
}


@pytest.mark.parametrize("name", NORM)
def test_evaluation_is_in_evaluation_mode_and_training_goes_on_in_training_mode(name):
    """Batch normalisation takes no batch of one else, and dropout would draw another action each time."""
    passages, modes = NORM[name], []
    if name == SAC:
        layer = "        self.fc_out = nn.Linear(256, 2"
        passages += (layer, f"        self.norm = nn.BatchNorm1d(256, device=device)\n{layer}")
    forward = nn.Dropout.forward if name == PPO else nn.BatchNorm1d.forward

    def noted(self, *args):
        modes.append(self.training)
        return forward(self, *args)

    frequent = ("--eval-every", 100, "--eval-episodes", 1)
    with (
        changed(name, *passages),
        patch.object(nn.Dropout if name == PPO else nn.BatchNorm1d, "forward", noted),
    ):
        run(name, *world(name, "Scripted"), *SHORT[name], *TWO, *frequent)
    changes = [mode for mode, before in zip(modes[1:], modes, strict=False) if mode != before]
    assert {*modes} == {False, True} and len(changes) >= 2


FROZEN = {
    SAC: "self.fc1 = nn.Linear(obs_dim, 256, device=device)",
    TD3: "self.fc1 = nn.Linear(obs_dim, 256, device=device)",
    "dqn": "self.fc1 = nn.Linear(obs_dim, 120, device=device)",
    "fast_td3": "self.fc1 = nn.Linear(obs_dim, hidden_dim, device=device)",
    PPO: "layer_init(nn.Linear(obs_dim, 64, device=device))",
    "ppo": "layer_init(nn.Linear(obs_dim, 64, device=device))",
}


@pytest.mark.parametrize("name", FROZEN)
def test_layers_can_be_frozen(name):
    """In both files, with the same numbers; they stay, and the others learn."""
    passage, states, options = FROZEN[name], [], (*world(name, "Scripted"), *SHORT[name])
    options += () if name not in OFF_POLICY else ("--total-timesteps", 115)
    options += ("--weight-decay", 0) if conftest.takes(name, "weight_decay") else ()
    learners = {
        "dqn": "q_network.fc{}.weight",
        PPO: "agent.actor_mean.{}.weight",
        "ppo": "agent.actor.{}.weight",
    }
    learner, layers = learners.get(name, "actor.fc{}.weight"), (0, 2) if name.startswith("ppo") else (1, 2)
    for file, draws in ((name, draws_of_a_twin(name)), (f"{name}_torchcompile", nullcontext())):
        with changed(file, passage, f"{passage}.requires_grad_(False)"), draws:
            before = conftest.numbers(run(file, *options, *conftest.rates(name, 0)))
            states.append(after := conftest.numbers(run(file, *options)))
        weights = [learner.format(layer) for layer in layers]
        assert [torch.equal(before[weight], after[weight]) for weight in weights] == [True, False]
    # An optimizer of PyTorch has no moments of what is frozen, a twin's those that are 0.
    computed = ({key: value for key, value in state.items() if "optimizer" not in key} for state in states)
    torch.testing.assert_close(*computed, rtol=1e-3, atol=1e-3)


def test_frozen_layers_do_not_decay(refusal):
    """The twin would have all of a flat tensor decay."""
    passage = FROZEN["fast_td3"]
    with changed("fast_td3_torchcompile", passage, f"{passage}.requires_grad_(False)"):
        told = refusal("fast_td3_torchcompile", run, *world("fast_td3", "Scripted"), *SHORT["fast_td3"])
    assert told == "--weight-decay has to be 0 where layers are frozen"


def test_networks_that_share_a_layer_are_not_flattened_twice():
    for twin in (f"{TD3}_torchcompile", f"{PPO}_torchcompile"):
        flat, shared = load(twin)["Flat"], nn.Linear(3, 4)
        flat(nn.Sequential(shared, nn.Linear(4, 2)))
        with pytest.raises(ValueError, match="in another Flat already"):
            flat(nn.Sequential(shared, nn.Linear(4, 1)))
    pair = [nn.Linear(3, 4), nn.Linear(3, 4)]
    pair[1].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="the same layers have to be frozen"):
        load(f"{TD3}_torchcompile")["Flat"](*pair)
