"""A quadruped learns to walk: FastTD3 on Go1JoystickFlatTerrain-v1, first with softer penalties.

    ./run.sh python -m benchmark.studies.go1 FOLDER [--seed S] [--softer-steps N] [--output FILE]

The robot has to follow velocities that it is told. Trains in FOLDER, a new one, stops after each million of
steps, and plays 32 episodes, without noise and with the task's own penalties. When it goes on with these, the
replay buffer still has rewards with softer ones. That takes an hour on one core with AMX, and some 6 GiB of
memory. FILE gets a line for each million, after those that it has. docs/fast_td3.md shows
benchmark/results/go1.jsonl.

Exit status: 0 done, 1 a run failed, 2 a bad argument.
"""

import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmark import LEANRL
from benchmark.machine import provenance, run_for_summary
from benchmark.report import results
from benchmark.report.tables import by, by_machine, markdown
from benchmark.terminal import lines_of_output, refuse

ENV_ID = "Go1JoystickFlatTerrain-v1"
# Of the task's penalties for feet that do not rise, for a body that tilts and for one that sways, these are a
# quarter, a fifth and two fifths. Rewards below zero count as zero, which hides what a first step is worth.
SOFTER = {"feet_clearance_scale": -0.5, "orientation_scale": -1.0, "ang_vel_xy_scale": -0.02}
MILLION = 1_000_000
STEPS = 6 * MILLION
# What the task rewards adds up to 0.042 a step, times 1 / (1 - gamma) 4.2.
OPTIONS = {"gamma": 0.99, "v-min": 0, "v-max": 4.2, "num-updates": 4, "num-steps": 1, "std-min": 0.05}
OPTIONS |= {"std-max": 0.4, "tau": 0.05, "precision": "bfloat16"}
EPISODES, LONGEST = 32, 1000


class Line(results.Timing):
    """What a run has learnt after so many steps: means over episodes, of which velocities are over steps."""

    seed: int
    steps: int
    softer_steps: int  # how many of the run's first steps have softer penalties
    seconds: float  # of training so far, start-ups included
    episodic_return: float
    episodic_length: float
    velocity: float  # m/s, that the robot was told
    velocity_error: float  # m/s, between that and its own


