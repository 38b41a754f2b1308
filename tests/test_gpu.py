"""What only a CUDA device shows: the flags run, captured noise is noise, and no gradient step waits for the device."""

import math

import pytest
import torch
import torch._inductor.config
from conftest import SCRIPTS, assert_same_numbers, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = [(), ("--compile",), ("--cudagraphs",), ("--compile", "--cudagraphs")]
SHORT = ("--learning-starts", "200", "--total-timesteps", "300")


@pytest.mark.parametrize("flags", MODES, ids=lambda flags: "".join(flags) or "no flag")
@pytest.mark.parametrize("script", SCRIPTS)
def test_twin_on_cuda(script, flags):
    twin = run(f"{script}_torchcompile", *SHORT, *flags, cuda=True)
    assert twin["device"].type == "cuda"
    assert twin["cudagraphs"] == ("--cudagraphs" in flags)
    assert twin["updates"] == 99
    assert all(torch.isfinite(loss).all() for loss in twin["losses"].values())
    assert_noise_of_the_policy(twin)
    assert_no_wait(twin, twin["kinds"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_eager_on_cuda(script):
    eager = run(script, *SHORT, cuda=True)
    assert_noise_of_the_policy(eager)
    assert_no_wait(eager, [(True, True)] if "target_network_frequency" in eager else [(True,)])


@pytest.mark.parametrize("flags", MODES[1:], ids="".join)
@pytest.mark.parametrize("script", SCRIPTS)
def test_twin_on_cuda_computes_what_the_eager_script_does(script, flags):
    args = ("--env-id", "Reacher-v4", "--learning-starts", 64, "--total-timesteps", 85)
    eager = run(script, *args, cuda=True)
    with torch._inductor.config.patch(fallback_random=True):
        twin = run(f"{script}_torchcompile", *args, *flags, cuda=True)
    assert_same_numbers(eager, twin, atol=1e-3)  # a step of the learning rate, as in test_twins.py


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
            sample, expected = unit, torch.full_like(policy[0], run["exploration_noise"])
    assert inside.any()
    ratio = sample.std(dim=0)[inside] / expected[inside]
    assert torch.all((ratio - 1).abs() < 4 / math.sqrt(2 * 1000)), ratio


def assert_no_wait(run: dict, kinds: list[tuple[bool, ...]]) -> None:
    """Gradient steps make no call that waits for the device."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in range(10):
            run["update"](*kinds[step % len(kinds)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
