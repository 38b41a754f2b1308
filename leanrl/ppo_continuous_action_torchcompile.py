# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.11,<2.14", "tensordict>=0.15.3,<0.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3",
#     "tyro>=1,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "psutil>=6", "moviepy>=2,<3",
# ]
# ///
"""Proximal Policy Optimization (PPO) for continuous actions: the twin that compiles and captures.

Paper: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017), with the details of Huang et
       al., "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track (2022).
Run:   python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --compile --cudagraphs
Twin:  leanrl/ppo_continuous_action.py, the eager script, which lists the deviations from the paper. Without the two
       flags this file computes the same numbers, with them the same up to the rounding of float32.

Every place that differs from the eager script opens with `# [fast k]`; docs/tricks.md has a chapter on each k.
"""

import json
import logging
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import gymnasium as gym
import mujoco
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ---- Arguments -------------------------------------------------------------------------------------------------------
@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    cuda: bool = True
    """use a CUDA device if there is one"""
    tf32: bool = False
    """let float32 matrix products on CUDA use TF32 (faster, about three decimal digits)"""
    track: bool = False
    """also send the logs to Weights & Biases"""
    wandb_project_name: str = "leanrl"
    """the project of the Weights & Biases run"""
    wandb_entity: str | None = None
    """the entity (team) of the Weights & Biases run"""
    capture_video: bool = False
    """record videos of the first environment under runs/<run>/videos"""
    save_model: bool = False
    """write a checkpoint at the end"""
    checkpoint_every: int | None = None
    """agent steps between two checkpoints, of which the newest two are kept"""
    resume: Path | None = None
    """go on with the run of this checkpoint; of a folder, its newest"""
    evaluate: Path | None = None
    """do not train, evaluate this checkpoint; of a folder, its newest"""
    eval_episodes: int | None = None
    """evaluate the agent at the end, over so many episodes; 10 with --evaluate"""
    profile: Path | None = None
    """a folder for a profile of some steps after warm-up, a trace and a table"""

    env_id: str = "HalfCheetah-v4"
    """the id of the environment: any with Box observations and Box actions"""
    total_timesteps: int = 1_000_000
    """agent steps in all, over all environments; the run ends where no whole rollout is left"""
    learning_rate: float = 3e-4
    """the learning rate at the start"""
    num_envs: int = 1
    """the number of parallel environments"""
    num_steps: int = 2048
    """the steps of each environment in a rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.99
    """the discount factor"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 32
    """the number of minibatches that a rollout is divided into"""
    update_epochs: int = 10
    """how often a rollout is learnt from"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """the bound on the ratio of probabilities, as a distance from 1"""
    clip_vloss: bool = True
    """clip the value loss, too"""
    ent_coef: float = 0.0
    """the weight of the entropy"""
    vf_coef: float = 0.5
    """the weight of the value loss"""
    max_grad_norm: float = 0.5
    """the norm that gradients are clipped to"""
    target_kl: float | None = None
    """stop learning from a rollout after the epoch in which the KL divergence passes this"""
    act_device: Literal["auto", "cpu", "device"] = "auto"
    """where the policy acts: in NumPy on the CPU, or in PyTorch on the device that learns; auto takes what measured faster"""

    compile: bool = False
    """compile the policy, the preparation of the batch and the gradient step with torch.compile"""
    cudagraphs: bool = False
    """capture the policy, the preparation of the batch and the gradient step as CUDA graphs"""


def refuse(message: str) -> None:
    """Tell a bad argument in one line on standard error and leave with exit status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args: Args) -> None:
    """Refuse argument values that cannot work, before anything is started."""
    at_least_1 = ("checkpoint_every", "eval_episodes", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    not_negative = ("learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "target_kl")
    ranges = {
        "seed": (0, 2**63 - 1),
        **dict.fromkeys(at_least_1, (1, math.inf)),
        "total_timesteps": (args.num_envs * args.num_steps * (2 if args.profile else 1), math.inf),
        **dict.fromkeys(("gamma", "gae_lambda"), (0, 1)),
        **dict.fromkeys(not_negative, (0, math.inf)),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and (not low <= value <= high or value == math.inf):
            refuse(f"--{name.replace('_', '-')} takes a number from {low} to {high}, got {value}")
    if args.num_envs * args.num_steps % args.num_minibatches:
        refuse(f"--num-minibatches takes a divisor of the {args.num_envs * args.num_steps} rows, got {args.num_minibatches}")
    try:
        (args.profile or Path()).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--profile takes a folder that can be written to, got {args.profile}: {error.strerror}")
    if args.resume and args.evaluate:
        refuse("--resume and --evaluate exclude each other")


# ---- Environment -----------------------------------------------------------------------------------------------------
def make_envs(args: Args, videos: Path | None) -> SyncVectorEnv:
    """Build the environments, stepped in turn, each reset in the step after the one that ends its episode.

    The first may record `videos`, a folder. Exits with status 2 where the environment is unknown or has other than Box spaces.
    """

    def make_env(index: int) -> gym.Env:
        video = args.capture_video and videos is not None and index == 0
        try:
            env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if video else {}))
        except (gym.error.Error, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            refuse(f"--env-id takes an environment that Gymnasium can make, got {args.env_id}: {reason}")
        if not isinstance(env.observation_space, gym.spaces.Box):
            refuse(f"--env-id takes an environment with Box observations, {args.env_id} has {env.observation_space}")
        if not isinstance(env.action_space, gym.spaces.Box):
            refuse(f"--env-id takes an environment with Box actions, {args.env_id} has {env.action_space}")
        if video and (renderer := getattr(env.unwrapped, "mujoco_renderer", None)):
            # Gymnasium 1.4 looks at where an episode began, and a HalfCheetah runs out of sight. -1: no such camera.
            renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        return gym.wrappers.RecordVideo(env, str(videos), disable_logger=True) if video else env

    warnings.filterwarnings("ignore", message=".*is out of date.*")  # the literature's figures are those of -v4
    env_fns = [partial(make_env, index) for index in range(args.num_envs)]
    # copy=False: an observation is copied once, into the rollout.
    return SyncVectorEnv(env_fns, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)


# ---- Networks --------------------------------------------------------------------------------------------------------
def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Initialise a layer in place: orthogonal weights with gain `std`, no bias. Returns the layer."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Normal policy and value function: (..., obs_dim) to mean (..., action_dim), log_std (1, action_dim), value (...)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1, device=device), std=1.0),
        )
        self.actor_mean = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, action_dim, device=device), std=0.01),
        )
        self.actor_logstd = nn.Parameter(torch.zeros(1, action_dim, device=device))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.actor_mean(obs), self.actor_logstd, self.critic(obs).squeeze(-1)


