"""The pure functions of the scripts against slow, obvious references."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import TWINS, having, load
from torch import nn
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

CPU = torch.device("cpu")
SCALE, BIAS = torch.tensor([0.5, 3.0, 1.0]), torch.tensor([0.0, -1.0, 7.0])


def each_script(function: str):
    """Run a test with `function` of every script that has one."""
    return pytest.mark.parametrize("script", [pytest.param(load(name), id=name) for name in having(function)])


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
    row_dim = 2 * OBS_DIM + ACTION_DIM + 2
    buffer = torch.arange(2 * FILLED)[:, None] * 100.0 + torch.arange(row_dim)
    return script["sample_batch"](buffer, torch.tensor(FILLED), batch_size, OBS_DIM, ACTION_DIM)


@each_script("sample_batch")
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


@each_script("first_value")
def test_first_value_is_that_of_the_first_critic(script):
    critic = script["Critic"](5, 2, CPU)
    obs, actions = torch.randn(9, 5), torch.randn(9, 2)
    torch.testing.assert_close(script["first_value"](critic, obs, actions), critic(obs, actions)[0])


@each_script("sample_actions")
def test_log_std_stays_in_its_range(script):
    with torch.no_grad():
        log_std = script["Actor"](5, 2, CPU)(1e6 * torch.randn(100, 5))[1]
    assert (log_std.min().item(), log_std.max().item()) == (-5, 2)


# ---- Actions ---------------------------------------------------------------------------------------------------------
@each_script("sample_actions")
def test_log_prob_is_that_of_a_squashed_gaussian(script):
    # In float64, for the reference gets u back from the action by atanh.
    mean, log_std, scale, bias = torch.randn(50, 3).double(), torch.randn(50, 3).double() - 1, SCALE.double(), BIAS.double()
    actions, log_prob = script["sample_actions"](mean, log_std, scale, bias)
    policy = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(), AffineTransform(bias, scale)])
    torch.testing.assert_close(log_prob, policy.log_prob(actions).sum(1), rtol=1e-6, atol=1e-6)


@each_script("sample_actions")
def test_sampled_actions_have_mean_and_deviation(script):
    mean, log_std = torch.tensor([-1.0, 0, 0.5]).expand(20_000, 3), torch.tensor([-2.0, -1, 0]).expand(20_000, 3)
    u = ((script["sample_actions"](mean, log_std, SCALE, BIAS)[0] - BIAS) / SCALE).atanh()
    torch.testing.assert_close(u.mean(0), mean[0], rtol=0, atol=0.03)
    torch.testing.assert_close(u.std(0), log_std[0].exp(), rtol=0.03, atol=0)


@pytest.mark.parametrize("sign", [-1, 1])
@each_script("sample_actions")
def test_saturated_actions_have_finite_log_prob(script, sign):
    mean = torch.full((8, 3), 50.0 * sign, requires_grad=True)
    log_std = torch.full((8, 3), -2.0, requires_grad=True)
    actions, log_prob = script["sample_actions"](mean, log_std, SCALE, BIAS)
    torch.testing.assert_close(actions, (BIAS + sign * SCALE).expand(8, 3))
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


# ---- Optimizer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TWINS)
def test_adam_is_that_of_torch(name):
    params = {"weight": torch.randn(4, 3), "bias": torch.randn(())}
    expected = {key: value.clone().requires_grad_() for key, value in params.items()}
    optimizer = torch.optim.Adam(expected.values(), lr=0.01)
    state = load(name)["adam_state"](params)
    for step in range(50):
        # Gradients from tiny to large, for the first steps' correction and the epsilon to matter.
        grads = {key: torch.randn_like(value) * 10.0 ** (step % 10 - 8) for key, value in params.items()}
        load(name)["adam_step"](state, grads, 0.01)
        for key, value in expected.items():
            value.grad = grads[key].clone()
        optimizer.step()
        for key, value in expected.items():
            torch.testing.assert_close(params[key], value.detach(), rtol=1e-4, atol=1e-6)
