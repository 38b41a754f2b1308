# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<2.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
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
- the actor learns in the first gradient step (CleanRL: in the second);
- actions are in [-1, 1] throughout, and noise in these units: `in_bounds` scales them for environments.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import argparse
import copy
import importlib
import json
import math
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn, optim
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- Arguments ---------------------------------------------------------------------------------------------
Fraction = Annotated[float, Field(ge=0, le=1)]
JSON = tyro.conf.arg(constructor=json.loads, metavar="JSON")
FIXED = ("env_id", "num_envs", "buffer_size", "learning_rate")  # what --resume keeps


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

    env_id: str = "HalfCheetah-v4"  # the id of the environment: any with bounded vectors as actions
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of the environment
    total_timesteps: PositiveInt = 1_000_000  # agent steps in all, over all environments
    num_envs: PositiveInt = 1  # the number of parallel environments
    buffer_size: PositiveInt = 1_000_000  # transitions that the replay buffer holds, over all environments
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 0.005  # how far target networks move towards their networks at each of their updates
    batch_size: PositiveInt = 256  # the number of transitions in a gradient step
    learning_starts: NonNegativeInt = 25_000  # agent steps with random actions before the first gradient step
    updates_per_step: NonNegativeFloat = 1.0  # gradient steps per agent step, however many environments
    learning_rate: NonNegativeFloat = 3e-4  # the learning rate of the actor and of the critics
    policy_frequency: PositiveInt = 2  # gradient steps between two updates of the actor and of the targets
    policy_noise: NonNegativeFloat = 0.2  # the standard deviation of the noise on target actions in [-1, 1]
    noise_clip: NonNegativeFloat = 0.5  # the bound on the noise on target actions
    exploration_noise: NonNegativeFloat = 0.1  # the standard deviation of the exploration noise

    def __post_init__(self):  # tyro tells what it raises, and exits with status 2
        if self.buffer_size // self.num_envs * self.num_envs < self.batch_size:
            raise ValueError("--buffer-size has to hold a batch, of whole steps of all environments")


# ---- Environment -------------------------------------------------------------------------------------------
def make_env(args: Args, videos: Path | None) -> gym.Env:
    """Build an environment whose observations are vectors; its first episode is filmed into `videos`."""
    env = gym.make(args.env_id, **args.env_kwargs, **({"render_mode": "rgb_array"} if videos else {}))
    if videos:
        env = gym.wrappers.RecordVideo(env, str(videos), lambda episode: episode == 0, disable_logger=True)
    flat = gym.spaces.flatten_space(env.observation_space)
    return env if env.observation_space == flat else gym.wrappers.FlattenObservation(env)


