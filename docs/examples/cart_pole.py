"""Gymnasium's CartPole-v1 for ppo_on_device, as docs/changing.md changes it for discrete actions.

    python my_ppo_torchcompile.py --compile --cudagraphs --env-id docs.examples.cart_pole:CartPole \
        --num-envs 64 --num-minibatches 4 --gamma 0.99 --total-timesteps 1_000_000
"""

import math

import torch
from torch import Tensor, nn


class CartPole(nn.Module):
    """Many of Gymnasium's CartPole-v1: 0 pushes left and 1 right; an episode ends where the pole falls.

    Its state is the observation: position, speed, angle from upright and the angle's speed.
    """

    obs_dim, action_dim = 4, 2

    def __init__(self, num_envs: int, device: torch.device):
        super().__init__()
        self.state = nn.Buffer(torch.zeros(num_envs, 4, device=device))
        self.steps = nn.Buffer(torch.zeros(num_envs, device=device))  # of the episodes

    def draw(self) -> Tensor:
        return 0.1 * torch.rand_like(self.state) - 0.05

    def reset(self) -> Tensor:
        self.state.copy_(self.draw())
        self.steps.zero_()
        return self.state

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        (position, speed, angle, turning), force = self.state.unbind(dim=1), 20 * actions[:, 0] - 10
        sine, cosine = angle.sin(), angle.cos()
        pushed = (force + 0.05 * turning.square() * sine) / 1.1
        turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        moved = pushed - 0.05 * turned * cosine / 1.1
        position, angle = position + 0.02 * speed, angle + 0.02 * turning
        state = torch.stack([position, speed + 0.02 * moved, angle, turning + 0.02 * turned], dim=1)
        terminated = (position.abs() > 2.4) | (angle.abs() > math.radians(12))
        truncated = self.steps.add_(1) >= 500
        done = terminated | truncated
        self.state.copy_(torch.where(done[:, None], self.draw(), state))
        self.steps.mul_(~done)
        return self.state, torch.ones_like(angle), terminated, truncated, state
