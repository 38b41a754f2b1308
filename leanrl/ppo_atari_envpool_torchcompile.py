# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.11,<2.14", "tensordict>=0.15.3,<0.16", "gymnasium>=1.4,<1.5", "envpool==1.2.5", "numpy>=2,<3",
#     "tyro>=1,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "psutil>=6", "moviepy>=2,<3",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games, simulated by EnvPool: the twin that compiles and captures.

Paper: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017), with the details of Huang et
       al., "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track (2022).
Run:   python leanrl/ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile --cudagraphs
Twin:  leanrl/ppo_atari_envpool.py, the eager script, which lists the deviations from the paper. Without the two
       flags this file computes the same numbers, with them the same up to the rounding of float32 and the
       random numbers that compiled code draws.

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

import envpool
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
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
    """let float32 matrix products and convolutions on CUDA use TF32 (faster, about three decimal digits)"""
    track: bool = False
    """also send the logs to Weights & Biases"""
    wandb_project_name: str = "leanrl"
    """the project of the Weights & Biases run"""
    wandb_entity: str | None = None
    """the entity (team) of the Weights & Biases run"""
    capture_video: bool = False
    """record videos of games of the first environment under runs/<run>/videos"""
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

    env_id: str = "Breakout-v5"
    """the id of the game: any Atari game of EnvPool"""
    total_timesteps: int = 10_000_000
    """agent steps in all, over all environments; the run ends where no whole rollout is left"""
    learning_rate: float = 2.5e-4
    """the learning rate at the start"""
    num_envs: int = 8
    """the number of parallel environments"""
    env_threads: int = 0
    """the number of threads that step the environments; 0 lets EnvPool choose"""
    num_steps: int = 128
    """the steps of each environment in a rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.99
    """the discount factor"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 4
    """the number of minibatches that a rollout is divided into"""
    update_epochs: int = 4
    """how often a rollout is learnt from"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.1
    """the bound on the ratio of probabilities, as a distance from 1"""
    clip_vloss: bool = True
    """clip the value loss, too"""
    ent_coef: float = 0.01
    """the weight of the entropy"""
    vf_coef: float = 0.5
    """the weight of the value loss"""
    max_grad_norm: float = 0.5
    """the norm that gradients are clipped to"""
    target_kl: float | None = None
    """stop learning from a rollout after the epoch in which the KL divergence passes this"""

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
        "env_threads": (0, 2**31 - 1),
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
def make_envs(args: Args, step: int, learning: bool = True) -> gym.Env:
    """Build the games, stepped at once by EnvPool; each goes on or anew in the step after a lost life or an end.

    Observations are the last four frames, (4, 84, 84) of uint8; rewards are clipped to their sign, and `info["reward"]` is
    the game's own. For evaluation, not `learning`, lives are not ends and rewards not clipped. `step`, where training begins,
    makes a resumed run play other games. Exits with status 2 where the game is unknown.
    """
    if envpool.registration.registry.specs.get(args.env_id, ("",))[0] != "envpool.atari":
        refuse(f"--env-id takes an Atari game of EnvPool, such as Breakout-v5, got {args.env_id}")
    # EnvPool would give environment i the seed plus i: runs with seeds 1 and 2 would share all but one. It takes 31 bits.
    seeds = (np.random.SeedSequence([args.seed, step, not learning]).generate_state(args.num_envs) >> 1).tolist()
    options = {"seed": seeds, "num_threads": args.env_threads, "render_mode": "rgb_array" if args.capture_video else None}
    learner_options = {"episodic_life": learning, "reward_clip": learning}
    return envpool.make(args.env_id, env_type="gymnasium", num_envs=args.num_envs, **learner_options, **options)


# ---- Networks --------------------------------------------------------------------------------------------------------
def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Initialise a layer in place: orthogonal weights with gain `std`, no bias. Returns the layer."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on one trunk: (batch, 84, 84, 4) of uint8 to logits (batch, actions) and value (batch,)."""

    def __init__(self, num_actions: int, device: torch.device):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4, device=device)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2, device=device)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1, device=device)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512, device=device)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions, device=device), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1, device=device), std=1.0)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.network(obs.permute(0, 3, 1, 2) / 255.0)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


