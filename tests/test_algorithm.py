"""Networks, distributions, moments and optimizers of the scripts against slow, obvious references."""

import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import EACH_STEP, TWINS, changed, having, load, play
from torch import nn
from torch.distributions import Categorical, Normal

CPU = torch.device("cpu")


def each_script(passage: str):
    """Run a test with every eager script that has a passage; twins have these definitions to the letter."""
    scripts = [pytest.param(load(name), id=name) for name in having(passage) if name not in TWINS]
    return pytest.mark.parametrize("script", scripts)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- Networks ----------------------------------------------------------------------------------------------
@each_script("class Critic")
def test_critic_is_two_stacks_of_layers_that_start_as_linear_ones_do(script):
    layer, linear = script["EnsembleLinear"](2, 400, 300, CPU), nn.Linear(400, 300)
    for params in (*layer.weight, *layer.bias, linear.weight, linear.bias):
        assert 0.9 * 400**-0.5 < params.abs().max() <= 400**-0.5
        assert params.std().item() == pytest.approx((3 * 400) ** -0.5, rel=0.1)
    assert not torch.isclose(*layer.weight).all()
    critic = script["Critic"](5, 2, CPU)
    obs, actions = torch.randn(9, 5), torch.randn(9, 2)
    for index in range(2):
        x = torch.cat([obs, actions], 1)
        for layer in (critic.fc1, critic.fc2, critic.fc3):
            x = nn.functional.linear(x, layer.weight[index].T, layer.bias[index, 0])
            x = x if layer is critic.fc3 else x.relu()
        torch.testing.assert_close(critic(obs, actions)[index], x[:, 0])


@each_script("class QNetwork")
def test_bytes_are_seen_between_0_and_1(script):
    network, images = script["QNetwork"](5, 3, CPU), torch.tensor([[0, 1, 100, 254, 255]], dtype=torch.uint8)
    torch.testing.assert_close(network(images), network(images.double().div(255).float()))


def agent_of(script: dict) -> nn.Module:
    """A new Agent of a PPO script, for five observations and three actions, or for Atari."""
    return script["Agent"](3, CPU) if "Games" in script else script["Agent"](5, 3, CPU)


@each_script("class Games")
def test_agent_sees_frames_between_0_and_1(script):
    agent, obs = agent_of(script), torch.randint(256, (2, 84, 84, 4), dtype=torch.uint8)
    hidden = agent.network(obs.movedim(-1, 1).contiguous().double().div(255).float())
    torch.testing.assert_close(agent(obs), (agent.actor(hidden), agent.critic(hidden)[:, 0]))


@each_script("def layer_init(")
def test_agent_starts_orthogonal(script):
    agent, root = agent_of(script), 2**0.5
    gains = [root, root, root, root, 0.01, 1.0] if "Games" in script else [root, root, 1.0, root, root, 0.01]
    layers = [layer for layer in agent.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer, gain in zip(layers, gains, strict=True):
        singular_values = torch.linalg.svdvals(layer.weight.flatten(1))
        torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain), rtol=1e-3, atol=0)
        assert not layer.bias.any()


# ---- Actions and moments -----------------------------------------------------------------------------------
@each_script("def sample_actions(")
def test_log_std_stays_in_its_range_and_saturated_actions_have_finite_log_prob(script):
    log_std = script["Actor"](5, 2, CPU)(1e6 * torch.randn(100, 5))[1]
    assert (log_std.min().item(), log_std.max().item()) == (-5, 2)
    sign = torch.tensor([[-1.0, 1, -1], [1, 1, 1]])
    mean, log_std = (50 * sign).requires_grad_(), torch.full((2, 3), -2.0, requires_grad=True)
    torch.manual_seed(0)
    actions, log_prob = script["sample_actions"](mean, log_std)
    torch.testing.assert_close(actions, sign)
    torch.manual_seed(0)
    u = mean + log_std.exp() * torch.randn_like(mean)
    # That far out, 1 - tanh(u)^2 is 4 exp(-2 |u|).
    expected = Normal(mean, log_std.exp()).log_prob(u) - math.log(4) + 2 * u.abs()
    torch.testing.assert_close(log_prob, expected.sum(1))
    log_prob.sum().backward()
    assert mean.grad.isfinite().all() and log_std.grad.isfinite().all()


