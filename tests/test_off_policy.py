"""Whole runs of the off-policy scripts on environments of which everything is known: what is stored, counted and learnt."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from conftest import ACTOR_CRITIC, DISCRETE, EACH_STEP, OFF_POLICY, assert_same_numbers, changed, run, world
from envs import Bytes, episode_end, observation, reward

off_policy = pytest.mark.parametrize("name", OFF_POLICY)
actor_critic = pytest.mark.parametrize("name", ACTOR_CRITIC)
discrete = pytest.mark.parametrize("name", DISCRETE)
both_counts_of_envs = pytest.mark.parametrize("num_envs", [1, 3])

OBS_DIM, ACTION_DIM = 4, 2
# The networks stay as they are.
UNTRAINED = dict.fromkeys(ACTOR_CRITIC, ("--updates-per-step", 0)) | dict.fromkeys(DISCRETE, ("--learning-rate", 0))


def fresh(name: str, num_envs: int = 1, *args, kind: str = "Scripted") -> dict:
    """A run of 42 steps in a scripted world; learning starts after ten."""
    fixed = ("--batch-size", 4, "--learning-starts", 10, "--total-timesteps", 42, *(EACH_STEP if name in DISCRETE else ()))
    return run(name, *world(name, kind), *fixed, "--num-envs", num_envs, *args)


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
def ring(rows: list[np.ndarray], capacity: int) -> np.ndarray:
    """A replay buffer, at first of zeros, into which these rows have been written."""
    written = np.zeros((capacity, len(rows[0])), rows[0].dtype)
    for index, row in enumerate(rows):
        written[index % capacity] = row
    return written


@off_policy
@both_counts_of_envs
@pytest.mark.parametrize("buffer_size", [1000, 10])
def test_replay_buffer_holds_the_transitions(name, num_envs, buffer_size):
    result = scripted(name, num_envs, "--buffer-size", buffer_size)
    rows = []
    for step in histories(result):
        for (obs, earned, terminated, next_obs, _), action in step:
            ends = (obs.ravel(), next_obs.ravel())
            if name in DISCRETE:
                parts = [[action - 5, earned, terminated], *ends]
            else:
                parts = [ends[0], action, [earned, terminated], ends[1]]
            rows.append(np.concatenate(parts).astype(np.float32))
    assert len(rows) == result["global_step"] == 42
    capacity = buffer_size // num_envs * num_envs
    assert result["buffer"].dtype == torch.float32
    np.testing.assert_array_equal(result["buffer"].numpy(), ring(rows, capacity))
    assert result["size"].item() == min(len(rows), capacity)


@discrete
@both_counts_of_envs
@pytest.mark.parametrize("buffer_size", [1000, 10])
def test_bytes_stay_bytes(name, num_envs, buffer_size):
    result = fresh(name, num_envs, "--buffer-size", buffer_size, kind="Bytes")
    rows, capacity = [], buffer_size // num_envs * num_envs
    places = [[0, 0] for _ in range(num_envs)]  # the episode and the step of each environment
    for step in histories(result):
        for (_, earned, terminated, _, done), action in step:
            index = len(rows) % num_envs
            seed, (episode, at) = sub_environments(result)[index].seeds[0], places[index]
            places[index] = [episode + 1, 0] if done else [episode, at + 1]
            scalars = np.array([action - 5, earned, terminated], np.float32).view(np.uint8)
            images = Bytes.image(seed, episode, at), Bytes.image(seed, episode, at + 1)
            rows.append(np.concatenate([scalars, *(image.ravel() for image in images)]))
    assert result["buffer"].dtype == torch.uint8
    np.testing.assert_array_equal(result["buffer"].numpy(), ring(rows, capacity))
    assert result["updates"] == {1: 31, 3: 29}[num_envs]
    assert all(loss.isfinite().all() for loss in result["losses"].values())


@off_policy
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


@off_policy
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
    """A run that has learnt nothing, to be changed at will."""
    return fresh(name, 1, *UNTRAINED[name])


@actor_critic
@pytest.mark.parametrize("sign", [-1, 1])
def test_saturated_actions_are_within_their_bounds(untrained, sign):
    set_outputs(untrained, 100 * sign)
    space = untrained["envs"].single_action_space
    actions = untrained["act"](torch.zeros(500, OBS_DIM)).numpy()
    assert all(space.contains(action) for action in actions)
    assert (actions == (space.high if sign > 0 else space.low)).any(axis=0).all()


@actor_critic
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


@discrete
@pytest.mark.parametrize("epsilon", [0, 0.3, 1])
def test_so_many_actions_are_random(untrained, epsilon):
    untrained["epsilon"].fill_(epsilon)
    obs = torch.randn(1, OBS_DIM)
    with torch.no_grad():
        best = untrained["q_network"](obs).argmax().item()
    frequencies = untrained["act"](obs.expand(20_000, -1)).bincount(minlength=3) / 20_000
    expected = torch.full((3,), epsilon / 3)
    expected[best] += 1 - epsilon
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.015 if epsilon else 0)


@discrete
def test_the_share_of_random_actions_falls_while_it_runs(name):
    """By what the policy finds in the tensor, before and after learning starts."""
    policy = "return epsilon_greedy("
    with changed(name, policy, f'globals().setdefault("shares", []).append(epsilon.item()); {policy}'):
        result = fresh(name, 1, "--start-e", 0.9, "--end-e", 0.1, "--exploration-fraction", 0.5)
    assert result["shares"] == pytest.approx([max(0.9 - 0.8 * step / 21, 0.1) for step in range(42)])


# ---- Gradient steps --------------------------------------------------------------------------------------------------
def gradient_steps(result: dict, network: str) -> int:
    """The steps that the optimizer of a network has made."""
    return int(next(tensor for name, tensor in result["tensors"].items() if name.startswith(f"{network}.step.")))


@actor_critic
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


@discrete
@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "updates"), [(1, 1, 31), (1, 4, 7), (1, 16, 1), (1, 30, 1), (4, 1, 30), (4, 4, 7)]
)
def test_number_of_gradient_steps_of_discrete_actions(name, num_envs, train_frequency, updates):
    result = scripted(name, num_envs, "--train-frequency", train_frequency)
    assert result["updates"] == gradient_steps(result, "q_network") == updates


@discrete
def test_the_target_of_double_dqn_is_that_of_the_action_which_the_network_prefers(name):
    """After an update of the target network both are the same network; from the second gradient step on they differ."""
    options = ("--target-network-frequency", 1000, "--learning-rate", 0.01)
    plain, double = (scripted(name, 1, *options, *flags) for flags in ((), ("--double",)))
    with pytest.raises(AssertionError):
        assert_same_numbers(plain, double)
    always = ("--target-network-frequency", 1, "--learning-rate", 0.01)
    assert_same_numbers(scripted(name, 1, *always), scripted(name, 1, *always, "--double"), rtol=0, atol=0)


@discrete
@pytest.mark.parametrize(("train_frequency", "every"), [(1, 7), (2, 6), (4, 8), (4, 3), (3, 7)])
def test_targets_follow_in_their_turn(name, train_frequency, every):
    """After each gradient step with which the agent steps that learn have passed another multiple of the frequency."""
    options = ("--train-frequency", train_frequency, "--target-network-frequency", every)
    asked = '"""One gradient step and, if asked for, one of the target network."""'
    with changed(name, asked, 'globals().setdefault("asked", []).append(with_target)'):
        result = fresh(name, 1, *options)
    steps = [train_frequency * (index + 1) for index in range(31 // train_frequency)]
    assert result["asked"] == [step // every > (step - train_frequency) // every for step in steps]


def params(result: dict, network: str) -> dict[str, torch.Tensor]:
    """The parameters of a network by name."""
    prefix = f"{network}.params."
    return {name.removeprefix(prefix): tensor for name, tensor in result["tensors"].items() if name.startswith(prefix)}


@off_policy
def test_target_networks_follow(name):
    fixed = (*(("--target-network-frequency", 1) if name in DISCRETE else ("--policy-frequency", 1)), "--tau")
    still, following, untouched = (
        scripted(name, 1, *fixed, 0),
        scripted(name, 1, *fixed, 1),
        scripted(name, 1, *UNTRAINED[name]),
    )
    targets = {key for key in still if "target" in key and isinstance(still[key], torch.nn.Module)}
    actor_critic = {"critic_target"} | ({"actor_target"} if name.startswith("td3") else set())
    assert targets == ({"target_network"} if name in DISCRETE else actor_critic)
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    for target in targets:
        network = "q_network" if name in DISCRETE else target.removesuffix("_target")
        assert params(untouched, network).keys() == dict(module(untouched[network]).named_parameters()).keys()
        same(params(still, target), params(untouched, network))
        same(params(following, target), params(following, network))
        assert not torch.equal(params(following, network)["fc1.weight"], params(untouched, network)["fc1.weight"])


@off_policy
def test_a_seed_repeats_a_run(name):
    first = fresh(name)
    assert_same_numbers(first, fresh(name), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_same_numbers(first, fresh(name, 1, "--seed", 2))


# ---- Values ----------------------------------------------------------------------------------------------------------
@off_policy
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
    args = ["--gamma", 0.5, "--total-timesteps", 500, "--learning-starts", 50, "--tau", 0.1]
    args += ["--batch-size", 32, "--buffer-size", 1000]
    # Without the entropy the values are the plain ones.
    args += ["--no-autotune", "--alpha", 0] if name.startswith("sac") else []
    if name in DISCRETE:
        args += ["--train-frequency", 1, "--target-network-frequency", 1, "--learning-rate", 1e-3, "--total-timesteps", 1000]
    result, seen = run(name, *world(name, probe), *args), torch.tensor([*map(float, values)])
    with torch.no_grad():
        if name in DISCRETE:
            learnt = result["q_network"](seen[:, None])[None]
        else:
            obs, actions = torch.cartesian_prod(seen, torch.linspace(-1, 1, 5)).split(1, dim=1)
            learnt = result["critic"](obs, actions).view(2, len(values), -1)
    expected = torch.tensor([*map(float, values.values())])[:, None].expand_as(learnt)
    torch.testing.assert_close(learnt, expected, rtol=0, atol=0.1)
