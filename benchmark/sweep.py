"""Run the scripts of leanrl/ side by side, each run a process of its own, and print a table of their speed.

    python benchmark/sweep.py --modes eager compile
    python benchmark/sweep.py --modes eager compile --rounds 3 --output benchmark/results/cpu.jsonl

Runs that are compared are interleaved: every script in every mode once, then all of it again. With --peers, the same tasks
run with Stable-Baselines3 and SBX in the environment of that interpreter. Each run appends its summary, one line of JSON,
to --output. The exit status is 1 if a run failed.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from report import speed_table

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "eager": ("", ()),
    "twin": ("_torchcompile", ()),
    "compile": ("_torchcompile", ("--compile",)),
    "cudagraphs": ("_torchcompile", ("--cudagraphs",)),
    "both": ("_torchcompile", ("--compile", "--cudagraphs")),
}
PEERS = ("sb3", "sbx")
# What a run consists of: agent steps and more options, for seconds to tens of seconds a run on two cores. The off-policy
# scripts take random actions first, and SPS counts from the first step that learns.
TASKS = {
    "sac_continuous_action": (3000, ("--learning-starts=1000",)),
    "td3_continuous_action": (3000, ("--learning-starts=1000",)),
    "ppo_continuous_action": (20 * 2048, ()),
    "ppo_atari_envpool": (8 * 1024, ()),
}
PEERLESS = {"ppo_atari_envpool"}


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(TASKS)
    """eager scripts to run; a mode other than eager runs the twin"""
    modes: tuple[Literal["eager", "twin", "compile", "cudagraphs", "both"], ...] = ("eager", "compile")
    """eager script, or twin: with no flag, --compile, --cudagraphs, both"""
    rounds: int = 1
    """how often everything is run; the first round compiles with an empty cache, the later ones find it filled"""
    total_timesteps: int | None = None
    """agent steps of a run, each script's own number by default"""
    seed: int = 1
    """the seed of every run"""
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt"""
    output: Path | None = None
    """a file of results that gets one more line a run"""


def script_command(script: str, mode: str, args: Args) -> list[str]:
    """The command that runs `script` in `mode`."""
    suffix, flags = MODES[mode]
    total_timesteps, options = TASKS[script]
    command = [sys.executable, str(ROOT / "leanrl" / f"{script}{suffix}.py"), *flags, *options, f"--seed={args.seed}"]
    return [*command, f"--total-timesteps={args.total_timesteps or total_timesteps}"]


def peer_command(script: str, peer: str, args: Args) -> list[str]:
    """The command that runs the algorithm of `script` with the library `peer`."""
    command = [str(args.peers.absolute()), str(ROOT / "benchmark" / "peers.py"), peer, script, str(args.seed)]
    return [*command, str(args.total_timesteps or TASKS[script][0])]


def run(command: list[str], env: dict[str, str], cwd: str) -> dict | None:
    """Run one process with its progress on standard error. Returns its summary, or None with a message where it failed."""
    process = subprocess.run(command, env=env, cwd=cwd, stdout=subprocess.PIPE, text=True)
    try:
        summary = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        summary = None
    if process.returncode == 0 and summary:
        return summary
    print(f"failed with exit status {process.returncode}: {' '.join(command)}", file=sys.stderr)
    return None


def main() -> int:
    args = tyro.cli(Args)
    modes = [mode for mode in args.modes if mode not in ("cudagraphs", "both") or torch.cuda.is_available()]
    skipped = [mode for mode in args.modes if mode not in modes]
    if skipped:
        print(f"skipped, for want of a CUDA device: {', '.join(skipped)}", file=sys.stderr)
    jobs = [(script, mode, script_command(script, mode, args)) for script in args.scripts for mode in modes]
    if args.peers:
        peered = [script for script in args.scripts if script not in PEERLESS]
        jobs += [(script, peer, peer_command(script, peer, args)) for script in peered for peer in PEERS]

    results, failed = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for round_index in range(args.rounds):
            for index, (script, mode, command) in enumerate(jobs, start=round_index * len(jobs) + 1):
                print(f"[{index}/{args.rounds * len(jobs)}] {script} {mode}", file=sys.stderr, flush=True)
                # Each job's compiler cache is its own and starts empty: the first round measures a cold start.
                caches = {f"{compiler}_CACHE_DIR": f"{scratch}/{script}-{mode}" for compiler in ("TORCHINDUCTOR", "TRITON")}
                summary = run(command, os.environ | caches, scratch)
                if summary is None:
                    failed += 1
                    continue
                results.append({**summary, "algorithm": script, "mode": mode, "round": round_index})
                if args.output:
                    with args.output.open("a") as output:
                        output.write(json.dumps(results[-1]) + "\n")
    if results:
        print(speed_table(results))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
