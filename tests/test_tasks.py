"""What users bring: observations of all kinds, vector environments, frozen and normalising layers."""

from contextlib import nullcontext
from unittest.mock import patch

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import OFF_POLICY, SAVED, SHORT, changed, checkpoint, evaluation, run, world
from torch import nn

from benchmark.no_velocity import POSITIONS

SAC, TD3, PPO = "sac_continuous_action", "td3_continuous_action", "ppo_continuous_action"
TWO = ("--num-envs", 2)


# ---- Observations and infos --------------------------------------------------------------------------------
def test_observations_of_parts_are_flattened():
    """Though infos have an "episode" of another type at the beginning, and a key 0, of their own."""
    name = SAC
    result = run(name, *world(name, "Parts"), *SHORT[name], *TWO, "--eval-every", 300, "--eval-episodes", 4)
    space = conftest.instances(result)[0].observation_space
    assert result["envs"].observation_space.shape == (2, gym.spaces.flatdim(space)) == (2, 11)
    assert np.isfinite(result["eval_returns"]).all() and len(result["eval_returns"]) == 4
    # What is "seen", "at", of three choices and two bits, and "of", of two choices.
    rows = result["buffer"][:300].numpy()
    step = rows[:, 2].astype(int)
    assert np.array_equal(rows[:, 4:7], np.eye(3)[step % 3])
    assert np.array_equal(rows[:, 7:9], np.stack([step % 2, np.ones(300)], axis=1))
    assert np.array_equal(rows[:, 9:11], np.eye(2)[step % 2]) and 0 < step.mean() < step.max()


# ---- Vector environments -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [SAC, PPO])
def test_a_vector_environment_of_ones_own_is_learnt_and_evaluated(name, tmp_path):
    """By random moves a return is 0 or so; all in one direction are worth 1."""
    sizes = ("--learning-starts", 200, "--total-timesteps", 1200, "--batch-size", 64)
    sizes += ("--no-autotune", "--alpha", 0.01)
    if name not in OFF_POLICY:
        sizes = ("--num-steps", 32, "--num-minibatches", 4, "--total-timesteps", 8192)
        sizes += ("--learning-rate", 3e-3)
    options = ("--env-id", "envs:Walks-v0", *sizes, "--num-envs", 8, "--gamma", 0.9)
    result = run(name, *options, *SAVED, directory=tmp_path)
    assert np.mean(result["returns"][-20:]) > np.mean(result["returns"][:10]) + 0.3
    if name in OFF_POLICY:  # the position after a step is that before it and the move, also at an end
        obs, action, _, terminated, next_obs = np.split(result["buffer"][:1200].numpy(), [2, 3, 4, 5], 1)
        np.testing.assert_allclose(next_obs[:, :1], obs[:, :1] + 0.3 * action, atol=1e-6)
        assert np.array_equal(terminated[:, 0], np.abs(next_obs[:, 0]) > 1) and terminated.any()
    told = evaluation(name, checkpoint(tmp_path), "--eval-episodes", 20)
    assert np.mean(told["eval_returns"]) > 0.8


# ---- Tasks -------------------------------------------------------------------------------------------------
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


def test_environments_take_arguments_of_their_own(tmp_path):
    """An evaluation takes those of the run, and so does a run that goes on, unless it is given others."""
    name, options = "dqn", ("--env-id", "CartPole-v1", *SHORT["dqn"])  # whose rewards are 1
    run(name, *options, *SAVED, "--env-kwargs", '{"max_episode_steps": 2}', directory=tmp_path)
    file = checkpoint(tmp_path)
    for more, length in ((), 2), (("--env-kwargs", '{"max_episode_steps": 1}'), 1):
        told = evaluation(name, file, "--eval-episodes", 2, *more)
        assert told["env_kwargs"] == {"max_episode_steps": length} and told["eval_returns"] == [length] * 2
        again = run(name, *options, "--resume", file.parent, "--total-timesteps", 600 - 100 * length, *more)
        assert {length for _, length in again["logged"]["charts/episodic_length"]} == {length}
    with pytest.raises(TypeError, match="unexpected keyword argument 'gravitas'"):
        run(name, *options, "--env-kwargs", '{"gravitas": 1}')


