"""Steps/s of SAC and TD3 with small networks, where what is around the products counts, beside RLtools (C++).

    ./run.sh python -m benchmark.studies.small_networks [--rounds R] [--peers PYTHON] [--output FILE]

Times the twins, without flags and with --compile, on one core, and, where there is an interpreter with
requirements/peers.txt, SBX and RLtools with the same sizes: two layers of 64 units and batches of 32 on
Pendulum-v1, and the defaults (256 units, batches of 256) on HalfCheetah-v4. Our networks of 64 units are
those of copies of the twins. Everything once, then again, R times. Nothing else may run meanwhile; it takes
ten minutes. FILE is written anew, with a line a run. docs/benchmark.md shows
benchmark/results/small_networks.jsonl.

Exit status: 0 all runs are timed, 1 some failed, 2 a bad argument.
"""

import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from benchmark import LEANRL, records
from benchmark.modes import MODES
from benchmark.studies.timing import Args, Point, of_library, options, time_runs
from benchmark.tables import by, by_machine, by_mode, markdown, ratio, speeds
from benchmark.terminal import check_interpreter

SCRIPTS = ("sac_continuous_action", "td3_continuous_action")
# Environment, batch and agent steps, of which the first thousand are random, by width.
SIZES = {64: ("Pendulum-v1", 32, 11_000), 256: ("HalfCheetah-v4", 256, 2_000)}
OURS = ("twin", "compile")
COLUMNS = {mode: MODES[mode].label for mode in ("sbx", "rltools", *OURS)}


class Line(records.Timing):
    """A run of one width."""

    script: str
    env_id: str
    mode: Literal[*COLUMNS]
    width: int
    batch_size: int
    seed: int
    sps: float


check = records.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Steps/s by sizes and library, and ours compiled beside RLtools."""
    rows = []
    for (width, script, env_id, batch), group in by(lines, "width", "script", "env_id", "batch_size").items():
        modes = by_mode(group)
        cells = [speeds(modes.get(mode)) for mode in COLUMNS]
        beside = ratio(modes.get("compile"), modes.get("rltools"))
        rows.append([f"{script}, {width}-{width}, batch {batch}, {env_id}", *cells, beside])
    return markdown(["steps/s on one core", *COLUMNS.values(), "LeanRL x RLtools"], rows)


def resized(script: str, width: int, folder: Path) -> Path:
    """A copy of a twin in a folder, whose networks have this width in place of 256."""
    text = (LEANRL / f"{script}_torchcompile.py").read_text()
    [networks] = re.findall(r"^# ---- Networks .*?(?=^# ---- |^if )", text, re.DOTALL | re.MULTILINE)
    copy = folder / f"{script}_torchcompile.py"
    copy.write_text(text.replace(networks, re.sub(r"\b256\b", str(width), networks)))
    return copy


def command(about: dict, steps: int, peers: Path | None, folder: Path) -> list:
    """The command of a run; a copy of our script is made in `folder`."""
    script, mode, width = about["script"], about["mode"], about["width"]
    given = {"env-id": about["env_id"], "seed": about["seed"], "total-timesteps": steps}
    given |= {"learning-starts": 1000, "batch-size": about["batch_size"]}
    if mode not in OURS:
        return [*of_library(mode, script, peers), *options(given | {"width": width})]
    return [sys.executable, resized(script, width, folder), "--no-cuda", *MODES[mode].flags, *options(given)]


def points(args: Args) -> Iterator[Point]:
    """All that is to be timed, in rounds."""
    for seed in range(1, args.rounds + 1):
        for width, (env_id, batch_size, steps) in SIZES.items():
            for script in SCRIPTS:
                for mode in COLUMNS if args.peers else OURS:
                    about = {"script": script, "env_id": env_id, "mode": mode, "width": width}
                    about |= {"batch_size": batch_size, "seed": seed}
                    yield Point(about, partial(command, about, steps, args.peers))


def main() -> int:
    args = tyro.cli(Args)
    check_interpreter("peers", args.peers)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # JAX takes all cores that it may
    lines, status = time_runs(points(args), args.output, check)
    print(table(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
