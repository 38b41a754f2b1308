"""What the tests share: the names of the scripts, ways to load and to run one, and the recursion for advantages."""

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch._inductor.config
from envs import ScriptedGames
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Two threads that meet after each tiny operation are fifty times slower where another process keeps the cores busy.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the scripts that run as commands

TESTS = Path(__file__).parent
ROOT = TESTS.parent
LEANRL = ROOT / "leanrl"
SCRIPTS = sorted(path.stem for path in LEANRL.glob("*.py") if not path.stem.endswith(("_torchcompile", "_seeds")))
TWINS = [f"{name}_torchcompile" for name in SCRIPTS]
SEEDS = sorted(path.stem for path in LEANRL.glob("*_seeds.py"))
NOT_ATARI = [name for name in SCRIPTS if "atari" not in name]


get_handler, set_handler = signal.getsignal, signal.signal  # a test may put others in their place


@cache
def load(name: str) -> dict:
    """The functions and classes of a script, without running it."""
    return runpy.run_path(str(LEANRL / f"{name}.py"), run_name="script")


def having(*functions: str) -> list[str]:
    """The eager scripts that define all of these functions, each with its twin, which has to define them as well."""
    return [name for pair in zip(SCRIPTS, TWINS, strict=True) if load(pair[0]).keys() >= {*functions} for name in pair]


OFF_POLICY, ON_POLICY, DISCRETE = having("sample_batch"), having("gae"), having("epsilon_greedy")
ACTOR_CRITIC = [name for name in OFF_POLICY if name not in DISCRETE]
# Arguments for a run of some 300 steps that performs updates, one a step if it is off-policy.
SHORT = dict.fromkeys(OFF_POLICY, ("--learning-starts", "100", "--total-timesteps", "300"))
EACH_STEP = ("--train-frequency", "1", "--target-network-frequency", "3")
SHORT |= {name: (*EACH_STEP, *SHORT[name]) for name in DISCRETE}
ROLLOUTS = ("--num-envs", "2", "--num-steps", "50", "--num-minibatches", "5", "--update-epochs", "2")
SHORT |= dict.fromkeys(ON_POLICY, (*ROLLOUTS, "--total-timesteps", "300"))


