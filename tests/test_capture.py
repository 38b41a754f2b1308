"""Captured twins, on the CPU, compute what they compute without, and what a CUDA graph would freeze shows."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from capture import CaptureError, captured_on_cpu
from conftest import EACH_STEP, OFF_POLICY, TWINS, assert_same_numbers, changed, environment, play
from tensordict.nn import CudaGraphModule
from torch._dynamo.utils import counters

DQN, ATARI, PPO, SAC, TD3 = TWINS
# Twins that act in PyTorch, because NumPy does not know their network, and what is changed for that.
DQN_IN_TORCH, PPO_IN_TORCH = f"{DQN}, acting in PyTorch", f"{PPO}, acting in PyTorch"
IN_TORCH = {DQN_IN_TORCH: ("F.relu(self.fc1", "torch.sigmoid(self.fc1")}
IN_TORCH |= {PPO_IN_TORCH: ("nn.Tanh()", "nn.Sigmoid()")}
# Runs of two kinds of gradient steps, the last of them without the actor, or of several rollouts. (With two
# environments PPO's policy would differ by rounding: a graph has a copy of the observations, whose rows lie
# closer together.)
ROLLOUTS = ("--num-steps", 16, "--num-minibatches", 2, "--update-epochs", 2, "--num-envs")
ARGS = dict.fromkeys(OFF_POLICY, ("--learning-starts", 50, "--batch-size", 16))
ARGS |= {DQN: (*ARGS[DQN], *EACH_STEP), PPO: (*ROLLOUTS, 1), ATARI: (*ROLLOUTS, 2)}
# How many functions of each are compiled.
GRAPHS = {SAC: 3, TD3: 3, DQN: 1, DQN_IN_TORCH: 2, PPO: 2, PPO_IN_TORCH: 3, ATARI: 3}
# Of a build for CUDA, Dynamo (2.14) asks the driver.
NO_DRIVER = torch.version.cuda is not None and not torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def script(case: str) -> AbstractContextManager:
    """Have `run` take the twin of a case as the case says."""
    return changed(case.split(",")[0], *IN_TORCH[case]) if case in IN_TORCH else nullcontext()


def train(case: str, rounds: int, *options, directory: Path, cuda: bool = False) -> tuple[dict, Path]:
    """The globals of a run of one or two rounds, and its checkpoint."""
    twin = case.split(",")[0]
    args = (*ARGS[twin], "--total-timesteps", rounds * (151 if twin in OFF_POLICY else 96), "--save-model")
    with script(case):
        run = play(twin, *args, *options, directory=directory, cuda=cuda)
    return run, directory / run["folder"] / f"{run['global_step']}.pt"


class OneStream:
    """A stream, of a device on which another one is current at each call."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("case", GRAPHS)
