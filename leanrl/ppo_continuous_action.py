# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.11,<2.14", "tensordict>=0.15.3,<0.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3",
#     "tyro>=1,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "psutil>=6", "moviepy>=2,<3", "filelock>=3.15",
# ]
# ///
"""Proximal Policy Optimization (PPO) for continuous actions.

Paper: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017), with the details of Huang et
       al., "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track (2022).
Run:   python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v4
Twin:  leanrl/ppo_continuous_action_torchcompile.py computes the same with torch.compile and CUDA graphs.

Deviations from the paper and the details:
- the step that only resets an environment is no transition and is masked out;
- a truncated episode bootstraps from the value of its final observation;
- all environments share one normaliser of observations;
- rewards are scaled by the deviation, at the end of their rollout, of returns that start anew with each episode.
"""

import json
import math
import os
import re
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
import torch
import torch.nn.functional as F
import tyro
from filelock import FileLock, Timeout
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn, optim
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

    env_id: str = "HalfCheetah-v4"  # the id of the environment: any with Box observations and Box actions
    total_timesteps: int = 1_000_000  # agent steps in all, over all environments; a rollout beyond them is left out
    learning_rate: float = 3e-4  # the learning rate at the start
    num_envs: int = 1  # the number of parallel environments
    num_steps: int = 2048  # the steps of each environment in a rollout
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: float = 0.99  # the discount factor
    gae_lambda: float = 0.95  # lambda of the generalised advantage estimate
    num_minibatches: int = 32  # the number of minibatches that a rollout is divided into
    update_epochs: int = 10  # how often a rollout is learnt from
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # the bound on the ratio of probabilities, as a distance from 1
    clip_vloss: bool = True  # clip the value loss, too
    ent_coef: float = 0.0  # the weight of the entropy
    vf_coef: float = 0.5  # the weight of the value loss
    max_grad_norm: float = 0.5  # the norm that gradients are clipped to
    target_kl: float | None = None  # stop learning from a rollout after the epoch in which the KL divergence passes this
    act_device: Literal["auto", "cpu", "device"] = "auto"  # act in NumPy on the cpu or on the device that learns; auto: faster


