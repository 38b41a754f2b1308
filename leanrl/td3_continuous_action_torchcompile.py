# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.11,<2.14", "tensordict>=0.15.3,<0.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3",
#     "tyro>=1,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "psutil>=6", "moviepy>=2,<3", "filelock>=3.15",
# ]
# ///
"""Twin Delayed Deep Deterministic policy gradient (TD3) for continuous actions: the twin that compiles and captures.

Paper: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", arXiv:1802.09477 (2018).
Run:   python leanrl/td3_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --compile --cudagraphs
Twin:  leanrl/td3_continuous_action.py, the eager script, which lists the deviations from the paper. Without the two
       flags this file computes the same up to rounding, with them also up to the random numbers that compiled
       code draws. Rounding alone makes single runs part in time.
Tags:  every place that differs from the eager script opens with `# [fast k]`; docs/tricks.md has a chapter on each k.
"""

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
from dataclasses import asdict, dataclass
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
    seed: int = 1  # seed of the experiment
    cuda: bool = True  # use a CUDA device if there is one
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # high: TF32 on CUDA; medium: also bfloat16 on the CPU
    track: bool = False  # also send the logs to Weights & Biases
    wandb_project_name: str = "leanrl"  # the project of the Weights & Biases run
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases run
    capture_video: bool = False  # record videos of the first environment under runs/<run>/videos
    save_model: bool = False  # write a checkpoint at the end
    checkpoint_every: int | None = None  # agent steps between two checkpoints, of which the newest two are kept
    resume: Path | None = None  # go on with the run of this checkpoint, or of the newest in this folder
    evaluate: Path | None = None  # do not train, evaluate this checkpoint, or the newest in this folder
    eval_episodes: int | None = None  # how many episodes to evaluate the agent over at the end; 10 with --evaluate
    log_every: int = 100  # agent steps between two log entries
    compile: bool = False  # compile the policy and the gradient step with torch.compile
    cudagraphs: bool = False  # capture the policy and the gradient step as CUDA graphs

    env_id: str = "HalfCheetah-v4"  # the id of the environment: any with Box observations and bounded Box actions
    total_timesteps: int = 1_000_000  # agent steps in all, over all environments
    num_envs: int = 1  # the number of parallel environments
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds, over all environments
    gamma: float = 0.99  # the discount factor
    tau: float = 0.005  # how far target networks move towards their networks at each of their updates, from 0 to 1
    batch_size: int = 256  # the number of transitions in a gradient step
    learning_starts: int = 25_000  # agent steps with random actions before the first gradient step
    updates_per_step: float = 1.0  # gradient steps per agent step, whatever the number of environments
    learning_rate: float = 3e-4  # the learning rate of the actor and of the critics
    policy_frequency: int = 2  # gradient steps from one update of the actor and of the target networks to the next
    policy_noise: float = 0.2  # the standard deviation of the noise on target actions, in half widths of the action space
    noise_clip: float = 0.5  # the bound on the noise on target actions, in half widths of the action space
    exploration_noise: float = 0.1  # the standard deviation of the exploration noise, in half widths of the action space


