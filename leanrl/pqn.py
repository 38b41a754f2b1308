# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<2.16", "gymnasium[classic-control]>=1.4,<1.5", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""Parallelised Q-network (PQN) for discrete actions: the eager script.

Paper:  Gallici et al., "Simplifying Deep Temporal Difference Learning", arXiv:2407.04811 (2024).
Run:    python pqn.py --env-id CartPole-v1
Twin:   pqn_torchcompile.py computes the same, compiled and captured. Read their diff.

Deviations from the paper; the hyper-parameters and the network are CleanRL's:
- epsilon falls with each step of the environments, not with each rollout;
- a truncated episode bootstraps from the value of its final observation.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import argparse
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
FIXED = ("env_id", "num_envs")  # what --resume keeps


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

    env_id: str = "CartPole-v1"  # the id of the environment: any with Discrete actions
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of the environment
    total_timesteps: PositiveInt = 500_000  # agent steps in all; a rollout beyond them is left out
    learning_rate: NonNegativeFloat = 2.5e-4  # the learning rate at the start
    num_envs: PositiveInt = 4  # the number of parallel environments
    num_steps: PositiveInt = 128  # the steps of each environment in a rollout
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: Fraction = 0.99  # the discount factor
    q_lambda: Fraction = 0.65  # lambda of the returns that are learnt from
    start_e: Fraction = 1.0  # epsilon, the share of random actions, at the beginning
    end_e: Fraction = 0.05  # epsilon at the end of the exploration fraction, and from then on
    exploration_fraction: Fraction = 0.5  # the part of total_timesteps over which epsilon falls, linearly
    num_minibatches: PositiveInt = 4  # the number of minibatches that a rollout is divided into
    update_epochs: PositiveInt = 4  # how often a rollout is learnt from
    max_grad_norm: NonNegativeFloat = 10.0  # the norm that gradients are clipped to

    def __post_init__(self):  # tyro tells what it raises, and exits with status 2
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches takes a smaller divisor of a rollout's {batch_size} steps")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps has to hold the {batch_size} steps of a rollout")


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
    """Action values: (..., obs_dim) to (..., num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, device: torch.device):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 120, device=device)),
            nn.LayerNorm(120, device=device),
            nn.ReLU(),
            layer_init(nn.Linear(120, 84, device=device)),
            nn.LayerNorm(84, device=device),
            nn.ReLU(),
            layer_init(nn.Linear(84, num_actions, device=device)),
        )

    def forward(self, obs: Tensor) -> Tensor:
        return self.network(obs).float()


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Initialise a layer in place: orthogonal weights with gain `std`, no bias. Returns the layer."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def linear_schedule(start_e: float, end_e: float, duration: float, t: int) -> float:
    """Epsilon at step t: it goes from start_e to end_e within `duration` steps and stays there."""
    return start_e + (end_e - start_e) * (min(t / duration, 1) if duration else 1)


def split(rows: Tensor, columns: dict[str, int]) -> dict[str, Tensor]:
    """Views of rows (..., all widths), one of each column by its name: (..., its width)."""
    return dict(zip(columns, rows.split([*columns.values()], dim=-1), strict=True))


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

    global_step, updates, returns = checkpoint["progress"] if args.resume else [0, 0, []]
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}".replace("/", "_").replace(":", "_")
    folder = checkpoint["file"].parent if checkpoint else Path(f"runs/{name}")
    envs = make_envs(args, args.num_envs)
    obs_dim, action_space = envs.single_observation_space.shape[0], envs.single_action_space
    if not isinstance(action_space, gym.spaces.Discrete):
        sys.exit(f"--env-id takes Discrete actions, not {action_space}")
    num_actions, first_action = int(action_space.n), int(action_space.start)

    q_network = QNetwork(obs_dim, num_actions, device)
    optimizer = optim.RAdam(q_network.parameters(), lr=args.learning_rate)
    state = {"q_network": q_network, "optimizer": optimizer}  # what checkpoints hold: add yours
    # Columns of a rollout, in which a row is a whole transition, and of the batch made of it.
    inputs = {"obs": obs_dim, "actions": 1}
    columns = inputs | {"rewards": 1, "terminated": 1, "done": 1, "next_obs": obs_dim}
    batch_columns = inputs | {"targets": 1}
    rollout = np.zeros((args.num_steps, args.num_envs, sum(columns.values())), np.float32)
    buffer = torch.zeros(rollout.shape, device=device)
    batch_size = args.num_envs * args.num_steps
    batch = torch.zeros(batch_size, sum(batch_columns.values()), device=device)
    total_steps = args.total_timesteps // batch_size * batch_size  # of whole rollouts
    exploration_steps = args.exploration_fraction * args.total_timesteps
    schedule = partial(linear_schedule, args.start_e, args.end_e, exploration_steps)
    losses: dict[str, Tensor] = {}  # the latest, for the log
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def policy(obs: np.ndarray) -> np.ndarray:
        """The action values, (num_envs, num_actions), at obs (num_envs, obs_dim)."""
        with torch.no_grad():
            obs = torch.from_numpy(obs).to(device, non_blocking=True)
            return q_network(obs).cpu().numpy()  # sync

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The actions of the highest values, as environments take them, (n,), at obs (n, obs_dim)."""
        obs = torch.from_numpy(obs.astype(np.float32)).to(device)
        with torch.no_grad():
            return q_network(obs).argmax(dim=1).cpu().numpy() + first_action

    def lambda_returns(rewards: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor) -> Tensor:
        """Returns Q(lambda), where V is the highest value (Gallici et al., section 4), all (T, n, 1):

        R_t = r_t + gamma ((1 - lambda) V_{t+1} + lambda R_{t+1}), and lambda is 0 in the last step of an
        episode or of the rollout.
        """
        ends = torch.cat([done[:-1], torch.ones_like(done[-1:])])
        lambdas = args.q_lambda * (1 - ends)
        returns = rewards + args.gamma * (1 - terminated) * (1 - lambdas) * next_values
        discounts = args.gamma * lambdas
        for t in reversed(range(args.num_steps - 1)):
            returns[t] += discounts[t] * returns[t + 1]
        return returns

    def prepare() -> None:
        """Make of the rollout the batch to learn from, with the returns as targets."""
        with torch.no_grad():
            rows = split(buffer, columns)
            next_values = q_network(rows["next_obs"]).amax(dim=-1, keepdim=True)
            rows["targets"] = lambda_returns(rows["rewards"], next_values, rows["terminated"], rows["done"])
            batch.copy_(torch.cat([rows[name] for name in batch_columns], dim=2).view(batch_size, -1))

    def update(indices: Tensor) -> None:
        """One gradient step on the rows `indices` of the batch, (minibatch_size,)."""
        rows = split(batch.index_select(0, indices), batch_columns)
        q_values = q_network(rows["obs"]).gather(1, rows["actions"].long())
        loss = (q_values - rows["targets"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
        optimizer.step()
        record(td_loss=loss, q_values=q_values.mean())

    def learn() -> int:
        """All gradient steps on the batch; returns how many."""
        for _ in range(args.update_epochs):
            for indices in torch.randperm(batch_size, device=device).chunk(args.num_minibatches):
                update(indices)
        return args.update_epochs * args.num_minibatches

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        losses.update({name: value.detach() for name, value in values.items()})

    def log_losses() -> None:
        """Write the latest losses; one that is not finite ends the run."""
        for name, loss in zip(losses, torch.stack([*losses.values()]).tolist(), strict=True):  # sync
            writer.add_scalar(f"losses/{name}", loss, global_step)
            if not math.isfinite(loss):
                sys.exit(f"{name} is {loss} at step {global_step}")

    def store(*transitions: np.ndarray) -> None:
        """Write a step of all environments into the rollout, (n,) or (n, width) each."""
        rollout[step] = np.column_stack(transitions)
        if not np.isfinite(rollout[step]).all():
            sys.exit(f"a row is not finite at step {global_step}")

    def log_episode(index: int) -> None:
        """Log the episode that has ended in an environment."""
        returns.append(episode_return[index].item())
        writer.add_scalar("charts/episodic_return", returns[-1], global_step)
        writer.add_scalar("charts/episodic_length", episode_length[index], global_step)
        episode_return[index] = episode_length[index] = 0

    def due(every: int | None) -> bool:
        """True once in so many agent steps, and in the last step; never if None."""
        return every is not None and (last or global_step % every < batch_size)

    def stop(number: int, _) -> None:
        """Have Ctrl+C and what Slurm sends end the run after its rollout; the same again ends it at once."""
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
    *env_seeds, seed = (sequence.generate_state(args.num_envs + 1) >> 1).tolist()
    torch.manual_seed(seed)
    obs = envs.reset(seed=env_seeds)[0].astype(np.float32)
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
    eval_returns, last = [], global_step + batch_size > args.total_timesteps
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            learning_rate = args.learning_rate * (1 - global_step / total_steps if args.anneal_lr else 1)
            optimizer.param_groups[0]["lr"] = learning_rate
            chances = torch.rand(args.num_steps, args.num_envs).numpy()
            random_actions = torch.randint(num_actions, chances.shape).numpy()
            for step in range(args.num_steps):
                explores = chances[step] < schedule(global_step)
                actions = np.where(explores, random_actions[step], policy(obs).argmax(axis=1))
                next_obs, rewards, terminated, truncated, infos = envs.step(actions + first_action)
                done, final_obs = terminated | truncated, next_obs.copy()
                global_step += args.num_envs
                episode_return += rewards
                episode_length += 1
                for index in np.flatnonzero(done):
                    final_obs[index] = infos["final_obs"][index]
                    log_episode(index)
                store(obs, actions, rewards, terminated, done, final_obs)
                obs = next_obs.astype(np.float32)

            buffer.copy_(torch.from_numpy(rollout), non_blocking=True)  # log_losses waits for it
            prepare()
            updates += learn()

            last = bool(stopping) or global_step + batch_size > args.total_timesteps
            log_losses()
            sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
            writer.add_scalar("charts/SPS", sps, global_step)
            writer.add_scalar("charts/learning_rate", learning_rate, global_step)
            writer.add_scalar("charts/epsilon", schedule(global_step), global_step)
            bar.set_postfix_str(f"SPS {sps:.0f}, return {np.mean(returns[-10:] or math.nan):.1f}")
            bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                progress = [global_step, updates, returns]
                save_checkpoint(folder / "checkpoint.pt", args, state, progress=progress)
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