# ---- Layers of one's own -----------------------------------------------------------------------------------
def test_evaluation_is_in_evaluation_mode_and_training_goes_on_in_training_mode():
    """Dropout would draw other actions else."""
    modes, forward = [], nn.Dropout.forward

    def noted(self, *args):
        modes.append(self.training)
        return forward(self, *args)

    layer = ("            nn.Tanh(),\n", "            nn.Tanh(),\n            nn.Dropout(0.5),\n")
    frequent = (*SHORT[PPO], *TWO, "--eval-every", 100, "--eval-episodes", 2)
    with changed(PPO, *layer), patch.object(nn.Dropout, "forward", noted):
        run(PPO, *world(PPO, "Scripted"), *frequent)
    changes = [mode for mode, before in zip(modes[1:], modes, strict=False) if mode != before]
    assert {*modes} == {False, True} and len(changes) >= 2


def test_an_optimizer_may_have_a_parameter_of_its_own():
    made = '    state = {"actor": actor'
    own = "    own = nn.ModuleList([actor, nn.PReLU(device=device)])\n"
    own += '    actor_optimizer.add_param_group({"params": own[1].parameters()})\n'
    passages = [made, own + made.replace(": actor", ": own")]
    passages += ["-qf1(obs, actor(obs)).mean()", "-qf1(obs, own[1](actor(obs))).mean()"]
    with changed(TD3, *passages):
        [slope] = run(TD3, *SHORT[TD3])["state"]["actor"][1].parameters()
    assert slope.item() != 0.25


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous_action"])
def test_a_twin_acts_in_numpy_where_that_is_what_act_computes(name):
    """Not where users have changed `act`, for a layer before those of the actor."""
    actor = "agent.actor" if name == "ppo" else "agent.actor_mean"
    changes = {f"{actor}(obs)": "numpy", f"{actor}(obs).tanh()": "torch", f"{actor}(obs / 1.05)": "torch"}
    for change, by in (changes | {f"{actor}(obs.clamp(-5, 5))": "torch"}).items():
        with changed(twin := f"{name}_torchcompile", f"return {actor}(obs)", f"return {change}"):
            assert run(twin, *SHORT[name], "--total-timesteps", 100)["policy"].__name__ == f"{by}_policy"


FROZEN = {
    SAC: ("self.fc1 = nn.Linear(obs_dim, 256, device=device)", "actor.fc1.weight", "actor.fc2.weight"),
    PPO: (
        "layer_init(nn.Linear(obs_dim, 64, device=device))",
        "agent.actor_mean.0.weight",
        "agent.actor_mean.2.weight",
    ),
    # Of two critics, which differ in it.
    TD3: (
        "self.fc1 = nn.Linear(obs_dim + action_dim, 256, device=device)",
        "qf2.fc1.weight",
        "qf2.fc2.weight",
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_layers_can_be_frozen(name):
    """In both files, with the same numbers; they stay, and the others learn."""
    passage, *weights = FROZEN[name]
    states, options = [], (*world(name, "Scripted"), *SHORT[name])
    options += () if name not in OFF_POLICY else ("--total-timesteps", 115)
    for file, draws in ((name, conftest.draws_of_a_twin(name)), (f"{name}_torchcompile", nullcontext())):
        with changed(file, passage, f"{passage}.requires_grad_(False)"), draws:
            before = conftest.numbers(run(file, *options, *conftest.rates(name, 0)))
            states.append(after := conftest.numbers(run(file, *options)))
        assert [torch.equal(before[weight], after[weight]) for weight in weights] == [True, False]
    # An optimizer of PyTorch has no moments of what is frozen, a twin's those that are 0.
    computed = ({key: value for key, value in state.items() if "optimizer" not in key} for state in states)
    torch.testing.assert_close(*computed, rtol=1e-3, atol=1e-3)
