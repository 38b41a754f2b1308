"""Whole runs of the off-policy scripts on environments of which everything is known: what is stored, counted and learnt."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from conftest import OFF_POLICY, assert_same_numbers, run
from envs import episode_end, observation, reward

pytestmark = pytest.mark.parametrize("name", OFF_POLICY)
both_counts_of_envs = pytest.mark.parametrize("num_envs", [1, 3])

OBS_DIM, ACTION_DIM = 4, 2


def fresh(name: str, num_envs: int = 1, *args) -> dict:
    """A run of 42 steps on Scripted-v0, the first ten with random actions."""
    fixed = ("--env-id", "envs:Scripted-v0", "--batch-size", 4, "--learning-starts", 10, "--total-timesteps", 42)
    return run(name, *fixed, "--num-envs", num_envs, *args)


scripted = cache(fresh)  # tests share its results, and leave them as they are


def sub_environments(result: dict) -> list:
    """The instances of envs.Scripted, which outlive the run."""
    return [env.unwrapped for env in result["envs"].envs]


def transitions(seed: int):
    """Yield, for ever, what Scripted-v0 goes through: obs, reward, terminated, next_obs, done."""
    episode = 0
    while True:
        length, terminated, _ = episode_end(seed, episode)
        for step in range(length):
            last = step == length - 1
            ends = observation(seed, episode, step), observation(seed, episode, step + 1)
            yield ends[0], reward(episode, step), last and terminated, ends[1], last
        episode += 1


def histories(result: dict):
    """Yield, step by step, the transition and the action of each environment."""
    envs = sub_environments(result)
    return zip(*(zip(transitions(env.seeds[0]), env.actions, strict=False) for env in envs), strict=True)


# ---- Storage ---------------------------------------------------------------------------------------------------------
@both_counts_of_envs
@pytest.mark.parametrize("buffer_size", [1000, 10])
def test_replay_buffer_holds_the_transitions(name, num_envs, buffer_size):
    result = scripted(name, num_envs, "--buffer-size", buffer_size)
    rows = [
        np.concatenate([obs.ravel(), action, [earned, terminated], next_obs.ravel()])
        for step in histories(result)
        for (obs, earned, terminated, next_obs, _), action in step
    ]
    assert len(rows) == result["global_step"] == 42
    capacity = buffer_size // num_envs * num_envs
    expected = np.zeros((capacity, 2 * OBS_DIM + ACTION_DIM + 2), np.float32)
    for index, row in enumerate(rows):
        expected[index % capacity] = row
    assert result["buffer"].dtype == torch.float32
    np.testing.assert_array_equal(result["buffer"].numpy(), expected)
    assert result["size"].item() == min(len(rows), capacity)


@both_counts_of_envs
def test_episodes_are_counted_whole(name, num_envs):
    result = scripted(name, num_envs)
    running, expected = [[] for _ in range(num_envs)], []
    for index, step in enumerate(histories(result)):
        for rewards, ((_, earned, _, _, done), _) in zip(running, step, strict=True):
            rewards.append(earned)
            if done:
                expected.append(((index + 1) * num_envs, pytest.approx(sum(rewards)), len(rewards)))
                rewards.clear()
    assert len(expected) > 10
    assert result["episodes"] == expected


def test_seeds_of_environments(name):
    result = {seed: scripted(name, 8, "--seed", seed) for seed in (1, 2)}
    seeds = {seed: [env.seeds for env in sub_environments(result[seed])] for seed in result}
    first = [given[0] for run_seeds in seeds.values() for given in run_seeds]
    assert len(set(first)) == 16
    # A seed at a later reset would repeat an episode.
    assert all(later is None for run_seeds in seeds.values() for given in run_seeds for later in given[1:])


# ---- Actions ---------------------------------------------------------------------------------------------------------
def module(network: torch.nn.Module) -> torch.nn.Module:
    """A network with its layers, which a twin's `Flat` hides."""
    return network.network[0] if hasattr(network, "network") else network


def set_outputs(result: dict, value: float) -> None:
    """Make the actor's output layers give `value` for every observation."""
    with torch.no_grad():
        for name, layer in module(result["actor"]).named_children():
            if name.startswith("fc_"):
                layer.weight.fill_(0)
                layer.bias.fill_(value)


