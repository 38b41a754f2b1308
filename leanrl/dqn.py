# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.11,<2.14", "tensordict>=0.15.3,<0.16", "gymnasium[classic-control]>=1.4,<1.5", "numpy>=2,<3",
#     "tyro>=1,<2", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "psutil>=6", "moviepy>=2,<3", "filelock>=3.15",
# ]
# ///
"""Deep Q-learning (DQN) for discrete actions: the eager script.

Paper: Mnih et al., "Human-level control through deep reinforcement learning", Nature 518 (2015), doi:10.1038/nature14236;
       with --double, van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", arXiv:1509.06461 (2015).
Run:   python leanrl/dqn.py --env-id CartPole-v1
Twin:  leanrl/dqn_torchcompile.py computes the same, compiled and captured. Read the diff of the two.

Deviations from the paper; the first four are CleanRL's:
- two small layers in place of convolutions, and the hyper-parameters of classic control;
- Adam in place of RMSProp;
- rewards are not clipped, and the error is squared as it is, where the paper clips both to -1 and 1;
- transitions are drawn with replacement;
- evaluation takes the best actions, where the paper's takes a random one in twenty;
- the gradient steps run between choosing the actions and stepping the environments, so that a GPU learns while the CPU
  simulates: they see the buffer up to the previous transition.
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
import psutil
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
    log_every: int = 100  # agent steps between two log entries

    env_id: str = "CartPole-v1"  # the id of the environment: any with Box observations and Discrete actions
    total_timesteps: int = 500_000  # agent steps in all, over all environments
    num_envs: int = 1  # the number of parallel environments
    buffer_size: int = 10_000  # transitions that the replay buffer holds, over all environments
    gamma: float = 0.99  # the discount factor
    tau: float = 1.0  # how far the target network moves towards the network at each of its updates, from 0 to 1
    target_network_frequency: int = 500  # agent steps between two updates of the target network, at most one a gradient step
    batch_size: int = 128  # the number of transitions in a gradient step
    start_e: float = 1.0  # epsilon, the share of random actions, at the beginning
    end_e: float = 0.05  # epsilon at the end of the exploration fraction, and from then on
    exploration_fraction: float = 0.5  # the part of total_timesteps over which epsilon falls, linearly
    learning_starts: int = 10_000  # agent steps before the first that counts towards a gradient step
    train_frequency: int = 10  # agent steps between two gradient steps, whatever the number of environments
    learning_rate: float = 2.5e-4  # the learning rate
    double: bool = False  # double DQN: the network chooses the next action, and the target network values it


def check_args(args: Args) -> None:
    """Refuse values that cannot work, before anything is started."""
    ranges = {
        "seed": (0, 2**63 - 1),
        **dict.fromkeys(("log_every", "checkpoint_every", "eval_episodes", "total_timesteps", "num_envs"), (1, math.inf)),
        **dict.fromkeys(("batch_size", "train_frequency", "target_network_frequency"), (1, math.inf)),
        "learning_starts": (0, math.inf if args.evaluate else args.total_timesteps - args.num_envs - args.train_frequency),
        "buffer_size": (0 if args.evaluate else max(args.batch_size, args.num_envs), math.inf),
        "learning_rate": (0, math.inf),
        **dict.fromkeys(("gamma", "tau", "start_e", "end_e", "exploration_fraction"), (0, 1)),
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
    try:
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if film else {}))
        if film:
            env.reset()
            env.render()
    except Exception as error:  # an environment may raise anything
        refuse(f"--env-id{' --capture-video' if film else ''}: cannot make {args.env_id}: {type(error).__name__}: {error}")
    seen, acts = env.observation_space, env.action_space
    if not (isinstance(seen, gym.spaces.Box) and isinstance(acts, gym.spaces.Discrete)):
        refuse(f"--env-id takes Box observations and Discrete actions, {args.env_id} has {seen} and {acts}")
    # An environment may return its own state, which its reset in the same step would overwrite.
    return gym.wrappers.TransformObservation(env, np.copy, seen)


# ---- Networks --------------------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """Action values: (batch, obs_dim), of bytes in units of 255, to (batch, num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, device: torch.device):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 120, device=device)
        self.fc2 = nn.Linear(120, 84, device=device)
        self.fc3 = nn.Linear(84, num_actions, device=device)

    def forward(self, obs: Tensor) -> Tensor:
        x = obs / 255 if obs.dtype == torch.uint8 else obs
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


# ---- Algorithm -------------------------------------------------------------------------------------------------------
def linear_schedule(start_e: float, end_e: float, duration: float, t: int) -> float:
    """Epsilon at step t: it goes from start_e to end_e within `duration` steps and stays there."""
    return start_e + (end_e - start_e) * (min(t / duration, 1) if duration else 1)


