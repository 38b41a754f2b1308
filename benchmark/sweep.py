"""Run the scripts of leanrl/ side by side and measure them: ./run.sh calls this.

    ./run.sh                                        the profile `quick`: every script, eager against compiled
    ./run.sh --profile speed                        all modes, three seeds: what the tables of the README are made from
    ./run.sh --profile full --workers 4             the published protocol, four runs at a time
    ./run.sh --profile full --cluster slurm --partition gpu --gpus-per-job 1 --cores-per-job 8

A sweep is a folder. Started again it does what is missing and what failed. Each run is a process of its own, and those that
are compared are interleaved: every script in every mode with the first seed, then all of it with the next. docs/benchmark.md
says more. Exit status: 0 all runs are done, 1 some failed or were not started, 2 a bad argument, 130 after Ctrl+C.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import cloudpickle
import job as job_module
import report
import results
import submitit
import tyro
from job import Job, git, run_job, tail

ROOT = Path(__file__).resolve().parent.parent
# The suffix of the script and its flags; of a library, None.
MODES = {
    "eager": ("", ()),
    "twin": ("_torchcompile", ()),
    "compile": ("_torchcompile", ("--compile",)),
    "cudagraphs": ("_torchcompile", ("--cudagraphs",)),
    "both": ("_torchcompile", ("--compile", "--cudagraphs")),
    "sb3": None,
    "sbx": None,
}
PEERS = ("sb3", "sbx")
CUDA_MODES = ("cudagraphs", "both")
LEAST_FREE = 64 * 2**20  # bytes: less than what one compiled run writes
ATTEMPTS = 2
SLURM_PATIENCE = 90  # seconds
# States of Slurm jobs that come to nothing more; GONE is ours, for those that Slurm has forgotten.
SLURM_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE"}
SLURM_ENDED |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}


@dataclass(frozen=True)
class Task:
    """What a script does in each profile: agent steps, and those with random actions before it learns."""

    quick: int
    speed: int
    full: int
    learning_starts: int | None = None
    """in the profile full; at most 1000 in the others, for SPS counts from the first step that learns"""
    atari: bool = False


TASKS = {
    "sac_continuous_action": Task(quick=3000, speed=6000, full=1_000_000, learning_starts=5_000),
    "td3_continuous_action": Task(quick=3000, speed=6000, full=1_000_000, learning_starts=25_000),
    "ppo_continuous_action": Task(quick=20 * 2048, speed=30 * 2048, full=1_000_000),
    "ppo_atari_envpool": Task(quick=8 * 1024, speed=12 * 1024, full=10_000_000, atari=True),
}


@dataclass(frozen=True)
class Profile:
    """What is run unless the command line says otherwise; the time limit is in minutes."""

    modes: tuple[str, ...]
    seeds: tuple[int, ...]
    time_limit: float


PROFILES = {
    "quick": Profile(modes=("eager", "compile", "both"), seeds=(1,), time_limit=10),
    "speed": Profile(modes=("eager", "twin", "compile", "cudagraphs", "both"), seeds=(1, 2, 3), time_limit=20),
    "full": Profile(modes=("eager", "twin", "compile", "cudagraphs", "both"), seeds=(21, 31, 41), time_limit=48 * 60),
}


@dataclass
class Args:
    profile: str = "quick"
    """quick, speed or full: how many steps, and the defaults of modes, seeds and time limit"""
    scripts: tuple[str, ...] = tuple(TASKS)
    """eager scripts; a mode other than eager runs the twin"""
    modes: tuple[str, ...] | None = None
    """eager, twin (no flag), compile, cudagraphs, both; with --peers also sb3 and sbx"""
    seeds: tuple[int, ...] | None = None
    """seeds, each a round of all that is compared"""
    env_ids: tuple[str, ...] = ("HalfCheetah-v4",)
    """environments of the continuous scripts"""
    atari_env_ids: tuple[str, ...] = ("Breakout-v5",)
    """environments of the Atari script"""
    total_timesteps: int | None = None
    """agent steps of a run, each script's own number by default"""
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt (./run.sh peers gives it)"""
    folder: Path | None = None
    """the sweep's folder, by default sweeps/<profile>-<commit>"""
    workers: int = 1
    """runs at a time, each with its share of the cores and a GPU; 1 by default"""
    runs_per_gpu: int = 1
    """so many runs at a time on each of these GPUs: small networks leave one idle"""
    time_limit: float | None = None
    """minutes after which a run counts as hanging"""
    cluster: str = "local"
    """local, or slurm: one array of jobs"""
    partition: str | None = None
    """the Slurm partition"""
    gpus_per_job: int = 0
    """GPUs that a Slurm job asks for"""
    cores_per_job: int = 2
    """cores that a Slurm job asks for"""
    slurm_options: dict[str, str] = field(default_factory=dict)
    """further options of sbatch, such as: account NAME exclusive true"""


