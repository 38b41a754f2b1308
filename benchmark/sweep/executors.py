"""Where runs go on: on this machine, each on cores of its own, or as jobs that submitit gives to Slurm."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import submitit

from benchmark import ROOT
from benchmark.sweep.process import Job, run_job
from benchmark.sweep.runs import Args
from benchmark.terminal import refuse

ENDED = "ENDED"  # the state of a run that has left the machine or cluster


@dataclass
class Attempt:
    """A run that has been started."""

    folder: Path
    process: subprocess.Popen | submitit.Job
    log: Path
    """what the process around the run has printed"""
    place: int = 0
    """which worker's cores and GPU it has, on this machine"""
    start: float = field(default_factory=time.monotonic)
    state: str = ""
    """ENDED, or what Slurm says, such as "PENDING Resources"; nothing where nobody says anything"""
    ended: float | None = None
    """when it was first seen to have ended"""


def write_job(folder: Path, job: Job) -> None:
    """Put a job into its folder, where the process that does it finds it."""
    (folder / "job.json").write_text(json.dumps(asdict(job)))


def core_shares(workers: int) -> list[list[int]]:
    """The cores of each worker, as many for each, threads of a core together."""

    def first_sibling(core: int) -> int:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return int(re.split("[,-]", path.read_text())[0]) if path.exists() else core

    cores = sorted(os.sched_getaffinity(0), key=lambda core: (first_sibling(core), core))
    if workers > len(cores):
        refuse(f"--workers and --runs-per-gpu: {workers} runs at a time, and there are {len(cores)} cores")
    share = len(cores) // workers
    return [cores[index * share : (index + 1) * share] for index in range(workers)]