def epsilon_greedy(values: Tensor, epsilon: Tensor) -> Tensor:
    """Actions (batch,) by their values (batch, num_actions): a random one with probability epsilon, else the best.

    `epsilon` is a tensor, (): a captured graph would not see a number fall.
    """
    best = values.argmax(dim=-1)
    return torch.where(torch.rand_like(values[:, 0]) < epsilon, torch.randint_like(best, values.shape[-1]), best)


def sample_batch(buffer: Tensor, size: Tensor, batch_size: int, obs_dim: int) -> tuple[Tensor, ...]:
    """Draw transitions uniformly, with replacement, from the first `size` rows of the replay buffer.

    A row is a whole transition, which one gather fetches: action, reward and terminated, of four bytes each, and two
    observations; where those are bytes, so is the row. `size` is a tensor: a captured graph would not see a number grow.
    Returns obs (batch, obs_dim), actions, rewards, terminated (batch,), of 0.0 and 1.0, and next_obs.
    """
    indices = torch.randint(2**62, (batch_size,), device=buffer.device) % size
    rows = buffer.index_select(0, indices)
    scalars, obs, next_obs = rows.split([rows.shape[1] - 2 * obs_dim, obs_dim, obs_dim], dim=1)
    actions, rewards, terminated = scalars.flatten().view(torch.float32).view(-1, 3).unbind(-1)
    return obs, actions.long(), rewards, terminated, next_obs


