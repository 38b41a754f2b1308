"""A CUDA device that is pretended, so that scripts run with --cuda, unchanged, on any machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
# They make a tensor on the host and copy it, which PyTorch leaves out where the device is "meta".
MADE_ON_THE_HOST = {torch.tensor, torch.as_tensor, torch.asarray}


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
        if function == torch.Tensor.device.__get__ and result == self.memory:
            return torch.device("cuda")
        return result

    def _renamed(self, arg):
        return self.memory if isinstance(arg, torch.device) and arg.type == "cuda" else arg


@contextmanager
def pretended_cuda(memory: str, synchronize: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let PyTorch say that there is a CUDA device, whose tensors are those of the device `memory`.

    Host and device draw from one generator, the host's: what runs here draws what it would draw on the CPU.
    """
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "synchronize": synchronize,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    with patch.multiple(torch.cuda, **answers), Renamed(memory):
        yield


def waits(function: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether the host has to wait for the device in a call: for a number, or how large the result is."""
    if function.overloadpacket in INDEXING:
        # The result has as many rows as a mask says. Indices of other types leave nothing to ask.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*function.tags})
