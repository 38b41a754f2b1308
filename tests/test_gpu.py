"""What only a CUDA device shows: the flags run, captured noise is noise, no gradient step waits."""

import copy
import gc
import inspect
from functools import partial

import conftest
import pytest
import torch
import torch._inductor.config
from conftest import OFF_POLICY, SCRIPTS, SEEDS, assert_same_numbers, play, run

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, NO_GPU]

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
    "ppo_continuous_action": (play, (*ROLLOUTS, 257, "--num-steps", 4, "--total-timesteps", 2500), 3e-4),
    "ppo_atari_envpool": (play, (*ROLLOUTS, 2, "--num-steps", 16, "--total-timesteps", 64), 3e-4),
}


@pytest.fixture(autouse=True)
def sound_graphs(monkeypatch):
    """Refuse a replay that would use memory that is no longer there, where PyTorch can tell (2.13).

    What runs have left is collected: a captured graph in a cycle that dies during a later capture breaks it.
    """
    gc.collect()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # in which eager and compiled code differ
    if "check_input_liveness" in inspect.signature(torch.cuda.graph.__init__).parameters:
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, check_input_liveness=True))


@modes
@each
def test_twin_computes_what_the_eager_script_does(script, flags):
    train, args, atol = RUNS[script]
    eager = train(script, *args, cuda=True)
    with torch._inductor.config.patch(fallback_random=True):
        twin = train(f"{script}_torchcompile", *args, *flags, cuda=True)
    assert twin["device"].type == "cuda"
    assert twin["cudagraphs"] == ("--cudagraphs" in flags)
    assert_same_numbers(eager, twin, atol=atol)
    assert_is_sound(eager, twin)


@each
def test_compiled_random_numbers_are_captured(script):
    train, args, _ = RUNS[script]
    assert_is_sound(train(script, *args, cuda=True), train(f"{script}_torchcompile", *args, *BOTH, cuda=True))


@each
def test_a_captured_run_goes_on_from_a_checkpoint(script, tmp_path):
    conftest.resume_with_warm_up(f"{script}_torchcompile", *BOTH, cuda=True, directory=tmp_path)


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


def assert_is_sound(eager: dict, twin: dict) -> None:
    """Both draw alike and anew, and neither waits."""
    assert_policies_draw_alike(eager, twin)
    for result in (eager, twin):
        assert all(torch.isfinite(loss).all() for loss in result["losses"].values())
        if "rollout" not in result:
            assert_batches_are_drawn_anew(result)
        assert_no_wait(result)


def assert_policies_draw_alike(*results: dict) -> None:
    """1000 actions at one observation have the same mean and the same standard deviation."""
    if "rollout_actions" in results[0]:
        return  # PPO's noise for continuous actions is the host's
    moments = []
    for result in results:
        if "epsilon" in result:
            result["epsilon"].fill_(0.4)  # a tensor, which had another value at capture
        num_envs = result["args"].num_envs
        obs = (
            result["rollout_obs"][0]
            if "rollout" in result
            else torch.zeros(num_envs, result["obs_dim"]).cuda()
        )
        # Outside of no_grad, as in training: the grad mode is something that compiled code depends on.
        draws = torch.stack([result["act"](obs).clone() for _ in range(1000)]).double()
        moments.append((draws.mean(dim=0), draws.std(dim=0)))
    (mean, std), (other_mean, other_std) = moments
    assert std.amax() > 0.05
    assert torch.all((mean - other_mean).abs() < 0.01 + 0.2 * std), moments
    assert torch.all((std - other_std).abs() < 0.01 + 0.2 * std), moments


def gradient_steps(result: dict) -> list[tuple]:
    """The arguments of ten calls of `update`, at most."""
    if "rollout" in result:
        indices = torch.arange(result["batch_size"], device=result["device"])
        return [(part,) for part in indices.chunk(result["args"].num_minibatches)]
    eager = [(True, True)] if result["args"].exp_name.startswith("sac") else [(True,)]
    kinds = result.get("kinds", eager)
    return [kinds[step % len(kinds)] for step in range(10)]


def assert_batches_are_drawn_anew(result: dict) -> None:
    """Two gradient steps from the same parameters have other batches, and so other values."""
    before = {name: copy.deepcopy(item.state_dict()) for name, item in result["state"].items()}
    name, values = "q_values" if "q_values" in result["losses"] else "qf1_values", []
    for _ in range(2):
        result["update"](*gradient_steps(result)[0])
        values.append(result["losses"][name].clone())
        result["load_states"](result["state"], before)
    assert not torch.equal(*values)


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
