"""Code for a GPU without one: does it compile for an NVIDIA H100, and how many kernels does a call launch?

    .venv-cuda/bin/python -m benchmark.studies.cuda_code [--scripts NAME ...]

Runs each twin with --compile on the CPU up to its training loop and keeps the graphs that Inductor gets. Then
their devices become a CUDA device with the properties of an H100, and Inductor lowers and schedules them and
writes their code. That is counted, not run; each Triton kernel in it is compiled for sm_90 by the ptxas that
comes with Triton. Left out is what Inductor decides by timing on the GPU: which matrix products it pads, and
in which of its configurations a kernel runs (all are compiled). Needs a build of PyTorch for CUDA, of several
GB, but neither a GPU nor a driver, in an environment of its own:

    python3 -m venv .venv-cuda && .venv-cuda/bin/pip install -r requirements/dev.txt torch===2.13.0

Exit status: 0 each graph has code and each kernel compiles, 1 some do not, 2 a bad argument or a PyTorch
without CUDA.
"""

import ast
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import tyro
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.utils import BoxedBool, fresh_cache
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton

from benchmark import LEANRL
from benchmark.collection import COLLECTION
from benchmark.profile_run import hooked
from benchmark.terminal import refuse

SCRIPTS = {name: f"{name}_torchcompile" for name in COLLECTION}
SCRIPTS |= {path.stem: path.stem for path in sorted(LEANRL.glob("*_multigpu.py"))}  # one process, alone
CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32
)
H100.max_threads_per_block, H100.max_threads_per_multi_processor = 1024, 2048
H100.regs_per_multiprocessor, H100.shared_memory_per_block = 65536, 48 * 2**10
H100.shared_memory_per_block_optin, H100.shared_memory_per_multiprocessor = 227 * 2**10, 228 * 2**10
H100.L2_cache_size, H100.total_memory = 50 * 2**20, 80 * 2**30
EXTERN = re.compile(r"(?:extern_kernels|aten|torch\.ops\.\w+)\.(\w+)")


@dataclass
class Args:
    scripts: tuple[Literal[*SCRIPTS], ...] = tuple(SCRIPTS)
    """eager scripts, whose twins are compiled, and those for several processes"""


class Graph(NamedTuple):
    """A graph as Inductor gets it. Tensors among its inputs are their size, stride, offset and dtype."""

    name: str
    module: fx.GraphModule
    inputs: list


class GeneratedError(BaseException):
    """Carries the code that Inductor has generated out of it; an Exception it would catch."""


def one_line(error: Exception) -> str:
    """What an error says and where it was raised, for Inductor's assertions say nothing."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{said} in {frame.name}: {frame.line}"


def recording_compile(graphs: list[Graph], compile_function: Callable) -> Callable:
    """A torch.compile that appends to `graphs` what Inductor would get, and runs that as it is."""

    def layout(x: object) -> object:
        is_tensor = isinstance(x, torch.Tensor)
        return (x.size(), x.stride(), x.storage_offset(), x.dtype) if is_tensor else x

    def recording(function: Callable, **options) -> Callable:
        name = getattr(function, "__name__", "act")  # PPO's policy is a module

        def record(module: fx.GraphModule, inputs: list, **_) -> Callable:
            graphs.append(Graph(name, module, list(map(layout, inputs))))
            return module.forward

        return compile_function(function, backend=partial(compile_fx, inner_compile=record), **options)

    return recording


def graphs_of(script: str, *arguments: str) -> list[Graph]:
    """The graphs of a twin's functions, one for each kind of gradient step, as they are compiled."""
    path, graphs = LEANRL / f"{SCRIPTS[script]}.py", []
    sys.modules["__main__"] = module = ModuleType("__main__")  # where tyro looks for the texts of --help
    module.__file__, module.begin_profile = str(path), lambda _: sys.exit()
    # In place of the script's, which would ask for Inductor's code.
    module.Compiled = lambda function: torch.compile(function, fullgraph=True, dynamic=False)
    tree = hooked(path.read_text(), path)
    tree.body = [node for node in tree.body if getattr(node, "name", None) != "Compiled"]
    torch._dynamo.reset()  # it would take the sizes of a second environment for dynamic
    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        patch.object(sys, "argv", [str(path), "--compile", "--no-cuda", *arguments]),
        patch("torch.compile", recording_compile(graphs, torch.compile)),
        patch("signal.signal"),  # Ctrl+C is for this program
        # Else what a run has left there would not be recorded.
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        try:
            exec(compile(tree, str(path), "exec"), vars(module))
        except SystemExit as end:
            if end.code is not None:
                raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return graphs


