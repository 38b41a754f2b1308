"""The tables of speed, counts and costs that README.md, docs/ and a sweep show, made of lines of results."""

import itertools
import statistics
from collections.abc import Callable, Iterable

import numpy as np

LABELS = {
    "cleanrl": "CleanRL",
    "sb3": "Stable-Baselines3",
    "sbx": "SBX (JAX)",
    "eager": "LeanRL eager",
    "twin": "LeanRL twin, no flag",
    "compile": "LeanRL `--compile`",
    "cudagraphs": "LeanRL `--cudagraphs`",
    "both": "LeanRL `--compile --cudagraphs`",
    "tf32": "LeanRL `--compile --cudagraphs --matmul-precision high`",
    "seeds": "LeanRL seeds, {agents} agents `--compile`",
    "seeds_both": "LeanRL seeds, {agents} agents `--compile --cudagraphs`",
}


PEERS = ("cleanrl", "sb3", "sbx")
AGENT_MODES = {"seeds": "one process", "workers": "`--env-workers`", "processes": "a process each"}


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
    return [mode for mode in LABELS if mode in modes]


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
    """How many agents a run has trained to its end: not those that were lost, whose steps do not count."""
    return len(line["seeds"]) - len(line.get("lost_seeds", {})) if "seeds" in line else 1


def name_of(mode: str, runs: list[dict]) -> str:
    """The name of a mode of these runs; where a run has several agents, with their number."""
    return LABELS[mode].format(agents="/".join(sorted({str(agents(line)) for line in runs})))


def of_agents(runs: list[dict], key: str) -> list[float]:
    """A figure of each agent of these runs that has it."""
    values = (value if isinstance(value, list) else [value] for value in (line[key] for line in runs))
    return [value for value in itertools.chain.from_iterable(values) if value is not None]


def busy_per_million(line: dict) -> float:
    """The seconds that the GPU is busy in a million agent steps of a run that learn, over all its agents."""
    steps = (line["total_timesteps"] - line.get("learning_starts", 0)) * agents(line)
    return 1e6 * line["gpu_busy_seconds"] / steps


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
            busy = [busy_per_million(line) for line in runs if line.get("gpu_busy_seconds") is not None]
            name = f"{algorithm}{f', {env_id}, {steps:,} steps' if several else ''}: {name_of(mode, runs)}"
            gpu = [f"{statistics.median(busy):.0f}" if busy else ""] if on_gpu else []
            rows.append([name, spread([line["sps"] for line in runs]), *ratios, *startup, *gpu])
    header = ["", "steps/s, median (range)", "x eager (by seed)", "x SBX (by seed)", "start-up cold, s"]
    header += ["warm, s", *(["GPU-busy s per 1M steps that learn"] if on_gpu else [])]
    return markdown(header, rows)


@by_machine
def algorithms_table(lines: list[dict]) -> str:
    """A row an algorithm: steps/s of others and of ours, and how much faster ours is than the best other."""
    others = [mode for mode in LABELS if mode in PEERS]
    rows = []
    for (algorithm, env_id, _), group in by(timed(lines), "algorithm", "env_id", "steps").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        speed = {mode: statistics.median(line["sps"] for line in runs) for mode, runs in modes.items()}
        best = max((mode for mode in others if mode in modes), key=speed.get, default=None)
        beside = ratio(modes["compile"], modes[best]) if best and "compile" in modes else ""
        cells = [f"{speed[mode]:,.0f}" if mode in speed else "" for mode in (*others, "eager", "compile")]
        rows.append([f"{algorithm}, {env_id}", *cells, beside])
    header = [LABELS[mode] for mode in (*others, "eager", "compile")]
    return markdown(["steps/s", *header, "x the best other library"], rows)


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


def mean_return(runs: list[dict]) -> str:
    """The mean over agents of their episodic return, or nothing."""
    values = of_agents(runs, "episodic_return")
    return f"{statistics.mean(values):.0f}" if values else ""