def test_captured_runs_and_those_that_go_on_compute_the_same(case, tmp_path):
    first, checkpoint = train(case, 1, directory=tmp_path)
    second, _ = train(case, 2, "--resume", checkpoint, directory=tmp_path)
    resume = ()
    for rounds, expected in enumerate((first, second), start=1):
        with captured_on_cpu():
            captured, own = train(case, rounds, *resume, "--cudagraphs", directory=tmp_path, cuda=True)
        resume = ("--resume", own)
        assert captured["cudagraphs"] and captured["updates"] >= 8
        assert_same_numbers(expected, captured, rtol=0, atol=0)

    if NO_DRIVER:
        return
    # Compiled, too, and only once, though warm-up, capture and run have a stream of their own each.
    streams, asked = [OneStream() for _ in range(3)], count()
    current = {"is_available": lambda: True, "current_stream": lambda *_: streams[next(asked) % 3]}
    counters.clear()
    with (
        captured_on_cpu(),
        # The graphs run as the ATen calls of which Inductor would make kernels.
        patch("torch.compile", partial(torch.compile, backend="aot_eager")),
        patch.multiple(torch.accelerator, **current),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        options = ("--resume", checkpoint, "--compile", "--cudagraphs")
        compiled, _ = train(case, 2, *options, directory=tmp_path, cuda=True)
    assert compiled["cudagraphs"]
    assert counters["stats"]["unique_graphs"] == GRAPHS[case]
    assert next(asked) > GRAPHS[case]  # that is, not only while it compiles
    assert_same_numbers(second, compiled, rtol=1e-6, atol=1e-6)


# Passages of twins, what takes their place, and how it shows in a captured run, or is refused.
UPDATE = '"""One gradient step on a new batch."""'
ALIVE = "{key: param.clone() for key, param in item.named_parameters()}"
LERP = "(lambda *x: nn.Parameter(target.params.lerp(*x)))"
STALE = [
    (PPO, "annealed_lr.fill_(", "optimizer.lr = (", "not equal"),
    (TD3, "size.fill_(", "size = int(", "not equal"),
    (DQN_IN_TORCH, "epsilon.fill_(", "epsilon = (", "nothing else"),
    (TD3, "torch.randn_like(mean)", "math.sin(global_step)", "not equal"),
    (TD3, "self.step.add_(1)", "setattr(self, 'step', self.step + 1) or self.step", "nothing else"),
    (SAC, "exp_avg = self.exp_avg.lerp_(", "exp_avg = self.exp_avg = self.exp_avg.lerp(", "nothing else"),
    (TD3, "target.params.lerp_(", f"target.params = {LERP}(", "nothing else"),
    (TD3, "losses[name].copy_(", "losses[name] = (", "not equal"),
    (ATARI, "buffer.copy_(", "buffer = (lambda rollout, non_blocking: rollout.clone())(", "nothing else"),
    (PPO, "load_states(state, saved)", "pass", "not equal"),
    (SAC, "torch.manual_seed(seed)", "pass", "not equal"),
    (SAC, "graphs[kind]()", "graphs[kinds[0]]()", "keys of the mappings"),
    (TD3, "if with_actor:", "if updates % 2 == 0:", "not equal"),
    (TD3, UPDATE, f"{UPDATE}; size.item()", "_local_scalar_dense"),
    (SAC, "copy.deepcopy(item.state_dict())", ALIVE, "a history is alive"),
]


@pytest.mark.parametrize(("case", "passage", "other", "shown"), STALE)
def test_a_capture_shows_what_it_freezes_and_what_a_gpu_refuses(case, passage, other, shown):
    twin = case.split(",")[0]
    args = (*ARGS[twin], "--total-timesteps", 72 if twin in OFF_POLICY else 64)  # the last step has the actor
    with script(case), changed(twin, passage, other):
        expected = play(twin, *args)
        with pytest.raises((AssertionError, CaptureError), match=shown), captured_on_cpu():
            assert_same_numbers(expected, play(twin, *args, "--cudagraphs", cuda=True), rtol=0, atol=0)


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
    kept, other = other, torch.full((), 1000.0, device=device)  # kept: else others may get its memory
    results.append(captured(torch.full((2,), 60.0, device=device)))
    assert [result[1].item() for result in results] == [1, 11, 21, 31, 41, 151, 161]
    assert state.item() == 7  # a capture runs nothing
    assert kept.item() == 100


def test_a_graph_draws_anew_from_the_seed_that_is_set_and_writes_to_its_own_inputs(device):
    captured = CudaGraphModule(lambda x: x.add_(1) + torch.randn(3, device=device), warmup=2, device=device)
    x = torch.zeros(3, device=device)
    results = torch.stack([captured(x) for _ in range(5)])
    assert len(results.unique()) == 15
    assert x.tolist() == [0, 0, 0]
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        expected = 1 + torch.randn(3, device=device)
        torch.manual_seed(seed)
        torch.testing.assert_close(captured(x), expected, rtol=0, atol=0)


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
    lambda x: torch.manual_seed(next(NEW_SEEDS)) and x + 1,  # a new one: torch lets the same one be set again
    lambda x: x + torch.tensor([1.0], device=x.device),
    lambda x: x + torch.from_numpy(np.ones(3)).to(x.device),
    lambda x: torch.histogram(x, 3),  # for CPUs only
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


@pytest.mark.skipif(NO_DRIVER, reason="needs a CUDA driver or a PyTorch for CPUs")
def test_a_capture_refuses_to_compile():
    """The stand-in does so always, a GPU only where Inductor tries something out or waits meanwhile."""
    compiled, number = torch.compile(lambda x, number: x + number, backend="eager"), count()
    with captured_on_cpu():
        assert_refused(lambda x: compiled(x, next(number)), CaptureError, "compiling")
