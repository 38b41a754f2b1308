"""Captured twins, on the CPU, compute what they do without; what a graph or a direct call freezes shows."""

from contextlib import nullcontext
from itertools import count
from pathlib import Path
from unittest.mock import patch

import conftest
import pytest
import test_twins
import torch
from capture import CaptureError, captured_on_cpu, without_inductor
from conftest import (
    ATARI,
    DQN,
    EACH_STEP,
    MEMORY,
    OFF_POLICY,
    ON_POLICY,
    RAINBOW,
    SAVED,
    assert_same_numbers,
    changed,
    play,
)
from tensordict.nn import CudaGraphModule
from test_twins import GRAPHS, LIKE_ANOTHER
from torch import Tensor
from torch._dynamo.utils import counters

TD3, PPO = "td3_continuous_action_torchcompile", "ppo_continuous_action_torchcompile"
# Twins, how many functions of each are compiled where tests/test_twins.py does not, and what is changed
# for it to act in PyTorch, because NumPy does not know the network.
CASES = [(f"{name}_torchcompile", name in LIKE_ANOTHER and GRAPHS[name]) for name in conftest.SCRIPTS]
CASES += [("dqn_torchcompile", 2, "F.relu(self.fc1", "torch.sigmoid(self.fc1")]
CASES += [(PPO, 3, "nn.Tanh()", "nn.Sigmoid()")]
# Runs of two kinds of gradient steps, the last of them without the actor, or of several rollouts. (With two
# environments PPO's policy would differ by rounding: a graph has a copy of the observations, whose rows lie
# closer together.)
ROLLOUTS = ("--num-minibatches", 2, "--update-epochs", 2)
ARGS = dict.fromkeys(ON_POLICY, (*ROLLOUTS, "--num-envs", 1, "--num-steps", 16))
ARGS |= dict.fromkeys(ATARI, (*ROLLOUTS, "--num-envs", 2, "--num-steps", 8))
ARGS |= {name: (*ARGS[name], "--num-minibatches", 1) for name in MEMORY if name not in ATARI}
ARGS |= {name: ("--learning-starts", 50, "--batch-size", 16) for name in OFF_POLICY}
ARGS |= {name: (*ARGS[name], *EACH_STEP) for name in (*DQN, *RAINBOW)}
SLOW = ("--train-frequency", 2, "--target-network-frequency", 4)  # steps of convolutions
ARGS |= {name: (*ARGS[name], *SLOW, "--buffer-size", 100, "--batch-size", 4) for name in RAINBOW}
CUDA = torch.device("cuda")
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
        """The globals of a run of one or two rounds, and its folder."""
        steps = 71 if twin in OFF_POLICY else 32 if twin in ATARI else 64
        args = (*ARGS[twin], "--total-timesteps", rounds * steps)
        with changed(twin, *in_pytorch):
            run = play(twin, *args, *SAVED, *options, directory=tmp_path, cuda=cuda)
        return run, tmp_path / run["folder"]

    first, folder = train(1)
    with captured_on_cpu() as capture_times:
        captured, own = train(1, "--cudagraphs", cuda=True)
    first_step = captured["START_TIME"] + captured["summary"]["startup_seconds"]
    assert max(capture_times) < first_step
    assert captured["summary"]["cudagraphs"] and captured["updates"] >= 8
    assert_same_numbers(first, captured, rtol=0, atol=0)
    if NO_DRIVER or not graphs:
        return
    second, _ = train(2, "--resume", folder)
    # Compiled, too, and only once, though warm-up, capture and run have a stream of their own each.
    streams, asked = [OneStream() for _ in range(3)], count()
    current = {"is_available": lambda: True, "current_stream": lambda *_: streams[next(asked) % 3]}
    counters.clear()
    with (
        captured_on_cpu(),
        without_inductor(),
        patch.multiple(torch.accelerator, **current),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        compiled, _ = train(2, "--resume", own, "--compile", "--cudagraphs", cuda=True)
    assert compiled["summary"]["cudagraphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert next(asked) > graphs  # that is, not only while it compiles
    assert_same_numbers(second, compiled, rtol=1e-6, atol=1e-6)


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


def test_what_a_gpu_would_not_capture_or_replay_is_refused():
    with captured_on_cpu():
        held = [torch.ones(2, device=CUDA)]
        step = CudaGraphModule(lambda: held[0] + 1, warmup=2)
        for _ in range(4):
            step()
        held[0] = torch.ones(2, device=CUDA)  # in place of what the graph reads: others may have that memory
        with pytest.raises(CaptureError, match="memory that nothing else does"):
            step()
        step, history = CudaGraphModule(lambda: held[0] + 1, warmup=2), held[0].requires_grad_() * 2
        step()
        with pytest.raises(CaptureError, match="a history is alive"):
            step()
        del history


# ---- Direct calls ------------------------------------------------------------------------------------------
class Numbers:
    """A function of its argument, a tensor and a number, with what may happen to them."""

    def __init__(self):
        self.state, self.number, self.others = torch.zeros(4), 2.0, [torch.zeros(4), 3.0]

    def __call__(self, x: Tensor) -> Tensor:
        self.state.add_(x)
        return self.state * self.number

    def rebind(self) -> None:
        self.state, self.others[0] = self.others[0], self.state

    def count(self) -> None:
        self.number, self.others[1] = self.others[1], self.number


@pytest.fixture(params=["interpreted"])
def direct(request):
    """`Compiled` of a twin; by Inductor, which takes longer, where a test asks for that."""
    torch._dynamo.reset()
    by_inductor = torch._inductor.config.patch({"cpp.vec_isa_ok": True})  # else the compiler is tried
    with by_inductor if request.param == "by Inductor" else without_inductor():
        yield conftest.load(TD3)["Compiled"]


compiled_by_inductor = pytest.mark.parametrize("direct", ["by Inductor"], indirect=True)


def test_direct_calls_compute_on_the_tensors_of_the_first_call(direct):
    numbers = Numbers()
    function, expected = direct(numbers.__call__), torch.zeros(4)
    with patch.object(function, "guarded", side_effect=function.guarded) as guarded:
        for call in range(2500):
            x = torch.full((2, 4), float(call % 7))[call % 2]  # a view, too
            expected += x
            assert torch.equal(function(x), expected * 2)
    assert torch.equal(numbers.state, expected)
    assert guarded.call_count == 18
    for other in (torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(4, 2)[:, 0]):
        function.next_look = function.calls + 1
        with pytest.raises(RuntimeError, match="recompile"):
            function(other)


def test_arguments_stay_apart_from_each_other_and_from_tensors_that_they_are_views_of(direct):
    rows = torch.arange(12.0).view(3, 4)
    function = direct(lambda first, second: (rows.sum() + 10 * first.sum() - second).sum())
    for call in range(40):
        first, second = rows[call % 3], rows[0, :2] + call
        assert function(first, second) == (rows.sum() + 10 * first.sum() - second).sum()


@compiled_by_inductor
@pytest.mark.parametrize(("change", "message"), [("rebind", "was replaced"), ("count", r"number.* == 2\.0")])
def test_a_tensor_or_number_that_is_not_what_it_was_is_seen_at_the_next_look(direct, change, message):
    """After 100 calls at the 139th; what alternates is seen, too, for looks are at odd and at even calls."""
    numbers, other = Numbers(), Numbers()
    function = direct(numbers.__call__)
    for call in range(1, 139):
        function(torch.ones(4))
        if call == 100:
            getattr(numbers, change)()
    with pytest.raises(RuntimeError, match=message):
        function(torch.ones(4))
    torch._dynamo.reset()
    function = direct(other.__call__)
    with pytest.raises(RuntimeError, match=message):
        for _ in range(20):
            function(torch.ones(4))
            getattr(other, change)()


@compiled_by_inductor
def test_a_network_that_a_function_updates_has_one_name_in_it(direct):
    network, norm = torch.nn.Linear(2, 1), torch.zeros(())
    flat = conftest.load(TD3)["Flat"](network)

    def update(read: Tensor) -> None:
        with torch.no_grad():
            flat.params.sub_(1)
            norm.copy_(read.norm())

    before = flat.params.detach().clone()
    function = direct(lambda: update(flat.params))
    for _ in range(3):
        function()
    torch.testing.assert_close(flat.params.detach(), before - 3)
    with pytest.raises(RuntimeError, match="by its flat name"):
        direct(lambda: update(network.weight))()


# What is written to a network that is read by its own name, too, gets lost.
METRIC = ("entropy=entropy)", "entropy=agent.actor_logstd.exp().mean())")
LOST = {"ppo_continuous_action_lstm_torchcompile": METRIC}
GAP = ("qf1_loss=qf1_loss,", "qf1_loss=(qf1(obs, actions) - qf2(obs, actions)).mean(),")
LOST |= {"sac_continuous_action_torchcompile": GAP}


@pytest.mark.parametrize("name", LOST)
def test_what_a_compiled_script_would_lose_ends_its_run(name):
    torch._dynamo.reset()
    with without_inductor(), pytest.raises(RuntimeError, match="by its flat name"):
        test_twins.train((name.removesuffix("_torchcompile"), (), *LOST[name]), "_torchcompile", "--compile")