def curve_table(curves: list[dict]) -> str:
    """Learning curves in ten rows: the mean return of the episodes that ended since the row before.

    Where there is more than one, columns are named by the last part of their job.
    """
    names = [curve["job"].rsplit("-", 1)[1] for curve in curves] if len(curves) > 1 else ["mean return"]
    rows = []
    for low, high in itertools.pairwise(np.linspace(0, max(curve["step"][-1] for curve in curves), 11)):
        ended = [zip(curve["step"], curve["episodic_return"], strict=True) for curve in curves]
        inside = [[value for step, value in episodes if low < step <= high] for episodes in ended]
        rows.append([f"{high:,.0f}", *(f"{np.mean(values):.1f}" if values else "" for values in inside)])
    return markdown(["agent steps", *names], rows)


@by_machine
def tricks_table(lines: list[dict]) -> str:
    """Microseconds a call of each variant, and the ratio to the first one of its title."""
    rows, first = [], {}
    for line in lines:
        base = first.setdefault(line["title"], line["microseconds"])
        figures = [f"{line['microseconds']:.2f}", f"{line['microseconds'] / base:.2f}" if base > 0.1 else ""]
        rows.append([f"{line['title']}: {line['variant']}", *figures])
    return markdown(["", "microseconds a call", "x the first of its name"], rows)


def cuda_code_table(lines: list[dict]) -> str:
    """Triton launches of each graph by version of torch, and what else was counted with the newest."""
    in_turn = sorted(lines, key=lambda line: [int(part) for part in line["torch"].split(".")])
    made_with = by(in_turn, "torch", "triton")
    versions = list(dict.fromkeys(torch for torch, _ in made_with))
    rows = []
    for (script, env_id, graph), group in by(lines, "script", "env_id", "graph").items():
        of = {line["torch"]: line for line in group}
        launches = [str(of[at].get("triton_launches", "fails")) if at in of else "" for at in versions]
        newest = of.get(versions[-1], {"generated": False})
        counted = ["", "", ""]
        if newest["generated"]:
            extern = ", ".join(f"{operation} {calls}" for operation, calls in newest["extern_calls"].items())
            counted = [extern, f"{newest['compiled']} of {newest['kernels']}", str(newest["spilling"])]
        rows.append([f"{script}, {env_id}: {graph}", *launches, *counted])
    counted = ["other calls", "kernels that compile for sm_90", "kernels that spill registers"]
    header = ["", *(f"Triton launches, torch {version}" for version in versions), *counted]
    failed = [line for line in lines if not line["generated"]]
    errors = dict.fromkeys(f"torch {line['torch']} fails: `{line['error']}`" for line in failed)
    below = ", ".join(f"torch {torch} with Triton {triton}" for torch, triton in made_with)
    return "\n\n".join([markdown(header, rows), *errors, below + commits(lines)])


@by_machine
def roofline_table(lines: list[dict]) -> str:
    """What the matrix products alone would allow beside what a compiled run reaches."""
    rows = []
    for line in lines:
        bound = line["gflops"] * 1000 / line["mflop_per_step"]
        figures = [f"{line['mflop_per_step']:.1f}", str(line["torch_threads"]), f"{line['gflops']:.0f}"]
        figures += [f"{bound:.0f}", f"{line['sps']:.0f}", f"{line['sps'] / bound:.0%}"]
        rows.append([line["script"], *figures])
    header = ["", "MFLOP a step", "threads", "GFLOP/s", "the products alone, steps/s"]
    return markdown([*header, "compiled, steps/s", "share"], rows)


@by_machine
def agents_table(lines: list[dict]) -> str:
    """Steps/s over all agents in one process, with environments in processes, and in a process an agent.

    Of memory the least of several runs: the first of them compiles.
    """
    rows = []
    for (script, agents), group in by(lines, "script", "agents").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        each = [modes.get(mode, []) for mode in AGENT_MODES]
        speeds = [spread([line["sps"] for line in runs]) if runs else "" for runs in each]
        memory = [f"{min(line['memory_mb'] for line in runs):.0f}" if runs else "" for runs in each]
        beside = ratio(modes["seeds"], modes["processes"]) if modes.keys() >= {"seeds", "processes"} else ""
        rows.append([f"{script}, {agents}", *speeds, beside, *memory])
    names = AGENT_MODES.values()
    speeds, memories = ([f"{name}, {unit}" for name in names] for unit in ("steps/s", "MB"))
    return markdown(["", *speeds, "x a process each", *memories], rows)