def refuse(message: str) -> NoReturn:
    """Tell a bad argument in one line on standard error and leave with exit status 2."""
    print(f"sweep.py: error: {message}", file=sys.stderr)
    raise SystemExit(2)


@dataclass(frozen=True)
class Run:
    """One run of the selection. `name` tells it from all others of a sweep."""

    algorithm: str
    mode: str
    env_id: str
    seed: int
    steps: int
    learning_starts: int | None

    @property
    def name(self) -> str:
        parts = (self.algorithm, self.mode, self.env_id.replace("/", "_"), self.steps, f"seed{self.seed}")
        return "-".join(map(str, parts))

    def command(self, args: Args) -> tuple[str, ...]:
        """The command that does it."""
        values = {"env-id": self.env_id, "seed": self.seed, "total-timesteps": self.steps}
        values |= {} if self.learning_starts is None else {"learning-starts": self.learning_starts}
        options = [f"--{name}={value}" for name, value in values.items()]
        if self.mode in PEERS:
            return (str(args.peers.absolute()), str(ROOT / "benchmark" / "peers.py"), self.mode, self.algorithm, *options)
        suffix, flags = MODES[self.mode]
        return (sys.executable, str(ROOT / "leanrl" / f"{self.algorithm}{suffix}.py"), *flags, *options)


def check_args(args: Args) -> None:
    """Refuse argument values that cannot work."""
    for name, known in (("profile", PROFILES), ("scripts", TASKS), ("modes", MODES), ("cluster", ("local", "slurm"))):
        given = getattr(args, name) or ()
        for value in (given,) if isinstance(given, str) else given:
            if value not in known:
                refuse(f"--{name} takes {', '.join(known)}; got {value}")
    least = {"workers": 1, "runs_per_gpu": 1, "total_timesteps": 1, "time_limit": 0.01, "gpus_per_job": 0, "cores_per_job": 1}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not (low <= value < float("inf")):
            refuse(f"--{name.replace('_', '-')} takes a number from {low}, got {value}")
    if args.runs_per_gpu > 1 and args.cluster == "slurm":
        refuse("--runs-per-gpu takes 1 on Slurm, which gives each run GPUs of its own")
    if args.peers and not os.access(args.peers, os.X_OK):
        refuse(f"--peers takes a Python interpreter, got {args.peers}")
    if not args.peers and set(args.modes or ()) & set(PEERS):
        refuse("--modes sb3 and sbx need --peers: use ./run.sh peers")


def visible_gpus(args: Args) -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them; on a cluster Slurm names those of a job."""
    if args.cluster == "slurm":
        return list(map(str, range(args.gpus_per_job)))
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which NVML numbers them
    import torch  # takes two seconds, which a bad argument need not

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else list(map(str, range(count)))


def runnable(mode: str, args: Args, gpus: list[str]) -> bool:
    """Whether this machine can run a mode; tells why not."""
    reason = None
    if mode in CUDA_MODES and not gpus:
        reason = (
            "needs CUDA: --gpus-per-job asks for GPUs" if args.cluster == "slurm" else "needs CUDA, and there is no device"
        )
    elif mode == "compile" and not gpus and args.cluster == "local":
        compilers = (os.environ.get("CXX") or "g++", "clang++")
        reason = None if any(map(shutil.which, compilers)) else "needs a C++ compiler such as g++"
    if reason:
        print(f"skipped: {mode} {reason}", file=sys.stderr)
    return reason is None


def select(args: Args, gpus: list[str]) -> list[Run]:
    """The runs asked for, in the order in which they are to start."""
    profile = PROFILES[args.profile]
    modes = (*(profile.modes if args.modes is None else args.modes), *(PEERS if args.peers and args.modes is None else ()))
    modes = [mode for mode in modes if runnable(mode, args, gpus)]
    runs = []
    for seed in profile.seeds if args.seeds is None else args.seeds:
        for script in args.scripts:
            task = TASKS[script]
            steps = args.total_timesteps or getattr(task, args.profile)
            learning_starts = task.learning_starts
            if learning_starts is not None and args.profile != "full":
                learning_starts = min(1000, steps // 3)
            fit = [mode for mode in modes if not (task.atari and mode == "sbx")]  # SBX has no policy for images
            for env_id in args.atari_env_ids if task.atari else args.env_ids:
                runs += [Run(script, mode, env_id, seed, steps, learning_starts) for mode in fit]
    if not runs:
        refuse("nothing is selected: --scripts, --modes, --seeds and environments leave no run that this machine can do")
    return list(dict.fromkeys(runs))


def core_shares(workers: int, flags: str) -> list[tuple[int, ...]]:
    """The cores of each worker: as many for each, and the threads of one physical core together; where not known, none.

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


