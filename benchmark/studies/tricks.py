"""Measure what docs/tricks.md names one by one: each against what it replaces, in micro- or milliseconds.

    ./run.sh python -m benchmark.studies.tricks [--output benchmark/results/tricks.jsonl]

Uses the sizes of the scripts on their default tasks, on the CUDA device if there is one. SAC: 17
observations, 6 actions, batches of 256, two critics of 256 and 256 units. PPO: 2048 steps, or minibatches of
256 times four frames. The variants of a row are interleaved; a figure is the median of 15 rounds. Nothing
else may run meanwhile. The file that --output names is written anew, one line a figure.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmark.machine import provenance
from benchmark.report import results
from benchmark.report.tables import by_machine, markdown
from benchmark.terminal import lines_of_output


class Line(results.Timing):
    """What a call of one variant takes."""

    title: str
    variant: str
    microseconds: float
    threads: int | None


check = results.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Microseconds a call of each variant, and the ratio to the first one of its title."""
    rows, first = [], {}
    for line in lines:
        base = first.setdefault(line["title"], line["microseconds"])
        figures = [f"{line['microseconds']:.2f}", f"{line['microseconds'] / base:.2f}" if base > 0.1 else ""]
        rows.append([f"{line['title']}: {line['variant']}", *figures])
    return markdown(["", "microseconds a call", "x the first of its name"], rows)


@dataclass
class Args:
    output: Path | None = None
    """a file of results to write anew"""


def main() -> None:
    args = tyro.cli(Args)
    lines_of_output(args.output, check)
    from benchmark.studies import variants  # takes PyTorch, which `./run.sh report` need not

    made_with = provenance((sys.executable, __file__), dict(os.environ), variants.gpu())
    about = {"format": results.FORMAT, "status": "ok"}
    lines = [about | figure | made_with for figure in variants.figures()]
    print(table(lines))
    if args.output:
        results.replace(args.output, lines, check)


if __name__ == "__main__":
    main()
