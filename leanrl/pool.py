"""EnvPool's tasks for Gymnasium: as many environments as one likes, stepped at once by EnvPool's threads.

    python leanrl/sac_continuous_action.py --env-id pool:EnvPool/CheetahRun-v1 --num-envs 4
    ... --env-kwargs '{"num_threads": 2, "keys": ["state"]}'     how many threads, which parts of observations

All else in --env-kwargs goes to EnvPool. Beside a script or in the current folder this file is found as
`pool`. Without a script: `import pool`, then
`gymnasium.make_vec("EnvPool/CheetahRun-v1", 4, vectorization_mode="vector_entry_point")`.
"""

import os

import envpool
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Pool(VectorEnv):
    """Environments with vectors as observations: of named parts in the order of their names.

    The first reset makes them, since EnvPool takes seeds only then. Infos are EnvPool's, and `final_obs`.
    """

    def __init__(self, task: str, num_envs: int, keys=(), num_threads=0, render_mode=None, **options):
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}
        spec = envpool.make_spec(task, **options)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.task, self.num_envs, self.render_mode, self.pool = task, num_envs, render_mode, None
        self.options = {"num_envs": num_envs, "render_mode": render_mode, **options}
        self.options |= {"num_threads": num_threads or min(cores, num_envs)}
        space, self.keys = spec.gymnasium_observation_space, []
        if keys or isinstance(space, gym.spaces.Dict):
            self.keys = sorted(keys or space)
            space = gym.spaces.Dict({key: space[key] for key in self.keys})
        self.single_observation_space = gym.spaces.flatten_space(space)
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def vectors(self, obs: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        """Observations of n environments as (n, obs_dim), in memory of their own."""
        parts = [obs[key] for key in self.keys] or [obs]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

    def reset(self, *, seed: int | list[int] | None = None, options=None) -> tuple[np.ndarray, dict]:
        if self.pool is None or seed is not None:
            if not isinstance(seed, list):  # as Gymnasium does
                first = np.random.SeedSequence().generate_state(1)[0] >> 2 if seed is None else seed
                seed = [int(first) + index for index in range(self.num_envs)]
            self.close_extras()
            self.pool = envpool.make_gymnasium(self.task, seed=seed, **self.options)
        obs, infos = self.pool.reset()
        obs = self.vectors(obs)
        if obs.shape != self.observation_space.shape:  # of several players, or no vectors
            raise ValueError(f"{self.task} has observations {obs.shape}, not {self.observation_space.shape}")
        return obs, infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        obs, rewards, terminated, truncated, infos = self.pool.step(np.asarray(actions))
        obs, over = self.vectors(obs), terminated | truncated
        if over.any():
            infos |= {"final_obs": obs.copy(), "_final_obs": over}
            obs[over] = self.vectors(self.pool.reset(np.flatnonzero(over))[0])
        return obs, rewards, terminated, truncated, infos

    def render(self) -> np.ndarray:
        return self.pool.render(env_ids=np.arange(self.num_envs))

    def close_extras(self, **_) -> None:
        if self.pool is not None:
            self.pool.close()


for task in envpool.list_all_envs():
    if "/" not in task:  # which an id of Gymnasium has once
        gym.register(f"EnvPool/{task}", vector_entry_point=Pool, kwargs={"task": task})
