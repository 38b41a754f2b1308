"""A Slurm cluster of one node, this machine, for the tests of what submits jobs."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "sinfo", "squeue", "srun")
# It names no log files, so that the daemons log to stderr. config_overrides: slurmd may count other cores.
CONFIG = """ClusterName=tests
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={run}/munge.socket
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=2
MessageTimeout=5
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=debug Nodes={node} Default=YES
"""


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Look until the condition holds, for so many seconds at most; returns whether it does."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return holds


def unavailable(reason: str) -> NoReturn:
    """Skip what needs Slurm; in CI it has to be there."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[dict[str, str]]:
    """A cluster with an idle node: gives the variables under which it is found. Logs are in the directory."""
    # Debian has the daemons where an ordinary user's PATH does not look.
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        unavailable(f"not on PATH, of Debian's packages munge and slurm-wlm: {', '.join(missing)}")
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if root and (not shutil.which("sudo") or subprocess.run([*root, "true"], capture_output=True).returncode):
        unavailable("Slurm's daemons need root, or a sudo that asks for no password")
    config = directory / "slurm.conf"
    variables = os.environ | {"SLURM_CONF": str(config)}
    options = {"env": variables | {"PATH": path}, "stdin": subprocess.DEVNULL}
    daemons: dict[str, subprocess.Popen] = {}

    def start(name: str, *command: str) -> None:
        with (directory / f"{name}.log").open("w") as log:
            # In a session of its own, which Ctrl+C does not reach; and sudo passes on no signal from its own.
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            daemons[name] = subprocess.Popen(command, **streams, **options)

    def ask(*command: str) -> str | None:
        answer = subprocess.run(command, capture_output=True, text=True, **options)
        return None if answer.returncode else answer.stdout.strip()

    def ended() -> bool:
        return any(daemon.poll() is not None for daemon in daemons.values())

    def require(condition: Callable[[], bool], otherwise: str) -> None:
        if not wait_until(lambda: ended() or condition()) or ended():
            logs = {name: (directory / f"{name}.log").read_text()[-500:] for name in daemons}
            unavailable(f"{otherwise}: {logs}")

    # All users have to reach the sockets, and a socket's path is short: pytest's directories are neither.
    run = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        run.chmod(0o755)
        (run / "munge.key").touch(0o600)
        (run / "munge.key").write_bytes(os.urandom(128))
        files = [f"--{kind}-file={run}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        start("munged", "munged", "--foreground", f"--socket={run}/munge.socket", *files)
        require((run / "munge.socket").exists, "munged has no socket")

        address = ("127.0.0.1", 0)
        with socket.create_server(address) as one, socket.create_server(address) as other:
            ports = [server.getsockname()[1] for server in (one, other)]
        node = socket.gethostname().partition(".")[0]
        config.write_text(CONFIG.format(node=node, ports=ports, run=run, cpus=os.cpu_count()))
        for name in ("slurmctld", "slurmd"):
            start(name, *root, name, "-D", "-f", str(config))
        require(lambda: ask("sinfo", "--noheader", "--format=%T") == "idle", "the node is not idle")
        yield variables
    finally:
        ask("scancel", "--partition=debug")
        wait_until(lambda: ask("squeue", "--noheader") == "", 20)
        for daemon in reversed(daemons.values()):
            for signal in (f"TERM {daemon.pid}", f"KILL -{daemon.pid}"):
                subprocess.run([*root, "sh", "-c", f"kill -{signal}"], capture_output=True)
                if wait_until(lambda daemon=daemon: daemon.poll() is not None, 10):
                    break
        subprocess.run([*root, "rm", "-rf", str(run)])
