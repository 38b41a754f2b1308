"""One run of a sweep: what the process does that submitit starts, on this machine or on a node of a cluster."""

import ctypes
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pynvml

GROUPS = 100  # points of a curve, at most
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """What to run, in a folder of its own that gets the log, the run's files and, at the end, outcome.json."""

    folder: Path
    command: tuple[str, ...]
    cache: Path
    """where the compilers keep what they made"""
    time_limit: float
    """in seconds"""
    lock: Path
    """a file that is locked, shared, as long as the run goes on"""
    cores: tuple[int, ...] = ()
    """the cores to stay on, all by default"""
    threads: int | None = None
    """threads of PyTorch, by default its own choice"""
    gpu: str | None = None
    """the GPU to use, as CUDA_VISIBLE_DEVICES names it; by default what the process was given"""
    owner: tuple[int, float] | None = None
    """the process, by number and time of creation, with whose end the run is to end"""


class OrphanedError(Exception):
    """The owner of a run has gone."""


class GpuSampler:
    """Samples utilisation (0 to 1) and memory (bytes in use) of the GPU that a run sees; of none where there is none."""

    def __init__(self, visible: str | None):
        self.seconds, self.utilization, self.memory = [], [], []
        self.start = time.perf_counter()
        first = "0" if visible is None else visible.split(",")[0]
        try:
            pynvml.nvmlInit()
            get_handle = pynvml.nvmlDeviceGetHandleByIndex if first.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
            self.handle = get_handle(int(first) if first.isdecimal() else first)
        except pynvml.NVMLError:
            self.handle = None

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
        self.seconds.append(time.perf_counter() - self.start)
        self.utilization.append(utilization)
        self.memory.append(memory)

    def totals(self) -> dict[str, float | None]:
        """The area under the curve of utilisation in seconds, and the most memory in MiB; None without two samples."""
        if len(self.seconds) < 2:
            return {"gpu_busy_seconds": None, "gpu_memory_mb": None}
        busy = float(np.trapezoid(self.utilization, self.seconds))
        return {"gpu_busy_seconds": round(busy, 2), "gpu_memory_mb": round(max(self.memory) / 2**20, 1)}


def grouped(*columns: list[float]) -> list[np.ndarray]:
    """Columns of one length in at most GROUPS groups: the last value of each group, in the last column the mean."""
    groups = [np.array_split(np.asarray(column), min(GROUPS, len(column)) or 1) for column in columns]
    *ends, means = groups
    if not len(columns[0]):
        return [np.array([]) for _ in columns]
    return [*(np.array([group[-1] for group in column]) for column in ends), np.array([group.mean() for group in means])]


def episode_curve(runs: Path, start: float) -> dict[str, list]:
    """Steps, seconds since `start` (Unix time) and returns from the TensorBoard logs under `runs`, as in results.Curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second

    events = []
    for directory in sorted(runs.glob("*")):
        log = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
        if "charts/episodic_return" in log.Tags()["scalars"]:
            events += log.Scalars("charts/episodic_return")
    columns = list(zip(*((event.step, event.wall_time - start, event.value) for event in events), strict=True))
    steps, seconds, returns = grouped(*columns or [[], [], []])
    return {
        "step": steps.astype(int).tolist(),
        "seconds": seconds.round(2).tolist(),
        "episodic_return": returns.round(2).tolist(),
    }


def alive(owner: tuple[int, float]) -> bool:
    """Whether the process with this number and time of creation still runs."""
    try:
        process = psutil.Process(owner[0])
        return process.create_time() == owner[1] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_lines(log: Path, count: int = 20) -> str:
    """The end of a log, without the states that a progress bar went through."""
    # Not read as text, which would make a line of each state.
    lines = log.read_bytes()[-20_000:].decode(errors="replace").rstrip().split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines[-count:])


def summary_of(stdout: Path) -> dict | None:
    """The object in the last line, or None where that line holds none."""
    try:
        summary = json.loads(stdout.read_text().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, where the kernel can: one that dies by SIGKILL cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def watch(process: subprocess.Popen, job: Job, gpu: GpuSampler) -> str | None:
    """Sample until the process ends; returns why it failed where it took too long.

    Raises OrphanedError where the owner has gone.
    """
    end = time.monotonic() + job.time_limit
    while process.poll() is None:
        if job.owner and not alive(job.owner):
            raise OrphanedError
        if time.monotonic() > end:
            return f"took longer than {job.time_limit:.0f} s"
        gpu.sample()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
    return None


def run_job(job: Job) -> None:
    """Run the command of a job to its end or its time limit, and write outcome.json: all of it, or nothing."""
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    # submitit ignores SIGTERM, with which a cluster asks a job to leave.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    # NVML numbers GPUs in the order of the bus, CUDA would number them by speed.
    env = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}
    env |= {f"{compiler}_CACHE_DIR": str(job.cache) for compiler in ("TORCHINDUCTOR", "TRITON")}
    env |= {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    env |= {"CUDA_VISIBLE_DEVICES": job.gpu} if job.gpu else {}
    cold_start = not (job.cache.is_dir() and any(job.cache.iterdir()))
    stdout, log = job.folder / "stdout.txt", job.folder / "log.txt"
    with job.lock.open("a") as lock, stdout.open("wb") as out, log.open("wb") as err:
        fcntl.flock(lock, fcntl.LOCK_SH)
        options = {"cwd": job.folder, "env": env, "start_new_session": True, "preexec_fn": die_with_parent}
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        start = time.time()
        process = subprocess.Popen(job.command, **streams, **options)
        try:
            gpu = GpuSampler(env.get("CUDA_VISIBLE_DEVICES"))
            reason = watch(process, job, gpu)
        except OrphanedError:
            return
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its helpers, too, if it left any
            code = process.wait()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        summary = summary_of(stdout)
        if reason is None and code:
            reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        elif reason is None and summary is None:
            reason = "printed no summary"
        if reason:
            outcome = {"status": "failed", "reason": reason, "log": last_lines(log)}
        else:
            gpu_seconds, gpu_utilization = (column.round(2).tolist() for column in grouped(gpu.seconds, gpu.utilization))
            curve = episode_curve(job.folder / "runs", start)
            curve |= {"gpu_seconds": gpu_seconds, "gpu_utilization": gpu_utilization}
            outcome = {"status": "ok", "summary": summary, "curve": curve, "cold_start": cold_start}
            outcome |= {"cpu_busy_seconds": round(usage.ru_utime + usage.ru_stime, 2), **gpu.totals()}
        new = job.folder / "outcome.json.new"
        new.write_text(json.dumps(outcome))
        new.rename(job.folder / "outcome.json")
