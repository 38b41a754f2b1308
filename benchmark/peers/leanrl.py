"""Run a script of the original LeanRL, as it is, and print a summary like those of ours.

    python benchmark/peers/leanrl.py CHECKOUT SCRIPT --env-id=ID --seed=N --total-timesteps=N [--threads=N]
        [...]

CHECKOUT is a clone of its repository. --threads are PyTorch's. Further arguments, such as --compile, are the
script's own. It runs with requirements/leanrl.txt: libraries of its time, and today's PyTorch. What it would
send to Weights & Biases, which is stood in for, gives the speed: from the first "speed" that a script logs to
the last.
"""

import argparse
import json
import runpy
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

START_TIME = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("script")
    parser.add_argument("--env-id", required=True)
    for name in ("--seed", "--total-timesteps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--threads", type=int)
    args, more = parser.parse_known_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    times = []

    def note_time(values: dict, step: int) -> None:
        if "speed" in values:
            times.append((step, time.perf_counter()))

    wandb = sys.modules["wandb"] = ModuleType("wandb")
    wandb.__spec__, wandb.init, wandb.log = ModuleSpec("wandb", None), lambda **_: None, note_time
    given = {"env-id": args.env_id, "seed": args.seed, "total-timesteps": args.total_timesteps}
    path = args.checkout / "leanrl" / f"{args.script}.py"
    sys.argv = [str(path), *(f"--{name}={value}" for name, value in given.items()), *more]
    script = runpy.run_path(str(path), run_name="__main__")
    sps = None  # where a run is too short to tell
    if len(times) > 1:
        (first, start), (last, end) = times[0], times[-1]
        sps = (last - first) / (end - start)
    git = ["git", "-C", args.checkout, "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    summary = {"script": "leanrl", "leanrl_commit": commit}
    summary |= {"env_id": args.env_id, "seed": args.seed, "total_timesteps": args.total_timesteps}
    summary |= {"sps": sps, "startup_seconds": None, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary | {"device": str(script["device"])}))


if __name__ == "__main__":
    main()
