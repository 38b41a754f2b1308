"""Steps/s of SAC and TD3 with small networks, where what is around the products counts, beside RLtools (C++).

    ./run.sh python -m benchmark.studies.small_networks [--rounds R] [--peers PYTHON] [--output FILE]

Times the twins, without flags and with --compile, on one core, and, where there is an
interpreter with requirements/peers.txt, SBX and RLtools with the same sizes: two layers of 64 units and
batches of 32 on Pendulum-v1, and the defaults (256 units, batches of 256) on HalfCheetah-v4. Our networks of
64 units are those of copies of the twins. Everything once, then again, R times. Nothing else may run
meanwhile; it takes ten minutes. FILE gets a line a run. docs/benchmark.md shows
benchmark/results/small_networks.jsonl.

Exit status: 0 all runs are timed, 1 some failed, 2 a bad argument.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmark import LEANRL, ROOT
from benchmark.machine import provenance, run_for_summary
from benchmark.modes import MODES
from benchmark.report import results
from benchmark.report.tables import by, by_machine, markdown, ratio, spread
from benchmark.studies.scaling import widened
from benchmark.terminal import check_interpreter, lines_of_output

SCRIPTS = ("sac_continuous_action", "td3_continuous_action")
# Environment, batch and agent steps, of which the first thousand are random, by width.
SIZES = {64: ("Pendulum-v1", 32, 11_000), 256: ("HalfCheetah-v4", 256, 2_000)}
STARTS = 1000
OURS = ("twin", "compile")
COLUMNS = {mode: MODES[mode].label for mode in ("sbx", "rltools", *OURS)}


class Line(results.Timing):
    """A run of one width."""

    script: str
    env_id: str
    mode: Literal[*COLUMNS]
    width: int
    batch_size: int
    seed: int
    sps: float


check = results.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Steps/s by sizes and library, and ours compiled beside RLtools."""
    rows = []
    for (width, script, env_id, batch), group in by(lines, "width", "script", "env_id", "batch_size").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        speeds = [spread([line["sps"] for line in modes[mode]]) if mode in modes else "" for mode in COLUMNS]
        beside = ratio(modes["compile"], modes["rltools"]) if {"compile", "rltools"} <= {*modes} else ""
        rows.append([f"{script}, {width}-{width}, batch {batch}, {env_id}", *speeds, beside])
    return markdown(["steps/s on one core", *COLUMNS.values(), "LeanRL x RLtools"], rows)


@dataclass
class Args:
    rounds: int = 3
    """how often each is timed"""
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt"""
    output: Path | None = None
    """a file of results to write anew"""


def measure(script: str, mode: str, width: int, seed: int, peers: Path | None) -> dict:
    """The line of a run. Raises RuntimeError where it does not end well."""
    env_id, batch_size, steps = SIZES[width]
    given = {"env-id": env_id, "seed": seed, "total-timesteps": steps}
    given |= {"learning-starts": STARTS, "batch-size": batch_size}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if mode not in OURS:
            program, *library = MODES[mode].program
            path = ROOT / "benchmark" / "peers" / program
            command = [peers.absolute(), path, *library, script, f"--width={width}"]
        else:
            path, copy = LEANRL / f"{script}_torchcompile.py", folder / f"{script}_torchcompile.py"
            copy.write_text(widened(script, width))
            command = [sys.executable, copy, "--no-cuda", *MODES[mode].flags]
        options = [f"--{key}={value}" for key, value in given.items()]
        summary, _ = run_for_summary([*map(str, command), *options], folder)
    line = {"format": results.FORMAT, "status": "ok", "script": script, "env_id": env_id, "mode": mode}
    line |= {"width": width, "batch_size": batch_size, "seed": seed, "sps": summary["sps"]}
    return line | provenance((str(command[0]), str(path)), dict(os.environ), None)


def main() -> int:
    args = tyro.cli(Args)
    check_interpreter("peers", args.peers)
    lines_of_output(args.output, check)
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):  # JAX takes all cores that it may
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    lines, failed = [], False
    for seed in range(1, args.rounds + 1):
        for width in SIZES:
            for script in SCRIPTS:
                for mode in COLUMNS if args.peers else OURS:
                    try:
                        lines.append(measure(script, mode, width, seed, args.peers))
                    except RuntimeError as error:
                        print(error, file=sys.stderr)
                        failed = True
                        continue
                    print(f"{script} {width} {mode}: {lines[-1]['sps']:.0f} steps/s", flush=True)
                    if args.output:
                        results.replace(args.output, lines, check)
    print(table(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
