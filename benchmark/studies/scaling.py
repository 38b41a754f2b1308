"""How the cost of a script grows with the number of environments, the batch and the width of networks.

    ./run.sh python -m benchmark.studies.scaling [--peers PYTHON] [--output FILE]

Times each twin with --compile along one axis at a time, one run a point, and, where there is an interpreter
with requirements/peers.txt, SBX beside it. An agent step has as many gradient steps as by default, but for
PPO's batches, where a rollout is learnt from as often. Nothing else may run meanwhile; it takes forty minutes
on two cores. A width other than the script's is that of a copy of it, changed in the section "Networks" (of
Atari the layer behind the convolutions, of DQN the first). FILE is written anew, with a line a point.
docs/benchmark.md shows benchmark/results/scaling.jsonl.

Exit status: 0 all points are timed, 1 some runs failed, 2 a bad argument.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from benchmark import LEANRL, records
from benchmark.collection import COLLECTION
from benchmark.studies.timing import Point, of_library, options, time_runs
from benchmark.tables import by, panels
from benchmark.terminal import check_interpreter

VALUES = {"num_envs": (1, 4, 16, 64, 256), "batch_size": (64, 256, 1024, 4096), "width": (64, 256, 1024)}
# Batch and width of the defaults.
SIZES = {
    "sac_continuous_action": (256, 256),
    "td3_continuous_action": (256, 256),
    "ppo_continuous_action": (64, 64),
    "ppo_atari_envpool": (256, 512),
    "dqn": (128, 120),
}
DEFAULTS = {
    script: {"num_envs": COLLECTION[script].num_envs, "batch_size": batch, "width": width}
    for script, (batch, width) in SIZES.items()
}
STARTS = 512  # agent steps of SAC, TD3 and DQN before they learn: whole steps of any number of environments
# Agent steps that are timed, some seconds; of PPO at least two rollouts. DQN explores by the share of them
# that is over.
LONG = {"ppo_continuous_action": 50_000, "ppo_atari_envpool": 4_000, "dqn": 20_480}
# What the axes are called in the plot, and what costs along them.
AXES = {"num_envs": "environments", "batch_size": "batch", "width": "width"}
UNITS = {"num_envs": "agent step", "batch_size": "row of a batch", "width": "gradient step"}
LOOKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#E69F00", "P"), ("#000000", "D"))
STYLES = dict(zip(DEFAULTS, LOOKS, strict=True))


class Line(records.Timing):
    """A run with one size changed."""

    script: str
    mode: Literal["compile", "sbx"]
    axis: Literal[*AXES]
    value: int
    sps: float
    updates_per_second: float
    peak_memory_mb: float


check = records.check_of(Line)


def unit_cost(line: dict) -> float:
    """Microseconds of an agent step, row of a batch learnt from, or gradient step, as the axis asks."""
    if line["axis"] == "num_envs":
        return 1e6 / line["sps"]
    return 1e6 / line["updates_per_second"] / (line["value"] if line["axis"] == "batch_size" else 1)


def binding(lines: list[dict]) -> dict | None:
    """Of the lines along one axis, in order, the first from which on another resource binds, if there is one.

    Of environments and batches: from which on more of them save less than a quarter of what one costs. Of
    widths, whose products grow with the square: at which a gradient step takes twice what it takes at the
    smallest.
    """
    costs = [unit_cost(line) for line in lines]
    if lines[0]["axis"] == "width":
        return next((line for line, cost in zip(lines, costs, strict=True) if cost >= 2 * costs[0]), None)
    rest = range(len(lines) - 1)  # of the largest nothing is known
    return next((lines[index] for index in rest if costs[index] <= 4 / 3 * min(costs[index:])), None)


def draw(axis, lines: list[dict]) -> None:
    """A line a script and library along one axis, ours with a marker at each point."""
    for (script, mode), group in by(lines, "script", "mode").items():
        group = sorted(group, key=lambda line: line["value"])
        colour, marker = STYLES[script]
        points = ([line["value"] for line in group], [unit_cost(line) for line in group])
        if mode == "sbx":
            axis.plot(*points, color=colour, linestyle="--", linewidth=1, label=f"{script}: SBX")
            continue
        style = {"color": colour, "marker": marker, "markersize": 7, "markerfacecolor": "white"}
        axis.plot(*points, label=script, **style)
        if bound := binding(group):  # of several at one place each is seen around the next
            size = 13 - 1.5 * [*STYLES].index(script)
            style = {"color": colour, "marker": marker, "markersize": size, "zorder": 3}
            axis.plot(bound["value"], unit_cost(bound), **style)


def plot(lines: list[dict], curves: list[dict]):
    """Cost against sizes: a panel an axis, a marker a script, filled where another resource binds."""
    heading = "What an agent step, a row of a batch and a gradient step cost, by size"
    figure, (*axes, last) = panels(len(AXES) + 1, heading, lines)
    labelled = {}
    for axis, (name, title) in zip(axes, AXES.items(), strict=True):
        along = [line for line in lines if line["axis"] == name]
        draw(axis, along)
        axis.set(xscale="log", yscale="log", xlabel=title, ylabel=f"microseconds per {UNITS[name]}")
        values = [line["value"] for line in along]
        axis.set_xticks([4**power for power in range(7) if min(values) <= 4**power <= max(values)])
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
        labelled |= {text: line for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    last.axis("off")
    last.legend(labelled.values(), labelled.keys(), loc="center", frameon=False)
    return figure


@dataclass
class Args:
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt, for SBX"""
    output: Path | None = None
    """a file of results to write anew"""


