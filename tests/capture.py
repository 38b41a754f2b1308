"""A pretended CUDA device, so that scripts run with --cuda, unchanged, on any machine; and CUDA graphs on it.

A CUDA graph is a list of kernels and of the addresses that they read and write. `Graph`, below the real
`CudaGraphModule`, is a list of ATen calls and of the tensors that they read and write; to replay it is to do
the calls again, on the same memory. What Python does in between is done once, at capture. So a number, a
branch, noise drawn by NumPy or a tensor that is re-bound later is as stale as on a GPU, and what a capture
refuses is refused. A GPU gives the memory of a tensor that nothing but a graph uses any longer to others: a
replay that would use such memory is refused. Not as on a GPU: the host's tensors pass for the device's, which
tests/traffic.py tells apart.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import Mock, patch

import torch
import torchgen
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

aten = torch.ops.aten
# They make a tensor on the host and copy it, which PyTorch leaves out where the device is "meta".
MADE_ON_THE_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
# What moves values between host and device, waits, or seeds, and is no ATen call where both are the CPU. (A
# capture permits copies from pinned memory. Nothing here pins any.)
NOT_PERMITTED = [(Tensor, name) for name in ("cpu", "numpy", "tolist", "__array__")]
NOT_PERMITTED += [(torch, name) for name in ("tensor", "as_tensor", "asarray", "from_numpy", "manual_seed")]
NOT_PERMITTED += [(torch.cuda, "synchronize")]
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # compiled torch.tensor


class Renamed(TorchFunctionMode):
    """Gives whoever asks for "cuda" the memory of another device, of which every tensor then says "cuda".

    In memory of "meta" nothing has values, but what is the host's and what the device's is known. In memory
    of "cpu" values are right, but the host's tensors say that they are the device's as well.
    """

    def __init__(self, memory: str):
        super().__init__()
        self.memory = torch.device(memory)

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        args = [self._renamed(arg) for arg in args]
        kwargs = {key: self._renamed(arg) for key, arg in (kwargs or {}).items()}
        if function in MADE_ON_THE_HOST and kwargs.get("device") == self.memory:
            return function(*args, **kwargs | {"device": None}).to(self.memory)
        result = function(*args, **kwargs)
        made = function == Tensor.device.__get__ and result == self.memory
        return torch.device("cuda") if made else result

    def _renamed(self, arg):
        return self.memory if isinstance(arg, torch.device) and arg.type == "cuda" else arg


@contextmanager
def pretended_cuda(memory: str, synchronize: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let PyTorch say that there is a CUDA device, whose tensors are those of the device `memory`.

    Host and device draw from one generator, the host's: what runs here draws what it would draw on the CPU.
    """
    answers = {"is_available": lambda: True, "is_initialized": lambda: True, "current_device": lambda: 0}
    answers["is_current_stream_capturing"] = lambda: False
    answers["get_rng_state"] = lambda *_: torch.get_rng_state()
    answers["set_rng_state"] = lambda state, *_: torch.set_rng_state(state)
    with patch.multiple(torch.cuda, synchronize=synchronize, **answers), Renamed(memory):
        yield


def waits(function: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether the host has to wait for the device in a call: for a number, or how large the result is."""
    if function.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        # The result has as many rows as a mask says. Indices of other types leave nothing to ask.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*function.tags})


class CaptureError(RuntimeError):
    """What is not permitted while a stream is captured."""


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
    cuda, found = {str(name) for name in parsed.backend_indices[DispatchKey.CUDA].index}, set()
    for function in parsed.native_functions:
        if function.has_composite_kernel or cuda & {
            str(function.func.name),
            str(function.structured_delegate),
        }:
            found.add(f"aten::{function.func.name}")
    return found


class Graph:
    """In place of `torch.cuda.CUDAGraph`: the calls of a capture, as (function, args, kwargs, result)."""

    def __init__(self):
        self.calls: list[tuple] = []  # whose tensors have the memory of the original ones, not their history
        # Memory that is not the graph's own, with the number of references from here.
        self.outside: list[tuple[torch.UntypedStorage, int]] = []

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
    """Notes the calls of a graph, and what memory held before they wrote to it."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
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
        for position, argument in enumerate(function._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                for key, storage in storages(
                    kwargs.get(argument.name, args[position : position + 1])
                ).items():
                    if key not in self.before and key not in self.new:
                        self.before[key] = (storage, storage.clone())
        result, given = function(*args, **kwargs), storages((args, kwargs))
        self.new |= {key: storage for key, storage in storages(result).items() if key not in given}
        self.graph.calls.append((function, *tree_map_only(Tensor, Tensor.detach, (args, kwargs, result))))
        return result

    def finish(self) -> None:
        """Leave memory as a capture does, which runs nothing: what is new there has no value yet."""
        for storage, content in self.before.values():
            storage.copy_(content)
        for storage in self.new.values():
            storage.fill_(255)  # makes a float NaN
        tensors = [leaf for leaf in tree_leaves(self.graph.calls) if isinstance(leaf, Tensor)]
        uses, found = (
            Counter(tensor.untyped_storage()._cdata for tensor in tensors),
            storages(tensors).items(),
        )
        self.graph.outside = [(storage, uses[key] + 1) for key, storage in found if key not in self.new]


@contextmanager
def captured_on_cpu() -> Iterator[None]:
    """Pretend a CUDA device with the memory of the CPU, on which CUDA graphs are captured."""
    earlier, to = with_history(), Tensor.to  # what other tests have left has nothing to do with this run

    def to_device(tensor: Tensor, *args, **kwargs) -> Tensor:
        devices = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str | torch.device)]
        if any(torch.device(device).type == "cpu" for device in devices):
            raise CaptureError("to() under capture")
        return to(tensor, *args, **kwargs)

    @contextmanager
    def capture(graph: Graph, stream: Mock | None = None) -> Iterator[None]:
        # The node of a parameter in such a history remembers the stream on which it was made. A capture that
        # reaches the node later, on its own stream, ends with an error.
        if histories := [t for t in with_history() if not any(t is other for other in earlier)]:
            raise CaptureError(f"a history is alive when a capture begins, of {histories}")
        recorder, rng = Recorder(graph), torch.get_rng_state()
        compiled = counters["stats"]["unique_graphs"]
        with ExitStack() as stack:
            for owner, name in NOT_PERMITTED:
                error = CaptureError(f"{name}() under capture")
                stack.enter_context(patch.object(owner, name, side_effect=error))
            stack.enter_context(patch.object(Tensor, "to", to_device))
            stack.enter_context(recorder)
            yield
        if counters["stats"]["unique_graphs"] != compiled:
            raise CaptureError("compiling under capture")
        recorder.finish()
        torch.set_rng_state(rng)

    # Streams do nothing: here calls come one after another anyway.
    streams = dict.fromkeys(("Stream", "current_stream"), lambda *_: Mock())
    streams |= {"stream": nullcontext, "Event": torch.cpu.Event}
    with pretended_cuda("cpu"), patch.multiple(torch.cuda, CUDAGraph=Graph, graph=capture, **streams):
        yield
