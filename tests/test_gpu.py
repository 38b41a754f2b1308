"""What only a CUDA device shows: the flags run, captured noise is noise, no gradient step waits."""

import copy
import gc
import inspect
from functools import partial

import pytest
import torch
import torch._inductor.config
from conftest import OFF_POLICY, SCRIPTS, SEEDS, assert_same_numbers, play, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BOTH = ("--compile", "--cudagraphs")
MODES = [(), ("--compile",), ("--cudagraphs",), BOTH]
modes = pytest.mark.parametrize("flags", MODES, ids=lambda flags: "".join(flags) or "no flag")
each = pytest.mark.parametrize("script", SCRIPTS)
REACHER = ("--env-id", "Reacher-v4", "--learning-starts", 64, "--total-timesteps")
ROLLOUTS = ("--num-minibatches", 2, "--update-epochs", 2, "--num-envs")
CHOICES = ("--num-envs", 65, "--train-frequency", 65, "--target-network-frequency", 195)
CHOICES += ("--learning-starts", 65, "--total-timesteps", 1365)
# A dozen gradient steps or two, and how far parameters may be apart: a step of the learning rate, as in
# test_twins.py. With so many environments the policies of PPO and DQN are PyTorch's.
RUNS = {
    **dict.fromkeys(OFF_POLICY, (run, (*REACHER, 85), 1e-3)),
    "dqn": (play, CHOICES, 1e-3),
    "ppo": (play, (*ROLLOUTS, 257, "--num-steps", 4, "--total-timesteps", 2500), 3e-4),
    "ppo_continuous_action": (play, (*ROLLOUTS, 257, "--num-steps", 4, "--total-timesteps", 2500), 3e-4),
    "ppo_atari_envpool": (play, (*ROLLOUTS, 2, "--num-steps", 16, "--total-timesteps", 64), 3e-4),
}


@pytest.fixture(autouse=True)
def sound_graphs(monkeypatch):
    """Refuse a replay that would use memory that is no longer there, where PyTorch can tell (2.13)."""
    gc.collect()  # a captured graph in a cycle that dies during a later capture breaks it
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # in which eager and compiled code differ
    if "check_input_liveness" in inspect.signature(torch.cuda.graph.__init__).parameters:
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, check_input_liveness=True))


@modes
@each
def test_twin_computes_what_the_eager_script_does_and_goes_on(script, flags, tmp_path):
    train, args, atol = RUNS[script]
    eager, options = train(script, *args, cuda=True), {"cuda": True, "directory": tmp_path}
    with torch._inductor.config.patch(fallback_random=True):
        twin = train(f"{script}_torchcompile", *args, *flags, "--save-model", **options)
        if flags == BOTH:
            resume = (*args[:-1], 2 * args[-1], "--resume", twin["folder"])
            assert train(f"{script}_torchcompile", *resume, *flags, **options)["updates"] > twin["updates"]
    assert twin["device"].type == "cuda"
    assert twin["cudagraphs"] == ("--cudagraphs" in flags)
    assert_same_numbers(eager, twin, atol=atol)
    for result in (eager, twin):
        assert_no_wait(result)


@modes
@pytest.mark.parametrize("name", SEEDS)
def test_agents(name, flags, tmp_path):
    """They go on from a checkpoint with the same random numbers with each of the flags, and on the CPU."""
    args = ("--num-seeds", 3, *REACHER)
    run(name, *args, 66, "--save-model", directory=tmp_path)  # networks at the start are drawn by the device
    resume = ("--resume", *sorted(tmp_path.glob("runs/*/66.pt")))
    on_cpu = run(name, *args, 85, *resume, directory=tmp_path)
    together = run(name, *args, 85, *resume, *flags, cuda=True, directory=tmp_path)
    assert together["device"].type == "cuda"
    assert together["cudagraphs"] == ("--cudagraphs" in flags)
    assert together["updates"] == on_cpu["updates"] == 20
    states = [[item.state_dict() for item in result["state"].values()] for result in (together, on_cpu)]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-3, check_device=False)
    assert_no_wait(together)


@each
def test_compiled_random_numbers_are_captured(script):
    """Actions and batches are drawn anew, and actions distributed like those of eager code."""
    (train, args, _), moments = RUNS[script], []
    eager = train(script, *args, cuda=True)
    for result in (eager, train(f"{script}_torchcompile", *args, *BOTH, cuda=True)):
        if "rollout_actions" not in result:  # PPO's noise for continuous actions is the host's
            if "epsilon" in result:
                result["epsilon"].fill_(0.4)  # a tensor, which had another value at capture
            zeros = torch.zeros(result["args"].num_envs, result.get("obs_dim", 0), device=result["device"])
            obs = result["rollout_obs"][0] if "rollout" in result else zeros
            # Outside of no_grad, as in training: the grad mode is something that compiled code depends on.
            draws = torch.stack([result["act"](obs).clone() for _ in range(1000)]).double()
            moments.append((draws.mean(dim=0), draws.std(dim=0)))
        if "rollout" not in result:
            states = {key: item.state_dict() for key, item in result["state"].items()}
            before, values = copy.deepcopy(states), []
            for _ in range(2):  # gradient steps from the same parameters, on other batches
                result["update"](*gradient_steps(result)[0])
                values.append(result["losses"]["q_values" if "epsilon" in result else "qf1_values"].clone())
                result["load_states"](result["state"], before)
            assert not torch.equal(*values)
        assert_no_wait(result)
    for mean, std in moments:
        assert std.amax() > 0.05
        assert ((mean - moments[0][0]).abs() < 0.01 + 0.2 * std).all(), moments
        assert ((std - moments[0][1]).abs() < 0.01 + 0.2 * std).all(), moments


def gradient_steps(result: dict) -> list[tuple]:
    """The arguments of ten calls of `update`, at most."""
    if "rollout" in result:
        indices = torch.arange(result["batch_size"], device=result["device"])
        return [(part,) for part in indices.chunk(result["args"].num_minibatches)]
    eager = [(True, True)] if result["args"].exp_name.startswith("sac") else [(True,)]
    return (10 * result.get("kinds", eager))[:10]


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
