"""Code for a GPU without one: what Inductor makes of the twins' graphs for an NVIDIA H100, counted.

    python -m benchmark.studies.cuda_code [--scripts NAME ...] [--output benchmark/results/cuda_code.jsonl]

Runs each twin with --compile on the CPU up to its training loop and keeps the graphs that Inductor gets.
Then their devices become a CUDA device with the properties of an H100, and Inductor lowers and schedules
them and writes their code. That is counted, not run; each Triton kernel in it is compiled for sm_90 by the
ptxas that comes with Triton. Left out is what Inductor decides by timing on the GPU: which matrix products
it pads, and in which of its configurations a kernel runs (all are compiled).

Needs a build of PyTorch for CUDA, of several GB, but neither a GPU nor a driver. It has no place in the
environment of run.sh:

    python3 -m venv .venv-cuda
    .venv-cuda/bin/pip install -r requirements/dev.txt torch===2.13.0
    .venv-cuda/bin/python -m benchmark.studies.cuda_code

Exit status: 0 each graph has code and each kernel compiles, 1 some do not, 2 a bad argument or a PyTorch
without CUDA.
"""

import ast
import inspect
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial, wraps
from importlib import metadata
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, ModuleType, SimpleNamespace
from typing import Literal
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
from typing_extensions import TypedDict

from benchmark import LEANRL, ROOT
from benchmark.collection import COLLECTION, ENV_IDS
from benchmark.machine import commit
from benchmark.report import results
from benchmark.terminal import check_names, lines_of_output, refuse

# Of an environment of its own, or of any of --env-ids, and what else a script needs.
SCRIPTS = {
    name: (None if algorithm.env_id == ENV_IDS["continuous"][0] else algorithm.env_id, ())
    for name, algorithm in COLLECTION.items()
}
# Many environments: for few these act in NumPy.
SCRIPTS |= {
    "ppo_continuous_action --num-envs 1024": (None, ("--num-envs", "1024", "--total-timesteps", "4000000")),
    "dqn --num-envs 65": ("CartPole-v1", ("--num-envs", "65")),
    "dqn, bytes": ("envs:BytesChoices-v0", ()),  # of tests/envs.py
}
SCRIPTS |= {
    f"{script} --precision {precision}": (SCRIPTS[script][0], ("--precision", precision))
    for precision in ("tf32", "bfloat16")
    for script in ("sac_continuous_action", "ppo_continuous_action", "ppo_atari_envpool")
}
# One of several processes, here alone.
SCRIPTS |= {
    path.stem: SCRIPTS[path.stem.removesuffix("_multigpu")] for path in sorted(LEANRL.glob("*_multigpu.py"))
}
CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
)
EXTERN = re.compile(r"(?:extern_kernels|aten|torch\.ops\.\w+)\.(\w+)")
SPILL = re.compile(r"(\d+) bytes spill stores")


class OfGraph(TypedDict):
    """What a line of results says of a graph of a twin, compiled for a GPU."""

    format: int
    script: str  # the eager script
    env_id: str
    graph: str
    torch: str
    triton: str
    git_commit: str | None


class Code(OfGraph):
    """A graph that code was generated for, with what was counted in that."""

    generated: Literal[True]
    triton_launches: int
    extern_calls: dict[str, int]  # of kernels that are not generated, such as matrix products, by operation
    kernels: int  # Triton kernels, each of which may be launched more than once
    compiled: int  # of these kernels
    spilling: int  # of the compiled ones
    errors: list[str]  # one for each kernel that does not compile


class NoCode(OfGraph):
    """A graph that no code was generated for, and why."""

    generated: Literal[False]
    error: str


def check(line: object) -> None:
    """Raise ValueError, with one line that says why, unless this is a line of results of this study."""
    results.check_of()(line)
    results.check_of(Code if line.get("generated") else NoCode)(line)
    if line["generated"] and line["compiled"] + len(line["errors"]) != line["kernels"]:
        raise ValueError("has kernels that neither compile nor have an error")


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(SCRIPTS)
    """eager scripts, whose twins are compiled, and those for several processes"""
    env_ids: tuple[str, ...] = ("HalfCheetah-v4",)
    """environments of the continuous scripts, for their sizes"""
    output: Path | None = None
    """a file of results; its lines of the same script, environment and version of torch are replaced"""


@dataclass
class Graph:
    """A graph as Inductor gets it. Tensors among its inputs are their size, stride, offset and dtype."""

    name: str
    module: fx.GraphModule
    inputs: list


