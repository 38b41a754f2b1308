"""The format of the files of results, and how they are read and appended to.

A sweep writes two files of JSON lines. In `results.jsonl` a line is a run: the keys of `Result`, and what else the run's
summary holds. In `curves.jsonl` a line is what one run showed over time: the keys of `Curve`. Both are read with every line
checked, and appended to so that neither a full disk nor a killed process leaves half a line behind for good.
"""

import json
import os
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from typeguard import TypeCheckError, check_type

FORMAT = 1  # of both files; grows with every change that an older reader would misread


class Hardware(TypedDict):
    """The machine of a run."""

    cpu: str
    cores: int
    gpu: str | None


class Result(TypedDict):
    """A run. `job` names it within its sweep: script, mode, environment, steps and seed."""

    format: Literal[1]
    sweep: str
    job: str
    status: Literal["ok", "failed"]
    attempts: int
    algorithm: str  # the eager script
    mode: str  # a key of sweep.MODES
    env_id: str
    seed: int
    # Of a run that failed: why, and the end of its log.
    reason: NotRequired[str]
    log: NotRequired[str]
    # Of a run that is ok, from here on.
    total_timesteps: NotRequired[int]
    sps: NotRequired[float | None]  # agent steps per second, None where the run was too short to tell
    startup_seconds: NotRequired[float | None]
    episodic_return: NotRequired[float | None]
    episodic_return_10: NotRequired[float | None]
    cold_start: NotRequired[bool]  # the compilers' caches were empty
    cpu_busy_seconds: NotRequired[float | None]  # processor time of the run, user and system
    gpu_busy_seconds: NotRequired[float | None]  # area under the curve of GPU utilisation; None without a GPU
    gpu_memory_mb: NotRequired[float | None]  # the most that was in use on the GPU
    hardware: NotRequired[Hardware]
    versions: NotRequired[dict[str, str | None]]
    git_commit: NotRequired[str | None]


class Curve(TypedDict):
    """What the run `job` showed over time. Seconds count from the start of its process, compilation included."""

    format: Literal[1]
    sweep: str
    job: str
    # Training episodes, in at most 100 groups of as many: where each group ended, and its mean return.
    step: list[int]
    seconds: list[float]
    episodic_return: list[float]
    # GPU utilisation between 0 and 1 in at most 100 groups of samples: where each ended, and its mean. Empty without a GPU.
    gpu_seconds: list[float]
    gpu_utilization: list[float]


class ResultsError(ValueError):
    """A file that does not hold what it should; the message names file and line."""


def parse(line: str | bytes, kind: type) -> dict:
    """The dictionary in one line of a file of `kind`, Result or Curve. Raises ValueError, and says what is wrong."""
    content = json.loads(line)
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise ValueError(f"has format {version}, and this version reads format {FORMAT}")
    try:
        # Keys beyond those of the format are welcome: a summary may say more.
        check_type({key: value for key, value in content.items() if key in kind.__annotations__}, kind)
    except TypeCheckError as error:
        raise ValueError(str(error)) from None
    return content


def read(path: Path, kind: type = Result) -> list[dict]:
    """All lines of a file of results. Raises ResultsError where a line is not what it should be."""
    lines = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            lines.append(parse(line, kind))
        except ValueError as error:
            raise ResultsError(f"{path}, line {number}: {error}") from None
    return lines


def recover(path: Path, kind: type = Result) -> list[dict]:
    """All lines of a file that may not exist, or whose last line may be cut off: that one is left out.

    Raises ResultsError where another line is not what it should be.
    """
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    lines = []
    for number, line in enumerate(whole, start=1):
        try:
            lines.append(parse(line, kind))
        except ValueError as error:
            # Not JSON, and nothing after it: the remains of a write. Another format is somebody's results.
            if number == len(whole) and not rest and isinstance(error, json.JSONDecodeError):
                break
            raise ResultsError(f"{path}, line {number}: {error}") from None
    return lines


def replace(path: Path, lines: list[dict]) -> None:
    """Write the file anew: the old one stays until the new one is whole."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def append(path: Path, line: dict) -> None:
    """Append a line, all of it or, on an OSError such as a full disk, nothing."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        data = json.dumps(line).encode() + b"\n"
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
