"""The pure functions of the scripts against slow, obvious references."""

import copy
import math
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TWINS, having, load, plain_gae
from torch import nn
from torch.distributions import AffineTransform, Categorical, Normal, TanhTransform, TransformedDistribution

CPU = torch.device("cpu")
SCALE, BIAS = torch.tensor([0.5, 3.0, 1.0]), torch.tensor([0.0, -1.0, 7.0])


def each_script(*functions: str):
    """Run a test with every script that has all of the functions, and with its twin."""
    return pytest.mark.parametrize("script", [pytest.param(load(name), id=name) for name in having(*functions)])


squashed = each_script("sample_actions", "alpha_loss")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def batch() -> SimpleNamespace:
    """Random arguments of the targets and losses, some of the transitions terminated."""
    rewards, log_prob, target = torch.randn(3, 7)
    terminated = torch.tensor([0.0, 1, 0, 0, 1, 1, 0])
    return SimpleNamespace(rewards=rewards, terminated=terminated, values=torch.randn(2, 7), log_prob=log_prob, target=target)


def rows(*columns: torch.Tensor) -> list[tuple[float, ...]]:
    """Columns of numbers, each (batch,), as a tuple of Python numbers per transition."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def assert_is(actual: torch.Tensor, expected: list | float) -> None:
    """Check that actual has the shape and, up to rounding, the values of nested lists of numbers."""
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


# ---- Replay buffer ---------------------------------------------------------------------------------------------------
OBS_DIM, ACTION_DIM, FILLED = 3, 2, 20


def sample(script: dict, batch_size: int) -> tuple[torch.Tensor, ...]:
    """Draw from a buffer of which only the first FILLED rows may be used; row i is 100 i, 100 i + 1, ..."""
    row_dim, sizes = 2 * OBS_DIM + ACTION_DIM + 2, (OBS_DIM, ACTION_DIM)
    if "QNetwork" in script:
        row_dim, sizes = 2 * OBS_DIM + 3, (OBS_DIM,)
    buffer = torch.arange(2 * FILLED)[:, None] * 100.0 + torch.arange(row_dim)
    return script["sample_batch"](buffer, torch.tensor(FILLED), batch_size, *sizes)


@each_script("epsilon_greedy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("batch_size", [1, 500])
def test_sampled_rows_of_discrete_actions_are_whole(script, dtype, batch_size):
    scalars = torch.stack([torch.arange(40) % 7, torch.randn(40), torch.arange(40) % 2], dim=1).float()
    images = torch.randint(256, (40, 2, OBS_DIM)).to(dtype)  # of an odd number of bytes
    buffer = torch.cat([scalars.view(dtype), images.flatten(1)], dim=1)
    obs, actions, rewards, terminated, next_obs = script["sample_batch"](buffer, torch.tensor(FILLED), batch_size, OBS_DIM)
    assert (obs.dtype, actions.dtype, rewards.dtype) == (dtype, torch.int64, torch.float32)
    drawn = [int((scalars[:, 1] == reward).nonzero()) for reward in rewards]
    assert max(drawn) < FILLED
    assert torch.equal(torch.stack([actions.float(), rewards, terminated], dim=1), scalars[drawn])
    assert torch.equal(torch.stack([obs, next_obs], dim=1), images[drawn])


@each_script("sample_batch", "Critic")
def test_sampled_rows_are_whole(script):
    obs, actions, rewards, terminated, next_obs = sample(script, 500)
    start = obs[:, 0]
    assert set((start / 100).tolist()) == set(range(FILLED))
    for part, columns in ((obs, range(0, 3)), (actions, range(3, 5)), (next_obs, range(7, 10))):
        assert torch.equal(part, torch.stack([start + column for column in columns], dim=1))
    assert torch.equal(rewards, start + 5)
    assert torch.equal(terminated, start + 6)


@each_script("sample_batch")
def test_sampling_is_uniform(script):
    draws = 20_000
    counts = (sample(script, draws)[0][:, 0] / 100).long().bincount(minlength=FILLED)
    expected = draws / FILLED
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    freedom = FILLED - 1
    # Its mean is `freedom` and its variance twice that: draws without replacement, or in turns, are below, a bias above.
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


# ---- Networks --------------------------------------------------------------------------------------------------------
def member(layer: nn.Module, index: int) -> nn.Linear:
    """One of the layers of an EnsembleLinear as an nn.Linear."""
    weight = layer.weight[index].detach().T
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict({"weight": weight, "bias": layer.bias[index, 0].detach()})
    return linear


@each_script("EnsembleLinear")
def test_ensemble_is_linear_layers_side_by_side(script):
    layer = script["EnsembleLinear"](3, 5, 4, CPU)
    x = torch.randn(3, 6, 5)
    torch.testing.assert_close(layer(x), torch.stack([member(layer, index)(x[index]) for index in range(3)]))


@each_script("EnsembleLinear")
def test_ensemble_starts_like_linear_layers(script):
    layer, linear = script["EnsembleLinear"](2, 400, 300, CPU), nn.Linear(400, 300)
    for weights in (*layer.weight, linear.weight):
        assert weights.abs().max().item() == pytest.approx(400**-0.5, rel=1e-3)
        assert weights.std().item() == pytest.approx((3 * 400) ** -0.5, rel=1e-2)
    for biases in (*layer.bias, linear.bias):
        assert 0.9 * 400**-0.5 < biases.abs().max() <= 400**-0.5
    assert not torch.isclose(*layer.weight).all()


@each_script("Critic")
def test_critic_is_two_stacks(script):
    critic = script["Critic"](5, 2, CPU)
    obs, actions = torch.randn(9, 5), torch.randn(9, 2)
    layers = (critic.fc1, critic.fc2, critic.fc3)
    stacks = [nn.Sequential(*(part for layer in layers for part in (member(layer, i), nn.ReLU())))[:-1] for i in range(2)]
    expected = torch.stack([stack(torch.cat([obs, actions], 1)).squeeze(1) for stack in stacks])
    torch.testing.assert_close(critic(obs, actions), expected)


@each_script("smooth")
def test_first_critic_alone_is_that_of_both(script):
    critic = script["Critic"](5, 2, CPU)
    obs, actions = torch.randn(9, 5), torch.randn(9, 2)
    torch.testing.assert_close(critic(obs, actions, first_only=True), critic(obs, actions)[0])


@each_script("QNetwork")
def test_bytes_are_seen_between_0_and_1(script):
    network = script["QNetwork"](5, 3, CPU)
    images = torch.tensor([[0, 1, 100, 254, 255]], dtype=torch.uint8)
    torch.testing.assert_close(network(images), network(torch.tensor([[0, 1 / 255, 100 / 255, 254 / 255, 1]])))


@squashed
def test_log_std_stays_in_its_range(script):
    with torch.no_grad():
        log_std = script["Actor"](5, 2, CPU)(1e6 * torch.randn(100, 5))[1]
    assert (log_std.min().item(), log_std.max().item()) == (-5, 2)


# ---- Actions ---------------------------------------------------------------------------------------------------------
@squashed
def test_log_prob_is_that_of_a_squashed_gaussian(script):
    # In float64, for the reference gets u back from the action by atanh.
    mean, log_std, scale, bias = torch.randn(50, 3).double(), torch.randn(50, 3).double() - 1, SCALE.double(), BIAS.double()
    actions, log_prob = script["sample_actions"](mean, log_std, scale)
    policy = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(), AffineTransform(bias, scale)])
    torch.testing.assert_close(log_prob, policy.log_prob(actions * scale + bias).sum(1), rtol=1e-6, atol=1e-6)


@squashed
def test_sampled_actions_have_mean_and_deviation(script):
    mean, log_std = torch.tensor([-1.0, 0, 0.5]).expand(20_000, 3), torch.tensor([-2.0, -1, 0]).expand(20_000, 3)
    u = script["sample_actions"](mean, log_std, SCALE)[0].atanh()
    torch.testing.assert_close(u.mean(0), mean[0], rtol=0, atol=0.03)
    torch.testing.assert_close(u.std(0), log_std[0].exp(), rtol=0.03, atol=0)


@pytest.mark.parametrize("sign", [-1, 1])
@squashed
def test_saturated_actions_have_finite_log_prob(script, sign):
    mean = torch.full((8, 3), 50.0 * sign, requires_grad=True)
    log_std = torch.full((8, 3), -2.0, requires_grad=True)
    actions, log_prob = script["sample_actions"](mean, log_std, SCALE)
    torch.testing.assert_close(actions, torch.full((8, 3), float(sign)))
    torch.manual_seed(0)
    u = Normal(mean, log_std.exp()).mean + log_std.exp() * torch.randn_like(mean)
    # That far out, 1 - tanh(u)^2 is 4 exp(-2 |u|).
    expected = Normal(mean, log_std.exp()).log_prob(u) - SCALE.log() - math.log(4) + 2 * u.abs()
    torch.testing.assert_close(log_prob, expected.sum(1))
    log_prob.sum().backward()
    assert mean.grad.isfinite().all()
    assert log_std.grad.isfinite().all()


@each_script("smooth")
def test_smoothing_adds_clipped_noise(script):
    actions, policy_noise, noise_clip = torch.rand(200, 3) * 2 - 1, 0.4, 0.5
    torch.manual_seed(1)
    smoothed = script["smooth"](actions, policy_noise, noise_clip)
    torch.manual_seed(1)
    noise = torch.randn_like(actions)
    expected = [
        [max(-1, min(1, a + max(-noise_clip, min(noise_clip, policy_noise * n)))) for a, n in zip(*rows, strict=True)]
        for rows in zip(actions.tolist(), noise.tolist(), strict=True)
    ]
    assert_is(smoothed, expected)
    # The arguments must have brought both limits into play.
    assert (smoothed.abs() == 1).any()
    assert ((smoothed - actions).abs() > noise_clip - 1e-6).any()


@each_script("linear_schedule")
def test_linear_schedule(script):
    shares = [script["linear_schedule"](1.0, 0.2, 40, step) for step in (0, 10, 20, 40, 41, 1000)]
    assert shares == pytest.approx([1, 0.8, 0.6, 0.2, 0.2, 0.2])
    assert script["linear_schedule"](1.0, 0.2, 0, 0) == pytest.approx(0.2)
    assert script["linear_schedule"](0.2, 0.4, 40, 20) == pytest.approx(0.3)


@each_script("epsilon_greedy")
def test_epsilon_greedy_is_random_in_each_environment_by_itself(script):
    """All four combinations of two environments, each with the probability of independent draws."""
    values = torch.tensor([[0.0, 1], [1, 0]])
    draws = torch.stack([script["epsilon_greedy"](values, torch.tensor(0.5)) for _ in range(4000)])
    greedy = draws == torch.tensor([1, 0])  # in half of the draws, and in a quarter by chance
    counts = (2 * greedy[:, 0] + greedy[:, 1]).bincount(minlength=4) / 4000
    torch.testing.assert_close(counts, torch.tensor([1, 3, 3, 9]) / 16, rtol=0, atol=0.03)


# ---- Targets and losses ----------------------------------------------------------------------------------------------
@each_script("soft_target")
def test_soft_target(script, batch):
    actual = script["soft_target"](batch.rewards, batch.terminated, batch.values, batch.log_prob, torch.tensor(0.3), 0.9)
    columns = rows(batch.rewards, batch.terminated, *batch.values, batch.log_prob)
    assert_is(actual, [r if end else r + 0.9 * (min(q1, q2) - 0.3 * log_prob) for r, end, q1, q2, log_prob in columns])


@each_script("td_target")
def test_td_target(script, batch):
    actual = script["td_target"](batch.rewards, batch.terminated, batch.values, 0.9)
    columns = rows(batch.rewards, batch.terminated, *batch.values)
    assert_is(actual, [r if end else r + 0.9 * min(q1, q2) for r, end, q1, q2 in columns])


@each_script("q_target")
def test_q_target(script, batch):
    """Of what values the target takes: the greatest, or the one of the action that the network that learns would choose."""
    values, online = torch.randn(2, 7, 3)
    for chosen_by in (values, online):
        actual = script["q_target"](batch.rewards, batch.terminated, values, chosen_by, 0.9)
        columns = zip(batch.rewards.tolist(), batch.terminated.tolist(), values.tolist(), chosen_by.tolist(), strict=True)
        assert_is(actual, [r if end else r + 0.9 * q[by.index(max(by))] for r, end, q, by in columns])
    assert (values.argmax(1) != online.argmax(1)).any()


@each_script("critic_losses")
def test_critic_losses(script, batch):
    actual = script["critic_losses"](batch.values, batch.target)
    assert_is(actual, [sum((q - target) ** 2 for q, target in rows(values, batch.target)) / 7 for values in batch.values])


@each_script("actor_loss")
def test_actor_loss(script, batch):
    actual = script["actor_loss"](batch.log_prob, batch.values, torch.tensor(0.3))
    assert_is(actual, sum(0.3 * log_prob - min(q1, q2) for log_prob, q1, q2 in rows(batch.log_prob, *batch.values)) / 7)


@each_script("alpha_loss")
def test_alpha_loss(script, batch):
    actual = script["alpha_loss"](torch.tensor(-1.3), batch.log_prob, -3.0)
    assert_is(actual, sum(-math.exp(-1.3) * (log_prob - 3) for (log_prob,) in rows(batch.log_prob)) / 7)


# ---- Networks of PPO -------------------------------------------------------------------------------------------------
def agent_of(script: dict) -> nn.Module:
    """A new Agent of a PPO script, for five observations and three actions, or for Atari."""
    sizes = (5, 3) if "numpy_policy" in script else (3,)
    return script["Agent"](*sizes, CPU)


@each_script("layer_init")
def test_agent_starts_orthogonal(script):
    agent = agent_of(script)
    gains = [2**0.5, 2**0.5, 1.0, 2**0.5, 2**0.5, 0.01] if "numpy_policy" in script else [2**0.5] * 4 + [0.01, 1.0]
    layers = [layer for layer in agent.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer, gain in zip(layers, gains, strict=True):
        singular_values = torch.linalg.svdvals(layer.weight.flatten(1))
        torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain), rtol=1e-3, atol=0)
        assert not layer.bias.any()


@each_script("numpy_policy")
def test_numpy_policy_is_the_actor(script):
    actor = agent_of(script).actor_mean
    # Biases that matter, and outputs of some size.
    nn.init.normal_(actor[4].weight)
    for layer in actor[::2]:
        nn.init.normal_(layer.bias)
    obs = torch.randn(7, 5)
    layers = [(type(layer), [parameter.detach().numpy() for parameter in layer.parameters()]) for layer in actor]
    actions = script["numpy_policy"](layers, obs.numpy())
    torch.testing.assert_close(torch.from_numpy(actions), actor(obs).detach())
    with pytest.raises(KeyError, match="ReLU"):  # and not the actions of another actor
        script["numpy_policy"]([*layers, (nn.ReLU, [])], obs.numpy())


@each_script("categorical_log_prob")
def test_agent_sees_frames_between_0_and_1(script):
    agent = agent_of(script)
    obs = torch.randint(256, (2, 84, 84, 4), dtype=torch.uint8)
    hidden = agent.network(obs.movedim(-1, 1).contiguous().double().div(255).float())
    torch.testing.assert_close(agent(obs), (agent.actor(hidden), agent.critic(hidden)[:, 0]))


@each_script("sample_actions", "categorical_log_prob")
def test_actions_have_the_frequencies_of_the_softmax(script):
    logits, draws = torch.tensor([0.0, 1, -2, 0.5]), 40_000
    actions = script["sample_actions"](logits.expand(draws, 4))
    assert actions.shape == (draws,)
    expected = logits.softmax(0)
    # Four standard deviations.
    assert ((actions.bincount(minlength=4) / draws - expected).abs() < 4 * (expected * (1 - expected) / draws).sqrt()).all()


# ---- Moments ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("offset", [0, 1e6])
@each_script("RunningMoments")
def test_running_moments_are_those_of_all_rows(script, offset, dtype):
    normal = np.random.default_rng(0).normal
    batches = [(offset + normal(size, 1 + size, (size, 2))).astype(dtype) for size in (1, 0, 3, 50, 1, 0, 200)]
    moments = script["RunningMoments"](2)
    assert np.isfinite(moments.std()).all()
    for index, batch in enumerate(batches):
        moments.update(batch)
        seen = np.concatenate(batches[: index + 1]).astype(np.float64)
        mean, std = seen.mean(axis=0), np.sqrt(seen.var(axis=0) + 1e-8)
        assert moments.count == len(seen)
        np.testing.assert_allclose(moments.mean, mean, rtol=1e-12)
        np.testing.assert_allclose(moments.std(), std, rtol=1e-8)
    rows = mean + std * np.array([[-20, 3], [0.5, 11]])
    np.testing.assert_allclose(moments.standardise(rows), [[-10, 3], [0.5, 10]], rtol=1e-6)


# ---- Advantages ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64, 100, 2048])
@each_script("discounted_sums")
def test_discounted_sums(script, steps):
    x, discounts = torch.randn(steps, 3).double(), (1.1 * torch.rand(steps, 3).double() - 0.1).clamp(min=0)
    expected, following = torch.zeros_like(x), torch.zeros(3).double()
    for step in reversed(range(steps)):
        following = expected[step] = x[step] + discounts[step] * following
    torch.testing.assert_close(script["discounted_sums"](x, discounts), expected)


@pytest.fixture
def rollout(steps) -> dict[str, torch.Tensor]:
    """Arguments of `gae`: three environments with ends of both kinds, each followed by a row that is not valid."""
    valid, terminated = torch.ones(steps + 1, 3).double(), torch.zeros(steps, 3).double()
    valid[0, 0] = 0
    for step in range(steps):
        ends = valid[step] * (torch.rand(3) < 0.3)
        valid[step + 1] = 1 - ends
        terminated[step] = ends * (torch.rand(3) < 0.5)
    rewards, values = torch.randn(steps, 3).double(), torch.randn(steps + 1, 3).double()
    return {"rewards": rewards, "values": values, "terminated": terminated, "valid": valid}


@pytest.mark.parametrize("steps", [1, 2, 7, 128, 300])
@each_script("gae")
def test_gae(script, rollout):
    actual = script["gae"](**rollout, gamma=0.9, gae_lambda=0.8)
    torch.testing.assert_close(actual, torch.from_numpy(plain_gae(**rollout, gamma=0.9, gae_lambda=0.8)))


@pytest.mark.parametrize("steps", [300])
@each_script("gae")
def test_gae_takes_no_more_from_masked_rows_than_the_bootstrap(script, rollout):
    before = script["gae"](**rollout, gamma=0.9, gae_lambda=0.8)
    masked = rollout["valid"] == 0
    rollout["rewards"][masked[:-1]] = 1e6
    rollout["terminated"][masked[:-1]] = 1
    # Not after a truncation: there the value is the bootstrap.
    after_termination = masked[1:] & (rollout["terminated"] == 1) & ~masked[:-1]
    assert after_termination.any()
    rollout["values"][1:][after_termination] = 1e6
    torch.testing.assert_close(script["gae"](**rollout, gamma=0.9, gae_lambda=0.8), before, rtol=0, atol=0)


# ---- Log-probabilities of PPO ----------------------------------------------------------------------------------------
@each_script("normal_log_prob")
def test_normal_log_prob(script):
    actions, mean, log_std = torch.randn(9, 3), torch.randn(9, 3), torch.randn(1, 3)
    expected = Normal(mean, log_std.exp().expand(9, 3)).log_prob(actions).sum(1)
    torch.testing.assert_close(script["normal_log_prob"](actions, mean, log_std), expected)


@each_script("categorical_log_prob")
def test_categorical_log_prob(script):
    logits, actions = 3 * torch.randn(9, 4), torch.randint(4, (9,))
    policy = Categorical(logits=logits)
    expected = (policy.log_prob(actions), policy.entropy())
    torch.testing.assert_close(script["categorical_log_prob"](actions, logits), expected)


# ---- Losses of PPO ---------------------------------------------------------------------------------------------------
VALID = torch.tensor([1.0, 0, 1, 1, 0, 1, 1])


def mean_of(values) -> float:
    """The mean of numbers."""
    values = list(values)
    return sum(values) / len(values)


def valid_rows(*columns: torch.Tensor) -> list[tuple[float, ...]]:
    """The `rows` where VALID is 1."""
    return rows(*(column[VALID == 1] for column in columns))


@pytest.fixture
def ppo() -> SimpleNamespace:
    """Random arguments of the losses, some of them beyond the clip."""
    log_ratio, advantages, values, old_values, returns = torch.randn(5, 7)
    return SimpleNamespace(log_ratio=log_ratio, advantages=advantages, values=values, old_values=old_values, returns=returns)


@each_script("masked_mean")
def test_masked_mean(script, ppo):
    assert_is(script["masked_mean"](ppo.values, VALID), mean_of(value for (value,) in valid_rows(ppo.values)))
    assert_is(script["masked_mean"](ppo.values, torch.zeros(7)), 0.0)


@each_script("normalise")
def test_normalise(script, ppo):
    valid = ppo.advantages[VALID == 1]
    actual = script["normalise"](ppo.advantages, VALID)[VALID == 1]
    torch.testing.assert_close(actual, (valid - valid.mean()) / (valid.std() + 1e-8))


@pytest.mark.parametrize("count", [0, 1])
@each_script("normalise")
def test_normalising_next_to_nothing_is_finite(script, ppo, count):
    valid = (torch.arange(7) < count).float()
    actual = script["normalise"](ppo.advantages, valid)
    assert actual.isfinite().all()
    assert not (actual * valid).any()


@each_script("policy_loss")
def test_policy_loss(script, ppo):
    actual = script["policy_loss"](ppo.log_ratio, ppo.advantages, VALID, 0.2)
    gains = [
        min(math.exp(log_ratio) * advantage, min(max(math.exp(log_ratio), 0.8), 1.2) * advantage)
        for log_ratio, advantage in valid_rows(ppo.log_ratio, ppo.advantages)
    ]
    assert_is(actual, -mean_of(gains))


@pytest.mark.parametrize("clip_coef", [None, 0.2])
@each_script("value_loss")
def test_value_loss(script, ppo, clip_coef):
    actual = script["value_loss"](ppo.values, ppo.old_values, ppo.returns, VALID, clip_coef)
    move = math.inf if clip_coef is None else clip_coef
    errors = [
        max((value - target) ** 2, (old + min(max(value - old, -move), move) - target) ** 2)
        for value, old, target in valid_rows(ppo.values, ppo.old_values, ppo.returns)
    ]
    assert_is(actual, 0.5 * mean_of(errors))


@each_script("kl_metrics")
def test_kl_metrics(script, ppo):
    log_ratios = [log_ratio for (log_ratio,) in valid_rows(ppo.log_ratio)]
    expected = {
        "old_approx_kl": mean_of(-log_ratio for log_ratio in log_ratios),
        "approx_kl": mean_of(math.exp(log_ratio) - 1 - log_ratio for log_ratio in log_ratios),
        "clipfrac": mean_of(float(not 0.5 <= math.exp(log_ratio) <= 1.5) for log_ratio in log_ratios),
    }
    assert 0 < expected["clipfrac"] < 1
    actual = script["kl_metrics"](ppo.log_ratio, VALID, 0.5)
    assert {name: value.item() for name, value in actual.items()} == pytest.approx(expected, rel=1e-5)


@each_script("explained_variance")
def test_explained_variance(script, ppo):
    columns = valid_rows(ppo.values, ppo.returns)
    expected = 1 - np.var([target - value for value, target in columns]) / np.var([target for _, target in columns])
    actual = script["explained_variance"](ppo.values, ppo.returns, VALID)
    assert actual.item() == pytest.approx(expected, rel=1e-5)
    assert_is(script["explained_variance"](ppo.returns + 3, ppo.returns, VALID), 1.0)
    assert script["explained_variance"](ppo.values, torch.ones(7), VALID).isfinite()


# ---- Flat networks ---------------------------------------------------------------------------------------------------
@pytest.fixture(
    params=[(name, kind) for name in TWINS for kind in ("Actor", "Critic", "Agent", "QNetwork") if kind in load(name)],
    ids="-".join,
)
def flat(request) -> SimpleNamespace:
    """A network as the twin has it, a copy of what it was before, what checkpoints know of it, and a way to call it."""
    name, kind = request.param
    script = load(name)
    network = agent_of(script) if kind == "Agent" else script[kind](5, 2, CPU)
    plain = copy.deepcopy(network)
    tensors = script["adam_tensors"]("net", dict(network.named_parameters()), torch.optim.Adam(network.parameters()))
    atari = "categorical_log_prob" in script
    obs = torch.randint(256, (6, 84, 84, 4), dtype=torch.uint8) if atari else torch.randn(6, 5)
    inputs = (obs, torch.randn(6, 2)) if kind == "Critic" else (obs,)

    def outputs(module: nn.Module, **options) -> tuple[torch.Tensor, ...]:
        """All that a module gives for the inputs."""
        found = module(*inputs, **options)
        return found if isinstance(found, tuple) else (found,)

    flat = script["Flat"]("net", network, tensors)
    return SimpleNamespace(script=script, flat=flat, network=network, plain=plain, tensors=tensors, outputs=outputs)


def unflattened(flat: nn.Module, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What belongs to each parameter, by name, of a tensor like `params`: those of convolutions have their channels last."""
    parts, end = {}, 0
    for name, shape in flat.shapes.items():
        start, end = end, end + shape.numel()
        part = tensor[start:end]
        if len(shape) == 4:
            outputs, inputs, height, width = shape
            parts[name] = part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
        else:
            parts[name] = part.view(shape)
    assert end == len(tensor)
    return parts