def run(name: str, *args, cuda: bool = False, directory: Path | None = None) -> dict:
    """Train in this process, on the CPU unless `cuda`; returns all globals of the script.

    It runs in the directory, by default a temporary one. Signals mean afterwards what they did before.

    A script that exits with a status other than 0 raises SystemExit here.
    """
    path = str(LEANRL / f"{name}.py")
    argv = [path, *map(str, args), "--cuda" if cuda else "--no-cuda"]
    handlers = {number: get_handler(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with TemporaryDirectory() as temporary, chdir(directory or temporary), patch.object(sys, "argv", argv):
        try:
            return runpy.run_path(path, run_name="__main__")
        finally:
            for number, handler in handlers.items():
                set_handler(number, handler)


def world(name: str, kind: str) -> tuple[str, str]:
    """The argument for an environment of tests/envs.py, with the actions that a script gives."""
    return "--env-id", f"envs:{kind}{'Choices' if name in DISCRETE else ''}-v0"


def scripted_world(name: str) -> tuple[str, str]:
    """The argument for the scripted world of a script; the Atari script's needs ScriptedGames in place of EnvPool, too."""
    return ("--env-id", "Breakout-v5") if "atari" in name else world(name, "Scripted")


def play(name: str, *args, **options) -> dict:
    """Train like `run` in the scripted world of the script: envs.ScriptedGames in place of EnvPool, or else envs.Scripted."""
    with patch("envpool.make", ScriptedGames):
        return run(name, *scripted_world(name), *args, **options)


def profile(name: str, *args, directory: Path, cuda: bool = False) -> subprocess.CompletedProcess:
    """Profile a script in its scripted world as a command, with the trace in directory/trace.json."""
    world = "import envpool, envs, profile_run; envpool.make = envs.ScriptedGames; profile_run.main()"
    options = ("--trace", "trace.json", *scripted_world(name), "--cuda" if cuda else "--no-cuda")
    command = [sys.executable, "-c", world, name, *options, *map(str, args)]
    variables = environment(PYTHONPATH=f"{TESTS}{os.pathsep}{ROOT / 'benchmark'}")
    return subprocess.run(command, env=variables, cwd=directory, capture_output=True, text=True)


def profile_shares(done: subprocess.CompletedProcess) -> list[dict[str, float]]:
    """The tables that a profile has printed: percents of a step by row."""
    assert done.returncode == 0, done.stderr
    *tables, trace = done.stdout.split("\n\n")
    assert trace.startswith("trace: ")
    rows = [[re.split(r"\s{2,}", line) for line in table.splitlines()[1:]] for table in tables]
    return [{name: float(share.rstrip("%")) for name, _, share, *_ in table} for table in rows]


@contextmanager
def changed(name: str, passage: str, other: str) -> Iterator[None]:
    """Have `run` take this script with another text in place of a passage."""
    text = (LEANRL / f"{name}.py").read_text()
    assert passage in text
    with TemporaryDirectory() as folder, patch.dict(globals(), LEANRL=Path(folder)):
        (Path(folder) / f"{name}.py").write_text(text.replace(passage, other))
        yield


def first_actions(result: dict) -> torch.Tensor:
    """The actions of the first ten steps in the scripted world, which rounding in gradient steps has hardly changed."""
    envs = result["envs"]
    given = [env.unwrapped.actions[:10] for env in envs.envs] if hasattr(envs, "envs") else envs.actions[:10]
    return torch.tensor(np.array(given))


def resume_with_warm_up(script: str, *flags, directory: Path, **options) -> None:
    """Train the eager script and go on with the twin and these flags.

    Checks that compiling, warm-up and capture have left what was loaded, that it learns on, and that it draws the numbers
    that the eager script draws when that goes on.
    """
    before = play(script, *SHORT[script], "--save-model", directory=directory, **options)
    [path] = directory.glob("runs/*/*.pt")
    saved = torch.load(path, map_location="cpu", weights_only=True)["state"]
    loaded, seeds, seed_all = [], [], torch.manual_seed

    def look(seed: int) -> torch.Generator:
        """In place of torch.manual_seed, which a script calls when it starts and right before the first step."""
        names = sys._getframe(1).f_globals
        if "tensors" in names:
            tensors = names["tensors"] | ({"buffer": names["buffer"][: names["size"]]} if "buffer" in saved else {})
            loaded.append({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
            seeds.append(seed)
        return seed_all(seed)

    def go_on(name: str, *args) -> dict:
        steps = (*SHORT[script][:-1], str(2 * int(SHORT[script][-1])))
        with patch("torch.manual_seed", look), torch._inductor.config.patch(fallback_random=True):
            return play(name, *steps, *args, "--resume", path, directory=directory, **options)

    eager = go_on(script, *(flag for flag in flags if flag not in ("--compile", "--cudagraphs")))
    after = go_on(f"{script}_torchcompile", *flags)
    torch.testing.assert_close(loaded, [saved, saved], rtol=0, atol=0)
    assert seeds[0] == seeds[1]
    torch.testing.assert_close(first_actions(after), first_actions(eager), rtol=1e-3, atol=1e-3)
    assert after["updates"] > before["updates"]
    assert all(torch.isfinite(loss).all() for loss in after["losses"].values())


@cache
def rendering() -> dict[str, str]:
    """The variable for MuJoCo to render without a display; skips the test where it does not."""
    probe = "import gymnasium as gym; e = gym.make('InvertedPendulum-v4', render_mode='rgb_array'); e.reset(); e.render()"
    variable = {"MUJOCO_GL": "egl"}
    if subprocess.run([sys.executable, "-c", probe], env=os.environ | variable, capture_output=True).returncode:
        pytest.skip("MUJOCO_GL=egl does not render here")
    return variable


def make_commit(folder: Path) -> str:
    """Make a folder a git checkout with one commit of the files in it, and return that."""

    def git(*command: str) -> str:
        options = {"check": True, "capture_output": True, "text": True}
        return subprocess.run(["git", "-C", folder, *command], **options).stdout.strip()

    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--allow-empty", "--message", "first")
    return git("rev-parse", "HEAD")


def environment(**variables: str) -> dict[str, str]:
    """The variables for a script run as a command, which then has the environments of tests/envs.py, and more variables."""
    return os.environ | {"PYTHONPATH": str(TESTS)} | variables


def cli(name: str, *args, env: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess:
    """Run a script as a command with just these arguments, in a temporary directory; its output is text.

    env holds additional variables, options go to subprocess.run.
    """
    command = [sys.executable, str(LEANRL / f"{name}.py"), *map(str, args)]
    with TemporaryDirectory() as directory:
        options = {"cwd": directory, "capture_output": True, "text": True} | options
        return subprocess.run(command, env=environment(**env or {}), **options)


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of the runs in a folder, by their steps."""
    return sorted((path for path in directory.glob("runs/*/*.pt") if path.stem.isdecimal()), key=lambda path: int(path.stem))


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of all that a run logged, by name."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in log.Scalars(name)] for name in log.Tags()["scalars"]}


def start(name: str, directory: Path, *args) -> subprocess.Popen:
    """Start a run as a command."""
    command = [sys.executable, str(LEANRL / f"{name}.py"), "--no-cuda", "--env-id", "envs:Scripted-v0", *args]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    # Of a background job of a shell a child inherits that Ctrl+C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, cwd=directory, **options)


def numbers(globals_: dict) -> dict[str, torch.Tensor]:
    """What a run computed: its buffers, latest losses, and all that a checkpoint has of its networks, as detached tensors."""
    found = {f"losses.{name}": value for name, value in globals_["losses"].items()}
    found |= {name: globals_[name] for name in ("buffer", "batch") if name in globals_}
    return {name: value.detach() for name, value in (found | globals_["tensors"]).items()}


def assert_same_numbers(first: dict, second: dict, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """Check that two runs computed the same, up to rounding unless rtol and atol are 0: episodes and all `numbers`."""
    assert [first[name] for name in ("global_step", "updates")] == [second[name] for name in ("global_step", "updates")]
    assert [(step, length) for step, _, length in first["episodes"]] == [
        (step, length) for step, _, length in second["episodes"]
    ]
    torch.testing.assert_close(numbers(second), numbers(first), rtol=rtol, atol=atol)


def plain_gae(rewards, values, terminated, valid, gamma: float, gae_lambda: float) -> np.ndarray:
    """Advantages (T, n) from nested sequences like the arguments of `gae`, by recursion over the valid rows of an episode."""
    steps, num_envs = np.shape(rewards)
    advantages = np.zeros((steps, num_envs))
    for env in range(num_envs):
        following = 0.0
        for step in reversed(range(steps)):
            if not valid[step][env]:
                following = 0.0  # the next row in this order ends the episode before
                continue
            bootstrap = 0.0 if terminated[step][env] else float(values[step + 1][env])
            delta = float(rewards[step][env]) + gamma * bootstrap - float(values[step][env])
            following = delta + gamma * gae_lambda * following
            advantages[step, env] = following
    return advantages
