"""A sweep's folder: the results in it, and what attempts at its runs have left."""

import fcntl
import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from benchmark import ROOT, records
from benchmark.machine import checkpoint_in, commit, git
from benchmark.modes import LIBRARIES
from benchmark.sweep.process import SAVE_SECONDS
from benchmark.sweep.runs import Args, Run, further_options, shortened
from benchmark.terminal import refuse, say


def default_folder(args: Args) -> Path:
    """sweeps/<profile>-<commit>, and what `describe` asks for a folder of its own.

    It is a new one each time where there are changes that are not committed.
    """
    head = git(ROOT, "rev-parse", "--short=7", "HEAD")
    changed = git(ROOT, "status", "--porcelain", "--untracked-files=no")
    options = re.sub(r"[^\w.=-]", "_", "-".join(map("=".join, further_options(args).items())))
    now = f"{datetime.now():%m%d-%H%M%S}" if changed else ""
    parts = (args.profile, head, shortened(options, 80), now)
    return ROOT / "sweeps" / "-".join(part for part in parts if part)


def claim(folder: Path, seconds: float = SAVE_SECONDS + 20) -> TextIO:
    """Make the folder and lock it, so that there is one sweep in it: gives the file that holds the lock.

    Runs of a sweep that was killed hold its lock until they have saved: waits so long for that. Leaves with
    status 2 where the folder cannot be had.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        refuse(f"--folder takes a folder that can be written to, got {folder}: {error.strerror}")
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > end:
                refuse(f"--folder {folder}: another sweep is at work there")
            if not told:
                say(f"{folder}: waiting for another sweep, or the runs of one that was killed, to end")
                told = True
            time.sleep(0.2)


def describe(folder: Path, args: Args) -> str:
    """The identity of a folder's sweep, written down where it is new.

    Refuses a folder with a sweep of another profile, or of runs that its tables would not tell apart.
    """
    path, now = folder / "sweep.json", commit(ROOT)
    settings = {"profile": args.profile, "options": further_options(args)}
    if not path.exists():
        identity = f"{datetime.now(UTC):%Y-%m-%d}-{uuid4().hex[:8]}"
        description = {"format": records.FORMAT, "id": identity, "git_commit": now, **settings}
        records.replace(path, [description], records.check_description)
        return identity
    [sweep] = records.read(path, records.check_description)
    for name, value in settings.items():
        if (begun := sweep.get(name, value)) != value:
            refuse(f"--folder {folder}: has a sweep with --{name} {begun}, not {value}")
    if sweep["git_commit"] != now:
        say(f"{folder} was begun at commit {sweep['git_commit']}, this is {now}")
    return sweep["id"]


def read_outcome(folder: Path) -> dict | None:
    """What a run has left in its folder at its end, if it has ended; a file that is cut off is none."""
    path = folder / "outcome.json"
    try:
        return json.loads(path.read_bytes()) if path.exists() else None
    except ValueError:
        return None


class Record:
    """The files of results of a sweep's folder, and the folders of the attempts at its runs."""

    def __init__(self, folder: Path, args: Args):
        self.folder, self.identity = folder, describe(folder, args)
        self.results, self.curves = folder / "results.jsonl", folder / "curves.jsonl"

    def restore(self, selected: set[str]) -> list[dict]:
        """Put the files of results in order; returns the lines of the runs that are done.

        A line that was cut off goes, and so do those of selected runs that failed.
        """
        for path in (self.results, self.curves):
            path.touch()
        lines = records.read(self.results, growing=True)
        curves = records.read(self.curves, records.check_curve, growing=True)
        drawn = {curve["job"]: curve for curve in curves}
        kept = [line for line in lines if line["status"] == "ok" and line["job"] in drawn]
        failed = [line for line in lines if line["status"] == "failed" and line["job"] not in selected]
        records.replace(self.results, kept + failed)
        records.replace(self.curves, [drawn[line["job"]] for line in kept], records.check_curve)
        return kept

    def lines_of(self, run: Run, outcome: dict, attempt: Path) -> tuple[dict, dict]:
        """The lines of results and curves of a run that has ended in the folder of an attempt.

        Where its summary makes no sense, the line says that it failed.
        """
        about = {"format": records.FORMAT, "sweep": self.identity, "job": run.name}
        line = about | {"attempts": int(attempt.name), "algorithm": run.algorithm, "mode": run.mode}
        line |= {"env_id": run.env_id, "seed": run.seed, "steps": run.steps}
        line |= {key: value for key, value in outcome.items() if key not in ("summary", "curve")}
        summary = {key: value for key, value in outcome.get("summary", {}).items() if key != "folder"}
        full, curve = summary | line, about | outcome.get("curve", {})
        if run.mode in LIBRARIES and full["status"] == "ok":  # our scripts' summaries say it
            full |= {"learning_starts": run.learning_starts or 0}
        try:
            records.check_run(full)
            if full["status"] == "ok":
                records.check_curve(curve)
        except ValueError as error:
            full = line | {"status": "failed", "reason": f"printed a summary that {error}", "log": ""}
        return full, curve

    def add(self, line: dict, curve: dict) -> None:
        """Write the lines of a run that has ended."""
        if line["status"] == "ok":
            records.append(self.curves, curve)  # first: a curve without its line goes on return
        records.append(self.results, line)

    def attempts(self, run: Run) -> list[Path]:
        """The folders of the attempts at a run, which have numbers for names, in their order."""
        folders = (self.folder / "jobs" / run.name).glob("*")
        return sorted((path for path in folders if path.name.isdecimal()), key=lambda path: int(path.name))

    def new_attempt(self, run: Run) -> Path:
        """A new folder for a run, with what the newest attempt that had a checkpoint has left."""
        earlier = self.attempts(run)
        folder = self.folder / "jobs" / run.name / str(int(earlier[-1].name) + 1 if earlier else 1)
        folder.mkdir(parents=True)
        saved = [path / "runs" for path in earlier if checkpoint_in(path / "runs")]
        if saved and run.checkpoint_every:
            saved[-1].rename(folder / "runs")
        return folder