def test_flat_network_gives_what_the_network_gives(flat):
    torch.testing.assert_close(flat.outputs(flat.flat), flat.outputs(flat.plain))
    torch.testing.assert_close(flat.outputs(flat.network), flat.outputs(flat.plain))
    if "first_only" in signature(flat.plain.forward).parameters:
        expected = flat.outputs(flat.plain, first_only=True)
        torch.testing.assert_close(flat.outputs(flat.flat, first_only=True), expected)


def test_flat_network_has_one_parameter_and_its_gradient_is_those_of_the_network(flat):
    assert [name for name, _ in flat.flat.named_parameters()] == ["params"]
    assert flat.flat.params is flat.flat.state["params"]
    loss, expected_loss = (
        sum((output - 3).square().sum() for output in flat.outputs(module)) for module in (flat.flat, flat.plain)
    )
    (grad,) = torch.autograd.grad(loss, flat.flat.params)
    expected_loss.backward()
    expected = {name: param.grad for name, param in flat.plain.named_parameters()}
    assert all(grad.any() for grad in expected.values())
    torch.testing.assert_close(unflattened(flat.flat, grad), {name: expected[name] for name in flat.flat.shapes})
    assert all(param.grad is None and not param.requires_grad for param in flat.network.parameters())


def test_flat_parameters_are_those_of_the_network(flat):
    named = dict(flat.network.named_parameters())
    assert all(param is flat.tensors[f"net.params.{name}"] for name, param in named.items())
    torch.testing.assert_close(named, dict(flat.plain.named_parameters()), rtol=0, atol=0)


