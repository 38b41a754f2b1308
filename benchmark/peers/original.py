"""Run a script of the original LeanRL, as it is, and print a summary like those of ours.

    python benchmark/peers/original.py CHECKOUT SCRIPT --env-id=ID --seed=N --total-timesteps=N [--threads=N]
        [...]

CHECKOUT is a clone of its repository. --threads are PyTorch's. Further arguments, such as --compile, are the
script's own. It runs with requirements/leanrl.txt: libraries of its time, and today's PyTorch. What it would
send to Weights & Biases, which is stood in for, gives the speed: from the first "speed" that a script logs to
the last.
"""

import argparse
import runpy
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import peer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("script")
    args, more = peer.parse(parser, more=True)
    times = []

    def note_time(values: dict, step: int) -> None:
        if "speed" in values:
            times.append((step, time.perf_counter()))

    wandb = sys.modules["wandb"] = ModuleType("wandb")
    wandb.__spec__, wandb.init, wandb.log = ModuleSpec("wandb", None), lambda **_: None, note_time
    path = args.checkout / "leanrl" / f"{args.script}.py"
    sys.argv = peer.command_line(path, args, more)
    script = runpy.run_path(str(path), run_name="__main__")
    git = ["git", "-C", args.checkout, "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    peer.tell("leanrl", args, peer.speed(times), str(script["device"]), leanrl_commit=commit)


if __name__ == "__main__":
    main()
