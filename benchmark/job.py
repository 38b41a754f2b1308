"""One run of a sweep: what the process does that submitit starts, on this machine or on a node of a cluster.

It imports nothing of this folder, for it is all of it that gets to the nodes.
"""

import ctypes
import fcntl
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import pynvml

GROUPS = 100  # points of a curve, at most
SAMPLE_SECONDS = 0.5
# a run that is stopped has so long for a last checkpoint; the sweep waits longer, Slurm kills after 30
SAVE_SECONDS = 25
PACKAGES = ("torch", "tensordict", "gymnasium", "mujoco", "envpool", "stable-baselines3", "sbx-rl", "jax")
# For the interpreter that runs the command, which need not be this one: it leaves out the packages that it
# does not have. Is the function of run.sh there, by which MKL takes the processor for Intel's?
ASK = """
import ctypes, json, platform, sys
from importlib import metadata

versions = {"python": platform.python_version()}
for package in sys.argv[1:]:
    try:
        versions[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"versions": versions, "preloaded": hasattr(ctypes.CDLL(None), "mkl_serv_intel_cpu_true")}))
"""


@dataclass(frozen=True)
class Job:
    """What to run, in a folder of its own for the log, the run's files and, at the end, outcome.json."""

    folder: Path
    command: tuple[str, ...]
    cache: Path
    """where the compilers keep what they made; has a file `used` once a run has begun"""
    time_limit: float
    """in seconds"""
    cores: tuple[int, ...] = ()
    """the cores to stay on, all by default"""
    threads: int | None = None
    """threads of PyTorch, by default its own choice"""
    gpu: str | None = None
    """the GPU to use, as CUDA_VISIBLE_DEVICES names it, "" for none; by default what the process was given"""
    sharing: int = 1
    """how many runs at a time there are on that GPU"""
    owner: int | None = None
    """the process of the sweep, of which this one is a grandchild, and with whose end the run is to end"""
    lock: Path | None = None
    """a file that is locked, shared, as long as the run goes on"""
    resumable: bool = False
    """the command writes checkpoints, and goes on from the newest that is in the folder already"""


class OrphanedError(Exception):
    """The owner of a run has gone."""


class GpuSampler:
    """Samples utilisation (0 to 1) and memory (bytes in use) of the GPU that a run sees, if it sees one.

    `seconds` are Unix times; `name` is None where there is no GPU.
    """

    def __init__(self, visible: str | None):
        self.seconds, self.utilization, self.memory = [], [], []
        first = "0" if visible is None else visible.split(",")[0]
        try:
            pynvml.nvmlInit()
            get_handle = (
                pynvml.nvmlDeviceGetHandleByIndex if first.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
            )
            self.handle = get_handle(int(first) if first.isdecimal() else first)
            self.name = pynvml.nvmlDeviceGetName(self.handle)
        except pynvml.NVMLError:
            self.handle = self.name = None

    def sample(self) -> None:
        """Take one sample; none any more once the driver has refused one."""
        if self.handle is None:
            return
        try:
            utilization = pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
            memory = pynvml.nvmlDeviceGetMemoryInfo(self.handle).used
        except pynvml.NVMLError:
            self.handle = None
            return
        self.seconds.append(time.time())
        self.utilization.append(utilization)
        self.memory.append(memory)

    def totals(self, last: float) -> dict[str, float | None]:
        """The area under utilisation in the `last` seconds, and the most MiB in use; None without samples."""
        inside = [index for index, second in enumerate(self.seconds) if second >= self.seconds[-1] - last]
        if len(inside) < 2:
            return {"gpu_busy_seconds": None, "gpu_memory_mb": None}
        busy = float(np.trapezoid(self.utilization[inside[0] :], self.seconds[inside[0] :]))
        return {"gpu_busy_seconds": round(busy, 2), "gpu_memory_mb": round(max(self.memory) / 2**20, 1)}


def commit(folder: Path) -> str | None:
    """The commit of a folder's checkout, with `-dirty` where tracked files differ; None outside of one."""
    return git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") or None


def git(folder: Path, *command: str) -> str:
    """What git says of a folder's checkout; nothing where there is no git, or no checkout."""
    try:
        return subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor(cpuinfo: str) -> str:
    """The processor's name in /proc/cpuinfo, with family and model where it has no number (but of GHz).

    Virtual machines hide which one it is: an "AMD EPYC" may be of any generation.
    """
    said = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", cpuinfo, re.MULTILINE))
    name = said.get("model name") or platform.processor()
    numbered = re.search(r"\d", name.partition("@")[0]) or not {"cpu family", "model"} <= said.keys()
    return name if numbered else f"{name} (family {said['cpu family']}, model {said['model']})"