# ---- Algorithm -------------------------------------------------------------------------------------------------------
def sample_actions(logits: Tensor) -> Tensor:
    """Actions (batch,) drawn in proportion to exp(logits), (batch, actions), by the Gumbel-max trick."""
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(dim=-1)


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


def categorical_log_prob(actions: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions (batch,) and entropies, both (batch,) in nats, under logits (batch, actions)."""
    log_probs = logits.log_softmax(dim=-1)
    return log_probs.gather(-1, actions[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(dim=-1)


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
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32  # on by default, for convolutions
    torch.manual_seed(args.seed)

    source = args.resume or args.evaluate
    checkpoint = load_checkpoint(source, args) if source else {}
    folder = Path("runs", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    folder = checkpoint["folder"] if args.resume else folder
    global_step, updates, episodes = checkpoint["progress"] if args.resume else (0, 0, [])
    logged_episodes, first_step, saved_step = len(episodes), global_step, global_step
    videos = folder / "videos" / (f"from_step_{global_step}" if args.resume else "")
    envs = make_envs(args, global_step)
    num_actions = int(envs.action_space.n)

    num_envs, num_steps, batch_size = args.num_envs, args.num_steps, args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    # A row is a step of one game; one more step has the observation that a rollout ends with. Channels come last: so
    # convolutions take 0.65 times as long on the CPU, and gathering a minibatch keeps the order.
    rollout_obs = torch.zeros(num_steps + 1, num_envs, 84, 84, 4, dtype=torch.uint8, device=device)
    rollout = torch.zeros(num_steps + 1, num_envs, 6)
    # The columns are action, log-probability, value, reward, terminated and valid.
    rollout_rewards, rollout_terminated, rollout_valid = (rollout.numpy()[:, :, column] for column in (3, 4, 5))
    buffer = torch.zeros_like(rollout, device=device)
    batch = torch.zeros(batch_size, 6, device=device)

    agent = Agent(num_actions, device)
    # [fast 2] The gradient step is one function of tensors that it updates in place, optimizer included.
    # It costs time on its own, and lets fast 1 and fast 4 take the step whole.
    agent_state = adam_state(dict(agent.requires_grad_(False).named_parameters()))
    annealed_lr = torch.tensor(args.learning_rate, device=device)
    # [fast 3] The losses of the last step have a place, too.
    names = ["explained_variance", "policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    losses = {name: torch.zeros((), device=device) for name in names}

    gamma, gae_lambda, norm_adv, clip_coef = args.gamma, args.gae_lambda, args.norm_adv, args.clip_coef
    clip_vloss, ent_coef, vf_coef, max_grad_norm = args.clip_vloss, args.ent_coef, args.vf_coef, args.max_grad_norm

    def act(obs: Tensor) -> Tensor:
        """For obs (num_envs, 84, 84, 4): actions, log-probabilities and values as columns, (num_envs, 3)."""
        with torch.no_grad():
            logits, values = agent(obs)
            actions = sample_actions(logits)
            log_prob, _ = categorical_log_prob(actions, logits)
            return torch.stack([actions.float(), log_prob, values], dim=1)

    def record(**latest: Tensor) -> None:
        """Keep the latest losses for the log."""
        # [fast 3] Into tensors that stay: what a captured function returns is cloned at each call. Gain: to be measured.
        for name, loss in latest.items():
            losses[name].copy_(loss)

    def prepare() -> None:
        """Turn the rollout into the batch to learn from: advantages and returns."""
        with torch.no_grad():
            actions, log_prob, values, rewards, terminated, valid = buffer.unbind(2)
            values = torch.cat([values[:-1], agent(rollout_obs[-1])[1][None]])
            advantages = gae(rewards[:-1], values, terminated[:-1], valid, gamma, gae_lambda)
            returns = advantages + values[:-1]
            columns = [actions[:-1], log_prob[:-1], advantages, returns, values[:-1], valid[:-1]]
            batch.copy_(torch.stack(columns, dim=2).view(batch_size, -1))

            record(explained_variance=explained_variance(values[:-1], returns, valid[:-1]))

    def objective(network: Callable, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss on the rows `indices` of the batch, (minibatch_size,), and what is logged of it."""
        obs = rollout_obs.view(-1, 84, 84, 4).index_select(0, indices)
        actions, old_log_prob, advantages, returns, old_values, valid = batch.index_select(0, indices).unbind(1)
        if norm_adv:
            advantages = normalise(advantages, valid)

        logits, values = network(obs)
        log_prob, entropies = categorical_log_prob(actions.long(), logits)
        log_ratio = log_prob - old_log_prob
        pg_loss = policy_loss(log_ratio, advantages, valid, clip_coef)
        v_loss = value_loss(values, old_values, returns, valid, clip_coef if clip_vloss else None)
        entropy = masked_mean(entropies, valid)
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
        """The likeliest actions at obs (1, 4, 84, 84)."""
        with torch.no_grad():
            logits, _ = agent(torch.from_numpy(obs).to(device).permute(0, 2, 3, 1).contiguous())
            return logits.argmax(dim=1).int().cpu().numpy()

    tensors = named_tensors(agent=agent_state)  # [fast 2]

    if checkpoint:
        restore(tensors, checkpoint)
    writer = make_writer(args, folder, global_step)
    rollout_obs[-1].copy_(torch.from_numpy(envs.reset()[0]).permute(0, 2, 3, 1))
    rollout_valid[-1] = 1
    valid = np.ones(num_envs, dtype=bool)
    episode_return, episode_length = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
    frames: list[np.ndarray] = []
    games = 0
    if args.capture_video:
        from gymnasium.utils.save_video import capped_cubic_video_schedule, save_video
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
        # Measured: 1.06 times the eager steps/s on two CPU cores.
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
            with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
                for _ in range(6):
                    act(rollout_obs[0])
                    prepare()
                    update(torch.arange(minibatch_size, device=device))
            agent_state.update_(saved)

        if device.type == "cuda":
            torch.cuda.synchronize()  # sync, once: SPS counts from here
        if args.profile:
            functions = {"policy": act, "prepare": prepare, "update": update, "environment": envs.step}
            act, prepare, update, envs.step = profiled(args.profile, num_steps, num_steps, functions)
        stop_when_asked(stopping, at_once=False)  # from here on between two steps
        startup_seconds = time.perf_counter() - start_time
        sps_time = time.perf_counter()
        while not last:
            learning_rate = args.learning_rate * (1 - global_step / total_timesteps if args.anneal_lr else 1)
            annealed_lr.fill_(learning_rate)  # [fast 2] a number would be frozen
            rollout_obs[0].copy_(rollout_obs[-1])
            rollout_valid[0] = rollout_valid[-1]

            for step in range(num_steps):
                rollout[step, :, :3] = act(rollout_obs[step])  # sync: the games need the actions
                next_obs, rewards, terminated, truncated, infos = envs.step(rollout[step, :, 0].int().numpy())
                rollout_obs[step + 1].copy_(torch.from_numpy(next_obs).to(device, non_blocking=True).permute(0, 2, 3, 1))

                rollout_rewards[step], rollout_terminated[step] = rewards, terminated
                global_step += int(valid.sum())
                episode_return += infos["reward"]
                episode_length += valid
                over = (infos["terminated"] > 0) | truncated
                if over.any():
                    episodes += [(global_step, float(episode_return[i]), int(episode_length[i])) for i in np.flatnonzero(over)]
                    episode_return[over], episode_length[over] = 0, 0
                # The next step of a game that is over or lost a life only goes on, and ignores the action.
                valid = ~(terminated | truncated)
                rollout_valid[step + 1] = valid
                if args.capture_video:
                    if capped_cubic_video_schedule(games):
                        frames.append(envs.render(env_ids=[0])[0])
                    if over[0]:
                        save_video(frames, str(videos), fps=15, episode_index=games)
                        frames, games = [], games + 1

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
            eval_envs = make_envs(replace(args, num_envs=1), 0, learning=False)
            if args.capture_video:
                step, shots = eval_envs.step, []

                def recorded_step(actions: np.ndarray) -> tuple:
                    if len(shots) < 3000:  # 300 MB; an agent that waits goes on for 27,000
                        shots.append(eval_envs.render(env_ids=[0])[0])
                    return step(actions)

                eval_envs.step = recorded_step
            eval_returns.extend(evaluate(eval_envs, best_actions, [None] * (args.eval_episodes or 10)))
            if args.capture_video:
                save_video(shots, str(folder / "evaluation" / "videos"), fps=15)
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
