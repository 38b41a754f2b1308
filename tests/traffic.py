"""What goes between the host and a CUDA device, counted without one: the device's tensors are on "meta".

On "meta" nothing is computed: what comes back to the host is zeros, or a one where a number is asked for. But
where each tensor is, is known, and so is each copy and each wait, unless one of an operation's own kernels
waits and PyTorch has not tagged it. What the host sends without waiting has to stay as it is until the next
wait, for the device may read it at any time until then.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import walk_stack
from unittest.mock import Mock, patch

import torch
from capture import pretended_cuda
from envs import ScriptedGames
from gymnasium.vector import SyncVectorEnv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# These take memory, or look at some differently, and launch nothing.
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
NO_KERNEL |= {aten._unsafe_view}
CAPTURED = {"act", "prepare", "update"}
MAY_WAIT = {"later_beginnings"}  # of eager scripts with a memory; nothing captures it


class TrafficError(Exception):
    """What a GPU refuses, or what must not happen in what is to be captured."""


def waits(function: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether the host has to wait for the device in a call: for a number, or how large the result is."""
    if function.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        # The result has as many rows as a mask says. Indices of other types leave nothing to ask.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*function.tags})


class Traffic(TorchDispatchMode):
    """Counts operations, copies and waits of a device on "meta". CAPTURED may have none but operations."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.steps: list[Counter[str]] = []  # what was counted until each step of the environments
        # What the host has sent without waiting, and its content then.
        self.under_way: list[tuple[Tensor, Tensor]] = []
        self.arriving: list[Tensor] = []  # what the host has fetched without waiting: NaN before it has

    def note(self, *events: str) -> None:
        """Count copies and waits, and refuse them where there must not be any."""
        self.counts.update(events)
        if "wait" in events:
            if not all(torch.equal(source, sent) for source, sent in self.under_way):
                raise TrafficError("memory of the host changed with a copy of it under way until here")
            self.under_way.clear()
            while self.arriving:
                self.arriving.pop().zero_()
        frames = [frame for frame, _ in walk_stack(sys._getframe())]
        names = {frame.f_code.co_name for frame in frames if frame.f_globals.get("__name__") == "__main__"}
        if (found := CAPTURED & names) and not MAY_WAIT & names:
            raise TrafficError(f"{' and '.join(events)} in {found.pop()}")

    def __torch_dispatch__(self, function: torch._ops.OpOverload, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if not tensor.is_meta]
        if len(on_host) == len(tensors) and kwargs.get("device") != torch.device("meta"):
            return function(*args, **kwargs)

        if function is aten.copy_.default and on_host:
            self._copied(*args, **kwargs)
            return args[0] if args[0].is_meta else args[0].zero_()
        to_host = function is aten._to_copy.default and kwargs.get("device", args[0].device).type == "cpu"
        if to_host or (function is aten._to_copy.default and on_host):
            dtype = kwargs.get("dtype") or args[0].dtype
            result = torch.zeros(args[0].shape, dtype=dtype, device=kwargs["device"])
            if args[0].is_meta and kwargs.get("non_blocking"):  # to memory that PyTorch pins
                self.note("to the host")
                self.arriving.append(result.fill_(torch.nan))
            else:
                self._copied(result, args[0], kwargs.get("non_blocking", False))
            return result
        if function is aten._local_scalar_dense.default:
            self.note("to the host", "wait")
            return torch.ones((), dtype=args[0].dtype).item()
        if waits(function, args):
            self.note("wait")
        if on_host and "device" not in kwargs:  # with which it makes a tensor like another one
            if any(tensor.dim() for tensor in on_host):
                raise TrafficError(f"{function} on tensors of the host and of the device")
            self.note("number of the host")
        aliases = [result.alias_info for result in function._schema.returns]
        view = aliases and all(alias and not alias.is_write for alias in aliases)
        if not view and function.overloadpacket not in NO_KERNEL:
            self.counts.update(["operation", *["operation meanwhile"] * bool(self.arriving)])
        return function(*args, **kwargs)

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        # The host waits for what it copies, unless told otherwise, and for what comes from the device to
        # memory of its own in any case: that is not pinned.
        sent = target.is_meta and non_blocking
        self.note("to the device" if target.is_meta else "to the host", *["wait"] * (not sent))
        if sent:
            self.under_way.append((source, source.clone()))


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Pretend a CUDA device without values, and count what goes to and from it."""
    traffic = Traffic()

    def counted(step: Callable) -> Callable:
        def step_and_count(*args):
            traffic.steps.append(traffic.counts.copy())
            return step(*args)

        return step_and_count

    def event() -> Mock:
        """In place of `torch.cuda.Event`: whoever waits for one that was recorded waits for all before it."""
        recorded = []
        return Mock(record=lambda: recorded.append(1), synchronize=lambda: recorded and traffic.note("wait"))

    with (
        patch.object(SyncVectorEnv, "step", counted(SyncVectorEnv.step)),
        patch.object(ScriptedGames, "step", counted(ScriptedGames.step)),
        patch("torch.cuda.Event", event),
        pretended_cuda("meta", synchronize=partial(traffic.note, "wait")),
        traffic,
    ):
        yield traffic
