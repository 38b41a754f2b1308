"""What many agents in one process cost, beside as many processes of one agent each.

    ./run.sh python -m benchmark.studies.agents [--scripts NAME ...] [--agents N ...] [--workers N ...]
        [--rounds R] [--output FILE]

Times <script>_seeds.py with --compile on the CPU for each number of agents, and as many processes of the twin
at a time, which share the cores and have a thread each where these are too few; and, for the numbers of
--workers, the same with an environment in a process of its own (--env-workers). Steps/s are the sum over
agents, which flatters processes a little, for they do not all begin to learn at once; memory is that of all
processes. Everything once, then again, R times. Nothing else may run meanwhile; it takes five minutes a
script and round on two cores. FILE gets a line a run. docs/tricks.md shows benchmark/results/agents.jsonl.

Exit status: 0 all runs are timed, 1 one has failed, 2 a bad argument.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import tyro

from benchmark import LEANRL
from benchmark.collection import COLLECTION
from benchmark.machine import provenance, summary_of, usable_cores
from benchmark.report import results
from benchmark.report.tables import by, by_machine, markdown, ratio, spread
from benchmark.terminal import check_names, lines_of_output, refuse

MODES = {"seeds": "one process", "workers": "`--env-workers`", "processes": "a process each"}

STARTS = 500  # agent steps before learning
STEPS = 2000  # with learning, over all agents; of each at least a tenth


class Line(results.Timing):
    """Many agents in one process, or in many."""

    script: str
    mode: Literal[*MODES]
    agents: int
    sps: float
    memory_mb: float


check = results.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Steps/s over all agents in one process, with environments in processes, and in a process an agent.

    Of memory the least of several runs: the first of them compiles.
    """
    rows = []
    for (script, agents), group in by(lines, "script", "agents").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        each = [modes.get(mode, []) for mode in MODES]
        speeds = [spread([line["sps"] for line in runs]) if runs else "" for runs in each]
        memory = [f"{min(line['memory_mb'] for line in runs):.0f}" if runs else "" for runs in each]
        beside = ratio(modes["seeds"], modes["processes"]) if modes.keys() >= {"seeds", "processes"} else ""
        rows.append([f"{script}, {agents}", *speeds, beside, *memory])
    speeds, memories = ([f"{name}, {unit}" for name in MODES.values()] for unit in ("steps/s", "MB"))
    return markdown(["", *speeds, "x a process each", *memories], rows)


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(name for name in COLLECTION if (LEANRL / f"{name}_seeds.py").exists())
    """eager scripts with a sibling for many agents"""
    agents: tuple[int, ...] = (1, 2, 4, 8)
    """numbers of agents"""
    workers: tuple[int, ...] = ()
    """numbers of agents in one process, with and without --env-workers"""
    rounds: int = 3
    """how often each is timed"""
    output: Path | None = None
    """a file of results to write anew"""


def run(commands: list[list[str]], threads: int | None) -> tuple[list[dict], float]:
    """Run commands at a time, in folders of their own; gives their summaries and the most MiB of all.

    Raises RuntimeError where one does not end well.
    """
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with tempfile.TemporaryDirectory() as name:
        processes = []
        for index, command in enumerate(commands):
            (folder := Path(name, str(index))).mkdir()
            with (folder / "out.txt").open("wb") as out, (folder / "log.txt").open("wb") as log:
                processes.append(psutil.Popen(command, cwd=folder, env=env, stdout=out, stderr=log))
        peak = 0
        while any(process.poll() is None for process in processes):
            used = 0
            for process in processes:
                try:
                    for one in (process, *process.children(recursive=True)):
                        info = one.memory_full_info()
                        used += getattr(info, "pss", info.rss)  # on Linux what is shared counts once
                except psutil.Error:  # it has ended meanwhile
                    pass
            peak = max(peak, used)
            time.sleep(0.5)
        found = [summary_of(Path(name, str(index), "out.txt")) for index in range(len(commands))]
        for index, (process, summary) in enumerate(zip(processes, found, strict=True)):
            if process.returncode or not summary or not summary.get("sps"):
                raise RuntimeError(
                    f"{' '.join(commands[index])}\n{Path(name, str(index), 'log.txt').read_text()[-2000:]}"
                )
    return found, peak / 2**20


def measure(script: str, mode: str, agents: int) -> dict:
    """The line of a run, or of a run an agent. Raises RuntimeError where one does not end well."""
    many = mode != "processes"
    path = str(LEANRL / f"{script}_{'seeds' if many else 'torchcompile'}.py")
    steps = STARTS + max(STEPS // 10, STEPS // agents)
    command = [sys.executable, path, "--compile", "--no-cuda", "--buffer-size=100000"]
    command += [f"--learning-starts={STARTS}", f"--total-timesteps={steps}"]
    if many:
        workers = ["--env-workers"] if mode == "workers" else []
        commands = [[*command, f"--num-seeds={agents}", *workers]]
    else:
        commands = [[*command, f"--seed={seed}"] for seed in range(1, agents + 1)]
    threads = None if len(commands) == 1 else max(1, usable_cores() // agents)
    summaries, memory = run(commands, threads)
    line = {"format": results.FORMAT, "status": "ok", "script": script, "mode": mode, "agents": agents}
    line |= {"sps": sum(summary["sps"] for summary in summaries), "memory_mb": round(memory)}
    return line | provenance((sys.executable, path), dict(os.environ), None)


def main() -> int:
    args = tyro.cli(Args)
    check_names("scripts", args.scripts, Args.scripts)
    if min((*args.agents, *args.workers, args.rounds)) < 1:
        refuse("--agents, --workers and --rounds take numbers from 1")
    lines_of_output(args.output, check)
    lines, failed = [], False
    for _ in range(args.rounds):
        for script in args.scripts:
            modes = [(mode, agents) for agents in args.agents for mode in ("seeds", "processes")]
            modes += [("seeds", agents) for agents in args.workers if agents not in args.agents]
            for mode, agents in [*modes, *(("workers", agents) for agents in args.workers)]:
                try:
                    lines.append(measure(script, mode, agents))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    failed = True
                    continue
                print(f"{script} {mode} {agents}: {lines[-1]['sps']:.0f} steps/s", flush=True)
                if args.output:
                    results.replace(args.output, lines, check)
    print(table(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
