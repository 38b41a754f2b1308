# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.11,<2.14", "tensordict>=0.15.3,<0.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3",
#     "tyro>=1,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "psutil>=6", "moviepy>=2,<3", "filelock>=3.15",
# ]
# ///
"""Soft Actor-Critic for continuous actions: many agents, one a seed, in one graph.

Paper: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905 (2018).
Run:   python leanrl/sac_continuous_action_seeds.py --seeds 1 2 3 4 --env-id HalfCheetah-v4 --compile --cudagraphs
Twin:  leanrl/sac_continuous_action_torchcompile.py, of one agent. Each here begins as it does, and draws other random numbers.
Tags:  every place that differs from the twin opens with `# [seeds k]`; docs/tricks.md has a chapter on each k.
"""

import atexit
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import psutil
import torch
import torch.nn.functional as F
import tyro
from filelock import FileLock, Timeout
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ---- Arguments -------------------------------------------------------------------------------------------------------
@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # the name of this experiment
    seed: int = 1  # seed of the first agent
    num_seeds: int = 4  # the number of agents, whose seeds count up from --seed
    seeds: tuple[int, ...] | None = None  # the seeds of the agents, in place of those
    cuda: bool = True  # use a CUDA device if there is one
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # high: TF32 on CUDA; medium: also bfloat16 on the CPU
    track: bool = False  # also send the logs to Weights & Biases
    wandb_project_name: str = "leanrl"  # the project of the Weights & Biases run
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases run
    capture_video: bool = False  # record videos of the first environment under runs/<run>/videos
    save_model: bool = False  # write a checkpoint at the end
    checkpoint_every: int | None = None  # agent steps between two checkpoints, of which the newest two are kept
    resume: tuple[Path, ...] | None = None  # go on with the runs of these checkpoints or folders, one for each seed
    evaluate: tuple[Path, ...] | None = None  # do not train, evaluate these checkpoints or folders, one for each seed
    eval_episodes: int | None = None  # how many episodes to evaluate the agent over at the end; 10 with --evaluate
    log_every: int = 100  # agent steps between two log entries
    compile: bool = False  # compile the policy and the gradient step with torch.compile
    cudagraphs: bool = False  # capture the policy and the gradient step as CUDA graphs

    env_id: str = "HalfCheetah-v4"  # the id of the environment: any with Box observations and bounded Box actions
    total_timesteps: int = 1_000_000  # agent steps in all, over all environments
    num_envs: int = 1  # the number of parallel environments of each agent
    env_workers: bool = False  # step each environment in a process of its own
    buffer_size: int = 1_000_000  # transitions that the replay buffer of each agent holds, over its environments
    gamma: float = 0.99  # the discount factor
    tau: float = 0.005  # how far target networks move towards their networks at each of their updates, from 0 to 1
    batch_size: int = 256  # the number of transitions in a gradient step
    learning_starts: int = 5_000  # agent steps with random actions before the first gradient step
    updates_per_step: float = 1.0  # gradient steps per agent step, whatever the number of environments
    policy_lr: float = 3e-4  # the learning rate of the actor
    q_lr: float = 1e-3  # the learning rate of the critics and of the entropy coefficient
    policy_frequency: int = 2  # gradient steps from one update of the actor to the next (each makes up for those left out)
    target_network_frequency: int = 1  # gradient steps from one update of the target networks to the next
    alpha: float = 0.2  # the entropy coefficient under --no-autotune
    autotune: bool = True  # learn the entropy coefficient


