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

# The programs it takes, by name, each with the Debian package to install for it.
PROGRAMS = {"munged": "munge"}
PROGRAMS |= dict.fromkeys(
    ("slurmctld", "slurmd", "sbatch", "scancel", "sinfo", "squeue", "srun"), "slurm-wlm"
)
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
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory}
PartitionName=debug Nodes={node} Default=YES
"""


class SlurmUnavailable(Exception):  # noqa: N818 (a reason to skip a test, not an error of it)
    """Slurm cannot be started here; the message says why, in one line."""


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Look until the condition holds, for so many seconds at most; returns whether it does."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return holds


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and slurmd and wait until the node is idle; at the end stop all, jobs included.

    Yields the variables under which sbatch, squeue and scancel talk to this cluster. Its configuration and
    the daemons' logs stay in the directory. Raises SlurmUnavailable where it cannot be started.
    """
    # Debian has the daemons where an ordinary user's PATH does not look.
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        packages = " and ".join(sorted({PROGRAMS[program] for program in missing}))
        raise SlurmUnavailable(f"not on PATH: {', '.join(missing)}; to be installed from Debian: {packages}")
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if root and (not shutil.which("sudo") or subprocess.run([*root, "true"], capture_output=True).returncode):
        raise SlurmUnavailable("Slurm's daemons need root, or a sudo that asks for no password")

    directory.mkdir(parents=True, exist_ok=True)
    config = directory.resolve() / "slurm.conf"
    variables = {"SLURM_CONF": str(config)}
    options = {"env": os.environ | variables | {"PATH": path}, "stdin": subprocess.DEVNULL}
    daemons: dict[str, subprocess.Popen] = {}

    def start(name: str, *command: str) -> None:
        with (directory / f"{name}.log").open("w") as log:
            # In a session of its own: Ctrl+C is not to end it before its jobs, and sudo passes on no signal
            # from its own group.
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            daemons[name] = subprocess.Popen(command, **streams, **options)

    def ask(*command: str) -> str | None:
        answer = subprocess.run(command, capture_output=True, text=True, **options)
        return None if answer.returncode else answer.stdout.strip()

    def ended() -> list[str]:
        return [name for name, daemon in daemons.items() if daemon.poll() is not None]

    def require(condition: Callable[[], bool], otherwise: str) -> None:
        if wait_until(lambda: bool(ended()) or condition()) and not ended():
            return
        for name in ended() or daemons:
            otherwise += f"; {name}: {(directory / f'{name}.log').read_text()[-500:]}"
        raise SlurmUnavailable(otherwise)

    # All users have to reach the sockets, and a socket's path is short: pytest's directories are neither.
    run = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        run.chmod(0o755)
        (run / "munge.key").touch(0o600)
        (run / "munge.key").write_bytes(os.urandom(128))
        files = [f"--{kind}-file={run}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        start("munged", "munged", "--foreground", f"--socket={run}/munge.socket", *files)
        require((run / "munge.socket").exists, "munged has no socket")

        free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [server.getsockname()[1] for server in free]
        for server in free:
            server.close()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        node = socket.gethostname().partition(".")[0]
        config.write_text(CONFIG.format(node=node, ports=ports, run=run, cpus=os.cpu_count(), memory=memory))
        for name in ("slurmctld", "slurmd"):
            start(name, *root, name, "-D", "-f", str(config))
        require(lambda: ask("sinfo", "--noheader", "--format=%T") == "idle", "the node is not idle")
        try:
            yield variables
        finally:
            ask("scancel", "--partition=debug")
            wait_until(lambda: ask("squeue", "--noheader") == "", 20)
    finally:
        for daemon in reversed(daemons.values()):
            for signal in (f"TERM {daemon.pid}", f"KILL -{daemon.pid}"):
                subprocess.run([*root, "sh", "-c", f"kill -{signal}"], capture_output=True)
                if wait_until(lambda daemon=daemon: daemon.poll() is not None, 10):
                    break
        subprocess.run([*root, "rm", "-rf", str(run)])
