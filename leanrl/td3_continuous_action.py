# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<2.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3", "filelock>=3.15",
# ]
# ///
"""Twin Delayed DDPG (TD3) for continuous actions: the eager script.

Paper: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", arXiv:1802.09477.
Run:   python td3_continuous_action.py --env-id HalfCheetah-v4
Twin:  td3_continuous_action_torchcompile.py computes the same, compiled and captured. Read their diff.

Deviations from the paper; the first is CleanRL's and that of the authors' later code:
- networks of 256 and 256 units, batches of 256, learning rate 3e-4, 25,000 random steps (paper: 400 and 300,
  100, 1e-3, 10,000);
- the gradient steps come before the environment step: they see the buffer up to the previous transition;
- actions, and noise on them, are in [-1, 1] throughout: a wrapper scales them to the environment's bounds.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import json
import math
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import gymnasium as gym
import mujoco
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from filelock import FileLock, Timeout
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn, optim
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- Arguments ---------------------------------------------------------------------------------------------
Index = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # the name of this experiment
    seed: Index = 1  # seed of the experiment
    cuda: bool = True  # use a CUDA device if there is one
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # high: TF32 on CUDA; medium: bfloat16
    track: bool = False  # also send the logs to Weights & Biases
    wandb_project_name: str = "leanrl"  # the project of the Weights & Biases run
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases run
    capture_video: bool = False  # record videos of the first environment under runs/<run>/videos
    save_model: bool = False  # write a checkpoint at the end
    checkpoint_every: Count | None = None  # agent steps between two checkpoints; the newest two are kept
    resume: str | None = None  # go on with the run of this checkpoint, or of the newest in this folder
    evaluate: str | None = None  # do not train, evaluate this checkpoint, or the newest in this folder
    eval_episodes: Count | None = None  # episodes of an evaluation, else 10; if given, one is made at the end
    eval_every: Count | None = None  # agent steps between two evaluations; the best agent is kept as best.pt
    log_every: Count = 100  # agent steps between two log entries

    env_id: str = "HalfCheetah-v4"  # the id of the environment: any with bounded vectors as actions
    total_timesteps: Count = 1_000_000  # agent steps in all, over all environments
    num_envs: Count = 1  # the number of parallel environments
    buffer_size: Count = 1_000_000  # transitions that the replay buffer holds, over all environments
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 0.005  # how far target networks move towards their networks at each of their updates
    batch_size: Count = 256  # the number of transitions in a gradient step
    learning_starts: Index = 25_000  # agent steps with random actions before the first gradient step
    updates_per_step: NonNegative = 1.0  # gradient steps per agent step, whatever the number of environments
    learning_rate: NonNegative = 3e-4  # the learning rate of the actor and of the critics
    policy_frequency: Count = 2  # gradient steps between two updates of the actor and of the target networks
    policy_noise: NonNegative = 0.2  # the standard deviation of the noise on target actions in [-1, 1]
    noise_clip: NonNegative = 0.5  # the bound on the noise on target actions
    exploration_noise: NonNegative = 0.1  # the standard deviation of the exploration noise


def parse_args() -> Args:
    """Read the command line; values that cannot work end the program with one line and status 2."""
    args = tyro.cli(Args)
    try:
        TypeAdapter(Args).validate_python(vars(args))
    except ValidationError as invalid:
        error = invalid.errors()[0]
        refuse(f"--{error['loc'][0].replace('_', '-')}: {error['msg']}, got {error['input']}")
    if args.resume and args.evaluate:
        refuse("--resume and --evaluate exclude each other")
    if not args.evaluate and args.learning_starts + args.num_envs >= args.total_timesteps:
        refuse(f"--learning-starts has to leave some of --total-timesteps, got {args.learning_starts}")
    if args.buffer_size < max(args.batch_size, args.num_envs):
        refuse(f"--buffer-size has to hold a batch and a step of all environments, got {args.buffer_size}")
    return args


def refuse(message: str) -> NoReturn:
    """Tell in one line on standard error what is wrong with the arguments, and exit with status 2."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