check = results.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Returns, lengths and velocities by steps, of each seed."""
    rows, seeds = [], sorted({line["seed"] for line in lines})
    for (softer_steps, steps), runs in by(lines, "softer_steps", "steps").items():
        of, minutes = {run["seed"]: run for run in runs}, statistics.mean(run["seconds"] for run in runs) / 60
        penalties = "softer" if steps <= softer_steps else "then its own" if softer_steps else "its own"
        cells = [f"{steps / MILLION:g}M, {penalties}", f"{minutes:.0f}"]
        for key, digits in (("episodic_return", 1), ("episodic_length", 0), ("velocity_error", 2)):
            cells.append(", ".join(f"{of[seed][key]:.{digits}f}" if seed in of else "-" for seed in seeds))
        rows.append([*cells, f"{statistics.mean(run['velocity'] for run in runs):.2f}"])
    named = ", ".join(map(str, seeds))
    header = ["steps, penalties", "minutes", f"return, seeds {named}", "length"]
    header += ["velocity error, m/s", "commanded, m/s"]
    return markdown(header, rows)


@dataclass
class Args:
    folder: tyro.conf.Positional[Path]
    """a new folder for the run"""
    seed: int = 1
    """seed of the run"""
    softer_steps: int = 4 * MILLION
    """the first steps, which have softer penalties"""
    output: Path | None = None
    """a file of results to add to"""


def train(folder: Path, seed: int, softer: bool, steps: int) -> None:
    """Train up to so many steps, from the checkpoint in the folder if there is one. Raises RuntimeError."""
    kwargs = json.dumps(SOFTER if softer else {})
    options = {"total-timesteps": steps, "env-kwargs": kwargs}
    if runs := [*folder.glob("runs/*")]:
        options |= {"resume": runs[0].absolute()}
    else:
        options |= {"env-id": ENV_ID, "seed": seed} | OPTIONS
    twin = LEANRL / "fast_td3_torchcompile.py"
    command = [sys.executable, twin, "--compile", "--cudagraphs", f"--checkpoint-every={MILLION}"]
    run_for_summary([*map(str, command), *(f"--{key}={value}" for key, value in options.items())], folder)


def policy(run: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Actions, (num_envs, action_dim), at observations, (num_envs, obs_dim), of a run's checkpoint."""
    import torch

    script, device = runpy.run_path(str(LEANRL / "fast_td3.py"), run_name="fast_td3"), torch.device("cpu")
    checkpoint = torch.load(run / "checkpoint.pt", map_location=device, weights_only=True)
    weights, moments = checkpoint["actor"], checkpoint["obs_normalizer"]
    actor_dim, action_dim = weights["fc1.weight"].shape[1], weights["fc_mu.weight"].shape[0]
    actor = script["Actor"](actor_dim, action_dim, device)
    normalizer = script["EmpiricalNormalization"](len(moments["mean"]), device)
    actor.load_state_dict(weights)
    normalizer.load_state_dict(moments)

    def actions(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return actor(normalizer(torch.from_numpy(obs))[:, -actor_dim:]).numpy()

    return actions


def play(actions: Callable[[np.ndarray], np.ndarray], seed: int) -> dict[str, float]:
    """What an episode of each of EPISODES environments is like; its velocities are those until it ends."""
    import envpool

    seeds = (np.random.SeedSequence(seed).generate_state(EPISODES) >> 1).tolist()  # of 31 bits
    envs = envpool.make(ENV_ID, "gymnasium", num_envs=EPISODES, num_threads=1, seed=seeds)
    obs, info = envs.reset()
    returns, lengths, playing = np.zeros(EPISODES), np.zeros(EPISODES), np.ones(EPISODES, bool)
    errors, velocities = [], []
    for _ in range(LONGEST):
        vectors = np.concatenate([obs[key] for key in sorted(obs)], axis=1).astype(np.float32)
        velocities += np.linalg.norm(info["command"][:, :2], axis=1)[playing].tolist()
        obs, rewards, terminated, truncated, info = envs.step(actions(vectors))
        returns, lengths = returns + rewards * playing, lengths + playing
        # The reward for following is exp(-error^2 / sigma).
        followed = np.log(np.maximum(info["reward_tracking_lin_vel"], 1e-12))
        errors += np.sqrt(np.maximum(-envs.config["tracking_sigma"] * followed, 0))[playing].tolist()
        playing &= ~(terminated | truncated)
    envs.close()
    found = {"episodic_return": returns, "episodic_length": lengths}
    found |= {"velocity": velocities, "velocity_error": errors}
    return {key: float(np.mean(values)) for key, values in found.items()}


def main() -> int:
    args = tyro.cli(Args)
    lines = lines_of_output(args.output, check)
    try:
        args.folder.mkdir(parents=True)
    except OSError as error:
        refuse(f"takes a new folder, got {args.folder}: {error}")
    from benchmark.sweep.process import GpuSampler  # `./run.sh report` needs no sweep

    gpu = GpuSampler(os.environ.get("CUDA_VISIBLE_DEVICES")).name
    about = provenance((sys.executable, LEANRL / "fast_td3_torchcompile.py"), dict(os.environ), gpu)
    seconds = 0.0
    for steps in range(MILLION, STEPS + 1, MILLION):
        begin = time.perf_counter()
        try:
            train(args.folder, args.seed, steps <= args.softer_steps, steps)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        seconds += time.perf_counter() - begin
        [run] = args.folder.glob("runs/*")
        line = {"format": results.FORMAT, "status": "ok", "seed": args.seed, "steps": steps}
        line |= {"softer_steps": args.softer_steps, "seconds": seconds, **play(policy(run), args.seed)}
        lines.append(line | about)
        told = ("episodic_return", "episodic_length", "velocity_error")
        print(steps, *(f"{key} {line[key]:.3g}" for key in told), flush=True)
        if args.output:
            check(lines[-1])
            results.append(args.output, lines[-1])
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