@pytest.fixture
def untrained(name) -> dict:
    """A run without a gradient step, to be changed at will."""
    return fresh(name, 1, "--updates-per-step", 0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_saturated_actions_are_within_their_bounds(untrained, sign):
    set_outputs(untrained, 100 * sign)
    space = untrained["envs"].single_action_space
    actions = untrained["act"](torch.zeros(500, OBS_DIM)).numpy()
    assert all(space.contains(action) for action in actions)
    assert (actions == (space.high if sign > 0 else space.low)).any(axis=0).all()


def test_exploration_has_the_right_deviation(untrained, name):
    set_outputs(untrained, 0)
    actions = untrained["act"](torch.zeros(20_000, OBS_DIM))
    noise = (actions - untrained["action_bias"]) / untrained["action_scale"]
    if name.startswith("sac"):
        # Halfway of the range of log(std).
        noise, expected = noise.atanh(), float(np.exp(-1.5))
    else:
        expected = 0.1
    torch.testing.assert_close(noise.mean(0), torch.zeros(ACTION_DIM), rtol=0, atol=0.01)
    torch.testing.assert_close(noise.std(0), torch.full((ACTION_DIM,), expected), rtol=0.03, atol=0)


# ---- Gradient steps --------------------------------------------------------------------------------------------------
def gradient_steps(result: dict, network: str) -> int:
    """The steps that the optimizer of a network has made."""
    return int(next(tensor for name, tensor in result["tensors"].items() if name.startswith(f"{network}.step.")))


@pytest.mark.parametrize(
    ("num_envs", "updates_per_step", "updates", "of_the_actor"),
    # Actions are last chosen at step 41, with four environments at 40: 31 or 30 steps after learning starts.
    [(1, 0.25, 8, 3), (1, 1, 31, 11), (1, 2, 62, 21), (4, 0.25, 8, 3), (4, 1, 30, 10), (4, 2, 60, 20)],
)
def test_number_of_gradient_steps(name, num_envs, updates_per_step, updates, of_the_actor):
    result = scripted(name, num_envs, "--updates-per-step", updates_per_step, "--policy-frequency", 3)
    assert result["updates"] == gradient_steps(result, "critic") == updates
    # SAC makes up for the steps left out.
    assert gradient_steps(result, "actor") == of_the_actor * (3 if name.startswith("sac") else 1)


def params(result: dict, network: str) -> dict[str, torch.Tensor]:
    """The parameters of a network by name."""
    prefix = f"{network}.params."
    return {name.removeprefix(prefix): tensor for name, tensor in result["tensors"].items() if name.startswith(prefix)}


def test_target_networks_follow(name):
    fixed = ("--policy-frequency", 1, "--tau")
    still, following, untouched = (
        scripted(name, 1, *fixed, 0),
        scripted(name, 1, *fixed, 1),
        scripted(name, 1, "--updates-per-step", 0),
    )
    targets = [key for key in still if key.endswith("_target") and isinstance(still[key], torch.nn.Module)]
    assert "critic_target" in targets
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    for target in targets:
        network = target.removesuffix("_target")
        assert params(untouched, network).keys() == dict(module(untouched[network]).named_parameters()).keys()
        same(params(still, target), params(untouched, network))
        same(params(following, target), params(following, network))
        assert not torch.equal(params(following, network)["fc1.weight"], params(untouched, network)["fc1.weight"])


def test_a_seed_repeats_a_run(name):
    first = fresh(name)
    assert_same_numbers(first, fresh(name), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_same_numbers(first, fresh(name, 1, "--seed", 2))


# ---- Values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("probe", "values"),
    [
        ("ConstantReward", {0: 1}),
        ("ObservationReward", {-0.8: -0.8, -0.3: -0.3, 0.2: 0.2, 0.7: 0.7}),
        ("LateReward", {0: 0.25, 1: 0.5, 2: 1}),
        ("Truncated", {0: 2}),
    ],
)
def test_learnt_values_are_the_known_ones(name, probe, values):
    args = ["--env-id", f"envs:{probe}-v0", "--gamma", 0.5, "--total-timesteps", 500, "--learning-starts", 50, "--tau", 0.1]
    args += ["--batch-size", 32, "--buffer-size", 1000]
    # Without the entropy the values are the plain ones.
    args += ["--no-autotune", "--alpha", 0] if name.startswith("sac") else []
    critic = run(name, *args)["critic"]
    obs, actions = torch.cartesian_prod(torch.tensor([*map(float, values)]), torch.linspace(-1, 1, 5)).split(1, dim=1)
    with torch.no_grad():
        learnt = critic(obs, actions).view(2, len(values), -1)
    expected = torch.tensor([*map(float, values.values())])[:, None].expand_as(learnt)
    torch.testing.assert_close(learnt, expected, rtol=0, atol=0.1)
