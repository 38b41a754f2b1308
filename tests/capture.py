"""A pretended CUDA device, so that scripts run with --cuda, unchanged, on any machine; and CUDA graphs on it.

A CUDA graph is a list of kernels and of the addresses that they read and write. `Graph`, below the real
`CudaGraphModule`, is a list of ATen calls and of the tensors that they read and write; to replay it is to do
the calls again, on the same memory. What Python does in between is done once, at capture. So a number, a
branch, noise drawn by NumPy or a tensor that is re-bound later is as stale as on a GPU. A GPU gives the
memory of a tensor that nothing but a graph uses any longer to others: a replay that would use such memory is
refused. Not as on a GPU, the host's tensors pass for the device's, and a capture may wait (tests/traffic.py).
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import Mock, patch

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.output_code import CompiledFxGraph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# They make a tensor on the host and copy it, which PyTorch leaves out where the device is "meta".
MADE_ON_THE_HOST = {torch.tensor, torch.as_tensor, torch.asarray}


class Renamed(TorchFunctionMode):
    """Gives whoever asks for "cuda" the memory of another device, of which every tensor then says "cuda".

    Memory of "meta" has no values. With that of "cpu" the host's tensors say that they are the device's, too.
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
    precision = torch.backends.cudnn.rnn.fp32_precision
    try:
        with patch.multiple(torch.cuda, synchronize=synchronize, **answers), Renamed(memory):
            yield
    finally:
        torch.backends.cudnn.rnn.fp32_precision = precision  # which a script with an LSTM sets


class CaptureError(RuntimeError):
    """What is not permitted while a stream is captured, or with a graph."""


def storages(tree) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors in nested arguments or results, by address."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


def with_history() -> list[Tensor]:
    """All tensors, but the compiler's fake ones, through which a gradient could flow back."""
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    with torch._C.DisableTorchFunction():
        return [tensor for tensor in tensors if tensor.grad_fn is not None]


class Graph(TorchDispatchMode):
    """In place of `torch.cuda.CUDAGraph`; as a mode it notes calls, and what memory held before them."""

    def __init__(self):
        super().__init__()
        # (function, args, kwargs, new), whose tensors have the memory of the original ones, no history; `new`
        # are the positions and tensors of the result that the call has made.
        self.calls: list[tuple] = []
        # Memory that is not the graph's own, with the number of references from here.
        self.outside: list[tuple[torch.UntypedStorage, int]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.new: dict[int, torch.UntypedStorage] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Have compiled code run as it is; under another mode it would be compiled again."""
        return True

    def __torch_dispatch__(self, function: torch._ops.OpOverload, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for position, argument in enumerate(function._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                written = storages(kwargs.get(argument.name, args[position : position + 1]))
                for key in written.keys() - self.before.keys() - self.new.keys():
                    self.before[key] = (written[key], written[key].clone())
        result, given = function(*args, **kwargs), storages((args, kwargs))
        self.new |= {key: storage for key, storage in storages(result).items() if key not in given}
        args, kwargs, made = tree_map_only(Tensor, Tensor.detach, (args, kwargs, result))
        made = enumerate(tree_leaves(made))
        new = [(at, leaf) for at, leaf in made if storages(leaf).keys() - given.keys()]
        self.calls.append((function, args, kwargs, new))
        return result

    def finish(self) -> None:
        """Leave memory as a capture does, which runs nothing: what is new there has no value yet."""
        for storage, content in self.before.values():
            storage.copy_(content)
        for storage in self.new.values():
            storage.fill_(255)  # makes a float NaN
        tensors = [leaf for leaf in tree_leaves(self.calls) if isinstance(leaf, Tensor)]
        uses, found = Counter(tensor.untyped_storage()._cdata for tensor in tensors), storages(tensors)
        self.outside = [(found[key], uses[key] + 1) for key in found.keys() - self.new.keys()]
        self.before, self.new = {}, {}

    @torch.no_grad()
    def replay(self) -> None:
        """Do the calls again; what was a new tensor at capture is written where it was then."""
        if any(torch._C._storage_Use_Count(storage._cdata) <= own for storage, own in self.outside):
            raise CaptureError("a graph uses memory that nothing else does any longer")
        with torch._C.DisableTorchFunction():  # no call asks for "cuda": it was renamed at capture
            for function, args, kwargs, new in self.calls:
                again = tree_leaves(function(*args, **kwargs))
                for at, place in new:
                    place.copy_(again[at])


class Interpreted(CompiledFxGraph):
    """In place of Inductor's code for a graph: its ATen calls, one by one."""

    def __init__(self, graph: torch.fx.GraphModule, _):
        self.current_callable = lambda inputs: graph.forward(*inputs)
        self._boxed_call, self._compile_context, self.compiled_fn_runner = True, None, None
        self.output_strides = graph.graph.output_node().args[0]


def without_inductor():
    """Have `torch.compile` trace as ever, for code that a twin calls directly, but make no kernels of it."""
    backend = aot_autograd(fw_compiler=Interpreted, keep_inference_input_mutations=True)
    return patch("torch.compile", partial(torch.compile, backend=backend))


@contextmanager
def captured_on_cpu() -> Iterator[list[float]]:
    """Pretend a CUDA device with the memory of the CPU, on which CUDA graphs are captured.

    Gives the `time.perf_counter()` of each capture.
    """
    capture_times: list[float] = []

    @contextmanager
    def capture(graph: Graph, stream: Mock | None = None) -> Iterator[None]:
        # The node of a parameter in such a history remembers the stream on which it was made. A capture that
        # reaches the node later, on its own stream, ends with an error.
        if histories := with_history():
            raise CaptureError(f"a history is alive when a capture begins, of {histories}")
        capture_times.append(time.perf_counter())
        rng = torch.get_rng_state()
        with graph:
            yield
        graph.finish()
        torch.set_rng_state(rng)

    # Streams do nothing: here calls come one after another anyway.
    streams = dict.fromkeys(("Stream", "current_stream"), lambda *_: Mock())
    streams |= {"stream": nullcontext, "Event": torch.cpu.Event}
    with pretended_cuda("cpu"), patch.multiple(torch.cuda, CUDAGraph=Graph, graph=capture, **streams):
        gc.freeze()  # what other tests have left has nothing to do with this run, and is not looked at
        try:
            yield capture_times
        finally:
            gc.unfreeze()
