"""Run the scripts of leanrl/ side by side and measure them: ./run.sh calls this, docs/benchmark.md says how.

Each run is a process of its own, and those that are compared are interleaved: every script in every mode with
the first seed, then all of it with the next.
"""

import re
import signal
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import TextIO

import submitit
import tyro

from benchmark import records
from benchmark.machine import usable_cores
from benchmark.report.__main__ import report_folder
from benchmark.sweep.executors import ENDED, Attempt, Slurm, ThisMachine
from benchmark.sweep.folder import Record, claim, default_folder, read_outcome
from benchmark.sweep.process import SAVE_SECONDS, Job, last_lines, tail
from benchmark.sweep.runs import PROFILES, Args, Run, check_args, select, visible_gpus
from benchmark.terminal import PROGRAM, say

DIED = "the process that ran it died"
REFUSED_SECONDS = 60  # after which Slurm is asked again to take runs


def refusal(error: Exception) -> str:
    """Why Slurm did not take runs, in one line."""
    return " ".join(str(error).split())[-300:]


def catch_signals() -> None:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


class Sweep:
    """The runs of a selection on their way into the files of results of a folder."""

    def __init__(self, args: Args, runs: list[Run], folder: Path, gpus: list[str], lock: TextIO):
        self.args, self.runs, self.folder = args, runs, folder
        self.time_limit = 60 * (args.time_limit or PROFILES[args.profile].time_limit)
        all_at_once = args.profile in ("learning", "check") and args.cluster == "local"
        places = min(len(gpus) or usable_cores(), usable_cores())
        workers = args.workers or (places if all_at_once else 1)
        if args.cluster == "slurm":
            self.executor = Slurm(args, workers, folder, self.time_limit)
        else:
            self.executor = ThisMachine(args, workers, gpus, lock.fileno())
        self.record = Record(folder, args)
        self.seconds: dict[tuple[str, str], list[float]] = {}  # that runs of a script and mode took
        self.done, self.failed, self.attempts = 0, 0, dict.fromkeys(runs, 0)  # attempts of this call
        self.running: dict[Run, Attempt] = {}
        self.shown = None
        before = self.record.restore({run.name for run in runs})
        for line in before:
            self.note_seconds(line)
        names = {line["job"] for line in before}
        self.done = sum(run.name in names for run in runs)
        self.queue = deque(run for run in runs if run.name not in names and not self.take_up(run))
        self.done_before = self.done

    def take_up(self, run: Run) -> bool:
        """Go on with the last attempt of an earlier sweep, if it ended well or the cluster still has it."""
        attempts = self.record.attempts(run)
        if not attempts:
            return False
        if outcome := read_outcome(attempts[-1]):
            line, curve = self.record.lines_of(run, outcome, attempts[-1])
            if line["status"] == "ok":
                self.add(line, curve)
                return True
        attempt = self.executor.found(attempts[-1])
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
        """Start runs, each in a folder of its own, with the compiled code of earlier ones of its kind."""
        folders = [self.record.new_attempt(run) for run in runs]
        jobs = []
        for run in runs:
            cache = self.folder / "cache" / f"{run.algorithm}-{run.mode}-{run.env_id.replace('/', '_')}"
            resumable = run.checkpoint_every is not None
            jobs.append(Job(run.command(self.args), str(cache), self.time_limit, resumable))
        for run, attempt in zip(runs, self.executor.start(folders, jobs, places), strict=True):
            self.attempts[run] += 1
            self.running[run] = attempt

    def collect(self) -> None:
        """Record the runs that have ended, or put them back into the queue for another attempt."""
        self.executor.look(list(self.running.values()))
        for run, attempt in list(self.running.items()):
            if attempt.state.startswith("PENDING"):
                attempt.start = time.monotonic()  # its time has not begun
            attempt.ended = (attempt.ended or time.monotonic()) if attempt.state == ENDED else None
            outcome = read_outcome(attempt.folder)
            # What a node has written may take a minute to be seen here.
            lost = attempt.ended and time.monotonic() >= attempt.ended + self.executor.patience
            if not outcome and not lost:
                continue
            del self.running[run]
            outcome = outcome or {"status": "failed", "reason": DIED, "log": last_lines(attempt.log)}
            # Status 2 is a bad argument, which would be no better the second time.
            hopeless = self.attempts[run] >= self.args.attempts or outcome.get("reason") == "exit status 2"
            if outcome["status"] == "failed" and not hopeless:
                say(f"once more: {run.name}: {outcome['reason']}")
                self.queue.appendleft(run)
            else:
                self.add(*self.record.lines_of(run, outcome, attempt.folder))

    def run(self) -> None:
        """Do all that is missing. Where Slurm refuses runs after it has taken some, it is asked again.

        Raises KeyboardInterrupt after SIGINT or SIGTERM, and not before all that was started is noted.
        """
        ask, asked_to_stop = time.monotonic(), []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: asked_to_stop.append(True))
        while self.queue or self.running:
            running, waiting = list(self.running.values()), len(self.queue) * (time.monotonic() >= ask)
            if places := self.executor.free(running, waiting):
                runs = [self.queue.popleft() for _ in places]
                try:
                    self.submit(runs, places)
                except submitit.core.utils.FailedJobError as error:
                    if not asked_to_stop and not any(self.attempts.values()):
                        raise
                    self.queue.extendleft(reversed(runs))
                    ask = time.monotonic() + REFUSED_SECONDS
                    say(f"Slurm does not take {', '.join(run.name for run in runs)} now: {refusal(error)}")
            self.show()
            until = time.monotonic() + self.executor.pause
            while not asked_to_stop and time.monotonic() < until:
                time.sleep(min(self.executor.pause, 0.1))
            if asked_to_stop:
                raise KeyboardInterrupt
            self.collect()
        catch_signals()
        self.show()

    def stop(self) -> None:
        """End all that is running, and see it end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        running = list(self.running.values())
        self.executor.stop(running)
        if running:
            say(f"waiting for {len(running)} run{'s' * (len(running) > 1)} to end")
        end = time.monotonic() + SAVE_SECONDS + 10
        while any(attempt.state != ENDED for attempt in running) and time.monotonic() < end:
            time.sleep(0.2)
            self.executor.look(running)

    def minutes_left(self) -> str:
        """An estimate from runs of the same script and mode, or all runs; none before the first has ended."""
        if not self.seconds or not (self.queue or self.running):
            return ""
        means = {key: statistics.mean(values) for key, values in self.seconds.items()}
        other, now = statistics.mean(means.values()), time.monotonic()
        left = [means.get((run.algorithm, run.mode), other) for run in self.queue]
        for run, attempt in self.running.items():
            left.append(max(0.0, means.get((run.algorithm, run.mode), other) - (now - attempt.start)))
        return f"{sum(left) / min(self.executor.workers, len(left)) / 60:.0f} min left"

    def describe(self, run: Run, attempt: Attempt) -> str:
        """A run that is going on, with how far it is, or what Slurm says of one that waits."""
        name = f"{run.algorithm} {run.mode} seed {run.seed}"
        if attempt.state.startswith("PENDING"):
            return f"{name} {attempt.state.lower()}"
        log = attempt.folder / "log.txt"
        percent = re.findall(r"(\d+)%\|", tail(log, 400)) if log.exists() else []
        return f"{name} {percent[-1]} %" if percent else name

    def show(self) -> None:
        """The line of progress: rewritten in place on a terminal, elsewhere a new one a change."""
        states = tuple(sorted({attempt.state for attempt in self.running.values()}))
        key = (self.done, self.failed, tuple(self.running), states)
        if not sys.stderr.isatty() and key == self.shown:
            return
        self.shown = key
        runs = [self.describe(run, attempt) for run, attempt in list(self.running.items())[:4]]
        more = [f"{len(self.running) - 4} more"] if len(self.running) > 4 else []
        failed = f" {self.failed} failed" if self.failed else ""
        parts = ", ".join(filter(None, [*runs, *more, self.minutes_left()]))
        say(f"[{self.done}/{len(self.runs)}]{failed} {parts}", passing=True)


def work(args: Args, runs: list[Run], folder: Path, gpus: list[str]) -> int:
    """Do the sweep of a folder, report it, and return the exit status."""
    sweep = None
    try:
        lock = claim(folder)
        sweep = Sweep(args, runs, folder, gpus, lock)
        sweep.run()
        if sys.stderr.isatty():
            print(file=sys.stderr)
        missed = report_folder(folder)
        if sweep.done_before == len(runs):
            print("all of it was done before; --folder with another folder measures anew")
        return int(missed or sweep.done < len(runs))
    except KeyboardInterrupt:
        status, message = 130, "stopped"
    except submitit.core.utils.FailedJobError as error:
        status, message = 2, f"{PROGRAM}: error: Slurm refused the runs: {refusal(error)}"
    except (records.ResultsError, OSError) as error:
        status, message = 2, f"{PROGRAM}: error: --folder {folder}: {error}"
    if sweep:
        sweep.stop()
        message += f"; {sweep.done} of {len(runs)} runs are done; start again to go on"
    say(message)
    return status


def main() -> int:
    args = tyro.cli(Args, prog="./run.sh sweep")
    check_args(args)
    gpus = visible_gpus(args)
    runs = select(args, gpus)
    catch_signals()
    return work(args, runs, (args.folder or default_folder(args)).absolute(), gpus)


if __name__ == "__main__":
    sys.exit(main())
