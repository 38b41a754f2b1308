"""Time PureJaxRL's PPO for continuous actions on gymnax's Pendulum-v1; print a summary like the scripts'.

    PYTHON benchmark/peers/purejaxrl.py FOLDER --env-id=Pendulum-v1 --seed=N --total-timesteps=N --num-envs=N
        --num-steps=N --num-minibatches=N

FOLDER is a clone of github.com/luchris429/purejaxrl; PYTHON has jax, flax, optax, distrax and gymnax 1.0.
Changed, to do the work of ppo_on_device: gymnax in place of Brax, whose ends gymnax 1.0 tells apart and it
joins; networks of 64 units; actions clipped to [-2, 2]; the mean return of a rollout's ended episodes in
place of all that its log holds. SPS counts after compiling.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, patch

import gymnax
import jax
import peer

DEFAULTS = {
    "LR": 1e-3,
    "UPDATE_EPOCHS": 4,
    "GAMMA": 0.95,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.0,
}
DEFAULTS |= {"VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ANNEAL_LR": True, "DEBUG": False}
DEFAULTS |= {"NORMALIZE_ENV": True, "ENV_NAME": "Pendulum-v1"}
LOG = """metric = jax.numpy.sum(
                traj_batch.info["returned_episode_returns"] * traj_batch.info["returned_episode"]
            ) / jax.numpy.maximum(traj_batch.info["returned_episode"].sum(), 1)"""


class Pendulum:
    """gymnax's task as PureJaxRL's wrappers expect it."""

    def __init__(self, name: str):
        self.env, self.params = gymnax.make(name)

    def action_space(self, _):
        return self.env.action_space(self.params)

    def observation_space(self, _):
        return self.env.observation_space(self.params)

    def reset(self, key, _):
        return self.env.reset(key, self.params)

    def step(self, key, state, action, _):
        obs, state, reward, terminated, truncated, _ = self.env.step(key, state, action, self.params)
        return obs, state, reward, terminated | truncated, {}


def make_train(folder: Path, config: dict):
    """PureJaxRL's function of a key that trains, with what is changed."""
    text = (folder / "purejaxrl" / "ppo_continuous_action.py").read_text()
    for old, new in (("256, kernel_init", "64, kernel_init"), ("metric = traj_batch.info", LOG)):
        if old not in text:
            sys.exit(f"{folder} is another version: there is no {old!r}")
        text = text.replace(old, new)
    sys.path.append(str(folder / "purejaxrl"))
    absent = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix")
    module = {"__name__": "ppo_continuous_action"}
    with patch.dict(sys.modules, {name: MagicMock() for name in absent}):
        exec(text, module)
    module["BraxGymnaxWrapper"] = Pendulum
    module["ClipAction"] = partial(module["ClipAction"], low=-2.0, high=2.0)
    return module["make_train"](config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("--num-envs", "--num-steps", "--num-minibatches"):
        parser.add_argument(name, type=int, required=True)
    args, _ = peer.parse(parser)
    sizes = {name: getattr(args, name.lower()) for name in ("NUM_ENVS", "NUM_STEPS", "NUM_MINIBATCHES")}
    config = DEFAULTS | sizes | {"TOTAL_TIMESTEPS": args.total_timesteps}
    key = jax.random.PRNGKey(args.seed)
    train = jax.jit(make_train(args.folder, config)).lower(key).compile()
    start = time.perf_counter()
    returns = jax.block_until_ready(train(key))["metrics"]
    steps = config["NUM_UPDATES"] * args.num_envs * args.num_steps
    last = [float(value) for value in returns if value][-1:] or [None]
    peer.tell("purejaxrl", args, steps / (time.perf_counter() - start), "cpu", episodic_return=last[0])


if __name__ == "__main__":
    main()
