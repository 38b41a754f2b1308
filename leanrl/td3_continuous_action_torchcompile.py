# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.11,<2.14", "tensordict>=0.15.3,<0.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3",
#     "tyro>=1,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "psutil>=6", "moviepy>=2,<3",
# ]
# ///
"""Twin Delayed Deep Deterministic policy gradient (TD3) for continuous actions: the twin that compiles and captures.

Paper: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", arXiv:1802.09477 (2018).
Run:   python leanrl/td3_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --compile --cudagraphs
Twin:  leanrl/td3_continuous_action.py, the eager script, which lists the deviations from the paper. Without the two
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

import gymnasium as gym
import mujoco
import numpy as np
import psutil
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
    log_every: int = 100
    """agent steps between two log entries"""

    env_id: str = "HalfCheetah-v4"
    """the id of the environment: any with Box observations and bounded Box actions"""
    total_timesteps: int = 1_000_000
    """agent steps in all, over all environments"""
    num_envs: int = 1
    """the number of parallel environments"""
    buffer_size: int = 1_000_000
    """transitions that the replay buffer holds, over all environments"""
    gamma: float = 0.99
    """the discount factor"""
    tau: float = 0.005
    """the step of the target networks towards the networks at each of their updates"""
    batch_size: int = 256
    """the number of transitions in a gradient step"""
    learning_starts: int = 25_000
    """agent steps with random actions before the first gradient step"""
    updates_per_step: float = 1.0
    """gradient steps per agent step, whatever the number of environments"""
    learning_rate: float = 3e-4
    """the learning rate of the actor and of the critics"""
    policy_frequency: int = 2
    """gradient steps from one update of the actor and of the target networks to the next"""
    policy_noise: float = 0.2
    """the standard deviation of the noise on target actions, in half widths of the action space"""
    noise_clip: float = 0.5
    """the bound on the noise on target actions, in half widths of the action space"""
    exploration_noise: float = 0.1
    """the standard deviation of the exploration noise, in half widths of the action space"""

    compile: bool = False
    """compile the policy and the gradient step with torch.compile"""
    cudagraphs: bool = False
    """capture the policy and the gradient step as CUDA graphs"""


def refuse(message: str) -> None:
    """Tell a bad argument in one line on standard error and leave with exit status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args: Args) -> None:
    """Refuse argument values that cannot work, before anything is started."""
    at_least_1 = ("log_every", "checkpoint_every", "eval_episodes", "num_envs", "batch_size")
    at_least_1 += ("policy_frequency",)
    ranges = {
        "seed": (0, 2**63 - 1),
        **dict.fromkeys(at_least_1, (1, math.inf)),
        "total_timesteps": (args.learning_starts + 60 * args.num_envs if args.profile else 1, math.inf),
        "buffer_size": (max(args.batch_size, args.num_envs), math.inf),
        "learning_starts": (0, args.total_timesteps - 1),
        **dict.fromkeys(("gamma", "tau"), (0, 1)),
        "updates_per_step": (0, math.inf),
        **dict.fromkeys(("learning_rate", "policy_noise", "noise_clip", "exploration_noise"), (0, math.inf)),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and (not low <= value <= high or value == math.inf):
            refuse(f"--{name.replace('_', '-')} takes a number from {low} to {high}, got {value}")
    try:
        (args.profile or Path()).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--profile takes a folder that can be written to, got {args.profile}: {error.strerror}")
    if args.resume and args.evaluate:
        refuse("--resume and --evaluate exclude each other")


# ---- Environment -----------------------------------------------------------------------------------------------------
def make_envs(args: Args, videos: Path | None, autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP) -> SyncVectorEnv:
    """Build the environments, stepped in turn, each reset in the step that ends its episode; the first may record `videos`.

    Exits with status 2 where the environment is unknown or has other than Box observations and bounded Box actions.
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
        if not (isinstance(env.action_space, gym.spaces.Box) and env.action_space.is_bounded()):
            refuse(f"--env-id takes an environment with bounded Box actions, {args.env_id} has {env.action_space}")
        if video and (renderer := getattr(env.unwrapped, "mujoco_renderer", None)):
            # Gymnasium 1.4 looks at where an episode began, and a HalfCheetah runs out of sight. -1: no such camera.
            renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        return gym.wrappers.RecordVideo(env, str(videos), disable_logger=True) if video else env

    warnings.filterwarnings("ignore", message=".*is out of date.*")  # the literature's figures are those of -v4
    env_fns = [partial(make_env, index) for index in range(args.num_envs)]
    # copy=False: an observation is copied once, into the row that goes to the replay buffer.
    return SyncVectorEnv(env_fns, copy=False, autoreset_mode=autoreset_mode)


# ---- Networks --------------------------------------------------------------------------------------------------------
class EnsembleLinear(nn.Module):
    """`members` linear layers side by side, evaluated by one batched matrix product; initialised like `nn.Linear`.

    Maps (members, batch, in_features) to (members, batch, out_features).
    """

    def __init__(self, members: int, in_features: int, out_features: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features, device=device))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features, device=device))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(in_features**-0.5), in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight) + self.bias


class Critic(nn.Module):
    """Two action-value functions at once: (batch, obs_dim) and (batch, action_dim) to (2, batch)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = EnsembleLinear(2, obs_dim + action_dim, 256, device)
        self.fc2 = EnsembleLinear(2, 256, 256, device)
        self.fc3 = EnsembleLinear(2, 256, 1, device)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([obs, actions], dim=1).expand(2, -1, -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


def first_value(critic: Critic, obs: Tensor, actions: Tensor) -> Tensor:
    """The first of the two action-value functions alone: (batch, obs_dim) and (batch, action_dim) to (batch,)."""
    x = torch.cat([obs, actions], dim=1)
    x = F.relu(torch.addmm(critic.fc1.bias[0], x, critic.fc1.weight[0]))
    x = F.relu(torch.addmm(critic.fc2.bias[0], x, critic.fc2.weight[0]))
    return torch.addmm(critic.fc3.bias[0], x, critic.fc3.weight[0]).squeeze(-1)


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

    A row is a whole transition (obs, action, reward, terminated, next_obs): one gather fetches it. `size` is a 0-dim
    integer tensor on the buffer's device, because a captured graph would not see a Python number grow.
    Returns obs (batch, obs_dim), actions (batch, action_dim), rewards (batch,), terminated (batch,) as 0.0 or 1.0, and
    next_obs (batch, obs_dim).
    """
    indices = torch.randint(2**62, (batch_size,), device=buffer.device) % size
    rows = buffer.index_select(0, indices)
    obs, actions, rewards, terminated, next_obs = rows.split([obs_dim, action_dim, 1, 1, obs_dim], dim=1)
    return obs, actions, rewards.squeeze(1), terminated.squeeze(1), next_obs


def smooth(actions: Tensor, policy_noise: float, noise_clip: float) -> Tensor:
    """Target policy smoothing: actions (batch, action_dim) in [-1, 1] plus clipped noise, still in [-1, 1] (equation 14)."""
    noise = (torch.randn_like(actions) * policy_noise).clamp(-noise_clip, noise_clip)
    return (actions + noise).clamp(-1, 1)


def td_target(rewards: Tensor, terminated: Tensor, values: Tensor, gamma: float) -> Tensor:
    """Target of both critics, (batch,): r + gamma (1 - terminated) min_i Q_i (equation 10).

    values: (2, batch), the target critics at the next observations and smoothed target actions.
    """
    return rewards + gamma * (1 - terminated) * values.amin(dim=0)


def critic_losses(values: Tensor, target: Tensor) -> Tensor:
    """Mean squared Bellman error of each critic, (2,), from values (2, batch) and their target (batch,)."""
    return (values - target).square().mean(dim=1)


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
    # The moments of weights whose gradient stays zero decay into denormal numbers, on which a CPU is many times slower.
    # Measured with the compiled SAC step: the kernel of Adam takes 0.08 instead of 0.77 ms. New threads inherit the setting.
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.manual_seed(args.seed)

    source = args.resume or args.evaluate
    checkpoint = load_checkpoint(source, args) if source else {}
    folder = Path("runs", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    folder = checkpoint["folder"] if args.resume else folder
    global_step, updates, episodes = checkpoint["progress"] if args.resume else (0, 0, [])
    logged_episodes, first_update, saved_step = len(episodes), updates, global_step
    videos = folder / "videos" / (f"from_step_{global_step}" if args.resume else "")
    envs = make_envs(args, None if args.evaluate else videos)
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(envs.single_action_space.shape)
    bounds = np.stack([envs.single_action_space.low.ravel(), envs.single_action_space.high.ravel()])
    action_low, action_high = torch.tensor(bounds, dtype=torch.float32, device=device)
    action_scale, action_bias = (action_high - action_low) / 2, (action_high + action_low) / 2

    num_envs = args.num_envs
    capacity, row_dim = args.buffer_size // num_envs * num_envs, 2 * obs_dim + action_dim + 2
    needed = 4 * capacity * row_dim
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        refuse(f"--buffer-size {capacity} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on the {device}")
    buffer = torch.zeros(capacity, row_dim, device=device)
    size = torch.ones((), dtype=torch.int64, device=device)
    row = torch.zeros(num_envs, row_dim)
    columns = np.cumsum([obs_dim, action_dim, 1, 1])
    row_obs, row_actions, row_rewards, row_terminated, row_next_obs = np.split(row.numpy(), columns, axis=1)

    actor, actor_target = Actor(obs_dim, action_dim, device), Actor(obs_dim, action_dim, device)
    actor_target.load_state_dict(actor.state_dict())
    critic, critic_target = Critic(obs_dim, action_dim, device), Critic(obs_dim, action_dim, device)
    critic_target.load_state_dict(critic.state_dict())

    # [fast 2] The gradient step is one function of tensors that it updates in place, optimizers included.
    # It costs time on its own, and lets fast 1 and fast 4 take the step whole.
    actor_state = adam_state(dict(actor.requires_grad_(False).named_parameters()))
    critic_state = adam_state(dict(critic.requires_grad_(False).named_parameters()))
    actor_target_params = TensorDict(dict(actor_target.requires_grad_(False).named_parameters()))
    critic_target_params = TensorDict(dict(critic_target.requires_grad_(False).named_parameters()))
    # [fast 3] The losses of the last step have a place, too.
    names = ["qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "actor_loss"]
    losses = {name: torch.zeros(args.batch_size if "values" in name else (), device=device) for name in names}

    gamma, tau, batch_size, policy_frequency = args.gamma, args.tau, args.batch_size, args.policy_frequency
    learning_rate = args.learning_rate  # [fast 2] the optimizers keep it in the eager script
    policy_noise, noise_clip, exploration_noise = args.policy_noise, args.noise_clip, args.exploration_noise

    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), the policy's with exploration noise: (num_envs, action_dim)."""
        with torch.no_grad():
            mean = actor(obs)
            actions = (mean + exploration_noise * torch.randn_like(mean)) * action_scale + action_bias
            return actions.clamp(action_low, action_high)

    def record(**latest: Tensor) -> None:
        """Keep the latest losses for the log."""
        # [fast 3] Into tensors that stay: what a captured function returns is cloned at each call. Gain: to be measured.
        for name, loss in latest.items():
            losses[name].copy_(loss)

    def update(update_actor: bool) -> None:
        """One gradient step on a new batch."""
        obs, actions, rewards, terminated, next_obs = sample_batch(buffer, size, batch_size, obs_dim, action_dim)
        with torch.no_grad():
            next_actions = smooth(actor_target(next_obs), policy_noise, noise_clip) * action_scale + action_bias
            target = td_target(rewards, terminated, critic_target(next_obs, next_actions), gamma)

        # [fast 2] Gradients are a function of the parameters, so that they, too, are in the one graph; backward() is not.
        def critic_objective(params: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            qf_values = functional_call(critic, params, (obs, actions))
            qf_losses = critic_losses(qf_values, target)
            return qf_losses.sum(), (qf_values, qf_losses)

        def actor_objective(params: dict[str, Tensor]) -> Tensor:
            return -first_value(critic, obs, functional_call(actor, params, (obs,)) * action_scale + action_bias).mean()

        grads, (_, (qf_values, qf_losses)) = grad_and_value(critic_objective, has_aux=True)(dict(critic_state["params"]))
        adam_step(critic_state, grads, learning_rate)
        record(qf1_values=qf_values[0], qf2_values=qf_values[1], qf1_loss=qf_losses[0], qf2_loss=qf_losses[1])

        if update_actor:
            # [fast 2] Again by functions: the actor's gradient and its Adam, without the gradient of the critics.
            grads, policy_loss = grad_and_value(actor_objective)(dict(actor_state["params"]))
            adam_step(actor_state, grads, learning_rate)
            record(actor_loss=policy_loss)
            actor_target_params.lerp_(actor_state["params"], tau)
            critic_target_params.lerp_(critic_state["params"], tau)

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The policy's mean actions for obs (1, ...), as an environment takes them."""
        with torch.no_grad():
            obs = torch.as_tensor(obs, dtype=torch.float32, device=device).view(1, obs_dim)
            actions = actor(obs) * action_scale + action_bias
            return actions.clamp(action_low, action_high).cpu().numpy().reshape(1, *envs.single_action_space.shape)

    tensors = named_tensors(actor=actor_state, critic=critic_state)  # [fast 2]
    for name, module in {"actor_target": actor_target, "critic_target": critic_target}.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in module.named_parameters()}

    if checkpoint:
        size.fill_(min(global_step, capacity))
        restore(tensors | ({"buffer": buffer[:size]} if args.resume else {}), checkpoint)
    writer = make_writer(args, folder, global_step)
    action_seed, *env_seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(1 + num_envs).tolist()
    envs.action_space.seed(action_seed)
    row_obs[:] = envs.reset(seed=env_seeds)[0].reshape(num_envs, obs_dim)
    episode_return, episode_length = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
    sps, startup_seconds, sps_step = None, None, global_step
    next_log = (global_step // args.log_every + 1) * args.log_every
    total_timesteps, save_last = args.total_timesteps, args.save_model or args.checkpoint_every is not None
    last = global_step >= total_timesteps or args.evaluate is not None

    stopping: list[int] = []
    eval_returns: list[float] = []
    with (
        suppress(KeyboardInterrupt),
        tqdm(total=args.total_timesteps, initial=global_step, unit="step", dynamic_ncols=True) as bar,
    ):
        stop_when_asked(stopping, at_once=True)
        # [fast 1] The policy and the whole gradient step are one graph each.
        # Measured: 1.34 times the eager steps/s; 0.91 times where backward() and optimizer.step() break the graph.
        cudagraphs = args.cudagraphs and device.type == "cuda"
        if args.compile:
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # --tf32 decides
            act, update = torch.compile(act, fullgraph=True), torch.compile(update, fullgraph=True)
        # [fast 4] A captured graph is launched at once; there is one for each kind of gradient step. Gain: to be measured.
        kinds = sorted({(step % policy_frequency == 0,) for step in range(policy_frequency)})
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
            state = TensorDict(tensors)
            saved = state.clone()
            with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
                for _ in range(6):
                    act(row[:, :obs_dim].to(device))
                    for kind in kinds:
                        update(*kind)
            state.update_(saved)

        if args.profile:
            functions = {"policy": act, "update": update, "environment": envs.step}
            wait = max(args.learning_starts - global_step, 0) // num_envs + 10
            act, update, envs.step = profiled(args.profile, wait, 50, functions)
        stop_when_asked(stopping, at_once=False)  # from here on between two steps
        startup_seconds = time.perf_counter() - start_time
        sps_time = time.perf_counter()
        while not last:
            if global_step < args.learning_starts:
                actions = envs.action_space.sample().reshape(num_envs, action_dim)
            else:
                if updates == first_update:
                    if device.type == "cuda":
                        torch.cuda.synchronize()  # sync, once: SPS counts from the first step that learns
                    sps_step, sps_time = global_step, time.perf_counter()
                obs = row[:, :obs_dim].to(device, non_blocking=True)
                actions = act(obs).cpu().numpy()  # sync: the environments need the actions

            while updates < (global_step - args.learning_starts) * args.updates_per_step:
                update(updates % policy_frequency == 0)
                updates += 1

            next_obs, rewards, terminated, truncated, infos = envs.step(actions.reshape(envs.action_space.shape))
            global_step += num_envs

            row_actions[:], row_rewards[:, 0], row_terminated[:, 0] = actions, rewards, terminated
            row_next_obs[:] = next_obs.reshape(num_envs, obs_dim)
            episode_return += rewards
            episode_length += 1
            done = terminated | truncated
            if done.any():
                row_next_obs[done] = np.stack(infos["final_obs"][done]).reshape(-1, obs_dim)
                episodes += [(global_step, float(episode_return[i]), int(episode_length[i])) for i in np.flatnonzero(done)]
                episode_return[done], episode_length[done] = 0, 0
            position = (global_step - num_envs) % capacity
            buffer[position : position + num_envs].copy_(row, non_blocking=True)
            if global_step <= capacity:
                size.fill_(global_step)
            row_obs[:] = next_obs.reshape(num_envs, obs_dim)

            last = bool(stopping) or global_step >= total_timesteps
            if global_step >= next_log or last:
                next_log = (global_step // args.log_every + 1) * args.log_every
                for step, value, length in episodes[logged_episodes:]:
                    write_scalars(writer, {"charts/episodic_return": value, "charts/episodic_length": length}, step)
                logged_episodes = len(episodes)
                if updates >= first_update + policy_frequency:  # all losses are known
                    values = torch.stack([loss.mean() for loss in losses.values()]).tolist()  # sync: one for all losses
                    scalars = {f"losses/{name}": value for name, value in zip(losses, values, strict=True)}
                    scalars["losses/qf_loss"] = (scalars["losses/qf1_loss"] + scalars["losses/qf2_loss"]) / 2
                    write_scalars(writer, scalars, global_step)
                sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
                write_scalars(writer, {"charts/SPS": sps}, global_step)
                recent = f", return {np.mean([value for _, value, _ in episodes[-10:]]):.1f}" if episodes else ""
                bar.set_postfix_str(f"SPS {sps:.0f}{recent}", refresh=False)
                bar.update(global_step - bar.n)
                if global_step - saved_step >= (args.checkpoint_every or math.inf) or (last and save_last):
                    saved_step = global_step
                    progress = [global_step, updates, episodes]
                    save_checkpoint(args, folder, writer, progress, tensors | {"buffer": buffer[:size]})

        if args.evaluate or (args.eval_episodes and not stopping):
            stop_when_asked(stopping, at_once=True)
            # NEXT_STEP, so that nothing begins that is not played.
            eval_envs = make_envs(replace(args, num_envs=1), folder / "evaluation" / "videos", AutoresetMode.NEXT_STEP)
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
