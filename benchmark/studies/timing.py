"""What the studies share: runs that are timed in turn, and the file that their lines are written to."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmark import ROOT, records
from benchmark.machine import provenance, summary_of
from benchmark.modes import MODES
from benchmark.terminal import check_output


@dataclass
class Args:
    rounds: int = 3
    """how often each is timed"""
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt"""
    output: Path | None = None
    """a file of results to write anew"""


@dataclass(frozen=True)
class Point:
    """A run to be timed: what its line says of it, and its command, for a folder that it may write to."""

    about: dict
    command: Callable[[Path], list]


def of_library(mode: str, script: str, peers: Path) -> list:
    """The command of a library's mode, without options."""
    program, *library = MODES[mode].program
    return [peers.absolute(), ROOT / "benchmark" / "peers" / program, *library, script]


def options(values: dict) -> list[str]:
    """Options as a command line has them."""
    return [f"--{name}={value}" for name, value in values.items()]


def steps_per_second(command: list[str], folder: Path) -> float:
    """Run a command in a folder; gives the steps/s of its summary.

    Raises RuntimeError, with the end of its log, where it fails or has no speed.
    """
    with (folder / "out.txt").open("wb") as out, (folder / "log.txt").open("wb") as log:
        status = subprocess.run(command, cwd=folder, stdout=out, stderr=log).returncode
    summary = summary_of(folder / "out.txt")
    if status or not summary or not summary.get("sps"):
        raise RuntimeError(f"{' '.join(command)}\n{(folder / 'log.txt').read_text()[-2000:]}")
    return summary["sps"]


def time_runs(points: Iterable[Point], output: Path | None, check: Callable) -> tuple[list[dict], int]:
    """Time runs one after the other; gives their lines, and the exit status: 1 where some failed.

    Each line is printed. The file `output` is written anew, after each run with all lines so far.
    """
    lines, status = [], 0
    check_output(output)
    for point in points:
        with tempfile.TemporaryDirectory() as folder:
            command = list(map(str, point.command(Path(folder))))
            made_with = provenance((command[0], __file__), dict(os.environ))
            try:
                sps = steps_per_second(command, Path(folder))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                status = 1
                continue
        lines.append({"format": records.FORMAT, "status": "ok", **point.about, "sps": sps, **made_with})
        print(f"{' '.join(map(str, point.about.values()))}: {sps:.0f} steps/s", flush=True)
        if output:
            records.replace(output, lines, check)
    return lines, status
