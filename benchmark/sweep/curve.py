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


def learning_curve(runs: Path, groups: int = GROUPS) -> dict[str, list]:
    """Returns of the run in a folder `runs`, in training and in evaluation: the columns of a `Curve`.

    `starts.txt` there has the Unix times at which the run was started or taken up. What it had done beyond
    the checkpoint from which it was taken up is left out, and returns that are not finite. Of several agents,
    each of which has a folder there, it is empty: their episodes are not those of one curve.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second

    events = {"charts/episodic_return": [], "charts/eval_return": []}
    folders = [path for path in runs.glob("*") if path.is_dir()]
    for folder in folders if len(folders) == 1 else []:
        log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for name in set(events) & set(log.Tags()["scalars"]):
            events[name] = [event for event in log.Scalars(name) if math.isfinite(event.value)]
    episodes, evaluations = events.values()
    starts = [float(line) for line in (runs / "starts.txt").read_text().split()]
    columns = [event.step for event in episodes], [event.wall_time for event in episodes]
    columns = columns[0], seconds_run(starts, columns[1]), [event.value for event in episodes]
    steps, seconds, returns = grouped(*columns, groups=groups)
    columns = [event.step for event in evaluations], [event.value for event in evaluations]
    eval_steps, eval_returns = grouped(*columns, groups=groups)
    return {
        "step": steps.astype(int).tolist(),
        "seconds": seconds.round(2).tolist(),
        "episodic_return": returns.round(2).tolist(),
        "eval_step": eval_steps.astype(int).tolist(),
        "eval_return": eval_returns.round(2).tolist(),
    }
