"""What many agents in one process cost, beside as many processes of one agent each.

    ./run.sh python -m benchmark.studies.agents [--scripts NAME ...] [--agents N ...] [--workers N ...]
        [--rounds R] [--output FILE]

Times <script>_seeds.py with --compile for each number of agents, and as many processes of the twin at a time,
which share the cores and have a thread each where these are too few; and, for the numbers of --workers, the
same with an environment in a process of its own (--env-workers). Steps/s are the sum over agents, which
flatters processes a little, for they do not all begin to learn at once; memory is that of all processes.
Everything once, then again, R times. Nothing else may run meanwhile; it takes five minutes a script and round
on two cores. FILE gets a line a run. docs/tricks.md shows benchmark/results/agents.jsonl.

Exit status: 0 all runs are timed, 1 one has failed, 2 a bad argument.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from benchmark import LEANRL
from benchmark.machine import provenance, summary_of, usable_cores
from benchmark.report import results, tables
from benchmark.terminal import check_names, lines_of_output, refuse

STARTS = 500  # agent steps before learning
STEPS = 2000  # with learning, over all agents; of each at least a tenth


@dataclass
class Args:
    scripts: tuple[str, ...] = ("sac_continuous_action", "td3_continuous_action")
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
    command = [sys.executable, path, "--compile", f"--learning-starts={STARTS}", f"--total-timesteps={steps}"]
    if many:
        commands = [
            [
                *command,
                f"--num-seeds={agents}",
                *["--env-workers"] * (mode == "workers"),
                "--buffer-size=100000",
            ]
        ]
    else:
        commands = [[*command, f"--seed={seed}", "--buffer-size=100000"] for seed in range(1, agents + 1)]
    summaries, memory = run(
        commands, threads=None if len(commands) == 1 else max(1, usable_cores() // agents)
    )
    line = {"format": results.FORMAT, "status": "ok", "script": script, "mode": mode, "agents": agents}
    line |= {"sps": sum(summary["sps"] for summary in summaries), "memory_mb": round(memory)}
    return line | provenance((sys.executable, path), dict(os.environ), None)


def main() -> int:
    args = tyro.cli(Args)
    check_names("scripts", args.scripts, Args.scripts)
    if min((*args.agents, *args.workers, args.rounds)) < 1:
        refuse("--agents, --workers and --rounds take numbers from 1")
    lines_of_output(args.output, results.check_agents)
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
                    results.replace(args.output, lines, results.check_agents)
    print(tables.agents_table(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
