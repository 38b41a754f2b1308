"""What the tests share: the names of the scripts, and ways to load one, to run one here and to run one as a command."""

import os
import runpy
import subprocess
import sys
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

# Two threads that meet after each tiny operation are fifty times slower where another process keeps the cores busy.
torch.set_num_threads(1)

TESTS = Path(__file__).parent
ROOT = TESTS.parent
LEANRL = ROOT / "leanrl"
SCRIPTS = sorted(path.stem for path in LEANRL.glob("*.py") if not path.stem.endswith("_torchcompile"))
TWINS = [f"{name}_torchcompile" for name in SCRIPTS]


@cache
def load(name: str) -> dict:
    """The functions and classes of a script, without running it."""
    return runpy.run_path(str(LEANRL / f"{name}.py"), run_name="script")


def having(function: str) -> list[str]:
    """The eager scripts that define a function, each with its twin, which has to define it as well."""
    return [name for pair in zip(SCRIPTS, TWINS, strict=True) if function in load(pair[0]) for name in pair]


def run(name: str, *args, cuda: bool = False) -> dict:
    """Train in this process, in a temporary directory, on the CPU unless `cuda`; returns all globals of the script.

    A script that exits with a status other than 0 raises SystemExit here.
    """
    path = str(LEANRL / f"{name}.py")
    argv = [path, *map(str, args), "--cuda" if cuda else "--no-cuda"]
    with TemporaryDirectory() as directory, chdir(directory), patch.object(sys, "argv", argv):
        return runpy.run_path(path, run_name="__main__")


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


def numbers(globals_: dict) -> dict[str, torch.Tensor]:
    """What a run computed: its replay buffer, latest losses and parameters by name, as detached tensors."""
    modules = {name: value for name, value in globals_.items() if isinstance(value, torch.nn.Module)}
    found = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    found |= {f"losses.{name}": value for name, value in globals_["losses"].items()}
    found |= {name: globals_[name].detach() for name in ("buffer", "log_alpha") if name in globals_}
    return found


def assert_same_numbers(first: dict, second: dict, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """Check that two runs computed the same, up to rounding unless rtol and atol are 0: episodes and all `numbers`."""
    assert [first[name] for name in ("global_step", "updates")] == [second[name] for name in ("global_step", "updates")]
    assert [(step, length) for step, _, length in first["episodes"]] == [
        (step, length) for step, _, length in second["episodes"]
    ]
    torch.testing.assert_close(numbers(second), numbers(first), rtol=rtol, atol=atol)
