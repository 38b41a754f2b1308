"""Train one algorithm with Stable-Baselines3 or SBX and print a summary like those of the scripts.

    python benchmark/peers/sb3_sbx.py {sb3,sbx} SCRIPT --env-id=ID --seed=N --total-timesteps=N
        [--learning-starts=N] [--num-envs=N] [--batch-size=N] [--width=N] [--num-steps=N] [--threads=N]

Same task and networks, same batches and number of gradient steps as the scripts have by default, or with the
sizes that are given; everything else is the library's default. PPO goes without the normalisation that the
script has, which saves the libraries time. Atari games are ale-py's behind Stable-Baselines3's own wrappers,
stepped in turn: the same frames, network and batches, but no EnvPool. RecurrentPPO is sb3-contrib's, whose
networks have a layer behind the LSTM, where ours have it in front. SPS counts from a step at which everything
is compiled, for JAX compiles when it first learns: of PPO after two rollouts, of the others after 500 agent
steps in which they learn. --threads are PyTorch's; JAX has its own.
"""

import argparse
import importlib
import time

import gymnasium as gym
import jax
import peer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from benchmark.collection import COLLECTION

PACKAGES = {"sb3": "stable_baselines3", "sbx": "sbx"}
# By the class and the kind of actions. The libraries advise the CPU for PPO on small networks.
OFF_POLICY = {"train_freq": 1, "gradient_steps": -1, "batch_size": 256}
OFF_POLICY |= {"policy_kwargs": {"net_arch": [256, 256]}}
PPO = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "device": "cpu"}
PPO |= {"policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}}
DISCRETE = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01}
RECURRENT = {"batch_size": 256, "policy_kwargs": {"net_arch": [64], "lstm_hidden_size": 64}}
DQN = {"train_freq": 10, "batch_size": 128, "buffer_size": 10_000, "learning_rate": 2.5e-4}
DQN |= {"target_update_interval": 500, "exploration_fraction": 0.5, "policy_kwargs": {"net_arch": [120, 84]}}
OPTIONS = {
    ("SAC", "continuous"): OFF_POLICY,
    ("TD3", "continuous"): OFF_POLICY,
    ("PPO", "continuous"): PPO,
    ("RecurrentPPO", "continuous"): PPO | RECURRENT | {"n_steps": 32, "learning_rate": 6e-4},
    ("PPO", "discrete"): PPO | DISCRETE,
    ("RecurrentPPO", "discrete"): PPO | DISCRETE | RECURRENT,
    ("PPO", "atari"): DISCRETE | {"batch_size": 256, "clip_range": 0.1},
    ("DQN", "discrete"): DQN,
}


class Stopwatch(BaseCallback):
    """Starts with the first rollout from step `start` on: of SAC and TD3 one step of all, of DQN ten."""

    def __init__(self, start: int):
        super().__init__()
        self.start, self.started = start, None

    def _on_rollout_start(self) -> None:
        if self.started is None and self.num_timesteps >= self.start:
            self.start, self.started = self.num_timesteps, time.perf_counter()

    def _on_step(self) -> bool:
        return True


def make_env(actions: str, env_id: str, seed: int, num_envs: int) -> VecEnv:
    """Environments with a kind of actions; of Atari ale-py's for EnvPool's id, such as Breakout-v5."""
    if actions != "atari":
        return make_vec_env(lambda: gym.make(env_id), n_envs=num_envs, seed=seed)
    gym.register_envs(importlib.import_module("ale_py"))
    games = make_atari_env(f"{env_id.removesuffix('-v5')}NoFrameskip-v4", n_envs=num_envs, seed=seed)
    return VecFrameStack(games, n_stack=4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PACKAGES)
    parser.add_argument("script", choices=COLLECTION)
    for name in ("--num-envs", "--batch-size", "--width", "--num-steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--learning-starts", type=int, default=0)
    args, _ = peer.parse(parser)
    entry = COLLECTION[args.script]
    algorithm, num_envs = getattr(entry, args.peer), args.num_envs or entry.num_envs
    given = {"learning_starts": args.learning_starts, "batch_size": args.batch_size}
    given |= {"n_steps": args.num_steps}
    options = OPTIONS[algorithm, entry.actions] | {name: value for name, value in given.items() if value}
    if algorithm == "DQN":  # train_freq counts steps of all environments at once
        options["gradient_steps"] = num_envs
    recurrent = algorithm == "RecurrentPPO"
    if args.width:  # of SAC and TD3
        options["policy_kwargs"] = {"net_arch": [args.width, args.width]}
    library = importlib.import_module("sb3_contrib" if recurrent else PACKAGES[args.peer])
    env = make_env(entry.actions, args.env_id, args.seed, num_envs)
    policy = "MlpLstmPolicy" if recurrent else "CnnPolicy" if entry.actions == "atari" else "MlpPolicy"
    model = getattr(library, algorithm)(policy, env, seed=args.seed, **options)
    start = 2 * options["n_steps"] * env.num_envs if entry.on_policy else 500
    stopwatch = Stopwatch(args.learning_starts + start)
    model.learn(args.total_timesteps, callback=stopwatch)
    elapsed = time.perf_counter() - stopwatch.started if stopwatch.started else None
    sps = (model.num_timesteps - stopwatch.start) / elapsed if elapsed else None
    peer.tell(args.peer, args, sps, str(model.device) if args.peer == "sb3" else jax.default_backend())


if __name__ == "__main__":
    main()