@dataclass(frozen=True)
class Measurement:
    """One run: what it is of, and where on an axis."""

    script: str
    mode: str
    axis: str
    value: int

    @property
    def sizes(self) -> dict[str, int]:
        return DEFAULTS[self.script] | {self.axis: self.value}

    @property
    def num_steps(self) -> int:
        """Of PPO, the steps of a rollout in each environment: in all as many as by default, or a batch."""
        envs, batch = self.sizes["num_envs"], self.sizes["batch_size"]
        return max(128, batch // envs, (1024 if COLLECTION[self.script].actions == "atari" else 2048) // envs)

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments of the script, for a run of some seconds or, of PPO, at least two rollouts."""
        envs, batch, width = self.sizes.values()
        if not COLLECTION[self.script].on_policy:
            cost = max(1, batch / 256) * max(1, width / 256) ** 1.5
            steps = STARTS + LONG.get(self.script, max(128, int(1536 / cost)))
            lengths = {"learning-starts": STARTS, "total-timesteps": steps}
            return {"num-envs": envs, "batch-size": batch, **lengths}
        rollout = envs * self.num_steps
        total = max(2, LONG[self.script] // rollout) * rollout
        lengths = {"num-steps": self.num_steps, "total-timesteps": total}
        return {"num-envs": envs, "num-minibatches": rollout // batch, **lengths}

    @property
    def updates_per_step(self) -> float:
        """Gradient steps per agent step."""
        if not COLLECTION[self.script].on_policy:
            return 0.1 if self.script == "dqn" else 1.0
        return (4 if COLLECTION[self.script].actions == "atari" else 10) / self.sizes["batch_size"]

    def command(self, peers: Path | None, folder: Path) -> list:
        """The command that runs it; a copy of the script is made in `folder`, if its networks are changed."""
        envs, batch, width = self.sizes.values()
        if self.mode == "compile":
            twin = LEANRL / f"{self.script}_torchcompile.py"
            twin = twin if width == SIZES[self.script][1] else widened(self.script, width, folder)
            return [sys.executable, twin, "--compile", "--no-cuda", *options(self.arguments)]
        given = {key: value for key, value in self.arguments.items() if key != "num-minibatches"}
        given |= {"env-id": COLLECTION[self.script].env_id, "seed": 1, "batch-size": batch, "width": width}
        settle = 2 * envs * self.num_steps  # agent steps in which JAX compiles
        if not COLLECTION[self.script].on_policy:
            # Of DQN also what acts, which is first asked at the first action that is not random.
            settle = given["settle"] = max(1024 if self.script == "dqn" else 32, 2 * envs)
        given["total-timesteps"] += settle
        return [*of_library("sbx", self.script, peers), *options(given)]

    def more(self, sps: float, memory: float) -> dict:
        """What its line says besides its speed."""
        return {"updates_per_second": sps * self.updates_per_step, "peak_memory_mb": round(memory, 1)}


def widened(script: str, width: int, folder: Path) -> Path:
    """A copy of a twin in a folder, whose networks have another width."""
    text = (LEANRL / f"{script}_torchcompile.py").read_text()
    [networks] = re.findall(r"^# ---- Networks .*?(?=^# ---- |^if )", text, re.DOTALL | re.MULTILINE)
    other = re.sub(rf"\b{DEFAULTS[script]['width']}\b", str(width), networks)
    copy = folder / f"{script}_torchcompile.py"
    copy.write_text(text.replace(networks, other))
    return copy


def measurements(args: Args) -> Iterator[Measurement]:
    """All that is to be timed, ours and SBX's in turn; the default of a script is on each of its axes."""
    for script in DEFAULTS:
        for axis in AXES:
            for value in sorted({*VALUES[axis], DEFAULTS[script][axis]}):
                yield Measurement(script, "compile", axis, value)
                if args.peers and COLLECTION[script].sbx:
                    yield Measurement(script, "sbx", axis, value)


def main() -> int:
    args = tyro.cli(Args)
    check_interpreter("peers", args.peers)
    points = (Point(asdict(m), partial(m.command, args.peers), m.more) for m in measurements(args))
    return time_runs(points, args.output, check)[1]


if __name__ == "__main__":
    sys.exit(main())
