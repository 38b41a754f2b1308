"""A task of one's own for ppo_on_device: a cart swings a pole up.

    ./run.sh train ppo_on_device_torchcompile --compile --cudagraphs \
        --env-id docs.examples.cartpole_swingup:CartpoleSwingup \
        --total-timesteps 20_000_000 --num-steps 128 --num-minibatches 64 --gamma 0.995

`step` returns what `Pendulum.step` of the script does.
"""

import math

import torch
from torch import Tensor, nn


class CartpoleSwingup(nn.Module):
    """A cart swings a pole up and holds it there: forces in [-1, 1], of 10 N; episodes of 10 s, 1000 steps.

    Motion without friction: Florian, "Correct equations for the dynamics of the cart-pole system" (2007),
    equations 23 and 24. Sizes and rewards, in [0, 1]: dm_control's cartpole swingup (Tassa et al.,
    arXiv:1801.00690), whose integrator and rail's ends differ. The state: position, where the rail's ends
    stop the cart, angle, 0 is up, and their speeds.
    """

    obs_dim, action_dim = 5, 1

    def __init__(self, num_envs: int, device: torch.device):
        super().__init__()
        self.state = nn.Buffer(torch.zeros(num_envs, 4, device=device))
        self.steps = nn.Buffer(torch.zeros(num_envs, device=device))  # of the episodes

    def draw(self) -> Tensor:
        position, angle, speed, turning = (0.01 * torch.randn_like(self.state)).unbind(dim=1)
        return torch.stack([position, math.pi + angle, speed, turning], dim=1)

    def observe(self, state: Tensor) -> Tensor:
        position, angle, speed, turning = state.unbind(dim=1)
        return torch.stack([position, angle.cos(), angle.sin(), speed, turning], dim=1)

    def reset(self) -> Tensor:
        self.state.copy_(self.draw())
        self.steps.zero_()
        return self.observe(self.state)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        state, rewards = self.move(actions)
        truncated = self.steps.add_(1) >= 1000
        self.state.copy_(torch.where(truncated[:, None], self.draw(), state))
        self.steps.mul_(~truncated)
        return self.observe(self.state), rewards, torch.zeros_like(truncated), truncated, self.observe(state)

    def move(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Next states (num_envs, 4) and rewards (num_envs,)."""
        (position, angle, speed, turning), force = self.state.unbind(dim=1), actions[:, 0].clamp(-1, 1)
        # Cart and pole have 1 and 0.1 kg, half the pole 0.5 m, a step 0.01 s.
        sine, cosine = angle.sin(), angle.cos()
        pushed = (10 * force + 0.05 * turning.square() * sine) / 1.1
        turned = (9.81 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        speed = speed + 0.01 * (pushed - 0.05 * turned * cosine / 1.1)
        turning = turning + 0.01 * turned
        position, angle = position + 0.01 * speed, angle + 0.01 * turning
        speed = torch.where(position.abs() < 1.8, speed, 0)
        position = position.clamp(-1.8, 1.8)
        # Each 1 where all is well; 0.1 at 2 m from the middle and at 5 rad/s.
        centered, slow = 0.1 ** (position / 2).square(), 0.1 ** (turning / 5).square()
        rewards = (1 + angle.cos()) / 2 * (1 + centered) / 2 * (5 - force.square()) / 5 * (1 + slow) / 2
        return torch.stack([position, angle, speed, turning], dim=1), rewards
