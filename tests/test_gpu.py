"""What only a CUDA device shows: the flags run, captured noise is noise, no gradient step waits."""

import copy
import gc
import inspect
from functools import partial

import conftest
import numpy as np
import pytest
import torch
import torch._inductor.config
from conftest import (
    ATARI,
    DQN,
    MEMORY,
    ON_POLICY,
    Q_LEARNING,
    RAINBOW,
    algorithm,
    assert_same_numbers,
    changed,
    draws_of_a_twin,
    play,
    run,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BOTH = ("--compile", "--cudagraphs")
MODES = [(), ("--compile",), ("--cudagraphs",), BOTH]
modes = pytest.mark.parametrize("flags", MODES, ids=lambda flags: "".join(flags) or "no flag")
each = pytest.mark.parametrize("script", conftest.SCRIPTS)
REACHER = ("--env-id", "Reacher-v4", "--learning-starts", 64, "--total-timesteps")
ROLLOUTS = ("--num-minibatches", 2, "--update-epochs", 2, "--num-envs")
CHOICES = ("--num-envs", 65, "--train-frequency", 65, "--target-network-frequency", 195)
CHOICES += ("--learning-starts", 65, "--total-timesteps", 1365)
# Some 8 to 21 gradient steps, and how far parameters may be apart: a step of the learning rate, as in
# test_twins.py. With so many environments the policies of PPO and DQN are PyTorch's, too.
MANY = (*ROLLOUTS, 258, "--num-steps", 4, "--total-timesteps", 2500)
GAMES = ("--num-envs", 2, "--train-frequency", 2, "--target-network-frequency", 6, "--batch-size", 8)
GAMES += ("--buffer-size", 200, "--learning-starts", 20, "--total-timesteps", 60)
RUNS = {
    (False, "continuous"): (run, (*REACHER, 85), 1e-3),
    (False, "discrete"): (play, CHOICES, 1e-3),
    (False, "atari"): (play, GAMES, 3e-4),
    (True, "continuous"): (play, MANY, 3e-4),
    (True, "discrete"): (play, MANY, 3e-4),
    (True, "on device"): (
        run,
        (*ROLLOUTS, 64, "--num-steps", 8, "--log-every", 512, "--total-timesteps", 2048),
        3e-4,
    ),
    (True, "atari"): (play, (*ROLLOUTS, 2, "--num-steps", 16, "--total-timesteps", 64), 3e-4),
}
# What share of a tensor of compiled code may be further apart: on an H100, of the first tensor of SAC that
# was not close, 2 of 65,536 weights by some 4 steps.
FEW = 1e-4


def how(script: str) -> tuple:
    """How to train with a script, its arguments, and how far parameters may be apart."""
    return RUNS[algorithm(script).on_policy, algorithm(script).actions]


@pytest.fixture(autouse=True)
def sound_graphs(monkeypatch):
    """Refuse a replay that would use memory that is no longer there, where PyTorch can tell (2.13)."""
    gc.collect()  # a captured graph in a cycle that dies during a later capture breaks it
    # By default it is TF32, in which eager and compiled code differ.
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")  # as LSTMs set and would leave it
    if "check_input_liveness" in inspect.signature(torch.cuda.graph.__init__).parameters:
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, check_input_liveness=True))


@modes
@pytest.mark.parametrize("script", [*conftest.SCRIPTS, conftest.ON_DEVICE[0]])
def test_twin_computes_what_the_eager_script_does_and_goes_on(script, flags, tmp_path):
    (train, args, atol), options = how(script), {"cuda": True, "directory": tmp_path}
    with draws_of_a_twin(script):
        eager = train(script, *args, cuda=True)
    # Compiled code has random numbers of its own on a GPU. This copy draws what the eager script draws; the
    # script sets the option for the whole process, so it is put back.
    drawn = ('fallback_random = device.type == "cpu"', "fallback_random = True")
    with torch._inductor.config.patch(fallback_random=True), changed(f"{script}_torchcompile", *drawn):
        twin = train(f"{script}_torchcompile", *args, *flags, *conftest.SAVED, **options)
        if flags == BOTH:
            more = (*args, "--resume", twin["folder"], "--total-timesteps", 2 * args[-1])
            assert train(f"{script}_torchcompile", *more, **options)["updates"] > twin["updates"]
    assert twin["device"].type == "cuda"
    assert twin["summary"]["cudagraphs"] == ("--cudagraphs" in flags)
    assert_same_numbers(eager, twin, rtol=1e-3, atol=atol, share=FEW if "--compile" in flags else 0)
    for result in (eager, twin):
        assert_no_wait(result)


@each
def test_compiled_random_numbers_are_captured(script):
    """Actions and batches are drawn anew, and actions distributed like those of eager code."""
    (train, args, _), moments = how(script), []
    args += ("--start-e", 0.4, "--end-e", 0.4) if script in DQN else ()  # 0 at capture
    eager = train(script, *args, cuda=True)
    twin = train(f"{script}_torchcompile", *args, *BOTH, cuda=True)
    for key, item in eager["state"].items():
        if "optimizer" not in key:
            twin["state"][key].load_state_dict(item.state_dict())
    for result in (eager, twin):
        # Else the noise is the host's, or there is none.
        if script not in ON_POLICY or (script in ATARI and script not in Q_LEARNING):
            obs = result["rollout_obs"][0] if "rollout_obs" in result else None
            if script in RAINBOW:
                obs = torch.zeros(2, 4, 84, 84, dtype=torch.uint8, device=result["device"])
            keep = [torch.zeros(len(obs), 1, device=result["device"])] if script in MEMORY else []
            if obs is None:
                shape = result["envs"].observation_space.shape
                obs = torch.zeros(shape[0], np.prod(shape[1:]), device=result["device"])
            # Outside of no_grad, as in training: the grad mode is something that compiled code depends on.
            draws = torch.stack([result["act"](obs, *keep).clone() for _ in range(1000)]).double()
            moments.append((draws.mean(dim=0), draws.std(dim=0)))
        if script not in ON_POLICY:
            before, values = copy.deepcopy({k: item.state_dict() for k, item in result["state"].items()}), []
            for _ in range(2):  # gradient steps from the same parameters, on other batches
                result["update"](*gradient_steps(result)[0])
                values.append(result["losses"]["q_values" if script in Q_LEARNING else "qf1_values"].clone())
                for key, item in result["state"].items():
                    item.load_state_dict(before[key])
            assert not torch.equal(*values)
        assert_no_wait(result)
    for mean, std in moments:
        assert std.amax() > 0.05
        assert ((mean - moments[0][0]).abs() < 0.01 + 0.2 * std).all(), moments
        assert ((std - moments[0][1]).abs() < 0.01 + 0.2 * std).all(), moments


def gradient_steps(result: dict) -> list[tuple]:
    """The arguments of ten calls of `update`, at most."""
    if "batch" in result:
        # The rows of the batch, or with a memory the environments.
        rows = result["args"].num_envs if "memory" in result else len(result["batch"])
        indices = torch.arange(rows, device=result["device"])
        return [(part,) for part in indices.chunk(result["args"].num_minibatches)]
    flags = (True, True) if "alpha_optimizer" in result["state"] else (True,)  # SAC's targets have turns
    return (10 * result.get("kinds", [flags]))[:10]


def assert_no_wait(result: dict) -> None:
    """Gradient steps make no call that waits for the device; nor does what prepares them."""
    steps = gradient_steps(result)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        if "prepare" in result:
            result["prepare"]()
        for step in steps:
            result["update"](*step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
