"""Networks, distributions, moments and optimizers of the scripts against slow, obvious references."""

import math

import conftest
import numpy as np
import pytest
import torch
from conftest import ATARI, DQN, EACH_STEP, MEMORY, PQN, Q_LEARNING, SCRIPTS, TWINS, load, play
from torch import nn
from torch.distributions import Categorical, Normal

CPU = torch.device("cpu")


def each_script(*definitions: str, of: list[str] = SCRIPTS):
    """Run a test with every eager script that has these; twins have them to the letter."""
    scripts = [name for name in SCRIPTS if name in of and all(title in load(name) for title in definitions)]
    return pytest.mark.parametrize("script", [pytest.param(load(name), id=name) for name in scripts])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- Networks ----------------------------------------------------------------------------------------------
@each_script("Agent", of=ATARI)
def test_agent_sees_frames_between_0_and_1(script):
    agent = script["Agent"](3, CPU)
    obs = torch.randint(256, (2, 84, 84, agent.network[0].in_channels), dtype=torch.uint8)
    hidden, recall = agent.network(obs.movedim(-1, 1).contiguous().double().div(255).float()), ()
    if "LSTM" in script:
        obs, recall = obs[None], (torch.ones(1, 2, 1), torch.randn(2, 256))
        hidden, _ = agent.lstm(hidden[None], *recall)
    torch.testing.assert_close(agent(obs, *recall)[:2], (agent.actor(hidden), agent.critic(hidden)))


@pytest.mark.parametrize("name", MEMORY)
def test_lstm_and_its_gradients_are_those_of_torch_with_a_memory_that_ends(name):
    ours, plain = load(name)["LSTM"](7, 5, CPU), nn.LSTM(7, 5)
    nn.init.normal_(ours.input.bias)
    params = [ours.input.weight, ours.recurrent.weight, ours.input.bias]
    theirs = [plain.weight_ih_l0, plain.weight_hh_l0, plain.bias_ih_l0]
    for param, other in zip([*params, torch.zeros(20)], [*theirs, plain.bias_hh_l0], strict=True):
        other.data.copy_(param)
    x, keep, memory = torch.randn(9, 3, 7), torch.rand(9, 3, 1) > 0.3, torch.randn(3, 10)
    x, memory, keep[0, 0] = x.requires_grad_(), memory.requires_grad_(), True
    expected, state = [], memory
    for inputs, kept in zip(x, keep, strict=True):
        state = [part[None].contiguous() for part in (state * kept).chunk(2, dim=1)]
        hidden, state = plain(inputs[None], state)
        state = torch.cat([part[0] for part in state], dim=1)
        expected.append(hidden[0])
    expected, (got, left) = torch.stack(expected), ours(x, keep.float(), memory)
    torch.testing.assert_close((got, left), (expected, state))
    weights, others = torch.randn_like(got), torch.randn_like(left)
    gradients = torch.autograd.grad((got * weights).sum() + (left * others).sum(), [x, memory, *params])
    by_hand = torch.autograd.grad((expected * weights).sum() + (state * others).sum(), [x, memory, *theirs])
    torch.testing.assert_close(gradients, by_hand, rtol=1e-5, atol=1e-5)


# ---- Actions and moments -----------------------------------------------------------------------------------
@each_script("sample_actions")
def test_saturated_actions_have_finite_log_prob(script):
    sign = torch.tensor([[-1.0, 1, -1], [1, 1, 1]])
    mean, log_std = (50 * sign).requires_grad_(), torch.full((2, 3), -2.0, requires_grad=True)
    torch.manual_seed(0)
    actions, log_prob = script["sample_actions"](mean, log_std)
    torch.manual_seed(0)
    u = mean + log_std.exp() * torch.randn_like(mean)
    # That far out, 1 - tanh(u)^2 is 4 exp(-2 |u|).
    expected = Normal(mean, log_std.exp()).log_prob(u) - math.log(4) + 2 * u.abs()
    torch.testing.assert_close((actions, log_prob), (sign, expected.sum(1, keepdim=True)))
    log_prob.sum().backward()
    assert mean.grad.isfinite().all() and log_std.grad.isfinite().all()