def check_args(args: Args) -> None:
    """Refuse values that cannot work, before anything is started."""
    ranges = {
        "seed": (0, 2**63 - 1),
        **dict.fromkeys(("log_every", "checkpoint_every", "eval_episodes", "total_timesteps", "num_envs"), (1, math.inf)),
        **dict.fromkeys(("batch_size", "policy_frequency", "target_network_frequency"), (1, math.inf)),
        "num_seeds": (1, min(4096, 2**63 - args.seed)),
        "learning_starts": (0, math.inf if args.evaluate else args.total_timesteps - args.num_envs - 1),
        "buffer_size": (0 if args.evaluate else max(args.batch_size, args.num_envs), math.inf),
        **dict.fromkeys(("updates_per_step", "policy_lr", "q_lr", "alpha"), (0, math.inf)),
        **dict.fromkeys(("gamma", "tau"), (0, 1)),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and (not low <= value <= high or value == math.inf):
            refuse(f"--{name.replace('_', '-')} takes a number from {low} to {high}, got {value}")
    if args.resume and args.evaluate:
        refuse("--resume and --evaluate exclude each other")
    if args.seeds and (len({*args.seeds}) < len(args.seeds) or not all(0 <= seed < 2**63 for seed in args.seeds)):  # [seeds 1]
        refuse(f"--seeds takes different numbers from 0 to {2**63 - 1}, got {' '.join(map(str, args.seeds))}")
    if () in (args.seeds, args.resume, args.evaluate):
        refuse("--seeds, --resume and --evaluate take at least one value")
    if args.track or (args.env_workers and args.capture_video):
        refuse("--track follows one agent a process" if args.track else "--env-workers and --capture-video exclude each other")


def refuse(message: str) -> NoReturn:
    """Tell what is wrong with the arguments in one line on standard error and leave with exit status 2."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())[:1000]}", file=sys.stderr)
    raise SystemExit(2)


# ---- Environment -----------------------------------------------------------------------------------------------------
def make_env(args: Args, film: bool = False) -> gym.Env:
    """Build an environment, to be filmed or not; exits with status 2 where that fails or its spaces do not fit."""
    warnings.filterwarnings("ignore", message=".*is out of date.*")  # the literature's figures are those of -v4
    try:
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if film else {}))
        if film:
            if renderer := getattr(env.unwrapped, "mujoco_renderer", None):
                # Gymnasium 1.4 looks at where an episode began, and a HalfCheetah runs out of sight. -1: no such camera.
                cameras = [renderer.model.camera(index).name for index in range(renderer.model.ncam)]
                renderer.camera_id = cameras.index("track") if "track" in cameras else -1
            env.reset()
            env.render()
    except Exception as error:  # an environment may raise anything
        refuse(f"--env-id{' --capture-video' if film else ''}: cannot make {args.env_id}: {type(error).__name__}: {error}")
    seen, acts = env.observation_space, env.action_space
    boxes = isinstance(seen, gym.spaces.Box) and isinstance(acts, gym.spaces.Box) and np.issubdtype(acts.dtype, np.floating)
    if not (boxes and (np.isfinite(np.float32([acts.low, acts.high])) & (acts.low < acts.high)).all()):
        refuse(f"--env-id takes Box observations and bounded Box actions of real numbers, {args.env_id} has {seen} and {acts}")
    # An environment may return its own state, which its reset in the same step would overwrite.
    return gym.wrappers.TransformObservation(env, np.copy, seen)


# ---- Networks --------------------------------------------------------------------------------------------------------
class EnsembleLinear(nn.Module):
    """`nn.Linear` `members` times, as one batched product: (members, batch, in_features) to (members, batch, out_features)."""

    def __init__(self, members: int, in_features: int, out_features: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features, device=device))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features, device=device))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(in_features**-0.5), in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight) + self.bias  # [seeds 2]


class Linear(nn.Linear):  # [seeds 2]
    """`nn.Linear` of several agents as one batched product: (agents, batch, in_features) to (agents, batch, out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight.mT) + self.bias.unsqueeze(-2)


class Critic(nn.Module):
    """Two action-value functions at once: (batch, obs_dim) and (batch, action_dim) to (2, batch)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = EnsembleLinear(2, obs_dim + action_dim, 256, device)
        self.fc2 = EnsembleLinear(2, 256, 256, device)
        self.fc3 = EnsembleLinear(2, 256, 1, device)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([obs, actions], dim=-1).unsqueeze(-3)  # [seeds 2]
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


class Actor(nn.Module):
    """A Gaussian over actions before squashing: (batch, obs_dim) to its mean and log(std), each (batch, action_dim)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = Linear(obs_dim, 256, device=device)  # [seeds 2]
        self.fc2 = Linear(256, 256, device=device)
        self.fc_out = Linear(256, 2 * action_dim, device=device)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        mean, log_std = self.fc_out(x).chunk(2, dim=-1)
        return mean, -5 + 3.5 * (torch.tanh(log_std) + 1)  # from -5 to 2


# ---- Algorithm -------------------------------------------------------------------------------------------------------
# [seeds 2] The parameters, batches and losses of all agents lie in a further axis, the first, and layers are batched products.
def stack(networks: tuple[nn.Module, ...]) -> nn.Module:
    """The first network, with the parameters of all: shapes (agents, ...)."""
    for parameters in zip(*(network.parameters() for network in networks), strict=True):
        parameters[0].data = torch.stack([parameter.detach() for parameter in parameters])
    return networks[0]


# [seeds 3] Numbers from a counter instead of a generator of PyTorch's, so that an agent's do not depend on the others.
def uniform(streams: Tensor, *shape: int) -> Tensor:
    """Draw from the uniform distribution on (0, 1), (agents, *shape), float64, by SplitMix64 (doi:10.1145/2660193.2660195).

    streams: (agents,), int64, where each agent is in the one long sequence; moved on in place.
    """
    count, golden = math.prod(shape), 0x9E3779B97F4A7C15 - 2**64
    bits = (streams[:, None] + torch.arange(1, count + 1, device=streams.device)) * golden
    streams.add_(count)
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    bits = (bits ^ (bits >> 31 & 2**33 - 1)) >> 12 & 2**52 - 1
    return ((bits.double() + 0.5) * 2.0**-52).view(-1, *shape)


def normal(streams: Tensor, *shape: int) -> Tensor:
    """Draw from the standard normal distribution, (agents, *shape), float32, with streams as in `uniform`."""
    return (math.sqrt(2) * torch.erfinv(2 * uniform(streams, *shape) - 1)).float()


# [seeds 2, 3]
def sample_batch(draws: Tensor, buffer: Tensor, size: Tensor, obs_dim: int, action_dim: int) -> tuple[Tensor, ...]:
    """Draw transitions uniformly, with replacement, from the first `size` rows of the replay buffer.

    A row is a whole transition, which one gather fetches. `size` is a tensor: a captured graph would not see a number grow.
    draws: (agents, batch), numbers between 0 and 1 that choose the rows. Returns obs (agents, batch, obs_dim), actions
    (agents, batch, action_dim), rewards, terminated (agents, batch), of 0.0 and 1.0, and next_obs.
    """
    firsts = torch.arange(len(buffer), device=buffer.device)[:, None] * buffer.shape[1]  # [seeds 2]
    indices = (draws * size).long() + firsts
    rows = buffer.flatten(0, 1).index_select(0, indices.flatten()).view(*indices.shape, -1)
    obs, actions, scalars, next_obs = rows.split([obs_dim, action_dim, 2, obs_dim], dim=-1)
    return obs, actions, *scalars.unbind(-1), next_obs


def sample_actions(streams: Tensor, mean: Tensor, log_std: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions of a squashed Gaussian with their log-probabilities (arXiv:1812.05905, appendix C).

    mean, log_std: (batch, action_dim). scale: (action_dim,), half the width of the action space. Returns actions (batch,
    action_dim) in [-1, 1], in units of it, and log-probabilities (batch,) in nats, as densities over the actions themselves.
    log(1 - tanh(u)^2) is written 2 (log 2 - u - softplus(-2u)), which is finite for every u.
    """
    noise = normal(streams, *mean.shape[1:])  # [seeds 3]
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - scale.log() - 2 * (math.log(2) - u - F.softplus(-2 * u))
    return torch.tanh(u), log_prob.sum(dim=-1)


def soft_target(rewards: Tensor, terminated: Tensor, values: Tensor, log_prob: Tensor, alpha: Tensor, gamma: float) -> Tensor:
    """Target of both critics, (batch,): r + gamma (1 - terminated) (min_i Q_i - alpha log pi) (equations 2 and 3).

    values: (2, batch), the target critics at the next observations and at actions drawn there with log_prob (batch,).
    """
    return rewards + gamma * (1 - terminated) * (values.amin(dim=-2) - alpha * log_prob)


def critic_losses(values: Tensor, target: Tensor) -> Tensor:
    """Mean squared Bellman error of each critic, (2,), from values (2, batch) and their target (batch,)."""
    return (values - target).square().mean(dim=-1)


def actor_loss(log_prob: Tensor, values: Tensor, alpha: Tensor) -> Tensor:
    """E[alpha log pi - min_i Q_i], 0-dim, from log_prob (batch,) and values (2, batch) (equation 7)."""
    return (alpha * log_prob - values.amin(dim=-2)).mean(dim=-1)


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """-alpha E[log pi + target entropy], 0-dim, from log_prob (batch,) (equation 18)."""
    return -log_alpha.exp() * (log_prob + target_entropy).mean(dim=-1)


def adam_tensors(name: str, params: dict[str, Tensor], optimizer: optim.Adam) -> dict[str, Tensor]:
    """Make Adam's moments and step counts ahead, of zeros; returns all by name: <name>.exp_avg.<parameter> and so on."""
    for param in params.values():
        moments = {kind: torch.zeros_like(param) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = moments | {"step": torch.zeros((), device=param.device)}
    states = {key: {"params": param, **optimizer.state[param]} for key, param in params.items()}
    return {f"{name}.{kind}.{key}": tensor for key, state in states.items() for kind, tensor in state.items()}


# [fast 2] Adam is part of the graph, and one operation for a whole network, as is a target's step or clipping the gradient.
class Flat(nn.Module):
    """A network whose parameters are views of one flat tensor, `params`; Adam's moments and counts are, too, in `state`."""

    def __init__(self, name: str, network: nn.Module, tensors: dict[str, Tensor]):
        super().__init__()
        # Sizes that 16 divides come first, and keep the next aligned. A list hides the network's parameters from nn.Module.
        named = sorted(network.requires_grad_(False).named_parameters(), key=lambda item: item[1].numel() % 16 != 0)
        self.network, self.shapes, self.state = [network], {key: param.shape for key, param in named}, {}
        for kind in ("params", "exp_avg", "exp_avg_sq", "step"):
            if parts := [tensors[f"{name}.{kind}.{key}"] for key in self.shapes if f"{name}.{kind}.{key}" in tensors]:
                flat = self.state[kind] = torch.cat([part.detach().flatten() for part in parts])
                for part, view in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                    part.data = view.view(part.shape)
        self.params = self.state["params"] = nn.Parameter(self.state["params"], requires_grad="step" in self.state)

    def forward(self, *inputs: Tensor, **options) -> Tensor | tuple[Tensor, ...]:
        parts = self.params.split([shape.numel() for shape in self.shapes.values()])
        views = {key: part.view(shape) for (key, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return functional_call(self.network[0], views, inputs, options)


@torch.no_grad()
def adam_step(state: dict[str, Tensor], grad: Tensor, lr: float | Tensor, eps: float = 1e-8) -> None:
    """One step of Adam in place (arXiv:1412.6980, algorithm 1), with the defaults of `torch.optim.Adam`."""
    beta1, beta2 = 0.9, 0.999
    step = state["step"].add_(1).flatten()[0]  # the eager script's optimizer counts for each parameter
    exp_avg = state["exp_avg"].lerp_(grad, 1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].lerp_(grad * grad, 1 - beta2)
    state["params"].sub_(exp_avg / (exp_avg_sq.sqrt() / (1 - beta2**step).sqrt() + eps) * (lr / (1 - beta1**step)))


# ---- Logging ---------------------------------------------------------------------------------------------------------
class Logger:
    """A run's folder with its TensorBoard log, under --track also on Weights & Biases; episodes; progress bar; run summary."""

    def __init__(self, args: Args, folder: Path | None, step: int, episodes: list, trains: bool):
        self.args, self.episodes, self.logged, self.saved_step, self.sps = args, episodes, len(episodes), step, None
        self.returns, self.lengths, self.stopping = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=np.int64), []
        name = re.sub(r"[^\w.=-]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
        try:
            for number in range(1, 10**9) if folder is None else ():
                with suppress(FileExistsError):  # of a run that started in the same second
                    folder = Path("runs", name if number == 1 else f"{name}_{number}")
                    os.makedirs(folder)
                    break
            self.folder, self.lock = folder, FileLock(folder / ".lock")
            self.lock.acquire(blocking=False)
        except (OSError, NotImplementedError) as error:
            refuse(f"{folder or 'runs'} cannot be written to: {'a run is at work' if isinstance(error, Timeout) else error}")
        if args.track:
            run = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": folder.name, "resume": "allow"}
            try:
                import wandb

                wandb.init(**run, id=folder.name[-64:], config=asdict(args), sync_tensorboard=True, save_code=True)
            except Exception as error:  # such as a missing login
                refuse(f"--track cannot start Weights & Biases: {error}")
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if args.resume and trains else None)  # later logs go
        self.writer.add_text("hyperparameters", "param|value\n-|-" + "".join(f"\n{k}|{v}" for k, v in vars(args).items()))
        tqdm.monitor_interval = 0  # a failed draw keeps tqdm's lock, for which a monitor would hold up the end
        self.bar = tqdm(total=args.total_timesteps, initial=step, unit="step", disable=True)  # [seeds 4] Loggers has one
        self.bar.miniters, self.bar.dynamic_miniters = 1, False  # else it stands still where learning slows the steps down

    def count(self, step: int, actions: np.ndarray, rewards: np.ndarray, done: np.ndarray, *obs: np.ndarray, valid=1) -> None:
        """Add a step of each environment, where `valid` is 1, to its episode, which ends if `done`; all have to be finite."""
        for array in (rewards, *obs) if math.isfinite(np.vdot(actions, actions)) else ():  # else the losses will tell
            if not math.isfinite(np.vdot(array, array)):  # 0.4 us; np.isfinite(array).all() takes 1.6
                for index, *_ in np.argwhere(~np.isfinite(array)):
                    raise SystemExit(f"{Path(__file__).name}: error: environment {index}, step {step}: a number is not finite")
        self.returns += rewards
        self.lengths += valid
        if np.count_nonzero(done):  # 0.2 us; done.any() takes 1.3
            self.episodes += [(step, float(self.returns[i]), int(self.lengths[i])) for i in np.flatnonzero(done)]
            self.returns[done], self.lengths[done] = 0, 0

    def log(self, step: int, metrics: dict[str, Tensor], **charts: float) -> None:
        """Write new episodes, the means of metrics, and charts. A metric that is not finite ends the run."""
        values = torch.stack([metric.mean() for metric in metrics.values()]).tolist() if metrics else []  # sync: one for all
        self.sps = (step - self.start[0]) / (time.perf_counter() - self.start[1])
        scalars = [(f"losses/{name}", value, step) for name, value in zip(metrics, values, strict=True)]
        scalars += [(f"charts/{name}", value, step) for name, value in {**charts, "SPS": self.sps}.items()]
        for end, value, length in self.episodes[self.logged :]:
            scalars += [("charts/episodic_return", value, end), ("charts/episodic_length", length, end)]
        self.logged = len(self.episodes)
        for name, value, at in scalars:
            with suppress(OSError):  # a full disk ends the log, as the writer tells, but not the training
                self.writer.add_scalar(name, value, at)
            if name.startswith("losses/") and not math.isfinite(value):
                raise SystemExit(f"{Path(__file__).name}: error: {name} is {value} at step {at}")
        recent = f", return {np.mean([value for _, value, _ in self.episodes[-10:]]):.1f}" if self.episodes else ""
        self.bar.set_postfix_str(f"SPS {self.sps:.0f}{recent}", refresh=False)
        try:
            self.bar.update(step - self.bar.n)
        except OSError as error:
            self.bar.disable, sys.stderr = True, open(os.devnull, "w")
            self.stopping += [13] * isinstance(error, BrokenPipeError)  # SIGPIPE; a full disk ends the bar only

    def close(self) -> None:
        """End the logs."""
        for log in (self.writer, self.bar):
            with suppress(OSError):
                log.close()
        if self.args.track:
            sys.modules["wandb"].finish()
        self.lock.release()

    def print_summary(self, **measured) -> None:
        """Print the run summary, one line of JSON: arguments, what is given, and the returns of the last episodes."""
        returns = [value for _, value, _ in self.episodes]
        means = {f"episodic_return{k}": float(np.mean(returns[-n:])) if returns else None for k, n in (("", 100), ("_10", 10))}
        summary = {"script": Path(__file__).stem, **asdict(self.args), "sps": self.sps, "episodes": len(returns), **means}
        summary = json.loads(json.dumps(summary | measured, default=str), parse_constant=lambda _: None)  # JSON has no inf
        try:
            print(json.dumps(summary), flush=True)
        except OSError:  # nobody reads it
            sys.stdout = open(os.devnull, "w")


# [seeds 4] Each agent has the folder of a run of its own; a number that is not finite ends its logs, and no other's.
class Loggers:
    """A Logger for each agent, together used like one, with one progress bar and one summary."""

    def __init__(self, args: Args, each: list[Args], folders: list, step: int, episodes: list[list], trains: bool):
        given = zip(each, folders, episodes, strict=True)
        self.args, self.each = args, [Logger(own, folder, step, ended, trains) for own, folder, ended in given]
        self.folder, self.sps, self.lost, self.stopping = self.each[0].folder, None, [], []
        self.bar = tqdm(total=args.total_timesteps, initial=step, unit="step", dynamic_ncols=True, disable=not trains)
        self.bar.miniters, self.bar.dynamic_miniters = 1, False  # else it stands still where learning slows the steps down

    def call(self, function: Callable[[int, Logger], None]) -> None:
        """Call a function with the index and the logger of each agent; one for which it exits is lost, and left out later."""
        for index, logger in enumerate(self.each):
            try:
                if logger not in self.lost:
                    function(index, logger)
            except SystemExit as error:
                self.lost.append(logger)
                with suppress(OSError):  # as where the bar cannot be drawn any more
                    tqdm.write(f"{error}; the agent of seed {logger.args.seed} is lost", file=sys.stderr)

    def count(self, step: int, *arrays: np.ndarray) -> None:
        """Add a step of all environments to their agents' episodes."""
        parts = [array.reshape(len(self.each), -1, *array.shape[1:]) for array in arrays]
        self.call(lambda index, logger: logger.count(step, *(part[index] for part in parts)))

    def log(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Write the episodes and metrics, (agents, ...), of each agent."""
        means = [metric.reshape(len(self.each), -1).mean(dim=1) for metric in metrics.values()]
        values = torch.stack(means, dim=1).cpu() if means else torch.zeros(len(self.each), 0)  # sync: one for all
        for logger in self.each:
            logger.start = self.start
        self.call(lambda index, logger: logger.log(step, dict(zip(metrics, values[index], strict=True))))
        self.sps = len(self.each) * (step - self.start[0]) / (time.perf_counter() - self.start[1])
        returns = [value for logger in self.each for _, value, _ in logger.episodes[-10:]]
        self.bar.set_postfix_str(f"SPS {self.sps:.0f}{f', return {np.mean(returns):.1f}' if returns else ''}", refresh=False)
        try:
            self.bar.update(step - self.bar.n)
        except OSError as error:
            self.bar.disable, sys.stderr = True, open(os.devnull, "w")
            self.stopping += [13] * isinstance(error, BrokenPipeError)  # SIGPIPE; a full disk ends the bar only

    def close(self) -> None:
        """End all logs."""
        for log in (*self.each, self.bar):
            with suppress(OSError):
                log.close()

    def print_summary(self, **measured) -> None:
        """Print the run summary, in which steps/s are the sum over agents, and what is of one agent is a list."""
        returns = [[value for _, value, _ in logger.episodes] for logger in self.each]
        for name, last in {"episodic_return": 100, "episodic_return_10": 10}.items():
            measured[name] = [float(np.mean(values[-last:])) if values else None for values in returns]
        seeds = [logger.args.seed for logger in self.each]
        measured |= {"seed": seeds[0], "num_seeds": len(seeds), "seeds": seeds, "sps": self.sps}
        self.each[0].print_summary(**asdict(self.args) | measured, episodes=[len(values) for values in returns])


def stop_when_asked(asked: list[int], first: str | None = None) -> None:
    """Have Ctrl+C, SIGTERM and SIGHUP add their number to `asked`, and interrupt, unless something is to end `first`."""

    def note(number: int, _) -> None:
        asked.append(number)
        if first is None or asked.count(number) > 1:
            raise KeyboardInterrupt
        with suppress(OSError):
            os.write(2, f"\n{signal.Signals(number).name}: ending after {first}; once more to end at once\n".encode())

    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, note)


# ---- Checkpoint ------------------------------------------------------------------------------------------------------
def identity(args: Args) -> dict:
    """What a checkpoint is of: the version of its format, the algorithm, and the arguments as plain values."""
    algorithm = re.sub("_(torchcompile|seeds)$", "", Path(__file__).stem)
    return {"format": 2, "algorithm": algorithm, **json.loads(json.dumps(asdict(args), default=str))}


def save_checkpoint(logger: Logger, last: bool, progress: list, tensors: dict[str, Tensor]) -> None:
    """Write <run>/<step>.pt if it is due or the run at its `last` step, whole or not at all: arguments, `progress`, `tensors`.

    Keeps the one saved before. Only warns where the disk is full. A number that is not finite is not saved, and ends the run.
    """
    args, step, previous = logger.args, progress[0], logger.saved_step
    if step - previous < (args.checkpoint_every or math.inf) and not (last and (args.save_model or args.checkpoint_every)):
        return
    path, new, logger.saved_step = logger.folder / f"{step}.pt", logger.folder / "checkpoint.new", step
    try:
        # Through NumPy, because a slice of a tensor would be saved with all that it is a slice of.
        state = {name: torch.from_numpy(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}  # sync
        for name, tensor in state.items():
            if not torch.stack(tensor.aminmax()).isfinite().all():  # 16 ms for a buffer where isfinite() takes 1.2 s
                raise SystemExit(f"{Path(__file__).name}: error: {name} is not finite at step {step}")
        with suppress(OSError):
            logger.writer.flush()  # so that curves have no gap
        torch.save({"identity": identity(args), "progress": progress, "state": state}, new)
        new.replace(path)
        for other in logger.folder.glob("*.pt"):
            if other.stem.isdecimal() and int(other.stem) < step and int(other.stem) != previous:
                other.unlink()
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)  # first: what is told may go to the same disk
        with suppress(OSError):
            print(f"{Path(__file__).name}: warning: no checkpoint {path}: {error}".splitlines()[0], file=sys.stderr)


def of_each(args: Args) -> list[Args]:  # [seeds 5]
    """The arguments of each agent as of a run of its own; of folders to resume, with the newest checkpoint that all have."""
    seeds = args.seeds or range(args.seed, args.seed + args.num_seeds)
    paths = args.resume or args.evaluate or [None] * len(seeds)
    if len(paths) != len(seeds):
        refuse(f"--resume and --evaluate take a path for each of the {len(seeds)} seeds, got {len(paths)}")
    if args.resume and all(path.is_dir() for path in paths):
        common = set.intersection(*({file.name for file in path.glob("[0-9]*.pt")} for path in paths))
        newest = max(common, key=lambda name: (paths[0] / name).stat().st_mtime_ns, default="")
        paths = [path / newest for path in paths]
    kind = "resume" if args.resume else "evaluate"
    return [replace(args, seed=seed, num_seeds=1, seeds=None, **{kind: path}) for seed, path in zip(seeds, paths, strict=True)]


def of_agent(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of an agent, of the names and shapes that a run of its own has. All share the counts of Adam's steps."""
    return {name: tensor[index] if tensor.ndim else tensor for name, tensor in tensors.items()}


def save_checkpoints(loggers: Loggers, last: bool, progress: list, tensors: dict[str, Tensor]) -> None:
    """Call `save_checkpoint` for each agent, with its episodes of the last item of `progress` and its tensors."""
    *steps, episodes = progress
    loggers.call(lambda index, logger: save_checkpoint(logger, last, [*steps, episodes[index]], of_agent(tensors, index)))


def load_checkpoint(args: Args, ignored: tuple[str, ...]) -> dict:
    """Read the checkpoint to resume or evaluate; nothing in it is executed. Tells arguments that differ or are `ignored`."""
    flag, newest = ("--resume", args.resume) if args.resume else ("--evaluate", args.evaluate)
    try:
        newest = max(newest.glob("[0-9]*.pt"), key=lambda file: file.stat().st_mtime_ns, default=newest)
        with warnings.catch_warnings(action="ignore"):  # if it is none
            checkpoint = torch.load(newest, map_location="cpu", weights_only=True)
        old, now = checkpoint.pop("identity", checkpoint), identity(args)
        for name in ("format", "algorithm", "env_id", *(["num_envs", "seed"] if args.resume else [])):
            if old[name] != now[name]:
                refuse(f"{flag} takes a checkpoint of {name} {now[name]}, {newest} has {old[name]}")
        print(f"checkpoint: {newest}", file=sys.stderr)
        for name in now if args.resume else ():
            if name not in ("resume", "evaluate") and old.get(name, now[name]) != now[name]:
                effect = "is ignored" if name in ignored else "from here on"
                print(f"--{name.replace('_', '-')} {now[name]} {effect}, it was {old[name]}", file=sys.stderr)
        return {"folder": newest.resolve().parent, "progress": checkpoint["progress"], "state": checkpoint["state"]}
    except Exception as error:
        refuse(f"{flag} takes a checkpoint or a folder with one (--save-model), {newest} is neither: {type(error).__name__}")


def restore(tensors: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Move the tensors of a checkpoint into those of the same names. Exits with status 2 where names or shapes differ."""
    for name in sorted(tensors.keys() | state.keys() - {"buffer"}):
        shapes = [tuple(those[name].shape) if name in those else None for those in (tensors, state)]
        if shapes[0] != shapes[1]:
            refuse(f"--resume and --evaluate take a checkpoint with {name} of shape {shapes[0]}, this one has {shapes[1]}")
        tensors[name].detach().copy_(state[name])


def make_own(trainer: int, args: Args, film: bool) -> gym.Env:  # [seeds 4]
    """Build an environment; a worker leaves signals to the process that trains, which `trainer` is the number of."""
    for number in signal.valid_signals() & {1, 2, 15} if os.getpid() != trainer else ():  # HUP, INT, TERM
        signal.signal(number, signal.SIG_IGN)
    return make_env(args, film)


def evaluate(args: Args, folder: Path, policy: Callable) -> Iterator[float]:
    """Play whole episodes with a policy from an observation to an action, filmed if asked for; yields their returns."""
    env = make_env(args, args.capture_video)
    if args.capture_video:
        env = gym.wrappers.RecordVideo(env, str(folder / "evaluation" / "videos"), disable_logger=True)
    seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes or 10).tolist()
    for seed in tqdm(seeds, desc="evaluation", unit="episode", dynamic_ncols=True):
        obs, done, episode_return = env.reset(seed=seed)[0], False, 0.0
        while not done:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            episode_return += float(reward)
            done = terminated or truncated
        yield episode_return
    env.close()


if __name__ == "__main__":
    args = tyro.cli(Args)
    check_args(args)
    start_time = time.perf_counter()
    if args.cuda and not torch.cuda.is_available():
        print("CUDA is not available: running on the CPU", file=sys.stderr)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal: 0.77 instead of 0.08 ms a step
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.manual_seed(args.seed)
    if args.compile and device.type == "cpu" and os.name == "posix" and not shutil.which(os.getenv("CXX", "g++")):  # [fast 1]
        refuse("--compile needs a C++ compiler such as g++, or one that CXX names")
    cudagraphs = args.cudagraphs and device.type == "cuda"  # [fast 4]

    # [seeds 5] Agents begin, step and learn together; their environments are one after the other in those of all.
    each_args = of_each(args)
    seeds, num_agents, ignored = [own.seed for own in each_args], len(each_args), ("exp_name", *["alpha"] * args.autotune)
    checkpoints = [load_checkpoint(own, ignored) for own in each_args if args.resume or args.evaluate]
    progress = [own["progress"] for own in checkpoints] if args.resume else [(0, 0, 0.0, []) for _ in seeds]
    global_step, updates, owed, episodes = *progress[0][:3], [ended for *_, ended in progress]
    if any(own[:3] != progress[0][:3] for own in progress):
        refuse(f"--resume takes checkpoints of one step, got those of {', '.join(str(step) for step, *_ in progress)}")
    # Stepped in turn, each reset in the step that ends its episode. copy=False: an observation is copied once, into the row.
    env_fns = [partial(make_own, os.getpid(), args, args.capture_video and i == 0) for i in range(num_agents * args.num_envs)]
    make_envs = gym.vector.AsyncVectorEnv if args.env_workers else SyncVectorEnv
    kill = atexit.register(lambda **_: [worker.kill() for worker in torch.multiprocessing.active_children()])  # [seeds 4]
    envs = make_envs(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    if args.env_workers:
        envs.close = kill  # without the answer to a step that a signal broke off
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(envs.single_action_space.shape)
    bounds = np.stack([envs.single_action_space.low.ravel(), envs.single_action_space.high.ravel()])
    action_low, action_high = torch.tensor(bounds, dtype=torch.float32, device=device)
    action_scale, action_bias = action_high / 2 - action_low / 2, action_high / 2 + action_low / 2  # within float32

    capacity, row_dim = 0 if args.evaluate else args.buffer_size // args.num_envs * args.num_envs, 2 * obs_dim + action_dim + 2
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    if (needed := 4 * num_agents * capacity * row_dim) > free:  # [seeds 2]
        refuse(f"--buffer-size {capacity} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
    buffer = torch.zeros(num_agents, capacity, row_dim, device=device)
    # On the host, what the environments show, and a step. Neither changes before the device has given actions, so has read it.
    obs, row = np.zeros((len(env_fns), obs_dim), dtype=np.float32), torch.zeros(len(env_fns), row_dim)
    size = torch.ones((), dtype=torch.int64, device=device)  # rows in use; 1 at first: warming up divides by it
    columns = np.cumsum([obs_dim, action_dim, 1, 1])
    row_obs, row_actions, row_rewards, row_terminated, row_next_obs = np.split(row.numpy(), columns, axis=1)

    drawn = []
    for seed in seeds:  # [seeds 1] An agent begins as a run of its own would, whose networks are drawn in this order.
        torch.manual_seed(seed)
        drawn.append([network(obs_dim, action_dim, device) for network in (Actor, Critic, Critic)])
    actor, critic, critic_target = (stack(networks) for networks in zip(*drawn, strict=True))
    critic_target.requires_grad_(False).load_state_dict(critic.state_dict())
    log_alpha = torch.full((num_agents,), 1.0 if args.autotune else max(args.alpha, 1e-37), device=device).log()  # finite

    actor_params, critic_params, critic_target_params = (list(net.parameters()) for net in (actor, critic, critic_target))
    critic_optimizer = optim.Adam(critic_params, lr=args.q_lr, fused=True)
    actor_optimizer = optim.Adam(actor_params, lr=args.policy_lr, fused=True)
    alpha_optimizer = optim.Adam([log_alpha.requires_grad_()], lr=args.q_lr, fused=True)
    tensors = adam_tensors("actor", dict(actor.named_parameters()), actor_optimizer)  # what checkpoints hold: add yours
    tensors |= adam_tensors("critic", dict(critic.named_parameters()), critic_optimizer)
    tensors |= adam_tensors("alpha", {"log_alpha": log_alpha}, alpha_optimizer)
    tensors |= {f"critic_target.params.{key}": tensor for key, tensor in critic_target.named_parameters()}
    # [fast 2] From here on a network is one tensor that adam_step moves; of the optimizers only moments count, not lr, betas.
    networks = {"actor": actor, "critic": critic, "critic_target": critic_target}
    actor, critic, critic_target = (Flat(name, network, tensors) for name, network in networks.items())
    alpha_state = {kind: tensors[f"alpha.{kind}.log_alpha"] for kind in ("params", "exp_avg", "exp_avg_sq", "step")}
    # [fast 3] The losses of the last step have a place, too: what a captured function returns is cloned at each call.
    last_values = torch.zeros(num_agents, 2, args.batch_size, device=device)  # [seeds 2]
    last_losses = torch.zeros(num_agents, 2, device=device)
    parts = [*last_values.unbind(1), *last_losses.unbind(1)]
    losses = dict(zip(("qf1_values", "qf2_values", "qf1_loss", "qf2_loss"), parts, strict=True))
    names = ("qf_loss", "alpha", "actor_loss", *["alpha_loss"] * args.autotune)
    losses |= {name: torch.zeros(num_agents, device=device) for name in names}
    streams = torch.zeros(num_agents, dtype=torch.int64, device=device)  # [seeds 3]

    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), drawn from the policy: (num_envs, action_dim)."""
        with torch.no_grad():
            mean, log_std = networks["actor"](obs.view(num_agents, args.num_envs, obs_dim))  # [seeds 2]
            noise = normal(streams, args.num_envs, action_dim)  # [seeds 3]
            actions = torch.tanh(mean + log_std.exp() * noise).flatten(0, 1) * action_scale + action_bias
            return actions.nan_to_num().clamp(action_low, action_high)  # [seeds 4] those of a lost agent, too

    def update_critic(update_target: bool) -> Tensor:
        """One gradient step of the critics on a new batch, whose observations, (batch_size, obs_dim), it returns."""
        draws = uniform(streams, args.batch_size)  # [seeds 3]
        obs, actions, rewards, terminated, next_obs = sample_batch(draws, buffer, size, obs_dim, action_dim)
        actions = (actions - action_bias) / action_scale
        with torch.no_grad():
            next_actions, next_log_prob = sample_actions(streams, *actor(next_obs), action_scale)
            next_values = critic_target(next_obs, next_actions)
            target = soft_target(rewards, terminated, next_values, next_log_prob, log_alpha.exp()[:, None], args.gamma)
        qf_values = critic(obs, actions)
        qf_losses = critic_losses(qf_values, target[:, None])  # [seeds 2]
        (grad,) = torch.autograd.grad(qf_losses.sum(), critic.params)  # [fast 2] in the graph, where backward() is not
        adam_step(critic.state, grad, args.q_lr)
        last_values.copy_(qf_values.detach())  # [fast 3]
        last_losses.copy_(qf_losses.detach())
        losses["qf_loss"].copy_(qf_losses.detach().mean(dim=-1))
        if update_target:
            critic_target.params.lerp_(critic.params.detach(), args.tau)  # [fast 2]
        return obs

    def update_actor(obs: Tensor) -> None:
        """One gradient step of the actor, and of the entropy coefficient, on observations (batch_size, obs_dim)."""
        new_actions, log_prob = sample_actions(streams, *actor(obs), action_scale)
        losses["alpha"].copy_(log_alpha.detach().exp())  # [fast 3]
        policy_loss = actor_loss(log_prob, critic(obs, new_actions), losses["alpha"][:, None])  # [seeds 2]
        (grad,) = torch.autograd.grad(policy_loss.sum(), actor.params)  # [fast 2] [seeds 2] the sum keeps agents apart
        adam_step(actor.state, grad, args.policy_lr)
        losses["actor_loss"].copy_(policy_loss.detach())  # [fast 3]
        if args.autotune:
            temperature_loss = alpha_loss(log_alpha, log_prob.detach(), -float(action_dim))
            (grad,) = torch.autograd.grad(temperature_loss.sum(), log_alpha)  # [fast 2] [seeds 2]
            adam_step(alpha_state, grad, args.q_lr)
            losses["alpha_loss"].copy_(temperature_loss.detach())  # [fast 3]

    def update(with_actor: bool, with_target: bool) -> None:
        """One gradient step on a new batch."""
        obs = update_critic(with_target)
        for _ in range(args.policy_frequency if with_actor else 0):
            update_actor(obs)

    def best_action(obs: np.ndarray, agent: int) -> np.ndarray:  # [seeds 2]
        """The policy's mean action at an observation, as an environment takes it."""
        with torch.no_grad():
            mean, _ = actor(torch.as_tensor(obs, dtype=torch.float32, device=device).view(1, obs_dim))
            action = (torch.tanh(mean[agent]) * action_scale + action_bias).clamp(action_low, action_high)
            return action.cpu().numpy().reshape(envs.single_action_space.shape)

    for index, checkpoint in enumerate(checkpoints):  # [seeds 5]
        size.fill_(min(global_step, capacity))
        kept = tensors | ({"buffer": buffer[:, :global_step]} if args.resume else {})
        restore(of_agent(kept, index), checkpoint.pop("state"))
        if not args.autotune:
            log_alpha.detach().fill_(math.log(max(args.alpha, 1e-37)))
    first_update, last = updates, global_step >= args.total_timesteps or bool(args.evaluate)
    folders = [checkpoint["folder"] if args.resume else None for checkpoint in checkpoints] or [None] * num_agents
    logger = Loggers(args, each_args, folders, global_step, episodes, trains=not last)
    if args.capture_video and not last:
        videos = logger.folder / "videos" / (f"from_step_{global_step}" if args.resume else "")
        envs.envs[0] = gym.wrappers.RecordVideo(envs.envs[0], str(videos), disable_logger=True)
    drawn = [np.random.SeedSequence([s, global_step]).generate_state(1 + args.num_envs).tolist() for s in seeds]  # [seeds 1]
    noise_seeds, env_seeds = [first for first, *_ in drawn], [seed for _, *others in drawn for seed in others]
    action_space = gym.spaces.Tuple([gym.vector.utils.batch_space(envs.single_action_space, args.num_envs) for _ in seeds])
    action_space.seed(noise_seeds)
    obs[:] = envs.reset(seed=env_seeds)[0].reshape(obs.shape)

    stopping, eval_returns, startup_seconds = logger.stopping, [], None
    with closing(envs), closing(logger), suppress(KeyboardInterrupt):
        stop_when_asked(stopping)
        # [fast 1] The policy and the two halves of a gradient step are a graph each. One agent, measured: 1.38 times eager.
        if args.compile:
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # --matmul-precision decides
            torch._dynamo.config.trace_autograd_ops = True  # [fast 2] the gradient, too, without a break
            torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
            torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes 5 s, from the cache 1 s
            act, update_critic, update_actor = (torch.compile(f, fullgraph=True) for f in (act, update_critic, update_actor))
        # [fast 4] A captured graph is launched at once; there is one for each kind of gradient step. Gain: to be measured.
        steps = (0, 1, args.policy_frequency, args.target_network_frequency)  # among which are steps of all kinds
        kinds = sorted({(step % args.policy_frequency == 0, step % args.target_network_frequency == 0) for step in steps})
        if cudagraphs:
            logging.getLogger("tensordict").setLevel(logging.WARNING)
            act = CudaGraphModule(act, warmup=5, device=device)
            graphs = {kind: CudaGraphModule(partial(update, *kind), warmup=5, device=device) for kind in kinds}

            def update(*kind: bool) -> None:
                graphs[kind]()

        elif args.cudagraphs:
            print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)
        # [fast 5] Compile, warm up and capture before the first step, on the real state, which is then put back.
        if (args.compile or cudagraphs) and not last:
            saved = {name: tensor.clone() for name, tensor in tensors.items()}
            for kind in (6 if cudagraphs else 1) * kinds:  # one compiles; captured, four warm up, one records, one replays
                act(torch.from_numpy(obs).to(device))
                update(*kind)
            restore(tensors, saved)
        stop_when_asked(stopping, first="this step")
        streams.copy_(torch.tensor(noise_seeds) << 31)  # [seeds 3] so far apart
        startup_seconds = time.perf_counter() - start_time
        logger.start = global_step, time.perf_counter()
        while not last:
            if global_step < args.learning_starts:
                actions = np.stack(action_space.sample()).reshape(row_actions.shape)  # [seeds 1]
            else:
                if updates == first_update:
                    logger.start = global_step, time.perf_counter()  # SPS counts from the first step that learns
                actions = act(torch.from_numpy(obs).to(device, non_blocking=True)).cpu().numpy()  # sync: actions are due
                owed += min(args.num_envs, global_step - args.learning_starts) * args.updates_per_step

            while owed > 0:
                update(updates % args.policy_frequency == 0, updates % args.target_network_frequency == 0)
                updates, owed = updates + 1, owed - 1

            row_obs[:], row_actions[:] = obs, actions  # before an environment changes them in place
            next_obs, rewards, terminated, truncated, infos = envs.step(actions.reshape(envs.action_space.shape))
            global_step, done = global_step + args.num_envs, terminated | truncated

            row_rewards[:, 0], row_terminated[:, 0] = rewards, terminated
            row_next_obs[:] = next_obs.reshape(obs.shape)
            if np.count_nonzero(done):
                row_next_obs[done] = np.stack(infos["final_obs"][done]).reshape(-1, obs_dim)
            logger.count(global_step, actions, rewards, done, row.numpy(), next_obs)
            position = (global_step - args.num_envs) % capacity
            rows = row.view(num_agents, args.num_envs, row_dim)  # [seeds 2]
            buffer[:, position : position + args.num_envs].copy_(rows, non_blocking=global_step > args.learning_starts)
            if global_step <= capacity:
                size.fill_(global_step)
            obs[:] = next_obs.reshape(obs.shape)

            last = bool(stopping) or global_step >= args.total_timesteps or len(logger.lost) == num_agents  # [seeds 4]
            if last or global_step % args.log_every < args.num_envs:
                logger.log(global_step, losses if updates >= first_update + args.policy_frequency else {})  # all are known
                state = tensors | {"buffer": buffer[:, :global_step]}  # or all of it, once it is full
                save_checkpoints(logger, last, [global_step, updates, owed, episodes], state)

        if args.evaluate or (args.eval_episodes and not stopping):
            try:
                logger.bar.close()
                stop_when_asked(stopping)
                for index, own in enumerate(logger.each):  # [seeds 4]
                    policy = partial(best_action, agent=index)
                    eval_returns.append([] if own in logger.lost else list(evaluate(own.args, own.folder, policy)))
            except BrokenPipeError as error:  # of a bar that nobody reads, or of an environment
                stopping.append(13)
                warnings.warn(f"the evaluation has ended: {error}", stacklevel=1)
        stop_when_asked(stopping, first="the end of the logs")
    measured = {"total_timesteps": global_step, "updates": updates, "device": device.type, "eval_returns": eval_returns}
    measured |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - start_time}
    logger.print_summary(**measured, compile=args.compile, cudagraphs=cudagraphs)  # [fast 1, 4]
    if stopping or logger.lost:
        sys.exit(128 + stopping[0] if stopping else 1)
