# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<2.16", "gymnasium[classic-control]>=1.4,<1.5", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""Deep Q-learning (DQN) for discrete actions: the eager script.

Papers: Mnih et al., "Human-level control through deep reinforcement learning", Nature 518 (2015),
        doi:10.1038/nature14236; with --double, van Hasselt et al., "Deep Reinforcement Learning with Double
        Q-learning", arXiv:1509.06461 (2015).
Run:    python dqn.py --env-id CartPole-v1
Twin:   dqn_torchcompile.py computes the same, compiled and captured. Read their diff.

Deviations from the paper; the first four are CleanRL's:
- two small layers in place of convolutions, and the hyper-parameters of classic control;
- Adam in place of RMSProp;
- rewards are not clipped, and the error is squared as it is (paper: both clipped to [-1, 1]);
- transitions are drawn with replacement;
- evaluation takes the best actions (paper: a random one in twenty);
- the gradient steps come before the environment step: they see the buffer up to the previous transition.
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

    env_id: str = "CartPole-v1"  # the id of the environment: any with Discrete actions
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of the environment
    total_timesteps: PositiveInt = 500_000  # agent steps in all, over all environments
    num_envs: PositiveInt = 1  # the number of parallel environments
    buffer_size: PositiveInt = 10_000  # transitions that the replay buffer holds, over all environments
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 1.0  # how far the target network moves towards the network at each of its updates
    target_network_frequency: PositiveInt = 500  # agent steps between two updates of the target network
    batch_size: PositiveInt = 128  # the number of transitions in a gradient step
    start_e: Fraction = 1.0  # epsilon, the share of random actions, at the beginning
    end_e: Fraction = 0.05  # epsilon at the end of the exploration fraction, and from then on
    exploration_fraction: Fraction = 0.5  # the part of total_timesteps over which epsilon falls, linearly
    learning_starts: NonNegativeInt = 10_000  # agent steps before learning starts
    train_frequency: PositiveInt = 10  # agent steps between gradient steps, however many environments
    learning_rate: NonNegativeFloat = 2.5e-4  # the learning rate
    double: bool = False  # double DQN: the network chooses the next action, and the target network values it

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


# ---- Networks ----------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """Action values: (batch, obs_dim) to (batch, num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, device: torch.device):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 120, device=device)
        self.fc2 = nn.Linear(120, 84, device=device)
        self.fc3 = nn.Linear(84, num_actions, device=device)

    def forward(self, obs: Tensor) -> Tensor:
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        return self.fc3(x).float()