def test_flat_tensors_and_what_checkpoints_know_are_the_same_memory(flat):
    assert flat.flat.state.keys() == {"params", "exp_avg", "exp_avg_sq", "step"}
    for kind, whole in flat.flat.state.items():
        whole, names = whole.detach(), [*flat.flat.shapes]
        known = {name: flat.tensors[f"net.{kind}.{name}"].detach() for name in names}
        assert sum(name.startswith(f"net.{kind}.") for name in flat.tensors) == len(names)
        numbers = torch.arange(float(len(whole)))
        expected = dict(zip(names, numbers, strict=True)) if kind == "step" else unflattened(flat.flat, numbers)
        whole.copy_(numbers)
        torch.testing.assert_close(known, expected, rtol=0, atol=0)
        for tensor in known.values():
            tensor.add_(0.5)
        torch.testing.assert_close(whole, numbers + 0.5, rtol=0, atol=0)


def test_flat_network_without_adam_has_parameters_alone(flat):
    tensors = {f"net.params.{name}": param for name, param in flat.plain.named_parameters()}
    target = flat.script["Flat"]("net", flat.plain, tensors)
    assert target.state.keys() == {"params"}
    # Or compiled code that moves it would be that of a forward pass, with a backward that nobody calls.
    assert not target.params.requires_grad and flat.flat.params.requires_grad
    torch.testing.assert_close(target.params, flat.flat.params, rtol=0, atol=0)
    torch.testing.assert_close(flat.outputs(target), flat.outputs(flat.flat))


