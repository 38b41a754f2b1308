"""What the matrix products of a script would allow, were they all: a bound on its speed.

    ./run.sh python -m benchmark.studies.roofline [--scripts NAME ...] [--output FILE]

Counts the floating-point operations of products and convolutions in an agent step, with all that is learnt
in one, by PyTorch's own counter, in the eager script at its default sizes; measures how many the machine's
CPU does a second in large float32 products, on as many threads as the script has; and times a compiled run,
once. Nothing else may run meanwhile. --output names a file of results, whose lines of the same scripts are
replaced.
"""

import os
import runpy
import sys
import tempfile
import time
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import tyro

from benchmark import LEANRL
from benchmark.collection import COLLECTION
from benchmark.machine import provenance, run_for_summary
from benchmark.report import results
from benchmark.report.tables import by_machine, markdown
from benchmark.terminal import check_names, lines_of_output


class Line(results.Timing):
    """A script's products, and such a machine's speed."""

    script: str
    torch_threads: int
    sps: float
    mflop_per_step: float
    gflops: float


check = results.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """What the matrix products alone would allow beside what a compiled run reaches."""
    rows = []
    for line in lines:
        bound = line["gflops"] * 1000 / line["mflop_per_step"]
        figures = [f"{line['mflop_per_step']:.1f}", str(line["torch_threads"]), f"{line['gflops']:.0f}"]
        figures += [f"{bound:.0f}", f"{line['sps']:.0f}", f"{line['sps'] / bound:.0%}"]
        rows.append([line["script"], *figures])
    header = ["", "MFLOP a step", "threads", "GFLOP/s", "the products alone, steps/s"]
    return markdown([*header, "compiled, steps/s", "share"], rows)


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(COLLECTION)
    """eager scripts, whose twins are timed"""
    output: Path | None = None
    """a file of results to write to; its lines of the same scripts are replaced"""


def arguments(script: str, steps: int) -> list[str]:
    """The arguments of a run on the CPU that learns in most of its steps."""
    starts = [] if COLLECTION[script].on_policy else [f"--learning-starts={100 if steps < 1000 else 1000}"]
    return ["--no-cuda", f"--total-timesteps={steps}", *starts]


def lengths(script: str) -> tuple[int, int]:
    """Agent steps asked of two runs, whose difference has no start-up: rollouts, or a few gradient steps."""
    rollouts = COLLECTION[script].quick // 4
    return (rollouts, 2 * rollouts) if COLLECTION[script].on_policy else (300, 700)


def operations(script: str, steps: int) -> tuple[int, int]:
    """Floating-point operations of products and convolutions in a whole eager run, and the steps it made."""
    path = str(LEANRL / f"{script}.py")
    import torch  # `./run.sh report` needs none
    from torch.utils.flop_counter import FlopCounterMode

    # An LSTM of oneDNN's is one operation, of which nothing is counted.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        with patch.object(sys, "argv", [path, *arguments(script, steps)]), patch("signal.signal"):
            run = runpy.run_path(path, run_name="__main__")
    return counter.get_total_flops(), run["global_step"]


def gflops() -> float:
    """Billions of operations a second of the CPU on PyTorch's threads, in the best of ten large products."""
    import torch

    a, b = torch.randn(2, 2048, 2048)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(seconds) / 1e9


def measure(script: str, threads: int) -> dict:
    """The line of a script, which takes so many threads unless it sets their number itself."""
    import torch

    torch.set_num_threads(threads)
    with redirect_stdout(None):
        (few, begin), (many, end) = (operations(script, steps) for steps in lengths(script))
    megaflops = (many - few) / (end - begin) / 1e6
    command = [sys.executable, str(LEANRL / f"{script}_torchcompile.py"), "--compile"]
    command += arguments(script, COLLECTION[script].speed)
    summary, _ = run_for_summary(command, Path.cwd())
    line = {"format": results.FORMAT, "status": "ok", "script": script, "sps": summary["sps"]}
    line |= {"torch_threads": torch.get_num_threads(), "mflop_per_step": megaflops, "gflops": gflops()}
    return line | provenance(command, dict(os.environ), None)


def main() -> None:
    args = tyro.cli(Args)
    check_names("scripts", args.scripts, COLLECTION)
    known = lines_of_output(args.output, check)
    import torch

    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        lines = [measure(script, threads) for script in args.scripts]
    print(table(lines))
    if args.output:
        every = {line["script"]: line for line in [*known, *lines]}
        results.replace(args.output, [every[script] for script in COLLECTION if script in every], check)


if __name__ == "__main__":
    main()