# ---- Algorithm -------------------------------------------------------------------------------------------------------
class RunningMoments:
    """Count, mean and squared deviations of all rows seen so far, in float64 (Chan et al., 1979, equations 2.1)."""

    def __init__(self, dim: int):
        self.count, self.mean, self.squares = np.zeros(()), np.zeros(dim), np.zeros(dim)

    def update(self, rows: np.ndarray) -> None:
        """Take in rows (n, dim); n may be 0."""
        count, added = self.count.item(), len(rows)  # numbers: arithmetic on 0-dim arrays would take 3 of 10 us
        if added == 0:
            return
        mean = rows.sum(axis=0, dtype=np.float64) / added
        delta = mean - self.mean
        self.squares += np.square(rows - mean).sum(axis=0) + np.square(delta) * (count * added / (count + added))
        self.count.fill(count + added)
        self.mean += delta * (added / (count + added))

    def std(self) -> np.ndarray:
        """The standard deviation, (dim,), never 0."""
        return np.sqrt(self.squares / max(self.count.item(), 1) + 1e-8)

    def standardise(self, rows: np.ndarray) -> np.ndarray:
        """Rows (n, dim) less the mean over the standard deviation, clipped to 10."""
        return ((rows - self.mean) / self.std()).clip(-10, 10)


def numpy_policy(weights: list[np.ndarray], obs: np.ndarray) -> np.ndarray:
    """Mean actions (n, action_dim) at obs (n, obs_dim), from weights and biases of the layers of `Agent.actor_mean`."""
    w1, b1, w2, b2, w3, b3 = weights
    x = np.tanh(obs @ w1.T + b1)
    x = np.tanh(x @ w2.T + b2)
    return x @ w3.T + b3


def discounted_sums(x: Tensor, discounts: Tensor) -> Tensor:
    """y_t = x_t + discounts_t y_{t+1} with y_T = 0, along the first of two dimensions, (T, n).

    By doubling: after round k, y_t holds the first 2^k terms of its sum. Log2(T) rounds take 0.2 ms where a loop over 2048
    steps takes 9 ms, and a compiler need not unroll them.
    """
    y, shift = x, 1
    while shift < len(x):
        y = y + discounts * F.pad(y[shift:], (0, 0, 0, shift))
        discounts = discounts * F.pad(discounts[shift:], (0, 0, 0, shift))
        shift *= 2
    return y