def check_args(args: Args) -> None:
    """Refuse values that cannot work, before anything is started."""
    batch_size = args.num_envs * args.num_steps
    counts = ("checkpoint_every", "eval_episodes", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    amounts = ("learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "target_kl")
    ranges = {
        "seed": (0, 2**63 - 1),
        **dict.fromkeys(counts, (1, math.inf)),
        "total_timesteps": (0 if args.evaluate else batch_size, math.inf),
        **dict.fromkeys(amounts, (0, math.inf)),
        **dict.fromkeys(("gamma", "gae_lambda"), (0, 1)),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and (not low <= value <= high or value == math.inf):
            refuse(f"--{name.replace('_', '-')} takes a number from {low} to {high}, got {value}")
    if not args.evaluate and (batch_size % args.num_minibatches or batch_size == args.num_minibatches * args.norm_adv):
        refuse(f"--num-minibatches takes a divisor of {batch_size}, with --norm-adv a smaller one, got {args.num_minibatches}")
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
    if not (boxes and (acts.low < acts.high).all()):
        refuse(f"--env-id takes Box observations and Box actions of real numbers, {args.env_id} has {seen} and {acts}")
    return env


class Envs(SyncVectorEnv):
    """Environments stepped in turn that leave infos empty: gathering them takes 10 of 74 us a step, and nobody reads them."""

    def _add_info(self, vector_infos: dict, env_info: dict, env_num: int) -> dict:
        return vector_infos


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
        within = np.square(rows - mean).sum(axis=0) if added > 1 else 0.0  # 3 of 10 us
        self.squares += within + np.square(delta) * (count * added / (count + added))
        self.count.fill(count + added)
        self.mean += delta * (added / (count + added))

    def std(self) -> np.ndarray:
        """The standard deviation, (dim,), never 0."""
        return np.sqrt(self.squares / max(self.count.item(), 1) + 1e-8)

    def standardise(self, rows: np.ndarray) -> np.ndarray:
        """Rows (n, dim) less the mean over the standard deviation, clipped to 10."""
        return ((rows - self.mean) / self.std()).clip(-10, 10)


def numpy_policy(layers: list[tuple[type, list[np.ndarray]]], obs: np.ndarray) -> np.ndarray:
    """Mean actions (n, action_dim) at obs (n, obs_dim), from class and parameters of each layer of `Agent.actor_mean`."""
    for layer, params in layers:
        # A layer of another class is a KeyError until it has its function here.
        obs = obs @ params[0].T + params[1] if layer is nn.Linear else {nn.Tanh: np.tanh}[layer](obs)
    return obs


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


def adam_tensors(name: str, params: dict[str, Tensor], optimizer: optim.Adam) -> dict[str, Tensor]:
    """Make Adam's moments and step counts ahead, of zeros; returns all by name: <name>.exp_avg.<parameter> and so on."""
    for param in params.values():
        moments = {kind: torch.zeros_like(param) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = moments | {"step": torch.zeros((), device=param.device)}
    states = {key: {"params": param, **optimizer.state[param]} for key, param in params.items()}
    return {f"{name}.{kind}.{key}": tensor for key, state in states.items() for kind, tensor in state.items()}


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
    torch.set_flush_denormal(True)  # Adam's moments of weights without gradient become denormal, which a CPU is slow at
    torch.set_num_threads(1)  # small networks: 1.06 times the steps/s with one environment, 0.90 with 64
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.manual_seed(args.seed)

    checkpoint = load_checkpoint(args, ignored=("exp_name",)) if args.resume or args.evaluate else {}
    global_step, updates, episodes = checkpoint["progress"] if args.resume else (0, 0, [])
    # Stepped in turn, each reset in the step after the end of its episode. copy=False: the rollout has a copy.
    env_fns = [partial(make_env, args, args.capture_video and index == 0) for index in range(args.num_envs)]
    envs = Envs(env_fns, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(envs.single_action_space.shape)
    action_low, action_high = envs.single_action_space.low.ravel(), envs.single_action_space.high.ravel()

    num_envs, num_steps, batch_size = args.num_envs, args.num_steps, args.num_envs * args.num_steps
    minibatch_size = max(batch_size // args.num_minibatches, 1)
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
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    tensors = adam_tensors("agent", dict(agent.named_parameters()), optimizer)  # what checkpoints hold: add yours
    for name, moments in (("obs_moments", obs_moments), ("return_moments", return_moments)):
        tensors |= {f"{name}.{key}": torch.from_numpy(array) for key, array in vars(moments).items()}
    losses: dict[str, Tensor] = {}

    def act(obs: Tensor, noise: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim) and noise of the policy's deviation: (num_envs, action_dim)."""
        with torch.no_grad():
            return agent.actor_mean(obs) + noise

    def prepare() -> None:
        """Turn the rollout into the batch to learn from: log-probabilities, values, advantages and returns."""
        with torch.no_grad():
            obs, actions, columns = buffer.split([obs_dim, action_dim, 3], dim=2)
            rewards, terminated, valid = columns.unbind(2)
            mean, log_std, values = agent(obs)
            log_prob = normal_log_prob(actions, mean, log_std)
            advantages = gae(rewards[:-1], values, terminated[:-1], valid, args.gamma, args.gae_lambda)
            returns = advantages + values[:-1]
            columns = [log_prob[:-1], advantages, returns, values[:-1], valid[:-1]]
            rows = torch.cat([obs[:-1], actions[:-1], torch.stack(columns, dim=2)], dim=2)
            batch.copy_(rows.view(batch_size, -1))

            losses["explained_variance"] = explained_variance(values[:-1], returns, valid[:-1])

    def objective(network: Callable, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss on the rows `indices` of the batch, (minibatch_size,), and what is logged of it."""
        rows = batch.index_select(0, indices)
        obs, actions, columns = rows.split([obs_dim, action_dim, 5], dim=1)
        old_log_prob, advantages, returns, old_values, valid = columns.unbind(1)
        if args.norm_adv:
            advantages = normalise(advantages, valid)

        mean, log_std, values = network(obs)
        log_ratio = normal_log_prob(actions, mean, log_std) - old_log_prob
        pg_loss = policy_loss(log_ratio, advantages, valid, args.clip_coef)
        v_loss = value_loss(values, old_values, returns, valid, args.clip_coef if args.clip_vloss else None)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
        metrics = kl_metrics(log_ratio.detach(), valid, args.clip_coef)
        return loss, {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy, **metrics}

    def update(indices: Tensor) -> None:
        """One gradient step on the rows `indices` of the batch, (minibatch_size,)."""
        loss, latest = objective(agent, indices)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        losses.update({name: value.detach() for name, value in latest.items()})

    def best_action(obs: np.ndarray) -> np.ndarray:
        """The policy's mean action at an observation, as an environment takes it; the moments of observations stay."""
        obs = torch.as_tensor(obs_moments.standardise(obs.reshape(1, obs_dim)), dtype=torch.float32, device=device)
        with torch.no_grad():
            action = agent.actor_mean(obs)[0].cpu().numpy()
        return action.clip(action_low, action_high).reshape(envs.single_action_space.shape)

    if checkpoint:
        restore(tensors, checkpoint.pop("state"))
    last = global_step + batch_size > args.total_timesteps or args.evaluate is not None
    logger = Logger(args, checkpoint["folder"] if args.resume else None, global_step, episodes, trains=not last)
    if args.capture_video and not last:
        videos = logger.folder / "videos" / (f"from_step_{global_step}" if args.resume else "")
        envs.envs[0] = gym.wrappers.RecordVideo(envs.envs[0], str(videos), disable_logger=True)
    *env_seeds, noise_seed = np.random.SeedSequence([args.seed, global_step]).generate_state(num_envs + 1).tolist()
    next_obs = envs.reset(seed=env_seeds)[0].reshape(num_envs, obs_dim)
    if not checkpoint:
        obs_moments.update(next_obs)
    rollout_obs[-1], rollout_valid[-1] = obs_moments.standardise(next_obs), 1
    valid, discounted_return = np.ones(num_envs, dtype=bool), np.zeros(num_envs)
    rollout_returns = np.zeros((num_steps, num_envs))

    stopping, eval_returns, startup_seconds = logger.stopping, [], None
    with closing(envs), closing(logger), suppress(KeyboardInterrupt):
        stop_when_asked(stopping, first="this rollout and what is learnt from it")
        torch.manual_seed(noise_seed)
        startup_seconds = time.perf_counter() - start_time
        logger.start = global_step, time.perf_counter()
        while not last:
            learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps if args.anneal_lr else 1)
            optimizer.param_groups[0]["lr"] = learning_rate
            rollout[0] = rollout[-1]
            with torch.no_grad():
                noise = torch.randn(num_steps, num_envs, action_dim, device=act_device)
                noise *= agent.actor_logstd.exp().to(act_device)  # sync, once a rollout, and so where the weights are copied
            if act_on_cpu:
                noise = noise.numpy()
                layers = [(type(layer), [p.detach().cpu().numpy() for p in layer.parameters()]) for layer in agent.actor_mean]

            for step in range(num_steps):
                if act_on_cpu:
                    actions = numpy_policy(layers, rollout_obs[step]) + noise[step]
                else:
                    obs = rollout[step, :, :obs_dim].to(device, non_blocking=True)
                    actions = act(obs, noise[step]).cpu().numpy()  # sync: the environments need the actions
                clipped = actions.clip(action_low, action_high).reshape(envs.action_space.shape)
                next_obs, rewards, terminated, truncated, _ = envs.step(clipped)

                rollout_actions[step], rollout_rewards[step], rollout_terminated[step] = actions, rewards, terminated
                global_step += int(np.count_nonzero(valid))
                discounted_return = rewards + args.gamma * discounted_return * valid
                rollout_returns[step] = discounted_return
                done = terminated | truncated
                logger.count(global_step, actions, rewards, done, next_obs, valid=valid)
                # The next step of an environment that is done resets it and ignores the action.
                rollout_valid[step + 1] = valid = ~done
                next_obs = next_obs.reshape(num_envs, obs_dim)
                obs_moments.update(next_obs[valid])
                rollout_obs[step + 1] = obs_moments.standardise(next_obs)

            return_moments.update(rollout_returns[rollout_valid[:-1] > 0][:, None])
            rollout_rewards[:-1] = (rollout_rewards[:-1] / return_moments.std()).clip(-10, 10)
            buffer.copy_(rollout, non_blocking=True)  # the log waits for the device before the rollout changes
            prepare()
            for _ in range(args.update_epochs):
                for indices in torch.randperm(batch_size, device=device).split(minibatch_size):
                    update(indices)
                    updates += 1
                if args.target_kl is not None and losses["approx_kl"] > args.target_kl:  # sync, once an epoch
                    break

            logger.log(global_step, losses, learning_rate=learning_rate)
            last = bool(stopping) or global_step + batch_size > args.total_timesteps
            save_checkpoint(logger, last, [global_step, updates, episodes], tensors)

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
    logger.print_summary(**measured, compile=False, cudagraphs=False)
    if stopping:
        sys.exit(128 + stopping[0])
