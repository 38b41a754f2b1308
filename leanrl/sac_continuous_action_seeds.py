# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3", "filelock>=3.15",
# ]
# ///
"""Soft Actor-Critic (SAC) for continuous actions: many agents, one a seed, in one graph.

Paper: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905 (2018).
Run:   python sac_continuous_action_seeds.py --seeds 1 2 3 4 --env-id HalfCheetah-v4 --compile --cudagraphs
Twin:  sac_continuous_action_torchcompile.py, one agent: each here begins as it does, and draws other numbers.
Tags:  every place that differs from it opens with `# [seeds k]`; docs/tricks.md has a chapter on each k.
Shapes: those of one agent where a docstring names no agents. An axis of agents is in front, in act flattened.

Deviations from the paper; the first three are CleanRL's:
- the critics and the entropy coefficient learn at 1e-3, the actor at 3e-4 (paper: all at 3e-4);
- every `policy_frequency`-th gradient step updates the actor, `policy_frequency` times on that step's batch;
- log(std) is squashed into [-5, 2] by a tanh (paper: clipped to [-20, 2]);
- the entropy coefficient learns from the log-probabilities of the actor's loss (CleanRL: of new actions);
- the gradient steps come before the environment step: they see the buffer up to the previous transition;
- actions, and their entropy, are in [-1, 1] throughout: a wrapper scales them to the environment's bounds.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import atexit
import copy
import json
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
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
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
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
    seed: Index = 1  # seed of the first agent
    num_seeds: Count = 4  # the number of agents, whose seeds count up from --seed
    seeds: tuple[Index, ...] | None = None  # the seeds of the agents, in place of those
    cuda: bool = True  # use a CUDA device if there is one
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # high: TF32 on CUDA; medium: bfloat16
    track: bool = False  # also send the logs to Weights & Biases
    wandb_project_name: str = "leanrl"  # the project of the Weights & Biases run
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases run
    capture_video: bool = False  # record videos of the first environment under runs/<run>/videos
    save_model: bool = False  # write a checkpoint at the end
    checkpoint_every: Count | None = None  # agent steps between two checkpoints; the newest two are kept
    resume: tuple[str, ...] | None = None  # go on with the runs of these checkpoints or folders, one a seed
    evaluate: tuple[str, ...] | None = None  # do not train, evaluate these checkpoints or folders, one a seed
    eval_episodes: Count | None = None  # episodes of an evaluation, else 10; if given, one is made at the end
    eval_every: Count | None = None  # agent steps between two evaluations; the best agent is kept as best.pt
    log_every: Count = 100  # agent steps between two log entries
    compile: bool = False  # compile the policy and the gradient step with torch.compile
    cudagraphs: bool = False  # capture the policy and the gradient step as CUDA graphs

    env_id: str = "HalfCheetah-v4"  # the id of the environment: any with bounded vectors as actions
    total_timesteps: Count = 1_000_000  # agent steps of each agent, over its environments
    num_envs: Count = 1  # the number of parallel environments of each agent
    env_workers: bool = False  # step each environment in a process of its own
    buffer_size: Count = 1_000_000  # transitions that the replay buffer of each agent holds
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 0.005  # how far target networks move towards their networks at each of their updates
    batch_size: Count = 256  # the number of transitions in a gradient step
    learning_starts: Index = 5_000  # agent steps with random actions before the first gradient step
    updates_per_step: NonNegative = 1.0  # gradient steps per agent step, whatever the number of environments
    policy_lr: NonNegative = 3e-4  # the learning rate of the actor
    q_lr: NonNegative = 1e-3  # the learning rate of the critics and of the entropy coefficient
    policy_frequency: Count = 2  # the actor is updated after so many gradient steps, then as many times
    target_network_frequency: Count = 1  # gradient steps between two updates of the target networks
    alpha: NonNegative = 0.2  # the entropy coefficient under --no-autotune
    autotune: bool = True  # learn the entropy coefficient


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
    # [seeds 1]
    seeds = args.seeds or range(args.seed, args.seed + args.num_seeds)
    if len(set(seeds)) < len(seeds) or len(args.resume or args.evaluate or seeds) != len(seeds):
        refuse("--seeds takes different ones, and --resume and --evaluate a path for each of them")
    if args.track or (args.env_workers and args.capture_video):
        refuse("--track takes one agent a process, and --env-workers and --capture-video exclude each other")
    return replace(args, seed=seeds[0], num_seeds=len(seeds), seeds=tuple(seeds))


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
        return torch.matmul(x, self.weight) + self.bias  # [seeds 2]


class Linear(nn.Linear):  # [seeds 2]
    """`nn.Linear` of each agent, as one batched product: (agents, batch, in) to (agents, batch, out)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight.mT) + self.bias.unsqueeze(-2)


