"""Steps/s of PPO by number of environments: stepped in turn, by EnvPool on all cores, and by other libraries.

    ./run.sh python -m benchmark.studies.environments [--scripts NAME ...] [--num-envs N ...] [--rounds R]
        [--peers PYTHON] [--output FILE]

Times the twins with --compile on the CPU, with Gymnasium's environments and with pool.py's, and, where there
is an interpreter with requirements/peers.txt, CleanRL, Stable-Baselines3 and SBX with the same rollouts,
minibatches and epochs. Everything once, then again, R times. Nothing else may run meanwhile. FILE gets
a line a run. docs/benchmark.md shows benchmark/results/environments.jsonl.

Exit status: 0 all runs are timed, 1 some failed, 2 a bad argument.
"""

import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmark import LEANRL, RESULTS, ROOT
from benchmark.collection import COLLECTION
from benchmark.machine import provenance, run_for_summary
from benchmark.modes import MODES
from benchmark.report import results
from benchmark.report.tables import by, by_machine, markdown, ratio, spread
from benchmark.terminal import check_interpreter, check_names, lines_of_output

# Steps of a rollout and rows of a minibatch with n environments: of continuous actions the defaults with one
# and what docs/ppo_continuous.md advises for 64, else the defaults' minibatches.
SIZES = {
    "ppo_continuous_action": lambda n: (max(32, 2048 // n), max(64, 4 * n)),
    "ppo": lambda n: (128, 32 * n),
}
NUM_ENVS = {"ppo_continuous_action": (1, 4, 16, 64, 256), "ppo": (4, 64)}
EPOCHS = {"ppo_continuous_action": 10, "ppo": 4}
STEPS = {"gymnasium": 60_000, "envpool": 120_000, "cleanrl": 10_000, "sb3": 10_000, "sbx": 10_000}


# Columns of the table.
PEERS = ("cleanrl", "sb3", "sbx")
BACKENDS = {mode: MODES[mode].label for mode in PEERS}
BACKENDS |= {"gymnasium": "LeanRL", "envpool": "LeanRL, EnvPool"}


class Line(results.Timing):
    """A run with so many environments."""

    script: str
    env_id: str
    mode: Literal[*BACKENDS]
    num_envs: int
    seed: int
    sps: float


check = results.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Steps/s by number of environments and what steps them, and EnvPool's beside the best other."""
    rows = []
    for (script, env_id, num_envs), group in by(lines, "script", "env_id", "num_envs").items():
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        speeds = [spread([line["sps"] for line in modes[mode]]) if mode in modes else "" for mode in BACKENDS]
        others = [modes[mode] for mode in PEERS if mode in modes]
        best = max(others, key=lambda runs: statistics.median(line["sps"] for line in runs), default=None)
        beside = [ratio(modes["envpool"], best) if best and "envpool" in modes else ""]
        rows.append([f"{script}, {env_id}, {num_envs}", *speeds, *beside])
    header = ["steps/s by number of environments", *BACKENDS.values(), "EnvPool x the best other library"]
    return markdown(header, rows)


def published_runs(num_envs: int) -> list[dict]:
    """The published runs with so many environments, as lines of a sweep.

    The others' are there twice: beside ours of Gymnasium, and beside ours of EnvPool.
    """
    path, runs = RESULTS / "environments.jsonl", []
    lines = results.read(path, check) if path.exists() else []
    for backend, kind in (("gymnasium", "environments"), ("envpool", "environments (ours: EnvPool's)")):
        for line in lines:
            if line["num_envs"] == num_envs and line["mode"] in (*PEERS, backend):
                mode = "compile" if line["mode"] == backend else line["mode"]
                about = {"algorithm": line["script"], "env_id": f"{line['env_id']}, {num_envs} {kind}"}
                runs.append(line | about | {"mode": mode})
    return runs


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(SIZES)
    """eager scripts; their twins are timed"""
    num_envs: tuple[int, ...] | None = None
    """numbers of environments, each script's own by default"""
    rounds: int = 3
    """how often each is timed"""
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt"""
    output: Path | None = None
    """a file of results to write anew"""


def command(script: str, mode: str, num_envs: int, seed: int, peers: Path | None) -> list[str]:
    """The command of a run of at least twelve rollouts, after two more where sb3_sbx.py leaves those out."""
    num_steps, batch_size = SIZES[script](num_envs)
    rollout = num_steps * num_envs
    rollouts = max(12, STEPS[mode] // rollout) + (2 if mode in ("sb3", "sbx") else 0)
    sizes = {"num-envs": num_envs, "num-steps": num_steps, "total-timesteps": rollouts * rollout}
    sizes |= {"env-id": COLLECTION[script].env_id, "seed": seed}
    minibatches = {"num-minibatches": rollout // batch_size, "update-epochs": EPOCHS[script]}
    if mode in ("gymnasium", "envpool"):
        program = [sys.executable, LEANRL / f"{script}_torchcompile.py", "--compile", "--no-cuda"]
        sizes |= minibatches
        sizes["env-id"] = f"pool:EnvPool/{sizes['env-id']}" if mode == "envpool" else sizes["env-id"]
    elif mode == "cleanrl":
        program = [peers.absolute(), ROOT / "benchmark" / "peers" / "cleanrl.py", script]
        sizes |= minibatches
    else:
        program = [peers.absolute(), ROOT / "benchmark" / "peers" / "sb3_sbx.py", mode, script]
        sizes |= {"batch-size": batch_size}
    return [*map(str, program), *(f"--{name}={value}" for name, value in sizes.items())]


def measure(script: str, mode: str, num_envs: int, seed: int, peers: Path | None) -> dict:
    """The line of a run. Raises RuntimeError where it does not end well."""
    run = command(script, mode, num_envs, seed, peers)
    with tempfile.TemporaryDirectory() as folder:
        summary, _ = run_for_summary(run, Path(folder))
    line = {"format": results.FORMAT, "status": "ok", "script": script, "env_id": COLLECTION[script].env_id}
    line |= {"mode": mode, "num_envs": num_envs, "seed": seed, "sps": summary["sps"]}
    return line | provenance(tuple(run[:2]), dict(os.environ), None)


def main() -> int:
    args = tyro.cli(Args)
    check_names("scripts", args.scripts, SIZES)
    check_interpreter("peers", args.peers)
    lines_of_output(args.output, check)
    lines, failed = [], False
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the libraries, too, run on the CPU
    for seed in range(1, args.rounds + 1):
        for script in args.scripts:
            for num_envs in args.num_envs or NUM_ENVS[script]:
                for mode in list(STEPS) if args.peers else ["gymnasium", "envpool"]:
                    try:
                        lines.append(measure(script, mode, num_envs, seed, args.peers))
                    except RuntimeError as error:
                        print(error, file=sys.stderr)
                        failed = True
                        continue
                    print(f"{script} {mode} {num_envs}: {lines[-1]['sps']:.0f} steps/s", flush=True)
                    if args.output:
                        results.replace(args.output, lines, check)
    print(table(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
