"""Run the scripts of leanrl/ side by side and measure them: ./run.sh calls this.

    ./run.sh                                        the profile `quick`: every script, eager against compiled
    ./run.sh --profile speed                        all modes, three seeds
    ./run.sh --profile learning --folder sweeps/learning      learning curves as published, on all cores
    ./run.sh --profile full --workers 4             every mode at that protocol, four runs at a time
    ./run.sh --profile full --cluster slurm --partition gpu --gpus-per-job 1 --cores-per-job 8

A sweep is a folder. Started again it does what is missing and what failed; runs with checkpoints go on from
their newest one. Each run is a process of its own, and those that are compared are interleaved: every script
in every mode with the first seed, then all of it with the next. docs/benchmark.md says more. Exit status: 0
all runs are done, 1 some failed or were not started, 2 a bad argument, 130 after Ctrl+C.
"""

import errno
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

import report
import results
import submitit
import tyro
from common import say
from job import SAVE_SECONDS, Job, tail, usable_cores
from places import Attempt, Slurm, ThisMachine, deaf_to_ctrl_c, submitit_log, wait_for_strays
from record import Record, claimed, default_folder, read_outcome
from selection import PROFILES, Args, Run, check_args, refuse, select, visible_gpus

LEAST_FREE = 64 * 2**20  # bytes: less than what one compiled run writes


