# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium>=1.4,<1.5", "envpool>=1.2.5,<2", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""Rainbow for Atari games of EnvPool: the twin that compiles and captures.

Papers: Hessel et al., "Rainbow: Combining Improvements in Deep Reinforcement Learning",
        arXiv:1710.02298 (2017), and what it combines, each of which can be left out:
        --no-double        double Q-learning: van Hasselt et al., arXiv:1509.06461 (2015);
        --no-dueling       a value and advantages: Wang et al., arXiv:1511.06581 (2015);
        --no-noisy         noise on weights explores, not epsilon: Fortunato et al., arXiv:1706.10295 (2017);
        --no-distributional  distributions of returns, C51: Bellemare et al., arXiv:1707.06887 (2017);
        --n-step 1         returns of several steps: Sutton, Machine Learning 3 (1988);
        --prioritized-replay-alpha 0  prioritised replay: Schaul et al., arXiv:1511.05952 (2015).
        Without all of them it is DQN with Adam: Mnih et al., Nature 518 (2015), doi:10.1038/nature14236.
Run:    python rainbow_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile --cudagraphs
Twin:   rainbow_atari_envpool.py, eager, computes the same, up to rounding. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] the policy, a gradient step from draw to new priorities, what stores a step: none breaks;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and Adam a few operations on it in that graph;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches a whole gradient step at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back.

Deviations from the paper; the first three are CleanRL's:
- learning starts after 80,000 agent steps (paper: 80,000 frames, which are 20,000);
- priorities are powers of the cross-entropy, not of the KL divergence;
- weights of a batch are divided by the largest of the batch, not of all transitions;
- evaluation has no noise on the weights (without --noisy: no random actions);
- without --noisy epsilon falls over a tenth of the run, from its first step (paper: over 62,500 steps);
- the gradient steps come before the environment step: the newest transition drawn began n + 1 steps ago;
- with several games, all of a step have the same noise;
- the step after the end of a game or life is no transition: EnvPool's `reset` cannot go on after a lost life;
- a truncated game bootstraps from the value of its final observation.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import argparse
import copy
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from unittest.mock import patch

import envpool
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- Arguments ---------------------------------------------------------------------------------------------
Fraction = Annotated[float, Field(ge=0, le=1)]
JSON = tyro.conf.arg(constructor=json.loads, metavar="JSON")
FIXED = ("env_id", "num_envs", "buffer_size", "learning_rate", "v_min", "v_max", "n_atoms")
FIXED += ("dueling", "noisy", "distributional", "prioritized_replay_alpha")  # what --resume keeps


@dataclass(config={"allow_inf_nan": False})  # pydantic checks the types, tyro prints what it says
class Args:
    exp_name: str = Path(__file__).stem  # the name of this experiment
    seed: NonNegativeInt = 1  # seed of the experiment
    cuda: bool = True  # use a CUDA device if there is one
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"  # of networks; bfloat16 is for AMX and GPUs
    torch_deterministic: bool = False  # deterministic algorithms only; needs CUBLAS_WORKSPACE_CONFIG=:4096:8
    track: bool = False  # also send the logs to Weights & Biases
    wandb_project_name: str = "leanrl"  # the project of the Weights & Biases run
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases run
    capture_video: bool = False  # film an episode of each evaluation; one is at the end
    checkpoint_every: PositiveInt | None = None  # agent steps between checkpoints; one is at the end
    resume: str | None = None  # go on with the run of this folder, with its arguments
    evaluate: str | None = None  # do not train, evaluate this checkpoint
    eval_every: PositiveInt | None = None  # agent steps between evaluations; one is at the end
    eval_episodes: PositiveInt = 10  # the episodes of an evaluation
    log_every: PositiveInt = 100  # agent steps between two log entries
    compile: bool = False  # compile the policy, the gradient step and what stores a step
    cudagraphs: bool = False  # capture the policy, the gradient step and what stores a step

    env_id: str = "Breakout-v5"  # the id of the game: any Atari game of EnvPool
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of EnvPool
    total_timesteps: PositiveInt = 10_000_000  # agent steps in all, over all games
    num_envs: PositiveInt = 1  # the number of parallel games
    env_threads: NonNegativeInt = 0  # the number of threads that step the environments; 0 lets EnvPool choose
    buffer_size: PositiveInt = 1_000_000  # steps that the replay buffer holds, over all games; 7 KB each
    buffer_file: str | None = None  # a new file for its frames, which checkpoints then leave out
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 1.0  # how far the target network moves towards the network at each of its updates
    target_network_frequency: PositiveInt = 8_000  # agent steps between two updates of the target network
    batch_size: PositiveInt = 32  # the number of transitions in a gradient step
    start_e: Fraction = 1.0  # epsilon, the share of random actions, at the beginning, if not noisy
    end_e: Fraction = 0.01  # epsilon at the end of the exploration fraction, and from then on
    exploration_fraction: Fraction = 0.1  # the part of total_timesteps over which epsilon falls, linearly
    learning_starts: NonNegativeInt = 80_000  # agent steps before learning starts
    train_frequency: PositiveInt = 4  # agent steps between gradient steps, however many games
    learning_rate: NonNegativeFloat = 6.25e-5  # the learning rate
    double: bool = True  # the network chooses the next action, and the target network values it
    dueling: bool = True  # a value of the state and advantages of actions, in place of values of actions
    noisy: bool = True  # explore by noise on the weights, in place of random actions
    distributional: bool = True  # learn the distribution of returns, in place of their mean
    n_atoms: Annotated[int, Field(ge=2)] = 51  # the atoms of the distributions
    v_min: float = -10.0  # the lowest return of the distributions
    v_max: float = 10.0  # the highest one
    n_step: PositiveInt = 3  # the steps whose rewards are in a target
    prioritized_replay_alpha: Fraction = 0.5  # priorities are TD errors to this power; 0 draws uniformly
    prioritized_replay_beta: Fraction = 0.4  # how far weights undo priorities, at the beginning; at last 1
    prioritized_replay_eps: Annotated[float, Field(gt=0)] = 1e-6  # what is added to TD errors

    def __post_init__(self):  # tyro tells what it raises, and exits with status 2
        steps = self.buffer_size // self.num_envs - self.n_step - 3
        if steps * self.num_envs < self.batch_size:
            raise ValueError("--buffer-size has to hold a batch beside --n-step and three steps of all games")
        if self.v_min >= self.v_max:
            raise ValueError("--v-min has to be below --v-max")
        if self.buffer_file:
            self.buffer_file = str(Path(self.buffer_file).resolve())  # so that it is found from elsewhere