@each_script("categorical_log_prob", of=conftest.NOT_ATARI)
def test_an_action_of_several_parts_has_their_log_probs_and_entropies(script):
    nvec, logits = [3, 4], torch.randn(20, 7)
    actions = torch.stack([torch.randint(n, (20,)) for n in nvec], dim=1)
    parts = [Categorical(logits=part) for part in logits.split(nvec, dim=1)]
    log_prob = sum(part.log_prob(action) for part, action in zip(parts, actions.unbind(1), strict=True))
    entropy = sum(part.entropy() for part in parts)
    found = script["categorical_log_prob"](actions.float(), logits, nvec)
    torch.testing.assert_close(found, (log_prob[:, None], entropy[:, None]))


@each_script("RunningMoments")
def test_running_moments_are_those_of_all_rows(script):
    """Also of values whose mean is far larger than their deviation, and of float32."""
    normal, moments = np.random.default_rng(0).normal, script["RunningMoments"](2)
    assert np.isfinite(moments.std()).all()
    batches = [(1e6 + normal(n, 1 + n, (n, 2))).astype(np.float32) for n in (1, 3, 50, 1, 200)]
    for index, batch in enumerate(batches):
        moments.update(batch)
        seen = np.concatenate(batches[: index + 1]).astype(np.float64)
        mean, std = seen.mean(axis=0), np.sqrt(seen.var(axis=0) + 1e-8)
        assert moments.count == len(seen)
        np.testing.assert_allclose(moments.mean, mean, rtol=1e-12)
        np.testing.assert_allclose(moments.std(), std, rtol=1e-8)
    rows = mean + std * np.array([[-20, 3], [0.5, 11]])
    np.testing.assert_allclose(moments.standardise(rows), [[-10, 3], [0.5, 10]], rtol=1e-6)


@each_script("EmpiricalNormalization", "project")
def test_float32_is_enough_for_many_steps_and_any_support(script):
    """tests/test_off_policy.py has both functions on a few rows."""
    normalizer = script["EmpiricalNormalization"](3, CPU)
    normalizer.update(torch.randn(50, 3))
    normalizer.count.fill_(10**9)  # after which float32 would round what a batch moves the mean by
    before, share = normalizer.mean.clone(), 100 / (10**9 + 100)
    normalizer.update(torch.full((100, 3), 1000.0))
    torch.testing.assert_close(normalizer.mean - before, share * (1000 - before), rtol=1e-4, atol=0)
    for low, high in ((-1, 2), (-10, 10), (0, 1e3), (5000, 5005)):  # of which float32 has no exact steps
        support = torch.linspace(low, high, 101)
        actual = script["project"](torch.full((1, 101), 1 / 101), support[None], support)
        torch.testing.assert_close(actual.sum(), torch.tensor(1.0))
        assert actual.min() >= 0
        atoms = torch.stack([support, support.where(support < high, math.nan)])
        nans = script["project"](torch.full((2, 101), 1 / 101), atoms, support).isnan().any(1)
        assert nans.tolist() == [False, True]  # for the loss to tell


# ---- Optimizers --------------------------------------------------------------------------------------------
ADAMS = [("Adam", 0.01, 1e-8, {}), ("AdamW", 0.01, 1e-8, {"decay": 0.0}), ("RAdam", 0.01, 1e-8, {})]
ADAMS += [(kind, torch.tensor(0.01), 1e-5, {"max_norm": 1.0}) for kind in ("Adam", "RAdam")]
ADAMS += [("AdamW", torch.tensor(0.01), 1e-5, {"decay": 0.3, "betas": (0.9, 0.95)})]