# Columns of the table of environments, and what our two are called there.
BACKENDS = {"cleanrl": "CleanRL", "sb3": "Stable-Baselines3", "sbx": "SBX (JAX)"}
BACKENDS |= {"gymnasium": "LeanRL", "envpool": "LeanRL, EnvPool"}


@by_machine
def environments_table(lines: list[dict]) -> str:
    """Steps/s by number of environments and what steps them, and EnvPool's beside the best other."""
    rows = []
    for (script, env_id, num_envs), group in by(lines, "script", "env_id", "num_envs").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        speeds = [spread([line["sps"] for line in modes[mode]]) if mode in modes else "" for mode in BACKENDS]
        others = [runs for mode, runs in modes.items() if mode not in ("gymnasium", "envpool")]
        best = max(others, key=lambda runs: statistics.median(line["sps"] for line in runs), default=None)
        beside = [ratio(modes["envpool"], best) if best and "envpool" in modes else ""]
        rows.append([f"{script}, {env_id}, {num_envs}", *speeds, *beside])
    header = ["steps/s by number of environments", *BACKENDS.values(), "EnvPool x the best other library"]
    return markdown(header, rows)


@by_machine
def settings_table(lines: list[dict]) -> str:
    """A gradient step under each setting, alone and beside a busy process, its ratio, and start-up."""
    rows = []
    for (script,), group in by(lines, "script").items():
        for line in group:
            steps = [f"{line[key]:.0f}" for key in ("microseconds", "in_company")]
            ratios = [f"{line[key] / group[0][key]:.2f}" for key in ("microseconds", "in_company")]
            figures = [figure for pair in zip(steps, ratios, strict=True) for figure in pair]
            cold = "" if line["cold_seconds"] is None else f"{line['cold_seconds']:.1f}"
            rows.append([f"{script}: {line['setting']}", *figures, cold, f"{line['warm_seconds']:.1f}"])
    first = "x the script's first"
    header = ["", "us a gradient step", first, "beside a busy process, us", first]
    return markdown([*header, "start-up cold, s", "warm, s"], rows)


# What the axes of benchmark.studies.scaling are called, and what costs along them.
AXES = {"num_envs": "environments", "batch_size": "batch", "width": "width"}
UNITS = {"num_envs": "agent step", "batch_size": "row of a batch", "width": "gradient step"}


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


@by_machine
def scaling_table(lines: list[dict]) -> str:
    """Speed and memory of each script by size, SBX beside it; bold from where another resource binds."""
    rows = []
    for (script, axis), group in by(lines, "script", "axis").items():
        ours = sorted((line for line in group if line["mode"] == "compile"), key=lambda line: line["value"])
        theirs = {line["value"]: line for line in group if line["mode"] == "sbx"}
        bound = binding(ours)
        for line in ours:
            other = theirs.get(line["value"])
            value = f"**{line['value']}**" if line is bound else str(line["value"])
            figures = [f"{line['sps']:.0f}", f"{line['updates_per_second']:.1f}"]
            figures += [f"{unit_cost(line):.0f} per {UNITS[axis]}", f"{line['peak_memory_mb']:.0f}"]
            beside = [f"{other['sps']:.0f}", f"{line['sps'] / other['sps']:.2f}"] if other else ["", ""]
            rows.append([f"{script}, {AXES[axis]} {value}", *figures, *beside])
    header = ["", "steps/s", "gradient steps/s", "microseconds", "memory, MB", "SBX, steps/s", "x SBX"]
    return markdown(header, rows)
