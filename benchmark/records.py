"""The format of the files of results, and how they are read and written.

In a sweep's `results.jsonl` a line is a run: the keys of `Done`, and what else the run's summary holds, or
the keys of `Failed`. In `curves.jsonl` it is what one run showed over time: the keys of `Curve`. Each study
says itself what the keys of its lines are. All lines are checked on reading and before writing. They are JSON
to the letter: no NaN, nothing infinite.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from benchmark.modes import MODES

FORMAT = 1  # of both files; grows with every change that an older reader would misread
Mode = Literal[*MODES]


class Hardware(TypedDict):
    """The machine of a run."""

    cpu: str
    cores: int
    gpu: str | None
    mkl: NotRequired[str]  # `as on Intel` where run.sh has it take that code on another processor


class Run(TypedDict):
    """What every line of a run has.

    `job` names it within its sweep: script, mode, environment, steps, further arguments if any, and seed.
    """

    format: int
    sweep: str
    job: str
    attempts: int  # the number of the last one; Slurm may have refused some
    algorithm: str  # the eager script
    mode: Mode
    env_id: str
    seed: int


class Done(Run):
    """A run that ended well: what the summary says, and what was measured around it."""

    status: Literal["ok"]
    script: str
    total_timesteps: int
    sps: float | None  # agent steps per second; None where the run was too short to tell
    startup_seconds: float | None
    versions: dict[str, str | None]
    hardware: Hardware


class Failed(Run):
    """A run that did not end well, with the reason and the end of its log."""

    status: Literal["failed"]
    reason: str
    log: str


class Measured(TypedDict, total=False):
    """What a run that ended well has besides, unless it was made by hand or with another library."""

    wall_seconds: float | None
    steps: int  # asked for: a run may end a little earlier
    # whether it compiled all; None where runs of this script, mode and environment had begun and none ended
    cold_start: bool | None
    threads: int | None  # OMP_NUM_THREADS, None where PyTorch chose
    runs_per_gpu: int  # how many shared the GPU
    resumed: int | None  # the step from which it was taken up last, and sps counts; None where it ran through
    # area under the curve of GPU utilisation, start-up left out; None without a GPU
    gpu_busy_seconds: float | None
    gpu_memory_mb: float | None  # the most that was in use on the GPU
    episodic_return: float | None
    episodic_return_10: float | None
    git_commit: str | None
    peak_memory_mb: float  # the most that one process of the run held


class Curve(TypedDict):
    """What the run `job` showed over time.

    Seconds are those of its processes, compilation included, without what was lost.
    """

    format: int
    sweep: str
    job: str
    # Training episodes, in at most 100 groups: where each ended, and its mean return.
    step: list[int]
    seconds: list[float]
    episodic_return: list[float]
    # Evaluations during training, likewise. Missing in files from before there were any.
    eval_step: NotRequired[list[int]]
    eval_return: NotRequired[list[float]]


class Timing(TypedDict):
    """What every line of a study that times something has."""

    format: int
    status: Literal["ok"]
    versions: dict[str, str | None]
    hardware: Hardware
    git_commit: str | None


class Description(TypedDict):
    """A sweep.json, in one line."""

    format: int
    id: str
    profile: str
    git_commit: str | None
    options: NotRequired[dict[str, str]]  # further arguments of its runs; not in files of 0.2.0


class Reached(TypedDict):
    """A line of benchmark/results/literature.jsonl: what others have reached."""

    format: int
    algorithm: str  # the eager script
    env_id: str
    source: str  # the column of the table
    about: str  # which figures of that source
    url: str
    mean: float
    spread: float
    spread_of: str
    seeds: int | None  # None where the source does not say
    steps: str
    returns: Literal["training", "evaluation"]
    version: str  # of the environments
    note: str


class ResultsError(ValueError):
    """A file that does not hold what it should; the message names file and line."""


def check_of(*kinds: type) -> Callable[[object], None]:
    """A check that raises ValueError, with one line that says why, but for a line of these kinds."""
    # Keys beyond those of the kind are welcome: a summary may say more.
    adapters = [TypeAdapter(with_config(ConfigDict(strict=True))(kind)) for kind in kinds]

    def check(line: object) -> None:
        if not isinstance(line, dict) or "format" not in line:
            raise ValueError("is no line of results")
        if line["format"] != FORMAT:
            raise ValueError(f"has format {line['format']}, and this version reads format {FORMAT}")
        try:
            json.dumps(line, allow_nan=False)
        except ValueError:
            raise ValueError("has a number that is not finite") from None
        try:
            for adapter in adapters:
                adapter.validate_python(line)
        except ValidationError as invalid:
            error = invalid.errors()[0]
            raise ValueError(f"{'.'.join(map(str, error['loc']))}: {error['msg']}") from None

    return check


check_literature, check_description = check_of(Reached), check_of(Description)
check_any, check_failed = check_of(), check_of(Failed)
check_done, check_points = check_of(Done, Measured), check_of(Curve)


def check_run(line: object) -> None:
    """Raise ValueError, with one line that says why, unless this is a line of results."""
    check_any(line)
    (check_failed if line.get("status") == "failed" else check_done)(line)


def check_curve(line: object) -> None:
    """Raise ValueError, with one line that says why, unless this is a line of curves."""
    check_points(line)
    for keys in (("step", "seconds", "episodic_return"), ("eval_step", "eval_return")):
        if len({len(line.get(key, [])) for key in keys}) > 1:
            raise ValueError(f"has lists of several lengths: {', '.join(keys)}")


def read(path: Path, check: Callable[[object], None] = check_run, growing: bool = False) -> list[dict]:
    """All lines of a file that `check` checks; of a growing file without one that is being written.

    Raises ResultsError where a line is not what it should be.
    """
    *contents, last = path.read_bytes().split(b"\n")
    lines = []
    for number, content in enumerate([*contents, *([last] if last and not growing else [])], start=1):
        try:
            lines.append(json.loads(content))
            check(lines[-1])
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path}, line {number}: {error}") from None
    return lines


def replace(path: Path, lines: list[dict], check: Callable[[object], None] = check_run) -> None:
    """Write the file anew, whole or not at all. Raises ValueError where a line is not to be read."""
    for line in lines:
        check(line)
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    new.replace(path)


def append(path: Path, line: dict) -> None:
    """Append a line in one piece."""
    with path.open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
