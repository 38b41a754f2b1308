"""CUDA graphs on the CPU: the real `CudaGraphModule` over a pretended device, and a stand-in for its graphs.

A CUDA graph is a list of kernels and of the addresses that they read and write. `Graph` is a list of ATen
calls and of the tensors that they read and write; to replay it is to do the calls again, on the same memory.
What Python does between the calls is done once, at capture. So a number, a branch, noise drawn by NumPy or a
tensor that is re-bound later is as stale as on a GPU, and what a capture refuses is refused. How many calls
warm up, how arguments go in and results come out, and which of them are refused is tensordict's own code.

A GPU gives the memory of a tensor that nothing but a graph uses any longer to others. So a replay that would
use such memory is refused. Not as on a GPU: the host's tensors pass for the device's, which tests/traffic.py
tells apart.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
import torchgen
from pretended import pretended_cuda, waits
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

# What moves values between host and device, waits, or seeds, and is no ATen call where both are the CPU. (A
# capture permits copies from pinned memory. Nothing here pins any.)
NOT_PERMITTED = [
    *[(Tensor, name) for name in ("cpu", "numpy", "tolist", "__array__")],
    *[(torch, name) for name in ("tensor", "as_tensor", "asarray", "from_numpy", "manual_seed")],
    (torch.cuda, "synchronize"),
]
LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}  # compiled torch.tensor


class CaptureError(RuntimeError):
    """What is not permitted while a stream is captured."""


class Call(NamedTuple):
    """An ATen call. Its tensors have the memory of the original ones, but not their history."""

    function: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    result: Any


def storages(tree) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors in nested arguments or results, by address."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


def with_history() -> list[Tensor]:
    """All tensors, but the compiler's fake ones, through which a gradient could flow back."""
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    with torch._C.DisableTorchFunction():
        return [tensor for tensor in tensors if tensor.grad_fn is not None]


@cache
def operations_of_cuda() -> set[str]:
    """The operations that have a kernel for CUDA or are made of others, in PyTorch's own table."""
    table = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(table / "native_functions.yaml"), str(table / "tags.yaml"))
    cuda = {str(name) for name in parsed.backend_indices[DispatchKey.CUDA].index}
    return {
        f"aten::{function.func.name}"
        for function in parsed.native_functions
        if function.has_composite_kernel
        or {str(function.func.name), str(function.structured_delegate)} & cuda
    }


class Graph:
    """In place of `torch.cuda.CUDAGraph`: the calls of a capture."""

    def __init__(self):
        self.calls: list[Call] = []
        self.outside: list[tuple[torch.UntypedStorage, int]] = []  # with the number of references from here

    def look_outside(self, new: dict[int, torch.UntypedStorage]) -> None:
        """Note which memory is not the graph's own, and how often the calls refer to it."""
        tensors = [leaf for leaf in tree_leaves(self.calls) if isinstance(leaf, Tensor)]
        uses = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
        outside = [(storage, uses[key] + 1) for key, storage in storages(tensors).items() if key not in new]
        self.outside = outside

    @torch.no_grad()
    def replay(self) -> None:
        """Do the calls again; what was a new tensor at capture is written where it was then."""
        if any(torch._C._storage_Use_Count(storage._cdata) <= own for storage, own in self.outside):
            raise CaptureError("a graph uses memory that nothing else does any longer")
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
        if function.name() not in operations_of_cuda():
            raise CaptureError(f"{function} has no kernel for CUDA")
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
        self.new |= {
            address: storage for address, storage in storages(result).items() if address not in given
        }
        self.calls.append(Call(function, *tree_map_only(Tensor, Tensor.detach, (args, kwargs, result))))
        return result

    def undo(self) -> None:
        """Leave memory as a capture does, which runs nothing: what is new there has no value yet."""
        for storage, content in self.before.values():
            storage.copy_(content)
        for storage in self.new.values():
            storage.fill_(255)  # makes a float NaN


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function in place of the one of this name."""

    def refuse(*args, **kwargs) -> NoReturn:
        raise CaptureError(f"{name}() under capture")

    return refuse


class Stream:
    """In place of `torch.cuda.Stream`: here calls come one after another anyway."""

    def __init__(self, device: Any = None):
        pass

    def wait_stream(self, stream: "Stream") -> None:
        """Do nothing."""


@contextmanager
def captured_on_cpu() -> Iterator[None]:
    """Pretend a CUDA device with the memory of the CPU, on which CUDA graphs are captured."""
    earlier, to = with_history(), Tensor.to  # what other tests have left has nothing to do with this run

    def to_device(tensor: Tensor, *args, **kwargs) -> Tensor:
        devices = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str | torch.device)]
        if any(torch.device(device).type == "cpu" for device in devices):
            refusal("to")()
        return to(tensor, *args, **kwargs)

    @contextmanager
    def capture(graph: Graph, stream: Any = None) -> Iterator[None]:
        # The node of a parameter in such a history remembers the stream on which it was made. A capture that
        # reaches the node later, on its own stream, ends with an error.
        if histories := [t for t in with_history() if not any(t is other for other in earlier)]:
            raise CaptureError(f"a history is alive when a capture begins, of {histories}")
        recorder, rng = Recorder(graph.calls), torch.get_rng_state()
        compiled = counters["stats"]["unique_graphs"]
        with ExitStack() as stack:
            for owner, name in NOT_PERMITTED:
                stack.enter_context(patch.object(owner, name, refusal(name)))
            stack.enter_context(patch.object(Tensor, "to", to_device))
            stack.enter_context(recorder)
            yield
        if counters["stats"]["unique_graphs"] != compiled:
            raise CaptureError("compiling under capture")
        recorder.undo()
        graph.look_outside(recorder.new)
        torch.set_rng_state(rng)

    names = {"CUDAGraph": Graph, "graph": capture, "Stream": Stream, "current_stream": Stream}
    names["Event"] = torch.cpu.Event
    with pretended_cuda("cpu"), patch.multiple(torch.cuda, stream=nullcontext, **names):
        yield
