"""What only a CUDA device shows: the flags run, captured noise is noise, and no gradient step waits for the device."""

import gc
import math

import pytest
import torch
import torch._inductor.config
from conftest import (
    ACTOR_CRITIC,
    DISCRETE,
    EACH_STEP,
    SCRIPTS,
    SEEDS,
    SHORT,
    assert_same_numbers,
    play,
    profile,
    profile_shares,
    resume_with_warm_up,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = [(), ("--compile",), ("--cudagraphs",), ("--compile", "--cudagraphs")]
# What a script computes on the device: PPO's policy acts there, too.
ON_DEVICE = {"ppo_continuous_action": ("--act-device", "device")}
REACHER = ("--env-id", "Reacher-v4")
TWENTY_UPDATES = ("--learning-starts", 64, "--total-timesteps", 85)
ROLLOUTS = ("--num-minibatches", 2, "--update-epochs", 2)
# A dozen gradient steps or two, and how far parameters may be apart: a step of the learning rate, as in test_twins.py.
COMPARED = {
    **dict.fromkeys(ACTOR_CRITIC, (run, (*REACHER, *TWENTY_UPDATES), 1e-3)),
    **dict.fromkeys(DISCRETE, (run, (*EACH_STEP, *TWENTY_UPDATES), 1e-3)),
    "ppo_continuous_action": (run, (*REACHER, "--num-steps", 64, "--total-timesteps", 128, *ROLLOUTS), 3e-4),
    "ppo_atari_envpool": (play, ("--num-steps", 16, "--num-envs", 2, "--total-timesteps", 64, *ROLLOUTS), 3e-4),
}


@pytest.fixture(autouse=True)
def no_dead_graphs():
    """Collect what runs before have left: a captured graph in a reference cycle that dies during a later capture breaks it."""
    gc.collect()


@pytest.mark.parametrize("flags", MODES[1:], ids="".join)
@pytest.mark.parametrize("script", SCRIPTS)
def test_twin_on_cuda_computes_what_the_eager_script_does(script, flags):
    train, args, atol = COMPARED[script]
    args = (*args, *ON_DEVICE.get(script, ()))
    eager = train(script, *args, cuda=True)
    with torch._inductor.config.patch(fallback_random=True):
        twin = train(f"{script}_torchcompile", *args, *flags, cuda=True)
    assert_same_numbers(eager, twin, atol=atol)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_captured_run_goes_on_from_a_checkpoint(script, tmp_path):
    flags = (*ON_DEVICE.get(script, ()), "--compile", "--cudagraphs")
    resume_with_warm_up(script, *flags, cuda=True, directory=tmp_path)


@pytest.mark.parametrize("flags", MODES, ids=lambda flags: "".join(flags) or "no flag")
@pytest.mark.parametrize("script", SCRIPTS)
def test_twin_on_cuda(script, flags):
    twin = run(f"{script}_torchcompile", *SHORT[script], *ON_DEVICE.get(script, ()), *flags, cuda=True)
    assert twin["device"].type == "cuda"
    assert twin["cudagraphs"] == ("--cudagraphs" in flags)
    assert twin["updates"] >= 20
    assert all(torch.isfinite(loss).all() for loss in twin["losses"].values())
    assert_policy_is_random(twin)
    assert_batches_are_drawn_anew(twin)
    assert_no_wait(twin)


@pytest.mark.parametrize("flags", MODES, ids=lambda flags: "".join(flags) or "no flag")
@pytest.mark.parametrize("name", SEEDS)
def test_agents_on_cuda(name, flags, tmp_path):
    """They go on from a checkpoint with the same random numbers with each of the flags, and on the CPU."""
    args = (*REACHER, "--learning-starts", 64, "--num-seeds", 3, "--total-timesteps")
    run(name, *args, 66, "--save-model", directory=tmp_path)  # networks at the start are drawn by the device
    resume = ("--resume", *sorted(tmp_path.glob("runs/*/66.pt")))
    on_cpu = run(name, *args, 85, *resume, directory=tmp_path)
    together = run(name, *args, 85, *resume, *flags, cuda=True, directory=tmp_path)
    assert together["device"].type == "cuda"
    assert together["cudagraphs"] == ("--cudagraphs" in flags)
    assert together["updates"] == on_cpu["updates"] == 20
    for tensor, expected in zip(together["tensors"].values(), on_cpu["tensors"].values(), strict=True):
        torch.testing.assert_close(tensor.detach().cpu(), expected.detach(), rtol=1e-3, atol=1e-3)
    assert_no_wait(together)


@pytest.mark.parametrize("script", SCRIPTS)
def test_eager_on_cuda(script):
    eager = run(script, *SHORT[script], *ON_DEVICE.get(script, ()), cuda=True)
    assert_policy_is_random(eager)
    assert_no_wait(eager)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_profile_of_captured_graphs(script, tmp_path):
    flags = (*ON_DEVICE.get(script, ()), "--compile", "--cudagraphs")
    done = profile(f"{script}_torchcompile", *SHORT[script], *flags, cuda=True, directory=tmp_path)
    parts, kernels, operators = profile_shares(done)
    assert min(parts[name] for name in ("policy", "update", "environment", "waiting for the device", "the rest")) > 0
    assert sum(parts.values()) == pytest.approx(100, abs=0.5)
    assert min(max(kernels.values()), max(operators.values())) > 0
    assert "cudaGraphLaunch" in (tmp_path / "trace.json").read_text()


def assert_policy_is_random(run: dict) -> None:
    """What the policy draws has the distribution that it should have."""
    if "epsilon" in run:
        assert_share_of_random_actions(run)
    elif "rollout" not in run:
        assert_noise_of_the_policy(run)
    elif "rollout_actions" in run:
        assert_noise_is_added(run)
    else:
        assert_frequencies_of_the_policy(run)


def assert_share_of_random_actions(run: dict) -> None:
    """DQN's follows the tensor, though the policy was captured with another value: within four standard deviations."""
    obs = torch.zeros(1, run["obs_dim"], device=run["device"])
    with torch.no_grad():
        best = run["q_network"](obs).argmax()
    for epsilon in (0.0, 0.4, 1.0):
        run["epsilon"].fill_(epsilon)
        greedy = torch.stack([run["act"](obs)[0] == best for _ in range(1000)]).double().mean().item()
        expected = 1 - epsilon * (1 - 1 / run["num_actions"])
        assert abs(greedy - expected) <= 4 * math.sqrt(expected * (1 - expected) / 1000), (epsilon, greedy)


def assert_noise_is_added(run: dict) -> None:
    """PPO's actions are the mean and the noise that was passed, which a captured policy has to read anew at each call."""
    obs = torch.randn(run["num_envs"], run["obs_dim"], device=run["device"])
    for _ in range(100):
        noise = torch.randn(run["num_envs"], run["action_dim"], device=run["device"])
        with torch.no_grad():
            expected = run["agent"].actor_mean(obs) + noise
        torch.testing.assert_close(run["act"](obs, noise), expected, rtol=1e-4, atol=1e-4)


def assert_frequencies_of_the_policy(run: dict) -> None:
    """1000 draws of each environment have the frequencies of the softmax, within four standard deviations."""
    obs = run["rollout_obs"][0]
    draws = torch.stack([run["act"](obs)[:, 0].clone() for _ in range(1000)]).long()
    with torch.no_grad():
        expected = run["agent"](obs)[0].softmax(dim=1)
    frequencies = torch.nn.functional.one_hot(draws, run["num_actions"]).double().mean(dim=0)
    assert torch.all((frequencies - expected).abs() < 4 * (expected * (1 - expected) / 1000).sqrt()), frequencies


def assert_noise_of_the_policy(run: dict) -> None:
    """1000 draws at one observation vary as the policy says: their standard deviation is within four of its own."""
    obs = torch.zeros(1, run["obs_dim"], device=run["device"])
    # Outside of no_grad, as in training: the grad mode is something that compiled code depends on.
    draws = torch.stack([run["act"](obs)[0].clone() for _ in range(1000)])
    with torch.no_grad():
        unit = (draws - run["action_bias"]) / run["action_scale"]
        policy = run["actor"](obs)
        if isinstance(policy, tuple):  # SAC: a Gaussian before the tanh
            inside = unit.abs().amax(dim=0) < 0.9999
            sample, expected = torch.atanh(unit), policy[1][0].exp()
        else:  # TD3: the exploration noise, cut at the bounds
            inside = unit.abs().amax(dim=0) < 1
            sample, expected = unit, torch.full_like(policy[0], run["args"].exploration_noise)
    assert inside.any()
    ratio = sample.std(dim=0)[inside] / expected[inside]
    assert torch.all((ratio - 1).abs() < 4 / math.sqrt(2 * 1000)), ratio


def gradient_steps(run: dict) -> list[tuple]:
    """The arguments of ten calls of `update`."""
    if "rollout" in run:
        return [(indices,) for indices in torch.arange(run["batch_size"], device=run["device"]).split(run["minibatch_size"])]
    eager = [(True, True)] if run["args"].exp_name.startswith("sac") else [(True,)]
    kinds = run.get("kinds", eager)
    return [kinds[step % len(kinds)] for step in range(10)]


def assert_batches_are_drawn_anew(run: dict) -> None:
    """Off-policy: two gradient steps from the same parameters have other batches, and so other values."""
    if "rollout" in run:
        return
    before = {name: tensor.detach().clone() for name, tensor in run["tensors"].items()}
    values = []
    for _ in range(2):
        run["update"](*gradient_steps(run)[0])
        values.append(run["losses"]["q_values" if "q_values" in run["losses"] else "qf1_values"].clone())
        for name, tensor in run["tensors"].items():
            tensor.detach().copy_(before[name])
    assert not torch.equal(*values)


def assert_no_wait(run: dict) -> None:
    """Gradient steps make no call that waits for the device; nor does what prepares them."""
    steps = gradient_steps(run)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        if "prepare" in run:
            run["prepare"]()
        for step in steps:
            run["update"](*step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
