# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
#     "envpool>=1.2.5,<2",
# ]
# ///
"""FastTD3: TD3 with a distributional critic and many parallel environments, for continuous actions.

Paper: Seo et al., "FastTD3: Simple, Fast, and Capable Reinforcement Learning for Humanoid Control",
       arXiv:2505.22642. The critic is that of Bellemare et al., arXiv:1707.06887.
Run:   python fast_td3_torchcompile.py --env-id pool:EnvPool/CheetahRun-v1 --compile --cudagraphs
       EnvPool's tasks come by pool.py, which has to be beside the script or in the current folder.
Twin:  fast_td3.py, eager, computes the same, up to rounding and random numbers. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] the policy and each half of a gradient step: each is compiled without a break;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and AdamW a few operations on it in that graph;
- [fast: both critics at once] one batched product in place of two;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches a whole gradient step at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: overlapped copy] a GPU copies actions to the host while gradient steps are launched.

Deviations from the paper's code, the first for two cores of a CPU; docs/fast_td3.md has its sizes:
- 64 environments (1024), batches of 512 (32,768), networks from 256 units (critics from 1024, the actor 512);
- float32 (bfloat16); gamma 0.99, values in [-100, 100] (by task); 79 steps before the first update (12);
- batches are drawn from all rows alike, the newest, too; actions with noise are stored within [-1, 1];
- observations are standardised by what the environments gave, not also by each batch that was drawn;
- the gradient steps come before the environment step; the actor learns in the first, third, ... (even ones).
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
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- Arguments ---------------------------------------------------------------------------------------------
Fraction = Annotated[float, Field(ge=0, le=1)]
JSON = tyro.conf.arg(constructor=json.loads, metavar="JSON")
FIXED = ("env_id", "num_envs", "buffer_size", "critic_learning_rate", "actor_learning_rate")
FIXED += ("weight_decay", "v_min", "v_max")  # what --resume keeps


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
    log_every: PositiveInt = 1_000  # agent steps between two log entries
    compile: bool = False  # compile the policy and the gradient step with torch.compile
    cudagraphs: bool = False  # capture the policy and the gradient step as CUDA graphs

    env_id: str = "pool:EnvPool/CheetahRun-v1"  # the environment: any with bounded vectors as actions
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of the environment
    total_timesteps: PositiveInt = 5_000_000  # agent steps in all, over all environments
    privileged_dim: NonNegativeInt = 0  # the first so many numbers of obs are for the critics alone
    num_envs: PositiveInt = 64  # the number of parallel environments
    buffer_size: PositiveInt = 1_000_000  # transitions that the replay buffer holds, over all environments
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 0.1  # how far target networks move towards their networks at each gradient step
    batch_size: PositiveInt = 512  # the number of transitions in a gradient step
    learning_starts: NonNegativeInt = 5_000  # agent steps before the first gradient step
    num_updates: PositiveInt = 2  # gradient steps for each step of all environments
    num_steps: PositiveInt = 3  # the n of n-step returns
    critic_learning_rate: NonNegativeFloat = 3e-4  # the learning rate of the critics
    actor_learning_rate: NonNegativeFloat = 3e-4  # the learning rate of the actor
    weight_decay: NonNegativeFloat = 0.1  # the decay of weights in AdamW
    policy_frequency: PositiveInt = 2  # gradient steps between two updates of the actor
    policy_noise: NonNegativeFloat = 0.1  # the standard deviation of the noise on target actions in [-1, 1]
    noise_clip: NonNegativeFloat = 0.5  # the bound on the noise on target actions
    std_min: NonNegativeFloat = 0.1  # the least standard deviation of the exploration noise in an episode
    std_max: NonNegativeFloat = 0.4  # the largest
    critic_hidden_dim: Annotated[int, Field(ge=4)] = 256  # units of a critic's first layer, then 1/2 and 1/4
    actor_hidden_dim: Annotated[int, Field(ge=4)] = 256  # units of the actor's first layer, then 1/2 and 1/4
    num_atoms: Annotated[int, Field(ge=2)] = 101  # the values that a critic gives probabilities
    v_min: float = -100.0  # the lowest of them: no return should be lower
    v_max: float = 100.0  # the highest of them: no return should be higher

    def __post_init__(self):  # tyro tells what it raises, and exits with status 2
        if self.buffer_size // self.num_envs * self.num_envs < self.batch_size:
            raise ValueError("--buffer-size has to hold a batch, of whole steps of all environments")
        if self.v_min >= self.v_max:
            raise ValueError("--v-min has to be below --v-max")


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
    """Distributions of returns: (batch, obs_dim) and (batch, action_dim) to logits (batch, num_atoms)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device, hidden_dim=256, num_atoms=101):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim + action_dim, hidden_dim, device=device)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim // 2, device=device)
        self.fc3 = nn.Linear(hidden_dim // 2, hidden_dim // 4, device=device)
        self.fc4 = nn.Linear(hidden_dim // 4, num_atoms, device=device)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([obs, actions], dim=1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return self.fc4(x).float()


class Actor(nn.Module):
    """A deterministic policy: (batch, obs_dim) to actions in [-1, 1], (batch, action_dim)."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device, hidden_dim=256):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, hidden_dim, device=device)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim // 2, device=device)
        self.fc3 = nn.Linear(hidden_dim // 2, hidden_dim // 4, device=device)
        self.fc_mu = nn.Linear(hidden_dim // 4, action_dim, device=device)
        nn.init.normal_(self.fc_mu.weight, std=0.01)  # first actions are little more than noise
        nn.init.zeros_(self.fc_mu.bias)

    def forward(self, obs: Tensor) -> Tensor:
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return torch.tanh(self.fc_mu(x).float())


class EmpiricalNormalization(nn.Module):
    """The mean and variance of all rows so far, (batch, dim), by which it standardises rows.

    0.01 is added to deviations: an input that has hardly moved yet may move later.
    """

    def __init__(self, dim: int, device: torch.device):
        super().__init__()
        # In float32 a mean that is many deviations from 0 would stand still after some million rows.
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64, device=device))
        self.register_buffer("var", torch.ones(dim, dtype=torch.float64, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))

    def update(self, rows: Tensor) -> None:
        """Take in rows, by the parallel algorithm of Chan et al. (1979)."""
        rows, total = rows.double(), self.count + len(rows)
        share, delta = len(rows) / total, rows.mean(0) - self.mean
        self.var.lerp_(rows.var(0, unbiased=False), share).add_(share * (1 - share) * delta**2)
        self.mean.add_(share * delta)
        self.count.copy_(total)

    def forward(self, rows: Tensor) -> Tensor:
        return (rows - self.mean.float()) / (self.var.sqrt() + 0.01).float()


def n_step_returns(outcomes: Tensor, newer: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """n-step returns (Sutton, 1988) from windows of n rows in turn, of one environment each.

    Takes rewards, terminated and over in `outcomes`, (batch, n, 3), and how many rows there are after the
    first of each window, `newer` (batch,): a window ends there, or with the row that ends its episode. Gives,
    all (batch, 1): the discounted sum of rewards; the discount of the value that follows, 0 after a
    termination; the index of a window's last row.
    """
    rewards, terminated, over = outcomes.unbind(2)
    steps = torch.arange(outcomes.shape[1], device=outcomes.device)
    inside = (over.long().cumsum(1) - over < 1) & (steps <= newer[:, None])
    last = inside.sum(1, keepdim=True) - 1
    returns = (gamma**steps * inside * rewards).sum(1, keepdim=True)
    return returns, gamma ** (last + 1) * (1 - terminated.gather(1, last)), last


def project(probs: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Probabilities of `atoms`, both (batch, num_atoms), shared out between their neighbours in `support`.

    Algorithm 1 of arXiv:1707.06887. The support is evenly spaced, and no atom is outside of it.
    """
    most = len(support) - 1
    index = ((atoms - support[0]) * (most / (support[-1] - support[0]))).clamp(0, most)
    lower = index.int().clamp(0, most - 1)  # whatever NaN is as an int32, here it is an index
    upper_share = index - lower  # which NaN stays in, for the loss to tell
    lower = lower.long()  # by way of int32, which is faster
    projected = torch.zeros_like(probs).scatter_add(1, lower, probs * (1 - upper_share))
    return projected.scatter_add(1, lower + 1, probs * upper_share)


# [fast: flat] AdamW and the updates of targets are few operations each.
class Flat(nn.Module):
    """Networks of one class, whose trainable parameters become views of one tensor, `params`."""

    def __init__(self, *networks: nn.Module):
        super().__init__()
        named = [(name, param) for name, param in networks[0].named_parameters() if param.requires_grad]
        named.sort(key=lambda item: item[1].numel() % 16 != 0)  # sizes that 16 divides keep the next aligned
        self.networks, self.shapes = [*networks], {name: [len(networks), *p.shape] for name, p in named}
        self.frozen = [name for name, param in networks[0].named_parameters() if not param.requires_grad]
        params = [network.get_parameter(name) for name in self.shapes for network in networks]
        self.params = nn.Parameter(nn.utils.parameters_to_vector(params).detach())
        nn.utils.vector_to_parameters(self.params.detach(), [param.requires_grad_(False) for param in params])

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        parts = self.params.split([math.prod(shape) for shape in self.shapes.values()])
        views = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}
        compute = partial(torch.func.functional_call, self.networks[0], args=inputs)
        if len(self.networks) == 1:
            return compute({name: view.squeeze(0) for name, view in views.items()})
        views |= {key: torch.stack([net.get_parameter(key) for net in self.networks]) for key in self.frozen}
        # (n, batch, ...): vmap makes one batched product of a layer of all.
        return torch.vmap(compute, randomness="different")(views)


class AdamW(nn.Module):
    """`torch.optim.AdamW` of one tensor (arXiv:1711.05101)."""

    def __init__(self, params: Tensor, lr: float | Tensor, decay: float, betas=(0.9, 0.999), eps=1e-8):
        super().__init__()
        self.params, self.lr, self.decay, self.betas, self.eps = [params], lr, decay, betas, eps
        self.register_buffer("exp_avg", torch.zeros_like(params))
        self.register_buffer("exp_avg_sq", torch.zeros_like(params))
        self.register_buffer("step", torch.zeros((), device=params.device))

    def minimize(self, loss: Tensor) -> None:
        """Take a step down the gradient of a loss; `backward()` and `step()` would break the graph."""
        (grad,) = torch.autograd.grad(loss, self.params[0])
        with torch.no_grad():
            step, (beta1, beta2) = self.step.add_(1), self.betas
            # Stacked, or a CPU would compute them anew for each few parameters.
            numbers = torch.stack([(1 - beta2**step).sqrt(), self.lr / (1 - beta1**step)])
            correction, step_size = numbers.unbind()
            exp_avg = self.exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq = self.exp_avg_sq.lerp_(grad * grad, 1 - beta2)
            denominator = exp_avg_sq.sqrt() / correction + self.eps
            self.params[0].mul_(1 - self.lr * self.decay)
            self.params[0].sub_(exp_avg / denominator * step_size)


# [fast: direct calls] Around small networks a call of `torch.compile` takes long; docs/tricks.md times it.
class Compiled:
    """A function, compiled without a break, whose code is called directly with the tensors of the first call.

    It takes tensors, returns one or none, and leaves all else in tensors that it writes to. As in a CUDA
    graph, only values of tensors may change. Some calls look whether that is so, with a RuntimeError if not.
    """

    def __init__(self, function: Callable):
        self.guarded = torch.compile(function, fullgraph=True, dynamic=False)
        self.calls, self.next_look, self.graph, self.inputs = 0, 1, None, []

    def __call__(self, *args: Tensor) -> Tensor | None:
        self.calls += 1
        if self.calls == self.next_look:
            return self.look(args)
        for place, arg in zip(self.places, args, strict=True):
            self.inputs[place] = arg
        return next(iter(self.graph([*self.inputs])), None)

    def look(self, args: tuple[Tensor, ...]) -> Tensor | None:
        """Call it with the guards of `torch.compile`; note Inductor's graph and the tensors that it takes."""
        self.next_look = self.calls + min(self.calls // 2 + 1, 997)  # odd and even calls, for what alternates
        call, notes = CompiledFxGraph.__call__, []

        def note(graph: CompiledFxGraph, inputs: list[Tensor]) -> list[Tensor]:
            notes.append((graph, [id(tensor) for tensor in inputs], [tensor.detach() for tensor in inputs]))
            return call(graph, inputs)

        stance = torch.compiler.set_stance("fail_on_recompile" if self.graph else "default")
        with stance, patch.object(CompiledFxGraph, "__call__", note):
            result = self.guarded(*args)
        [(self.graph, ids, inputs)] = notes
        if len(self.graph.output_strides) > (result is not None):  # an output that a direct call would lose
            raise RuntimeError("it writes to a network not read by its flat name, or returns a history")
        self.places = [ids.index(id(arg)) for arg in args]
        for place, tensor in enumerate(self.inputs):
            if place not in self.places and tensor.data_ptr() != inputs[place].data_ptr():
                raise RuntimeError(f"a tensor of shape {[*tensor.shape]} was replaced: write to it in place")
        self.inputs = inputs
        return result


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

    global_step, updates, returns = checkpoint["progress"] if args.resume else [0, 0, []]
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}".replace("/", "_").replace(":", "_")
    folder = checkpoint["file"].parent if checkpoint else Path(f"runs/{name}")
    envs = make_envs(args, args.num_envs)
    obs_dim, action_space = envs.single_observation_space.shape[0], envs.single_action_space
    if not (isinstance(action_space, gym.spaces.Box) and action_space.is_bounded()):
        sys.exit(f"--env-id takes bounded vectors as actions, not {action_space}")
    (action_dim,) = action_space.shape

    actor_dim = obs_dim - args.privileged_dim
    actor = Actor(actor_dim, action_dim, device, args.actor_hidden_dim)
    sizes = (obs_dim, action_dim, device, args.critic_hidden_dim, args.num_atoms)
    qf1, qf2 = QNetwork(*sizes), QNetwork(*sizes)
    qf1_target, qf2_target = (copy.deepcopy(qf) for qf in (qf1, qf2))  # [fast: flat]
    flat_actor = Flat(actor)  # [fast: flat]
    flat_qf, flat_qf_target = Flat(qf1, qf2), Flat(qf1_target, qf2_target)  # [fast: both critics at once]
    actor_optimizer = AdamW(flat_actor.params, lr=args.actor_learning_rate, decay=args.weight_decay)
    q_optimizer = AdamW(flat_qf.params, lr=args.critic_learning_rate, decay=args.weight_decay)
    obs_normalizer = EmpiricalNormalization(obs_dim, device)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"actor": actor, "qf1": qf1, "qf2": qf2, "actor_optimizer": actor_optimizer}
    state |= {"qf1_target": qf1_target, "qf2_target": qf2_target, "q_optimizer": q_optimizer}
    state |= {"obs_normalizer": obs_normalizer}
    support = torch.linspace(args.v_min, args.v_max, args.num_atoms, device=device)
    deviations = torch.zeros(args.num_envs, 1, device=device)  # of the exploration noise

    # A row of the replay buffer is a whole transition, which one copy stores.
    columns = [obs_dim, action_dim, 1, 1, 1, obs_dim]  # obs, action, reward, terminated, over, next obs
    capacity = args.buffer_size // args.num_envs * args.num_envs
    buffer = torch.zeros(0 if args.evaluate else capacity, sum(columns), device=device)
    # [fast: numbers as tensors] Rows written, and of them in use, at least one for the warm-up.
    written = torch.tensor(max(global_step, 1), device=device)
    size = written.clamp(max=capacity)
    names = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss", "clipped_mass")
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), the policy's with noise on them: (num_envs, action_dim)."""
        with torch.no_grad():
            obs_normalizer.update(obs)
            mean = actor(obs_normalizer(obs)[:, -actor_dim:])
            return (mean + deviations * torch.randn_like(mean)).clamp(-1, 1)

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The policy's actions, as environments take them, (n, action_dim), at obs (n, obs_dim)."""
        with torch.no_grad():
            rows = obs_normalizer(torch.as_tensor(obs, dtype=torch.float32, device=device))
            return in_bounds(actor(rows[:, -actor_dim:]).cpu().numpy(), action_space)

    def store(*transitions: np.ndarray) -> None:
        """Write a step of all environments, (n,) or (n, width) each, over the oldest rows if it is full."""
        rows = np.column_stack(transitions).astype(np.float32)
        if not np.isfinite(rows).all():
            sys.exit(f"a row is not finite at step {global_step}")
        position = (global_step - args.num_envs) % capacity
        buffer[position : position + args.num_envs].copy_(torch.from_numpy(rows), non_blocking=True)

    def sample() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A batch: observations, actions, n-step returns, discounts of the next values, next observations."""
        # [fast: numbers as tensors] 0: the last row that was stored
        ages = torch.randint(2**62, (args.batch_size,), device=device) % size
        steps = args.num_envs * torch.arange(args.num_steps, device=device)  # rows of an environment
        rows = ((written - 1 - ages)[:, None] + steps) % capacity  # [fast: numbers as tensors]
        obs, actions = buffer[rows[:, 0], : obs_dim + action_dim].split([obs_dim, action_dim], dim=1)
        outcomes = buffer[rows, obs_dim + action_dim : -obs_dim]
        returns, discounts, last = n_step_returns(outcomes, ages // args.num_envs, args.gamma)
        # [fast: one graph] Stacked, so that Inductor keeps them: else it computes them for every few atoms.
        returns, discounts = torch.stack([returns, discounts]).unbind()
        next_obs = buffer[rows.gather(1, last)[:, 0], -obs_dim:]
        return obs_normalizer(obs), actions, returns, discounts, obs_normalizer(next_obs)

    def update_critics() -> Tensor:
        """One gradient step of the critics on a new batch; returns its observations, standardised."""
        with torch.no_grad():
            obs, actions, returns, discounts, next_obs = sample()
            noise = (args.policy_noise * torch.randn_like(actions)).clamp(-args.noise_clip, args.noise_clip)
            next_actions = (flat_actor(next_obs[:, -actor_dim:]) + noise).clamp(-1, 1)  # [fast: flat]
            unbounded = returns + discounts * support
            atoms = unbounded.clamp(args.v_min, args.v_max)
            probs1, probs2 = flat_qf_target(next_obs, next_actions).softmax(2)  # [fast: both critics at once]
            values1, values2 = ((probs * atoms).sum(1, keepdim=True) for probs in (probs1, probs2))
            probs = torch.where(values1 < values2, probs1, probs2)
            target_probs = project(probs, atoms, support)
            clipped = (unbounded - atoms).abs() > 1e-6 * (args.v_max - args.v_min)  # by more than rounding
        qf1_logits, qf2_logits = flat_qf(obs, actions)  # [fast: both critics at once]
        qf1_loss, qf2_loss = (F.cross_entropy(x, target_probs) for x in (qf1_logits, qf2_logits))
        q_optimizer.minimize(qf1_loss + qf2_loss)  # [fast: flat]
        qf1_values, qf2_values = ((logits.softmax(1) * support).sum(1) for logits in (qf1_logits, qf2_logits))
        record(qf1_values=qf1_values.mean(), qf2_values=qf2_values.mean())
        record(qf1_loss=qf1_loss, qf2_loss=qf2_loss, qf_loss=(qf1_loss + qf2_loss) / 2)
        record(clipped_mass=(probs * clipped).sum(1).mean())
        return obs

    def update_actor(obs: Tensor) -> None:
        """One gradient step of the actor on obs (batch_size, obs_dim)."""
        actions = flat_actor(obs[:, -actor_dim:])  # [fast: flat]
        qf_values = (flat_qf(obs, actions).softmax(2) * support).sum(2)  # [fast: both critics at once]
        actor_loss = -torch.minimum(*qf_values).mean()
        actor_optimizer.minimize(actor_loss)  # [fast: flat]
        record(actor_loss=actor_loss)

    def update_targets() -> None:
        """Move the targets a fraction `tau` of the way to their networks."""
        flat_qf_target.params.detach().lerp_(flat_qf.params.detach(), args.tau)  # [fast: flat]

    def update(with_actor: bool) -> None:
        """One gradient step on a new batch."""
        obs = update_critics()
        update_targets()
        if with_actor:
            update_actor(obs)

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        for name, value in values.items():
            losses[name].copy_(value.detach())  # [fast: losses in place]

    def log_losses() -> None:
        """Write the latest losses; one that is not finite ends the run."""
        for name, loss in zip(losses, torch.stack([*losses.values()]).tolist(), strict=True):  # sync
            writer.add_scalar(f"losses/{name}", loss, global_step)
            if not math.isfinite(loss):
                sys.exit(f"{name} is {loss} at step {global_step}")
            if name == "clipped_mass" and loss > 0.1:
                told = "--v-min and --v-max cut off more than 10 % of the target probabilities"
                warnings.warn(told, stacklevel=1)  # Python shows it once

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
        obs_normalizer.load_state_dict(checkpoint["obs_normalizer"])
        eval_returns = evaluate(args, actor, best_actions, folder / f"videos/{time.time():.0f}")
        print(json.dumps(asdict(args) | {"eval_returns": eval_returns}))
        sys.exit()

    # [fast: one graph] The policy and the two halves of a gradient step.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes seconds
        torch._inductor.config.split_reductions = False  # small sums: fewer launches on a GPU
        act, update_critics, update_actor = map(Compiled, (act, update_critics, update_actor))
    # [fast: graph capture] One launch for all kernels of a call. A graph has no branches: one for each kind.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    kinds = [(False,), (True,)]
    if cudagraphs:
        act = CudaGraphModule(act, warmup=5, device=device)
        graphs = {kind: CudaGraphModule(partial(update, *kind), warmup=5, device=device) for kind in kinds}

        def update(*kind: bool) -> None:
            graphs[kind]()

    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back.
    if args.compile or cudagraphs:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        for kind in (6 if cudagraphs else 1) * kinds:  # captured: four warm up, one records, one replays
            act(torch.zeros(args.num_envs, obs_dim, device=device))
            update(*kind)
        for name, item in state.items():
            item.load_state_dict(saved[name])
    else:
        print("neither --compile nor a captured graph: this is for debugging", file=sys.stderr)
    if args.cudagraphs and not cudagraphs:
        print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)

    # ---- Training ------------------------------------------------------------------------------------------
    if args.resume:
        for name, item in state.items():
            item.load_state_dict(checkpoint[name])
        buffer[:size] = checkpoint.pop("buffer")
        newest = (global_step - 1 - torch.arange(args.num_envs, device=device)) % capacity
        buffer[newest, -obs_dim - 1] = 1  # over: what follows is another episode

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
    deviations.uniform_(args.std_min, args.std_max)
    obs = envs.reset(seed=env_seeds)[0].astype(np.float32)
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
    first_update, eval_returns, last = updates, [], global_step >= args.total_timesteps
    actions_arrived = torch.get_device_module(device).Event()  # [fast: overlapped copy]
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            if updates == first_update:
                sps_step, sps_time = global_step, time.perf_counter()  # from the first step that learns
            # [fast: overlapped copy] It is under way: `actions` shows them only after `synchronize`.
            actions = act(torch.from_numpy(obs).to(device, non_blocking=True))
            actions = actions.to("cpu", non_blocking=True).numpy()
            actions_arrived.record()

            for _ in range(args.num_updates if global_step > args.learning_starts else 0):
                update(updates % args.policy_frequency == 0)  # a GPU still works while the environments step
                updates += 1

            actions_arrived.synchronize()  # [fast: overlapped copy] sync
            next_obs, rewards, terminated, truncated, infos = envs.step(in_bounds(actions, action_space))
            final_obs, over = next_obs.copy(), terminated | truncated
            global_step += args.num_envs
            episode_return += rewards
            episode_length += 1
            for index in np.flatnonzero(over):
                final_obs[index] = infos["final_obs"][index]
                log_episode(index)
                deviations[index].uniform_(args.std_min, args.std_max)

            store(obs, actions, rewards, terminated, over, final_obs)
            written.fill_(global_step)  # [fast: numbers as tensors]
            size.fill_(min(global_step, capacity))
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
                progress = [global_step, updates, returns]
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
    summary["cudagraphs"] = cudagraphs  # [fast: graph capture]
    summary |= {"device": device.type, "folder": str(folder), "total_timesteps": global_step}
    summary |= {"updates": updates, "sps": sps, "episodes": len(returns), "eval_returns": eval_returns}
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
