"""What all tables and plots are made with: lines by their keys, medians and ratios, machines, panels."""

import statistics
import textwrap
from collections.abc import Callable

from benchmark.modes import MODES


def by(lines: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """The lines by their values of these keys, in the order in which these first occur."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(key) for key in keys), []).append(line)
    return groups


def by_mode(lines: list[dict]) -> dict[str, list[dict]]:
    """The lines by mode, in the order of tables and plots."""
    groups = by(lines, "mode")
    return {mode: groups[mode,] for mode in MODES if (mode,) in groups}


def by_task(lines: list[dict]) -> dict[tuple, list[dict]]:
    """The lines of runs by what is compared: algorithm, environment and steps that were asked for."""
    return by(lines, "algorithm", "env_id", "steps")


def timed(lines: list[dict]) -> list[dict]:
    """The lines of runs with a speed of their own: one that was taken up has that of its last part."""
    return [line for line in lines if line.get("sps") and line.get("resumed") is None]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose others are figures, without columns that are empty."""
    kept = [index for index in range(len(header)) if any(row[index] for row in rows)]
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row[index] for index in kept)} |" for row in [header, rule, *rows])


def spread(values: list[float]) -> str:
    """The median and, of several values, their range."""
    median = f"{statistics.median(values):.0f}"
    return median if len(values) == 1 else f"{median} ({min(values):.0f}-{max(values):.0f})"


def speed(runs: list[dict]) -> float:
    """The median steps/s of runs."""
    return statistics.median(line["sps"] for line in runs)


def speeds(runs: list[dict] | None) -> str:
    """Median and range of the steps/s of runs, or nothing."""
    return spread([line["sps"] for line in runs]) if runs else ""


def ratio(runs: list[dict] | None, base: list[dict] | None) -> str:
    """The ratio of two medians of steps/s and, of several seeds, its range over runs with the same seed."""
    if not runs or not base:
        return ""
    speed_of = {line["seed"]: line["sps"] for line in base if "seed" in line}
    each = [line["sps"] / speed_of[line["seed"]] for line in runs if line.get("seed") in speed_of]
    several = f" ({min(each):.2f}-{max(each):.2f})" if len(each) > 1 and runs is not base else ""
    return f"{speed(runs) / speed(base):.2f}{several}"


def fastest(modes: dict[str, list[dict]], among: tuple[str, ...]) -> list[dict] | None:
    """The runs of the fastest of some modes, if there are any."""
    return max((modes[mode] for mode in among if mode in modes), key=speed, default=None)


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
    return f"{processor(lines[0])}; {f'{gpu}{shared}; ' if gpu else ''}{packages_and_commits(lines)}"


def packages(lines: list[dict], only: tuple[str, ...] = ()) -> str:
    """The versions that runs were made with, all of them where runs differ; of all packages, or of `only`."""
    versions: dict[str, set[str]] = {}
    for line in lines:
        for package, version in line["versions"].items():
            if version and (not only or package in only):
                versions.setdefault(package, set()).add(version)
    return ", ".join(f"{package} {'/'.join(sorted(found))}" for package, found in versions.items())


def packages_and_commits(lines: list[dict]) -> str:
    """The versions of LeanRL and PyTorch that runs were made with, and commits, of more than four the number.

    Their lines have the other versions.
    """
    known = sorted({line["git_commit"] for line in lines if line.get("git_commit")})
    commits = [commit[:7] + commit[40:] for commit in known]
    told = f"commit {', '.join(commits)}" if len(commits) < 5 else f"{len(commits)} commits"
    return "; ".join(filter(None, [packages(lines, ("LeanRL", "torch")), commits and told]))


def by_machine(table: Callable[[list[dict]], str]) -> Callable[[list[dict]], str]:
    """A table that is made for each machine of its own, with the machine below it."""
    return lambda lines: "\n\n".join(f"{table(group)}\n\n{machine(group)}" for group in machines(lines))


def panels(count: int, title: str, lines: list[dict] | None = None):
    """A figure of panels, two in a row, with the machine of `lines` below, and the axes that it needs."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    import matplotlib.pyplot as plt

    columns = min(count, 2)
    rows = -(-count // columns)
    size = (5.2 * columns, 3.2 * rows + 0.6)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.ravel()[count:]:
        axis.set_visible(False)
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    # A title wider than its one panel is broken into lines, or both of its ends would be cut off.
    wrapped = {"break_on_hyphens": False}
    figure.suptitle("\n".join(textwrap.wrap(title, 58 * columns, **wrapped)))
    if lines:
        torch = "/".join(sorted({line["versions"].get("torch") or "" for line in lines} - {""}))
        below = f"{processor(lines[0])}; {lines[0]['hardware']['gpu'] or 'no GPU'}; torch {torch}"
        lines_below = textwrap.wrap(below, 85 * columns, **wrapped)
        figure.supxlabel("\n".join(lines_below), fontsize=8, color="#555555")
    return figure, axes.ravel()[:count]
