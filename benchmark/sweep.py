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
import json
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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import cloudpickle
import job as job_module
import psutil
import report
import results
import submitit
import tyro
from job import Job, run_job

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
# States of Slurm jobs that come to nothing more; GONE is ours, for those that Slurm has forgotten.
SLURM_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE"}
SLURM_ENDED |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}


@dataclass(frozen=True)
class Task:
    """What a script does in each profile: agent steps, and options for the two short ones."""

    quick: int
    speed: int
    full: int
    options: tuple[str, ...] = ()
    atari: bool = False


# SPS counts from the first step that learns, so that random actions at the start only cost time.
TASKS = {
    "sac_continuous_action": Task(quick=3000, speed=6000, full=1_000_000, options=("--learning-starts=1000",)),
    "td3_continuous_action": Task(quick=3000, speed=6000, full=1_000_000, options=("--learning-starts=1000",)),
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
    workers: int | None = None
    """runs at a time, each with its share of the cores and a GPU: 1 by default, on a cluster as many as it lets"""
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
    """further options of sbatch, such as: account NAME qos NAME exclusive true"""


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
    total_timesteps: int
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        parts = (self.algorithm, self.mode, self.env_id.replace("/", "_"), self.total_timesteps, f"seed{self.seed}")
        return "-".join(map(str, parts))

    def command(self, args: Args) -> tuple[str, ...]:
        """The command that does it."""
        if self.mode in PEERS:
            peer = (str(args.peers.absolute()), str(ROOT / "benchmark" / "peers.py"), self.mode, self.algorithm, self.env_id)
            return (*peer, str(self.seed), str(self.total_timesteps))
        suffix, flags = MODES[self.mode]
        script = str(ROOT / "leanrl" / f"{self.algorithm}{suffix}.py")
        values = (f"--env-id={self.env_id}", f"--seed={self.seed}", f"--total-timesteps={self.total_timesteps}")
        return (sys.executable, script, *flags, *self.options, *values)


def check_args(args: Args) -> None:
    """Refuse argument values that cannot work."""
    for name, known in (("profile", PROFILES), ("scripts", TASKS), ("modes", MODES), ("cluster", ("local", "slurm"))):
        given = getattr(args, name) or ()
        for value in (given,) if isinstance(given, str) else given:
            if value not in known:
                refuse(f"--{name} takes {', '.join(known)}; got {value}")
    for name, least in (("workers", 1), ("time_limit", 0), ("total_timesteps", 1), ("gpus_per_job", 0), ("cores_per_job", 1)):
        value = getattr(args, name)
        if value is not None and not (value >= least and value < float("inf")):
            refuse(f"--{name.replace('_', '-')} takes a number from {least}, got {value}")
    if not args.peers and set(args.modes or ()) & set(PEERS):
        refuse("--modes sb3 and sbx need --peers: use ./run.sh peers")


def visible_gpus(args: Args) -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them; on a cluster those of one job, which Slurm names."""
    if args.cluster == "slurm":
        return ["by Slurm"] * args.gpus_per_job
    import torch  # takes two seconds, which a bad argument need not

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else list(map(str, range(count)))


def select(args: Args, gpus: list[str]) -> list[Run]:
    """The runs asked for, in the order in which they are to start; tells which modes this machine has to skip."""
    profile = PROFILES[args.profile]
    modes = (*(profile.modes if args.modes is None else args.modes), *(PEERS if args.peers and args.modes is None else ()))
    seeds = profile.seeds if args.seeds is None else args.seeds
    skipped = [mode for mode in modes if mode in CUDA_MODES and not gpus]
    if skipped:
        print(f"Skipped for want of a CUDA device: {', '.join(skipped)}", file=sys.stderr)
    runs = []
    for seed in seeds:
        for script in args.scripts:
            task = TASKS[script]
            # The libraries' default networks are not those of the Atari script, and they have no EnvPool.
            fit = [mode for mode in modes if mode not in skipped and not (task.atari and mode in PEERS)]
            steps = args.total_timesteps or getattr(task, args.profile)
            options = () if args.profile == "full" else task.options
            for env_id in args.atari_env_ids if task.atari else args.env_ids:
                runs += [Run(script, mode, env_id, seed, steps, options) for mode in fit]
    if not runs:
        refuse("nothing is selected: --scripts, --modes, --seeds and environments leave no run that this machine can do")
    return list(dict.fromkeys(runs))


def git_commit() -> str | None:
    """The commit of this checkout, None outside of one."""
    if not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


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
        yield


def wait_for_strays(lock: Path, seconds: float = 30) -> None:
    """Wait for the runs of a sweep that was killed: they notice within a second, and nothing may run beside a new one."""
    end = time.monotonic() + seconds
    with lock.open("a") as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    refuse(f"runs of another sweep are still going on in {lock.parent}")
                time.sleep(0.2)


def describe(folder: Path, profile: str) -> dict:
    """The identity of a folder's sweep, written down where it is new. Refuses a folder with a sweep of another profile."""
    path, commit = folder / "sweep.json", git_commit()
    if not path.exists():
        sweep = {"format": results.FORMAT, "id": f"{datetime.now(UTC):%Y-%m-%d}-{uuid4().hex[:8]}"}
        sweep |= {"profile": profile, "git_commit": commit}
        results.replace(path, [sweep])
        return sweep
    try:
        sweep = json.loads(path.read_text())
    except ValueError:
        refuse(f"--folder {folder}: sweep.json is not readable")
    if sweep.get("format") != results.FORMAT:
        refuse(f"--folder {folder}: has format {sweep.get('format')}, and this version reads format {results.FORMAT}")
    if sweep["profile"] != profile:
        refuse(f"--folder {folder}: has a sweep of profile {sweep['profile']}, not {profile}")
    if sweep["git_commit"] != commit:
        print(f"{folder} was begun at commit {sweep['git_commit']}, this is {commit}", file=sys.stderr)
    return sweep


class Sweep:
    """The runs of a selection on their way into the files of results of a folder."""

    def __init__(self, args: Args, runs: list[Run], folder: Path, gpus: list[str]):
        self.args, self.runs, self.folder, self.gpus = args, runs, folder, gpus
        self.slurm = args.cluster == "slurm"
        self.workers = args.workers or (len(runs) if self.slurm else 1)
        self.identity = describe(folder, args.profile)
        self.time_limit = 60 * (args.time_limit or PROFILES[args.profile].time_limit)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
        if not self.slurm and self.workers > len(cores):
            refuse(f"--workers takes a number from 1 to {len(cores)}, the cores at hand, got {self.workers}")
        share = len(cores) // self.workers
        self.cores = [] if self.slurm else [tuple(cores[i * share : (i + 1) * share]) for i in range(self.workers)]
        self.executor = self.make_executor()
        self.seconds: dict[str, list[float]] = {}  # that runs of a script and mode took
        self.done, self.failed, self.attempts = 0, 0, dict.fromkeys(runs, 0)
        self.running: dict[Run, tuple[submitit.Job, Path, float, int]] = {}  # with folder, start and place
        self.queue = deque(self.restore())

    def make_executor(self) -> submitit.Executor:
        """submitit's executor of the cluster asked for."""
        # The nodes of a cluster need not have this folder on their path.
        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns of each call of sacct where there is none
        cloudpickle.register_pickle_by_value(job_module)
        minutes = int(self.time_limit / 60) + 5  # the run's own limit comes first
        try:
            executor = submitit.AutoExecutor(self.folder / "submitit", cluster=self.args.cluster)
        except RuntimeError as error:
            refuse(f"--cluster {self.args.cluster}: {error}")
        executor.update_parameters(timeout_min=minutes)
        if self.slurm:
            options = {"cpus_per_task": self.args.cores_per_job, "slurm_array_parallelism": self.workers}
            options |= {"slurm_partition": self.args.partition} if self.args.partition else {}
            options |= {"gpus_per_node": self.args.gpus_per_job} if self.args.gpus_per_job else {}
            executor.update_parameters(slurm_additional_parameters=self.args.slurm_options, name="leanrl", **options)
        return executor

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    @property
    def curves(self) -> Path:
        return self.folder / "curves.jsonl"

    def restore(self) -> list[Run]:
        """Put the files of results in order; the runs that are still to do.

        A line that was cut off goes, and so do those of runs that failed. What a run that ended without the sweep left in its
        outcome.json becomes a line; one that a cluster still has is waited for.
        """
        lines = results.recover(self.results)
        kept = [line for line in lines if line["status"] == "ok"]
        names = {line["job"] for line in kept}
        curves = {line["job"]: line for line in results.recover(self.curves, results.Curve) if line["job"] in names}
        results.replace(self.results, kept)
        results.replace(self.curves, list(curves.values()))
        for line in kept:
            self.note_seconds(line)
        selected = {run.name for run in self.runs}
        self.done = len(names & selected)
        missing = []
        for run in self.runs:
            if run.name in names:
                continue
            attempts = sorted((self.folder / "jobs" / run.name).glob("*"), key=lambda path: int(path.name))
            outcome = read_outcome(attempts[-1]) if attempts else None
            if outcome and outcome["status"] == "ok":
                self.record(run, outcome)
            elif self.slurm and attempts and (job := self.adopt(attempts[-1])):
                self.attempts[run] = 1
                self.running[run] = (job, attempts[-1], time.monotonic(), 0)
            else:
                missing.append(run)
        return missing

    def adopt(self, folder: Path) -> submitit.Job | None:
        """The Slurm job that an earlier sweep submitted for this folder, if the cluster still has it."""
        with suppress(FileNotFoundError):
            job = submitit.SlurmJob(self.folder / "submitit", (folder / "slurm_job").read_text())
            return None if self.ended([job]) else job
        return None

    def note_seconds(self, line: dict) -> None:
        """Remember how long a run took, to foretell others."""
        if line.get("wall_seconds"):
            self.seconds.setdefault(f"{line['algorithm']} {line['mode']}", []).append(line["wall_seconds"])

    def record(self, run: Run, outcome: dict) -> None:
        """Write the lines of a run that has ended."""
        about = {"format": results.FORMAT, "sweep": self.identity["id"], "job": run.name}
        line = about | {"status": outcome["status"], "attempts": max(self.attempts[run], 1)}
        line |= {"algorithm": run.algorithm, "mode": run.mode, "env_id": run.env_id, "seed": run.seed}
        line |= {key: value for key, value in outcome.items() if key not in ("summary", "curve", "status")}
        line = outcome.get("summary", {}) | line
        if outcome["status"] == "ok":
            results.append(self.curves, about | outcome["curve"])  # first: a curve without its line is dropped on return
        results.append(self.results, line)
        if outcome["status"] == "ok":
            self.done += 1
            self.note_seconds(line)
        else:
            self.failed += 1
            self.say(f"failed: {run.name}: {outcome['reason']}\n{outcome['log']}")

    def submit(self, runs: list[Run]) -> None:
        """Start runs: on a cluster as one array of jobs."""
        if shutil.disk_usage(self.folder).free < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        places = [place for place in range(self.workers) if place not in {place for *_, place in self.running.values()}]
        jobs = []
        for run, place in zip(runs, places, strict=False):
            parent = self.folder / "jobs" / run.name
            folder = parent / str(1 + max((int(path.name) for path in parent.glob("*")), default=0))
            folder.mkdir(parents=True)
            process = psutil.Process()
            threads = self.args.cores_per_job if self.slurm else len(self.cores[place])
            job = Job(
                folder=folder,
                command=run.command(self.args),
                cache=self.folder / "cache" / f"{run.algorithm}-{run.mode}",
                time_limit=self.time_limit,
                lock=self.folder / "running.lock",
                cores=() if self.slurm else self.cores[place],
                # One at a time has the machine, and PyTorch's choice, to itself.
                threads=threads if self.slurm or self.workers > 1 else None,
                gpu=self.gpus[place % len(self.gpus)] if self.gpus and not self.slurm else None,
                owner=None if self.slurm else (process.pid, process.create_time()),
            )
            jobs.append((run, job, place))
        with self.executor.batch():
            handles = [self.executor.submit(run_job, job) for _, job, _ in jobs]
        for (run, job, place), handle in zip(jobs, handles, strict=True):
            self.attempts[run] += 1
            self.running[run] = (handle, job.folder, time.monotonic(), place)
            if self.slurm:
                (job.folder / "slurm_job").write_text(handle.job_id)

    def collect(self) -> None:
        """Record the runs that have ended, or put them back into the queue for their second attempt."""
        ended = self.ended([handle for handle, *_ in self.running.values()])  # before outcomes, which are written earlier
        for run, (handle, folder, _, _) in list(self.running.items()):
            outcome = read_outcome(folder)
            if not (outcome or handle in ended):
                continue
            del self.running[run]
            outcome = outcome or {"status": "failed", "reason": "the process that ran it died", "log": submitit_log(handle)}
            if outcome["status"] == "failed" and shutil.disk_usage(self.folder).free < LEAST_FREE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if outcome["status"] == "failed" and self.attempts[run] < ATTEMPTS:
                self.say(f"once more: {run.name}: {outcome['reason']}")
                self.queue.appendleft(run)
            else:
                self.record(run, outcome)

    def ended(self, handles: list[submitit.Job]) -> list[submitit.Job]:
        """Those of these jobs that have left this machine, or the cluster."""
        if not self.slurm:
            return [handle for handle in handles if handle.done()]
        states = slurm_jobs() if handles else None
        if states is None:
            return []
        return [handle for handle in handles if states.get(handle.job_id, "GONE") in SLURM_ENDED]

    def run(self) -> None:
        """Do all that is missing."""
        while self.queue or self.running:
            free = self.workers - len(self.running) if not self.slurm else len(self.queue)
            if self.queue and free > 0:
                self.submit([self.queue.popleft() for _ in range(min(free, len(self.queue)))])
            self.show()
            time.sleep(2 if self.slurm else 0.25)
            self.collect()
        self.show()

    def stop(self) -> None:
        """End all that is running, and see it end."""
        for handle, *_ in self.running.values():
            with suppress(Exception):
                handle.cancel()
        end = time.monotonic() + 20
        handles = [handle for handle, *_ in self.running.values()]
        while len(self.ended(handles)) < len(handles) and time.monotonic() < end:
            time.sleep(0.2)

    def seconds_left(self) -> float | None:
        """An estimate from runs of the same script and mode, or of all runs; None before the first has ended."""
        if not self.seconds:
            return None
        other = statistics.mean(statistics.mean(values) for values in self.seconds.values())

        def estimate(run: Run) -> float:
            return statistics.mean(self.seconds.get(f"{run.algorithm} {run.mode}", [other]))

        going = [max(0.0, estimate(run) - (time.monotonic() - start)) for run, (*_, start, _) in self.running.items()]
        return (sum(map(estimate, self.queue)) + sum(going)) / max(1, min(self.workers, len(self.queue) + len(going)))

    def show(self) -> None:
        """The line of progress: rewritten in place on a terminal, elsewhere a new one whenever a run starts or ends."""
        names = []
        for run, (_, folder, _, _) in list(self.running.items())[:4]:
            with suppress(OSError):
                percent = re.findall(r"(\d+)%\|", (folder / "log.txt").read_text(errors="replace")[-400:])
                names.append(f"{run.algorithm} {run.mode} seed {run.seed}{f' {percent[-1]} %' if percent else ''}")
        more = f" and {len(self.running) - len(names)} more" if len(self.running) > len(names) else ""
        state = f"[{self.done}/{len(self.runs)}]" + (f" {self.failed} failed" if self.failed else "")
        left = self.seconds_left()
        left = "" if left is None or not (self.queue or self.running) else f", {left / 60:.0f} min left"
        line = f"{state} {', '.join(names)}{more}{left}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)
        elif (key := (self.done, self.failed, tuple(self.running))) != getattr(self, "shown", None):
            self.shown = key
            print(line, file=sys.stderr, flush=True)

    def say(self, message: str) -> None:
        """A line of its own beside the line of progress."""
        print(f"\r\033[K{message}" if sys.stderr.isatty() else message, file=sys.stderr, flush=True)


def read_outcome(folder: Path) -> dict | None:
    """What a run has left in its folder at its end, None before that."""
    try:
        return json.loads((folder / "outcome.json").read_text())
    except FileNotFoundError:
        return None


def slurm_jobs() -> dict[str, str] | None:
    """The state of each Slurm job of this user; None where Slurm does not answer.

    submitit asks sacct, which many clusters do not have, and waits for ever for a job that died.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T"]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode else dict(line.split() for line in done.stdout.splitlines())


def submitit_log(job: submitit.Job) -> str:
    """The end of what the process around a run has printed."""
    path = job.paths.stderr
    return job_module.last_lines(path) if path.exists() else ""


def main() -> int:
    args = tyro.cli(Args)
    check_args(args)
    gpus = visible_gpus(args)
    runs = select(args, gpus)
    commit = git_commit()
    folder = (args.folder or ROOT / "sweeps" / (f"{args.profile}-{commit[:7]}" if commit else args.profile)).absolute()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with claimed(folder):
        if args.cluster == "local":
            wait_for_strays(folder / "running.lock")
        try:
            sweep = Sweep(args, runs, folder, gpus)
        except results.ResultsError as error:
            refuse(f"--folder {folder}: {error}")
        try:
            sweep.run()
        except KeyboardInterrupt:
            sweep.stop()
            sweep.say(f"stopped with {sweep.done} of {len(runs)} runs done: start again to go on")
            return 130
        except OSError as error:
            sweep.stop()
            if error.errno != errno.ENOSPC:
                raise
            sweep.say(f"no space is left in {folder}: {sweep.done} of {len(runs)} runs are done; free some and start again")
            return 1
        if sys.stderr.isatty():
            print(file=sys.stderr)
        report.report_folder(folder)
        return int(sweep.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
