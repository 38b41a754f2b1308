"""Captured twins, on the CPU, compute what they compute without, and what a CUDA graph would freeze shows."""

import shutil
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
IN_PYTORCH = {
    f"{DQN}, acting in PyTorch": ("F.relu(self.fc1", "torch.sigmoid(self.fc1"),
    f"{PPO}, acting in PyTorch": ("nn.Tanh()", "nn.Sigmoid()"),
}
# Runs of two kinds of gradient steps, the last of them without the actor, or of several rollouts. (With two
# environments PPO's policy would differ by rounding: a graph has a copy of the observations, whose rows lie
# closer together.)
ROLLOUTS = ("--num-steps", 16, "--num-minibatches", 2, "--update-epochs", 2, "--num-envs")
ARGS = dict.fromkeys(OFF_POLICY, ("--learning-starts", 50, "--batch-size", 16))
ARGS |= {DQN: (*ARGS[DQN], *EACH_STEP), PPO: (*ROLLOUTS, 1), ATARI: (*ROLLOUTS, 2)}
# How many functions of each are compiled.
GRAPHS = {SAC: 3, TD3: 3, DQN: 1, PPO: 2, ATARI: 3}
GRAPHS |= {case: GRAPHS[case.split(",")[0]] + 1 for case in IN_PYTORCH}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def script(case: str) -> AbstractContextManager:
    """Have `run` take the twin of a case as the case says."""
    return changed(case.split(",")[0], *IN_PYTORCH[case]) if case in IN_PYTORCH else nullcontext()


def train(case: str, rounds: int, *options, directory: Path, cuda: bool = False) -> tuple[dict, Path]:
    """The globals of a run of one or two rounds, and its checkpoint."""
    twin = case.split(",")[0]
    steps = rounds * (151 if twin in OFF_POLICY else 96)
    with script(case):
        args = (*ARGS[twin], "--total-timesteps", steps, *options, "--save-model")
        run = play(twin, *args, directory=directory, cuda=cuda)
    [checkpoint] = directory.glob(f"runs/*/{run['global_step']}.pt")
    return run, checkpoint


@pytest.fixture(scope="module", params=GRAPHS)
def plain(request, tmp_path_factory) -> tuple[str, list[tuple[dict, Path]]]:
    """A twin, and the globals and checkpoints of a run without flags and of the one that goes on with it."""
    case, directory = request.param, tmp_path_factory.mktemp("plain")
    first = train(case, 1, directory=directory)
    return case, [first, train(case, 2, "--resume", first[1], directory=directory)]


def test_a_captured_run_and_one_that_goes_on_compute_the_same(plain, tmp_path):
    (case, runs), resume = plain, ()
    for rounds, (expected, _) in enumerate(runs, start=1):
        options = (*resume, "--cudagraphs")
        with captured_on_cpu():
            captured, checkpoint = train(case, rounds, *options, directory=tmp_path, cuda=True)
        resume = ("--resume", checkpoint)
        assert captured["cudagraphs"]
        assert captured["updates"] >= 8
        assert_same_numbers(expected, captured, rtol=0, atol=0)


class OneStream:
    """A stream, of a device on which another one is current at each call."""

    device = torch.device("cuda", 0)


def test_a_compiled_and_captured_run_that_goes_on_computes_the_same(plain, tmp_path):
    """Nor is anything compiled again, as warm-up, capture and run each have a stream of their own."""
    case, [(_, checkpoint), (expected, _)] = plain
    (folder := tmp_path / "runs" / "resumed").mkdir(parents=True)
    options = ("--resume", shutil.copy(checkpoint, folder), "--compile", "--cudagraphs")
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
        captured, _ = train(case, 2, *options, directory=tmp_path, cuda=True)
    assert captured["cudagraphs"]
    assert counters["stats"]["unique_graphs"] == GRAPHS[case]
    assert next(asked) > GRAPHS[case]  # that is, not only while it compiles
    assert_same_numbers(expected, captured, rtol=1e-6, atol=1e-6)


