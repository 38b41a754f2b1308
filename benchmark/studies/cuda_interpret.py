"""Run the code that Inductor generates for an H100, in Triton's interpreter, and compare the results.

    python -m benchmark.studies.cuda_interpret [--scripts ppo_continuous_action]

Takes the graphs of benchmark.studies.cuda_code, which also says what this needs. Each gets random inputs; one
copy of these goes through the operations of the graph, by ATen, the other through the generated code, in
which Triton's kernels are interpreted and matrix products are ATen's. Then all that was returned or written
in place has to agree. Minutes a script.

Not compared: Triton's random numbers (both take ATen's), its exp, log1p, pow, signbit and tanh (NumPy's
stand in, because those of the GPU are machine code), and all but the first configuration of a kernel.

Exit status: 0 all graphs agree, 1 some do not or cannot be interpreted, 2 a bad argument or a PyTorch
without CUDA.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
import tyro
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import GridExpr

from benchmark.collection import COLLECTION
from benchmark.studies import cuda_code

TOLERANCE = 1e-4  # of the largest value of a tensor; float32 rounds sums of hundreds of terms
# Less memory or, of Atari's frames, less time: 8 in a gradient step.
OFF_POLICY = [name for name, algorithm in COLLECTION.items() if not algorithm.on_policy]
SMALLER = dict.fromkeys(OFF_POLICY, ("--buffer-size", "2000"))
SMALLER |= {"ppo_continuous_action --num-envs 1024": ("--num-steps", "4")}
SMALLER |= {"ppo_atari_envpool": ("--num-envs", "2", "--num-steps", "16")}
LIBDEVICE = {"exp": np.exp, "log1p": np.log1p, "pow": np.power, "signbit": np.signbit, "tanh": np.tanh}


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(cuda_code.SCRIPTS)
    """eager scripts; their twins are compiled"""
    env_id: str = "HalfCheetah-v4"
    """the environment of the continuous scripts"""


def in_numpy(function: Callable) -> Callable:
    """A function of CUDA's library as the interpreter can call it."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def call(*args, **_) -> tl.tensor:
        like = next(x for x in args if isinstance(x, tl.tensor)).handle
        data = [
            x.handle.data if isinstance(x, tl.tensor) else np.float32(getattr(x, "value", x)) for x in args
        ]
        with np.errstate(all="ignore"):
            result = np.asarray(function(*data))
        dtype, numpy_dtype = (tl.int32, np.int32) if result.dtype == bool else (like.dtype, like.data.dtype)
        handle = TensorHandle(result.astype(numpy_dtype), dtype)
        return tl.tensor(handle, tl.block_type(dtype, list(result.shape)) if result.ndim else dtype)

    return call


class Kernel:
    """A Triton kernel that is interpreted, in the first of its configurations."""

    def __init__(self, name: str, source: str):
        kernel = getattr(PyCodeCache.load(source), name)
        self.function, self.configuration, self.meta = kernel.fn, kernel.configs[0], kernel.inductor_meta

    def run(self, *args, stream: int) -> None:
        names, blocks = self.function.arg_names, self.configuration.kwargs
        sizes = dict(zip(names, args, strict=False)) | blocks
        grid = GridExpr.from_meta(self.meta, self.configuration).eval_slow(sizes)
        self.function[grid](*args, **{name: size for name, size in blocks.items() if name in names})


def interpret(code: str, inputs: list) -> list:
    """What generated code returns for inputs on the CPU."""
    from torch._C._dynamo import guards
    from torch._inductor.runtime.triton_helpers import libdevice

    namespace: dict = {}
    with (
        cuda_code.pretended_h100(),
        patch.multiple(torch.cuda, _DeviceGuard=nullcontext, set_device=lambda device: None),
        patch("torch._C._cuda_getCurrentRawStream", lambda device: 0),
        patch.object(guards, "_empty_strided_cuda", guards._empty_strided_cpu),
        patch(
            "torch._inductor.async_compile.AsyncCompile.triton",
            lambda _, name, source, **__: Kernel(name, source),
        ),
        patch.multiple(libdevice, **{name: in_numpy(function) for name, function in LIBDEVICE.items()}),
    ):
        exec(code.replace("device(type='cuda', index=0)", "device(type='cpu')"), namespace)
        return namespace["call"](list(inputs))


def random_input(size: tuple, stride: tuple, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of what every input can be: small numbers, indices, or a 0-dim size of a buffer."""
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    if dtype.is_floating_point:
        return tensor.uniform_(0.01, 0.1)
    if dtype == torch.uint8:
        return tensor.random_(256)
    return tensor.copy_(torch.arange(tensor.numel()).view(size)) if size else tensor.fill_(1000)


def as_laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the tensor, which code checks, and clone() loses where they leave gaps."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def difference(graph: cuda_code.Graph) -> float:
    """How far apart the graph's operations and its code end, relative to the largest value of a tensor.

    A 0-dim value below 0.01 counts as one of 0.01: an explained variance may be 0 but for rounding.
    """
    inputs = [random_input(*x) if isinstance(x, tuple) else x for x in graph.inputs]
    ours, theirs = ([as_laid_out(x) if isinstance(x, torch.Tensor) else x for x in inputs] for _ in range(2))
    rng = torch.get_rng_state()
    expected = [*graph.module.forward(*ours), *ours]
    with cuda_code.pretended_h100():
        code = cuda_code.generate(graph)
    torch.set_rng_state(rng)
    found = [*interpret(code, theirs), *theirs]
    pairs = [pair for pair in zip(expected, found, strict=True) if isinstance(pair[0], torch.Tensor)]
    least = [1e-30 if expected.ndim else 0.01 for expected, _ in pairs]
    errors = [(a.double() - b.double()).abs().max() for a, b in pairs]
    largest = [a.double().abs().max().clamp(min=low) for (a, _), low in zip(pairs, least, strict=True)]
    worst = [(error / size).item() for error, size in zip(errors, largest, strict=True)]
    return float(np.max(worst))  # and not max(), which would pass over a NaN


def main() -> None:
    args = tyro.cli(Args)
    cuda_code.check_scripts(args.scripts)
    failed = False
    for script in args.scripts:
        own, arguments = cuda_code.SCRIPTS[script]
        arguments += SMALLER.get(script, ())
        for graph in cuda_code.graphs_of(script, "--env-id", own or args.env_id, *arguments):
            try:
                relative = difference(graph)
                agrees, told = relative <= TOLERANCE, f"differs by {relative:.1e}"
            except Exception as error:
                agrees, told = False, f"cannot be interpreted: {cuda_code.one_line(error)}"
            print(f"{script}: {graph.name}: {told}", flush=True)
            failed |= not agrees
    sys.exit(int(failed))


if __name__ == "__main__":
    with config.patch(force_disable_caches=True, compile_threads=1, fallback_random=True):
        main()