def linear_schedule(start_e: float, end_e: float, duration: float, t: int) -> float:
    """Epsilon at step t: it goes from start_e to end_e within `duration` steps and stays there."""
    return start_e + (end_e - start_e) * (min(t / duration, 1) if duration else 1)


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
    torch.set_num_threads(1)  # faster for networks this small: leave it out for larger ones
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.set_autocast_dtype(device.type, torch.bfloat16)
    torch.set_autocast_enabled(device.type, args.precision == "bfloat16")
    torch.set_autocast_cache_enabled(False)  # it would keep the first weights for good
    torch.manual_seed(args.seed)

    global_step, updates, updates_due, returns = checkpoint["progress"] if args.resume else [0, 0, 0, []]
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}".replace("/", "_").replace(":", "_")
    folder = checkpoint["file"].parent if checkpoint else Path(f"runs/{name}")
    envs = make_envs(args, args.num_envs)
    obs_dim, action_space = envs.single_observation_space.shape[0], envs.single_action_space
    if not isinstance(action_space, gym.spaces.Discrete):
        sys.exit(f"--env-id takes Discrete actions, not {action_space}")
    num_actions, first_action = int(action_space.n), int(action_space.start)

    q_network = QNetwork(obs_dim, num_actions, device)
    target_network = copy.deepcopy(q_network).requires_grad_(False)
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}

    # A row of the replay buffer is a whole transition: one copy stores it, one gather fetches a batch.
    columns = [obs_dim, 1, 1, 1, obs_dim]  # obs, action, reward, terminated, next obs
    capacity = args.buffer_size // args.num_envs * args.num_envs
    buffer = torch.zeros(0 if args.evaluate else capacity, sum(columns), device=device)
    size = min(global_step, capacity)  # rows in use
    losses: dict[str, Tensor] = {}  # the latest, for the log
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    exploration_steps = args.exploration_fraction * args.total_timesteps
    schedule = partial(linear_schedule, args.start_e, args.end_e, exploration_steps)

    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), random with probability epsilon, or the best: (num_envs,)."""
        with torch.no_grad():
            values = q_network(obs)
            best = values.argmax(dim=1)
            explores = torch.rand_like(values[:, 0]) < epsilon
            return torch.where(explores, torch.randint_like(best, num_actions), best)

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The actions of the highest values, as environments take them, (n,), at obs (n, obs_dim)."""
        with torch.no_grad():
            values = q_network(torch.as_tensor(obs, dtype=torch.float32, device=device))
            return values.argmax(dim=1).cpu().numpy() + first_action

    def store(*transitions: np.ndarray) -> None:
        """Write a step of all environments, (n,) or (n, width) each, over the oldest rows if it is full."""
        rows = np.column_stack(transitions).astype(np.float32)
        if not np.isfinite(rows).all():
            sys.exit(f"a row is not finite at step {global_step}")
        position = (global_step - args.num_envs) % capacity
        buffer[position : position + args.num_envs].copy_(torch.from_numpy(rows), non_blocking=True)

    def update_network() -> None:
        """One gradient step on a new batch."""
        indices = torch.randint(size, (args.batch_size,), device=device)
        obs, actions, rewards, terminated, next_obs = buffer.index_select(0, indices).split(columns, dim=1)
        with torch.no_grad():
            next_values = target_network(next_obs)
            chosen_by = q_network(next_obs) if args.double else next_values  # van Hasselt, equation 4
            next_actions = chosen_by.argmax(dim=1, keepdim=True)
            target = rewards + args.gamma * (1 - terminated) * next_values.gather(1, next_actions)
        values = q_network(obs)
        q_values = values.gather(1, actions.long())
        loss = F.mse_loss(q_values, target)  # Mnih et al., algorithm 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(q_values=q_values.mean(), td_loss=loss)

    def update_target() -> None:
        """Move the target network a fraction `tau` of the way to the network."""
        with torch.no_grad():
            for target_param, param in zip(target_network.parameters(), q_network.parameters(), strict=True):
                target_param.lerp_(param, args.tau)

    def update(with_target: bool) -> None:
        """One gradient step, after which the target network moves if asked to."""
        update_network()
        if with_target:
            update_target()

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
        q_network.load_state_dict(checkpoint["q_network"])
        eval_returns = evaluate(args, q_network, best_actions, folder / f"videos/{time.time():.0f}")
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
    obs = envs.reset(seed=env_seeds)[0].astype(np.float32)
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
    first_update, eval_returns, last = updates, [], global_step >= args.total_timesteps
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            epsilon = schedule(global_step)
            actions = act(torch.from_numpy(obs).to(device, non_blocking=True)).cpu().numpy()  # sync
            if global_step >= args.learning_starts:
                if updates == first_update:
                    sps_step, sps_time = global_step, time.perf_counter()  # from the first step that learns
                updates_due += min(args.num_envs, global_step - args.learning_starts)

            while updates_due >= args.train_frequency:  # a GPU works on these while environments step
                updates, updates_due = updates + 1, updates_due - args.train_frequency
                update(updates * args.train_frequency % args.target_network_frequency < args.train_frequency)

            next_obs, rewards, terminated, truncated, infos = envs.step(actions + first_action)
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
                if updates > first_update:
                    log_losses()
                sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
                writer.add_scalar("charts/SPS", sps, global_step)
                writer.add_scalar("charts/epsilon", schedule(global_step), global_step)
                bar.set_postfix_str(f"SPS {sps:.0f}, return {np.mean(returns[-10:] or math.nan):.1f}")
                bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                rows = buffer[:size].to("cpu", copy=True)  # a view would be saved with all of its memory
                progress = [global_step, updates, updates_due, returns]
                save_checkpoint(folder / "checkpoint.pt", args, state, progress=progress, buffer=rows)
            if not stopping and (due(args.eval_every) or (last and args.capture_video)):
                pause = time.perf_counter()
                eval_returns = evaluate(args, q_network, best_actions, folder / f"videos/{global_step}")
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
