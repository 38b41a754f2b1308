"""What is on record of a sweep: its folder, the results in it, and what attempts at its runs have left."""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import results
from common import ROOT, refuse
from job import checkpoints, commit, git
from selection import Run


def default_folder(profile: str) -> Path:
    """sweeps/<profile>-<commit>; a new one each time where there are changes that are not committed."""
    head = git(ROOT, "rev-parse", "--short=7", "HEAD")
    changed = (
        f"{datetime.now():%m%d-%H%M%S}" if git(ROOT, "status", "--porcelain", "--untracked-files=no") else ""
    )
    return ROOT / "sweeps" / "-".join(part for part in (profile, head, changed) if part)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the folder and keep other sweeps out of it. Leaves with status 2 where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        refuse(f"--folder takes a folder that can be written to, got {folder}: {error.strerror}")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"--folder {folder}: another sweep is at work there")
        except OSError as error:
            refuse(f"--folder {folder}: its disk has no locks: {error.strerror}")
        yield


def describe(folder: Path, profile: str) -> str:
    """The identity of a folder's sweep, written down where it is new.

    Refuses a folder with a sweep of another profile.
    """
    path, now = folder / "sweep.json", commit(ROOT)
    if not path.exists():
        identity = f"{datetime.now(UTC):%Y-%m-%d}-{uuid4().hex[:8]}"
        description = {"format": results.FORMAT, "id": identity, "profile": profile, "git_commit": now}
        results.replace(path, [description], results.check_description)
        return identity
    try:
        sweep = results.parse(path.read_bytes())
        results.check_description(sweep)
    except results.FormatError as error:
        refuse(f"--folder {folder}: {error}")
    except (OSError, ValueError):
        refuse(f"--folder {folder}: sweep.json is not readable")
    if sweep["profile"] != profile:
        refuse(f"--folder {folder}: has a sweep of profile {sweep['profile']}, not {profile}")
    if sweep["git_commit"] != now:
        print(f"{folder} was begun at commit {sweep['git_commit']}, this is {now}", file=sys.stderr)
    return sweep["id"]


def read_outcome(folder: Path) -> dict | None:
    """What a run has left in its folder at its end; None where that is nothing, or not what a run leaves."""
    try:
        outcome = results.parse((folder / "outcome.json").read_bytes())
        results.check_keys(outcome, results.Died if outcome["status"] == "failed" else results.Ended)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return outcome


class Record:
    """The files of results of a sweep's folder, and the folders of the attempts at its runs."""

    def __init__(self, folder: Path, profile: str):
        self.folder, self.identity = folder, describe(folder, profile)
        self.results_file, self.curves_file = folder / "results.jsonl", folder / "curves.jsonl"

    def restore(self, selected: set[str]) -> list[dict]:
        """Put the files of results in order; returns the lines of the runs that are done.

        A line that was cut off goes, and so do those of selected runs that failed.
        """
        lines, curves = (
            results.recover(self.results_file),
            results.recover(self.curves_file, results.check_curve),
        )
        drawn = {curve["job"]: curve for curve in curves}
        kept = [line for line in lines if line["status"] == "ok" and line["job"] in drawn]
        failed = [line for line in lines if line["status"] == "failed" and line["job"] not in selected]
        results.replace(self.results_file, kept + failed)
        results.replace(self.curves_file, [drawn[line["job"]] for line in kept], results.check_curve)
        return kept

    def lines_of(self, run: Run, outcome: dict, attempts: int) -> tuple[dict, dict]:
        """The lines of results and curves of a run that has ended, at which attempt in this folder counted.

        Where its summary makes no sense, the line says that it failed.
        """
        about = {"format": results.FORMAT, "sweep": self.identity, "job": run.name}
        line = about | {"attempts": attempts, "algorithm": run.algorithm, "mode": run.mode}
        line |= {"env_id": run.env_id, "seed": run.seed, "steps": run.steps}
        line |= {key: value for key, value in outcome.items() if key not in ("summary", "curve")}
        full, curve = outcome.get("summary", {}) | line, about | outcome.get("curve", {})
        try:
            results.check_run(full)
            if full["status"] == "ok":
                results.check_curve(curve)
        except ValueError as error:
            full = line | {"status": "failed", "reason": f"printed a summary that {error}", "log": ""}
        return full, curve

    def add(self, line: dict, curve: dict) -> None:
        """Write the lines of a run that has ended."""
        if line["status"] == "ok":
            results.append(self.curves_file, curve)  # first: a curve without its line goes on return
        results.append(self.results_file, line)

    def attempts(self, run: Run) -> list[Path]:
        """The folders of the attempts at a run, which have numbers for names, in their order."""
        folders = (self.folder / "jobs" / run.name).glob("*")
        return sorted((path for path in folders if path.name.isdecimal()), key=lambda path: int(path.name))

    def new_attempt(self, run: Run) -> Path:
        """A new folder for a run, with what the newest attempt that had a checkpoint has left."""
        earlier = self.attempts(run)
        folder = self.folder / "jobs" / run.name / str(int(earlier[-1].name) + 1 if earlier else 1)
        folder.mkdir(parents=True)
        saved = (
            [path / "runs" for path in earlier if checkpoints(path / "runs")] if run.checkpoint_every else []
        )
        if saved:
            saved[-1].rename(folder / "runs")
        return folder