# ---- Run: folder, logs, checkpoints, signals, evaluation ---------------------------------------------------
def open_folder(args: Args, checkpoint: dict) -> tuple[Path, FileLock]:
    """The folder of a run, locked: that of the checkpoint to resume, or else a new one under `runs/`."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.3f}"
    folder = checkpoint["file"].parent if args.resume else Path("runs") / re.sub(r"[^\w.=-]", "_", name)
    folder.mkdir(parents=True, exist_ok=bool(args.resume))
    try:
        return folder, FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        refuse(f"--resume: a run is at work in {folder}")


def open_logs(args: Args, folder: Path, step: int) -> SummaryWriter:
    """Start the TensorBoard log, and with --track that of Weights & Biases, which follows it."""
    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "entity": args.wandb_entity, "config": asdict(args)}
        wandb.init(**run, id=folder.name[-64:], name=folder.name, resume="allow", sync_tensorboard=True)
    writer = SummaryWriter(str(folder), purge_step=step + 1 if args.resume else None)  # later entries go
    table = "\n".join(f"{name}|{value}" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"param|value\n-|-\n{table}")
    return writer


def log_losses(writer: SummaryWriter, step: int, losses: dict[str, Tensor]) -> None:
    """Write the mean of each loss; one that is not finite ends the run."""
    means = torch.stack([loss.mean() for loss in losses.values()]).tolist()  # sync
    for name, mean in zip(losses, means, strict=True):
        writer.add_scalar(f"losses/{name}", mean, step)
        if not math.isfinite(mean):
            sys.exit(f"{Path(__file__).name}: error: {name} is {mean} at step {step}")


def save_checkpoint(args: Args, writer: SummaryWriter, state: dict, progress: list, **more) -> None:
    """Write `<step>.pt`, whole or not at all, and keep the newest two; with an `eval_return` `best.pt`."""
    writer.flush()  # so that the curves of a run that is killed have no gap
    folder, checkpoint = Path(writer.log_dir), {name: item.state_dict() for name, item in state.items()}
    checkpoint |= {"args": {"script": Path(__file__).stem, **asdict(args)}, "progress": progress, **more}
    torch.save(checkpoint, folder / "checkpoint.new")
    (folder / "checkpoint.new").replace(folder / f"{'best' if 'eval_return' in more else progress[0]}.pt")
    for outdated in sorted(folder.glob("[0-9]*.pt"), key=lambda file: file.stat().st_mtime_ns)[:-2]:
        outdated.unlink()


def load_checkpoint(args: Args) -> dict:
    """Read the checkpoint to resume or evaluate, the newest of a folder; nothing in it is executed."""
    path = Path(args.resume or args.evaluate)
    best = path / "best.pt" if (path / "best.pt").exists() else path
    file = max(path.glob("[0-9]*.pt"), key=lambda file: file.stat().st_mtime_ns, default=best)
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        args_before = checkpoint["args"]
    except Exception as error:  # torch.load raises what it likes where a file is none of its own
        refuse(f"{file} is not a checkpoint or a folder with one: {type(error).__name__}")
    if args.resume and "eval_return" in checkpoint:
        refuse(f"--resume takes a numbered checkpoint, {file} is for --evaluate")
    fixed = ("script", "env_id", "seed", "num_envs", "buffer_size") if args.resume else ("env_id",)
    for name, value in {"script": Path(__file__).stem, **asdict(args)}.items():
        before = args_before.get(name, value)
        if before != value and name in fixed:
            refuse(f"{file} is of {name} {before}, not {value}: it has to be the same")
        if before != value and args.resume and name != "resume":
            print(f"--{name.replace('_', '-')} {value} from here on, it was {before}", file=sys.stderr)
    return checkpoint | {"file": file.resolve()}


def load_states(state: dict, checkpoint: dict) -> None:
    """Give modules and optimizers their states back; settings of an optimizer are those of the arguments."""
    for name, item in state.items():
        settings = {key: value for key, value in item.state_dict().items() if key == "param_groups"}
        item.load_state_dict(checkpoint[name] | settings)


def stop_on_signals() -> list[int]:
    """The list to which Ctrl+C, SIGTERM and SIGHUP add their numbers; the same one again ends at once."""
    received = []

    def note(number: int, _) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, note)
    return received


def evaluate(args: Args, env: gym.Env, policy: Callable, stopping: list[int]) -> list[float]:
    """Play whole episodes with a policy from an observation to an action; gives the return of each."""
    returns = []
    seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes or 10)
    for seed in tqdm(seeds.tolist(), desc="evaluation", unit="episode", leave=not args.eval_every):
        obs, info = env.reset(seed=seed)
        while "episode" not in info and not stopping:
            obs, _, _, _, info = env.step(policy(obs))
        returns += [float(np.sum(info["episode"]["r"]))] if "episode" in info else []
    env.close()
    return returns


def keep_best(args: Args, returns: list, writer: SummaryWriter, state: dict, progress: list) -> float | None:
    """Log the mean return of an evaluation, and keep the best agent as `best.pt`: gives that one's mean."""
    file, mean = Path(writer.log_dir, "best.pt"), float(np.mean(returns))
    writer.add_scalar("charts/eval_return", mean, progress[0])
    best = torch.load(file, map_location="cpu")["eval_return"] if file.exists() else None
    if math.isfinite(mean) and (best is None or mean > best):
        save_checkpoint(args, writer, state, progress, eval_return=mean)
        return mean
    return best


