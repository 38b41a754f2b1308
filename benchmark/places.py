"""Where runs go on: on this machine, each on cores of its own, or as an array of jobs on a Slurm cluster."""

import fcntl
import itertools
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import cloudpickle
import job as job_module
import submitit
from common import say
from job import SAVE_SECONDS, Job, run_job
from selection import Args, refuse

# States of Slurm jobs that come to nothing more; GONE is ours, for those that Slurm has forgotten.
SLURM_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE"}
SLURM_ENDED |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}


@dataclass
class Attempt:
    """A run that has been started; `ended` is when it seemed to have ended, if it did."""

    folder: Path
    job: submitit.Job
    place: int = 0
    """which worker's cores and GPU it has, on this machine"""
    start: float = field(default_factory=time.monotonic)
    ended: float | None = None


def core_shares(workers: int, flags: str) -> list[tuple[int, ...]]:
    """The cores of each worker: as many for each, threads of one physical core together; none if not known.

    Where there are too few, refuses the flags that ask for so many workers.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [()] * workers

    def first_sibling(core: int) -> int:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return int(re.split("[,-]", path.read_text())[0]) if path.exists() else core

    cores = sorted(os.sched_getaffinity(0), key=lambda core: (first_sibling(core), core))
    if workers > len(cores):
        refuse(f"{flags} is {workers} runs at a time, and there are {len(cores)} cores")
    share = len(cores) // workers
    return [tuple(cores[index * share : (index + 1) * share]) for index in range(workers)]


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Put off Ctrl+C, which processes started meanwhile never hear: the sweep ends them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Place:
    """What both places have in common: submitit's executor, and jobs that it starts."""

    cluster: str
    pause = 0.25
    """seconds from one look at the jobs to the next"""
    patience = 0.0
    """seconds after the end of a job for which its outcome may not have been seen here"""

    def __init__(self, folder: Path, time_limit: float):
        self.folder = folder
        # it warns of each call of sacct where there is none
        logging.getLogger("submitit").setLevel(logging.ERROR)
        try:
            self.executor = submitit.AutoExecutor(folder / "submitit", cluster=self.cluster)
        except RuntimeError as error:
            refuse(f"--cluster {self.cluster}: {error}")
        # The nodes of a cluster need not have this folder on their path.
        cloudpickle.register_pickle_by_value(job_module)
        # the run's own limit comes first
        self.executor.update_parameters(timeout_min=int(time_limit / 60) + 5)

    def start(self, jobs: list[Job], places: list[int]) -> list[Attempt]:
        """Start jobs, on a cluster as one array."""
        with self.executor.batch():
            handles = [self.executor.submit(run_job, job) for job in jobs]
        return [
            Attempt(job.folder, handle, place)
            for job, handle, place in zip(jobs, handles, places, strict=True)
        ]

    def note(self, attempt: Attempt) -> None:
        """Write down, in the folder of an attempt that has been started, how a later sweep finds its job."""

    def look(self) -> None:
        """Hear what has become of jobs."""

    def state(self, attempt: Attempt) -> str:
        """What the cluster says of a job that it knows, such as "PENDING Resources"."""
        return ""

    def found(self, folder: Path) -> Attempt | None:
        """The attempt of an earlier sweep in this folder, if it is still under way."""
        return None


