"""Train SAC or TD3 with RLtools (C++) and print a summary like those of the scripts.

    python benchmark/peers/rl_tools.py SCRIPT --env-id=ID --seed=N --total-timesteps=N [--learning-starts=N]
        [--batch-size=N] [--width=N]

Same task and networks, same batches and number of gradient steps as the scripts have by default, or with the
sizes that are given; everything else is the library's default. RLtools compiles its loop for these numbers,
the steps included, at first use. It multiplies matrices by MKL, on OMP_NUM_THREADS threads, by default one
for each core. Environments are those of Gymnasium. SPS counts from the first step that learns.
A program named rltools.py would import itself, hence the name.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import peer
import rltools
from filelock import FileLock

from benchmark.collection import COLLECTION


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=[name for name, entry in COLLECTION.items() if entry.rltools])
    for name, default in (("--learning-starts", 0), ("--batch-size", 256), ("--width", 256)):
        parser.add_argument(name, type=int, default=default)
    args, _ = peer.parse(parser)
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    learning_starts = max(args.learning_starts, args.batch_size)
    sizes = {f"{network}_HIDDEN_DIM": args.width for network in ("ACTOR", "CRITIC")}
    sizes |= {f"{network}_BATCH_SIZE": args.batch_size for network in ("ACTOR", "CRITIC")}
    sizes |= {"N_WARMUP_STEPS": learning_starts, "STEP_LIMIT": args.total_timesteps}
    algorithm = COLLECTION[args.script].rltools
    # What it compiled for other numbers stays in its cache.
    name = re.sub(r"\W", "_", "_".join(map(str, [algorithm, *sizes.values(), args.env_id])))

    def make_env() -> gym.Env:
        return gym.wrappers.RescaleAction(gym.make(args.env_id), -1, 1)

    lock = FileLock(Path(tempfile.gettempdir()) / f"rltools_{name}.lock")  # compile once, not at once
    with redirect_stdout(sys.stderr), lock:  # it tells which library for matrices it finds
        train = getattr(rltools, algorithm)
        module = train(make_env, interface_name=name, enable_evaluation=False, **sizes)
    state = module.State(args.seed)
    for _ in range(learning_starts + 1):
        state.step()
    start = time.perf_counter()
    for _ in range(learning_starts + 1, args.total_timesteps):
        state.step()
    timed, elapsed = args.total_timesteps - learning_starts - 1, time.perf_counter() - start
    sps = timed / elapsed if timed > 0 else None
    peer.tell("rltools", args, sps, "cpu", blas=f"MKL {version('mkl')}")


if __name__ == "__main__":
    main()