def test_flat_parameters_are_aligned(flat):
    """Each of those that a vector instruction could load whole begins where one may: at a multiple of 16 numbers."""
    sizes = [shape.numel() for shape in flat.flat.shapes.values()]
    even = [size % 16 == 0 for size in sizes]
    assert even == sorted(even, reverse=True)
    assert True in even
    for name, param in flat.network.named_parameters():
        assert param.numel() % 16 or param.storage_offset() % 16 == 0, name


@pytest.mark.parametrize("script", [load("ppo_atari_envpool_torchcompile")])
def test_flat_convolutions_keep_their_channels_last(script):
    agent = agent_of(script)
    expected = {name: param.detach().clone() for name, param in agent.named_parameters() if param.dim() == 4}
    optimizer = torch.optim.Adam(agent.parameters())
    tensors = script["adam_tensors"]("agent", dict(agent.named_parameters()), optimizer)
    script["Flat"]("agent", agent, tensors)
    assert len(expected) == 3
    for name, weight in expected.items():
        param = agent.get_parameter(name)
        assert torch.equal(param, weight)
        for kind in ("params", "exp_avg", "exp_avg_sq"):
            tensor = tensors[f"agent.{kind}.{name}"]
            assert tensor.shape == weight.shape
            assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
            assert tensor.stride() == weight.stride()