def check_args(args: Args) -> None:
    """Refuse values that cannot work, before anything is started."""
    ranges = {
        "seed": (0, 2**63 - 1),
        **dict.fromkeys(("log_every", "checkpoint_every", "eval_episodes", "total_timesteps", "num_envs"), (1, math.inf)),
        **dict.fromkeys(("batch_size", "policy_frequency"), (1, math.inf)),
        "learning_starts": (0, math.inf if args.evaluate else args.total_timesteps - args.num_envs - 1),
        "buffer_size": (0 if args.evaluate else max(args.batch_size, args.num_envs), math.inf),
        **dict.fromkeys(("updates_per_step", "learning_rate"), (0, math.inf)),
        **dict.fromkeys(("policy_noise", "noise_clip", "exploration_noise"), (0, math.inf)),
        **dict.fromkeys(("gamma", "tau"), (0, 1)),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and (not low <= value <= high or value == math.inf):
            refuse(f"--{name.replace('_', '-')} takes a number from {low} to {high}, got {value}")
    if args.resume and args.evaluate:
        refuse("--resume and --evaluate exclude each other")


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
        return torch.bmm(x, self.weight) + self.bias


class Critic(nn.Module):
    """Two action-value functions at once: (batch, obs_dim) and (batch, action_dim) to (2, batch), or the first's (batch,)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = EnsembleLinear(2, obs_dim + action_dim, 256, device)
        self.fc2 = EnsembleLinear(2, 256, 256, device)
        self.fc3 = EnsembleLinear(2, 256, 1, device)

    def forward(self, obs: Tensor, actions: Tensor, first_only: bool = False) -> Tensor:
        x = torch.cat([obs, actions], dim=-1)
        if first_only:  # the layers below, for the first function alone: change both
            x = F.relu(torch.addmm(self.fc1.bias[0], x, self.fc1.weight[0]))
            x = F.relu(torch.addmm(self.fc2.bias[0], x, self.fc2.weight[0]))
            return torch.addmm(self.fc3.bias[0], x, self.fc3.weight[0]).squeeze(-1)
        x = F.relu(self.fc1(x.expand(2, -1, -1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


class Actor(nn.Module):
    """A deterministic policy: (batch, obs_dim) to actions in units of their half width, in [-1, 1], (batch, action_dim)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256, device=device)
        self.fc2 = nn.Linear(256, 256, device=device)
        self.fc_mu = nn.Linear(256, action_dim, device=device)

    def forward(self, obs: Tensor) -> Tensor:
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        return torch.tanh(self.fc_mu(x))


# ---- Algorithm -------------------------------------------------------------------------------------------------------
def sample_batch(buffer: Tensor, size: Tensor, batch_size: int, obs_dim: int, action_dim: int) -> tuple[Tensor, ...]:
    """Draw transitions uniformly, with replacement, from the first `size` rows of the replay buffer.

    A row is a whole transition, which one gather fetches. `size` is a tensor: a captured graph would not see a number grow.
    Returns obs (batch, obs_dim), actions (batch, action_dim), rewards, terminated (batch,), of 0.0 and 1.0, and next_obs.
    """
    indices = torch.randint(2**62, (batch_size,), device=buffer.device) % size
    obs, actions, scalars, next_obs = buffer.index_select(0, indices).split([obs_dim, action_dim, 2, obs_dim], dim=1)
    return obs, actions, *scalars.unbind(-1), next_obs


def smooth(actions: Tensor, policy_noise: float, noise_clip: float) -> Tensor:
    """Target policy smoothing: actions (batch, action_dim) in [-1, 1] plus clipped noise, still in [-1, 1] (equation 14)."""
    noise = (torch.randn_like(actions) * policy_noise).clamp(-noise_clip, noise_clip)
    return (actions + noise).clamp(-1, 1)


def td_target(rewards: Tensor, terminated: Tensor, values: Tensor, gamma: float) -> Tensor:
    """Target of both critics, (batch,): r + gamma (1 - terminated) min_i Q_i (equation 10).

    values: (2, batch), the target critics at the next observations and smoothed target actions.
    """
    return rewards + gamma * (1 - terminated) * values.amin(dim=-2)


