"""The tables of speed, returns and checks that README.md, docs/ and a sweep show."""

import itertools
import statistics

from benchmark.collection import COLLECTION
from benchmark.modes import LIBRARIES, MODES
from benchmark.tables import (
    by,
    by_machine,
    by_mode,
    by_task,
    fastest,
    machine,
    machines,
    markdown,
    ratio,
    speed,
    speeds,
    timed,
)

MISSED = "**missed**"


def median_of(lines: list[dict], key: str) -> str:
    """The median of a figure over the lines that have it, or nothing."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{statistics.median(values):.1f}" if values else ""


def busy_per_million(runs: list[dict]) -> float | None:
    """The seconds that the GPU is busy in a million agent steps that learn: the median.

    It leaves out runs without a GPU, and those that learn for less than ten seconds: the driver's figures
    lag, and on an H100 they were 0 for up to five seconds. None where no run is left.
    """
    values = []
    for line in runs:
        steps = line["total_timesteps"] - line.get("learning_starts", 0)
        if line.get("gpu_busy_seconds") is not None and steps / line["sps"] >= 10:
            values.append(1e6 * line["gpu_busy_seconds"] / steps)
    return statistics.median(values) if values else None


@by_machine
def speed_table(lines: list[dict]) -> str:
    """Agent steps per second of each algorithm and mode: median, range, ratios, start-up, GPU seconds."""
    groups, rows = by_task(timed(lines)), []
    several = len(groups) > len(by(timed(lines), "algorithm"))
    on_gpu = any(line.get("gpu_busy_seconds") for line in lines)
    for (algorithm, env_id, steps), group in groups.items():
        modes, task = by_mode(group), f"{algorithm}{f', {env_id}, {steps:,} steps' if several else ''}: "
        for mode, runs in modes.items():
            name = (task if mode == next(iter(modes)) else "…") + MODES[mode].label  # a task stands once
            cells = [speeds(runs), ratio(runs, modes.get("eager"))]
            for cold in (True, False):
                started = [line for line in runs if line.get("cold_start") is cold]
                cells.append(median_of(started, "startup_seconds"))
            busy = busy_per_million(runs) if on_gpu else None
            rows.append([name, *cells, "" if busy is None else f"{busy:.0f}"])
    header = ["", "steps/s, median (range)", "x eager (by seed)", "start-up cold, s"]
    return markdown([*header, "warm, s", "GPU-busy s per 1M steps that learn"], rows)


@by_machine
def algorithms_table(lines: list[dict]) -> str:
    """A row an algorithm: steps/s of others and of ours, and how much faster ours is than the best other."""
    rows, shown = [], (*LIBRARIES, "eager", "compile", "bfloat16")
    for (algorithm, env_id, _), group in by_task(timed(lines)).items():
        modes = by_mode(group)
        cells = [f"{speed(modes[mode]):,.0f}" if mode in modes else "" for mode in shown]
        beside = ratio(modes.get("compile"), fastest(modes, LIBRARIES))
        rows.append([f"{algorithm}, {env_id}", *cells, beside])
    return markdown(["steps/s", *(MODES[mode].label for mode in shown), "x the best other library"], rows)


@by_machine
def beside_original_table(lines: list[dict]) -> str:
    """Steps/s of each run on a GPU, of the algorithms of which the original LeanRL has published its own."""
    rows = []
    for (name, env_id), group in by(timed(lines), "algorithm", "env_id").items():
        if COLLECTION[name].published_sps:
            modes = by_mode(group)
            figures = [sorted(line["sps"] for line in modes[mode]) for mode in ("eager", "both")]
            cells = [" and ".join(f"{sps:,.0f}" for sps in of_mode) for of_mode in figures]
            rows.append([f"{name}, {env_id}", *cells, f"{COLLECTION[name].published_sps:,}"])
    header = ["steps/s", MODES["eager"].label, MODES["both"].label, "the original's, published"]
    return markdown(header, rows)


def check_rows(lines: list[dict]) -> list[list[str]]:
    """A row a check and mode of a sweep of checks; the last cell is MISSED where a run is out of bounds."""
    groups, rows = by(lines, "algorithm", "env_id", "steps", "mode"), []
    for name, algorithm in COLLECTION.items():
        for check, mode in itertools.product(algorithm.checks, MODES):
            if runs := groups.get((name, check.env_id, check.steps, mode)):
                runs = sorted(runs, key=lambda run: run["seed"])
                returns = [run.get("episodic_return") for run in runs]
                within = all(value is not None and check.least <= value <= check.most for value in returns)
                shown = ", ".join("none" if value is None else f"{value:.1f}" for value in returns)
                cells = [f"{name}, {check.env_id}: {MODES[mode].label}", f"{check.steps:,}", shown]
                rows.append([*cells, f"{check.least:g} to {check.most:g}", "" if within else MISSED])
    return rows


def check_table(lines: list[dict]) -> str:
    """The runs of the profile check, of all machines: returns by seed, bounds, and which rows missed them."""
    rows = check_rows(lines)
    table = markdown(["", "steps", "return, last 100 episodes, by seed", "bounds", ""], rows)
    told = [] if any(row[-1] for row in rows) else ["All are within bounds."]
    return "\n\n".join([table, *told, *map(machine, machines(lines))])