# Passages of twins, and in their place what only a captured run would suffer from.
STALE = [
    (PPO, "annealed_lr.fill_(", "optimizer.lr = ("),
    (TD3, "size.fill_(", "size = int("),
    (f"{DQN}, acting in PyTorch", "epsilon.fill_(", "epsilon = ("),
    (TD3, "torch.randn_like(mean)", "math.sin(global_step)"),
    (TD3, "self.step.add_(1)", "setattr(self, 'step', self.step + 1) or self.step"),
    (SAC, "exp_avg = self.exp_avg.lerp_(", "exp_avg = self.exp_avg = self.exp_avg.lerp("),
    (TD3, "target.params.lerp_(", "target.params = (lambda *x: nn.Parameter(target.params.lerp(*x)))("),
    (TD3, "losses[name].copy_(", "losses[name] = ("),
    (ATARI, "buffer.copy_(", "buffer = (lambda rollout, non_blocking: rollout.to(device).clone())("),
    (PPO, "load_states(state, saved)", "pass"),
    (SAC, "torch.manual_seed(seed)", "pass"),
    (SAC, "graphs[kind]()", "graphs[kinds[0]]()"),
    (TD3, "if with_actor:", "if updates % 2 == 0:"),
]
FROZEN = r"not (match|equal|close)|nan|memory that nothing else"  # how it shows
# And what a capture refuses.
UPDATE = '"""One gradient step on a new batch."""'
ALIVE = "{key: param.clone() for key, param in item.named_parameters()}"
REFUSED = [
    (TD3, UPDATE, f"{UPDATE}; size.item()", "_local_scalar_dense"),
    (SAC, "copy.deepcopy(item.state_dict())", ALIVE, "a history is alive"),
]


@pytest.mark.parametrize(("case", "passage", "other"), STALE)
def test_a_capture_shows_what_it_freezes(case, passage, other):
    twin = case.split(",")[0]
    args = (*ARGS[twin], "--total-timesteps", 72 if twin in OFF_POLICY else 64)  # the last step has the actor
    with script(case), changed(twin, passage, other):
        expected = play(twin, *args)
        with pytest.raises((AssertionError, CaptureError), match=FROZEN), captured_on_cpu():
            assert_same_numbers(expected, play(twin, *args, "--cudagraphs", cuda=True), rtol=0, atol=0)


@pytest.mark.parametrize(("twin", "passage", "other", "message"), REFUSED)
def test_a_capture_refuses_what_fails_on_a_gpu(twin, passage, other, message):
    with captured_on_cpu(), changed(twin, passage, other), pytest.raises(CaptureError, match=message):
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
    kept, other = other, torch.full((), 1000.0, device=device)  # kept: else others may get its memory
    results.append(captured(torch.full((2,), 60.0, device=device)))
    assert [result[1].item() for result in results] == [1, 11, 21, 31, 41, 151, 161]
    assert state.item() == 7  # a capture runs nothing
    assert kept.item() == 100


def test_a_graph_is_refused_memory_that_nothing_else_uses():
    with captured_on_cpu():
        other, device = torch.ones(3, device=torch.device("cuda")), torch.device("cuda")
        captured = CudaGraphModule(lambda x: (x + other, other.add_(1))[0], warmup=1, device=device)
        for _ in range(3):
            captured(torch.ones(3, device=device))
        other = torch.ones(3, device=device)
        with pytest.raises(CaptureError, match="nothing else"):
            captured(torch.ones(3, device=device))


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


def test_a_graph_has_no_values_before_it_runs(device):
    kept = []
    captured = CudaGraphModule(lambda x: kept.append(x + 1), warmup=1, device=device)
    for number in (5.0, 6.0):
        captured(torch.full((3,), number, device=device))
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


def test_a_capture_refuses_to_compile():
    """The stand-in does so always, a GPU only where Inductor tries something out or waits meanwhile."""
    compiled, number = torch.compile(lambda x, number: x + number, backend="eager"), count()
    with captured_on_cpu():
        assert_refused(lambda x: compiled(x, next(number)), CaptureError, "compiling")


@pytest.mark.parametrize(("size", "number"), [(3, 2.0), (4, 1.0)], ids=["number", "shape"])
def test_a_graph_refuses_other_arguments(device, size, number):
    captured = CudaGraphModule(lambda x, number: x * number, warmup=1, device=device)
    captured(torch.ones(3, device=device), 1.0)
    with pytest.raises(ValueError):
        captured(torch.ones(size, device=device), number)


def test_a_graph_refuses_arguments_with_gradients(device):
    with pytest.raises(RuntimeError, match="require gradients"):
        CudaGraphModule(lambda x: x, warmup=1, device=device)(
            torch.ones(3, device=device, requires_grad=True)
        )