# ---- Environment -------------------------------------------------------------------------------------------
class Games(gym.Wrapper):
    """EnvPool's games. Infos say which are over, and have scores and lengths over all lives of a game.

    After the end of a game or life the next step only goes on: it is no transition. `first`, (num_games,), is
    True where the latest observation comes from such a step, or from `reset`.
    """

    def __init__(self, games: gym.Env, num_games: int):
        super().__init__(games)
        self.scores, self.lengths = np.zeros(num_games), np.zeros(num_games, dtype=int)
        self.first, self.ended = np.ones(num_games, dtype=bool), np.zeros(num_games, dtype=bool)

    def reset(self, **_) -> tuple:
        return self.env.reset()  # EnvPool was given the seeds when it made the games

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.first, self.ended = self.ended, terminated | truncated
        self.scores += infos["reward"]  # not clipped
        self.lengths += ~self.first
        over = (infos["terminated"] > 0) | truncated
        infos |= {"over": over, "scores": self.scores, "lengths": self.lengths}
        self.scores, self.lengths = self.scores * ~over, self.lengths * ~over
        return obs, rewards, terminated, truncated, infos


def make_games(args: Args, seeds: list[int], learning: bool = True, stack: int = 4) -> Games:
    """Build a game for each seed; a lost life looks like an end, without which EnvPool serves no next ball.

    Observations are the latest frames, (num_games, stack, 84, 84), uint8; if `learning`, rewards are signs.
    """
    options = {"env_type": "gymnasium", "num_envs": len(seeds), "seed": seeds, "episodic_life": True}
    options |= {"stack_num": stack, "reward_clip": learning, "num_threads": args.env_threads}
    options |= {"render_mode": "rgb_array" if args.capture_video else None}
    return Games(envpool.make(args.env_id, **options, **args.env_kwargs), len(seeds))


# ---- Networks ----------------------------------------------------------------------------------------------
class NoisyLinear(nn.Linear):
    """A linear layer whose weights and biases have noise on them in training, one draw for all of a batch.

    The noise is factorised, and initialised, as in section 3 of Fortunato et al. A product with its outer
    product is one with either factor in turn, so that the noisy weights are never there.
    """

    def __init__(self, in_features: int, out_features: int, device: torch.device):
        super().__init__(in_features, out_features, device=device)  # uniform within 1 / sqrt(in_features)
        self.sigma = nn.Linear(in_features, out_features, device=device)
        for param in self.sigma.parameters():
            nn.init.constant_(param, 0.5 / math.sqrt(in_features))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        noise_in, noise_out = torch.randn_like(x[0]), torch.randn_like(self.bias)
        noise_in, noise_out = (noise.sign() * noise.abs().sqrt() for noise in (noise_in, noise_out))
        return super().forward(x) + noise_out * self.sigma(noise_in * x)  # equations 9 to 11


