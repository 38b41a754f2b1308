"""Captured twins, on the CPU, compute what they compute without, and what a CUDA graph would freeze shows."""

from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from capture import CaptureError, captured_on_cpu
from conftest import EACH_STEP, OFF_POLICY, TWINS, assert_same_numbers, changed, play
from tensordict.nn import CudaGraphModule
from torch._dynamo.utils import counters

DQN, CHOICES, ATARI, PPO, SAC, TD3 = TWINS
# Twins, how many functions of each are compiled, and what is changed for it to act in PyTorch, because NumPy
# does not know the network.
CASES = [(SAC, 3), (TD3, 3), (DQN, 1), (PPO, 2), (CHOICES, 2), (ATARI, 3)]
CASES += [(DQN, 2, "F.relu(self.fc1", "torch.sigmoid(self.fc1"), (PPO, 3, "nn.Tanh()", "nn.Sigmoid()")]
# Runs of two kinds of gradient steps, the last of them without the actor, or of several rollouts. (With two
# environments PPO's policy would differ by rounding: a graph has a copy of the observations, whose rows lie
# closer together.)
ROLLOUTS = ("--num-steps", 16, "--num-minibatches", 2, "--update-epochs", 2, "--num-envs")
ARGS = dict.fromkeys(OFF_POLICY, ("--learning-starts", 50, "--batch-size", 16))
ARGS |= {DQN: (*ARGS[DQN], *EACH_STEP), PPO: (*ROLLOUTS, 1), CHOICES: (*ROLLOUTS, 1), ATARI: (*ROLLOUTS, 2)}
# Of a build for CUDA, Dynamo (2.14) asks the driver.
NO_DRIVER = torch.version.cuda is not None and not torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class OneStream:
    """A stream, of a device on which another one is current at each call."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_captured_runs_and_those_that_go_on_compute_the_same(case, tmp_path):
    twin, graphs, *in_pytorch = case

    def train(rounds: int, *options, cuda: bool = False) -> tuple[dict, Path]:
        """The globals of a run of one or two rounds, and its checkpoint."""
        args = (*ARGS[twin], "--total-timesteps", rounds * (151 if twin in OFF_POLICY else 96))
        with changed(twin, *in_pytorch) if in_pytorch else nullcontext():
            run = play(twin, *args, "--save-model", *options, directory=tmp_path, cuda=cuda)
        return run, tmp_path / run["folder"] / f"{run['global_step']}.pt"

    first, checkpoint = train(1)
    second, _ = train(2, "--resume", checkpoint)
    resume = ()
    for rounds, expected in enumerate((first, second), start=1):
        with captured_on_cpu() as capture_times:
            captured, own = train(rounds, *resume, "--cudagraphs", cuda=True)
        resume = ("--resume", own)
        first_step = captured["START_TIME"] + captured["startup_seconds"]
        assert max(capture_times) < first_step
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
        compiled, _ = train(2, "--resume", checkpoint, "--compile", "--cudagraphs", cuda=True)
    assert compiled["cudagraphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert next(asked) > graphs  # that is, not only while it compiles
    assert_same_numbers(second, compiled, rtol=1e-6, atol=1e-6)


# Passages of twins, what takes their place, and how it shows in a captured run, or is refused.
ALIVE = "{key: param.clone() for key, param in item.named_parameters()}"
LERP = "(lambda *x: nn.Parameter(target.params.lerp(*x)))"
STALE = [
    (PPO, "annealed_lr.fill_(", "optimizer.lr = (", "not equal"),
    (TD3, "size.fill_(", "size = int(", "not equal"),
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
    (SAC, "copy.deepcopy(item.state_dict())", ALIVE, "a history is alive"),
]


@pytest.mark.parametrize(("twin", "passage", "other", "shown"), STALE)
def test_a_capture_shows_what_it_freezes_and_what_a_gpu_refuses(twin, passage, other, shown):
    args = (*ARGS[twin], "--total-timesteps", 72 if twin in OFF_POLICY else 64)  # the last step has the actor
    with changed(twin, passage, other):
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
    assert (state.item(), kept.item()) == (7, 100)  # a capture runs nothing