# ---- Environment -------------------------------------------------------------------------------------------
def make_env(args: Args, videos: Path | None = None) -> gym.Env:
    """Build an environment with flat observations and actions in [-1, 1], filmed into the folder `videos`."""
    warnings.filterwarnings("ignore", message=".*is out of date.*")  # the literature has figures of -v4
    try:
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if videos else {}))
    except gym.error.Error as error:
        refuse(f"--env-id {args.env_id}: {error}")
    obs, actions = env.observation_space, env.action_space
    boxes = isinstance(obs, gym.spaces.Box) and isinstance(actions, gym.spaces.Box)
    if not (boxes and actions.is_bounded() and len(actions.shape) == 1):
        refuse(f"--env-id takes Box observations and bounded vectors as actions, not {obs} and {actions}")
    if videos:
        if renderer := getattr(env.unwrapped, "mujoco_renderer", None):
            # Gymnasium 1.4 lets a HalfCheetah run out of sight. Without such a camera this is -1, its choice.
            renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        env = gym.wrappers.RecordVideo(env, str(videos), disable_logger=True)
    env = gym.wrappers.FlattenObservation(env)
    # Scaling may round to just outside of the bounds.
    env = gym.wrappers.TransformAction(env, lambda action: action.clip(actions.low, actions.high), actions)
    env = gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
    return gym.wrappers.RecordEpisodeStatistics(env)


# ---- Networks ----------------------------------------------------------------------------------------------
class EnsembleLinear(nn.Module):
    """`nn.Linear` `members` times, as one batched product: (members, batch, in) to (members, batch, out)."""

    def __init__(self, members: int, in_features: int, out_features: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features, device=device))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features, device=device))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(in_features**-0.5), in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight) + self.bias


