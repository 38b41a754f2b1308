"""The plots of speed and returns of a sweep."""

import numpy as np

from benchmark.modes import MODES
from benchmark.tables import by_mode, by_task, panels, speed, timed

# Colours of Okabe and Ito, and two more which colour-blind readers can tell apart.
HUES = ("#E69F00", "#56B4E9", "#0072B2", "#000000", "#009E73", "#D55E00", "#882255", "#44AA99")
GREYS = ("#BBBBBB", "#B0A090", "#908070", "#706050", "#999999", "#555555", "#303030")  # of other libraries
COLOURS = dict(zip(MODES, GREYS + HUES, strict=True))


def label(mode: str) -> str:
    """The name of a mode in a plot."""
    return MODES[mode].label.replace("`", "").removeprefix("LeanRL ")


def task_panels(lines: list[dict], title: str):
    """A figure with a panel for each task, and of each panel the axis and the runs by mode; None of none."""
    groups = by_task(lines)
    if not groups:
        return None, []
    figure, axes = panels(len(groups), title, lines)
    for axis, (*names, steps) in zip(axes, groups, strict=True):
        alike = [other for other in groups if other[:2] == tuple(names)]
        axis.set_title(", ".join([*names, f"{steps:,} steps"] if len(alike) > 1 else names), fontsize=10)
    return figure, [(axis, by_mode(group)) for axis, group in zip(axes, groups.values(), strict=True)]


def plot_speed(lines: list[dict]):
    """Bars of steps per second by mode, with the range over runs; a panel an algorithm and environment."""
    figure, drawn = task_panels(timed(lines), "Agent steps per second: median, range, ratio to eager")
    for axis, modes in drawn:
        names = [*modes][::-1]
        medians = np.array([speed(modes[mode]) for mode in names])
        most, least = ([end(line["sps"] for line in modes[mode]) for mode in names] for end in (max, min))
        labels, colours = [label(mode) for mode in names], [COLOURS[mode] for mode in names]
        whiskers = [medians - least, most - medians]
        axis.barh(labels, medians, xerr=whiskers, color=colours, ecolor="black", capsize=3)
        for row, median in enumerate(medians):
            ratio = f"  ({median / speed(modes['eager']):.2f}x)" if "eager" in modes else ""
            axis.text(most[row], row, f"  {median:,.0f}{ratio}", va="center", fontsize=9)
        axis.set_xlim(0, max(most) * 1.4)
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter("{x:,.0f}")
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
    """Return of training episodes against `key`, step or seconds: mean and range; a panel a task.

    Seconds are those after start-up, which the table has. Modes with the same returns share a line.
    """
    curve_of = {(curve["sweep"], curve["job"]): curve for curve in curves if len(curve["step"]) > 1}
    lines = [line for line in lines if (line["sweep"], line["job"]) in curve_of]
    axis_name = {"step": "agent steps", "seconds": "seconds after start-up"}[key]
    title = f"Return of training episodes against {axis_name}: mean and range over seeds"
    figure, drawn = task_panels(lines, title)
    for axis, modes in drawn:
        shown: list[tuple] = []  # what a line is of, and the line
        for mode, runs in modes.items():
            of_mode = [curve_of[line["sweep"], line["job"]] for line in runs]
            if not (found := on_one_grid(of_mode, "step", "episodic_return")):
                continue
            x, values = found
            if key == "seconds":
                # Against time, too, means are by steps: seeds go through their episodes at different times.
                startup = [[line.get("startup_seconds") or 0] for line in runs]
                x = (on_one_grid(of_mode, "step", "seconds")[1] - startup).mean(axis=0)
            name, colour = label(mode), COLOURS[mode]
            same = [line for other, line in shown if np.array_equal(other, [x, *values])]
            if same:
                same[0].set_label(f"{same[0].get_label()} = {name}")
                continue
            shown.append(([x, *values], *axis.plot(x, values.mean(axis=0), color=colour, label=name)))
            low, high = values.min(axis=0), values.max(axis=0)
            axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            if key == "step":
                draw_evaluations(axis, of_mode, colour, f"{name}, evaluation")
        axis.set(xlabel=axis_name, ylabel="return")
        axis.locator_params(axis="x", nbins=6)
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    return figure
