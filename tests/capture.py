"""CUDA graphs on the CPU: the real `CudaGraphModule` over a pretended device, and `Graph` in place of `torch.cuda.CUDAGraph`.

A CUDA graph is a list of kernels and of the addresses that they read and write. `Graph` is a list of ATen calls and of the
tensors that they read and write; to replay it is to do the calls again, on the same storages. What Python does between the
calls is done once, at capture. So a number, a branch, noise drawn by NumPy or a tensor that is re-bound later is as stale
as on a GPU, and what a capture refuses is refused. How many calls warm up, how arguments go in and results come out, and
which of them are refused is tensordict's own code.

Not as on a GPU: a tensor that nothing but the graph uses any longer is kept, where a GPU's memory would be given to others,
and the host's tensors pass for the device's, which tests/traffic.py tells apart.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
from pretended import pretended_cuda, waits
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What moves values between host and device, waits, or seeds, and is no ATen call where both are the CPU. (A capture permits
# copies from pinned memory. Nothing here pins any.)
NOT_PERMITTED = [
    *[(Tensor, name) for name in ("cpu", "numpy", "tolist", "__array__")],
    *[(torch, name) for name in ("tensor", "as_tensor", "asarray", "from_numpy", "manual_seed")],
    (torch.cuda, "synchronize"),
]
LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}  # torch.tensor in compiled code


class CaptureError(RuntimeError):
    """A call that is not permitted while a stream is captured."""


class Call(NamedTuple):
    """An ATen call."""

    function: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    result: Any


def storages(tree) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors in nested arguments or results, by address."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


class Graph:
    """In place of `torch.cuda.CUDAGraph`: the calls of a capture."""

    def __init__(self):
        self.calls: list[Call] = []

    @torch.no_grad()
    def replay(self) -> None:
        """Do the calls again; what was a new tensor at capture is written where it was then."""
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and storages(place).keys() != storages(value).keys():
                    place.copy_(value)


class Recorder(TorchDispatchMode):
    """Notes calls in a list, and what memory held before they wrote to it."""

    def __init__(self, calls: list[Call]):
        super().__init__()
        self.calls = calls
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.new: dict[int, torch.UntypedStorage] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Have compiled code run as it is; under another mode it would be compiled again."""
        return True

    def __torch_dispatch__(self, function: torch._ops.OpOverload, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in LIFTS or waits(function, args):
            raise CaptureError(f"{function} under capture")
        written = [
            kwargs.get(argument.name, args[position : position + 1])
            for position, argument in enumerate(function._schema.arguments)
            if argument.alias_info and argument.alias_info.is_write
        ]
        for address, storage in storages(written).items():
            if address not in self.before and address not in self.new:
                self.before[address] = (storage, storage.clone())
        result = function(*args, **kwargs)
        given = storages((args, kwargs))
        self.new |= {address: storage for address, storage in storages(result).items() if address not in given}
        self.calls.append(Call(function, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Leave memory as a capture does, which runs nothing: what was there is as before, what is new has no value yet."""
        for storage, content in self.before.values():
            storage.copy_(content)
        for storage in self.new.values():
            storage.fill_(255)  # makes a float NaN


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function in place of the one of this name."""

    def refuse(*args, **kwargs) -> NoReturn:
        raise CaptureError(f"{name}() under capture")

    return refuse


@contextmanager
def capture(graph: Graph, stream: Any = None) -> Iterator[None]:
    """In place of `torch.cuda.graph`."""
    recorder, rng, compiled = Recorder(graph.calls), torch.get_rng_state(), counters["stats"]["unique_graphs"]
    to = Tensor.to

    def to_device(tensor: Tensor, *args, **kwargs) -> Tensor:
        if any(isinstance(arg, str | torch.device) and torch.device(arg).type == "cpu" for arg in (*args, *kwargs.values())):
            refusal("to")()
        return to(tensor, *args, **kwargs)

    with ExitStack() as stack:
        for owner, name in NOT_PERMITTED:
            stack.enter_context(patch.object(owner, name, refusal(name)))
        stack.enter_context(patch.object(Tensor, "to", to_device))
        stack.enter_context(recorder)
        yield
    if counters["stats"]["unique_graphs"] != compiled:
        raise CaptureError("compiling under capture")
    recorder.undo()
    torch.set_rng_state(rng)


class Stream:
    """In place of `torch.cuda.Stream`: here calls come one after another anyway."""

    def __init__(self, device: Any = None):
        pass

    def wait_stream(self, stream: "Stream") -> None:
        """Do nothing."""


@contextmanager
def captured_on_cpu() -> Iterator[None]:
    """Pretend a CUDA device with the memory of the CPU, on which CUDA graphs are captured."""
    names = {"CUDAGraph": Graph, "graph": capture, "Stream": Stream, "current_stream": Stream, "stream": nullcontext}
    with pretended_cuda("cpu"), patch.multiple(torch.cuda, **names):
        yield