class Generated(BaseException):
    """Carries the code that Inductor has generated out of it; an Exception it would catch."""


def check_scripts(scripts: tuple[str, ...]) -> None:
    """Refuse names that are none, and a PyTorch that knows nothing of CUDA."""
    check_names("scripts", scripts, SCRIPTS)
    if torch.version.cuda is None:
        refuse(f"needs PyTorch for CUDA, and this is {torch.__version__}: see the top of this file")


def one_line(error: Exception) -> str:
    """What an error says and where it was raised, for Inductor's assertions say nothing."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{said} in {frame.name}: {frame.line}"


def up_to_the_loop(path: Path) -> CodeType:
    """A script that exits where its training loop begins; its `Compiled` would ask for Inductor's code."""
    tree = ast.parse(path.read_text(), str(path))
    tree.body = [node for node in tree.body if getattr(node, "name", None) != "Compiled"]
    [loop] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and ast.unparse(node.test) == "not last"
    ]
    loop.body.insert(0, ast.parse("raise SystemExit").body[0])
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def recording_compile(graphs: list[Graph], compile_function: Callable) -> Callable:
    """A torch.compile that appends to `graphs` what Inductor would get, and runs that as it is.

    A graph is named by the function and, where it has arguments that are no tensors, by these.
    """

    def recording(function: Callable, **options) -> Callable:
        calls = []
        is_network = isinstance(function, torch.nn.Module)  # the policy of PPO
        name, call_of = ("act", function.forward) if is_network else (function.__name__, function)

        def record(module: fx.GraphModule, inputs: list, **_) -> Callable:
            kept = [
                (x.size(), x.stride(), x.storage_offset(), x.dtype) if isinstance(x, torch.Tensor) else x
                for x in inputs
            ]
            graphs.append(Graph(calls[-1], module, kept))
            return module.forward

        compiled = compile_function(function, backend=partial(compile_fx, inner_compile=record), **options)

        @wraps(function)
        def call(*args, **kwargs) -> object:
            arguments = inspect.signature(call_of).bind(*args, **kwargs).arguments.items()
            kind = ", ".join(
                f"{key}={value}" for key, value in arguments if not isinstance(value, torch.Tensor)
            )
            calls.append(f"{name}({kind})" if kind else name)
            return compiled(*args, **kwargs)

        return call

    return recording


def graphs_of(script: str, *arguments: str) -> list[Graph]:
    """The graphs of a twin's functions, one for each kind of gradient step, as they are compiled."""
    name = re.match(r"\w+", script)[0]
    path = LEANRL / f"{name}{'' if name.endswith('_multigpu') else '_torchcompile'}.py"
    sys.modules["__main__"] = module = ModuleType("__main__")  # where tyro looks for the texts of --help
    module.__file__ = str(path)
    module.Compiled = lambda function: torch.compile(function, fullgraph=True, dynamic=False)
    torch._dynamo.reset()  # it would take the sizes of a second environment for dynamic
    graphs: list[Graph] = []
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
            exec(up_to_the_loop(path), vars(module))
        except SystemExit as end:
            if end.code is not None:
                raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return graphs


class NoDriver:
    """In place of what Triton links with CUDA's driver."""

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": H100.shared_memory_per_block_optin}


