"""A learning curve, from the TensorBoard logs of a run."""

import math
from pathlib import Path

import numpy as np

GROUPS = 100  # points of a curve, at most


def grouped(*columns: list[float]) -> list[np.ndarray]:
    """Columns of one length in at most 100 groups: their last values, of the last column their means."""
    *ends, means = [np.array_split(np.asarray(column), min(GROUPS, len(column)) or 1) for column in columns]
    if not len(columns[0]):
        return [np.array([]) for _ in columns]
    last = [np.array([group[-1] for group in column]) for column in ends]
    return [*last, np.array([group.mean() for group in means])]


def seconds_run(starts: list[float], times: list[float]) -> list[float]:
    """For how long a run started, or taken up, at `starts` had been going on at `times`; all Unix times.

    From the last of these times before a start to that start it was not going on, or did what was lost.
    """
    moments, before = np.asarray(times, dtype=float), 0.0
    part_of = np.maximum(np.searchsorted(starts, moments, side="right") - 1, 0)
    for part, start in enumerate(starts):
        moments[part_of == part] += before - start
        before = moments[part_of == part].max(initial=before)
    return moments.tolist()


def logged(runs: Path) -> dict[str, list]:
    """All returns that the run in a folder `runs` has logged: the columns of a `Curve`, not yet in groups.

    `starts.txt` there has the Unix times at which the run was started or taken up. What it had done beyond
    the checkpoint from which it was taken up is left out, and returns that are not finite.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second

    episodes, evaluations = [], []
    for folder in runs.glob("*/"):
        log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for name, events in {"episodic_return": episodes, "eval_return": evaluations}.items():
            if f"charts/{name}" in log.Tags()["scalars"]:
                events += [event for event in log.Scalars(f"charts/{name}") if math.isfinite(event.value)]
    starts = [float(line) for line in (runs / "starts.txt").read_text().split()]
    return {
        "step": [event.step for event in episodes],
        "seconds": seconds_run(starts, [event.wall_time for event in episodes]),
        "episodic_return": [event.value for event in episodes],
        "eval_step": [event.step for event in evaluations],
        "eval_return": [event.value for event in evaluations],
    }


def in_groups(returns: dict[str, list]) -> dict[str, list]:
    """What `logged` gives in at most 100 groups of training episodes, and of evaluations."""
    curve = {}
    for names in (("step", "seconds", "episodic_return"), ("eval_step", "eval_return")):
        columns = grouped(*(returns[name] for name in names))
        curve |= {name: column.round(2).tolist() for name, column in zip(names, columns, strict=True)}
    return curve
