"""Run a script of CleanRL, as it is and with its own defaults, and print a summary like those of ours.

    python benchmark/peers/cleanrl.py SCRIPT --env-id=ID --seed=N --total-timesteps=N [--threads=N]
        [--cleanrl DIR] [...]

--threads are PyTorch's. Further arguments, such as --learning-starts=N, are the script's own. The scripts are
those of the package cleanrl 1.2.0 or, with --cleanrl, of a checkout of its repository. They were written for
older libraries. What has changed since is stood in for here: the module `gym`, automatic resets and what
infos then hold, names of wrappers, and an argument of one. SPS counts from the first "charts/SPS" that a
script logs, when it learns, to the last.
"""

import argparse
import importlib
import runpy
import sys
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import envpool
import gymnasium
import numpy as np
import peer
from gymnasium.vector import AutoresetMode
from torch.utils.tensorboard import SummaryWriter

from benchmark.collection import COLLECTION


class SyncVectorEnv(gymnasium.vector.SyncVectorEnv):
    """Gymnasium 0.29: resets at the end of an episode, and lists what each environment ended with."""

    def __init__(self, env_fns: list):
        super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        if "final_obs" in infos:
            final = infos["final_info"]
            # The end of a life has no episode.
            episode, ended = final.get("episode"), final.get("_episode", [False] * self.num_envs)
            infos["final_observation"] = infos["final_obs"]
            infos["final_info"] = [
                {"episode": {key: episode[key][index] for key in ("r", "l")}} if over else None
                for index, over in enumerate(ended)
            ]
        return obs, rewards, terminated, truncated, infos


class GymSyncVectorEnv(SyncVectorEnv):
    """The same of gym 0.21: one kind of end, and a list of infos."""

    def reset(self) -> np.ndarray:
        return super().reset()[0]

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        listed = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(terminated | truncated):
            ended = {"terminal_observation": infos["final_obs"][index], **infos["final_info"][index]}
            listed[index] = ended | {"TimeLimit.truncated": bool(truncated[index] and not terminated[index])}
        return obs, rewards, terminated | truncated, listed


class GymRecordEpisodeStatistics(gymnasium.wrappers.RecordEpisodeStatistics):
    """An environment of gym 0.21, which is seeded by itself."""

    def seed(self, seed: int) -> None:
        self.reset(seed=seed)


class GymWrapper(gymnasium.Wrapper):
    """A wrapper that has the attributes of what it wraps."""

    def __getattr__(self, name: str):
        return getattr(self.env, name)


class GymGames(GymWrapper):
    """EnvPool's games with the interface of gym 0.21."""

    def reset(self, **_) -> np.ndarray:
        return self.env.reset()[0]

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        return obs, rewards, terminated | truncated, infos


class TransformObservation(gymnasium.wrappers.TransformObservation):
    """The wrapper, which did not ask for the space of what it makes."""

    def __init__(self, env: gymnasium.Env, function, observation_space=None):
        super().__init__(env, function, observation_space or env.observation_space)


def stand_in() -> None:
    """Put the stand-ins where CleanRL's scripts look for them."""
    make_games = envpool.make
    envpool.make = lambda *args, env_type, **options: GymGames(
        make_games(*args, env_type="gymnasium", **options)
    )
    gymnasium.vector.SyncVectorEnv = SyncVectorEnv
    gymnasium.wrappers.TransformObservation = TransformObservation
    gymnasium.wrappers.GrayScaleObservation = gymnasium.wrappers.GrayscaleObservation
    gymnasium.wrappers.FrameStack = gymnasium.wrappers.FrameStackObservation
    gym, distutils, util = ModuleType("gym"), ModuleType("distutils"), ModuleType("distutils.util")
    gym.make, gym.spaces, gym.Wrapper = gymnasium.make, gymnasium.spaces, GymWrapper
    gym.vector = SimpleNamespace(SyncVectorEnv=GymSyncVectorEnv)
    gym.wrappers = SimpleNamespace(RecordEpisodeStatistics=GymRecordEpisodeStatistics)
    util.strtobool = lambda text: text.lower() in ("true", "1", "yes")
    sys.modules |= {"gym": gym, "distutils": distutils, "distutils.util": util}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=[name for name in COLLECTION if COLLECTION[name].cleanrl])
    parser.add_argument("--cleanrl", type=Path)
    args, more = peer.parse(parser, more=True)
    root = args.cleanrl or Path(metadata.distribution("cleanrl").locate_file(""))
    path = root / "cleanrl" / f"{COLLECTION[args.script].cleanrl}.py"
    sys.path.insert(0, str(root))  # for its utilities
    stand_in()
    times, add_scalar = [], SummaryWriter.add_scalar

    def note_time(writer: SummaryWriter, tag: str, value: float, step: int, **options) -> None:
        if tag == "charts/SPS":
            times.append((step, time.perf_counter()))
        add_scalar(writer, tag, value, step, **options)

    SummaryWriter.add_scalar = note_time
    atari = COLLECTION[args.script].actions == "atari" and "envpool" not in path.stem
    env_id = f"{args.env_id.removesuffix('-v5')}NoFrameskip-v4" if atari else args.env_id  # the same game
    if atari:
        gymnasium.register_envs(importlib.import_module("ale_py"))
    sys.argv = peer.command_line(path, args, more, env_id=env_id)
    script = runpy.run_path(str(path), run_name="__main__")
    peer.tell("cleanrl", args, peer.speed(times), str(script["device"]))


if __name__ == "__main__":
    main()