class QNetwork(nn.Module):
    """Logits of distributions of returns, or their means, if num_atoms is 1.

    (batch, 4, 84, 84) of uint8 to (batch, num_actions, num_atoms).
    """

    def __init__(self, num_actions: int, num_atoms: int, dueling: bool, noisy: bool, device: torch.device):
        super().__init__()
        linear = NoisyLinear if noisy else nn.Linear
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4, device=device),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2, device=device),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1, device=device),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.advantage1 = linear(64 * 7 * 7, 512, device=device)
        self.advantage2 = linear(512, num_actions * num_atoms, device=device)
        self.value1 = linear(64 * 7 * 7, 512, device=device) if dueling else None
        self.value2 = linear(512, num_atoms, device=device) if dueling else None
        self.num_atoms = num_atoms
        self.to(memory_format=torch.channels_last)

    def forward(self, obs: Tensor) -> Tensor:
        x = self.network((obs / 255.0).contiguous(memory_format=torch.channels_last))
        advantages = self.advantage2(F.relu(self.advantage1(x))).view(len(x), -1, self.num_atoms)
        if self.value1 is None:
            return advantages.float()
        values = self.value2(F.relu(self.value1(x))).unsqueeze(1)
        return (values + advantages - advantages.mean(dim=1, keepdim=True)).float()  # Wang et al., equation 9


def linear_schedule(start_e: float, end_e: float, duration: float, t: int) -> float:
    """Epsilon at step t: it goes from start_e to end_e within `duration` steps and stays there."""
    return start_e + (end_e - start_e) * (min(t / duration, 1) if duration else 1)


