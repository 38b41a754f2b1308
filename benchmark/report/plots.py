"""The plots of speed, returns and GPU utilisation of a sweep."""

import statistics
import textwrap
from collections.abc import Collection

import numpy as np

from benchmark.modes import MODES
from benchmark.report.tables import busy_per_million, by, in_order, name_of, processor, timed

# The colours of Okabe and Ito, and four more which colour-blind readers can tell apart.
HUES = ("#E69F00", "#56B4E9", "#0072B2", "#000000", "#009E73", "#D55E00", "#882255", "#44AA99", "#CC79A7")
HUES += ("#F0E442", "#8C510A", "#5E3C99")
GREYS = ("#BBBBBB", "#B0A090", "#908070", "#706050", "#999999", "#555555", "#303030")  # of other libraries
COLOURS = dict(zip(MODES, GREYS + HUES, strict=True))


def panels(count: int, title: str):
    """A figure of panels, two in a row, and its axes, of which those left over are hidden."""
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
    figure.suptitle("\n".join(textwrap.wrap(title, 58 * columns)))
    return figure, axes.ravel()


def label(mode: str, runs: list[dict]) -> str:
    """The name of a mode of these runs in a plot."""
    return name_of(mode, runs).replace("`", "").removeprefix("LeanRL ")


def below(lines: list[dict]) -> str:
    """The machine, short enough to stand below a plot."""
    gpu = lines[0]["hardware"]["gpu"]
    torch = "/".join(sorted({line["versions"].get("torch") or "" for line in lines} - {""}))
    return f"{processor(lines[0])}; {gpu or 'no GPU'}; torch {torch}"


def title_of(task: tuple[str, str, int], tasks: Collection[tuple[str, str, int]]) -> str:
    """The title of a panel: algorithm and environment, and the steps if another panel has both."""
    *names, steps = task
    alike = [other for other in tasks if other[:2] == task[:2]]
    return ", ".join([*names, f"{steps:,} steps"] if len(alike) > 1 else names)


def plot_speed(lines: list[dict]):
    """Bars of steps per second by mode, with the range over runs; a panel an algorithm and environment."""
    groups = by(timed(lines), "algorithm", "env_id", "steps")
    if not groups:
        return None
    figure, axes = panels(len(groups), "Agent steps per second: median, range, ratio to eager")
    for axis, (task, group) in zip(axes, groups.items(), strict=False):
        runs_of = {mode: runs for (mode,), runs in by(group, "mode").items()}
        modes = {mode: [line["sps"] for line in runs] for mode, runs in runs_of.items()}
        names = in_order(modes)[::-1]
        medians = np.array([statistics.median(modes[mode]) for mode in names])
        low, high = [min(modes[mode]) for mode in names], [max(modes[mode]) for mode in names]
        whiskers = [medians - low, high - medians]
        colours = [COLOURS[mode] for mode in names]
        labels = [label(mode, runs_of[mode]) for mode in names]
        axis.barh(labels, medians, xerr=whiskers, color=colours, ecolor="black", capsize=3)
        base = statistics.median(modes["eager"]) if "eager" in modes else None
        for row, (mode, median) in enumerate(zip(names, medians, strict=True)):
            ratio = f"  ({median / base:.2f}x)" if base else ""
            axis.text(max(modes[mode]), row, f"  {median:,.0f}{ratio}", va="center", fontsize=9)
        axis.set_xlim(0, max(map(max, modes.values())) * 1.4)
        axis.set_title(title_of(task, groups), fontsize=10)
    figure.supxlabel(below(lines), fontsize=8, color="#555555")
    return figure


def on_one_grid(curves: list[dict], step: str, value: str) -> tuple[np.ndarray, np.ndarray] | None:
    """100 steps that all curves have, and the values of each there, (curves, 100); None if they share none.

    Only there, because a mean over fewer curves would jump.
    """
    low, high = max(curve[step][0] for curve in curves), min(curve[step][-1] for curve in curves)
    if low >= high:
        return None
    grid = np.linspace(low, high, 100)
    return grid, np.stack([np.interp(grid, *at_each_step(curve, step, value)) for curve in curves])