def provenance(command: tuple[str, ...], env: dict[str, str], gpu: str | None) -> dict:
    """What a command, interpreter and script, runs with: versions, hardware, threads, commit."""
    interpreter, script, *_ = command
    folder = Path(script).parent
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "check": True}
    answer = subprocess.run([interpreter, "-c", ASK, *PACKAGES], **options).stdout
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    asked = json.loads(answer.splitlines()[-1])
    mkl = {"mkl": "as on Intel"} if asked["preloaded"] and "AuthenticAMD" in cpuinfo else {}
    return {
        "versions": asked["versions"],
        "hardware": {"cpu": processor(cpuinfo), "cores": usable_cores(), "gpu": gpu} | mkl,
        "git_commit": commit(folder),
        "threads": threads_told(env),
    }


def threads_told(env: dict[str, str]) -> int | None:
    """How many threads PyTorch is told to take; None where it chooses."""
    return int(env["OMP_NUM_THREADS"]) if env.get("OMP_NUM_THREADS", "").isdecimal() else None


def children_usage() -> tuple[float, float]:
    """Processor seconds of all that has run below this process, and the most MiB that one of it held."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime, mebibytes(usage.ru_maxrss)


def mebibytes(maxrss: int) -> float:
    """`ru_maxrss` in MiB: macOS counts it in bytes, Linux in KiB."""
    return maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def grouped(*columns: list[float], groups: int = GROUPS) -> list[np.ndarray]:
    """Columns of one length in so many groups at most: their last values, of the last column their means."""
    *ends, means = [np.array_split(np.asarray(column), min(groups, len(column)) or 1) for column in columns]
    if not len(columns[0]):
        return [np.array([]) for _ in columns]
    return [
        *(np.array([group[-1] for group in column]) for column in ends),
        np.array([group.mean() for group in means]),
    ]


def checkpoints(runs: Path) -> list[Path]:
    """The checkpoints of a run, the one written last at the end."""
    return sorted(runs.glob("*/[0-9]*.pt"), key=lambda path: path.stat().st_mtime_ns)


def seconds_run(starts: list[float], times: list[float]) -> list[float]:
    """For how long a run started, or taken up, at `starts` had been going on at `times`; all Unix times.

    From the last of these times before a start to that start it was not going on, or did what was lost.
    """
    moments, before = np.asarray(times, dtype=float), 0.0
    part_of = np.maximum(np.searchsorted(starts, moments, side="right") - 1, 0)
    for part, start in enumerate(starts):
        moments[part_of == part] += before - start
        before = moments[part_of == part].max(initial=before)
    return moments.tolist()


def episode_curve(runs: Path, starts: list[float], groups: int = GROUPS) -> dict[str, list]:
    """Steps, seconds and returns from the TensorBoard logs under `runs`: a results.Curve in so many groups.

    `starts` are the Unix times at which the run was started or taken up. What it had done beyond the
    checkpoint from which it was taken up is left out, and returns that are not finite: JSON has no such
    numbers, and no curve is drawn through them. Of several agents, each of which has a folder there, it is
    empty: their episodes are not those of one curve.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second

    events, directories = [], [path for path in runs.glob("*") if path.is_dir()]
    for directory in directories if len(directories) == 1 else []:
        log = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
        if "charts/episodic_return" in log.Tags()["scalars"]:
            events += log.Scalars("charts/episodic_return")
    seconds = seconds_run(starts, [event.wall_time for event in events])
    events = zip(events, seconds, strict=True)
    finite = [(event.step, second, event.value) for event, second in events if math.isfinite(event.value)]
    columns = list(zip(*finite, strict=True))
    steps, seconds, returns = grouped(*columns or [[], [], []], groups=groups)
    return {
        "step": steps.astype(int).tolist(),
        "seconds": seconds.round(2).tolist(),
        "episodic_return": returns.round(2).tolist(),
    }


def orphaned(parent: int, owner: int) -> bool:
    """Whether submitit's controller, the parent, or its parent, the sweep, has gone."""
    try:
        return os.getppid() != parent or psutil.Process(parent).ppid() != owner
    except psutil.NoSuchProcess:
        return True


def tail(path: Path, size: int) -> str:
    """The end of a file as text, in which the states of a progress bar are one line, not a line each."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace")


def last_lines(log: Path, count: int = 20) -> str:
    """The end of a log, without the states that a progress bar went through."""
    lines = tail(log, 20_000).rstrip().split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines[-count:])


def summary_of(stdout: Path) -> dict | None:
    """The object in the last line, or None where that line holds none."""
    try:
        summary = json.loads(stdout.read_text().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) else None


def training_seconds(summary: dict) -> float:
    """How long a run went on after its start-up; without end where its summary does not say."""
    try:
        return (summary.get("wall_seconds") or math.inf) - (summary.get("startup_seconds") or 0)
    except TypeError:  # the sweep refuses such a summary, and says why
        return math.inf


def begin() -> None:
    """What a run does before it becomes the script: die with its parent, hear Ctrl+C, and be as nice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        with suppress(OSError):  # nice counts within a session only, and the run has its own
            Path("/proc/self/autogroup").write_text(str(os.nice(0)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # ignored, where a shell has put the sweep into the background
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # by which Slurm tells submitit, and may tell all of a job, that time is up
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def stop(*_) -> NoReturn:
    """End this process in order: the handler of SIGTERM, which submitit would ignore."""
    raise KeyboardInterrupt


def watch(process: subprocess.Popen, job: Job, gpu: GpuSampler) -> str | None:
    """Sample until the process ends; returns why it failed where it took too long.

    Raises OrphanedError where the owner has gone.
    """
    parent = os.getppid()
    end = time.monotonic() + job.time_limit
    while process.poll() is None:
        if job.owner and orphaned(parent, job.owner):
            raise OrphanedError
        if time.monotonic() > end:
            return f"took longer than {job.time_limit:.0f} s"
        gpu.sample()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
    return None


def let_save(process: subprocess.Popen, job: Job) -> None:
    """Have a run that writes checkpoints, and is still going on, end with one, within SAVE_SECONDS."""
    if job.resumable and process.poll() is None:
        # Not SIGTERM, which Slurm sends to every process of a job: of one kind, the second ends a run without
        # a checkpoint.
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAVE_SECONDS)


def judge(code: int, stdout: Path) -> tuple[str | None, dict]:
    """Why a run that ended with this status failed, None if it did not, and its summary."""
    summary = summary_of(stdout)
    if code < 0:
        known = -code in set(signal.Signals)
        return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}", {}
    if code:
        return f"exit status {code}", {}
    return (None, summary) if summary else ("printed no summary", {})


