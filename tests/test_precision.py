"""--precision bfloat16: networks compute in bfloat16, and nothing else does."""

from itertools import product

import conftest
import numpy as np
import pytest
import torch
from capture import pretended_cuda
from conftest import ATARI, MULTIGPU, ON_POLICY, SCRIPTS, SHORT, TWINS, play, rates, run
from test_twins import EACH_VECTOR_STEP, train, train_compiled
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = [*SCRIPTS, *TWINS[::4], *MULTIGPU]
BFLOAT16 = ("--precision", "bfloat16")
# What autocast computes in bfloat16, and the gradients of that; what a twin's LSTM computes is not seen.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}


class Products(TorchDispatchMode):
    """Notes the types of all matrix products and convolutions."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "precision"), [*product(NAMES, ["bfloat16"]), (NAMES[0], "float32")])
def test_products_are_of_the_precision_asked_for_and_all_that_is_kept_is_of_float32(name, precision):
    like = name.removesuffix("_multigpu")
    steps = 100 if like in ON_POLICY else 110  # a rollout, or ten gradient steps of all kinds
    with Products() as products:
        result = play(name, *SHORT[like], "--total-timesteps", steps, "--precision", precision)
    assert products.dtypes == {getattr(torch, precision)}
    assert result["updates"] >= (2 if name in ATARI else 4)
    kept = [value.dtype for value in conftest.numbers(result).values()]
    assert torch.float32 in kept and torch.bfloat16 not in kept


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "tf32"), ("float32", "ieee")])
def test_an_lstm_on_a_gpu_is_as_precise_as_other_products(precision, expected):
    """And without one nothing is set, at which `torch.export` would fail."""
    args = (*SHORT["ppo_lstm"], "--total-timesteps", 100, "--precision", precision)
    play("ppo_lstm", *args)
    assert torch.backends.cudnn.allow_tf32
    with pretended_cuda("cpu"):
        play("ppo_lstm", *args, cuda=True)
        assert torch.backends.cudnn.rnn.fp32_precision == expected
    assert torch.backends.cudnn.allow_tf32


def test_weights_are_those_of_the_last_update():
    """Autocast would keep the first ones in bfloat16 for good."""
    name, obs = "ppo_continuous_action", np.ones((1, 17))
    result = run(name, *SHORT[name], *rates(name, 0.01), *BFLOAT16)
    exact = result["best_actions"](obs)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=torch.is_autocast_cache_enabled()):
        rounded = result["best_actions"](obs)
    assert 0 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


def test_eager_twin_and_compiled_twin_round_alike():
    """First moments of gradients are closer to each other than to those of float32."""
    case = ("ppo_continuous_action", BFLOAT16)
    runs = [train((case[0], ())), train(case), train(case, "_torchcompile"), train_compiled(case)]
    exact, eager, *twins = map(conftest.numbers, runs)
    moments = [name for name, value in eager.items() if "exp_avg." in name and value.any()]
    assert len(moments) > 10

    def distance(numbers: dict) -> float:
        return np.mean([(numbers[name] - eager[name]).norm() / eager[name].norm() for name in moments])

    assert max(map(distance, twins)) < 0.1 * distance(exact)


def test_a_compiled_actor_with_layer_norm_has_a_gradient():
    """Inductor (2.13) gave NaN for that of two critics at once; the next action ends such a run."""
    functions = "act, update_critics, update_actor"
    alone = (f"{functions} = map(Compiled, ({functions}))", "update_actor = Compiled(update_actor)")
    case = ("fast_sac", (*EACH_VECTOR_STEP, *BFLOAT16), *alone)
    torch._dynamo.reset()
    assert train(case, "_torchcompile", "--compile")["updates"] == 20
