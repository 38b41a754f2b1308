"""What a run is made with and leaves: processor, GPU, versions, commit, memory, summary."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmark import LEANRL

PACKAGES = ("torch", "tensordict", "gymnasium", "mujoco", "envpool", "stable-baselines3", "sbx-rl", "jax")
PACKAGES += ("sb3-contrib", "cleanrl", "rltools")
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


def git(folder: Path, *command: str) -> str:
    """What git says of a folder's checkout; nothing where there is no git, or no checkout."""
    try:
        return subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def commit(folder: Path) -> str | None:
    """The commit of a folder's checkout, with `-dirty` where tracked files differ; None outside of one."""
    return git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") or None


def version() -> dict[str, str]:
    """The version that the first line of the scripts tells; nothing where none does."""
    heads = [path.read_text().partition("\n")[0] for path in sorted(LEANRL.glob("*.py"))]
    told = [head.removeprefix("# LeanRL ") for head in heads if head.startswith("# LeanRL ")]
    return {"LeanRL": told[0]} if told else {}


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def processor(cpuinfo: str) -> str:
    """The processor's name in /proc/cpuinfo, with family and model where it has no number (but of GHz).

    Virtual machines hide which one it is: an "AMD EPYC" may be of any generation.
    """
    said = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", cpuinfo, re.MULTILINE))
    name = said.get("model name") or platform.processor()
    numbered = re.search(r"\d", name.partition("@")[0]) or not {"cpu family", "model"} <= said.keys()
    return name if numbered else f"{name} (family {said['cpu family']}, model {said['model']})"


def provenance(command: Sequence[str | Path], env: dict[str, str], gpu: str | None = None) -> dict:
    """What a command, interpreter and script, runs with: versions, hardware, threads, commit."""
    folder = Path(command[1]).parent
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "check": True}
    answer = subprocess.run([command[0], "-c", ASK, *PACKAGES], **options).stdout
    cpuinfo = Path("/proc/cpuinfo").read_text()
    asked, threads = json.loads(answer.splitlines()[-1]), env.get("OMP_NUM_THREADS", "")
    mkl = {"mkl": "as on Intel"} if asked["preloaded"] and "AuthenticAMD" in cpuinfo else {}
    return {
        "versions": version() | asked["versions"],
        "hardware": {"cpu": processor(cpuinfo), "cores": usable_cores(), "gpu": gpu} | mkl,
        "git_commit": commit(folder),
        "threads": int(threads) if threads.isdecimal() else None,
    }


def summary_of(stdout: Path) -> dict | None:
    """The object in the last line of what a run has printed, or None where that holds none."""
    try:
        summary = json.loads(stdout.read_text().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) else None


def checkpoint_in(runs: Path) -> Path | None:
    """The checkpoint of the run whose folder is in `runs`, or None where it has none."""
    return next(runs.glob("*/checkpoint.pt"), None)


def step_of(checkpoint: Path) -> int:
    """The agent step at which a checkpoint was written."""
    import torch  # takes two seconds, which a run without a checkpoint need not wait

    return torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["progress"][0]
