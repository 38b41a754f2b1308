"""The tables of a quadruped that learns to walk. docs/fast_td3.md and docs/fast_sac.md have the commands."""

import statistics

from benchmark import records
from benchmark.tables import by, by_machine, markdown


class Line(records.Timing):
    """What a run has learnt after so many steps: means over episodes, of which velocities are over steps."""

    seed: int
    steps: int
    softer_steps: int  # how many of the run's first steps have softer penalties
    seconds: float  # of training so far, start-ups included
    episodic_return: float
    episodic_length: float
    velocity: float  # m/s, that the robot was told
    velocity_error: float  # m/s, between that and its own


check = records.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Returns, lengths and velocities by steps, of each seed."""
    rows, seeds = [], sorted({line["seed"] for line in lines})
    for (softer_steps, steps), runs in by(lines, "softer_steps", "steps").items():
        of, minutes = {run["seed"]: run for run in runs}, statistics.mean(run["seconds"] for run in runs) / 60
        penalties = "softer" if steps <= softer_steps else "then its own" if softer_steps else "its own"
        cells = [f"{steps / 1e6:g}M, {penalties}", f"{minutes:.0f}"]
        for key, digits in (("episodic_return", 1), ("episodic_length", 0), ("velocity_error", 2)):
            cells.append(", ".join(f"{of[seed][key]:.{digits}f}" if seed in of else "-" for seed in seeds))
        rows.append([*cells, f"{statistics.mean(run['velocity'] for run in runs):.2f}"])
    header = ["steps, penalties", "minutes", f"return by seed ({', '.join(map(str, seeds))})", "length"]
    return markdown([*header, "velocity error, m/s", "commanded, m/s"], rows)