class Sweep:
    """The runs of a selection on their way into the files of results of a folder."""

    def __init__(self, args: Args, runs: list[Run], folder: Path, gpus: list[str]):
        profile = PROFILES[args.profile]
        self.runs, self.folder, self.peers, self.most_attempts = runs, folder, args.peers, args.attempts
        self.time_limit = 60 * (args.time_limit or profile.time_limit)
        workers = args.workers or (
            most_workers(gpus) if profile.every_core and args.cluster == "local" else 1
        )
        self.place = (
            Slurm(args, workers, folder, self.time_limit)
            if args.cluster == "slurm"
            else ThisMachine(args, workers, gpus, folder, self.time_limit)
        )
        self.record = Record(folder, args.profile)
        self.seconds: dict[tuple[str, str], list[float]] = {}  # that runs of a script and mode took
        self.done, self.failed, self.attempts = 0, 0, dict.fromkeys(runs, 0)  # attempts of this call
        self.running: dict[Run, Attempt] = {}
        self.shown = None
        names = set()
        for line in self.record.restore({run.name for run in runs}):
            self.note_seconds(line)
            names.add(line["job"])
        self.done = sum(run.name in names for run in runs)
        self.queue = deque(run for run in runs if run.name not in names and not self.take_up(run))
        self.done_before = self.done

    def take_up(self, run: Run) -> bool:
        """Go on with the last attempt of an earlier sweep, if it ended well or the cluster still has it."""
        attempts = self.record.attempts(run)
        if not attempts:
            return False
        if outcome := read_outcome(attempts[-1]):
            line, curve = self.record.lines_of(run, outcome, int(attempts[-1].name))
            if line["status"] == "ok":
                self.add(line, curve)
                return True
        attempt = self.place.found(attempts[-1])
        if attempt is None:
            return False
        self.attempts[run], self.running[run] = 1, attempt
        return True

    def note_seconds(self, line: dict) -> None:
        """Remember how long a run took, to foretell others; of one taken up only the last part is known."""
        if line.get("wall_seconds") and line.get("resumed") is None:
            self.seconds.setdefault((line["algorithm"], line["mode"]), []).append(line["wall_seconds"])

    def add(self, line: dict, curve: dict) -> None:
        """Put the lines of a run that has ended on record."""
        self.record.add(line, curve)
        if line["status"] == "ok":
            self.done += 1
            self.note_seconds(line)
        else:
            self.failed += 1
            say(f"failed: {line['job']}: {line['reason']}\n{line['log']}")

    def submit(self, runs: list[Run], places: list[int]) -> None:
        """Start runs."""
        if shutil.disk_usage(self.folder).free < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        jobs = [self.prepare(run, place) for run, place in zip(runs, places, strict=True)]
        with deaf_to_ctrl_c():
            for run, attempt in zip(runs, self.place.start(jobs, places), strict=True):
                self.attempts[run] += 1
                self.running[run] = attempt
            for run in runs:
                self.place.note(self.running[run])

    def prepare(self, run: Run, place: int) -> Job:
        """The job that does a run, with a folder of its own."""
        cache = self.folder / "cache" / f"{run.algorithm}-{run.mode}-{run.env_id.replace('/', '_')}"
        resumable = run.checkpoint_every is not None
        job = Job(
            self.record.new_attempt(run), run.command(self.peers), cache, self.time_limit, resumable=resumable
        )
        return self.place.fit(job, place)

    def collect(self) -> None:
        """Record the runs that have ended, or put them back into the queue for their second attempt."""
        self.place.look()
        for run, attempt in list(self.running.items()):
            attempt.ended = (attempt.ended or time.monotonic()) if self.place.ended(attempt) else None
            outcome = read_outcome(attempt.folder)
            # What a node has written may take a minute to be seen here.
            if not outcome and (
                attempt.ended is None or time.monotonic() < attempt.ended + self.place.patience
            ):
                continue
            del self.running[run]
            outcome = (
                outcome
                or read_outcome(attempt.folder)
                or {"status": "failed", "reason": "the process that ran it died"}
            )
            outcome = (
                {"log": submitit_log(attempt.job)} | outcome if outcome["status"] == "failed" else outcome
            )
            if outcome["status"] == "failed" and shutil.disk_usage(self.folder).free < LEAST_FREE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Status 2 is a bad argument, which would be no better the second time.
            if (
                outcome["status"] == "failed"
                and self.attempts[run] < self.most_attempts
                and outcome["reason"] != "exit status 2"
            ):
                say(f"once more: {run.name}: {outcome['reason']}")
                self.queue.appendleft(run)
            else:
                self.add(*self.record.lines_of(run, outcome, int(attempt.folder.name)))

    def run(self) -> None:
        """Do all that is missing."""
        while self.queue or self.running:
            if places := self.place.free(list(self.running.values()), len(self.queue)):
                self.submit([self.queue.popleft() for _ in places], places)
            self.show()
            time.sleep(self.place.pause)
            self.collect()
        self.show()

    def stop(self) -> None:
        """End all that is running, and see it end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for attempt in self.running.values():
            self.place.stop(attempt)
        if self.running:
            say(f"waiting for {len(self.running)} run{'s' * (len(self.running) > 1)} to end")
        end = time.monotonic() + SAVE_SECONDS + 10
        while not all(map(self.place.ended, self.running.values())) and time.monotonic() < end:
            time.sleep(0.2)
            self.place.look()

    def seconds_left(self) -> float | None:
        """An estimate from runs of the same script and mode, or all runs; None before the first has ended."""
        if not self.seconds:
            return None
        other = statistics.mean(statistics.mean(values) for values in self.seconds.values())

        def estimate(run: Run) -> float:
            return statistics.mean(self.seconds.get((run.algorithm, run.mode), [other]))

        now = time.monotonic()
        going = [max(0.0, estimate(run) - (now - attempt.start)) for run, attempt in self.running.items()]
        return (sum(map(estimate, self.queue)) + sum(going)) / max(
            1, min(self.place.workers, len(self.queue) + len(going))
        )

    def describe_running(self) -> str:
        """The runs that are going on, with how far they are, and what Slurm says of those that wait."""
        names, waiting = [], []
        for run, attempt in self.running.items():
            state = self.place.state(attempt)
            if state.startswith("PENDING"):
                waiting.append(state.removeprefix("PENDING "))
                continue
            log = attempt.folder / "log.txt"
            percent = re.findall(r"(\d+)%\|", tail(log, 400)) if log.exists() else []
            names.append(
                f"{run.algorithm} {run.mode} seed {run.seed}{f' {percent[-1]} %' if percent else ''}"
            )
        more = [f"{len(names) - 4} more"] if len(names) > 4 else []
        pending = [f"{len(waiting)} pending ({', '.join(sorted(set(waiting)))})"] if waiting else []
        return ", ".join(names[:4] + more + pending)

    def show(self) -> None:
        """The line of progress: rewritten in place on a terminal, elsewhere a new one a change."""
        states = tuple(sorted({self.place.state(attempt) for attempt in self.running.values()}))
        key = (self.done, self.failed, tuple(self.running), states)
        if not sys.stderr.isatty() and key == self.shown:
            return
        self.shown = key
        state = f"[{self.done}/{len(self.runs)}]" + (f" {self.failed} failed" if self.failed else "")
        left = self.seconds_left() if self.queue or self.running else None
        parts = [self.describe_running(), "" if left is None else f"{left / 60:.0f} min left"]
        say(f"{state} {', '.join(part for part in parts if part)}", passing=True)


def most_workers(gpus: list[str]) -> int:
    """As many runs at a time as there are GPUs or, where there are none, cores."""
    return len(gpus) or usable_cores()


def interrupt(*_) -> NoReturn:
    """The handler of Ctrl+C and SIGTERM, also where a shell has had the former ignored."""
    raise KeyboardInterrupt


def work(args: Args, runs: list[Run], folder: Path, gpus: list[str]) -> int:
    """Do the sweep of a folder, report it, and return the exit status."""
    sweep = None
    try:
        sweep = Sweep(args, runs, folder, gpus)
        sweep.run()
        if sys.stderr.isatty():
            print(file=sys.stderr)
        report.report_folder(folder)
        if sweep.done_before == len(runs):
            print("all of it was done before; --folder with another folder measures anew")
        return int(sweep.done < len(runs))
    except KeyboardInterrupt:
        status, message = 130, "stopped"
    except submitit.core.utils.FailedJobError as error:
        status, message = 2, f"sweep.py: error: Slurm refused the runs: {' '.join(str(error).split())[-300:]}"
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        status, message = (
            (1, f"no space is left in {folder}")
            if full
            else (2, f"sweep.py: error: --folder {folder}: {error}")
        )
    if sweep:
        sweep.stop()
    done = sweep.done if sweep else 0
    again = "" if status == 2 else f"; {done} of {len(runs)} runs are done; start again to go on"
    say(f"{message}{again}")
    return status


def main() -> int:
    args = tyro.cli(Args)
    check_args(args)
    gpus = visible_gpus(args)
    runs = select(args, gpus)
    folder = (args.folder or default_folder(args.profile)).absolute()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    with claimed(folder):
        try:
            if args.cluster == "local":
                wait_for_strays(folder / "running.lock")
            return work(args, runs, folder, gpus)
        except (results.ResultsError, OSError) as error:
            refuse(f"--folder {folder}: {error}")


if __name__ == "__main__":
    sys.exit(main())