@pytest.mark.parametrize(("kind", "lr", "eps", "options"), ADAMS)
def test_adam_is_that_of_torch(kind, lr, eps, options):
    """Of one twin, for all that have it have it to the letter."""
    expected = torch.randn(13).requires_grad_()
    params = nn.Parameter(expected.detach().clone())
    decay, betas = options.get("decay", 0.0), options.get("betas", (0.9, 0.999))
    plain = getattr(torch.optim, kind)([expected], lr=0.01, betas=betas, eps=eps, weight_decay=decay)
    owner = next(load(name) for name in TWINS if kind in load(name))
    flat = owner[kind](params, lr, eps=eps, **options)
    for step in range(50):
        # From none and tiny to large: for the first steps' correction, epsilon and clipping to matter.
        expected.grad = torch.randn(13) * (10.0 ** (step % 10 - 8) if step % 7 else 0)
        flat.minimize((params * expected.grad).sum())
        nn.utils.clip_grad_norm_([expected], options.get("max_norm", math.inf))
        plain.step()
        torch.testing.assert_close(params.detach(), expected.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(flat.state_dict(), dict(plain.state[expected]), rtol=1e-4, atol=1e-8)


# ---- Policies in NumPy -------------------------------------------------------------------------------------
CHOICES, PPO, PQN_TWIN = "ppo_torchcompile", "ppo_continuous_action_torchcompile", "pqn_torchcompile"
ONCE = ("--num-minibatches", 1, "--update-epochs", 1, "--num-steps", 2)
ARGS = dict.fromkeys((PPO, CHOICES, PQN_TWIN), ONCE)
ARGS |= dict.fromkeys(DQN, (*EACH_STEP, "--batch-size", 4, "--learning-starts", 10, "--buffer-size", 1000))
OWN = """own = type("Own", (nn.Sequential,), {"forward": lambda s, x: 2 * nn.Sequential.forward(s, x)})
        self.actor_mean = own("""
# Twins, whether they act in PyTorch, with so many environments and a network that is another in a passage.
POLICIES = [
    (DQN[1], False, 64),
    (DQN[1], True, 65),
    (PQN_TWIN, False, 64),
    (PPO, False, 256),
    (PPO, True, 257),
    (CHOICES, False, 256),
    (DQN[1], True, 1, "F.relu(self.fc1(obs))", "F.relu(self.fc1(obs.clamp(-1, 1)))"),
    (PQN_TWIN, True, 1, "nn.ReLU(),", "nn.Tanh(),"),
    (PQN_TWIN, False, 1, "nn.LayerNorm(84, ", "nn.LayerNorm(84, eps=0.5, "),
    (PPO, True, 1, "nn.Tanh(),", "nn.ReLU(),"),
    (PPO, True, 1, "self.actor_mean = nn.Sequential(", OWN),
]


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_a_policy_is_its_network_in_numpy_too_which_acts_where_it_knows_it(case, capfd, tmp_path):
    twin, in_pytorch, num_envs, *passages = case
    greedy = ("--start-e", 0, "--end-e", 0) if twin in Q_LEARNING else ()
    args = (*ARGS[twin], *greedy, "--num-envs", num_envs, "--learning-rate")
    with conftest.changed(twin, *passages):
        play(twin, *args, 0.1, "--total-timesteps", 3 * num_envs + 42, *conftest.SAVED, directory=tmp_path)
        capfd.readouterr()
        # Nothing is learnt here: the policy in NumPy is that of the network at the start of a rollout.
        rate, folder = 0.1 if twin in DQN else 0, conftest.checkpoint(tmp_path).parent
        result = play(twin, *args, rate, "--resume", folder, "--total-timesteps", 9 * num_envs + 42)
    assert capfd.readouterr().err.count("acting in PyTorch") == in_pytorch
    network = result["state"]["q_network" if twin in Q_LEARNING else "agent"]
    obs = torch.randn(num_envs, 4)
    with torch.no_grad():
        expected = network(obs) if twin in Q_LEARNING else network(obs)[0]
        expected = expected.argmax(dim=1) if twin in DQN else expected
    torch.testing.assert_close(torch.from_numpy(result["policy"](obs.numpy())), expected)


@pytest.mark.parametrize(("eager", "twin"), [DQN, PQN[:2]])
def test_a_policy_in_numpy_is_that_of_the_last_gradient_step(eager, twin):
    """By a learning rate with which each step, or rollout, prefers other actions."""
    args = (*ARGS[twin], "--num-envs", 1, "--learning-rate", 1, "--start-e", 0, "--end-e", 0)
    with conftest.draws_of_a_twin(eager):
        expected = play(eager, *args, "--total-timesteps", 60)
    runs = expected, play(twin, *args, "--total-timesteps", 60)
    taken, others = (np.array(conftest.instances(run)[0].actions) for run in runs)
    assert np.array_equal(taken, others) and len(np.unique(taken[20:])) > 1
