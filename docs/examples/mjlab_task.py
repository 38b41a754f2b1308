"""mjlab's tasks, simulated by MuJoCo Warp, for ppo_on_device; mjlab 1.6 has to be installed.

    python leanrl/ppo_on_device.py --env-id docs.examples.mjlab_task:Task \
        --env-kwargs '{"task": "Mjlab-Cartpole-Balance"}' --num-envs 4096 --num-steps 24 --gamma 0.99
"""

import mjlab.tasks  # noqa: F401  registers them
import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import load_env_cfg
from torch import Tensor


class Task:
    """Many of a task at once; what ended an episode is seen before its environment is reset."""

    def __init__(self, num_envs: int, device: torch.device, task: str, group: str = "actor"):
        config = load_env_cfg(task)
        config.scene.num_envs, config.auto_reset = num_envs, False
        config.seed = torch.randint(2**31, ()).item()
        self.env, self.group = ManagerBasedRlEnv(config, str(device)), group
        (self.obs_dim,) = self.env.observation_manager.group_obs_dim[group]
        self.action_dim = self.env.action_manager.total_action_dim

    def reset(self) -> Tensor:
        return self.env.reset()[0][self.group].clone()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        obs, rewards, terminated, truncated, _ = self.env.step(actions)
        final_obs, rewards = obs[self.group].clone(), rewards.clone()
        terminated, truncated = terminated.clone(), truncated.clone()
        next_obs, ended = final_obs, (terminated | truncated).nonzero().flatten()  # sync
        if len(ended):
            obs, _ = self.env.reset(env_ids=ended)
            next_obs = final_obs.index_copy(0, ended, obs[self.group][ended])
        return next_obs, rewards, terminated, truncated, final_obs
