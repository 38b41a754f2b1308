"""Train one algorithm with Stable-Baselines3 or SBX and print a summary like those of the scripts.

    python benchmark/peers.py {sb3,sbx} SCRIPT ENV_ID SEED TOTAL_TIMESTEPS

Same task and networks, same batches and number of gradient steps as the scripts have by default; everything else is the
library's default. PPO goes without the normalisation that the script has, which saves the libraries time. SPS counts from a
step at which everything is compiled: JAX does so when it learns for the first time.
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

PACKAGES = {"sb3": "stable_baselines3", "sbx": "sbx"}
OFF_POLICY = {"learning_starts": 1000, "train_freq": 1, "gradient_steps": 1, "batch_size": 256}
OFF_POLICY |= {"policy_kwargs": {"net_arch": [256, 256]}}
ON_POLICY = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10}
ON_POLICY |= {"policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}}
# The class, its options, and the step at which the clock starts.
ALGORITHMS = {
    "sac_continuous_action": ("SAC", OFF_POLICY, 1500),
    "td3_continuous_action": ("TD3", OFF_POLICY, 1500),
    "ppo_continuous_action": ("PPO", ON_POLICY, 2 * 2048 + 1),
}


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
    begin = time.perf_counter()
    peer, script, env_id, seed, total_timesteps = *sys.argv[1:4], *map(int, sys.argv[4:])
    algorithm, options, start = ALGORITHMS[script]
    # The libraries advise the CPU for PPO on small networks.
    options = options | ({"device": "cpu"} if algorithm == "PPO" else {})
    library = importlib.import_module(PACKAGES[peer])
    model = getattr(library, algorithm)("MlpPolicy", gym.make(env_id), seed=seed, **options)
    stopwatch = Stopwatch(start)
    model.learn(total_timesteps, callback=stopwatch)
    elapsed = time.perf_counter() - stopwatch.started
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next((line.partition(": ")[2] for line in cpuinfo if line.startswith("model name")), platform.processor())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ("stable-baselines3", "sbx-rl", "torch", "jax", "gymnasium", "mujoco")
    summary = {
        "script": peer,
        "env_id": env_id,
        "seed": seed,
        "total_timesteps": total_timesteps,
        "sps": (total_timesteps - start) / elapsed,
        "startup_seconds": None,
        "wall_seconds": time.perf_counter() - begin,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
        "hardware": {"cpu": cpu, "cores": cores, "gpu": None},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
