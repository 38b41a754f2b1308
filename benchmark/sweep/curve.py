"""A learning curve, from the TensorBoard logs of a run."""

import math
from pathlib import Path

import numpy as np

GROUPS = 100  # points of a curve, at most


def grouped(*columns: list[float], groups: int = GROUPS) -> list[np.ndarray]:
    """Columns of one length in so many groups at most: their last values, of the last column their means."""
    *ends, means = [np.array_split(np.asarray(column), min(groups, len(column)) or 1) for column in columns]
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


def episode_curve(runs: Path, groups: int = GROUPS) -> dict[str, list]:
    """Steps, seconds and returns of the run in a folder `runs`: the columns of a `Curve`, in so many groups.

    `starts.txt` there has the Unix times at which the run was started or taken up. What it had done beyond
    the checkpoint from which it was taken up is left out, and returns that are not finite. Of several agents,
    each of which has a folder there, it is empty: their episodes are not those of one curve.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second

    events, folders = [], [path for path in runs.glob("*") if path.is_dir()]
    for folder in folders if len(folders) == 1 else []:
        log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        if "charts/episodic_return" in log.Tags()["scalars"]:
            events += log.Scalars("charts/episodic_return")
    starts = [float(line) for line in (runs / "starts.txt").read_text().split()]
    seconds = seconds_run(starts, [event.wall_time for event in events])
    events = zip(events, seconds, strict=True)
    finite = [(event.step, second, event.value) for event, second in events if math.isfinite(event.value)]
    steps, seconds, returns = grouped(*zip(*finite, strict=True) if finite else ([], [], []), groups=groups)
    return {
        "step": steps.astype(int).tolist(),
        "seconds": seconds.round(2).tolist(),
        "episodic_return": returns.round(2).tolist(),
    }