def at_each_step(curve: dict, step: str, value: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a curve; of episodes that ended at one step, as in many environments, the mean."""
    steps, places = np.unique(curve[step], return_inverse=True)
    return steps, np.bincount(places, curve[value]) / np.bincount(places)


def draw_evaluations(axis, curves: list[dict], colour: str, text: str, scale: float = 1.0) -> None:
    """The mean of evaluations against steps, in units of `scale`, dashed, of curves that have two or more."""
    curves = [curve for curve in curves if len(curve.get("eval_step", [])) > 1]
    if curves and (found := on_one_grid(curves, "eval_step", "eval_return")):
        grid, values = found[0] / scale, found[1].mean(axis=0)
        text += f" of {len(curves)} seed{'s' * (len(curves) > 1)}"
        axis.plot(grid, values, "--", color=colour, linewidth=1.5, label=text)


def plot_returns(lines: list[dict], curves: list[dict], key: str):
    """Return of training episodes against `key`, step or seconds: mean and range; a panel a task."""
    curve_of = {(curve["sweep"], curve["job"]): curve for curve in curves if len(curve["step"]) > 1}
    drawn = [line for line in lines if (line["sweep"], line["job"]) in curve_of]
    groups = by(drawn, "algorithm", "env_id", "steps")
    if not groups:
        return None
    axis_name = {"step": "agent steps", "seconds": "seconds, start-up included"}[key]
    title = f"Return of training episodes against {axis_name}: mean and range over seeds"
    figure, axes = panels(len(groups), title)
    for axis, (task, group) in zip(axes, groups.items(), strict=False):
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        for mode in in_order(modes):
            runs = [curve_of[line["sweep"], line["job"]] for line in modes[mode]]
            if not (found := on_one_grid(runs, "step", "episodic_return")):
                continue
            grid, values = found
            # Against time, too, means are by steps: a seed that had to compile is through its first episodes
            # when others are at their end.
            x = grid if key == "step" else on_one_grid(runs, "step", "seconds")[1].mean(axis=0)
            axis.plot(x, values.mean(axis=0), color=COLOURS[mode], label=label(mode, modes[mode]))
            low, high = values.min(axis=0), values.max(axis=0)
            axis.fill_between(x, low, high, color=COLOURS[mode], alpha=0.2, linewidth=0)
            if key == "step":
                draw_evaluations(axis, runs, COLOURS[mode], f"{label(mode, modes[mode])}, evaluation")
        axis.set_title(title_of(task, groups), fontsize=10)
        axis.set_xlabel(axis_name)
        axis.set_ylabel("return")
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    figure.supxlabel(below(lines), fontsize=8, color="#555555")
    return figure


def plot_gpu(lines: list[dict], curves: list[dict]):
    """GPU utilisation over the last run of each mode; a panel an algorithm and environment, if on a GPU."""
    curve_of = {(curve["sweep"], curve["job"]): curve for curve in curves if curve["gpu_seconds"]}
    whole = [line for line in timed(lines) if line.get("gpu_busy_seconds") is not None]
    drawn = [line for line in whole if (line["sweep"], line["job"]) in curve_of]
    groups = by(drawn, "algorithm", "env_id", "steps")
    if not groups:
        return None
    title = "GPU utilisation in a run, and the median of GPU-busy seconds per million steps"
    figure, axes = panels(len(groups), title)
    for axis, (task, group) in zip(axes, groups.items(), strict=False):
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        for mode in in_order(modes):
            last = modes[mode][-1]  # the first has compiled
            curve = curve_of[last["sweep"], last["job"]]
            busy = busy_per_million(modes[mode])
            percent = 100 * np.array(curve["gpu_utilization"])
            text = f"{label(mode, modes[mode])}{'' if busy is None else f': {busy:,.0f} s'}"
            axis.plot(curve["gpu_seconds"], percent, color=COLOURS[mode], label=text)
        axis.set_title(title_of(task, groups), fontsize=10)
        axis.set_xlabel("seconds, start-up included")
        axis.set_ylabel("utilisation, %")
        axis.set_ylim(0, 140)  # room for the legend
        axis.set_yticks(range(0, 101, 20))
        axis.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    figure.supxlabel(below(lines), fontsize=8, color="#555555")
    return figure
