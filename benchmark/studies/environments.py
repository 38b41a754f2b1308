"""Steps/s of PPO by number of environments: stepped in turn, by EnvPool on all cores, and by other libraries.

    ./run.sh python -m benchmark.studies.environments [--rounds R] [--peers PYTHON] [--output FILE]

Times the twins with --compile on the CPU, with Gymnasium's environments and with pool.py's, and, where there
is an interpreter with requirements/peers.txt, CleanRL, Stable-Baselines3 and SBX with the same rollouts,
minibatches and epochs. Everything once, then again, R times. Nothing else may run meanwhile. FILE is
written anew, with a line a run. docs/benchmark.md shows benchmark/results/environments.jsonl.

Exit status: 0 all runs are timed, 1 some failed, 2 a bad argument.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from benchmark import LEANRL, records
from benchmark.collection import COLLECTION
from benchmark.modes import MODES
from benchmark.studies.timing import Args, Point, of_library, options, time_runs
from benchmark.tables import by, by_machine, fastest, markdown, ratio, speeds
from benchmark.terminal import check_interpreter

# Steps of a rollout and rows of a minibatch with n environments: of continuous actions the defaults with one
# and what docs/ppo_continuous.md advises for 64, else the defaults' minibatches.
SIZES = {
    "ppo_continuous_action": lambda n: (max(32, 2048 // n), max(64, 4 * n)),
    "ppo": lambda n: (128, 32 * n),
}
NUM_ENVS = {"ppo_continuous_action": (1, 4, 16, 64, 256), "ppo": (4, 64)}
EPOCHS = {"ppo_continuous_action": 10, "ppo": 4}
PEERS = ("cleanrl", "sb3", "sbx")
STEPS = {"gymnasium": 60_000, "envpool": 120_000} | dict.fromkeys(PEERS, 10_000)
COLUMNS = {mode: MODES[mode].label for mode in PEERS} | {"gymnasium": "LeanRL", "envpool": "LeanRL, EnvPool"}


class Line(records.Timing):
    """A run with so many environments."""

    script: str
    env_id: str
    mode: Literal[*COLUMNS]
    num_envs: int
    seed: int
    sps: float


check = records.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Steps/s by number of environments and what steps them, and EnvPool's beside the best other."""
    rows = []
    for (script, env_id, num_envs), group in by(lines, "script", "env_id", "num_envs").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        beside = ratio(modes.get("envpool"), fastest(modes, PEERS))
        cells = [*(speeds(modes.get(mode)) for mode in COLUMNS), beside]
        rows.append([f"{script}, {env_id}, {num_envs}", *cells])
    header = ["steps/s by number of environments", *COLUMNS.values(), "EnvPool x the best other library"]
    return markdown(header, rows)


def command(script: str, mode: str, num_envs: int, seed: int, peers: Path | None, folder: Path) -> list:
    """The command of a run of at least twelve rollouts, after two more where sb3_sbx.py leaves those out."""
    num_steps, batch_size = SIZES[script](num_envs)
    rollout, env_id = num_steps * num_envs, COLLECTION[script].env_id
    rollouts = max(12, STEPS[mode] // rollout) + (2 if mode in ("sb3", "sbx") else 0)
    sizes = {"env-id": f"pool:EnvPool/{env_id}" if mode == "envpool" else env_id, "seed": seed}
    sizes |= {"num-envs": num_envs, "num-steps": num_steps, "total-timesteps": rollouts * rollout}
    minibatches = {"num-minibatches": rollout // batch_size, "update-epochs": EPOCHS[script]}
    sizes |= {"batch-size": batch_size} if mode in ("sb3", "sbx") else minibatches
    if mode in PEERS:
        return [*of_library(mode, script, peers), *options(sizes)]
    twin = LEANRL / f"{script}_torchcompile.py"
    return [sys.executable, twin, "--compile", "--no-cuda", *options(sizes)]


def points(args: Args) -> Iterator[Point]:
    """All that is to be timed, in rounds."""
    for seed in range(1, args.rounds + 1):
        for script in SIZES:
            for num_envs in NUM_ENVS[script]:
                for mode in STEPS if args.peers else ("gymnasium", "envpool"):
                    about = {"script": script, "env_id": COLLECTION[script].env_id, "mode": mode}
                    about |= {"num_envs": num_envs, "seed": seed}
                    yield Point(about, partial(command, script, mode, num_envs, seed, args.peers))


def main() -> int:
    args = tyro.cli(Args)
    check_interpreter("peers", args.peers)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the libraries, too, run on the CPU
    lines, status = time_runs(points(args), args.output, check)
    print(table(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