def make_envs(args: Args, num_envs: int, videos: Path | None = None) -> VectorEnv:
    """Build environments; the step that ends an episode also resets its environment (SAME_STEP)."""
    module, _, env_id = args.env_id.rpartition(":")
    if module:  # beside the script, in the current folder or installed
        sys.path.append(str(Path.cwd()))
        importlib.import_module(module)
    if gym.spec(env_id).entry_point is None:  # it makes many at once, as pool.py's do
        envs = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **args.env_kwargs)
    else:
        env_fns = [partial(make_env, args, videos if index == 0 else None) for index in range(num_envs)]
        envs = Envs(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        sys.exit(f"--env-id takes environments with SAME_STEP autoreset, not {envs.metadata}")
    return envs


class Envs(SyncVectorEnv):
    """Environments stepped in turn, whose infos have `final_obs` alone: merging the rest is slow."""

    def _add_info(self, infos: dict, info: dict, index: int) -> dict:
        if "final_obs" in info:
            infos.setdefault("final_obs", {})[index] = np.array(info["final_obs"])  # a copy: it may be reused
        return infos


def in_bounds(actions: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """Scale actions (n, action_dim) from [-1, 1] to the bounds of a space; scaling may round past them."""
    middle, half = (space.high + space.low) / 2, (space.high - space.low) / 2
    return (middle + actions * half).clip(space.low, space.high)


# ---- Networks ----------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """An action-value function: (batch, obs_dim) and (batch, action_dim) to (batch, 1)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim + action_dim, 256, device=device)
        self.fc2 = nn.Linear(256, 256, device=device)
        self.fc3 = nn.Linear(256, 1, device=device)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([obs, actions], dim=1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).float()


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
        return torch.tanh(self.fc_mu(x).float())


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


def evaluate(args: Args, network: nn.Module, policy: Callable, videos: Path) -> list[float]:
    """Returns of an episode in each of `--eval-episodes` environments, by a policy from obs to actions."""
    network.eval()  # as dropout and batch normalisation ask for
    returns, playing = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes) >> 1
    with closing(make_envs(args, args.eval_episodes, videos if args.capture_video else None)) as envs:
        obs, _ = envs.reset(seed=seeds.tolist())
        while playing.any():
            obs, rewards, terminated, truncated, _ = envs.step(policy(obs))
            returns[playing] += rewards[playing]
            playing &= ~(terminated | truncated)
            if not (np.isfinite(obs[playing]).all() and np.isfinite(returns).all()):
                sys.exit("an evaluation is not finite")
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

    global_step, updates, updates_due, returns = checkpoint["progress"] if args.resume else [0, 0, 0.0, []]
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}".replace("/", "_").replace(":", "_")
    folder = checkpoint["file"].parent if checkpoint else Path(f"runs/{name}")
    envs = make_envs(args, args.num_envs)
    obs_dim, action_space = envs.single_observation_space.shape[0], envs.single_action_space
    if not (isinstance(action_space, gym.spaces.Box) and action_space.is_bounded()):
        sys.exit(f"--env-id takes bounded vectors as actions, not {action_space}")
    (action_dim,) = action_space.shape

    actor = Actor(obs_dim, action_dim, device)
    qf1, qf2 = QNetwork(obs_dim, action_dim, device), QNetwork(obs_dim, action_dim, device)
    actor_target = copy.deepcopy(actor).requires_grad_(False)
    qf1_target, qf2_target = (copy.deepcopy(qf).requires_grad_(False) for qf in (qf1, qf2))
    actor_optimizer = optim.Adam(actor.parameters(), lr=args.learning_rate, fused=True)
    q_optimizer = optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=args.learning_rate, fused=True)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"actor": actor, "qf1": qf1, "qf2": qf2, "actor_optimizer": actor_optimizer}
    state |= {"actor_target": actor_target, "qf1_target": qf1_target, "qf2_target": qf2_target}
    state |= {"q_optimizer": q_optimizer}

    # A row of the replay buffer is a whole transition: one copy stores it, one gather fetches a batch.
    columns = [obs_dim, action_dim, 1, 1, obs_dim]  # obs, action, reward, terminated, next obs
    capacity = args.buffer_size // args.num_envs * args.num_envs
    buffer = torch.zeros(0 if args.evaluate else capacity, sum(columns), device=device)
    size = min(global_step, capacity)  # rows in use
    losses: dict[str, Tensor] = {}  # the latest, for the log
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), the policy's with noise on them: (num_envs, action_dim)."""
        with torch.no_grad():
            mean = actor(obs)
            return (mean + args.exploration_noise * torch.randn_like(mean)).clamp(-1, 1)

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The policy's actions, as environments take them, (n, action_dim), at obs (n, obs_dim)."""
        with torch.no_grad():
            actions = actor(torch.as_tensor(obs, dtype=torch.float32, device=device))
            return in_bounds(actions.cpu().numpy(), action_space)

    def store(*transitions: np.ndarray) -> None:
        """Write a step of all environments, (n,) or (n, width) each, over the oldest rows if it is full."""
        rows = np.column_stack(transitions).astype(np.float32)
        if not np.isfinite(rows).all():
            sys.exit(f"a row is not finite at step {global_step}")
        position = (global_step - args.num_envs) % capacity
        buffer[position : position + args.num_envs].copy_(torch.from_numpy(rows), non_blocking=True)

    def update_critics() -> Tensor:
        """One gradient step of the critics on a new batch; returns its observations (batch_size, obs_dim)."""
        indices = torch.randint(size, (args.batch_size,), device=device)
        obs, actions, rewards, terminated, next_obs = buffer.index_select(0, indices).split(columns, dim=1)
        with torch.no_grad():
            noise = (args.policy_noise * torch.randn_like(actions)).clamp(-args.noise_clip, args.noise_clip)
            next_actions = (actor_target(next_obs) + noise).clamp(-1, 1)  # eq. 14
            next_qf1, next_qf2 = qf1_target(next_obs, next_actions), qf2_target(next_obs, next_actions)
            target = rewards + args.gamma * (1 - terminated) * torch.minimum(next_qf1, next_qf2)  # eq. 10
        qf1_values, qf2_values = qf1(obs, actions), qf2(obs, actions)
        qf1_loss, qf2_loss = F.mse_loss(qf1_values, target), F.mse_loss(qf2_values, target)
        q_optimizer.zero_grad()
        (qf1_loss + qf2_loss).backward()
        q_optimizer.step()
        record(qf1_values=qf1_values.mean(), qf2_values=qf2_values.mean())
        record(qf1_loss=qf1_loss, qf2_loss=qf2_loss, qf_loss=(qf1_loss + qf2_loss) / 2)
        return obs

    def update_actor(obs: Tensor) -> None:
        """One gradient step of the actor on obs (batch_size, obs_dim)."""
        actor_loss = -qf1(obs, actor(obs)).mean()  # algorithm 1
        actor_optimizer.zero_grad()
        groups = actor_optimizer.param_groups
        learning = [param for group in groups for param in group["params"] if param.requires_grad]
        actor_loss.backward(inputs=learning)
        actor_optimizer.step()
        record(actor_loss=actor_loss)

    def update_targets() -> None:
        """Move the targets a fraction `tau` of the way to their networks."""
        with torch.no_grad():
            for target, network in ((actor_target, actor), (qf1_target, qf1), (qf2_target, qf2)):
                for target_param, param in zip(target.parameters(), network.parameters(), strict=True):
                    target_param.lerp_(param, args.tau)

    def update(with_actor: bool) -> None:
        """One gradient step on a new batch."""
        obs = update_critics()
        if with_actor:
            update_actor(obs)
            update_targets()

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        losses.update({name: value.detach() for name, value in values.items()})

    def log_losses() -> None:
        """Write the latest losses; one that is not finite ends the run."""
        for name, loss in zip(losses, torch.stack([*losses.values()]).tolist(), strict=True):  # sync
            writer.add_scalar(f"losses/{name}", loss, global_step)
            if not math.isfinite(loss):
                sys.exit(f"{name} is {loss} at step {global_step}")

    def log_episode(index: int) -> None:
        """Log the episode that has ended in an environment."""
        returns.append(episode_return[index].item())
        writer.add_scalar("charts/episodic_return", returns[-1], global_step)
        writer.add_scalar("charts/episodic_length", episode_length[index], global_step)
        episode_return[index] = episode_length[index] = 0

    def due(every: int | None) -> bool:
        """True once in so many agent steps, and in the last step; never if None."""
        return every is not None and (last or global_step % every < args.num_envs)

    def stop(number: int, _) -> None:
        """Have Ctrl+C and what Slurm sends end the run after its step; the same again ends it at once."""
        stopping.append(number)
        signal.signal(number, signal.SIG_DFL)

    if args.evaluate:
        actor.load_state_dict(checkpoint["actor"])
        eval_returns = evaluate(args, actor, best_actions, folder / f"videos/{time.time():.0f}")
        print(json.dumps(asdict(args) | {"eval_returns": eval_returns}))
        sys.exit()

    # ---- Training ------------------------------------------------------------------------------------------
    if args.resume:
        for name, item in state.items():
            item.load_state_dict(checkpoint[name])
        buffer[:size] = checkpoint.pop("buffer")

    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        run |= {"id": folder.name[-64:], "name": folder.name}
        wandb.init(**run, config=asdict(args), resume="allow", save_code=True, sync_tensorboard=True)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    writer = SummaryWriter(str(folder), purge_step=global_step + 1)
    writer.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=2)}\n```")

    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    seed, *env_seeds = (sequence.generate_state(1 + args.num_envs) >> 1).tolist()
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    obs = envs.reset(seed=env_seeds)[0].astype(np.float32)
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
    first_update, eval_returns, last = updates, [], global_step >= args.total_timesteps
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            if global_step < args.learning_starts:
                actions = rng.uniform(-1, 1, (args.num_envs, action_dim)).astype(np.float32)
            else:
                if updates == first_update:
                    sps_step, sps_time = global_step, time.perf_counter()  # from the first step that learns
                actions = act(torch.from_numpy(obs).to(device, non_blocking=True)).cpu().numpy()  # sync
                updates_due += min(args.num_envs, global_step - args.learning_starts) * args.updates_per_step

            while updates_due > 0:  # a GPU still works on these while the environments step
                update(updates % args.policy_frequency == 0)
                updates, updates_due = updates + 1, updates_due - 1

            next_obs, rewards, terminated, truncated, infos = envs.step(in_bounds(actions, action_space))
            final_obs = next_obs.copy()
            global_step += args.num_envs
            episode_return += rewards
            episode_length += 1
            for index in np.flatnonzero(terminated | truncated):
                final_obs[index] = infos["final_obs"][index]
                log_episode(index)

            store(obs, actions, rewards, terminated, final_obs)
            size = min(global_step, capacity)
            obs = next_obs.astype(np.float32)

            last = bool(stopping) or global_step >= args.total_timesteps
            if due(args.log_every) or due(args.checkpoint_every):
                if updates >= first_update + args.policy_frequency:  # all losses are known
                    log_losses()
                sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
                writer.add_scalar("charts/SPS", sps, global_step)
                bar.set_postfix_str(f"SPS {sps:.0f}, return {np.mean(returns[-10:] or math.nan):.1f}")
                bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                rows = buffer[:size].to("cpu", copy=True)  # a view would be saved with all of its memory
                progress = [global_step, updates, updates_due, returns]
                save_checkpoint(folder / "checkpoint.pt", args, state, progress=progress, buffer=rows)
            if not stopping and (due(args.eval_every) or (last and args.capture_video)):
                pause = time.perf_counter()
                eval_returns = evaluate(args, actor, best_actions, folder / f"videos/{global_step}")
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
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