class ThisMachine:
    """This machine: as many runs at a time as there are workers."""

    pause = 0.25
    """seconds from one look at the runs to the next"""
    patience = 0.0
    """seconds after the end of a run for which its outcome may not have been seen here"""

    def __init__(self, args: Args, workers: int, gpus: list[str], lock: int):
        if gpus and workers > len(gpus):
            refuse(f"--workers takes a number from 1 to {len(gpus)}, the GPUs at hand, got {workers}")
        if args.runs_per_gpu > 1 and not gpus:
            refuse(f"--runs-per-gpu takes 1 where there is no GPU, got {args.runs_per_gpu}")
        self.runs_per_gpu, self.workers, self.gpus = args.runs_per_gpu, workers * args.runs_per_gpu, gpus
        self.cores, self.lock = core_shares(self.workers), lock

    def free(self, running: list[Attempt], waiting: int) -> list[int]:
        """The places that are free, for as many runs as wait at most."""
        taken = {attempt.place for attempt in running}
        return [place for place in range(self.workers) if place not in taken][:waiting]

    def start(self, folders: list[Path], jobs: list[Job], places: list[int]) -> list[Attempt]:
        """Start jobs at their places. Each holds the sweep's lock, too, until it has ended."""
        attempts = []
        for folder, job, place in zip(folders, jobs, places, strict=True):
            # One at a time has all cores, and PyTorch's choice of threads, to itself.
            threads = None if self.workers == 1 else len(self.cores[place])
            # In turn, so that few runs have one each; none where PyTorch can use none.
            gpu = self.gpus[place % (self.workers // self.runs_per_gpu)] if self.gpus else ""
            has = {"cores": self.cores[place], "threads": threads, "gpu": gpu}
            write_job(folder, replace(job, **has, runs_per_gpu=self.runs_per_gpu))
            with (log := folder / "process.txt").open("wb") as err:
                # A group of its own, which Ctrl+C on a terminal does not reach: the sweep ends it.
                options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stderr": err, "process_group": 0}
                command = [sys.executable, "-m", "benchmark.sweep.process", str(folder)]
                process = subprocess.Popen(command, pass_fds=[self.lock], **options)
            attempts.append(Attempt(folder, process, log, place))
        return attempts

    def look(self, attempts: list[Attempt]) -> None:
        """Hear what has become of runs."""
        for attempt in attempts:
            attempt.state = "" if attempt.process.poll() is None else ENDED

    def found(self, folder: Path) -> Attempt | None:
        """No attempt of an earlier sweep is under way: the lock rules it out."""
        return None

    def stop(self, attempts: list[Attempt]) -> None:
        """Have runs end."""
        for attempt in attempts:
            attempt.process.terminate()


def slurm_states() -> dict[str, str] | None:
    """State and reason of each of this user's jobs that has not ended; None if Slurm does not answer.

    submitit asks sacct, which many clusters do not have, and waits for ever for a job that died.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T %r"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line.strip().split(" ", 1) for line in done.stdout.splitlines()]
    return dict(lines) if done.returncode == 0 else None


class Slurm:
    """A cluster: all runs at once, of which it does as many at a time as there are workers."""

    pause, patience = 2.0, 90.0

    def __init__(self, args: Args, workers: int, folder: Path, time_limit: float):
        self.workers, self.cores_per_job, self.jobs = workers, args.cores_per_job, folder / "submitit"
        self.name = f"leanrl-{time.time_ns()}"
        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns of each call of a missing sacct
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
        try:
            self.executor = submitit.AutoExecutor(self.jobs, cluster="slurm")
        except RuntimeError as error:
            refuse(f"--cluster slurm: {error}")
        flags = {"true": True, "false": False}
        more = {key: flags.get(value, value) for key, value in args.slurm_options.items()}
        options = {"cpus_per_task": args.cores_per_job, "slurm_array_parallelism": workers}
        options |= {"slurm_partition": args.partition} if args.partition else {}
        options |= {"gpus_per_node": args.gpus_per_job} if args.gpus_per_job else {}
        options |= {"timeout_min": int(time_limit / 60) + 5}  # the run's own limit comes first
        self.executor.update_parameters(name=self.name, slurm_additional_parameters=more, **options)

    def free(self, running: list[Attempt], waiting: int) -> list[int]:
        """A place for each run that waits; beside runs at work, for as many as they leave workers."""
        return [0] * (min(waiting, max(self.workers - len(running), 0)) if running else waiting)

    def start(self, folders: list[Path], jobs: list[Job], places: list[int]) -> list[Attempt]:
        """Start jobs, as one array. A later sweep finds them by what is noted in their folders."""
        for folder, job in zip(folders, jobs, strict=True):
            write_job(folder, replace(job, threads=self.cores_per_job))
        with self.executor.batch():
            handles = [self.executor.submit(run_job, folder) for folder in folders]
        for folder, handle in zip(folders, handles, strict=True):
            (folder / "slurm_job").write_text(handle.job_id)
        return [self.attempt(folder) for folder in folders]

    def attempt(self, folder: Path) -> Attempt:
        """The attempt that is noted in a folder."""
        handle = submitit.SlurmJob(self.jobs, (folder / "slurm_job").read_text())
        return Attempt(folder, handle, handle.paths.stderr)

    def look(self, attempts: list[Attempt]) -> None:
        """Hear what has become of runs; where Slurm does not answer, they are what they were."""
        states = slurm_states()
        for attempt in attempts if states is not None else ():
            attempt.state = states.get(attempt.process.job_id, ENDED)

    def found(self, folder: Path) -> Attempt | None:
        """The attempt of an earlier sweep in this folder, if it is still under way."""
        if not (folder / "slurm_job").exists():
            return None
        self.look([attempt := self.attempt(folder)])
        return None if attempt.state == ENDED else attempt

    def stop(self, attempts: list[Attempt]) -> None:
        """Have runs end, and what Slurm has taken although sbatch was ended before it said so."""
        for attempt in attempts:
            attempt.process.cancel(check=False)
        subprocess.run(["scancel", "--me", f"--name={self.name}"], capture_output=True)
