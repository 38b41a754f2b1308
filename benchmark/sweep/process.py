"""One run of a sweep: the process around a script, on this machine or on a node of a cluster.

    python -m benchmark.sweep.process FOLDER        does the job of FOLDER/job.json

The folder gets the log, what the script prints, its files in `runs`, and at the end outcome.json. SIGTERM,
the time limit and the end of the sweep that started it end the run, with a checkpoint if it writes any.
"""

import ctypes
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pynvml

from benchmark import ROOT
from benchmark.curve import in_groups, logged
from benchmark.machine import checkpoint_in, provenance, step_of, summary_of

SAMPLE_SECONDS = 0.5
SAVE_SECONDS = 25  # for a last checkpoint; the sweep waits longer, Slurm kills after 30


@dataclass
class Job:
    """What to run, and with what."""

    command: list[str]
    cache: str
    """the folder of compiled code; it has a file `used` once a run has begun, `whole` once one is done"""
    time_limit: float
    """in seconds"""
    resumable: bool = False
    """the command writes checkpoints, and goes on from the one that is in the folder already"""
    cores: list[int] | None = None
    """the cores to stay on, all by default"""
    threads: int | None = None
    """threads of PyTorch, by default its own choice"""
    gpu: str | None = None
    """the GPU to use, as in CUDA_VISIBLE_DEVICES, "" for none; by default what the process was given"""
    runs_per_gpu: int = 1
    """how many runs at a time there are on it"""


class GpuSampler:
    """Samples utilisation (0 to 1) and memory (bytes in use) of the first GPU that a run sees.

    `name` is None where there is no GPU.
    """

    def __init__(self, visible: str | None):
        self.seconds, self.utilization, self.memory = [], [], []
        first = "0" if visible is None else visible.split(",")[0]
        try:
            pynvml.nvmlInit()
            by_index, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            self.handle = by_index(int(first)) if first.isdecimal() else by_name(first)
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
        self.seconds.append(time.monotonic())
        self.utilization.append(utilization)
        self.memory.append(memory)

    def totals(self, last: float) -> dict[str, float | None]:
        """The area under utilisation in the `last` seconds, and the most MiB in use; None without samples."""
        inside = [index for index, second in enumerate(self.seconds) if second >= self.seconds[-1] - last]
        if len(inside) < 2:
            return {"gpu_busy_seconds": None, "gpu_memory_mb": None}
        busy = float(np.trapezoid(self.utilization[inside[0] :], self.seconds[inside[0] :]))
        return {"gpu_busy_seconds": round(busy, 2), "gpu_memory_mb": round(max(self.memory) / 2**20, 1)}


def tail(path: Path, size: int = 20_000) -> str:
    """The end of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace")


def last_lines(log: Path, count: int = 20) -> str:
    """The end of a log, without the states that a progress bar went through; nothing where there is none."""
    lines = tail(log).rstrip().split("\n") if log.exists() else []
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines[-count:])


def variables(job: Job) -> dict[str, str]:
    """The environment variables of a run."""
    # NVML numbers GPUs in the order of the bus, CUDA would number them by speed.
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    # For environments of benchmark/, such as benchmark.no_velocity:PendulumNoVel-v1.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    env |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), job.cache)
    env |= {"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}
    return env | ({} if job.gpu is None else {"CUDA_VISIBLE_DEVICES": job.gpu})


def begin() -> None:
    """What a run does before it becomes the script."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with this process
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has it ignored in the background
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # by which Slurm tells submitit that time is up


def watch(process: subprocess.Popen, time_limit: float, gpu: GpuSampler) -> str | None:
    """Sample until the process ends; returns why it failed where it took too long.

    Raises KeyboardInterrupt at SIGTERM, and when the process that started this one has ended.
    """
    parent, end = os.getppid(), time.monotonic() + time_limit
    while process.poll() is None:
        if os.getppid() != parent:
            raise KeyboardInterrupt
        if time.monotonic() > end:
            return f"took longer than {time_limit:.0f} s"
        gpu.sample()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
    return None


def end(process: subprocess.Popen, resumable: bool) -> int:
    """End a run, with a checkpoint if it writes any, and give its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut this short
    if resumable and process.poll() is None:
        # Not SIGTERM, which Slurm sends to every process of a job: of one kind, a second ends a script at
        # once.
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAVE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its helpers, too, if it left any
    return process.wait()


def failure(code: int, summary: dict | None) -> str | None:
    """Why a run that ended with this status failed; None if it did not."""
    if code < 0:
        known = -code in set(signal.Signals)
        return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"exit status {code}" if code else None if summary else "printed no summary"


def training_seconds(summary: dict) -> float:
    """How long a run went on after its start-up; without end where its summary does not say."""
    try:
        return (summary.get("wall_seconds") or math.inf) - (summary.get("startup_seconds") or 0)
    except TypeError:  # the sweep refuses such a summary, and says why
        return math.inf


def mark_cache(cache: Path) -> bool | None:
    """Note that a run uses this folder of compiled code; returns whether it has to compile all.

    None where a run has begun and none has ended well: nobody knows how much compiled code there is.
    """
    cold_start = False if (cache / "whole").exists() else None if (cache / "used").exists() else True
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "used").touch()
    return cold_start


def run_job(folder: Path) -> None:
    """Do the job of a folder, and write outcome.json, whole or not at all."""
    job = Job(**json.loads((folder / "job.json").read_text()))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    env, cache, runs = variables(job), Path(job.cache), folder / "runs"
    # What an earlier attempt has left, or a job that Slurm has put back into its queue.
    saved = checkpoint_in(runs) if job.resumable else None
    resumed = step_of(saved) if saved else None
    command = [*job.command, *([f"--resume={saved.parent}"] if saved else [])]
    if not saved:
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir()
    gpu = GpuSampler(env.get("CUDA_VISIBLE_DEVICES"))
    # Asked before the run, at whose end the checkout may be at another commit.
    outcome = provenance(job.command, env, gpu.name)
    cold_start = mark_cache(cache)
    with (runs / "starts.txt").open("a") as starts:
        starts.write(f"{time.time()}\n")
    options = {"cwd": folder, "env": env, "stdin": subprocess.DEVNULL}
    options |= {"process_group": 0, "preexec_fn": begin}
    stdout, log = folder / "stdout.txt", folder / "log.txt"
    with stdout.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, **options)
        try:
            reason = watch(process, job.time_limit, gpu)
        finally:
            code = end(process, job.resumable)
    kibibytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    outcome["peak_memory_mb"] = round(kibibytes / 2**10, 1)
    summary = summary_of(stdout)
    if reason := reason or failure(code, summary):
        outcome |= {"status": "failed", "reason": reason, "log": last_lines(log)}
    else:
        (cache / "whole").touch()
        outcome |= {"status": "ok", "cold_start": cold_start, **gpu.totals(training_seconds(summary))}
        outcome |= {"runs_per_gpu": job.runs_per_gpu, "resumed": resumed, "summary": summary}
        outcome["curve"] = in_groups(logged(runs))
    new = folder / "outcome.json.new"
    new.write_text(json.dumps(outcome))
    new.rename(folder / "outcome.json")


if __name__ == "__main__":
    try:
        run_job(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