def run_job(job: Job) -> None:
    """Run the command of a job to its end or its time limit, and write outcome.json, whole or not at all."""
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    signal.signal(signal.SIGTERM, stop)
    # NVML numbers GPUs in the order of the bus, CUDA would number them by speed.
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    env |= {f"{compiler}_CACHE_DIR": str(job.cache) for compiler in ("TORCHINDUCTOR", "TRITON")}
    env |= {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    env |= {} if job.gpu is None else {"CUDA_VISIBLE_DEVICES": job.gpu}
    cold_start = not (job.cache / "used").exists()
    stdout, log = job.folder / "stdout.txt", job.folder / "log.txt"
    # What an earlier attempt has left, or a job that Slurm has put back into its queue.
    runs, command, resumed = job.folder / "runs", job.command, None
    for path in checkpoints(runs):
        if not zipfile.is_zipfile(path):  # what a crash of the machine has left of one
            path.unlink()
    if job.resumable and (saved := checkpoints(runs)):
        command, resumed = (*command, f"--resume={saved[-1].parent}"), int(saved[-1].stem)
    else:
        shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(exist_ok=True)
    for path in runs.glob("*/checkpoint.new"):  # of a run that was killed while it wrote
        path.unlink()
    with ExitStack() as files:
        if job.lock:
            fcntl.flock(files.enter_context(job.lock.open("a+")), fcntl.LOCK_SH)
        gpu = GpuSampler(env.get("CUDA_VISIBLE_DEVICES"))
        # Asked before the run: at its end the checkout may be at another commit.
        outcome = provenance(job.command, env, gpu.name)
        # for whoever asks before it has ended
        (runs / "about.json").write_text(json.dumps({"command": command, **outcome}))
        seconds_before, _ = children_usage()
        streams = {
            "stdout": files.enter_context(stdout.open("wb")),
            "stderr": files.enter_context(log.open("wb")),
        }
        options = {
            "stdin": subprocess.DEVNULL,
            "cwd": job.folder,
            "start_new_session": True,
            "preexec_fn": begin,
        }
        start = time.time()
        with (runs / "starts.txt").open("a") as starts:
            starts.write(f"{start}\n")
        job.cache.mkdir(parents=True, exist_ok=True)
        (job.cache / "used").touch()  # a run that dies leaves compiled code, too
        process = subprocess.Popen(command, env=env, **streams, **options)
        try:
            reason = watch(process, job, gpu)
        except OrphanedError:
            return
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would kill what is being saved
            let_save(process, job)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its helpers, too, if it left any
            code = process.wait()
        seconds, memory = children_usage()
        outcome |= {
            "cpu_busy_seconds": round(seconds - seconds_before, 2),
            "peak_memory_mb": round(memory, 1),
        }
        failure, summary = judge(code, stdout)
        if reason := reason or failure:
            outcome |= {"status": "failed", "reason": reason, "log": last_lines(log)}
        else:
            gpu_columns = grouped([second - start for second in gpu.seconds], gpu.utilization)
            gpu_seconds, gpu_utilization = (column.round(2).tolist() for column in gpu_columns)
            curve = episode_curve(runs, [float(line) for line in (runs / "starts.txt").read_text().split()])
            curve |= {"gpu_seconds": gpu_seconds, "gpu_utilization": gpu_utilization}
            outcome |= {"status": "ok", "cold_start": cold_start, **gpu.totals(training_seconds(summary))}
            outcome |= {"runs_per_gpu": job.sharing, "resumed": resumed, "summary": summary, "curve": curve}
            # the last stays; with a replay buffer each has up to hundreds of megabytes
            for path in checkpoints(runs)[:-1]:
                path.unlink()
        new = job.folder / "outcome.json.new"
        new.write_text(json.dumps(outcome))
        new.rename(job.folder / "outcome.json")
