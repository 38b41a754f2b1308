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
import subprocess
import sys
import tempfile
import time
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

from benchmark import LEANRL
from benchmark.machine import provenance, summary_of
from benchmark.report import results
from benchmark.report.tables import roofline_table
from benchmark.terminal import check_names, lines_of_output

# Two lengths of a run, whose difference has no start-up, and the length of the one that is timed.
LENGTHS = {
    "sac_continuous_action": (120, 220, 4000),
    "td3_continuous_action": (120, 220, 4000),
    "ppo_continuous_action": (2048, 2 * 2048, 30 * 2048),
    "ppo_atari_envpool": (1024, 2 * 1024, 8 * 1024),
    "dqn": (300, 700, 60_000),
}


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(LENGTHS)
    """eager scripts, whose twins are timed"""
    output: Path | None = None
    """a file of results to write to; its lines of the same scripts are replaced"""


def arguments(script: str, steps: int) -> list[str]:
    """The arguments of a run on the CPU that learns in most of its steps."""
    starts = [] if script.startswith("ppo") else [f"--learning-starts={100 if steps < 1000 else 1000}"]
    return ["--no-cuda", f"--total-timesteps={steps}", *starts]


def operations(script: str, steps: int) -> int:
    """The floating-point operations of products and convolutions in a whole run of the eager script."""
    path = str(LEANRL / f"{script}.py")
    with FlopCounterMode(display=False) as counter:
        with patch.object(sys, "argv", [path, *arguments(script, steps)]), patch("signal.signal"):
            runpy.run_path(path, run_name="__main__")
    return counter.get_total_flops()


def gflops(threads: int) -> float:
    """Billions of operations a second of the CPU on so many threads, in the best of ten large products."""
    torch.set_num_threads(threads)
    a, b = torch.randn(2, 2048, 2048)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(seconds) / 1e9


def measure(script: str, threads: int) -> dict:
    """The line of a script."""
    short, long, timed = LENGTHS[script]
    with redirect_stdout(None):
        counted = [operations(script, steps) for steps in (short, long)]
    threads = 1 if script in ("ppo_continuous_action", "dqn") else threads  # as they set themselves
    command = [
        sys.executable,
        str(LEANRL / f"{script}_torchcompile.py"),
        "--compile",
        *arguments(script, timed),
    ]
    with Path("stdout.txt").open("wb") as stdout:
        subprocess.run(command, stdout=stdout, check=True)
    summary = summary_of(Path("stdout.txt"))
    megaflops = (counted[1] - counted[0]) / (long - short) / 1e6
    line = {
        "format": results.FORMAT,
        "status": "ok",
        "script": script,
        "torch_threads": threads,
        "sps": summary["sps"],
    }
    return line | {
        "mflop_per_step": megaflops,
        "gflops": gflops(threads),
        **provenance(tuple(command), dict(os.environ), None),
    }


def main() -> None:
    args = tyro.cli(Args)
    check_names("scripts", args.scripts, LENGTHS)
    known = lines_of_output(args.output, results.check_roofline)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        lines = [measure(script, threads) for script in args.scripts]
    print(roofline_table(lines))
    if args.output:
        every = {line["script"]: line for line in [*known, *lines]}
        results.replace(
            args.output, [every[script] for script in LENGTHS if script in every], results.check_roofline
        )


if __name__ == "__main__":
    main()
