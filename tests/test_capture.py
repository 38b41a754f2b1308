"""Twins that are captured, on the CPU, compute what they compute without, and what a CUDA graph would freeze shows."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from capture import CaptureError, captured_on_cpu
from conftest import EACH_STEP, TWINS, assert_same_numbers, changed, environment, play
from tensordict.nn import CudaGraphModule

# Runs of two kinds of gradient steps, the last of them without the actor, or of several rollouts. (Two environments of
# continuous actions would differ by rounding: a graph has a copy of the observations, whose rows lie closer together.)
ROLLOUTS = ("--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "2")
ARGS = dict.fromkeys(TWINS, ("--learning-starts", "50", "--batch-size", "16"))
ARGS["ppo_continuous_action_torchcompile"] = (*ROLLOUTS, "--act-device", "device", "--num-envs", "1")
ARGS["ppo_atari_envpool_torchcompile"] = (*ROLLOUTS, "--num-envs", "2")
ARGS["dqn_torchcompile"] += EACH_STEP
STEPS = dict.fromkeys(TWINS, 151) | {"ppo_continuous_action_torchcompile": 160, "ppo_atari_envpool_torchcompile": 64}
FEW_STEPS = dict.fromkeys(TWINS, 71) | {"ppo_continuous_action_torchcompile": 48, "ppo_atari_envpool_torchcompile": 64}

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train(twin: str, steps: int, *options, directory: Path, cuda: bool = False) -> tuple[dict, Path]:
    """The globals of a run, and its checkpoint."""
    args = (*ARGS[twin], "--total-timesteps", steps, *options, "--save-model")
    run = play(twin, *args, directory=directory, cuda=cuda)
    [checkpoint] = directory.glob(f"runs/*/{run['global_step']}.pt")
    return run, checkpoint


@pytest.fixture(scope="module", params=TWINS)
def plain(request, tmp_path_factory) -> tuple[str, list[tuple[dict, Path]]]:
    """A twin, and the globals and the checkpoints of a run without flags and of the one that goes on with it."""
    twin, directory = request.param, tmp_path_factory.mktemp("plain")
    first = train(twin, STEPS[twin], directory=directory)
    return twin, [first, train(twin, 2 * STEPS[twin], "--resume", first[1], directory=directory)]


def test_a_captured_run_and_one_that_goes_on_compute_the_same(plain, tmp_path):
    twin, runs = plain
    resume = ()
    for expected, _ in runs:
        with captured_on_cpu():
            steps = expected["args"].total_timesteps
            captured, checkpoint = train(twin, steps, *resume, "--cudagraphs", directory=tmp_path, cuda=True)
        resume = ("--resume", checkpoint)
        assert captured["cudagraphs"]
        assert captured["updates"] >= 8
        assert_same_numbers(expected, captured, rtol=0, atol=0)


def test_a_compiled_and_captured_run_that_goes_on_computes_the_same(plain, tmp_path):
    twin, [(_, checkpoint), (expected, _)] = plain
    (folder := tmp_path / "runs" / "resumed").mkdir(parents=True)
    # The graphs run as the ATen calls of which Inductor would make kernels.
    with captured_on_cpu(), patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        options = ("--resume", shutil.copy(checkpoint, folder), "--compile", "--cudagraphs")
        captured, _ = train(twin, 2 * STEPS[twin], *options, directory=tmp_path, cuda=True)
    assert captured["cudagraphs"]
    assert_same_numbers(expected, captured, rtol=1e-6, atol=1e-6)


# Passages of twins, and in their place what only a captured run would suffer from.
SENT, REBOUND = "buffer.copy_(rollout, non_blocking=True)", "buffer = rollout.to(device).clone()"
UPDATE = '"""One gradient step on a new batch."""'
STALE = {
    "a learning rate that is a number": ("ppo_continuous_action", ".fill_(learning_rate)", " = learning_rate"),
    "Atari's learning rate, too": ("ppo_atari_envpool", ".fill_(learning_rate)", " = learning_rate"),
    "a buffer size that is a number": ("td3_continuous_action", "size.fill_(global_step)", "size = global_step"),
    "Adam's count re-bound": (
        "td3_continuous_action",
        'step = state["step"].add_(1)',
        'state["step"] = state["step"] + 1; step = state["step"]',
    ),
    "Adam's moments re-bound": (
        "sac_continuous_action",
        'state["exp_avg"].lerp_(',
        'state["exp_avg"] = state["exp_avg"].lerp(',
    ),
    "targets re-bound": (
        "td3_continuous_action",
        "target.params.lerp_(network.params.detach(), args.tau)",
        "target.params = nn.Parameter(target.params.lerp(network.params.detach(), args.tau))",
    ),
    "losses re-bound": (
        "td3_continuous_action",
        'losses["qf_loss"].copy_(qf_losses.detach().mean(dim=-1))',
        'losses["qf_loss"] = qf_losses.detach().mean()',
    ),
    "a rollout re-bound": ("ppo_continuous_action", SENT, REBOUND),
    "Atari's rollout re-bound": ("ppo_atari_envpool", SENT, REBOUND),
    "a warm-up that is kept": ("ppo_continuous_action", "restore(tensors, saved)", "pass"),
    "random numbers that warming up takes": ("sac_continuous_action", "torch.manual_seed(noise_seed)", "pass"),
    "a share of random actions that is a number": (
        "dqn",
        "epsilon.fill_(schedule(global_step))",
        "epsilon = schedule(global_step)",
    ),
    "another network re-bound": (
        "dqn",
        "target_network.params.lerp_(q_network.params.detach(), args.tau)",
        "target_network.params = nn.Parameter(q_network.params.detach().clone())",
    ),
    "kinds of gradient steps mixed up": ("sac_continuous_action", "graphs[kind]()", "graphs[kinds[0]]()"),
    "a kind read from a number": ("td3_continuous_action", "if with_actor:", "if updates % args.policy_frequency == 0:"),
    "noise drawn by NumPy": ("td3_continuous_action", "torch.randn_like(mean)", "float(np.random.standard_normal())"),
}
# Statements in TD3's gradient step, and the call that is refused.
REFUSED = {
    "a number asked for": ("_local_scalar_dense", "size.item()"),
    "a branch on a tensor": ("_local_scalar_dense", "size > 1 and None"),
    "a shape that values decide": ("nonzero", "size.nonzero()"),
    "a mask": ("index.Tensor", "buffer[buffer > 0]"),
    "a list": ("tolist", "size.tolist()"),
    "a copy to NumPy": ("cpu", "size.cpu().numpy()"),
    "a copy to the host": (r"^to\(\)", 'size.to("cpu")'),
    "a copy of a number": (r"^tensor\(\)", "torch.tensor(0.99, device=device)"),
    "a wait": ("synchronize", "torch.cuda.synchronize()"),
    "a seed": ("manual_seed", "torch.manual_seed(1)"),
    "a copy of noise": ("from_numpy", "torch.from_numpy(np.zeros(3)).to(device)"),
}


@pytest.mark.parametrize("fault", STALE)
def test_a_capture_shows_what_it_freezes(fault):
    script, passage, other = STALE[fault]
    twin = f"{script}_torchcompile"
    args = (*ARGS[twin], "--total-timesteps", FEW_STEPS[twin])
    with changed(twin, passage, other):
        expected = play(twin, *args)
        with pytest.raises(AssertionError, match=r"are not (equal|close)|nan"), captured_on_cpu():
            assert_same_numbers(expected, play(twin, *args, "--cudagraphs", cuda=True), rtol=0, atol=0)


@pytest.mark.parametrize("fault", REFUSED)
def test_a_capture_refuses_what_waits(fault):
    message, statement = REFUSED[fault]
    twin = "td3_continuous_action_torchcompile"
    with captured_on_cpu(), changed(twin, UPDATE, f"{UPDATE}; {statement}"):
        with pytest.raises(CaptureError, match=message):
            play(twin, *ARGS[twin], "--cudagraphs", cuda=True)


@pytest.fixture(params=["pretended", pytest.param("real", marks=ON_GPU)])
def device(request):
    """A CUDA device, on which the stand-in for a CUDA graph and the real one have to behave alike."""
    with captured_on_cpu() if request.param == "pretended" else nullcontext():
        yield torch.device("cuda")


def test_a_graph_keeps_numbers_and_addresses(device):
    state, other = torch.zeros((), device=device), torch.zeros((), device=device)
    number, calls = 1.0, []

    def step(x):
        calls.append(number)
        state.add_(1)
        return x + number + other

    captured = CudaGraphModule(step, warmup=3, device=device)
    results = [captured(torch.full((2,), 10.0 * call, device=device)) for call in range(5)]
    assert len(calls) == 4  # two calls, and in the third one call and a capture
    number = 1000.0
    other.fill_(100)
    results.append(captured(torch.full((2,), 50.0, device=device)))
    kept, other = other, torch.full((), 1000.0, device=device)  # kept: others would get memory that nothing else uses
    results.append(captured(torch.full((2,), 60.0, device=device)))
    assert [result[1].item() for result in results] == [1, 11, 21, 31, 41, 151, 161]
    assert state.item() == 7  # a capture runs nothing
    assert kept.item() == 100


def test_a_graph_draws_anew_and_writes_to_its_own_inputs(device):
    captured = CudaGraphModule(lambda x: x.add_(1) + torch.randn_like(x), warmup=2, device=device)
    x = torch.zeros(3, device=device)
    results = torch.stack([captured(x) for _ in range(5)])
    assert len(results.unique()) == 15
    assert x.tolist() == [0, 0, 0]


def test_a_graph_draws_from_the_seed_that_is_set_after_its_capture(device):
    captured = CudaGraphModule(lambda: torch.randn(3, device=device), warmup=1, device=device)
    captured()
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        expected = torch.randn(3, device=device)
        torch.manual_seed(seed)
        torch.testing.assert_close(captured(), expected, rtol=0, atol=0)


def test_a_graph_has_no_values_before_it_runs(device):
    kept = []
    captured = CudaGraphModule(lambda x: kept.append(x + 1), warmup=1, device=device)
    captured(torch.full((3,), 5.0, device=device))
    captured(torch.full((3,), 6.0, device=device))
    assert kept[-1].tolist() == [7, 7, 7]
    assert len(kept) == 2


NEW_SEEDS = count()
ASKS = [
    lambda x: x.sum().item(),
    lambda x: bool(x.sum() > 1),
    lambda x: torch.arange(x.sum()),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: x.to("cpu"),
    lambda x: torch.cuda.synchronize() or x + 1,
    lambda x: torch.manual_seed(next(NEW_SEEDS)) and x + 1,  # a new one: the same may be set, from torch 2.10 on
    lambda x: x + torch.tensor([1.0], device=x.device),
    lambda x: x + torch.from_numpy(np.ones(3)).to(x.device),
]


def assert_refused(asks: Callable, error: type[Exception], match: str | None = None) -> None:
    """A capture of a function that asks for a value, or seeds, ends in this error; another one does not."""
    device = torch.device("cuda")
    CudaGraphModule(lambda x: x + 1, warmup=1, device=device)(torch.ones(3, device=device))
    captured = CudaGraphModule(asks, warmup=1, device=device)
    with pytest.raises(error, match=match):
        captured(torch.ones(3, device=device))


@pytest.mark.parametrize("index", range(len(ASKS)))
def test_a_capture_refuses_to_wait(index):
    with captured_on_cpu():
        assert_refused(ASKS[index], CaptureError)


@pytest.mark.parametrize("index", [pytest.param(index, marks=ON_GPU) for index in range(len(ASKS))])
def test_a_capture_on_a_gpu_refuses_to_wait(index):
    """Each in a process of its own: a capture that has failed may make later ones fail (torch 2.11)."""
    code = f"import test_capture; test_capture.assert_refused(test_capture.ASKS[{index}], RuntimeError)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_a_capture_refuses_to_compile():
    """The stand-in does, whatever is compiled; a GPU refuses only what Inductor tries out or waits for meanwhile."""
    calls = []

    @torch.compile(backend="eager")
    def step(x):
        return x + len(calls)

    with captured_on_cpu():
        assert_refused(lambda x: calls.append(None) or step(x), CaptureError, "compiling")


@pytest.mark.parametrize(("size", "number"), [(3, 2.0), (4, 1.0)], ids=["number", "shape"])
def test_a_graph_refuses_other_arguments(device, size, number):
    captured = CudaGraphModule(lambda x, number: x * number, warmup=1, device=device)
    captured(torch.ones(3, device=device), 1.0)
    with pytest.raises(ValueError):
        captured(torch.ones(size, device=device), number)


def test_a_graph_refuses_arguments_with_gradients(device):
    with pytest.raises(RuntimeError, match="require gradients"):
        CudaGraphModule(lambda x: x, warmup=1, device=device)(torch.ones(3, device=device, requires_grad=True))
