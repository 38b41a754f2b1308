"""What a sweep is to run: its arguments, the profiles, and the runs that they select."""

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmark import LEANRL, ROOT
from benchmark.collection import COLLECTION, Algorithm
from benchmark.modes import CUDA_MODES, LIBRARIES, MODES, ORIGINAL, PEERS
from benchmark.terminal import check_interpreter, refuse


@dataclass(frozen=True)
class Profile:
    """What is run unless the command line says otherwise; the time limit is in minutes."""

    modes: tuple[str, ...]
    seeds: tuple[int, ...] | None
    time_limit: float
    checkpoint_every: int | None = None
    """agent steps between two checkpoints, from which a run that was stopped goes on"""


ALL = ("eager", "twin", "compile", "cudagraphs", "both")
PROFILES = {
    "quick": Profile(modes=("eager", "compile", "both"), seeds=(1,), time_limit=10),
    "speed": Profile(modes=ALL, seeds=(1, 2, 3), time_limit=20),
    "full": Profile(modes=ALL, seeds=(21, 31, 41), time_limit=48 * 60, checkpoint_every=50_000),
    # In one mode: the fastest that the machine can run.
    "learning": Profile(modes=(), seeds=None, time_limit=48 * 60, checkpoint_every=50_000),
    "check": Profile(modes=(), seeds=(1, 2, 3), time_limit=60),
}


LEANRL_PYTHON = ROOT / ".venv-leanrl" / "bin" / "python"  # with requirements/leanrl.txt
# The arguments that name environments, by the actions of the scripts that they are of.
OF_ACTIONS = {"continuous": "env_ids", "discrete": "discrete_env_ids", "atari": "atari_env_ids"}
OF_ACTIONS |= {"on device": "device_env_ids"}
# Arguments of the scripts that a sweep sets itself.
OWN = ("env-id", "seed", "total-timesteps", "checkpoint-every", "resume", "evaluate")
OWN += ("compile", "cudagraphs", "cuda")


@dataclass
class Args:
    profile: Literal[*PROFILES] = "quick"
    """steps, and defaults of modes, seeds, environments and time limit"""
    scripts: tuple[Literal[*COLLECTION], ...] = tuple(COLLECTION)
    """eager scripts; the other modes run their siblings"""
    modes: tuple[Literal[*MODES], ...] | None = None
    """eager, twin (no flag), compile, cudagraphs, both, tf32 (both with --precision tf32), bfloat16 (compile)
    and bfloat16_both; with --peers also cleanrl, sb3, sbx, rltools; with --leanrl also leanrl, leanrl_compile
    and leanrl_both"""
    seeds: tuple[int, ...] | None = None
    """seeds, each a round of all that is compared"""
    env_ids: tuple[str, ...] | None = None
    """environments of the continuous scripts; HalfCheetah-v4 or, of FastTD3 and FastSAC, CheetahRun-v1; in
    the profile learning more"""
    atari_env_ids: tuple[str, ...] | None = None
    """environments of the Atari scripts; Breakout-v5, in the profile learning Pong-v5, too"""
    device_env_ids: tuple[str, ...] | None = None
    """environments on the device; Pendulum-v1, in the profile learning a swing-up, too"""
    discrete_env_ids: tuple[str, ...] | None = None
    """environments of PPO, PQN and DQN for discrete actions; CartPole-v1, in the profile learning more"""
    total_timesteps: int | None = None
    """agent steps of a run, each script's own number by default"""
    checkpoint_every: int | None = None
    """agent steps between two checkpoints, from which a run goes on; in full and learning 50000"""
    options: dict[str, str] = field(default_factory=dict)
    """further arguments of the scripts, such as: num-envs 64 gamma 0.9; a flag has the value "" """
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt (./run.sh peers gives it)"""
    leanrl: Path | None = None
    """a clone of the original LeanRL, which runs with .venv-leanrl/bin/python (./run.sh peers makes it)"""
    cleanrl: Path | None = None
    """a clone of CleanRL, for the scripts that its package does not have: PQN's, Rainbow's, and PPO with an
    LSTM for Atari"""
    folder: Path | None = None
    """the sweep's folder, by default sweeps/<profile>-<commit>, with --options where given"""
    workers: int | None = None
    """runs at a time, each with its share of the cores and a GPU; 1, in the profiles learning and check one a
    GPU or, without, a core (on Slurm 1)"""
    runs_per_gpu: int = 1
    """runs at a time on each GPU of --workers: a small network leaves one idle"""
    attempts: int = 2
    """how often a run that fails is tried"""
    time_limit: float | None = None
    """minutes after which a run counts as hanging; 10 in quick, 20 in speed, 60 in check, else two days"""
    cluster: Literal["local", "slurm"] = "local"
    """where runs are done: on slurm they are one array of jobs"""
    partition: str | None = None
    """the Slurm partition"""
    gpus_per_job: int = 0
    """GPUs that a Slurm job asks for"""
    cores_per_job: int = 2
    """cores that a Slurm job asks for"""
    slurm_options: dict[str, str] = field(default_factory=dict)
    """further options of sbatch, such as: account NAME exclusive true"""