class Critic(nn.Module):
    """Two action-value functions at once: (batch, obs_dim) and (batch, action_dim) to (2, batch)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = EnsembleLinear(2, obs_dim + action_dim, 256, device)
        self.fc2 = EnsembleLinear(2, 256, 256, device)
        self.fc3 = EnsembleLinear(2, 256, 1, device)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([obs, actions], dim=-1).unsqueeze(-3)  # [seeds 2]
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


class Actor(nn.Module):
    """A Gaussian before squashing: (batch, obs_dim) to its mean and log(std), (batch, action_dim) each."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = Linear(obs_dim, 256, device=device)  # [seeds 2]
        self.fc2 = Linear(256, 256, device=device)
        self.fc_out = Linear(256, 2 * action_dim, device=device)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        mean, log_std = self.fc_out(x).chunk(2, dim=-1)
        return mean, -5 + 3.5 * (torch.tanh(log_std) + 1)  # from -5 to 2


def sample_actions(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions tanh(u) of a squashed Gaussian, (batch, action_dim), with log-probabilities (batch,).

    log(1 - tanh(u)^2) is written 2 (log 2 - u - softplus(-2u)), which is finite for every u (appendix C).
    """
    noise = normal(*mean.shape[1:])  # [seeds 3]
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - 2 * (math.log(2) - u - F.softplus(-2 * u))
    return torch.tanh(u), log_prob.sum(dim=-1)


# [seeds 3] Numbers from a counter, so that an agent's do not depend on the other agents.
def uniform(*shape: int) -> Tensor:
    """Draw from the uniform distribution on (0, 1), (agents, *shape), float64, by SplitMix64 (Steele, 2014).

    Each agent is at a place of its own in one long sequence, far from others: in `streams`, (agents,).
    """
    count, golden = math.prod(shape), 0x9E3779B97F4A7C15 - 2**64
    bits = (streams[:, None] + torch.arange(1, count + 1, device=streams.device)) * golden
    streams.add_(count)
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    bits = (bits ^ (bits >> 31 & 2**33 - 1)) >> 12 & 2**52 - 1
    return ((bits.double() + 0.5) * 2.0**-52).view(-1, *shape)


def normal(*shape: int) -> Tensor:
    """Draw from the standard normal distribution, (agents, *shape), float32, as `uniform`."""
    return (math.sqrt(2) * torch.erfinv(2 * uniform(*shape) - 1)).float()


# [fast 2] A network is one tensor, and Adam a few operations on it, which one graph can hold.
class Flat(nn.Module):
    """A network that computes with one flat tensor, `params`, of which its own parameters become views."""

    def __init__(self, network: nn.Module):
        super().__init__()
        # Sizes that 16 divides come first and keep the next aligned. A list hides the network from nn.Module.
        named = sorted(network.named_parameters(), key=lambda item: item[1].numel() % 16 != 0)
        self.network, self.shapes = [network], {name: param.shape for name, param in named}
        flat = parameters_to_vector(param for _, param in named).detach()
        self.params = nn.Parameter(flat, requires_grad=all(param.requires_grad for _, param in named))
        vector_to_parameters(flat, [param.requires_grad_(False) for _, param in named])

    def forward(self, *inputs: Tensor, **options) -> Tensor | tuple[Tensor, ...]:
        parts = self.params.split([shape.numel() for shape in self.shapes.values()])
        views = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}
        return functional_call(self.network[0], views, inputs, options)


class Adam(nn.Module):
    """`torch.optim.Adam` of one tensor (arXiv:1412.6980, algorithm 1), whose gradient has a bounded norm."""

    def __init__(self, params: Tensor, lr: float | Tensor, eps: float = 1e-8, max_norm: float = math.inf):
        super().__init__()
        self.params, self.lr, self.eps, self.max_norm = [params], lr, eps, max_norm
        self.register_buffer("exp_avg", torch.zeros_like(params))
        self.register_buffer("exp_avg_sq", torch.zeros_like(params))
        self.register_buffer("step", torch.zeros((), device=params.device))

    def minimize(self, loss: Tensor) -> None:
        """Take a step down the gradient of a loss; `backward()` and `step()` would break the graph."""
        (grad,) = torch.autograd.grad(loss.sum(), self.params[0])
        with torch.no_grad():
            if self.max_norm < math.inf:
                grad = grad * (self.max_norm / (grad.square().sum().sqrt() + 1e-6)).clamp(max=1)
            step, beta1, beta2 = self.step.add_(1), 0.9, 0.999
            exp_avg = self.exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq = self.exp_avg_sq.lerp_(grad * grad, 1 - beta2)
            denominator = exp_avg_sq.sqrt() / (1 - beta2**step).sqrt() + self.eps
            self.params[0].sub_(exp_avg / denominator * (self.lr / (1 - beta1**step)))


class OfAgent:  # [seeds 4]
    """What one agent has of tensors of all, (agents, ...), to be saved and loaded like a module."""

    def __init__(self, tensors: dict[str, Tensor], agent: int):
        self.tensors = {name: tensor[agent] if tensor.ndim else tensor for name, tensor in tensors.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}  # a view would be saved whole

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])


if __name__ == "__main__":
    # ---- Setup ---------------------------------------------------------------------------------------------
    args = parse_args()
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.cuda and device.type == "cpu":
        print("CUDA is not available: running on the CPU", file=sys.stderr)
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal, at which a CPU is slow
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.manual_seed(args.seed)

    # [seeds 4] Agents begin, step and learn together; each has the folder of a run of its own.
    num_agents, option = len(args.seeds), "resume" if args.resume else "evaluate"
    paths = args.resume or args.evaluate or [None] * num_agents
    pairs = zip(args.seeds, paths, strict=True)
    agent_args = [replace(args, seed=seed, num_seeds=1, seeds=None, **{option: path}) for seed, path in pairs]
    checkpoints = [load_checkpoint(one) if args.resume or args.evaluate else {} for one in agent_args]
    progress = [checkpoint["progress"] if args.resume else [0, 0, 0.0, []] for checkpoint in checkpoints]
    (global_step, updates, updates_due, _), returns = progress[0], [totals for *_, totals in progress]
    if len({step for step, *_ in progress}) > 1:
        refuse(f"--resume takes files of one step: the newest are of {[step for step, *_ in progress]}")
    folders, locks = zip(*map(open_folder, agent_args, checkpoints), strict=True)
    folder = folders[0]

    # The step that ends an episode also resets its environment; infos["final_obs"] has what it ended with.
    videos = folder / f"videos/from_step_{global_step}" if args.capture_video and not args.evaluate else None
    env_fns = [partial(make_env, args, videos if i == 0 else None) for i in range(num_agents * args.num_envs)]
    # [seeds 4] The environments of all agents are one after the other. Workers leave signals to this process.
    if args.env_workers:
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        kill = atexit.register(
            lambda **_: [worker.kill() for worker in torch.multiprocessing.active_children()]
        )
        envs = gym.vector.AsyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
        envs.close = kill  # without the answer to a step that a signal broke off
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    else:
        envs = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    networks = []
    for seed in args.seeds:  # [seeds 1] An agent begins as a run of its own would.
        torch.manual_seed(seed)
        networks.append((Actor(obs_dim, action_dim, device), Critic(obs_dim, action_dim, device)))
    actor, critic = networks[0]  # [seeds 2] whose parameters become those of all agents, (agents, ...)
    for copies in zip(*networks, strict=True):
        for params in zip(*(network.parameters() for network in copies), strict=True):
            params[0].data = torch.stack([param.data for param in params])
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    alphas = torch.full((num_agents, 1), 1.0 if args.autotune else args.alpha, device=device)  # [seeds 2]
    log_alpha = nn.Parameter(alphas.log())
    # [fast 2] Measured: 1.05 times the steps/s of a tensor for each parameter.
    flat_actor, flat_critic, flat_target = Flat(actor), Flat(critic), Flat(critic_target)
    actor_optimizer = Adam(flat_actor.params, lr=args.policy_lr)
    critic_optimizer = Adam(flat_critic.params, lr=args.q_lr)
    alpha_optimizer = Adam(log_alpha, lr=args.q_lr)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"actor": actor, "critic": critic, "critic_target": critic_target}
    state |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    state |= {"log_alpha": nn.ParameterList([log_alpha]), "alpha_optimizer": alpha_optimizer}

    # A row of the replay buffer is a whole transition: one copy stores it, one gather fetches a batch.
    columns = [obs_dim, action_dim, 1, 1, obs_dim]  # obs, action, reward, terminated, next obs
    capacity = 0 if args.evaluate else args.buffer_size // args.num_envs * args.num_envs
    buffer = torch.zeros(num_agents, capacity, sum(columns), device=device)  # [seeds 2]
    first_rows = torch.arange(num_agents, device=device)[:, None] * capacity
    streams = torch.zeros(num_agents, dtype=torch.int64, device=device)  # [seeds 3]
    size = torch.tensor(1, device=device)  # rows in use, 1 for the warm-up; a graph would freeze a number
    # [fast 3] The latest losses have a place: what a captured function returns is cloned at each call.
    names = ["qf_loss", "qf1_loss", "qf2_loss", "actor_loss", "alpha"]
    names += ["alpha_loss"] if args.autotune else []
    losses = {name: torch.zeros(num_agents, device=device) for name in names}  # [seeds 2]
    values = torch.zeros(2, num_agents, args.batch_size, device=device)
    losses |= {"qf1_values": values[0], "qf2_values": values[1]}

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), drawn from the policy: (num_envs, action_dim)."""
        with torch.no_grad():
            mean, log_std = actor(obs.view(num_agents, args.num_envs, obs_dim))  # [seeds 2, 3]
            actions = torch.tanh(mean + log_std.exp() * normal(args.num_envs, action_dim))
            return actions.flatten(0, 1).nan_to_num()  # [seeds 5]

    def best_action(obs: np.ndarray, agent: int) -> np.ndarray:  # [seeds 2]
        """The policy's mean action, (action_dim,), at one observation, (obs_dim,)."""
        with torch.no_grad():
            mean, _ = actor(torch.as_tensor(obs, dtype=torch.float32, device=device)[None])
            return torch.tanh(mean[agent, 0]).cpu().numpy()  # [seeds 2]

    def update_critic(update_target: bool) -> Tensor:
        """One gradient step of the critics on a new batch; returns its observations (batch_size, obs_dim)."""
        indices = (uniform(args.batch_size) * size).long() + first_rows  # [seeds 2, 3]
        rows = buffer.flatten(0, 1).index_select(0, indices.flatten()).view(*indices.shape, -1)
        obs, actions, rewards, terminated, next_obs = rows.split(columns, dim=-1)
        with torch.no_grad():
            next_actions, next_log_prob = sample_actions(*flat_actor(next_obs))  # [fast 2]
            next_values = flat_target(next_obs, next_actions).amin(dim=-2) - log_alpha.exp() * next_log_prob
            target = rewards[..., 0] + args.gamma * (1 - terminated[..., 0]) * next_values  # equations 2, 3
        qf_values = flat_critic(obs, actions)  # [fast 2]
        qf_losses = (qf_values - target.unsqueeze(-2)).square().mean(dim=-1)
        critic_optimizer.minimize(qf_losses)  # [fast 2]
        record(qf1_values=qf_values[..., 0, :], qf2_values=qf_values[..., 1, :])
        record(qf1_loss=qf_losses[..., 0], qf2_loss=qf_losses[..., 1], qf_loss=qf_losses.mean(dim=-1))
        if update_target:
            flat_target.params.lerp_(flat_critic.params.detach(), args.tau)  # [fast 2]
        return obs

    def update_actor(obs: Tensor) -> None:
        """One gradient step of the actor and the entropy coefficient, on obs (batch_size, obs_dim)."""
        actions, log_prob = sample_actions(*flat_actor(obs))  # [fast 2]
        alpha = log_alpha.detach().exp()
        actor_loss = (alpha * log_prob - flat_critic(obs, actions).amin(dim=-2)).mean(-1)  # [fast 2] eq. 7
        actor_optimizer.minimize(actor_loss)
        record(alpha=alpha, actor_loss=actor_loss)
        if args.autotune:
            # [seeds 2] equation 18, appendix D
            alpha_loss = -log_alpha.exp() * (log_prob.detach() - action_dim).mean(-1, True)
            alpha_optimizer.minimize(alpha_loss)  # [fast 2]
            record(alpha_loss=alpha_loss)

    def update(with_actor: bool, with_target: bool) -> None:
        """One gradient step on a new batch."""
        obs = update_critic(with_target)
        for _ in range(args.policy_frequency if with_actor else 0):
            update_actor(obs)

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        for name, value in values.items():
            losses[name].copy_(value.detach().view_as(losses[name]))  # [fast 3]

    # ---- Training ------------------------------------------------------------------------------------------
    # [seeds 4] Once moments are split by parameters, tensors are (agents, ...) but Adam's counts of steps.
    tensors = {name: item.state_dict() for name, item in state.items()}
    for name, flat in {"actor_optimizer": flat_actor, "critic_optimizer": flat_critic}.items():
        sizes = [shape.numel() for shape in flat.shapes.values()]
        for kind in ("exp_avg", "exp_avg_sq"):
            parts = zip(flat.shapes.items(), tensors[name].pop(kind).split(sizes), strict=True)
            tensors[name] |= {f"{kind}.{param}": part.view(shape) for (param, shape), part in parts}
    states = [{name: OfAgent(item, agent) for name, item in tensors.items()} for agent in range(num_agents)]
    for agent, checkpoint in enumerate(checkpoints if args.resume or args.evaluate else []):  # [seeds 4]
        load_states({"actor": states[agent]["actor"]} if args.evaluate else states[agent], checkpoint)
        if args.resume:
            size.fill_(min(global_step, capacity))
            buffer[agent, :size] = checkpoint.pop("buffer")[:size]
    if not args.autotune:
        log_alpha.data.copy_(torch.tensor(args.alpha).log())

    # [fast 1] The policy and the two halves of a gradient step are a graph each. Measured: 1.35 times eager.
    if args.compile:
        variable, usual = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")
        compiler, header = os.getenv(variable) or usual, Path(sysconfig.get_path("include"), "Python.h")
        if os.name == "posix" and not (shutil.which(compiler.split()[0]) and header.exists()):
            refuse(f"--compile needs {header} and {compiler}, or the compiler that {variable} names")
        torch._dynamo.config.trace_autograd_ops = True  # [fast 2] the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes 5 s
        torch._inductor.config.split_reductions = False  # small sums: 14 of 67 launches less on a GPU
        functions = (act, update_critic, update_actor)
        act, update_critic, update_actor = (torch.compile(function, fullgraph=True) for function in functions)
    # [fast 4] A captured graph is launched at once; there is one for each kind of gradient step.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    steps = (0, 1, args.policy_frequency, args.target_network_frequency)  # among which are all kinds
    kinds = sorted({(i % args.policy_frequency == 0, i % args.target_network_frequency == 0) for i in steps})
    if cudagraphs:
        act = CudaGraphModule(act, warmup=5, device=device)
        graphs = {kind: CudaGraphModule(partial(update, *kind), warmup=5, device=device) for kind in kinds}

        def update(*kind: bool) -> None:
            graphs[kind]()

    elif args.cudagraphs:
        print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)
    # [fast 5] Compile, warm up and capture before the first step, on the real state, which is then put back.
    if (args.compile or cudagraphs) and not args.evaluate:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        for kind in (6 if cudagraphs else 1) * kinds:  # captured, four warm up, one records and one replays
            act(torch.zeros(num_agents * args.num_envs, obs_dim, device=device))  # [seeds 2]
            update(*kind)
        load_states(state, saved)

    sequences = [np.random.SeedSequence([seed, global_step]) for seed in args.seeds]  # [seeds 1]
    drawn = np.transpose([sequence.generate_state(1 + args.num_envs) for sequence in sequences]).tolist()
    seeds, env_seeds = drawn[0], np.transpose(drawn[1:]).flatten().tolist()
    streams.copy_(torch.tensor(seeds) << 31)  # [seeds 3] so far apart
    spaces = [gym.vector.utils.batch_space(envs.single_action_space, args.num_envs) for _ in seeds]
    action_space = gym.spaces.Tuple(spaces, seed=seeds)
    obs = envs.reset(seed=env_seeds)[0].astype(np.float32)

    last = bool(args.evaluate) or global_step >= args.total_timesteps
    writers = list(map(open_logs, agent_args, folders, [global_step] * num_agents))  # [seeds 4]
    bar = tqdm(total=args.total_timesteps, initial=global_step, unit="step", miniters=1, disable=last)
    stopping = stop_on_signals()
    # [fast 8] A GPU copies actions to the host while gradient steps are launched.
    actions_arrived = torch.get_device_module(device).Event()
    first_update, saved_step = updates, global_step
    evaluated = checkpoints[0].get("evaluated", global_step)  # [seeds 4]
    startup_seconds = time.perf_counter() - START_TIME
    sps, best, sps_start = None, [None] * num_agents, (global_step, time.perf_counter())
    alive, lost = list(range(num_agents)), {}  # [seeds 5] agents with numbers that are not finite
    with closing(envs), bar, ExitStack() as logs:  # [seeds 4]
        for writer in writers:
            logs.enter_context(writer)
        while not last:
            if global_step < args.learning_starts:
                actions = np.concatenate(action_space.sample())  # [seeds 1]
            else:
                if updates == first_update:
                    sps_start = global_step, time.perf_counter()  # counted from the first step that learns
                actions = act(torch.from_numpy(obs).to(device, non_blocking=True))
                actions = actions.to("cpu", non_blocking=True).numpy()  # [fast 8] not there yet
                actions_arrived.record()
                updates_due += min(args.num_envs, global_step - args.learning_starts) * args.updates_per_step

            while updates_due > 0:  # a GPU still works on these while the environments step
                update(updates % args.policy_frequency == 0, updates % args.target_network_frequency == 0)
                updates, updates_due = updates + 1, updates_due - 1
            actions_arrived.synchronize()  # [fast 8] sync

            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            position, global_step = global_step % capacity, global_step + args.num_envs
            final_obs = next_obs.copy()
            for index in np.flatnonzero(terminated | truncated):
                final_obs[index] = infos["final_obs"][index]
                episode = infos["final_info"]["episode"]
                agent = index // args.num_envs  # [seeds 4]
                if agent not in lost:  # [seeds 5]
                    returns[agent].append(float(episode["r"][index]))
                    writers[agent].add_scalar("charts/episodic_return", episode["r"][index], global_step)
                    writers[agent].add_scalar("charts/episodic_length", episode["l"][index], global_step)

            transitions = [obs, actions, rewards[:, None], terminated[:, None], final_obs]
            rows = np.concatenate(transitions, axis=1, dtype=np.float32)
            for index in np.flatnonzero(~np.isfinite(rows).all(axis=1)):  # [seeds 5]
                lost.setdefault(int(index) // args.num_envs, f"a row is not finite at step {global_step}")
            rows = torch.from_numpy(rows).view(num_agents, args.num_envs, -1)  # [seeds 2]
            buffer[:, position : position + args.num_envs].copy_(rows, non_blocking=True)
            size.fill_(min(global_step, capacity))
            obs = next_obs.astype(np.float32)

            last = bool(stopping) or global_step >= args.total_timesteps
            if last or global_step % args.log_every < args.num_envs:
                known = {name: loss.cpu() for name, loss in losses.items()}  # [seeds 4] sync
                sps = len(alive) * (global_step - sps_start[0]) / (time.perf_counter() - sps_start[1])
                for agent in alive:
                    writers[agent].add_scalar("charts/SPS", sps / len(alive), global_step)
                    try:
                        if updates >= first_update + args.policy_frequency:  # all losses are known
                            agent_losses = {name: loss[agent] for name, loss in known.items()}
                            log_losses(writers[agent], global_step, agent_losses)
                    except SystemExit as error:  # [seeds 5]
                        lost.setdefault(agent, str(error))
                    if agent in lost:
                        bar.write(f"seed {args.seeds[agent]} is lost: {lost[agent]}", file=sys.stderr)
                alive = [agent for agent in alive if agent not in lost]
                if not alive:
                    sys.exit(f"{Path(__file__).name}: error: all agents are lost")
                recent = [total for agent in alive for total in returns[agent][-10:]]
                bar.postfix = f"SPS {sps:.0f}, return {np.mean(recent) if recent else math.nan:.1f}"
                bar.update(global_step - bar.n)
                progress = [[global_step, updates, updates_due, totals] for totals in returns]  # [seeds 4]
                due = global_step - saved_step >= (args.checkpoint_every or math.inf)
                if due or (last and (args.save_model or args.checkpoint_every)):
                    for agent in alive:  # [seeds 4]
                        of_agent = agent_args[agent], writers[agent], states[agent], progress[agent]
                        replay = {"buffer": buffer[agent, :global_step].clone()}
                        save_checkpoint(*of_agent, evaluated=evaluated, **replay)
                    saved_step = global_step
                if args.eval_every and global_step // args.eval_every > evaluated // args.eval_every:
                    pause = time.perf_counter()
                    for agent in alive:  # [seeds 4]
                        policy = partial(best_action, agent=agent)
                        scores = evaluate(agent_args[agent], make_env(args), policy, stopping)
                        if not stopping:
                            of_agent = writers[agent], states[agent], progress[agent]
                            best[agent] = keep_best(agent_args[agent], scores, *of_agent)
                    sps_start = sps_start[0], sps_start[1] + time.perf_counter() - pause
                    evaluated = evaluated if stopping else global_step  # [seeds 4]

    # ---- End -----------------------------------------------------------------------------------------------
    eval_returns = []
    if args.evaluate or (args.eval_episodes and not stopping):
        for agent in range(num_agents):  # [seeds 4]
            env = make_env(args, folders[agent] / "evaluation" / "videos" if args.capture_video else None)
            policy = partial(best_action, agent=agent)
            eval_returns.append(evaluate(agent_args[agent], env, policy, stopping) if agent in alive else [])
    summary = {"script": Path(__file__).stem, **asdict(args), "total_timesteps": global_step, "sps": sps}
    summary |= {"device": device.type, "compile": args.compile, "cudagraphs": cudagraphs}  # [fast 1, 4]
    episodes = [len(totals) for totals in returns]  # [seeds 4]
    summary |= {"updates": updates, "episodes": episodes, "eval_returns": eval_returns}
    summary["best_eval_return"] = best
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        means = [float(np.mean(totals[-count:])) if totals else None for totals in returns]  # [seeds 5]
        summary[name] = [None if agent in lost else mean for agent, mean in enumerate(means)]
    summary["lost_seeds"] = {args.seeds[agent]: reason for agent, reason in lost.items()}
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
