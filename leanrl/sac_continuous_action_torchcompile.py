# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium[mujoco]>=1.4,<1.5", "mujoco>=3.6,<4", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""Soft Actor-Critic (SAC) for continuous actions: the twin that compiles and captures.

Paper: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905 (2018).
Run:   python sac_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --compile --cudagraphs
Twin:  sac_continuous_action.py, eager, computes the same, up to rounding and random numbers. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] the policy and each half of a gradient step: each is compiled without a break;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and Adam a few operations on it in that graph;
- [fast: both critics at once] one batched product in place of two;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches a whole gradient step at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: overlapped copy] a GPU copies actions to the host while gradient steps are launched.

Deviations from the paper; the first three are CleanRL's:
- the critics and the entropy coefficient learn at 1e-3, the actor at 3e-4 (paper: all at 3e-4);
- every `policy_frequency`-th gradient step updates the actor, `policy_frequency` times on that step's batch;
- log(std) is squashed into [-5, 2] by a tanh (the authors' code: clipped to [-20, 2]);
- the entropy coefficient learns from the log-probabilities of the actor's loss (CleanRL: of new actions);
- the gradient steps come before the environment step: they see the buffer up to the previous transition;
- the actor learns in the first gradient step (CleanRL: in the second);
- actions are in [-1, 1] throughout, and the entropy is of these: `in_bounds` scales them for environments.
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
FIXED = ("env_id", "num_envs", "buffer_size", "policy_lr", "q_lr", "alpha", "autotune")  # what --resume keeps


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
    compile: bool = False  # compile the policy and the gradient step with torch.compile
    cudagraphs: bool = False  # capture the policy and the gradient step as CUDA graphs

    env_id: str = "HalfCheetah-v4"  # the id of the environment: any with bounded vectors as actions
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of the environment
    total_timesteps: PositiveInt = 1_000_000  # agent steps in all, over all environments
    num_envs: PositiveInt = 1  # the number of parallel environments
    buffer_size: PositiveInt = 1_000_000  # transitions that the replay buffer holds, over all environments
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 0.005  # how far target networks move towards their networks at each of their updates
    batch_size: PositiveInt = 256  # the number of transitions in a gradient step
    learning_starts: NonNegativeInt = 5_000  # agent steps with random actions before the first gradient step
    updates_per_step: NonNegativeFloat = 1.0  # gradient steps per agent step, however many environments
    policy_lr: NonNegativeFloat = 3e-4  # the learning rate of the actor
    q_lr: NonNegativeFloat = 1e-3  # the learning rate of the critics and of the entropy coefficient
    policy_frequency: PositiveInt = 2  # every so many gradient steps the actor is updated, as many times
    target_network_frequency: PositiveInt = 1  # gradient steps between two updates of the target networks
    alpha: NonNegativeFloat = 0.2  # the entropy coefficient under --no-autotune
    autotune: bool = True  # learn the entropy coefficient

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
    """A Gaussian before squashing: (batch, obs_dim) to its mean and log(std), (batch, action_dim) each."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256, device=device)
        self.fc2 = nn.Linear(256, 256, device=device)
        self.fc_out = nn.Linear(256, 2 * action_dim, device=device)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        mean, log_std = self.fc_out(x).float().chunk(2, dim=1)
        return mean, -5 + 3.5 * (torch.tanh(log_std) + 1)  # from -5 to 2


def sample_actions(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions tanh(u) of a squashed Gaussian, (batch, action_dim), with log-probabilities (batch, 1).

    log(1 - tanh(u)^2) is written 2 (log 2 - u - softplus(-2u)), which is finite for every u (appendix C).
    """
    noise = torch.randn_like(mean)
    u = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - 2 * (math.log(2) - u - F.softplus(-2 * u))
    return torch.tanh(u), log_prob.sum(dim=1, keepdim=True)


# [fast: flat] Adam and the updates of targets are few operations each.
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


class Adam(nn.Module):
    """`torch.optim.Adam` of one tensor (arXiv:1412.6980), with the gradient clipped."""

    def __init__(self, params: Tensor, lr: float | Tensor, eps=1e-8, max_norm=math.inf):
        super().__init__()
        self.params, self.lr, self.eps, self.max_norm = [params], lr, eps, max_norm
        self.register_buffer("exp_avg", torch.zeros_like(params))
        self.register_buffer("exp_avg_sq", torch.zeros_like(params))
        self.register_buffer("step", torch.zeros((), device=params.device))

    def minimize(self, loss: Tensor) -> None:
        """Take a step down the gradient of a loss; `backward()` and `step()` would break the graph."""
        (grad,) = torch.autograd.grad(loss, self.params[0])
        with torch.no_grad():
            step, beta1, beta2 = self.step.add_(1), 0.9, 0.999
            numbers = [(1 - beta2**step).sqrt(), self.lr / (1 - beta1**step)]
            if self.max_norm < math.inf:
                numbers += [(self.max_norm / (grad.square().sum().sqrt() + 1e-6)).clamp(max=1)]
            # Stacked, or a CPU would compute them anew for each few parameters.
            correction, step_size, *clip = torch.stack(numbers).unbind()
            grad = grad * clip[0] if clip else grad
            exp_avg = self.exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq = self.exp_avg_sq.lerp_(grad * grad, 1 - beta2)
            denominator = exp_avg_sq.sqrt() / correction + self.eps
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
    qf1_target, qf2_target = (copy.deepcopy(qf) for qf in (qf1, qf2))  # [fast: flat]
    log_alpha = nn.Parameter(torch.tensor(1.0 if args.autotune else args.alpha, device=device).log())
    target_entropy = -action_dim  # appendix D
    flat_actor = Flat(actor)  # [fast: flat]
    flat_qf, flat_qf_target = Flat(qf1, qf2), Flat(qf1_target, qf2_target)  # [fast: both critics at once]
    actor_optimizer = Adam(flat_actor.params, lr=args.policy_lr)
    q_optimizer = Adam(flat_qf.params, lr=args.q_lr)
    alpha_optimizer = Adam(log_alpha, lr=args.q_lr)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"actor": actor, "qf1": qf1, "qf2": qf2, "log_alpha": nn.ParameterList([log_alpha])}
    state |= {"qf1_target": qf1_target, "qf2_target": qf2_target, "actor_optimizer": actor_optimizer}
    state |= {"q_optimizer": q_optimizer, "alpha_optimizer": alpha_optimizer}

    # A row of the replay buffer is a whole transition: one copy stores it, one gather fetches a batch.
    columns = [obs_dim, action_dim, 1, 1, obs_dim]  # obs, action, reward, terminated, next obs
    capacity = args.buffer_size // args.num_envs * args.num_envs
    buffer = torch.zeros(0 if args.evaluate else capacity, sum(columns), device=device)
    # [fast: numbers as tensors] Rows in use, at least one for the warm-up.
    size = torch.tensor(min(max(global_step, 1), capacity), device=device)
    names = ["qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "alpha", "actor_loss"]
    names += ["alpha_loss"] if args.autotune else []
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), drawn from the policy: (num_envs, action_dim)."""
        with torch.no_grad():
            mean, log_std = actor(obs)
            return torch.tanh(mean + log_std.exp() * torch.randn_like(mean))

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The policy's mean actions, as environments take them, (n, action_dim), at obs (n, obs_dim)."""
        with torch.no_grad():
            mean, _ = actor(torch.as_tensor(obs, dtype=torch.float32, device=device))
            return in_bounds(torch.tanh(mean).cpu().numpy(), action_space)

    def store(*transitions: np.ndarray) -> None:
        """Write a step of all environments, (n,) or (n, width) each, over the oldest rows if it is full."""
        rows = np.column_stack(transitions).astype(np.float32)
        if not np.isfinite(rows).all():
            sys.exit(f"a row is not finite at step {global_step}")
        position = (global_step - args.num_envs) % capacity
        buffer[position : position + args.num_envs].copy_(torch.from_numpy(rows), non_blocking=True)

    def update_critics() -> Tensor:
        """One gradient step of the critics on a new batch; returns its observations (batch_size, obs_dim)."""
        indices = torch.randint(2**62, (args.batch_size,), device=device) % size  # [fast: numbers as tensors]
        obs, actions, rewards, terminated, next_obs = buffer.index_select(0, indices).split(columns, dim=1)
        with torch.no_grad():
            next_actions, next_log_prob = sample_actions(*flat_actor(next_obs))  # [fast: flat]
            next_qf1, next_qf2 = flat_qf_target(next_obs, next_actions)  # [fast: both critics at once]
            next_values = torch.minimum(next_qf1, next_qf2) - log_alpha.exp() * next_log_prob  # equation 3
            target = rewards + args.gamma * (1 - terminated) * next_values  # equation 2
        qf1_values, qf2_values = flat_qf(obs, actions)  # [fast: both critics at once]
        qf1_loss, qf2_loss = F.mse_loss(qf1_values, target), F.mse_loss(qf2_values, target)
        q_optimizer.minimize(qf1_loss + qf2_loss)  # [fast: flat]
        record(qf1_values=qf1_values.mean(), qf2_values=qf2_values.mean())
        record(qf1_loss=qf1_loss, qf2_loss=qf2_loss, qf_loss=(qf1_loss + qf2_loss) / 2)
        return obs

    def update_actor(obs: Tensor) -> None:
        """One gradient step of the actor and the entropy coefficient, on obs (batch_size, obs_dim)."""
        actions, log_prob = sample_actions(*flat_actor(obs))  # [fast: flat]
        qf_values = torch.minimum(*flat_qf(obs, actions))  # [fast: both critics at once]
        alpha = log_alpha.detach().exp()
        actor_loss = (alpha * log_prob - qf_values).mean()  # equation 7
        actor_optimizer.minimize(actor_loss)  # [fast: flat]
        record(alpha=alpha, actor_loss=actor_loss)
        if args.autotune:
            alpha_loss = -log_alpha.exp() * (log_prob.detach() + target_entropy).mean()  # equation 18
            alpha_optimizer.minimize(alpha_loss)  # [fast: flat]
            record(alpha_loss=alpha_loss)

    def update_targets() -> None:
        """Move the targets a fraction `tau` of the way to their networks."""
        flat_qf_target.params.detach().lerp_(flat_qf.params.detach(), args.tau)  # [fast: flat]

    def update(with_actor: bool, with_target: bool) -> None:
        """One gradient step on a new batch."""
        obs = update_critics()
        for _ in range(args.policy_frequency if with_actor else 0):
            update_actor(obs)
        if with_target:
            update_targets()

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
    kinds = [(False, False), (False, True), (True, False), (True, True)]
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
    actions_arrived = torch.get_device_module(device).Event()  # [fast: overlapped copy]
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            if global_step < args.learning_starts:
                actions = rng.uniform(-1, 1, (args.num_envs, action_dim)).astype(np.float32)
            else:
                if updates == first_update:
                    sps_step, sps_time = global_step, time.perf_counter()  # from the first step that learns
                # [fast: overlapped copy] It is under way: `actions` shows them only after `synchronize`.
                actions = act(torch.from_numpy(obs).to(device, non_blocking=True))
                actions = actions.to("cpu", non_blocking=True).numpy()
                actions_arrived.record()
                updates_due += min(args.num_envs, global_step - args.learning_starts) * args.updates_per_step

            while updates_due > 0:  # a GPU still works on these while the environments step
                update(updates % args.policy_frequency == 0, updates % args.target_network_frequency == 0)
                updates, updates_due = updates + 1, updates_due - 1

            actions_arrived.synchronize()  # [fast: overlapped copy] sync
            next_obs, rewards, terminated, truncated, infos = envs.step(in_bounds(actions, action_space))
            final_obs = next_obs.copy()
            global_step += args.num_envs
            episode_return += rewards
            episode_length += 1
            for index in np.flatnonzero(terminated | truncated):
                final_obs[index] = infos["final_obs"][index]
                log_episode(index)

            store(obs, actions, rewards, terminated, final_obs)
            size.fill_(min(global_step, capacity))  # [fast: numbers as tensors]
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
    summary["cudagraphs"] = cudagraphs  # [fast: graph capture]
    summary |= {"device": device.type, "folder": str(folder), "total_timesteps": global_step}
    summary |= {"updates": updates, "sps": sps, "episodes": len(returns), "eval_returns": eval_returns}
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