def shortened(name: str, most: int) -> str:
    """A name of at most so many characters: a folder's has 255 bytes at most, and --env-kwargs are long."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return name if len(name) <= most else f"{name[: most - 20]}-{digest}"


@dataclass(frozen=True)
class Run:
    """One run of the selection. `name` tells it from all others of a sweep."""

    algorithm: str
    mode: str
    env_id: str
    seed: int
    steps: int
    learning_starts: int | None
    checkpoint_every: int | None = None
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        parts = [self.algorithm, self.mode, self.env_id, str(self.steps), *map("=".join, self.options)]
        return f"{shortened('-'.join(parts).replace('/', '_'), 200)}-seed{self.seed}"

    def command(self, args: Args) -> list[str]:
        """The command that does it, of a library with its interpreter or a clone of it."""
        values = {"env-id": self.env_id, "seed": self.seed, "total-timesteps": self.steps}
        values |= {"learning-starts": self.learning_starts, "checkpoint-every": self.checkpoint_every}
        given = {name: value for name, value in values.items() if value is not None} | dict(self.options)
        options = [f"--{name}={value}".removesuffix("=") for name, value in given.items()]
        entry, mode, programs = COLLECTION[self.algorithm], MODES[self.mode], ROOT / "benchmark" / "peers"
        if self.mode in LIBRARIES and entry.one_thread:
            options.append("--threads=1")  # as in CleanRL's own benchmark
        if self.mode in ORIGINAL:
            what = [programs / "original.py", args.leanrl.absolute(), f"{entry.leanrl}{mode.suffix}"]
            return list(map(str, [LEANRL_PYTHON, *what, *mode.flags, *options]))
        if self.mode in PEERS:
            program, *library = mode.program
            clone = self.mode == "cleanrl" and not entry.in_cleanrl_package
            options += [f"--cleanrl={args.cleanrl.absolute()}"] if clone else []
            what = [args.peers.absolute(), programs / program, *library, self.algorithm]
            return list(map(str, [*what, *options]))
        script = LEANRL / f"{self.algorithm}{mode.suffix}.py"
        return [sys.executable, str(script), *mode.flags, *options]


def further_options(args: Args) -> dict[str, str]:
    """The arguments of --options, named as the scripts name them, in one order."""
    return {name.replace("_", "-"): args.options[name] for name in sorted(args.options)}


def option(name: str) -> str:
    """An argument of the sweep as one types it."""
    return f"--{name.replace('_', '-')}"


def check_args(args: Args) -> None:
    """Refuse argument values that cannot work."""
    from_one = ("workers", "runs_per_gpu", "attempts", "total_timesteps", "checkpoint_every")
    least = dict.fromkeys(from_one, 1) | {"time_limit": 0.01, "gpus_per_job": 0, "cores_per_job": 1}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not (low <= value < float("inf")):
            refuse(f"{option(name)} takes a number from {low}, got {value}")
    if args.runs_per_gpu > 1 and args.cluster == "slurm":
        refuse("--runs-per-gpu takes 1 on Slurm, which gives each run GPUs of its own")
    kinds = {COLLECTION[script].actions for script in args.scripts}
    for kind, name in OF_ACTIONS.items():
        if getattr(args, name) and kind not in kinds:
            own = " or ".join(option(OF_ACTIONS[kind]) for kind in sorted(kinds))
            refuse(f"{option(name)} fits none of --scripts, which take {own}")
    flags = {flag.removeprefix("--") for mode in args.modes or () for flag in MODES[mode].flags}
    for name in further_options(args):
        if name.removeprefix("no-") in {*OWN, *flags}:
            refuse(f"--options does not take {name}, which the sweep sets: see its own options and modes")
    if args.profile == "check":
        for name in (*OF_ACTIONS.values(), "total_timesteps", "options"):
            if getattr(args, name):
                refuse(f"{option(name)} does not go with --profile check, whose runs are fixed")
        if args.peers or args.leanrl:
            refuse("peers do not go with --profile check, which is of our scripts")
    check_libraries(args)


def check_libraries(args: Args) -> None:
    """Refuse what is no interpreter or clone of a library, and modes that need one which is not given."""
    check_interpreter("peers", args.peers)
    modes = set(args.modes or ())
    if modes & {*PEERS} and not args.peers:
        refuse(f"--modes {', '.join(PEERS)} need --peers: use ./run.sh peers")
    if modes & {*ORIGINAL} and not args.leanrl:
        refuse(f"--modes {', '.join(ORIGINAL)} need --leanrl: use ./run.sh peers --leanrl CLONE")
    if args.leanrl and not (args.leanrl / "leanrl" / "sac_continuous_action.py").exists():
        refuse(f"--leanrl takes a clone of the original LeanRL, got {args.leanrl}")
    if args.cleanrl and not (args.cleanrl / "cleanrl" / "pqn.py").exists():
        refuse(f"--cleanrl takes a clone of CleanRL, got {args.cleanrl}")
    if args.leanrl and not LEANRL_PYTHON.exists():
        refuse(f"--leanrl needs {LEANRL_PYTHON}: use ./run.sh peers")


def visible_gpus(args: Args) -> list[str]:
    """The GPUs that runs may use, as CUDA_VISIBLE_DEVICES names them; Slurm names those of a job."""
    if args.cluster == "slurm":
        return list(map(str, range(args.gpus_per_job)))
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which NVML numbers them
    import torch  # takes two seconds, which a bad argument need not

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else list(map(str, range(count)))


def obstacle(mode: str, script: str, args: Args, gpus: list[str]) -> str | None:
    """Why a mode of a script cannot be run here; None if it can, or where the library does not do it."""
    if mode == "cleanrl" and not (COLLECTION[script].in_cleanrl_package or args.cleanrl):
        return f"needs --cleanrl for {script}, which its package does not have"
    if mode in LIBRARIES and args.options:
        return "does not take --options, which are arguments of our scripts"
    if mode in CUDA_MODES and not gpus:
        slurm = args.cluster == "slurm"
        return f"needs CUDA{': --gpus-per-job asks for GPUs' if slurm else ', and there is no device'}"
    if "--compile" in MODES[mode].flags and not gpus and args.cluster == "local":
        compilers = (os.environ.get("CXX") or "g++", "clang++")
        return None if any(map(shutil.which, compilers)) else "needs a C++ compiler such as g++"
    return None


def tasks(args: Args, algorithm: Algorithm) -> list[tuple[str, int, tuple[tuple[str, str], ...]]]:
    """The environments of a script, each with the agent steps of a run and its further arguments."""
    if args.profile == "check":
        return [(check.env_id, check.steps, check.options) for check in algorithm.checks]
    learning, kind = args.profile == "learning", algorithm.actions
    steps = args.total_timesteps or getattr(algorithm, "full" if learning else args.profile)
    env_ids = getattr(args, OF_ACTIONS[kind])
    if env_ids is None:
        env_ids = algorithm.env_ids if learning else (algorithm.env_id,)
    short = algorithm.short if args.profile in ("quick", "speed") else ()
    options = tuple((dict(short) | further_options(args)).items())
    return [(env_id, steps, options) for env_id in env_ids]


def select(args: Args, gpus: list[str]) -> list[Run]:
    """The runs asked for, in the order of their start: all that is compared, seed after seed."""
    profile = PROFILES[args.profile]
    modes = profile.modes or (("both",) if gpus else ("compile",)) if args.modes is None else args.modes
    if args.modes is None:
        modes = (*modes, *(PEERS if args.peers else ()), *(ORIGINAL if args.leanrl else ()))
    rounds: dict[int, list[Run]] = {}
    skipped = set()
    for script in args.scripts:
        algorithm = COLLECTION[script]
        fit = []
        for mode in modes:
            if reason := obstacle(mode, script, args, gpus):
                skipped.add(f"skipped: {mode} {reason}")
            elif mode not in LIBRARIES or getattr(algorithm, MODES[mode].library):
                fit.append(mode)
        for seed in args.seeds if args.seeds is not None else profile.seeds or algorithm.seeds:
            for env_id, steps, options in tasks(args, algorithm):
                learning_starts = algorithm.learning_starts
                if learning_starts is not None and profile.checkpoint_every is None:
                    learning_starts = min(1000, steps // 3)
                for mode in fit:
                    every = args.checkpoint_every or profile.checkpoint_every
                    every = None if mode in LIBRARIES else every  # which cannot go on
                    run = Run(script, mode, env_id, seed, steps, learning_starts, every, options)
                    rounds.setdefault(seed, []).append(run)
    for line in sorted(skipped):
        print(line, file=sys.stderr)
    runs = [run for seed in rounds.values() for run in seed]
    if not runs:
        refuse("nothing is selected: --scripts, --modes, --seeds and environments leave nothing to run here")
    return list(dict.fromkeys(runs))