def n_step_returns(outcomes: Tensor, newer: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """n-step returns (Sutton, 1988) from windows of n rows in turn, of one environment each.

    Takes rewards, terminated and over in `outcomes`, (batch, n, 3), and how many rows there are after the
    first of each window, `newer` (batch,): a window ends there, or with the row that ends its episode. Gives,
    all (batch, 1): the discounted sum of rewards; the discount of the value that follows, 0 after a
    termination; the index of a window's last row.
    """
    rewards, terminated, over = outcomes.unbind(2)
    steps = torch.arange(outcomes.shape[1], device=outcomes.device)
    inside = (over.long().cumsum(1) - over < 1) & (steps <= newer[:, None])
    last = inside.sum(1, keepdim=True) - 1
    returns = (gamma**steps * inside * rewards).sum(1, keepdim=True)
    return returns, gamma ** (last + 1) * (1 - terminated.gather(1, last)), last


def project(probs: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Probabilities of `atoms`, both (batch, num_atoms), shared out between their neighbours in `support`.

    Algorithm 1 of arXiv:1707.06887. The support is evenly spaced, and no atom is outside of it.
    """
    most = len(support) - 1
    index = ((atoms - support[0]) * (most / (support[-1] - support[0]))).clamp(0, most)
    lower = index.int().clamp(0, most - 1)  # whatever NaN is as an int32, here it is an index
    upper_share = index - lower  # which NaN stays in, for the loss to tell
    lower = lower.long()  # by way of int32, which is faster
    projected = torch.zeros_like(probs).scatter_add(1, lower, probs * (1 - upper_share))
    return projected.scatter_add(1, lower + 1, probs * upper_share)


# The replay buffer: what a row has, the file that may hold frames, and all else.
ACTION, REWARD, TERMINATED, ENDED, VALID, OLDER = range(6)


def open_frames(file: Path, shape: tuple[int, ...], anew: bool) -> np.memmap:
    """Bytes of this shape that a file holds: a new one, or one that is as a run left it."""
    size = math.prod(shape)
    try:
        if anew:
            with file.open("xb") as opened:
                os.posix_fallocate(opened.fileno(), 0, size)  # or a disk that is full later would kill it
        elif file.stat().st_size != size:
            raise OSError(f"it has {file.stat().st_size} bytes, not {size}; --checkpoint-every has to stay")
        return np.memmap(file, np.uint8, "r+", shape=shape)
    except OSError as error:
        if anew and file.is_file() and not isinstance(error, FileExistsError):
            file.unlink()
        sys.exit(f"--buffer-file {file} of {size / 1e9:.1f} GB: {error}")


class Replay:
    """The latest steps of all games, each frame kept once, and priorities by which they are drawn.

    A row is a step of a game, and the newest of the four frames that its action saw; the next step of this
    game is `num_envs` rows later. Priorities are those of Schaul et al. to the power alpha. That of a row is
    0 if it must not be drawn: its step only goes on after an end, its n steps are not complete, or the oldest
    of its frames is overwritten.
    """

    def __init__(self, args: Args, device: torch.device):
        self.num_envs, self.n_step, self.gamma = args.num_envs, args.n_step, args.gamma
        # The frames of a checkpoint have to stay until the next one, so many more steps are kept: twice as
        # many as agent steps, as half of the steps may only go on, and some for rounding.
        self.spare = 2 * (args.checkpoint_every or 0) // args.num_envs + 4 if args.buffer_file else 0
        self.num_steps = args.buffer_size // args.num_envs + self.spare
        self.capacity = self.num_steps * args.num_envs
        self.file, shape = None, (self.capacity, 84, 84)
        if args.buffer_file:
            self.file = open_frames(Path(args.buffer_file), shape, anew=not args.resume)
            self.frames = torch.from_numpy(self.file).to(device)  # on a CPU no copy
        else:
            self.frames = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.buffer = torch.zeros(self.capacity, 6, device=device)
        # A draw reads the sums of all groups, and for each row of the batch one group: least at this size.
        self.group_size = math.isqrt(self.capacity // args.batch_size)
        groups = math.ceil(self.capacity / self.group_size)
        self.priorities = torch.zeros(groups, self.group_size, device=device)
        self.group_sums = torch.zeros(groups, dtype=torch.float64, device=device)
        self.max_priority = torch.ones(1, device=device)
        self.head = torch.zeros((), dtype=torch.long, device=device)  # the step that is written next

    def set_priorities(self, rows: Tensor, new: Tensor) -> None:
        """Write priorities (n,), and add up anew the groups that they are in: so no sum drifts."""
        self.priorities.view(-1)[rows] = new
        groups = rows // self.group_size
        self.group_sums[groups] = self.priorities[groups].sum(1, dtype=torch.float64)

    def draw(self, batch_size: int, beta: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, their priorities, and their weights, (batch_size,) each: Schaul et al., sections 3.3 and 3.4.

        One row is drawn out of each of as many equal parts of the sum of all priorities. The largest weight
        is 1. If rounding should ever hit a row whose priority is 0, so is its weight.
        """
        parts = torch.arange(batch_size, device=self.head.device)
        parts = (parts + torch.rand_like(parts, dtype=torch.float64)) / batch_size
        ends = self.group_sums.cumsum(0)  # in float64: in float32 the rows behind a long sum get nothing
        places = parts * ends[-1]
        groups = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
        place_within = (places - ends[groups] + self.group_sums[groups])[:, None]
        ends_within = self.priorities[groups].cumsum(1, dtype=torch.float64)
        within = torch.searchsorted(ends_within, place_within, right=True).clamp(max=self.group_size - 1)
        rows = groups * self.group_size + within[:, 0]
        priorities = self.priorities.view(-1)[rows]
        weights = torch.where(priorities > 0, priorities**-beta, 0)
        return rows, priorities, weights / weights.max().clamp(min=1e-8)

    def observations(self, rows: Tensor) -> Tensor:
        """What rows (n,) saw: their last four frames, or the first of a game again, (n, 4, 84, 84)."""
        older = self.buffer[rows, OLDER].long()
        back = torch.arange(3, -1, -1, device=rows.device).minimum(older[:, None])
        frames = (rows[:, None] - self.num_envs * back) % self.capacity
        return self.frames.index_select(0, frames.flatten()).view(-1, 4, 84, 84)  # faster than an index

    def transitions(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of rows (n,): observations, actions (n,), n-step returns, discounts, observations after them."""
        steps = self.num_envs * torch.arange(self.n_step, device=rows.device)
        window = self.buffer[(rows[:, None] + steps) % self.capacity]
        outcomes, actions = window[:, :, REWARD:VALID], window[:, 0, ACTION].long()
        returns, discounts, last = n_step_returns(outcomes, torch.full_like(rows, self.n_step), self.gamma)
        after = (rows + self.num_envs * (last[:, 0] + 1)) % self.capacity
        return self.observations(rows % self.capacity), actions, returns, discounts, self.observations(after)

    def move_to(self, step: int, obs: np.ndarray) -> None:
        """Do what a graph cannot: give `store` its place, and write frames to the file, if there is one."""
        self.head.fill_(step % self.num_steps)
        if self.file is not None:
            self.file[step % self.num_steps * self.num_envs :][: self.num_envs] = obs[:, -1]

    def store(self, obs: Tensor, outcomes: Tensor) -> None:
        """Write a step of all games: obs (num_envs, 4, 84, 84), outcomes (num_envs, 6).

        A row whose n steps are complete now has the highest priority so far. One whose oldest frame is
        overwritten now, or `spare` steps from now, is drawn no more.
        """
        rows = self.head * self.num_envs + torch.arange(self.num_envs, device=obs.device)
        self.frames[rows] = obs[:, -1]
        self.buffer[rows] = outcomes
        complete = (rows - self.num_envs * self.n_step) % self.capacity
        retired = (rows + self.num_envs * (self.spare + 3)) % self.capacity
        new = self.buffer[complete, VALID] * self.max_priority
        self.set_priorities(torch.cat([complete, retired]), torch.cat([new, torch.zeros_like(new)]))

    def reprioritise(self, rows: Tensor, old: Tensor, new: Tensor) -> None:
        """Give rows that were drawn new priorities, but for those that must not be drawn."""
        new = torch.where(old > 0, new, 0)
        self.max_priority.copy_(self.max_priority.maximum(new.max()))
        self.set_priorities(rows, new)

    def saved(self, steps: int) -> dict[str, Tensor]:
        """What a checkpoint after so many steps of all games needs, frames only if they are in no file."""
        rows = {"buffer": self.buffer, "priorities": self.priorities.view(-1)}
        if self.file is None:
            rows["frames"] = self.frames
        else:
            self.file.flush()
        used = min(steps, self.num_steps) * self.num_envs
        # By way of NumPy: a view would be saved with all of its memory, and a copy needs as much again.
        rows = {name: torch.from_numpy(values[:used].cpu().numpy()) for name, values in rows.items()}
        return rows | {"max_priority": self.max_priority}

    def restore(self, steps: int, saved: dict[str, Tensor]) -> None:
        """Go on from a checkpoint after so many steps, as if its last step had only reset the games."""
        if (self.file is None) != ("frames" in saved):
            sys.exit("--buffer-file has to stay: a run goes on with one if it began with one")
        used = min(steps, self.num_steps) * self.num_envs
        # Popped, or they would stay in memory twice.
        self.buffer[:used], self.priorities.view(-1)[:used] = saved.pop("buffer"), saved.pop("priorities")
        self.max_priority.copy_(saved["max_priority"])
        self.group_sums.copy_(self.priorities.sum(1, dtype=torch.float64))
        if self.file is None:
            self.frames[:used] = saved.pop("frames")
        # No return goes on into the games that begin now.
        of_games = self.buffer.view(self.num_steps, self.num_envs, -1)
        of_games[(steps - 2) % self.num_steps, :, ENDED] = 1
        of_games[(steps - 1) % self.num_steps, :, VALID] = 0


# [fast: flat] Adam and the updates of targets are few operations each.
class FlatImages(nn.Module):
    """A network whose trainable parameters become views of one tensor, `params`.

    There the channels of a convolution come last, as in the images.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        named = [(name, param) for name, param in network.named_parameters() if param.requires_grad]
        named.sort(key=lambda item: item[1].numel() % 16 != 0)  # sizes that 16 divides keep the next aligned
        self.network, self.shapes = [network], {name: param.shape for name, param in named}
        params = [param.movedim(1, -1) if param.dim() == 4 else param for _, param in named]
        self.params = nn.Parameter(torch.cat([param.flatten() for param in params]).detach())
        for (_, param), view in zip(named, self.views().values(), strict=True):
            param.requires_grad_(False).data = view.detach()

    def views(self) -> dict[str, Tensor]:
        """The parameters by their names."""
        views, parts = {}, self.params.split([shape.numel() for shape in self.shapes.values()])
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            last = shape[:1] + shape[2:] + shape[1:2]  # channels, if it is of a convolution
            views[name] = part.view(last).movedim(-1, 1) if len(shape) == 4 else part.view(shape)
        return views

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return torch.func.functional_call(self.network[0], self.views(), inputs)


class Adam(nn.Module):
    """`torch.optim.Adam` of one tensor (arXiv:1412.6980), with the gradient clipped."""

    def __init__(self, params: Tensor, lr: float | Tensor, eps=1e-8, max_norm=math.inf):
        super().__init__()
        self.params, self.lr, self.eps, self.max_norm = [params], lr, eps, max_norm
        self.register_buffer("exp_avg", torch.zeros_like(params))
        self.register_buffer("exp_avg_sq", torch.zeros_like(params))
        self.register_buffer("step", torch.zeros((), device=params.device))

    def minimize(self, loss: Tensor) -> None:
        """Take a step down the gradient of a loss; `backward()` and `step()` would break the graph."""
        (grad,) = torch.autograd.grad(loss, self.params[0])
        with torch.no_grad():
            step, beta1, beta2 = self.step.add_(1), 0.9, 0.999
            numbers = [(1 - beta2**step).sqrt(), self.lr / (1 - beta1**step)]
            if self.max_norm < math.inf:
                numbers += [(self.max_norm / (grad.square().sum().sqrt() + 1e-6)).clamp(max=1)]
            # Stacked, or a CPU would compute them anew for each few parameters.
            correction, step_size, *clip = torch.stack(numbers).unbind()
            grad = grad * clip[0] if clip else grad
            exp_avg = self.exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq = self.exp_avg_sq.lerp_(grad * grad, 1 - beta2)
            denominator = exp_avg_sq.sqrt() / correction + self.eps
            self.params[0].sub_(exp_avg / denominator * step_size)


# [fast: direct calls] Around small networks a call of `torch.compile` takes long; docs/tricks.md times it.
class Compiled:
    """A function, compiled without a break, whose code is called directly with the tensors of the first call.

    It takes tensors, returns one or none, and leaves all else in tensors that it writes to. As in a CUDA
    graph, only values of tensors may change. Some calls look whether that is so, with a RuntimeError if not.
    """

    def __init__(self, function: Callable):
        self.guarded = torch.compile(function, fullgraph=True, dynamic=False)
        self.calls, self.next_look, self.graph, self.inputs = 0, 1, None, []

    def __call__(self, *args: Tensor) -> Tensor | None:
        self.calls += 1
        if self.calls == self.next_look:
            return self.look(args)
        for place, arg in zip(self.places, args, strict=True):
            self.inputs[place] = arg
        return next(iter(self.graph([*self.inputs])), None)

    def look(self, args: tuple[Tensor, ...]) -> Tensor | None:
        """Call it with the guards of `torch.compile`; note Inductor's graph and the tensors that it takes."""
        self.next_look = self.calls + min(self.calls // 2 + 1, 997)  # odd and even calls, for what alternates
        call, notes = CompiledFxGraph.__call__, []

        def note(graph: CompiledFxGraph, inputs: list[Tensor]) -> list[Tensor]:
            notes.append((graph, [id(tensor) for tensor in inputs], [tensor.detach() for tensor in inputs]))
            return call(graph, inputs)

        stance = torch.compiler.set_stance("fail_on_recompile" if self.graph else "default")
        with stance, patch.object(CompiledFxGraph, "__call__", note):
            result = self.guarded(*args)
        [(self.graph, ids, inputs)] = notes
        if len(self.graph.output_strides) > (result is not None):  # an output that a direct call would lose
            raise RuntimeError("it writes to a network not read by its flat name, or returns a history")
        self.places = [ids.index(id(arg)) for arg in args]
        for place, tensor in enumerate(self.inputs):
            if place not in self.places and tensor.data_ptr() != inputs[place].data_ptr():
                raise RuntimeError(f"a tensor of shape {[*tensor.shape]} was replaced: write to it in place")
        self.inputs = inputs
        return result


# ---- Run ---------------------------------------------------------------------------------------------------
def parse_args() -> tuple[Args, dict]:
    """The arguments, and the checkpoint that gives --resume and --evaluate those that are not typed."""
    parser, checkpoint, saved = argparse.ArgumentParser(add_help=False), {}, {}
    parser.add_argument("--resume")
    parser.add_argument("--evaluate")
    typed, _ = parser.parse_known_args()
    if typed.resume or typed.evaluate:
        file = Path(typed.evaluate or Path(typed.resume, "checkpoint.pt")).resolve()
        checkpoint = torch.load(file, map_location="cpu", weights_only=True) | {"file": file}
        saved = {name: value for name, value in checkpoint["args"].items() if name in Args.__annotations__}
    args = tyro.cli(Args, default=Args(**saved))
    for name in FIXED if args.resume else ():
        if getattr(args, name) != saved[name]:
            sys.exit(f"--{name.replace('_', '-')} has to stay {saved[name]}, as in {file}")
    return args, checkpoint


def save_checkpoint(file: Path, args: Args, state: dict, **more: object) -> None:
    """Write a checkpoint, whole or not at all."""
    states = {name: item.state_dict() for name, item in state.items()}
    torch.save({"args": asdict(args) | {"resume": None}, **states, **more}, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def evaluate_games(args: Args, network: nn.Module, policy: Callable, videos: Path) -> list[float]:
    """Scores, not clipped, of whole games, one in each of as many, by a policy from obs to actions."""
    network.eval()  # as dropout and batch normalisation ask for
    returns, playing = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes) >> 1
    frames = []  # of the first game
    with closing(make_games(args, seeds.tolist(), learning=False)) as games:
        obs, _ = games.reset()
        while playing.any():
            if args.capture_video and playing[0] and len(frames) < 3000:
                frames.append(games.env.render(env_ids=[0])[0])
            obs, _, _, _, infos = games.step(policy(obs))
            returns[playing] += infos["reward"][playing]
            playing &= ~infos["over"]
    if frames:
        from gymnasium.utils.save_video import save_video  # it needs moviepy

        save_video(frames, str(videos), fps=15)
    network.train()
    return returns.tolist()


if __name__ == "__main__":
    # ---- Setup ---------------------------------------------------------------------------------------------
    args, checkpoint = parse_args()
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal, at which a CPU is slow
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.set_autocast_dtype(device.type, torch.bfloat16)
    torch.set_autocast_enabled(device.type, args.precision == "bfloat16")
    torch.set_autocast_cache_enabled(False)  # it would keep the first weights for good
    torch.manual_seed(args.seed)

    progress = checkpoint["progress"] if args.resume else [0, 0, 0, 0, []]
    global_step, updates, updates_due, stored, returns = progress
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}".replace("/", "_").replace(":", "_")
    folder = checkpoint["file"].parent if checkpoint else Path(f"runs/{name}")
    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    envs = make_games(args, (sequence.generate_state(args.num_envs) >> 1).tolist())

    num_actions, n_atoms = int(envs.action_space.n), args.n_atoms if args.distributional else 1
    q_network = QNetwork(num_actions, n_atoms, args.dueling, args.noisy, device)
    target_network = copy.deepcopy(q_network)  # [fast: flat]
    flat_network, flat_target = FlatImages(q_network), FlatImages(target_network)  # [fast: flat]
    optimizer = Adam(flat_network.params, lr=args.learning_rate, eps=1.5e-4)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    support = torch.linspace(args.v_min, args.v_max, n_atoms, device=device)

    replay = None if args.evaluate else Replay(args, device)
    epsilon, beta = torch.zeros(2, device=device)  # [fast: numbers as tensors]
    names = ["td_loss", "q_values"]
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def values_of(logits: Tensor) -> Tensor:
        """The means (...,) of distributions with these logits (..., n_atoms)."""
        return (logits.softmax(-1) * support).sum(-1) if args.distributional else logits[..., 0]

    def act(obs: Tensor) -> Tensor:
        """Actions (num_envs,) at obs (num_envs, 4, 84, 84): the best, or random with probability epsilon."""
        with torch.no_grad():
            values = values_of(q_network(obs))
            best = values.argmax(dim=1)
            explores = torch.rand_like(values[:, 0]) < epsilon
            return torch.where(explores, torch.randint_like(best, num_actions), best)

    def schedule(step: int) -> tuple[float, float]:
        """Epsilon and beta at an agent step."""
        exploration_steps = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, step)
        beta = linear_schedule(args.prioritized_replay_beta, 1, args.total_timesteps, step)
        return 0 if args.noisy else epsilon, beta

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The actions of the highest values, as games take them, (n,), at obs (n, 4, 84, 84)."""
        with torch.no_grad():
            values = values_of(q_network(torch.from_numpy(obs).to(device)))
            return values.argmax(dim=1).int().cpu().numpy()

    def update_network() -> None:
        """One gradient step on a new batch, whose rows get new priorities."""
        rows, priorities, weights = replay.draw(args.batch_size, beta)
        obs, actions, returns, discounts, next_obs = replay.transitions(rows)
        # [fast: one graph] Stacked, so that Inductor keeps them: else it finds the frame anew for each pixel.
        obs, next_obs = torch.stack([obs, next_obs]).unbind()
        each = torch.arange(args.batch_size, device=device)
        with torch.no_grad():
            next_logits = flat_target(next_obs)  # [fast: flat]
            chosen_by = flat_network(next_obs) if args.double else next_logits  # van Hasselt et al., eq. 4
            next_logits = next_logits[each, values_of(chosen_by).argmax(dim=1)]
            if args.distributional:  # Bellemare et al., algorithm 1
                atoms = (returns + discounts * support).clamp(args.v_min, args.v_max)
                target = project(next_logits.softmax(1), atoms, support)
            else:
                target = returns + discounts * next_logits
        logits = flat_network(obs)[each, actions]  # [fast: flat]
        if args.distributional:
            row_losses = td_errors = F.cross_entropy(logits, target, reduction="none")
        else:
            row_losses = F.huber_loss(logits, target, reduction="none").squeeze(1)  # Mnih et al.
            td_errors = (logits - target).abs().squeeze(1)  # Schaul et al., section 3.3
        loss = (weights * row_losses).mean()
        optimizer.minimize(loss)  # [fast: flat]
        with torch.no_grad():
            new = (td_errors + args.prioritized_replay_eps) ** args.prioritized_replay_alpha
            replay.reprioritise(rows, priorities, new)
        record(td_loss=loss, q_values=values_of(logits).mean())

    def update_target() -> None:
        """Move the target network a fraction `tau` of the way to the network."""
        flat_target.params.detach().lerp_(flat_network.params.detach(), args.tau)  # [fast: flat]

    def update(with_target: bool) -> None:
        """One gradient step, after which the target network moves if asked to."""
        update_network()
        if with_target:
            update_target()

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        for name, value in values.items():
            losses[name].copy_(value.detach())  # [fast: losses in place]

    def log_losses() -> None:
        """Write the latest losses; one that is not finite ends the run."""
        for name, loss in zip(losses, torch.stack([*losses.values()]).tolist(), strict=True):  # sync
            writer.add_scalar(f"losses/{name}", loss, global_step)
            if not math.isfinite(loss):
                sys.exit(f"{name} is {loss} at step {global_step}")

    def log_episode(index: int) -> None:
        """Log the game that is over."""
        returns.append(infos["scores"][index].item())
        writer.add_scalar("charts/episodic_return", returns[-1], global_step)
        writer.add_scalar("charts/episodic_length", infos["lengths"][index], global_step)

    def due(every: int | None) -> bool:
        """True once in so many agent steps, and in the last step; never if None."""
        return every is not None and (last or global_step // every > previous_step // every)

    def stop(number: int, _) -> None:
        """Have Ctrl+C and what Slurm sends end the run after its step; the same again ends it at once."""
        stopping.append(number)
        signal.signal(number, signal.SIG_DFL)

    if args.evaluate:
        q_network.load_state_dict(checkpoint["q_network"])
        eval_returns = evaluate_games(args, q_network, best_actions, folder / f"videos/{time.time():.0f}")
        print(json.dumps(asdict(args) | {"eval_returns": eval_returns}))
        sys.exit()

    # [fast: one graph] Policy, gradient step, what stores a step.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes seconds
        act, update_network, replay.store = map(Compiled, (act, update_network, replay.store))
    # [fast: graph capture] One launch for all kernels of a call. A graph has no branches: one for each kind.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    kinds = [(False,), (True,)]
    if cudagraphs:
        act, replay.store = map(partial(CudaGraphModule, warmup=5, device=device), (act, replay.store))
        graphs = {kind: CudaGraphModule(partial(update, *kind), warmup=5, device=device) for kind in kinds}

        def update(*kind: bool) -> None:
            graphs[kind]()

    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back. The
    # replay buffer stays as it is: priorities are 0, and the row that is written the first step overwrites.
    if args.compile or cudagraphs:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        replay.head.fill_(stored % replay.num_steps)
        obs = torch.zeros(args.num_envs, 4, 84, 84, dtype=torch.uint8, device=device)
        for kind in (6 if cudagraphs else 1) * kinds:  # captured: four warm up, one records, one replays
            act(obs)
            replay.store(obs, torch.zeros(args.num_envs, 6, device=device))
            update(*kind)
        for name, item in state.items():
            item.load_state_dict(saved[name])
    else:
        print("neither --compile nor a captured graph: this is for debugging", file=sys.stderr)
    if args.cudagraphs and not cudagraphs:
        print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)

    # ---- Training ------------------------------------------------------------------------------------------
    if args.resume:
        for name, item in state.items():
            item.load_state_dict(checkpoint[name])
        replay.restore(stored, checkpoint)

    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        run |= {"id": folder.name[-64:], "name": folder.name}
        wandb.init(**run, config=asdict(args), resume="allow", save_code=True, sync_tensorboard=True)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    writer = SummaryWriter(str(folder), purge_step=global_step + 1)
    writer.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=2)}\n```")

    torch.manual_seed(int(sequence.generate_state(1)[0]))
    obs, infos = envs.reset()[0], {"over": np.zeros(args.num_envs, dtype=bool)}
    older_frames = np.zeros(args.num_envs)  # of the game, three at most
    first_update, eval_returns, last = updates, [], global_step >= args.total_timesteps
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            for number, value in zip((epsilon, beta), schedule(global_step), strict=True):
                number.fill_(value)  # [fast: numbers as tensors]
            seen = torch.from_numpy(obs).to(device, non_blocking=True)
            actions = act(seen).cpu().numpy()  # sync
            if global_step >= args.learning_starts and updates == first_update:
                sps_step, sps_time = global_step, time.perf_counter()  # from the first step that learns
            while updates_due >= args.train_frequency:  # a GPU works on these while environments step
                updates, updates_due = updates + 1, updates_due - args.train_frequency
                update(updates * args.train_frequency % args.target_network_frequency < args.train_frequency)

            previous_step = global_step
            began = infos["over"]  # there this step only begins the next game
            next_obs, rewards, terminated, truncated, infos = envs.step(actions.astype(np.int32))
            global_step += int(np.count_nonzero(~envs.first))  # without steps that only went on
            updates_due += max(0, global_step - max(previous_step, args.learning_starts))
            for index in np.flatnonzero(infos["over"]):
                log_episode(index)

            outcomes = [actions, rewards, terminated, envs.ended, ~envs.first, older_frames]
            outcomes = torch.from_numpy(np.stack(outcomes, axis=1, dtype=np.float32))
            replay.move_to(stored, obs)
            replay.store(seen, outcomes.to(device, non_blocking=True))
            older_frames = np.where(began, 0, (older_frames + 1).clip(max=3))
            obs, stored = next_obs, stored + 1

            last = bool(stopping) or global_step >= args.total_timesteps
            if due(args.log_every) or due(args.checkpoint_every):
                if updates > first_update:
                    log_losses()
                sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
                writer.add_scalar("charts/SPS", sps, global_step)
                for name, value in zip(("epsilon", "beta"), schedule(global_step), strict=True):
                    writer.add_scalar(f"charts/{name}", value, global_step)
                bar.set_postfix_str(f"SPS {sps:.0f}, return {np.mean(returns[-10:] or math.nan):.1f}")
                bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                more = {"progress": [global_step, updates, updates_due, stored, returns]}
                save_checkpoint(folder / "checkpoint.pt", args, state, **more, **replay.saved(stored))
            if not stopping and (due(args.eval_every) or (last and args.capture_video)):
                pause = time.perf_counter()
                eval_returns = evaluate_games(args, q_network, best_actions, folder / f"videos/{global_step}")
                score = float(np.mean(eval_returns))
                writer.add_scalar("charts/eval_return", score, global_step)
                best = folder / "best.pt"
                if not best.exists() or score > torch.load(best, map_location="cpu")["score"]:
                    save_checkpoint(best, args, state, score=score)
                sps_time += time.perf_counter() - pause

    # ---- End -----------------------------------------------------------------------------------------------
    if args.track:
        wandb.save(folder / "videos/*/*.mp4", base_path=folder)
        wandb.finish()  # whose last words come before the summary
    summary = {"script": Path(__file__).stem, "compile": False, "cudagraphs": False, **asdict(args)}
    summary |= {"device": device.type, "folder": str(folder), "total_timesteps": global_step}
    summary |= {"updates": updates, "sps": sps, "episodes": len(returns), "eval_returns": eval_returns}
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary["cudagraphs"] = cudagraphs  # [fast: graph capture]
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
