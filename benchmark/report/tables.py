"""The tables of speed and returns that README.md, docs/ and a sweep show, made of lines of results."""

import itertools
import re
import statistics
from collections.abc import Callable, Iterable

from benchmark.collection import COLLECTION
from benchmark.modes import LIBRARIES, MODES

PASSED, MISSED = "passed", "**missed**"


def by(lines: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """The lines by their values of these keys, in the order in which these first occur."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(key) for key in keys), []).append(line)
    return groups


def timed(lines: list[dict]) -> list[dict]:
    """The lines of runs with a speed of their own: one that was taken up has that of its last part."""
    return [line for line in lines if line.get("sps") and line.get("resumed") is None]


def in_order(modes: Iterable[str]) -> list[str]:
    """Modes in the order of tables and plots."""
    return [mode for mode in MODES if mode in modes]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def spread(values: list[float]) -> str:
    """The median and, of several values, their range."""
    median = f"{statistics.median(values):.0f}"
    return median if len(values) == 1 else f"{median} ({min(values):.0f}-{max(values):.0f})"


def ratio(runs: list[dict], base: list[dict]) -> str:
    """The ratio of two medians of steps/s and, of several seeds, its range over runs with the same seed."""
    speed = {line["seed"]: line["sps"] for line in base if "seed" in line}
    each = [line["sps"] / speed[line["seed"]] for line in runs if line.get("seed") in speed]
    whole = statistics.median(line["sps"] for line in runs) / statistics.median(line["sps"] for line in base)
    several = f" ({min(each):.2f}-{max(each):.2f})" if len(each) > 1 and runs is not base else ""
    return f"{whole:.2f}{several}"


def median_of(lines: list[dict], key: str) -> str:
    """The median of a figure over the lines that have it, or nothing."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{statistics.median(values):.1f}" if values else ""


def agents(line: dict) -> int:
    """How many agents a run has trained: of results on record several."""
    return len(line["seeds"]) if "seeds" in line else 1


def name_of(mode: str, runs: list[dict]) -> str:
    """The name of a mode of these runs; where a run has several agents or ranks, with their number."""
    counts = {"agents": {agents(line) for line in runs}, "ranks": {line.get("ranks", 1) for line in runs}}
    told = {what: "/".join(map(str, sorted(numbers))) for what, numbers in counts.items()}
    return MODES[mode].label.format(**told)


def of_agents(runs: list[dict], key: str) -> list[float]:
    """A figure of each agent of these runs that has it."""
    values = (value if isinstance(value, list) else [value] for value in (line[key] for line in runs))
    return [value for value in itertools.chain.from_iterable(values) if value is not None]


def busy_per_million(runs: list[dict]) -> float | None:
    """The seconds that the GPU is busy in a million agent steps that learn, over all agents: the median.

    It leaves out runs without a GPU, and those that learn for less than five seconds: the driver's figures
    are up to a second old, and on an H100 they were 0 for two and three seconds. None where no run is left.
    """
    values = []
    for line in runs:
        steps = (line["total_timesteps"] - line.get("learning_starts", 0)) * agents(line)
        if line.get("gpu_busy_seconds") is not None and steps / line["sps"] >= 5:
            values.append(1e6 * line["gpu_busy_seconds"] / steps)
    return statistics.median(values) if values else None


def machine_of(line: dict) -> tuple:
    """What tells machines apart, and on one of them runs with fewer threads or a shared GPU from others."""
    hardware = (line["hardware"].get(key) for key in ("cpu", "cores", "mkl", "gpu"))
    return (*hardware, line.get("threads"), line.get("runs_per_gpu", 1))


def machines(lines: list[dict]) -> list[list[dict]]:
    """The lines of runs that were not in vain, by machine."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        if line["status"] == "ok":
            groups.setdefault(machine_of(line), []).append(line)
    return list(groups.values())


def processor(line: dict) -> str:
    """The processor of a run, its cores, what MKL was told to take it for, and the threads it was to take."""
    cpu, cores, mkl, _, threads, _ = machine_of(line)
    told = [*([f"MKL {mkl}"] if mkl else []), *([f"OMP_NUM_THREADS={threads}"] if threads else [])]
    return ", ".join([cpu, f"{cores} core{'s' if cores > 1 else ''}", *told])


def machine(lines: list[dict]) -> str:
    """What the runs of one machine were made with: one line."""
    *_, gpu, _, sharing = machine_of(lines[0])
    shared = f", {sharing} runs at a time on it, each with its share of the cores" if sharing > 1 else ""
    return f"{processor(lines[0])}; {f'{gpu}{shared}' if gpu else 'no GPU'}; {packages_and_commits(lines)}"


def packages_and_commits(lines: list[dict]) -> str:
    """The versions and commits that runs were made with, all of them where runs differ."""
    versions: dict[str, set[str]] = {}
    for line in lines:
        for package, version in line["versions"].items():
            versions.setdefault(package, set()).update([version] if version else [])
    packages = [f"{package} {'/'.join(sorted(found))}" for package, found in versions.items() if found]
    return ", ".join(packages) + commits(lines)


def commits(lines: list[dict]) -> str:
    """The commits that lines were made at, as the line below a table ends; nothing where no line has one."""
    known = {line["git_commit"] for line in lines if line.get("git_commit")}
    told = sorted(commit[:7] + commit[40:] for commit in known)
    unknown = [] if all(line.get("git_commit") for line in lines) else ["some not recorded"]
    return f"; commit {', '.join(told + unknown)}" if told else ""


def by_machine(table: Callable[[list[dict]], str]) -> Callable[[list[dict]], str]:
    """A table that is made for each machine of its own, with the machine below it."""

    def tables(lines: list[dict]) -> str:
        return "\n\n".join(f"{table(group)}\n\n{machine(group)}" for group in machines(lines))

    tables.__doc__ = table.__doc__
    return tables


@by_machine
def speed_table(lines: list[dict]) -> str:
    """Agent steps per second of each algorithm and mode: median, range, ratios, start-up, GPU seconds."""
    lines = timed(lines)
    on_gpu = any(line.get("gpu_busy_seconds") for line in lines)
    groups = by(lines, "algorithm", "env_id", "steps")
    several = len(groups) > len(by(lines, "algorithm"))
    rows = []
    for (algorithm, env_id, steps), group in groups.items():
        modes = {mode: lines for (mode,), lines in by(group, "mode").items()}
        for mode in in_order(modes):
            runs = modes[mode]
            ratios = [ratio(runs, modes[base]) if base in modes else "" for base in ("eager", "sbx")]
            startup = [[line for line in runs if line.get("cold_start") is cold] for cold in (True, False)]
            startup = [median_of(part, "startup_seconds") for part in startup]
            busy = busy_per_million(runs)
            name = f"{algorithm}{f', {env_id}, {steps:,} steps' if several else ''}: {name_of(mode, runs)}"
            gpu = ["" if busy is None else f"{busy:.0f}"] if on_gpu else []
            rows.append([name, spread([line["sps"] for line in runs]), *ratios, *startup, *gpu])
    header = ["", "steps/s, median (range)", "x eager (by seed)", "x SBX (by seed)", "start-up cold, s"]
    header += ["warm, s", *(["GPU-busy s per 1M steps that learn"] if on_gpu else [])]
    return markdown(header, rows)


@by_machine
def algorithms_table(lines: list[dict]) -> str:
    """A row an algorithm: steps/s of others and of ours, and how much faster ours is than the best other."""
    rows, others = [], [mode for mode in LIBRARIES if any(line["mode"] == mode for line in lines)]
    for (algorithm, env_id, _), group in by(timed(lines), "algorithm", "env_id", "steps").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        speed = {mode: statistics.median(line["sps"] for line in runs) for mode, runs in modes.items()}
        best = max((mode for mode in others if mode in modes), key=speed.get, default=None)
        beside = ratio(modes["compile"], modes[best]) if best and "compile" in modes else ""
        cells = [f"{speed[mode]:,.0f}" if mode in speed else "" for mode in (*others, "eager", "compile")]
        rows.append([f"{algorithm}, {env_id}", *cells, beside])
    header = [MODES[mode].label for mode in (*others, "eager", "compile")]
    return markdown(["steps/s", *header, "x the best other library"], rows)


@by_machine
def captured_table(lines: list[dict]) -> str:
    """A row an algorithm, environment and number of steps: steps/s eager and with both flags, their ratio."""
    rows = []
    for (algorithm, env_id, steps), group in by(timed(lines), "algorithm", "env_id", "steps").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        if "eager" in modes and "both" in modes:
            eager, both = modes["eager"], modes["both"]
            speeds = [f"{statistics.median(line['sps'] for line in runs):,.0f}" for runs in (eager, both)]
            rows.append([f"{algorithm}, {env_id}, {steps:,} steps", *speeds, ratio(both, eager)])
    return markdown(["steps/s", MODES["eager"].label, MODES["both"].label, "x eager"], rows)


@by_machine
def learning_table(lines: list[dict]) -> str:
    """Returns of training: the last 10 episodes of each seed, and the mean of the last 100 over the seeds."""
    rows = []
    trained = [line for line in lines if "episodic_return" in line]
    for (script, env_id, steps), runs in by(trained, "script", "env_id", "total_timesteps").items():
        last = ", ".join(f"{value:.0f}" for value in of_agents(runs, "episodic_return_10"))
        rows.append([f"{script}, {env_id}", f"{steps:,}", last, mean_return(runs)])
    returns = ["return, last 10 episodes, by seed", "last 100 (or all), mean of seeds"]
    return markdown(["", "steps", *returns], rows)


def task_of(env_id: str) -> str:
    """The last part of an environment's name: CheetahRun-v1 of pool:EnvPool/CheetahRun-v1."""
    return re.split("[:/]", env_id)[-1]


def check_rows(lines: list[dict]) -> list[list[str]]:
    """A row a check and mode of a sweep of checks; the last cell is its verdict."""
    trained = [line for line in lines if line["status"] == "failed" or "episodic_return" in line]
    # Results of 0.2 have the names that EnvPool itself gives to its tasks.
    trained = [line | {"task": task_of(line["env_id"])} for line in trained]
    groups = by(trained, "algorithm", "task", "steps", "mode")
    rows = []
    for name, algorithm in COLLECTION.items():
        for check, mode in itertools.product(algorithm.checks, MODES):
            if not (runs := groups.get((name, task_of(check.env_id), check.steps, mode))):
                continue
            done = [line for line in runs if line["status"] == "ok"]
            returns = of_agents(done, "episodic_return")
            shown, missing = [f"{value:.1f}" for value in returns], len(runs) - len(returns)
            shown += [f"{missing} failed"] if missing else []
            within = not missing and all(check.least <= value <= check.most for value in returns)
            title = f"{name}, {runs[0]['env_id']}: {name_of(mode, done or runs)}"
            bounds = f"{check.least:g} to {check.most:g}"
            rows.append([title, f"{check.steps:,}", ", ".join(shown), bounds, PASSED if within else MISSED])
    return rows


def check_table(lines: list[dict]) -> str:
    """The runs of the profile check, of all machines: returns by seed, bounds, whether all are within."""
    header = ["", "steps", "return, last 100 episodes, by seed", "bounds", ""]
    return "\n\n".join([markdown(header, check_rows(lines)), *map(machine, machines(lines))])


def mean_return(runs: list[dict]) -> str:
    """The mean over agents of their episodic return, or nothing."""
    values = of_agents(runs, "episodic_return")
    return f"{statistics.mean(values):.0f}" if values else ""