class Critic(nn.Module):
    """Two action values of (batch, obs_dim) and (batch, action_dim): (2, batch), or the first's: (batch,)."""

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
    """A deterministic policy: (batch, obs_dim) to actions in [-1, 1], (batch, action_dim)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256, device=device)
        self.fc2 = nn.Linear(256, 256, device=device)
        self.fc_mu = nn.Linear(256, action_dim, device=device)

    def forward(self, obs: Tensor) -> Tensor:
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        return torch.tanh(self.fc_mu(x))


if __name__ == "__main__":
    # ---- Setup ---------------------------------------------------------------------------------------------
    args = parse_args()
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.cuda and device.type == "cpu":
        print("CUDA is not available: running on the CPU", file=sys.stderr)
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal, at which a CPU is slow
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.manual_seed(args.seed)

    checkpoint = load_checkpoint(args) if args.resume or args.evaluate else {}
    global_step, updates, updates_due, returns = checkpoint["progress"] if args.resume else (0, 0, 0.0, [])
    folder, lock = open_folder(args, checkpoint)

    # The step that ends an episode also resets its environment; infos["final_obs"] has what it ended with.
    videos = folder / f"videos/from_step_{global_step}" if args.capture_video and not args.evaluate else None
    env_fns = [partial(make_env, args, videos if index == 0 else None) for index in range(args.num_envs)]
    envs = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    actor, actor_target = Actor(obs_dim, action_dim, device), Actor(obs_dim, action_dim, device)
    critic, critic_target = Critic(obs_dim, action_dim, device), Critic(obs_dim, action_dim, device)
    for target, network in ((actor_target, actor), (critic_target, critic)):
        target.requires_grad_(False).load_state_dict(network.state_dict())
    actor_optimizer = optim.Adam(actor.parameters(), lr=args.learning_rate, fused=True)
    critic_optimizer = optim.Adam(critic.parameters(), lr=args.learning_rate, fused=True)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"actor": actor, "actor_target": actor_target, "critic": critic, "critic_target": critic_target}
    state |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}

    # A row of the replay buffer is a whole transition: one copy stores it, one gather fetches a batch.
    columns = [obs_dim, action_dim, 1, 1, obs_dim]  # obs, action, reward, terminated, next obs
    capacity = 0 if args.evaluate else args.buffer_size // args.num_envs * args.num_envs
    buffer = torch.zeros(capacity, sum(columns), device=device)
    size = torch.tensor(1, device=device)  # rows in use, 1 for the warm-up; a graph would freeze a number
    losses: dict[str, Tensor] = {}  # the latest, for the log

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), the policy's with noise on them: (num_envs, action_dim)."""
        with torch.no_grad():
            mean = actor(obs)
            return (mean + args.exploration_noise * torch.randn_like(mean)).clamp(-1, 1)

    def best_action(obs: np.ndarray) -> np.ndarray:
        """The policy's action, (action_dim,), at one observation, (obs_dim,)."""
        with torch.no_grad():
            return actor(torch.as_tensor(obs, dtype=torch.float32, device=device)[None])[0].cpu().numpy()

    def update_critic() -> Tensor:
        """One gradient step of the critics on a new batch; returns its observations (batch_size, obs_dim)."""
        indices = torch.randint(2**62, (args.batch_size,), device=device) % size
        obs, actions, rewards, terminated, next_obs = buffer.index_select(0, indices).split(columns, dim=-1)
        with torch.no_grad():  # target policy smoothing, equation 14
            noise = (args.policy_noise * torch.randn_like(actions)).clamp(-args.noise_clip, args.noise_clip)
            next_actions = (actor_target(next_obs) + noise).clamp(-1, 1)
            next_values = critic_target(next_obs, next_actions).amin(dim=-2)
            target = rewards[..., 0] + args.gamma * (1 - terminated[..., 0]) * next_values  # equation 10
        qf_values = critic(obs, actions)
        qf_losses = (qf_values - target.unsqueeze(-2)).square().mean(dim=-1)
        critic_optimizer.zero_grad()
        qf_losses.sum().backward()
        critic_optimizer.step()
        record(qf1_values=qf_values[..., 0, :], qf2_values=qf_values[..., 1, :])
        record(qf1_loss=qf_losses[..., 0], qf2_loss=qf_losses[..., 1], qf_loss=qf_losses.mean(dim=-1))
        return obs

    def update_actor(obs: Tensor) -> None:
        """One gradient step of the actor on obs (batch_size, obs_dim), and one of all targets."""
        actor_loss = -critic(obs, actor(obs), first_only=True).mean(dim=-1)  # algorithm 1
        actor_optimizer.zero_grad()
        actor_loss.backward(inputs=list(actor.parameters()))
        actor_optimizer.step()
        record(actor_loss=actor_loss)
        with torch.no_grad():
            for target, network in ((actor_target, actor), (critic_target, critic)):
                for target_param, param in zip(target.parameters(), network.parameters(), strict=True):
                    target_param.lerp_(param, args.tau)

    def update(with_actor: bool) -> None:
        """One gradient step on a new batch."""
        obs = update_critic()
        if with_actor:
            update_actor(obs)

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        losses.update({name: value.detach() for name, value in values.items()})

    # ---- Training ------------------------------------------------------------------------------------------
    if args.evaluate or args.resume:
        load_states({"actor": actor} if args.evaluate else state, checkpoint)
    if args.resume:
        size.fill_(min(global_step, capacity))
        buffer[:size] = checkpoint.pop("buffer")[:size]

    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    seed, *env_seeds = sequence.generate_state(1 + args.num_envs).tolist()
    torch.manual_seed(seed)
    envs.action_space.seed(seed)
    obs = envs.reset(seed=env_seeds)[0].astype(np.float32)

    last = bool(args.evaluate) or global_step >= args.total_timesteps
    writer = open_logs(args, folder, global_step)
    bar = tqdm(total=args.total_timesteps, initial=global_step, unit="step", miniters=1, disable=last)
    stopping = stop_on_signals()
    first_update, saved_step, evaluated = updates, global_step, checkpoint.get("evaluated", global_step)
    startup_seconds = time.perf_counter() - START_TIME
    sps, best, sps_start = None, None, (global_step, time.perf_counter())
    with closing(envs), writer, bar:
        while not last:
            if global_step < args.learning_starts:
                actions = envs.action_space.sample()
            else:
                if updates == first_update:
                    sps_start = global_step, time.perf_counter()  # counted from the first step that learns
                actions = act(torch.from_numpy(obs).to(device, non_blocking=True)).cpu().numpy()  # sync
                updates_due += min(args.num_envs, global_step - args.learning_starts) * args.updates_per_step

            while updates_due > 0:  # a GPU still works on these while the environments step
                update(updates % args.policy_frequency == 0)
                updates, updates_due = updates + 1, updates_due - 1

            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            position, global_step = global_step % capacity, global_step + args.num_envs
            final_obs = next_obs.copy()
            for index in np.flatnonzero(terminated | truncated):
                final_obs[index] = infos["final_obs"][index]
                episode = infos["final_info"]["episode"]
                returns.append(float(episode["r"][index]))
                writer.add_scalar("charts/episodic_return", episode["r"][index], global_step)
                writer.add_scalar("charts/episodic_length", episode["l"][index], global_step)

            transitions = [obs, actions, rewards[:, None], terminated[:, None], final_obs]
            rows = np.concatenate(transitions, axis=1, dtype=np.float32)
            if not np.isfinite(rows).all():
                sys.exit(f"{Path(__file__).name}: error: a transition is not finite at step {global_step}")
            buffer[position : position + args.num_envs].copy_(torch.from_numpy(rows), non_blocking=True)
            size.fill_(min(global_step, capacity))
            obs = next_obs.astype(np.float32)

            last = bool(stopping) or global_step >= args.total_timesteps
            if last or global_step % args.log_every < args.num_envs:
                if updates >= first_update + args.policy_frequency:  # all losses are known
                    log_losses(writer, global_step, losses)
                sps = (global_step - sps_start[0]) / (time.perf_counter() - sps_start[1])
                writer.add_scalar("charts/SPS", sps, global_step)
                bar.postfix = f"SPS {sps:.0f}, return {np.mean(returns[-10:]) if returns else math.nan:.1f}"
                bar.update(global_step - bar.n)
                progress = [global_step, updates, updates_due, returns]
                due = global_step - saved_step >= (args.checkpoint_every or math.inf)
                if due or (last and (args.save_model or args.checkpoint_every)):
                    replay = {"buffer": buffer[:global_step].clone()}
                    save_checkpoint(args, writer, state, progress, evaluated=evaluated, **replay)
                    saved_step = global_step
                if args.eval_every and global_step // args.eval_every > evaluated // args.eval_every:
                    pause = time.perf_counter()
                    scores = evaluate(args, make_env(args), best_action, stopping)
                    if not stopping:
                        best, evaluated = keep_best(args, scores, writer, state, progress), global_step
                    sps_start = sps_start[0], sps_start[1] + time.perf_counter() - pause

    # ---- End -----------------------------------------------------------------------------------------------
    eval_returns = []
    if args.evaluate or (args.eval_episodes and not stopping):
        env = make_env(args, folder / "evaluation" / "videos" if args.capture_video else None)
        eval_returns = evaluate(args, env, best_action, stopping)
    if args.track:
        sys.modules["wandb"].finish()  # whose last words come before the summary
    summary = {"script": Path(__file__).stem, **asdict(args), "total_timesteps": global_step, "sps": sps}
    summary |= {"device": device.type, "compile": False, "cudagraphs": False}
    summary |= {"updates": updates, "episodes": len(returns), "eval_returns": eval_returns}
    summary["best_eval_return"] = best
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