@each_script("nvec: list[int]")
def test_an_action_of_several_parts_has_their_log_probs_and_entropies(script):
    nvec, logits = [3, 4], torch.randn(20, 7)
    actions = torch.stack([torch.randint(n, (20,)) for n in nvec], dim=1)
    parts = [Categorical(logits=part) for part in logits.split(nvec, dim=1)]
    log_prob = sum(part.log_prob(action) for part, action in zip(parts, actions.unbind(1), strict=True))
    found = script["categorical_log_prob"](actions.float(), logits, nvec)
    torch.testing.assert_close(found, (log_prob, sum(part.entropy() for part in parts)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@each_script("class RunningMoments")
def test_running_moments_are_those_of_all_rows(script, dtype):
    normal, moments = np.random.default_rng(0).normal, script["RunningMoments"](2)
    assert np.isfinite(moments.std()).all()
    batches = [(1e6 + normal(n, 1 + n, (n, 2))).astype(dtype) for n in (1, 0, 3, 50, 1, 0, 200)]
    for index, batch in enumerate(batches):
        moments.update(batch)
        seen = np.concatenate(batches[: index + 1]).astype(np.float64)
        mean, std = seen.mean(axis=0), np.sqrt(seen.var(axis=0) + 1e-8)
        assert moments.count == len(seen)
        np.testing.assert_allclose(moments.mean, mean, rtol=1e-12)
        np.testing.assert_allclose(moments.std(), std, rtol=1e-8)
    rows = mean + std * np.array([[-20, 3], [0.5, 11]])
    np.testing.assert_allclose(moments.standardise(rows), [[-10, 3], [0.5, 10]], rtol=1e-6)


# ---- Flat networks and their optimizer ---------------------------------------------------------------------
WIDTHS = {"Actor": [5], "Critic": [5, 2], "Agent": [5], "QNetwork": [5]}  # of inputs
KINDS = [(name, kind) for name in TWINS for kind in WIDTHS if kind in load(name)]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_network_and_its_flat_one_have_the_same_memory(name, kind):
    """So a checkpoint has the names of the network, and the flat one computes with what is loaded."""
    script = load(name)
    network = agent_of(script) if kind == "Agent" else script[kind](5, 2, CPU)
    inputs = [torch.randn(7, width) for width in WIDTHS[kind]]
    inputs = [torch.randint(256, (7, 84, 84, 4), dtype=torch.uint8)] if "Games" in script else inputs
    plain = copy.deepcopy(network)
    flat, target = script["Flat"](network), script["Flat"](copy.deepcopy(plain).requires_grad_(False))
    assert not any(param.requires_grad for param in network.parameters())
    # Compiled code that moves a target would else be a forward pass, with a backward that nobody calls.
    assert flat.params.requires_grad and not target.params.requires_grad
    for param in plain.parameters():
        param.data += 0.1 * torch.randn_like(param)
    network.load_state_dict(plain.state_dict())
    torch.testing.assert_close(flat(*inputs), plain(*inputs))
    # Each that a vector instruction could load whole begins where one may: at a multiple of 16 numbers.
    even = [shape.numel() % 16 == 0 for shape in flat.shapes.values()]
    assert even == sorted(even, reverse=True) and True in even
    for key, param in network.named_parameters():
        assert param.numel() % 16 or param.storage_offset() % 16 == 0, key
        if param.dim() == 4:  # channels last, or PyTorch would convert a convolution's weights at each call
            assert param.is_contiguous(memory_format=torch.channels_last), key


@pytest.mark.parametrize(("lr", "eps", "max_norm"), [(0.01, 1e-8, math.inf), (torch.tensor(0.01), 1e-5, 1.0)])
def test_adam_is_that_of_torch(lr, eps, max_norm):
    """Of one twin, for all have it to the letter."""
    expected = torch.randn(13).requires_grad_()
    params = nn.Parameter(expected.detach().clone())
    optimizer = torch.optim.Adam([expected], lr=0.01, eps=eps)
    adam = load(TWINS[0])["Adam"](params, lr, eps=eps, max_norm=max_norm)
    for step in range(50):
        # From none and tiny to large: for the first steps' correction, epsilon and clipping to matter.
        expected.grad = torch.randn(13) * (10.0 ** (step % 10 - 8) if step % 7 else 0)
        adam.minimize((params * expected.grad).sum())
        nn.utils.clip_grad_norm_([expected], max_norm)
        optimizer.step()
        torch.testing.assert_close(params.detach(), expected.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(adam.state_dict(), dict(optimizer.state[expected]), rtol=1e-4, atol=1e-8)


# ---- Policies in NumPy -------------------------------------------------------------------------------------
DQN, CHOICES, _, PPO, *_ = TWINS
ARGS = {DQN: (*EACH_STEP, "--batch-size", 4, "--learning-starts", 10, "--total-timesteps", 42)}
ARGS[PPO] = ARGS[CHOICES] = (
    "--num-minibatches",
    1,
    "--update-epochs",
    1,
    "--num-steps",
    16,
    "--total-timesteps",
    200,
)
OWN = """own = type("Own", (nn.Sequential,), {"forward": lambda s, x: 2 * nn.Sequential.forward(s, x)})
        self.actor_mean = own("""
BUFFER = "self.fc3 = nn.Linear(84, num_actions, device=device); self.register_buffer('b', torch.zeros(()))"
# What acts: in a twin, with so many environments, and with a network that is another in a passage.
POLICIES = [
    ("numpy", DQN, 64),
    ("torch", DQN, 65),
    ("numpy", PPO, 256),
    ("numpy", CHOICES, 256),
    ("torch", CHOICES, 257),
    ("torch", PPO, 257),
    ("torch", DQN, 1, "F.relu(self.fc1(x))", "torch.tanh(self.fc1(x))"),
    ("torch", DQN, 1, "nn.Linear(120, 84, ", "nn.Linear(120, 84, bias=False, "),
    ("torch", DQN, 1, "self.fc3 = nn.Linear(84, num_actions, device=device)", BUFFER),
    ("torch", DQN, 1, "if obs.dtype == torch.uint8 else obs", "if False else obs.clamp(-1, 1)"),
    ("torch", PPO, 1, "nn.Tanh(),", "nn.ReLU(),"),
    ("torch", PPO, 1, "self.actor_logstd =", "self.actor_mean[2].bias = None; self.actor_logstd ="),
    ("torch", PPO, 1, "self.actor_mean = nn.Sequential(", OWN),
]


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_numpy_acts_in_few_environments_with_networks_that_it_knows(case, capfd):
    how, twin, num_envs, *passages = case
    args = ("--buffer-size", 1000) if twin == DQN else ("--num-steps", 2)
    args = (*ARGS[twin], *args, "--num-envs", num_envs, "--total-timesteps", 3 * num_envs + 42)
    with changed(twin, *passages) if passages else nullcontext():
        result = play(twin, *args)
    assert result["policy"] is result[f"{how}_policy"]
    assert capfd.readouterr().err.count("acting in PyTorch") == (how == "torch")


def test_policies_in_numpy_are_the_networks():
    """Of DQN, that has a copy of the parameters, after each gradient step."""
    compare = 'globals().setdefault("equal", []).append(torch.equal(host_params, flat_network.params))'
    with changed(DQN, "actions = policy(obs)", f"{compare}; actions = policy(obs)"):
        dqn = play(DQN, *ARGS[DQN], "--num-envs", 3)
    ppo, choices = (play(name, *ARGS[name]) for name in (PPO, CHOICES))
    assert len(dqn["equal"]) == 14 and all(dqn["equal"])
    pairs = (ppo, ppo["agent"].actor_mean), (choices, choices["agent"].actor)
    for param in (*dqn["host_network"].parameters(), *pairs[0][1].parameters(), *pairs[1][1].parameters()):
        param.data.normal_()  # biases that matter, and outputs of some size
    dqn["epsilon"].fill_(0)
    obs = torch.randn(100, 4)
    assert np.array_equal(dqn["numpy_policy"](obs.numpy()), dqn["host_network"](obs).argmax(dim=1))
    for run, network in pairs:
        for policy in (run["numpy_policy"], run["torch_policy"]):
            torch.testing.assert_close(torch.from_numpy(policy(obs.numpy())), network(obs))