@contextmanager
def pretended_h100() -> Iterator[None]:
    """PyTorch, Inductor and Triton find an H100, on which nothing can run."""
    answers = {"current_device": lambda: 0, "device_count": lambda: 1}
    answers["get_device_properties"] = lambda device=None: H100
    more = {"is_available": lambda: True, "get_device_capability": lambda device=None: (9, 0)}
    # Inductor puts back the random state and the current device after compiling.
    more |= {"get_rng_state": lambda device=None: torch.get_rng_state()}
    more |= {"set_rng_state": lambda state, device=None: None}
    more |= dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda device: 0)
    limits = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 227 * 2**10})
    with (
        patch.multiple(torch.cuda, **answers, **more),
        patch.multiple(CudaInterface, **{name: staticmethod(answer) for name, answer in answers.items()}),
        patch("torch._subclasses.fake_tensor.init_gpu_context"),  # puts a tensor there, in torch 2.11
        patch("triton.backends.nvidia.driver.CudaUtils", lambda: limits),  # is linked with CUDA's driver
    ):
        has_triton.cache_clear()  # it has been asked before there was an H100
        yield


def move_to_cuda(module: fx.GraphModule) -> None:
    """Have the tensors that a graph creates on the CPU created on the CUDA device."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args, node.kwargs = fx.node.map_aggregate(
                    (node.args, node.kwargs), lambda value: CUDA if value == torch.device("cpu") else value
                )
            part.recompile()


def generate(graph: Graph) -> str:
    """Inductor's code for a graph on an H100."""

    def stop(lowering) -> None:
        raise GeneratedError(lowering.codegen()[0].value)

    def on_cuda(size: tuple, stride: tuple, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without content. By its offset Inductor knows whether addresses are aligned."""
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        return torch.empty(offset + last + 1, dtype=dtype, device=CUDA).as_strided(size, stride, offset)

    move_to_cuda(graph.module)
    with FakeTensorMode() as mode:
        inputs = [on_cuda(*x) if isinstance(x, tuple) else x for x in graph.inputs]
    end = patch("torch._inductor.graph.GraphLowering.compile_to_module", stop)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)), end:
        try:
            compile_fx_inner(graph.module, inputs, cudagraphs=BoxedBool(False), is_inference=True)
        except GeneratedError as generated:
            return generated.args[0]
    raise AssertionError("Inductor has come to its end without code")


def count(code: str) -> tuple[int, dict[str, int], dict[str, str]]:
    """Of generated code: launches of its kernels, calls of others' by operation, its kernels' sources.

    A call of another's kernel (a matrix product, a convolution, drawing a seed) may launch more than one.
    """
    nodes = list(ast.walk(ast.parse(code)))
    compiled = (node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1)
    compiled = [node.args for node in compiled if ast.unparse(node.func) == "async_compile.triton"]
    sources = {name.value: source.value for name, source, *_ in compiled}
    [run] = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "call"]
    called = [ast.unparse(node.func) for node in ast.walk(run) if isinstance(node, ast.Call)]
    launches = sum(name.endswith(".run") and name.removesuffix(".run") in sources for name in called)
    extern = Counter(match[1] for match in map(EXTERN.match, called) if match and match[1] != "view")
    return launches, dict(extern), sources


def compile_kernel(name: str, source: str) -> None:
    """Compile a Triton kernel for sm_90, in all configurations.

    Raises what Triton or ptxas raise, or RuntimeError where ptxas has compiled fewer than these.
    """
    kernel = getattr(PyCodeCache.load(source), name)
    configurations = len(kernel.configs)
    with redirect_stdout(StringIO()) as log:
        kernel.precompile(warm_cache_only=True)
    if (found := log.getvalue().count("bytes spill stores")) < configurations:
        raise RuntimeError(f"ptxas has compiled {found} of {configurations} configurations")


def measure(graph: Graph) -> tuple[str, bool]:
    """What there is to say of a graph's code, and whether all of it compiles."""
    errors = []
    with pretended_h100(), fresh_cache():
        try:
            launches, extern, sources = count(generate(graph))
        except Exception as error:
            return f"no code: {one_line(error)}", False
        for name, source in sources.items():
            try:
                compile_kernel(name, source)
            except Exception as error:
                errors.append(f"\n  {name}: {one_line(error)}")
    others = ", ".join(f"{operation} {calls}" for operation, calls in extern.items())
    compiled = f"{len(sources) - len(errors)} of {len(sources)} kernels compile for sm_90"
    return f"{launches} Triton launches; {others}; {compiled}{''.join(errors)}", not errors


def main() -> int:
    args = tyro.cli(Args)
    if torch.version.cuda is None:
        refuse(f"needs PyTorch for CUDA, and this is {torch.__version__}: see the top of this file")
    status, settings = 0, config.save_config()
    for script in args.scripts:
        config.load_config(settings)  # those of a script are for it alone
        for graph in graphs_of(script):
            told, whole = measure(graph)
            print(f"{script}: {graph.name}: {told}", flush=True)
            status |= not whole
    return status


if __name__ == "__main__":
    with (
        patch.dict("os.environ", TRITON_DUMP_PTXAS_LOG="1"),
        config.patch(force_disable_caches=True, compile_threads=1),
    ):
        sys.exit(main())
