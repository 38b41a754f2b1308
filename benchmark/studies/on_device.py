"""Table and plot of PPO on Pendulum-v1 by number of environments; results/README.md has the command."""

from typing import Literal

from benchmark import records
from benchmark.tables import by, by_machine, markdown, panels, ratio, speed, speeds

LABELS = {"gymnasium": "`ppo_continuous_action --compile`", "eager": "eager", "compile": "`--compile`"}
LABELS |= {"purejaxrl": "PureJaxRL"}


class Line(records.Timing):
    """A run with so many environments."""

    mode: Literal[*LABELS]
    num_envs: int
    seed: int
    sps: float


check = records.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Steps/s by number of environments and program, and the compiled twin's beside PureJaxRL's."""
    rows = []
    for (num_envs,), group in by(lines, "num_envs").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        beside = ratio(modes.get("compile"), modes.get("purejaxrl"))
        rows.append([f"{num_envs:,}", *(speeds(modes.get(mode)) for mode in LABELS), beside])
    return markdown(["environments", *LABELS.values(), "`--compile` x PureJaxRL"], rows)


def plot(lines: list[dict], curves: list[dict]):
    """Steps/s against the number of environments, a line a program."""
    figure, (axis,) = panels(1, "PPO on Pendulum-v1: agent steps per second, learning included", lines)
    for (mode,), group in by(lines, "mode").items():
        points = {num_envs: speed(runs) for (num_envs,), runs in by(group, "num_envs").items()}
        axis.plot(points.keys(), points.values(), "o-", label=LABELS[mode].replace("`", ""))
    axis.set(xscale="log", yscale="log", xlabel="environments", ylabel="agent steps per second")
    axis.set_ylim(bottom=1000)  # for the legend
    sizes = sorted({line["num_envs"] for line in lines})
    axis.set_xticks(sizes, [f"{num_envs:,}" for num_envs in sizes])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend(frameon=False, loc="lower right")
    return figure