# ---- Optimizer -------------------------------------------------------------------------------------------------------
def flat_state(params: torch.Tensor, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The zero state of Adam for flat parameters, with steps counted in a tensor of this shape."""
    moments = {kind: torch.zeros_like(params) for kind in ("exp_avg", "exp_avg_sq")}
    return {"params": params.clone().requires_grad_(), **moments, "step": torch.zeros(counts)}


@pytest.mark.parametrize("counts", [(), (4,)], ids=["one count", "a count of each"])
@pytest.mark.parametrize(("lr", "eps"), [(0.01, 1e-8), (torch.tensor(0.01), 1e-5)])
@pytest.mark.parametrize("name", TWINS)
def test_adam_is_that_of_torch(name, lr, eps, counts):
    expected = torch.randn(13).requires_grad_()
    optimizer = torch.optim.Adam([expected], lr=0.01, eps=eps)
    state = flat_state(expected.detach(), counts)
    given = dict(state)
    for step in range(50):
        # Gradients from tiny to large, for the first steps' correction and the epsilon to matter.
        grad = torch.randn(13) * 10.0 ** (step % 10 - 8)
        load(name)["adam_step"](state, grad, lr, eps)
        expected.grad = grad.clone()
        optimizer.step()
        torch.testing.assert_close(state["params"].detach(), expected.detach(), rtol=1e-4, atol=1e-6)
    assert torch.equal(state["step"], torch.full(counts, 50.0))
    # In place: a captured graph knows addresses, and a checkpoint has views.
    assert all(state[kind] is tensor for kind, tensor in given.items())


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
@pytest.mark.parametrize("name", [name for name in TWINS if "clip_grad" in load(name)])
def test_clip_grad_is_that_of_torch(name, max_norm):
    parts = {"weight": torch.randn(4, 3), "bias": torch.randn(3), "none": torch.zeros(2)}
    params = [torch.zeros_like(part) for part in parts.values()]
    for param, part in zip(params, parts.values(), strict=True):
        param.grad = part.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    clipped = load(name)["clip_grad"](torch.cat([part.flatten() for part in parts.values()]), max_norm)
    torch.testing.assert_close(clipped, torch.cat([param.grad.flatten() for param in params]))
    assert not load(name)["clip_grad"](torch.zeros(5), max_norm).any()
