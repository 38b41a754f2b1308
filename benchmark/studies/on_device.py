"""Steps/s of PPO on Pendulum-v1 by number of environments: on the device, in Gymnasium, and PureJaxRL's.

    ./run.sh python -m benchmark.studies.on_device [--rounds R] [--output FILE]
        [--peers PYTHON --purejaxrl FOLDER]

Times ppo_on_device, eager and with --compile, and ppo_continuous_action with --compile and Gymnasium's
environments, all with the same rollouts, minibatches and epochs, on the CPU. PYTHON and FOLDER are what
benchmark/peers/purejaxrl.py needs. Everything once, then again, R times. Nothing else may run meanwhile; for
one core begin the command with `OMP_NUM_THREADS=1 taskset -c 0`. FILE is written anew, with a line a run.
docs/ppo_on_device.md shows benchmark/results/on_device_envs.jsonl.

Exit status: 0 all runs are timed, 1 some failed, 2 a bad argument.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from benchmark import LEANRL, ROOT, records
from benchmark.studies import timing
from benchmark.tables import by, by_machine, markdown, panels, ratio, speed, speeds
from benchmark.terminal import check_interpreter

SIZES = {4: (128, 4), 64: (16, 4), 1024: (16, 8), 4096: (16, 32)}  # steps and minibatches of a rollout
# Agent steps that are timed, and the programs: in Gymnasium those that docs/ppo_on_device.md speaks of.
STEPS = {
    "gymnasium": {64: 100_000, 1024: 200_000},
    "eager": {4: 50_000, 64: 200_000, 1024: 1_000_000, 4096: 1_000_000},
    "compile": {4: 400_000, 64: 1_500_000, 1024: 3_000_000, 4096: 3_000_000},
    "purejaxrl": {4: 1_000_000, 64: 1_500_000, 1024: 1_500_000, 4096: 1_500_000},
}
LABELS = {"gymnasium": "`ppo_continuous_action --compile`", "eager": "eager", "compile": "`--compile`"}
LABELS |= {"purejaxrl": "PureJaxRL"}


@dataclass
class Args(timing.Args):
    purejaxrl: Path | None = None
    """a clone of PureJaxRL"""


class Line(records.Timing):
    """A run with so many environments."""

    mode: Literal[*STEPS]
    num_envs: int
    seed: int
    sps: float


check = records.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Steps/s by number of environments and program, and the compiled twin's beside PureJaxRL's."""
    rows = []
    for (num_envs,), group in by(lines, "num_envs").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        beside = ratio(modes.get("compile"), modes.get("purejaxrl"))
        rows.append([f"{num_envs:,}", *(speeds(modes.get(mode)) for mode in LABELS), beside])
    return markdown(["environments", *LABELS.values(), "`--compile` x PureJaxRL"], rows)


def plot(lines: list[dict], curves: list[dict]):
    """Steps/s against the number of environments, a line a program."""
    figure, (axis,) = panels(1, "PPO on Pendulum-v1: agent steps per second, learning included", lines)
    for (mode,), group in by(lines, "mode").items():
        points = {num_envs: speed(runs) for (num_envs,), runs in by(group, "num_envs").items()}
        axis.plot(points.keys(), points.values(), "o-", label=LABELS[mode].replace("`", ""))
    axis.set(xscale="log", yscale="log", xlabel="environments", ylabel="agent steps per second")
    axis.set_ylim(bottom=1000)  # for the legend
    axis.set_xticks([*SIZES], [f"{num_envs:,}" for num_envs in SIZES])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend(frameon=False, loc="lower right")
    return figure


def command(mode: str, num_envs: int, seed: int, args: Args, folder: Path) -> list:
    """The command of a run."""
    num_steps, num_minibatches = SIZES[num_envs]
    sizes = {"env-id": "Pendulum-v1", "seed": seed, "total-timesteps": STEPS[mode][num_envs]}
    sizes |= {"num-envs": num_envs, "num-steps": num_steps, "num-minibatches": num_minibatches}
    if mode == "purejaxrl":
        program = ROOT / "benchmark" / "peers" / "purejaxrl.py"
        return [args.peers.absolute(), program, args.purejaxrl.absolute(), *timing.options(sizes)]
    if mode == "eager":
        return [sys.executable, LEANRL / "ppo_on_device.py", "--no-cuda", *timing.options(sizes)]
    name = "ppo_on_device" if mode == "compile" else "ppo_continuous_action"
    more = {} if mode == "compile" else {"update-epochs": 4, "gamma": 0.95, "learning-rate": 1e-3}
    twin = LEANRL / f"{name}_torchcompile.py"
    return [sys.executable, twin, "--compile", "--no-cuda", *timing.options(sizes | more)]


def points(args: Args) -> Iterator[timing.Point]:
    """All that is to be timed, in rounds."""
    for seed in range(1, args.rounds + 1):
        for num_envs in SIZES:
            for mode, steps in STEPS.items():
                if num_envs in steps and (mode != "purejaxrl" or args.purejaxrl):
                    about = {"mode": mode, "num_envs": num_envs, "seed": seed}
                    yield timing.Point(about, partial(command, mode, num_envs, seed, args))


def main() -> int:
    args = tyro.cli(Args)
    if args.purejaxrl:
        check_interpreter("peers", args.peers)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    lines, status = timing.time_runs(points(args), args.output, check)
    print(table(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
