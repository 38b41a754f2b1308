"""Train one algorithm with Stable-Baselines3 or SBX and print a summary like those of the scripts.

    python benchmark/peers.py {sb3,sbx} SCRIPT SEED TOTAL_TIMESTEPS LEARNING_STARTS

Same task, networks of 256 and 256 units, batches of 256 and one gradient step per environment step, as the scripts have
by default; everything else is the library's default. SPS counts from the first step that learns after compilation.
"""

import importlib
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

import gymnasium as gym
from stable_baselines3.common.callbacks import BaseCallback

ALGORITHMS = {"sac_continuous_action": "SAC", "td3_continuous_action": "TD3"}
PACKAGES = {"sb3": "stable_baselines3", "sbx": "sbx"}
COMPILED_AFTER = 500  # steps that learn before the clock starts: JAX compiles within the first ones


class Stopwatch(BaseCallback):
    """Notes when the step `start` is reached."""

    def __init__(self, start: int):
        super().__init__()
        self.start = start

    def _on_step(self) -> bool:
        if self.num_timesteps == self.start:
            self.started = time.perf_counter()
        return True


def main() -> None:
    peer, script, seed, total_timesteps, learning_starts = *sys.argv[1:3], *map(int, sys.argv[3:])
    library = importlib.import_module(PACKAGES[peer])
    model = getattr(library, ALGORITHMS[script])(
        "MlpPolicy",
        gym.make("HalfCheetah-v4"),
        seed=seed,
        learning_starts=learning_starts,
        train_freq=1,
        gradient_steps=1,
        batch_size=256,
        policy_kwargs={"net_arch": [256, 256]},
    )
    stopwatch = Stopwatch(learning_starts + COMPILED_AFTER)
    model.learn(total_timesteps, callback=stopwatch)
    elapsed = time.perf_counter() - stopwatch.started
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next((line.partition(": ")[2] for line in cpuinfo if line.startswith("model name")), platform.processor())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ("stable-baselines3", "sbx-rl", "torch", "jax", "gymnasium", "mujoco")
    summary = {
        "script": peer,
        "env_id": "HalfCheetah-v4",
        "seed": seed,
        "total_timesteps": total_timesteps,
        "sps": (total_timesteps - stopwatch.start) / elapsed,
        "startup_seconds": None,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
        "hardware": {"cpu": cpu, "cores": cores, "gpu": None},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