class ThisMachine(Place):
    """This machine: as many runs at a time as there are workers."""

    cluster = "local"

    def __init__(self, args: Args, workers: int, gpus: list[str], folder: Path, time_limit: float):
        if gpus and workers > len(gpus):
            refuse(f"--workers takes a number from 1 to {len(gpus)}, the GPUs at hand, got {workers}")
        if args.runs_per_gpu > 1 and not gpus:
            refuse(f"--runs-per-gpu takes 1 where there is no GPU, got {args.runs_per_gpu}")
        self.runs_per_gpu, self.workers, self.gpus = args.runs_per_gpu, workers * args.runs_per_gpu, gpus
        flags = f"--workers {workers}" + (
            f" --runs-per-gpu {args.runs_per_gpu}" if args.runs_per_gpu > 1 else ""
        )
        self.cores = core_shares(self.workers, flags)
        super().__init__(folder, time_limit)

    def free(self, running: list[Attempt], waiting: int) -> list[int]:
        """The places that are free, for as many runs as wait at most."""
        taken = {attempt.place for attempt in running}
        return [place for place in range(self.workers) if place not in taken][:waiting]

    def fit(self, job: Job, place: int) -> Job:
        """A job with what it gets at its place."""
        # One at a time has all cores, and PyTorch's choice of threads, to itself.
        job = replace(job, threads=len(self.cores[place]) or None) if self.workers > 1 else job
        # Those that share a GPU are apart, so that few runs have one each. One that PyTorch cannot use is
        # none of the run's.
        gpu = self.gpus[place % (self.workers // self.runs_per_gpu)] if self.gpus else ""
        job = replace(job, cores=self.cores[place], gpu=gpu, sharing=self.runs_per_gpu)
        return replace(job, owner=os.getpid(), lock=self.folder / "running.lock")

    def ended(self, attempt: Attempt) -> bool:
        """Whether a job has left this machine."""
        return attempt.job.done()

    def stop(self, attempt: Attempt) -> None:
        """Have a job end."""
        if not attempt.job.done():
            with suppress(ProcessLookupError):
                os.kill(int(attempt.job.job_id), signal.SIGTERM)  # submitit's controller, which passes it on


class Slurm(Place):
    """A cluster: all runs at once, of which it does as many at a time as there are workers."""

    cluster, pause, patience = "slurm", 2.0, 90.0

    def __init__(self, args: Args, workers: int, folder: Path, time_limit: float):
        super().__init__(folder, time_limit)
        self.workers, self.cores_per_job = workers, args.cores_per_job
        options = {"cpus_per_task": args.cores_per_job, "slurm_array_parallelism": workers}
        options |= {"slurm_partition": args.partition} if args.partition else {}
        options |= {"gpus_per_node": args.gpus_per_job} if args.gpus_per_job else {}
        more = {
            key: value == "true" if value in ("true", "false") else value
            for key, value in args.slurm_options.items()
        }
        self.executor.update_parameters(name="leanrl", slurm_additional_parameters=more, **options)
        self.states: dict[str, str] | None = None
        self.look()

    def free(self, running: list[Attempt], waiting: int) -> list[int]:
        """A place for each run that waits."""
        return [0] * waiting

    def fit(self, job: Job, place: int) -> Job:
        """A job with what it gets on its node."""
        return replace(job, threads=self.cores_per_job)

    def note(self, attempt: Attempt) -> None:
        (attempt.folder / "slurm_job").write_text(attempt.job.job_id)

    def look(self) -> None:
        self.states = slurm_jobs()

    def state(self, attempt: Attempt) -> str:
        return (self.states or {}).get(attempt.job.job_id, "")

    def found(self, folder: Path) -> Attempt | None:
        if not (folder / "slurm_job").exists():
            return None
        attempt = Attempt(
            folder, submitit.SlurmJob(self.folder / "submitit", (folder / "slurm_job").read_text())
        )
        return None if self.ended(attempt) else attempt

    def ended(self, attempt: Attempt) -> bool:
        """Whether a job has left the cluster; where Slurm does not answer, it may be at work."""
        return (
            self.states is not None
            and self.states.get(attempt.job.job_id, "GONE").partition(" ")[0] in SLURM_ENDED
        )

    def stop(self, attempt: Attempt) -> None:
        """Have a job end."""
        attempt.job.cancel(check=False)


def slurm_jobs() -> dict[str, str] | None:
    """State and reason of each of this user's jobs, as in "PENDING Resources"; None without an answer.

    submitit asks sacct, which many clusters do not have, and waits for ever for a job that died.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T %r"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    return {
        number: state for number, state in (line.strip().split(" ", 1) for line in done.stdout.splitlines())
    }


def submitit_log(job: submitit.Job) -> str:
    """The end of what the process around a run has printed."""
    path = job.paths.stderr
    return job_module.last_lines(path) if path.exists() else ""


def wait_for_strays(lock: Path, seconds: float = SAVE_SECONDS + 20) -> None:
    """Wait until the runs of a sweep that was killed have saved: none may run beside those of a new one."""
    start = time.monotonic()
    with lock.open("a+") as file:
        for trial in itertools.count():
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > start + seconds:
                    refuse(f"runs of another sweep are still going on in {lock.parent}")
                if trial == 5:
                    say("waiting for the runs of a sweep that was killed to end")
                time.sleep(0.2)