def critic_losses(values: Tensor, target: Tensor) -> Tensor:
    """Mean squared Bellman error of each critic, (2,), from values (2, batch) and their target (batch,)."""
    return (values - target).square().mean(dim=-1)


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
        self.bar = tqdm(total=args.total_timesteps, initial=step, unit="step", dynamic_ncols=True, disable=not trains)
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

    checkpoint = load_checkpoint(args, ignored=("exp_name",)) if args.resume or args.evaluate else {}
    global_step, updates, owed, episodes = checkpoint["progress"] if args.resume else (0, 0, 0.0, [])
    # Stepped in turn, each reset in the step that ends its episode. copy=False: an observation is copied once, into the row.
    env_fns = [partial(make_env, args, args.capture_video and index == 0) for index in range(args.num_envs)]
    envs = SyncVectorEnv(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(envs.single_action_space.shape)
    bounds = np.stack([envs.single_action_space.low.ravel(), envs.single_action_space.high.ravel()])
    action_low, action_high = torch.tensor(bounds, dtype=torch.float32, device=device)
    action_scale, action_bias = action_high / 2 - action_low / 2, action_high / 2 + action_low / 2  # within float32

    capacity, row_dim = 0 if args.evaluate else args.buffer_size // args.num_envs * args.num_envs, 2 * obs_dim + action_dim + 2
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    if (needed := 4 * capacity * row_dim) > free:
        refuse(f"--buffer-size {capacity} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
    buffer = torch.zeros(capacity, row_dim, device=device)
    # On the host, what the environments show, and a step. Neither changes before the device has given actions, so has read it.
    obs, row = np.zeros((len(env_fns), obs_dim), dtype=np.float32), torch.zeros(len(env_fns), row_dim)
    size = torch.ones((), dtype=torch.int64, device=device)  # rows in use; 1 at first: warming up divides by it
    columns = np.cumsum([obs_dim, action_dim, 1, 1])
    row_obs, row_actions, row_rewards, row_terminated, row_next_obs = np.split(row.numpy(), columns, axis=1)

    actor, actor_target = Actor(obs_dim, action_dim, device), Actor(obs_dim, action_dim, device)
    actor_target.requires_grad_(False).load_state_dict(actor.state_dict())
    critic, critic_target = Critic(obs_dim, action_dim, device), Critic(obs_dim, action_dim, device)
    critic_target.requires_grad_(False).load_state_dict(critic.state_dict())

    actor_params, critic_params = list(actor.parameters()), list(critic.parameters())
    target_params = [*actor_target.parameters(), *critic_target.parameters()]
    critic_optimizer = optim.Adam(critic_params, lr=args.learning_rate, fused=True)
    actor_optimizer = optim.Adam(actor_params, lr=args.learning_rate, fused=True)
    tensors = adam_tensors("actor", dict(actor.named_parameters()), actor_optimizer)  # what checkpoints hold: add yours
    tensors |= adam_tensors("critic", dict(critic.named_parameters()), critic_optimizer)
    for name, module in {"actor_target": actor_target, "critic_target": critic_target}.items():
        tensors |= {f"{name}.params.{key}": tensor for key, tensor in module.named_parameters()}
    # [fast 2] From here on a network is one tensor that adam_step moves; of the optimizers only moments count, not lr, betas.
    networks = {"actor": actor, "critic": critic, "actor_target": actor_target, "critic_target": critic_target}
    actor, critic, actor_target, critic_target = (Flat(name, network, tensors) for name, network in networks.items())
    # [fast 3] The losses of the last step have a place, too: what a captured function returns is cloned at each call.
    last_values, last_losses = torch.zeros(2, args.batch_size, device=device), torch.zeros(2, device=device)
    losses = dict(zip(("qf1_values", "qf2_values", "qf1_loss", "qf2_loss"), [*last_values, *last_losses], strict=True))
    losses |= {name: torch.zeros((), device=device) for name in ("qf_loss", "actor_loss")}

    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), the policy's with exploration noise: (num_envs, action_dim)."""
        with torch.no_grad():
            mean = networks["actor"](obs)  # [fast 2] reading needs no views of the one tensor
            actions = (mean + args.exploration_noise * torch.randn_like(mean)) * action_scale + action_bias
            return actions.clamp(action_low, action_high)

    def update_critic() -> Tensor:
        """One gradient step of the critics on a new batch, whose observations, (batch_size, obs_dim), it returns."""
        obs, actions, rewards, terminated, next_obs = sample_batch(buffer, size, args.batch_size, obs_dim, action_dim)
        actions = (actions - action_bias) / action_scale
        with torch.no_grad():
            next_actions = smooth(actor_target(next_obs), args.policy_noise, args.noise_clip)
            target = td_target(rewards, terminated, critic_target(next_obs, next_actions), args.gamma)

        qf_values = critic(obs, actions)
        qf_losses = critic_losses(qf_values, target)
        (grad,) = torch.autograd.grad(qf_losses.sum(), critic.params)  # [fast 2] in the graph, where backward() is not
        adam_step(critic.state, grad, args.learning_rate)
        last_values.copy_(qf_values.detach())  # [fast 3]
        last_losses.copy_(qf_losses.detach())
        losses["qf_loss"].copy_(qf_losses.detach().mean(dim=-1))
        return obs

    def update_actor(obs: Tensor) -> None:
        """One gradient step of the actor on observations (batch_size, obs_dim), and one of all targets."""
        policy_loss = -critic(obs, actor(obs), first_only=True).mean(dim=-1)
        (grad,) = torch.autograd.grad(policy_loss, actor.params)  # [fast 2]
        adam_step(actor.state, grad, args.learning_rate)
        losses["actor_loss"].copy_(policy_loss.detach())  # [fast 3]
        for target, network in ((actor_target, actor), (critic_target, critic)):
            target.params.lerp_(network.params.detach(), args.tau)  # [fast 2]

    def update(with_actor: bool) -> None:
        """One gradient step on a new batch."""
        obs = update_critic()
        if with_actor:
            update_actor(obs)

    def best_action(obs: np.ndarray) -> np.ndarray:
        """The policy's mean action at an observation, as an environment takes it."""
        with torch.no_grad():
            mean = actor(torch.as_tensor(obs, dtype=torch.float32, device=device).view(1, obs_dim))
            action = (mean * action_scale + action_bias).clamp(action_low, action_high)
            return action.cpu().numpy().reshape(envs.single_action_space.shape)

    if checkpoint:
        size.fill_(min(global_step, capacity))
        restore(tensors | ({"buffer": buffer[:global_step]} if args.resume else {}), checkpoint.pop("state"))
    first_update, last = updates, global_step >= args.total_timesteps or args.evaluate is not None
    logger = Logger(args, checkpoint["folder"] if args.resume else None, global_step, episodes, trains=not last)
    if args.capture_video and not last:
        videos = logger.folder / "videos" / (f"from_step_{global_step}" if args.resume else "")
        envs.envs[0] = gym.wrappers.RecordVideo(envs.envs[0], str(videos), disable_logger=True)
    noise_seed, *env_seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(1 + args.num_envs).tolist()
    envs.action_space.seed(noise_seed)
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
        kinds = sorted({(step % args.policy_frequency == 0,) for step in (0, 1)})
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
        torch.manual_seed(noise_seed)
        startup_seconds = time.perf_counter() - start_time
        logger.start = global_step, time.perf_counter()
        while not last:
            if global_step < args.learning_starts:
                actions = envs.action_space.sample().reshape(args.num_envs, action_dim)
            else:
                if updates == first_update:
                    logger.start = global_step, time.perf_counter()  # SPS counts from the first step that learns
                actions = act(torch.from_numpy(obs).to(device, non_blocking=True)).cpu().numpy()  # sync: actions are due
                # Gradient steps are paid for by agent steps, but not by the random ones.
                owed += min(args.num_envs, global_step - args.learning_starts) * args.updates_per_step

            while owed > 0:
                update(updates % args.policy_frequency == 0)
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
            buffer[position : position + args.num_envs].copy_(row, non_blocking=global_step > args.learning_starts)
            if global_step <= capacity:
                size.fill_(global_step)
            obs[:] = next_obs.reshape(obs.shape)

            last = bool(stopping) or global_step >= args.total_timesteps
            if last or global_step % args.log_every < args.num_envs:
                logger.log(global_step, losses if updates >= first_update + args.policy_frequency else {})  # all are known
                state = tensors | {"buffer": buffer[:global_step]}  # or all of it, once it is full
                save_checkpoint(logger, last, [global_step, updates, owed, episodes], state)

        if args.evaluate or (args.eval_episodes and not stopping):
            try:
                logger.bar.close()
                stop_when_asked(stopping)
                eval_returns.extend(evaluate(args, logger.folder, best_action))
            except BrokenPipeError as error:  # of a bar that nobody reads, or of an environment
                stopping.append(13)
                warnings.warn(f"the evaluation has ended: {error}", stacklevel=1)
        stop_when_asked(stopping, first="the end of the logs")
    measured = {"total_timesteps": global_step, "updates": updates, "device": device.type, "eval_returns": eval_returns}
    measured |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - start_time}
    logger.print_summary(**measured, compile=args.compile, cudagraphs=cudagraphs)  # [fast 1, 4]
    if stopping:
        sys.exit(128 + stopping[0])