def default_folder(profile: str) -> Path:
    """sweeps/<profile>-<commit>; a new one each time where there are changes that are not committed."""
    commit = git(ROOT, "rev-parse", "--short=7", "HEAD")
    changed = f"{datetime.now():%m%d-%H%M%S}" if git(ROOT, "status", "--porcelain", "--untracked-files=no") else ""
    return ROOT / "sweeps" / "-".join(part for part in (profile, commit, changed) if part)


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


def wait_for_strays(lock: Path, seconds: float = 30) -> None:
    """Wait for the runs of a sweep that was killed: they notice within a second, and nothing may run beside a new one."""
    end = time.monotonic() + seconds
    with lock.open("a+") as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    refuse(f"runs of another sweep are still going on in {lock.parent}")
                time.sleep(0.2)


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Put off Ctrl+C. Processes started meanwhile never hear it from the terminal: ending them is the sweep's business."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def describe(folder: Path, profile: str) -> str:
    """The identity of a folder's sweep, written down where it is new. Refuses a folder with a sweep of another profile."""
    path, commit = folder / "sweep.json", git(ROOT, "rev-parse", "HEAD") or None
    if not path.exists():
        identity = f"{datetime.now(UTC):%Y-%m-%d}-{uuid4().hex[:8]}"
        results.replace(path, [{"format": results.FORMAT, "id": identity, "profile": profile, "git_commit": commit}])
        return identity
    try:
        sweep = results.parse(path.read_bytes())
        results.check_format(sweep)
        results.check_keys(sweep, results.Description)
    except results.FormatError as error:
        refuse(f"--folder {folder}: {error}")
    except (OSError, ValueError):
        refuse(f"--folder {folder}: sweep.json is not readable")
    if sweep["profile"] != profile:
        refuse(f"--folder {folder}: has a sweep of profile {sweep['profile']}, not {profile}")
    if sweep["git_commit"] != commit:
        print(f"{folder} was begun at commit {sweep['git_commit']}, this is {commit}", file=sys.stderr)
    return sweep["id"]


@dataclass
class Attempt:
    """A run that has been started: its folder, submitit's job, when it was started and, where it seems so, when it ended."""

    folder: Path
    job: submitit.Job
    place: int = 0
    """which worker's cores and GPU it has, on this machine"""
    start: float = field(default_factory=time.monotonic)
    ended: float | None = None