def q_target(rewards: Tensor, terminated: Tensor, values: Tensor, chosen_by: Tensor, gamma: float) -> Tensor:
    """Target of the values, (batch,): r + gamma (1 - terminated) Q(s', argmax_a chosen_by(s', a)).

    values: (batch, num_actions), the target network's at the next observations. chosen_by: these, too (Mnih et al., algorithm
    1), or those of the network that learns (van Hasselt et al., section "Double DQN").
    """
    best = chosen_by.argmax(dim=-1, keepdim=True)
    return rewards + gamma * (1 - terminated) * values.gather(1, best).squeeze(1)


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
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal, at which a CPU is slow
    torch.set_num_threads(1)  # small networks: as fast as two alone, and four times as fast beside a busy process
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.manual_seed(args.seed)

    checkpoint = load_checkpoint(args, ignored=("exp_name",)) if args.resume or args.evaluate else {}
    global_step, updates, owed, episodes = checkpoint["progress"] if args.resume else (0, 0, 0, [])
    # Stepped in turn, each reset in the step that ends its episode. copy=False: an observation is copied once, into the row.
    env_fns = [partial(make_env, args, args.capture_video and index == 0) for index in range(args.num_envs)]
    envs = SyncVectorEnv(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    obs_dim, first_action = math.prod(envs.single_observation_space.shape), envs.single_action_space.start
    dtype = torch.uint8 if envs.single_observation_space.dtype == np.uint8 else torch.float32

    columns = np.cumsum([3 * torch.float32.itemsize // dtype.itemsize, obs_dim, obs_dim])
    capacity, row_dim = 0 if args.evaluate else args.buffer_size // args.num_envs * args.num_envs, int(columns[-1])
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    if (needed := dtype.itemsize * capacity * row_dim) > free:
        refuse(f"--buffer-size {capacity} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
    buffer = torch.zeros(capacity, row_dim, dtype=dtype, device=device)
    # On the host, what the environments show, and a step. Neither changes before the device has given actions, so has read it.
    row = torch.zeros(len(env_fns), row_dim, dtype=dtype)
    row_scalars, row_obs, row_next_obs = np.split(row.numpy(), columns[:2], axis=1)
    (row_actions, row_rewards, row_terminated), obs = row_scalars.view(np.float32).T, row_obs.copy()
    real_numbers = row.numpy() if dtype == torch.float32 else row_rewards  # what could be infinite
    size = torch.ones((), dtype=torch.int64, device=device)  # rows in use; 1 at first: warming up divides by it
    epsilon = torch.zeros((), device=device)

    num_actions = int(envs.single_action_space.n)
    q_network, target_network = QNetwork(obs_dim, num_actions, device), QNetwork(obs_dim, num_actions, device)
    target_network.requires_grad_(False).load_state_dict(q_network.state_dict())
    params, target_params = list(q_network.parameters()), list(target_network.parameters())
    optimizer = optim.Adam(params, lr=args.learning_rate, fused=True)
    tensors = adam_tensors("q_network", dict(q_network.named_parameters()), optimizer)  # what checkpoints hold: add yours
    tensors |= {f"target_network.params.{key}": tensor for key, tensor in target_network.named_parameters()}
    losses: dict[str, Tensor] = {}
    schedule = partial(linear_schedule, args.start_e, args.end_e, args.exploration_fraction * args.total_timesteps)

    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), counted from 0, some of them random: (num_envs,)."""
        with torch.no_grad():
            return epsilon_greedy(q_network(obs), epsilon)

    def update_network() -> None:
        """One gradient step on a new batch."""
        obs, actions, rewards, terminated, next_obs = sample_batch(buffer, size, args.batch_size, obs_dim)
        with torch.no_grad():
            next_values = target_network(next_obs)
            chosen_by = q_network(next_obs) if args.double else next_values
            target = q_target(rewards, terminated, next_values, chosen_by, args.gamma)

        q_values = q_network(obs).gather(1, actions[:, None]).squeeze(1)
        td_loss = F.mse_loss(q_values, target)
        optimizer.zero_grad()
        td_loss.backward()
        optimizer.step()
        losses["q_values"], losses["td_loss"] = q_values.detach(), td_loss.detach()

    def update(with_target: bool) -> None:
        """One gradient step and, if asked for, one of the target network."""
        update_network()
        if with_target:
            with torch.no_grad():
                torch._foreach_lerp_(target_params, params, args.tau)

    def best_action(obs: np.ndarray) -> int:
        """The action of the highest value at an observation, as an environment takes it."""
        with torch.no_grad():
            values = q_network(torch.as_tensor(obs, dtype=dtype, device=device).view(1, obs_dim))
            return int(values.argmax()) + int(first_action)

    if checkpoint:
        size.fill_(min(global_step, capacity))
        restore(tensors | ({"buffer": buffer[:global_step]} if args.resume else {}), checkpoint.pop("state"))
    first_update, last = updates, global_step >= args.total_timesteps or args.evaluate is not None
    logger = Logger(args, checkpoint["folder"] if args.resume else None, global_step, episodes, trains=not last)
    if args.capture_video and not last:
        videos = logger.folder / "videos" / (f"from_step_{global_step}" if args.resume else "")
        envs.envs[0] = gym.wrappers.RecordVideo(envs.envs[0], str(videos), disable_logger=True)
    noise_seed, *env_seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(1 + args.num_envs).tolist()
    obs[:] = envs.reset(seed=env_seeds)[0].reshape(obs.shape)

    stopping, eval_returns, startup_seconds = logger.stopping, [], None
    with closing(envs), closing(logger), suppress(KeyboardInterrupt):
        stop_when_asked(stopping, first="this step")
        torch.manual_seed(noise_seed)
        startup_seconds = time.perf_counter() - start_time
        logger.start = global_step, time.perf_counter()
        while not last:
            epsilon.fill_(schedule(global_step))
            actions = act(torch.from_numpy(obs).to(device, non_blocking=True)).cpu().numpy()  # sync: actions are due
            if global_step >= args.learning_starts:
                if updates == first_update:
                    logger.start = global_step, time.perf_counter()  # SPS counts from the first step that learns
                # Gradient steps are paid for by agent steps, but not by those before learning starts.
                owed += min(args.num_envs, global_step - args.learning_starts)

            while owed >= args.train_frequency:
                updates, owed = updates + 1, owed - args.train_frequency
                update(updates * args.train_frequency % args.target_network_frequency < args.train_frequency)

            row_obs[:], row_actions[:] = obs, actions  # before an environment changes them in place
            next_obs, rewards, terminated, truncated, infos = envs.step(actions + first_action)
            global_step, done = global_step + args.num_envs, terminated | truncated

            row_rewards[:], row_terminated[:] = rewards, terminated
            row_next_obs[:] = next_obs.reshape(obs.shape)
            if np.count_nonzero(done):
                row_next_obs[done] = np.stack(infos["final_obs"][done]).reshape(-1, obs_dim)
            logger.count(global_step, actions, rewards, done, real_numbers, next_obs)
            position = (global_step - args.num_envs) % capacity
            buffer[position : position + args.num_envs].copy_(row, non_blocking=True)
            if global_step <= capacity:
                size.fill_(global_step)
            obs[:] = next_obs.reshape(obs.shape)

            last = bool(stopping) or global_step >= args.total_timesteps
            if last or global_step % args.log_every < args.num_envs:
                logger.log(global_step, losses if updates > first_update else {}, epsilon=schedule(global_step))
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
    logger.print_summary(**measured, compile=False, cudagraphs=False)
    if stopping:
        sys.exit(128 + stopping[0])