def gae(rewards: Tensor, values: Tensor, terminated: Tensor, valid: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates, (T, n) (Schulman et al., arXiv:1506.02438, equation 16); 0 where a row is not valid.

    rewards, terminated: (T, n). values, valid: (T + 1, n), with the observation after the last step. A row is not valid
    where its step only reset the environment, or went on after a lost life: the recursion stops on both sides of it. Such a
    row's observation is the final one of the episode before, and a truncated episode bootstraps from its value.
    """
    deltas = rewards + gamma * (1 - terminated) * values[1:] - values[:-1]
    return discounted_sums(valid[:-1] * deltas, gamma * gae_lambda * valid[:-1] * valid[1:])


def normal_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density in nats, (batch,), of actions (batch, action_dim) under independent normal distributions."""
    standardised = (actions - mean) * (-log_std).exp()
    return (-0.5 * standardised.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x over the rows with valid = 1, 0-dim; 0 if there are none. Both (batch,)."""
    return (x * valid).sum() / valid.sum().clamp(min=1)


def normalise(advantages: Tensor, valid: Tensor) -> Tensor:
    """Advantages less their mean over their standard deviation, both over the valid rows; (batch,) like its arguments."""
    centred = advantages - masked_mean(advantages, valid)
    variance = (centred.square() * valid).sum() / (valid.sum() - 1).clamp(min=1)
    return centred / (variance.sqrt() + 1e-8)


def policy_loss(log_ratio: Tensor, advantages: Tensor, valid: Tensor, clip_coef: float) -> Tensor:
    """Clipped surrogate objective, negated, 0-dim, from (batch,) each (PPO, equation 7)."""
    ratio = log_ratio.exp()
    return masked_mean(torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)), valid)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, valid: Tensor, clip_coef: float | None) -> Tensor:
    """Half the mean squared error of values, 0-dim, from (batch,) each; clip_coef bounds what a move from old_values gains."""
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.maximum(errors, (clipped - returns).square())
    return 0.5 * masked_mean(errors, valid)


def kl_metrics(log_ratio: Tensor, valid: Tensor, clip_coef: float) -> dict[str, Tensor]:
    """How far the policy has moved since the rollout, 0-dim each, from (batch,).

    Two estimates of the KL divergence in nats (k1 and k3 of Schulman, "Approximating KL Divergence", 2020), and the
    fraction of ratios beyond the clip.
    """
    ratio = log_ratio.exp()
    return {
        "old_approx_kl": masked_mean(-log_ratio, valid),
        "approx_kl": masked_mean(ratio - 1 - log_ratio, valid),
        "clipfrac": masked_mean(((ratio - 1).abs() > clip_coef).float(), valid),
    }


def explained_variance(values: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """The share of the variance of the returns that the values explain, 0-dim, from (batch,) each; at most 1."""
    error = returns - values
    error_variance = masked_mean((error - masked_mean(error, valid)).square(), valid)
    variance = masked_mean((returns - masked_mean(returns, valid)).square(), valid)
    return 1 - error_variance / variance.clamp(min=1e-8)


# [fast 2] Adam is part of the graph of the gradient step, as arithmetic on tensordicts (a foreach kernel an operation).
def adam_state(params: dict[str, Tensor]) -> TensorDict:
    """Adam's state for named parameters, which it shares: `params`, `exp_avg`, `exp_avg_sq` and the 0-dim `step`."""
    params = TensorDict(params)
    step = torch.zeros((), device=next(iter(params.values())).device)
    return TensorDict(params=params, exp_avg=torch.zeros_like(params), exp_avg_sq=torch.zeros_like(params), step=step)


def adam_step(state: TensorDict, grads: dict[str, Tensor], lr: float | Tensor, eps: float = 1e-8) -> None:
    """One step of Adam in place (arXiv:1412.6980, algorithm 1), with the defaults of `torch.optim.Adam`."""
    beta1, beta2 = 0.9, 0.999
    grads = TensorDict(grads)
    step = state["step"].add_(1)
    exp_avg = state["exp_avg"].lerp_(grads, 1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].lerp_(grads * grads, 1 - beta2)
    denominator = exp_avg_sq.sqrt().div((1 - beta2**step).sqrt()).add(eps)
    state["params"].sub_(exp_avg.div(denominator).mul(lr / (1 - beta1**step)))


def clip_grads(grads: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Gradients by name, scaled so that their joint norm is max_norm at most; like `torch.nn.utils.clip_grad_norm_`."""
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    return {name: grad * scale for name, grad in grads.items()}


# [fast 2] The eager script's optimizer counts the steps of each parameter on its own.
def named_tensors(**states: TensorDict) -> dict[str, Tensor]:
    """Parameters and Adam's states by the names that checkpoints know."""
    tensors = {}
    for name, state in states.items():
        for key in state["params"].keys():
            tensors |= {f"{name}.{kind}.{key}": state[kind][key] for kind in ("params", "exp_avg", "exp_avg_sq")}
            tensors[f"{name}.step.{key}"] = state["step"]
    return tensors


# ---- Logging ---------------------------------------------------------------------------------------------------------
def make_writer(args: Args, folder: Path, step: int) -> SummaryWriter:
    """Open the TensorBoard log in a run's folder to go on after `step`, mirrored to Weights & Biases under --track."""
    if args.track:
        import wandb

        run_id = "".join(c if c.isalnum() else "_" for c in folder.name)[-64:]
        options = {
            "project": args.wandb_project_name,
            "entity": args.wandb_entity,
            "name": folder.name,
            "config": asdict(args),
        }
        wandb.init(id=run_id, resume="allow", sync_tensorboard=True, save_code=True, **options)
    try:
        # What an interrupted run logged and saved beyond the checkpoint that it goes on from does not count.
        writer = SummaryWriter(str(folder), purge_step=step + 1 if args.resume else None)
        for path in checkpoints(folder) if args.resume else ():
            if int(path.stem) > step:
                path.unlink()
    except OSError as error:
        refuse(f"{folder} cannot be written to: {error.strerror}")
    rows = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    return writer


def write_scalars(writer: SummaryWriter, scalars: dict[str, float], step: int) -> None:
    """Log scalars by name. One that is not finite ends the run with a message and exit status 1."""
    for name, value in scalars.items():
        with suppress(OSError):  # a full disk ends the log, as the writer tells, but not the training
            writer.add_scalar(name, value, step)
        if not math.isfinite(value):
            with suppress(OSError):
                writer.close()
            raise SystemExit(f"{Path(__file__).name}: error: {name} is {value} at step {step}")


def run_summary(args: Args, device: torch.device, episode_returns: list[float], **measured) -> str:
    """The run summary as one line of JSON: what was `measured`, and what can be read off the arguments and the machine."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "tensordict", "gymnasium", "mujoco", "envpool"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = [line.partition(": ")[2] for line in cpuinfo if line.startswith("model name")] or [platform.processor()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    git = ["git", "-C", Path(__file__).parent, "rev-parse", "--verify", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else None
    peak_memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    recent = {"episodic_return": episode_returns[-100:], "episodic_return_10": episode_returns[-10:]}
    summary = {
        "script": Path(__file__).stem,
        **{name: getattr(args, name) for name in ("env_id", "seed", "num_envs")},
        **measured,
        "peak_memory_mb": round(peak_memory_mb, 1),
        "peak_device_memory_mb": round(torch.cuda.max_memory_allocated() / 2**20, 1) if gpu else None,
        **{name: float(np.mean(values)) if values else None for name, values in recent.items()},
        "episodes": len(episode_returns),
        "argv": sys.argv[1:],
        "versions": versions,
        "device": device.type,
        "hardware": {"cpu": cpu[0], "cores": cores, "gpu": gpu},
        "git_commit": commit or None,
    }
    return json.dumps(summary)


def stop_when_asked(asked: list[int], at_once: bool) -> None:
    """Have Ctrl+C and SIGTERM note their number in the list, and interrupt: `at_once`, or else the second time."""

    def note(number: int, _) -> None:
        asked.append(number)
        signal.signal(number, signal.default_int_handler)
        if at_once:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)


def profiled(folder: Path, wait: int, steps: int, functions: dict[str, Callable]) -> list[Callable]:
    """Wrap functions so that, after `wait` calls of "environment", a profile is taken over `steps` of them.

    Writes folder/trace.json, for chrome://tracing, and prints where the time of a step went, on standard error.
    """

    def report(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        # On CUDA, what ran there has an entry of the same name that took the CPU no time.
        events = [event for event in profiler.key_averages() if event.cpu_time_total]
        times = {event.key: event.cpu_time_total / steps for event in events}
        rows = {name: times.get(name, 0.0) for name in functions}
        waits = [time for key, time in times.items() if key.endswith("Synchronize") or key == "cudaMemcpyAsync"]
        rows["waiting for the device"] = sum(waits)
        rows["the rest"] = times["ProfilerStep*"] - sum(rows.values())
        for name, each in rows.items():
            print(f"{name:24}{each:10.1f} us a step{each / times['ProfilerStep*']:8.1%}, under the profiler", file=sys.stderr)

    schedule = torch.profiler.schedule(wait=wait - 1, warmup=1, active=steps, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=report)
    named = {name: torch.profiler.record_function(name)(function) for name, function in functions.items()}

    def environment(actions: np.ndarray) -> tuple:
        result = named["environment"](actions)
        profiler.step()
        return result

    profiler.start()
    return [*(named | {"environment": environment}).values()]


# ---- Checkpoint ------------------------------------------------------------------------------------------------------
def identity(args: Args) -> dict[str, str | int]:
    """What a checkpoint and the run that goes on with it have to agree on."""
    algorithm = Path(__file__).stem.removesuffix("_torchcompile")
    return {"format": 1, "algorithm": algorithm, **{name: getattr(args, name) for name in ("env_id", "num_envs", "seed")}}


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, by step."""
    return sorted((path for path in folder.glob("*.pt") if path.stem.isdecimal()), key=lambda path: int(path.stem))


def save_checkpoint(args: Args, folder: Path, writer: SummaryWriter, progress: list, tensors: dict[str, Tensor]) -> None:
    """Write folder/<step>.pt, whole or not at all, `progress` beginning with the step; keep the one before, too.

    What is logged so far is written out first, so that curves have no gap. Only warns where the disk is full.
    """
    path, new = folder / f"{progress[0]}.pt", folder / "checkpoint.new"
    try:
        with suppress(OSError):
            writer.flush()
        rng = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
        # Through NumPy, because a slice of a tensor would be saved with all that it is a slice of.
        state = {name: torch.from_numpy(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}  # sync
        torch.save(identity(args) | {"progress": progress, "rng": rng, "state": state}, new)
        new.replace(path)
        for older in checkpoints(folder)[:-2]:
            older.unlink()
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        print(f"{Path(__file__).name}: warning: no checkpoint {path}: {error}".splitlines()[0], file=sys.stderr)


def load_checkpoint(path: Path, args: Args) -> dict:
    """Read a checkpoint, of a folder the newest; nothing in it is executed. Exits with status 2 where it does not fit."""
    flag = "--resume" if args.resume else "--evaluate"
    newest = (checkpoints(path) or [path])[-1]
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = torch.load(newest, map_location="cpu", weights_only=True)
        for name, wanted in identity(args).items():
            if checkpoint[name] != wanted and (args.resume or name not in ("num_envs", "seed")):
                refuse(f"{flag} takes a checkpoint of {name} {wanted}, {newest} has {checkpoint[name]}")
        return {"folder": newest.resolve().parent, **{name: checkpoint[name] for name in ("progress", "rng", "state")}}
    except Exception as error:
        refuse(f"{flag} takes a checkpoint, {newest} is none: {type(error).__name__}")


def restore(tensors: dict[str, Tensor], checkpoint: dict) -> None:
    """Move a checkpoint's tensors into those of the same names. Exits with status 2 where they have other names or shapes."""
    state = checkpoint.pop("state")
    for name in sorted(tensors.keys() | state.keys() - {"buffer"}):
        shapes = [tuple(those[name].shape) if name in those else None for those in (tensors, state)]
        if shapes[0] != shapes[1]:
            refuse(f"--resume and --evaluate take a checkpoint with {name} of shape {shapes[0]}, this one has {shapes[1]}")
        tensors[name].detach().copy_(state[name])
    torch.set_rng_state(checkpoint["rng"][0])
    if torch.cuda.is_initialized() and len(checkpoint["rng"]) > 1:
        torch.cuda.set_rng_state(checkpoint["rng"][1])


def evaluate(envs: gym.vector.VectorEnv, policy: Callable, seeds: list) -> Iterator[float]:
    """Play a whole episode a seed with a policy from observations to actions; yields their returns."""
    for seed in seeds:
        obs, done, episode_return = envs.reset(seed=seed)[0], False, 0.0
        while not done:
            obs, rewards, terminated, truncated, _ = envs.step(policy(obs))
            episode_return += float(rewards[0])
            done = bool(terminated[0] or truncated[0])
        yield episode_return
    envs.close()


if __name__ == "__main__":
    args = tyro.cli(Args)
    check_args(args)
    start_time = time.perf_counter()
    if args.cuda and not torch.cuda.is_available():
        print("CUDA is not available: running on the CPU", file=sys.stderr)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_flush_denormal(True)  # Adam's moments of weights without gradient become denormal, which a CPU is slow at
    torch.set_num_threads(1)  # small networks: 1.06 times the steps/s with one environment, 0.90 with 64
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.manual_seed(args.seed)

    source = args.resume or args.evaluate
    checkpoint = load_checkpoint(source, args) if source else {}
    folder = Path("runs", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    folder = checkpoint["folder"] if args.resume else folder
    global_step, updates, episodes = checkpoint["progress"] if args.resume else (0, 0, [])
    logged_episodes, first_step, saved_step = len(episodes), global_step, global_step
    videos = folder / "videos" / (f"from_step_{global_step}" if args.resume else "")
    envs = make_envs(args, None if args.evaluate else videos)
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(envs.single_action_space.shape)
    action_low, action_high = envs.single_action_space.low.ravel(), envs.single_action_space.high.ravel()

    num_envs, num_steps, batch_size = args.num_envs, args.num_steps, args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    # A row is a step of one environment; one more step has the observation that a rollout ends with.
    rollout = torch.zeros(num_steps + 1, num_envs, obs_dim + action_dim + 3)
    columns = np.cumsum([obs_dim, action_dim, 1, 1])
    rollout_obs, rollout_actions, *scalars = np.split(rollout.numpy(), columns, axis=2)
    rollout_rewards, rollout_terminated, rollout_valid = (column[:, :, 0] for column in scalars)
    buffer = torch.zeros_like(rollout, device=device)
    batch = torch.zeros(batch_size, obs_dim + action_dim + 5, device=device)
    obs_moments, return_moments = RunningMoments(obs_dim), RunningMoments(1)

    agent = Agent(obs_dim, action_dim, device)
    # Measured on a CPU, for 1, 256 and 1024 environments: NumPy 5, 57 and 211 us, PyTorch 25, 63 and 165.
    act_on_cpu = args.act_device == "cpu" or (args.act_device == "auto" and num_envs <= 256)
    act_device = torch.device("cpu") if act_on_cpu else device
    # [fast 2] The gradient step is one function of tensors that it updates in place, optimizer included.
    # It costs time on its own, and lets fast 1 and fast 4 take the step whole.
    agent_state = adam_state(dict(agent.requires_grad_(False).named_parameters()))
    annealed_lr = torch.tensor(args.learning_rate, device=device)
    # [fast 3] The losses of the last step have a place, too.
    names = ["explained_variance", "policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    losses = {name: torch.zeros((), device=device) for name in names}

    gamma, gae_lambda, norm_adv, clip_coef = args.gamma, args.gae_lambda, args.norm_adv, args.clip_coef
    clip_vloss, ent_coef, vf_coef, max_grad_norm = args.clip_vloss, args.ent_coef, args.vf_coef, args.max_grad_norm

    def act(obs: Tensor, noise: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim) and noise of the policy's deviation: (num_envs, action_dim)."""
        with torch.no_grad():
            return agent.actor_mean(obs) + noise

    def record(**latest: Tensor) -> None:
        """Keep the latest losses for the log."""
        # [fast 3] Into tensors that stay: what a captured function returns is cloned at each call. Gain: to be measured.
        for name, loss in latest.items():
            losses[name].copy_(loss)

    def prepare() -> None:
        """Turn the rollout into the batch to learn from: log-probabilities, values, advantages and returns."""
        with torch.no_grad():
            obs, actions, columns = buffer.split([obs_dim, action_dim, 3], dim=2)
            rewards, terminated, valid = columns.unbind(2)
            mean, log_std, values = agent(obs)
            log_prob = normal_log_prob(actions, mean, log_std)
            advantages = gae(rewards[:-1], values, terminated[:-1], valid, gamma, gae_lambda)
            returns = advantages + values[:-1]
            columns = [log_prob[:-1], advantages, returns, values[:-1], valid[:-1]]
            rows = torch.cat([obs[:-1], actions[:-1], torch.stack(columns, dim=2)], dim=2)
            batch.copy_(rows.view(batch_size, -1))

            record(explained_variance=explained_variance(values[:-1], returns, valid[:-1]))

    def objective(network: Callable, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss on the rows `indices` of the batch, (minibatch_size,), and what is logged of it."""
        rows = batch.index_select(0, indices)
        obs, actions, columns = rows.split([obs_dim, action_dim, 5], dim=1)
        old_log_prob, advantages, returns, old_values, valid = columns.unbind(1)
        if norm_adv:
            advantages = normalise(advantages, valid)

        mean, log_std, values = network(obs)
        log_ratio = normal_log_prob(actions, mean, log_std) - old_log_prob
        pg_loss = policy_loss(log_ratio, advantages, valid, clip_coef)
        v_loss = value_loss(values, old_values, returns, valid, clip_coef if clip_vloss else None)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        loss = pg_loss - ent_coef * entropy + vf_coef * v_loss
        metrics = kl_metrics(log_ratio.detach(), valid, clip_coef)
        return loss, {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy, **metrics}

    def update(indices: Tensor) -> None:
        """One gradient step on the rows `indices` of the batch, (minibatch_size,)."""

        # [fast 2] Gradients are a function of the parameters, so that they, too, are in the one graph; backward() is not.
        def loss_of(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return objective(partial(functional_call, agent, params), indices)

        grads, (_, latest) = grad_and_value(loss_of, has_aux=True)(dict(agent_state["params"]))
        adam_step(agent_state, clip_grads(grads, max_grad_norm), annealed_lr, eps=1e-5)
        record(**latest)

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The policy's mean actions for obs (1, ...), as an environment takes them; the moments of observations stay."""
        obs = torch.as_tensor(obs_moments.standardise(obs.reshape(1, obs_dim)), dtype=torch.float32, device=device)
        with torch.no_grad():
            actions = agent.actor_mean(obs).cpu().numpy()
        return actions.clip(action_low, action_high).reshape(1, *envs.single_action_space.shape)

    tensors = named_tensors(agent=agent_state)  # [fast 2]
    for name, moments in (("obs_moments", obs_moments), ("return_moments", return_moments)):
        tensors |= {f"{name}.{key}": torch.from_numpy(array) for key, array in vars(moments).items()}

    if checkpoint:
        restore(tensors, checkpoint)
    writer = make_writer(args, folder, global_step)
    env_seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(num_envs).tolist()
    next_obs = envs.reset(seed=env_seeds)[0].reshape(num_envs, obs_dim)
    if not checkpoint:
        obs_moments.update(next_obs)
    rollout_obs[-1] = obs_moments.standardise(next_obs)
    rollout_valid[-1] = 1
    valid, discounted_return = np.ones(num_envs, dtype=bool), np.zeros(num_envs)
    rollout_returns = np.zeros((num_steps, num_envs))
    episode_return, episode_length = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
    sps, startup_seconds = None, None
    total_timesteps, save_last = args.total_timesteps, args.save_model or args.checkpoint_every is not None
    last = global_step + batch_size > total_timesteps or args.evaluate is not None

    stopping: list[int] = []
    eval_returns: list[float] = []
    with (
        suppress(KeyboardInterrupt),
        tqdm(total=args.total_timesteps, initial=global_step, unit="step", dynamic_ncols=True) as bar,
    ):
        stop_when_asked(stopping, at_once=True)
        # [fast 1] The policy, the preparation of the batch and the whole gradient step are one graph each.
        # Measured: 1.85 times the eager steps/s on two CPU cores.
        cudagraphs = args.cudagraphs and device.type == "cuda"
        if args.compile:
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # --tf32 decides
            act, prepare, update = (torch.compile(function, fullgraph=True) for function in (act, prepare, update))
        # [fast 4] A captured graph is launched at once. Gain: to be measured.
        if cudagraphs:
            logging.getLogger("tensordict").setLevel(logging.WARNING)
            act, prepare, update = (CudaGraphModule(function, warmup=5, device=device) for function in (act, prepare, update))
        elif args.cudagraphs:
            print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)
        # [fast 5] Compile, warm up and capture before the first step, on the real state, which is then put back.
        if (args.compile or cudagraphs) and not last:
            saved = agent_state.clone()
            for _ in range(6):
                if not act_on_cpu:
                    act(rollout[0, :, :obs_dim].to(device), torch.zeros(num_envs, action_dim, device=device))
                prepare()
                update(torch.arange(minibatch_size, device=device))
            agent_state.update_(saved)

        if device.type == "cuda":
            torch.cuda.synchronize()  # sync, once: SPS counts from here
        if args.profile:
            functions = {"policy": numpy_policy if act_on_cpu else act, "prepare": prepare, "update": update}
            functions |= {"environment": envs.step}
            policy, prepare, update, envs.step = profiled(args.profile, num_steps, num_steps, functions)
            numpy_policy, act = (policy, act) if act_on_cpu else (numpy_policy, policy)
        stop_when_asked(stopping, at_once=False)  # from here on between two steps
        startup_seconds = time.perf_counter() - start_time
        sps_time = time.perf_counter()
        while not last:
            learning_rate = args.learning_rate * (1 - global_step / total_timesteps if args.anneal_lr else 1)
            annealed_lr.fill_(learning_rate)  # [fast 2] a number would be frozen
            rollout[0] = rollout[-1]
            with torch.no_grad():
                noise = torch.randn(num_steps, num_envs, action_dim, device=act_device)
                noise *= agent.actor_logstd.exp().to(act_device)  # sync, once a rollout, and so where the weights are copied
            if act_on_cpu:
                noise = noise.numpy()
                weights = [parameter.detach().cpu().numpy() for parameter in agent.actor_mean.parameters()]

            for step in range(num_steps):
                if act_on_cpu:
                    actions = numpy_policy(weights, rollout_obs[step]) + noise[step]
                else:
                    obs = rollout[step, :, :obs_dim].to(device, non_blocking=True)
                    actions = act(obs, noise[step]).cpu().numpy()  # sync: the environments need the actions
                clipped = actions.clip(action_low, action_high).reshape(envs.action_space.shape)
                next_obs, rewards, terminated, truncated, _ = envs.step(clipped)

                rollout_actions[step], rollout_rewards[step], rollout_terminated[step] = actions, rewards, terminated
                global_step += int(valid.sum())
                episode_return += rewards
                episode_length += valid
                discounted_return = rewards + gamma * discounted_return * valid
                rollout_returns[step] = discounted_return
                done = terminated | truncated
                if done.any():
                    episodes += [(global_step, float(episode_return[i]), int(episode_length[i])) for i in np.flatnonzero(done)]
                    episode_return[done], episode_length[done] = 0, 0
                # The next step of an environment that is done resets it and ignores the action.
                valid = ~done
                rollout_valid[step + 1] = valid
                next_obs = next_obs.reshape(num_envs, obs_dim)
                obs_moments.update(next_obs[valid])
                rollout_obs[step + 1] = obs_moments.standardise(next_obs)

            return_moments.update(rollout_returns[rollout_valid[:-1] > 0][:, None])
            rollout_rewards[:-1] = (rollout_rewards[:-1] / return_moments.std()).clip(-10, 10)
            buffer.copy_(rollout)
            prepare()
            for _ in range(args.update_epochs):
                for indices in torch.randperm(batch_size, device=device).split(minibatch_size):
                    update(indices)
                    updates += 1
                if args.target_kl is not None and losses["approx_kl"] > args.target_kl:  # sync, once an epoch
                    break

            for step, value, length in episodes[logged_episodes:]:
                write_scalars(writer, {"charts/episodic_return": value, "charts/episodic_length": length}, step)
            logged_episodes = len(episodes)
            values = torch.stack(list(losses.values())).tolist()  # sync: one for all losses
            scalars = {f"losses/{name}": value for name, value in zip(losses, values, strict=True)}
            sps = (global_step - first_step) / (time.perf_counter() - sps_time)
            write_scalars(writer, scalars | {"charts/SPS": sps, "charts/learning_rate": learning_rate}, global_step)
            recent = f", return {np.mean([value for _, value, _ in episodes[-10:]]):.1f}" if episodes else ""
            bar.set_postfix_str(f"SPS {sps:.0f}{recent}", refresh=False)
            bar.update(global_step - bar.n)
            last = bool(stopping) or global_step + batch_size > total_timesteps
            if global_step - saved_step >= (args.checkpoint_every or math.inf) or (last and save_last):
                saved_step = global_step
                save_checkpoint(args, folder, writer, [global_step, updates, episodes], tensors)

        if args.evaluate or (args.eval_episodes and not stopping):
            stop_when_asked(stopping, at_once=True)
            eval_envs = make_envs(replace(args, num_envs=1), folder / "evaluation" / "videos")
            seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes or 10).tolist()
            eval_returns.extend(evaluate(eval_envs, best_actions, seeds))
    stop_when_asked(stopping, at_once=False)
    envs.close()
    with suppress(OSError):
        writer.close()
    if args.track:
        sys.modules["wandb"].finish()  # before the summary, which has to be the last line
    measured = {"total_timesteps": global_step, "updates": updates, "sps": sps, "eval_returns": eval_returns}
    measured |= {"compile": args.compile, "cudagraphs": cudagraphs}  # [fast 1, 4]
    measured |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - start_time}
    print(run_summary(args, device, [value for _, value, _ in episodes], **measured))
    if stopping:
        sys.exit(128 + stopping[0])