class Sweep:
    """The runs of a selection on their way into the files of results of a folder."""

    def __init__(self, args: Args, runs: list[Run], folder: Path, gpus: list[str]):
        self.args, self.runs, self.folder, self.gpus = args, runs, folder, gpus
        self.results_file, self.curves_file = folder / "results.jsonl", folder / "curves.jsonl"
        self.slurm = args.cluster == "slurm"
        self.time_limit = 60 * (args.time_limit or PROFILES[args.profile].time_limit)
        self.workers = args.workers * args.runs_per_gpu
        if not self.slurm and self.gpus and args.workers > len(self.gpus):
            refuse(f"--workers takes a number from 1 to {len(self.gpus)}, the GPUs at hand, got {args.workers}")
        if args.runs_per_gpu > 1 and not self.gpus:
            refuse(f"--runs-per-gpu takes 1 where there is no GPU, got {args.runs_per_gpu}")
        flags = f"--workers {args.workers}" + (f" --runs-per-gpu {args.runs_per_gpu}" if args.runs_per_gpu > 1 else "")
        self.cores = [] if self.slurm else core_shares(self.workers, flags)
        self.executor = self.make_executor()
        self.identity = describe(folder, args.profile)
        self.seconds: dict[tuple[str, str], list[float]] = {}  # that runs of a script and mode took
        self.done, self.failed, self.attempts = 0, 0, dict.fromkeys(runs, 0)
        self.running: dict[Run, Attempt] = {}
        self.shown, self.states = None, {}
        self.queue = deque(self.restore())
        self.done_before = self.done

    def make_executor(self) -> submitit.Executor:
        """submitit's executor of the cluster asked for."""
        args = self.args
        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns of each call of sacct where there is none
        try:
            executor = submitit.AutoExecutor(self.folder / "submitit", cluster=args.cluster)
        except RuntimeError as error:
            refuse(f"--cluster {args.cluster}: {error}")
        # The nodes of a cluster need not have this folder on their path.
        cloudpickle.register_pickle_by_value(job_module)
        executor.update_parameters(timeout_min=int(self.time_limit / 60) + 5)  # the run's own limit comes first
        if self.slurm:
            options = {"cpus_per_task": args.cores_per_job, "slurm_array_parallelism": args.workers}
            options |= {"slurm_partition": args.partition} if args.partition else {}
            options |= {"gpus_per_node": args.gpus_per_job} if args.gpus_per_job else {}
            more = {key: value == "true" if value in ("true", "false") else value for key, value in args.slurm_options.items()}
            executor.update_parameters(name="leanrl", slurm_additional_parameters=more, **options)
        return executor

    def restore(self) -> list[Run]:
        """Put the files of results in order; the runs that are still to do.

        A line that was cut off goes, and so do those of selected runs that failed. What a run that ended without the sweep
        left in its outcome.json becomes a line; one that the cluster still has is waited for.
        """
        selected = {run.name for run in self.runs}
        lines, curves = results.recover(self.results_file), results.recover(self.curves_file, results.check_curve)
        drawn = {curve["job"]: curve for curve in curves}
        kept = [line for line in lines if line["status"] == "ok" and line["job"] in drawn]
        failed = [line for line in lines if line["status"] == "failed" and line["job"] not in selected]
        names = {line["job"] for line in kept}
        results.replace(self.results_file, kept + failed)
        results.replace(self.curves_file, [drawn[line["job"]] for line in kept])
        for line in kept:
            self.note_seconds(line)
        self.done = len(names & selected)
        self.states = (slurm_jobs() if self.slurm else None) or {}
        return [run for run in self.runs if run.name not in names and not self.take_up(run)]

    def take_up(self, run: Run) -> bool:
        """Go on with the last attempt of an earlier sweep, if it has ended well or the cluster still has it."""
        attempts = sorted(self.attempt_folders(run), key=lambda path: int(path.name))
        if not attempts:
            return False
        self.attempts[run] = int(attempts[-1].name)
        if outcome := read_outcome(attempts[-1]):
            line, curve = self.lines_of(run, outcome)
            if line["status"] == "ok":
                self.record(line, curve)
                return True
        self.attempts[run] = 0
        number = attempts[-1] / "slurm_job"
        if not (self.slurm and number.exists()):
            return False
        attempt = Attempt(attempts[-1], submitit.SlurmJob(self.folder / "submitit", number.read_text()))
        if self.has_ended(attempt):
            return False
        self.attempts[run], self.running[run] = 1, attempt
        return True

    def attempt_folders(self, run: Run) -> list[Path]:
        """The folders of the attempts at a run, which have numbers for names."""
        return [path for path in (self.folder / "jobs" / run.name).glob("*") if path.name.isdecimal()]

    def note_seconds(self, line: dict) -> None:
        """Remember how long a run took, to foretell others."""
        if line.get("wall_seconds"):
            self.seconds.setdefault((line["algorithm"], line["mode"]), []).append(line["wall_seconds"])

    def lines_of(self, run: Run, outcome: dict) -> tuple[dict, dict]:
        """The lines of results and curves of a run that has ended; of one whose summary makes no sense, that it failed."""
        about = {"format": results.FORMAT, "sweep": self.identity, "job": run.name}
        line = about | {"attempts": max(self.attempts[run], 1), "algorithm": run.algorithm, "mode": run.mode}
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

    def record(self, line: dict, curve: dict) -> None:
        """Write the lines of a run that has ended."""
        if line["status"] == "ok":
            results.append(self.curves_file, curve)  # first: a curve without its line goes on return
        results.append(self.results_file, line)
        if line["status"] == "ok":
            self.done += 1
            self.note_seconds(line)
        else:
            self.failed += 1
            self.say(f"failed: {line['job']}: {line['reason']}\n{line['log']}")

    def submit(self, runs: list[Run]) -> None:
        """Start runs: on a cluster as one array of jobs, of which it runs as many at a time as there are workers."""
        if shutil.disk_usage(self.folder).free < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = {attempt.place for attempt in self.running.values()}
        places = [0] * len(runs) if self.slurm else [place for place in range(self.workers) if place not in taken]
        jobs = [self.prepare(run, place) for run, place in zip(runs, places[: len(runs)], strict=True)]
        with deaf_to_ctrl_c():
            with self.executor.batch():
                handles = [self.executor.submit(run_job, job) for job in jobs]
            for run, place, job, handle in zip(runs, places, jobs, handles, strict=False):
                self.attempts[run] += 1
                self.running[run] = Attempt(job.folder, handle, place)
                if self.slurm:
                    (job.folder / "slurm_job").write_text(handle.job_id)

    def prepare(self, run: Run, place: int) -> Job:
        """The job that does a run, with a folder of its own."""
        number = 1 + max((int(path.name) for path in self.attempt_folders(run)), default=0)
        folder = self.folder / "jobs" / run.name / str(number)
        folder.mkdir(parents=True)
        cache = self.folder / "cache" / f"{run.algorithm}-{run.mode}-{run.env_id.replace('/', '_')}"
        job = Job(folder=folder, command=run.command(self.args), cache=cache, time_limit=self.time_limit)
        if self.slurm:
            return replace(job, threads=self.args.cores_per_job)
        # One at a time has all cores, and PyTorch's choice of threads, to itself.
        job = replace(job, threads=len(self.cores[place]) or None) if self.workers > 1 else job
        # Those that share a GPU are apart, so that few runs have one each. One that PyTorch cannot use is none of the run's.
        gpu = self.gpus[place % self.args.workers] if self.gpus else ""
        job = replace(job, cores=self.cores[place], gpu=gpu, sharing=self.args.runs_per_gpu)
        return replace(job, owner=os.getpid(), lock=self.folder / "running.lock")

    def has_ended(self, attempt: Attempt) -> bool:
        """Whether a job has left this machine, or the cluster, as far as that has been heard of."""
        if not self.slurm:
            return attempt.job.done()
        return self.states.get(attempt.job.job_id, "GONE").partition(" ")[0] in SLURM_ENDED

    def collect(self) -> None:
        """Record the runs that have ended, or put them back into the queue for their second attempt."""
        if self.slurm and (states := slurm_jobs()) is not None:
            self.states = states
        for run, attempt in list(self.running.items()):
            if attempt.ended is None and self.has_ended(attempt):
                attempt.ended = time.monotonic()
            outcome = read_outcome(attempt.folder)
            # What a node has written may take a minute to be seen here.
            patience = SLURM_PATIENCE if self.slurm else 0
            if not outcome and (attempt.ended is None or time.monotonic() < attempt.ended + patience):
                continue
            del self.running[run]
            outcome = outcome or read_outcome(attempt.folder) or {"status": "failed", "reason": "the process that ran it died"}
            outcome = {"log": submitit_log(attempt.job)} | outcome if outcome["status"] == "failed" else outcome
            if outcome["status"] == "failed" and shutil.disk_usage(self.folder).free < LEAST_FREE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Status 2 is a bad argument, which would be no better the second time.
            if outcome["status"] == "failed" and self.attempts[run] < ATTEMPTS and outcome["reason"] != "exit status 2":
                self.say(f"once more: {run.name}: {outcome['reason']}")
                self.queue.appendleft(run)
            else:
                self.record(*self.lines_of(run, outcome))

    def run(self) -> None:
        """Do all that is missing."""
        while self.queue or self.running:
            free = len(self.queue) if self.slurm else self.workers - len(self.running)
            if self.queue and free > 0:
                self.submit([self.queue.popleft() for _ in range(min(free, len(self.queue)))])
            self.show()
            time.sleep(2 if self.slurm else 0.25)
            self.collect()
        self.show()

    def stop(self) -> None:
        """End all that is running, and see it end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for attempt in self.running.values():
            if self.slurm:
                attempt.job.cancel(check=False)
            elif not attempt.job.done():
                with suppress(ProcessLookupError):
                    os.kill(int(attempt.job.job_id), signal.SIGTERM)  # submitit's controller, which passes it on
        end = time.monotonic() + 20
        while not all(map(self.has_ended, self.running.values())) and time.monotonic() < end:
            time.sleep(0.2)
            self.states = (slurm_jobs() if self.slurm else None) or self.states

    def seconds_left(self) -> float | None:
        """An estimate from runs of the same script and mode, or of all runs; None before the first has ended."""
        if not self.seconds:
            return None
        other = statistics.mean(statistics.mean(values) for values in self.seconds.values())

        def estimate(run: Run) -> float:
            return statistics.mean(self.seconds.get((run.algorithm, run.mode), [other]))

        now = time.monotonic()
        going = [max(0.0, estimate(run) - (now - attempt.start)) for run, attempt in self.running.items()]
        return (sum(map(estimate, self.queue)) + sum(going)) / max(1, min(self.workers, len(self.queue) + len(going)))

    def describe_running(self) -> str:
        """The runs that are going on, with how far they are, and what Slurm says of those that wait."""
        names, waiting = [], []
        for run, attempt in self.running.items():
            state = self.states.get(attempt.job.job_id, "") if self.slurm else ""
            if state.startswith("PENDING"):
                waiting.append(state.removeprefix("PENDING "))
                continue
            log = attempt.folder / "log.txt"
            percent = re.findall(r"(\d+)%\|", tail(log, 400)) if log.exists() else []
            names.append(f"{run.algorithm} {run.mode} seed {run.seed}{f' {percent[-1]} %' if percent else ''}")
        more = [f"{len(names) - 4} more"] if len(names) > 4 else []
        pending = [f"{len(waiting)} pending ({', '.join(sorted(set(waiting)))})"] if waiting else []
        return ", ".join(names[:4] + more + pending)

    def show(self) -> None:
        """The line of progress: rewritten in place on a terminal, elsewhere a new one whenever a run starts or ends."""
        key = (self.done, self.failed, tuple(self.running), tuple(sorted(set(self.states.values()))))
        terminal = sys.stderr.isatty()
        if not terminal and key == self.shown:
            return
        self.shown = key
        state = f"[{self.done}/{len(self.runs)}]" + (f" {self.failed} failed" if self.failed else "")
        left = self.seconds_left() if self.queue or self.running else None
        parts = [self.describe_running(), "" if left is None else f"{left / 60:.0f} min left"]
        line = f"{state} {', '.join(part for part in parts if part)}"
        if terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def say(self, message: str) -> None:
        """A line of its own beside the line of progress."""
        print(f"\r\033[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


def read_outcome(folder: Path) -> dict | None:
    """What a run has left in its folder at its end; None before that, and where that is not what a run leaves."""
    try:
        outcome = results.parse((folder / "outcome.json").read_bytes())
        results.check_keys(outcome, results.Died if outcome["status"] == "failed" else results.Ended)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return outcome


def slurm_jobs() -> dict[str, str] | None:
    """State and reason of each Slurm job of this user, such as "PENDING Resources"; None where Slurm does not answer.

    submitit asks sacct, which many clusters do not have, and waits for ever for a job that died.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T %r"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    return {number: state for number, state in (line.strip().split(" ", 1) for line in done.stdout.splitlines())}


def submitit_log(job: submitit.Job) -> str:
    """The end of what the process around a run has printed."""
    path = job.paths.stderr
    return job_module.last_lines(path) if path.exists() else ""


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
        status, message = (1, f"no space is left in {folder}") if full else (2, f"sweep.py: error: --folder {folder}: {error}")
    if sweep:
        sweep.stop()
    done = sweep.done if sweep else 0
    if sys.stderr.isatty():
        print(file=sys.stderr)
    again = "" if status == 2 else f"; {done} of {len(runs)} runs are done; start again to go on"
    print(f"{message}{again}", file=sys.stderr)
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