@contextmanager
def pretended_h100() -> Iterator[None]:
    """PyTorch, Inductor and Triton find an H100, on which nothing can run."""
    answers = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: H100,
    }
    # Inductor puts back the random state and the current device after compiling.
    more = {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    with (
        patch.multiple(torch.cuda, **answers, **more),
        patch.multiple(CudaInterface, **{name: staticmethod(answer) for name, answer in answers.items()}),
        patch("torch._subclasses.fake_tensor.init_gpu_context"),  # puts a tensor there, in torch 2.11
        patch("triton.backends.nvidia.driver.CudaUtils", NoDriver),
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
        raise Generated(lowering.codegen()[0].value)

    def on_cuda(size: tuple, stride: tuple, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without content. By its offset Inductor knows whether addresses are aligned."""
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        return torch.empty(offset + last + 1, dtype=dtype, device=CUDA).as_strided(size, stride, offset)

    move_to_cuda(graph.module)
    with FakeTensorMode() as mode:
        inputs = [on_cuda(*x) if isinstance(x, tuple) else x for x in graph.inputs]
    with (
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        patch("torch._inductor.graph.GraphLowering.compile_to_module", stop),
    ):
        try:
            compile_fx_inner(graph.module, inputs, cudagraphs=BoxedBool(False), is_inference=True)
        except Generated as generated:
            return generated.args[0]
    raise AssertionError("Inductor has come to its end without code")


def count(code: str) -> tuple[int, dict[str, int], dict[str, str]]:
    """Of generated code: launches of its kernels, calls of others' by operation, its kernels' sources.

    A call of another's kernel (a matrix product, a convolution, drawing a seed) may launch more than one.
    """
    tree = ast.parse(code)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sources = {
        node.args[0].value: node.args[1].value
        for node in calls
        if ast.unparse(node.func) == "async_compile.triton"
    }
    [run] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    called = [ast.unparse(node.func) for node in ast.walk(run) if isinstance(node, ast.Call)]
    launches = sum(name.endswith(".run") and name.removesuffix(".run") in sources for name in called)
    extern = Counter(match[1] for match in map(EXTERN.match, called) if match and match[1] != "view")
    return launches, dict(extern), sources


def compile_kernel(name: str, source: str) -> bool:
    """Compile a Triton kernel for sm_90, in all configurations; returns whether one spills registers.

    Raises what Triton or ptxas raise, or RuntimeError where ptxas has compiled fewer than these.
    """
    kernel = getattr(PyCodeCache.load(source), name)
    configurations = len(kernel.configs)
    with redirect_stdout(StringIO()) as log:
        kernel.precompile(warm_cache_only=True)
    spills = SPILL.findall(log.getvalue())
    if len(spills) < configurations:
        raise RuntimeError(f"ptxas has compiled {len(spills)} of {configurations} configurations")
    return any(map(int, spills))


def measure(graph: Graph) -> dict:
    """What a line of results says of a graph and its code."""
    with pretended_h100(), fresh_cache():
        try:
            code = generate(graph)
        except Exception as error:
            return {"graph": graph.name, "generated": False, "error": one_line(error)}
        launches, extern, sources = count(code)
        spilling, errors = [], []
        for name, source in sources.items():
            try:
                spilling.append(compile_kernel(name, source))
            except Exception as error:
                errors.append(f"{name}: {one_line(error)}")
    line = {"graph": graph.name, "generated": True, "triton_launches": launches, "extern_calls": extern}
    line |= {"kernels": len(sources), "compiled": len(spilling), "spilling": sum(spilling), "errors": errors}
    return line


def told(line: dict) -> str:
    """A line of results in words."""
    title = f"{line['script']}, {line['env_id']}: {line['graph']}"
    if not line["generated"]:
        return f"{title}: no code: {line['error']}"
    extern = ", ".join(f"{operation} {calls}" for operation, calls in line["extern_calls"].items())
    compiled = f"{line['compiled']} of {line['kernels']} kernels compile for sm_90"
    kernels = f"{compiled}, {line['spilling']} spill registers"
    return "\n  ".join(
        [f"{title}: {line['triton_launches']} Triton launches; {extern}; {kernels}", *line["errors"]]
    )


def main() -> None:
    args = tyro.cli(Args)
    sys.path.append(str(ROOT / "tests"))
    check_scripts(args.scripts)
    lines = lines_of_output(args.output, check)
    made_with = {
        "torch": torch.__version__.split("+")[0],
        "triton": metadata.version("triton"),
        "git_commit": commit(ROOT),
    }
    failed, settings = False, config.save_config()
    for script in args.scripts:
        config.load_config(settings)  # those of a script are for it alone
        own, arguments = SCRIPTS[script]
        for env_id in (own,) if own else args.env_ids:
            made_of = {"format": results.FORMAT, "script": script, "env_id": env_id, **made_with}
            same = {key: made_of[key] for key in ("script", "env_id", "torch")}
            lines = [line for line in lines if not line.items() >= same.items()]
            for graph in graphs_of(script, "--env-id", env_id, *arguments):
                lines.append(made_of | measure(graph))
                print(told(lines[-1]), flush=True)
                failed |= not lines[-1]["generated"] or bool(lines[-1]["errors"])
            if args.output:
                results.replace(args.output, lines, check)
    sys.exit(int(failed))


if __name__ == "__main__":
    with (
        patch.dict("os.environ", TRITON_DUMP_PTXAS_LOG="1"),
        config.patch(force_disable_caches=True, compile_threads=1),
    ):
        main()
