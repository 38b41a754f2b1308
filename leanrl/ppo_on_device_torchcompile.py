# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<2.16", "numpy>=2,<3", "tyro>=1,<2", "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18",
#     "wandb>=0.19", "tensordict>=0.15.3,<0.16",
# ]
# ///
"""PPO with environments that are tensors on the device: the twin that compiles and captures.

Papers: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017); Lu et al.,
        "Discovered Policy Optimisation", arXiv:2210.05639 (2022), whose PureJaxRL has environments on a GPU.
Run:    python ppo_on_device_torchcompile.py --env-id Pendulum-v1 --num-envs 1024 --compile --cudagraphs
Twin:   ppo_on_device.py, eager, computes the same, up to rounding. Read their diff.

Deviations from the papers:
- a truncated episode bootstraps from the value of its final observation;
- observations are standardised by the moments of all rollouts before the one that they are in.

Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] steps, preparation of the batch, gradient step: each is compiled without a break;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and Adam a few operations on it in that graph;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches a whole iteration, environments and gradient steps, at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: scan by doubling] advantages take log2(T) operations in place of T.
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
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from unittest.mock import patch

import numpy as np
import torch
import tyro
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
    checkpoint_every: PositiveInt | None = None  # agent steps between checkpoints; one is at the end
    resume: str | None = None  # go on with the run of this folder, with its arguments
    evaluate: str | None = None  # do not train, evaluate this checkpoint
    log_every: PositiveInt = 100_000  # agent steps between two log entries
    eval_every: PositiveInt | None = None  # agent steps between evaluations; one is at the end
    eval_episodes: PositiveInt = 10  # the episodes of an evaluation
    compile: bool = False  # compile steps, the preparation of the batch and the gradient step
    cudagraphs: bool = False  # capture a whole iteration

    env_id: str = "Pendulum-v1"  # that, or module:Class, a class that has what `Pendulum` has
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of the environment
    total_timesteps: PositiveInt = 5_000_000  # agent steps in all; a rollout beyond them is left out
    learning_rate: NonNegativeFloat = 1e-3  # the learning rate at the start
    num_envs: PositiveInt = 1024  # the number of parallel environments
    num_steps: PositiveInt = 16  # the steps of each environment in a rollout
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: Fraction = 0.95  # the discount factor
    gae_lambda: Fraction = 0.95  # lambda of the generalised advantage estimate
    num_minibatches: PositiveInt = 8  # the number of minibatches that a rollout is divided into
    update_epochs: PositiveInt = 4  # how often a rollout is learnt from
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: NonNegativeFloat = 0.2  # the bound on the ratio of probabilities, as a distance from 1
    clip_vloss: bool = True  # clip the value loss, too
    ent_coef: NonNegativeFloat = 0.0  # the weight of the entropy
    vf_coef: NonNegativeFloat = 0.5  # the weight of the value loss
    max_grad_norm: NonNegativeFloat = 0.5  # the norm that gradients are clipped to

    def __post_init__(self):  # tyro tells what it raises, and exits with status 2
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches takes a smaller divisor of a rollout's {batch_size} steps")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps has to hold the {batch_size} steps of a rollout")


# ---- Environment -------------------------------------------------------------------------------------------
class Pendulum(nn.Module):
    """Many of Gymnasium's Pendulum-v1, as tensors. docs/ppo_on_device.md tells how to write another."""

    obs_dim, action_dim = 3, 1

    def __init__(self, num_envs: int, device: torch.device):
        super().__init__()
        self.state = nn.Buffer(torch.zeros(num_envs, 2, device=device))  # angle, 0 is up, and speed
        self.steps = nn.Buffer(torch.zeros(num_envs, device=device))  # of the episodes

    def draw(self) -> Tensor:
        angle, speed = (2 * torch.rand_like(self.state) - 1).unbind(dim=1)
        return torch.stack([math.pi * angle, speed], dim=1)

    def observe(self, state: Tensor) -> Tensor:
        angle, speed = state.unbind(dim=1)
        return torch.stack([angle.cos(), angle.sin(), speed], dim=1)

    def reset(self) -> Tensor:
        """Begin episodes; returns their observations (num_envs, obs_dim)."""
        self.state.copy_(self.draw())
        self.steps.zero_()
        return self.observe(self.state)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Take actions, (num_envs, action_dim); the step that ends an episode also begins the next one.

        Returns what to act on next, (num_envs, obs_dim), rewards, terminated, truncated, (num_envs,) each,
        and what the actions led to, (num_envs, obs_dim): where an episode ends, its final observation.
        """
        (angle, speed), torque = self.state.unbind(dim=1), actions[:, 0].clamp(-2, 2)
        from_up = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        rewards = -(from_up.square() + 0.1 * speed.square() + 0.001 * torque.square())
        speed = (speed + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
        state = torch.stack([angle + speed * 0.05, speed], dim=1)
        truncated = self.steps.add_(1) >= 200
        self.state.copy_(torch.where(truncated[:, None], self.draw(), state))
        self.steps.mul_(~truncated)
        return self.observe(self.state), rewards, torch.zeros_like(truncated), truncated, self.observe(state)


def make_environment(args: Args, num_envs: int, device: torch.device) -> nn.Module:
    """Build `num_envs` environments on the device."""
    module, _, name = args.env_id.rpartition(":")
    if module:  # beside the script, in the current folder or installed
        sys.path.append(str(Path.cwd()))
        return getattr(importlib.import_module(module), name)(num_envs, device, **args.env_kwargs)
    if name != "Pendulum-v1":
        sys.exit(f"--env-id takes Pendulum-v1 or module:Class, not {name}")
    return Pendulum(num_envs, device, **args.env_kwargs)


# ---- Networks ----------------------------------------------------------------------------------------------
class Agent(nn.Module):
    """Policy and value: (..., obs_dim) to mean (..., action_dim), log_std (1, action_dim), value (..., 1)."""

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
        # Acting takes `actor_mean` and `actor_logstd` alone.
        return self.actor_mean(obs).float(), self.actor_logstd, self.critic(obs).float()


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Initialise a layer in place: orthogonal weights with gain `std`, no bias. Returns the layer."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def normal_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density, (..., 1), of actions (..., action_dim) under independent normal distributions."""
    standardised = (actions - mean) * (-log_std).exp()
    return (-0.5 * standardised.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1, keepdim=True)


def split(rows: Tensor, columns: dict[str, int]) -> dict[str, Tensor]:
    """Views of rows (..., all widths), one of each column by its name: (..., its width)."""
    return dict(zip(columns, rows.split([*columns.values()], dim=-1), strict=True))


class Moments(nn.Module):
    """Count, mean and variance of all rows so far, as tensors (Chan et al., 1979, equations 2.1)."""

    def __init__(self, dim: int, device: torch.device):
        super().__init__()
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64, device=device))
        self.mean = nn.Buffer(torch.zeros(dim, device=device))
        self.var = nn.Buffer(torch.ones(dim, device=device))

    def update(self, rows: Tensor) -> None:
        """Take in rows (n, dim)."""
        share = (len(rows) / self.count.add_(len(rows))).float()
        delta = rows.mean(dim=0) - self.mean
        within = self.var.lerp(rows.var(dim=0, correction=0), share)
        self.var.copy_(within + delta.square() * share * (1 - share))
        self.mean.add_(delta * share)

    def standardise(self, rows: Tensor) -> Tensor:
        """Rows (..., dim) less the mean over the standard deviation, clipped to 10."""
        return ((rows - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)


# [fast: flat] Adam and the clipping of gradients are few operations each.
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


def play_episodes(args: Args, network: nn.Module, policy: Callable, device: torch.device) -> list[float]:
    """Returns of an episode in each of `--eval-episodes` environments, by a policy from obs to actions."""
    network.eval()  # as dropout and batch normalisation ask for
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # training draws as without it
        torch.manual_seed(args.seed + 1)
        env = make_environment(args, args.eval_episodes, device)
        obs, returns = env.reset(), torch.zeros(args.eval_episodes, device=device)
        playing = torch.ones(args.eval_episodes, dtype=torch.bool, device=device)
        while playing.any():  # sync
            obs, rewards, terminated, truncated, _ = env.step(policy(obs))
            returns += torch.where(playing, rewards, 0)
            playing &= ~(terminated | truncated)
    network.train()
    if not returns.isfinite().all():
        sys.exit("an evaluation is not finite")
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
    env = make_environment(args, args.num_envs, device)

    agent = Agent(env.obs_dim, env.action_dim, device)
    flat_agent = Flat(agent)  # [fast: flat]
    annealed_lr = torch.tensor(args.learning_rate, device=device)  # [fast: numbers as tensors]
    optimizer = Adam(flat_agent.params, annealed_lr, eps=1e-5, max_norm=args.max_grad_norm)
    obs_moments, return_moments = Moments(env.obs_dim, device), Moments(1, device)
    carried = nn.Module()  # what a step leaves for the next one
    carried.obs = nn.Buffer(torch.zeros(args.num_envs, env.obs_dim, device=device))
    carried.obs.copy_(env.reset())
    carried.discounted_return = nn.Buffer(torch.zeros(args.num_envs, device=device))
    carried.episode_return = nn.Buffer(torch.zeros(args.num_envs, device=device))
    carried.episode_length = nn.Buffer(torch.zeros(args.num_envs, device=device))
    carried.ended = nn.Buffer(torch.zeros(3, device=device))  # since the log: number, returns, lengths
    state = {"agent": agent, "optimizer": optimizer}  # what checkpoints hold: add modules and optimizers
    state |= {"obs_moments": obs_moments, "return_moments": return_moments}
    if isinstance(env, nn.Module):  # another, such as a simulator, begins new episodes at --resume
        state |= {"env": env, "carried": carried}
    rng = torch.cuda if device.type == "cuda" else torch  # has the state of the random numbers
    # Columns of a rollout, in which a row is a whole transition, and of the batch made of it.
    inputs = {"obs": env.obs_dim, "actions": env.action_dim}
    columns = inputs | {"rewards": 1, "terminated": 1, "done": 1, "discounted": 1, "next_obs": env.obs_dim}
    batch_columns = inputs | {"log_prob": 1, "advantages": 1, "targets": 1, "values": 1}
    rollout = torch.zeros(args.num_steps, args.num_envs, sum(columns.values()), device=device)
    places = torch.arange(args.num_steps, device=device).split(1)  # [fast: numbers as tensors]
    batch_size = args.num_envs * args.num_steps
    batch = torch.zeros(batch_size, sum(batch_columns.values()), device=device)
    total_steps = args.total_timesteps // batch_size * batch_size  # of whole rollouts
    names = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    names += ["explained_variance"]
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    # [fast: numbers as tensors] The number of a step is one of `places`.
    def step(place: Tensor) -> None:
        """Act, step all environments and write the rollout's step `place`, (1,)."""
        with torch.no_grad():
            mean = agent.actor_mean(obs_moments.standardise(carried.obs)).float()
            actions = mean + agent.actor_logstd.exp() * torch.randn_like(mean)
            next_obs, rewards, terminated, truncated, final_obs = env.step(actions)
            done = terminated | truncated
            discounted_return = rewards + args.gamma * carried.discounted_return
            outcomes = torch.stack([rewards, terminated, done, discounted_return], dim=1)
            row = torch.cat([carried.obs, actions, outcomes, final_obs], dim=1).float()
            rollout.index_copy_(0, place, row[None])  # [fast: numbers as tensors]
            carried.obs.copy_(next_obs)
            carried.discounted_return.copy_(discounted_return * ~done)
            carried.episode_return.add_(rewards)
            carried.episode_length.add_(1)
            episodes = [torch.ones_like(rewards), carried.episode_return, carried.episode_length]
            carried.ended.add_((torch.stack(episodes) * done).sum(dim=1))
            carried.episode_return.mul_(~done)
            carried.episode_length.mul_(~done)

    def best_actions(obs: Tensor) -> Tensor:
        """The policy's mean actions, (n, action_dim), at obs (n, obs_dim)."""
        with torch.no_grad():
            return agent.actor_mean(obs_moments.standardise(obs.float())).float()

    def gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor) -> Tensor:
        """Generalised advantage estimates (Schulman et al., arXiv:1506.02438, equation 16), all (T, n, 1)."""
        advantages = rewards + args.gamma * (1 - terminated) * next_values - values
        discounts = args.gamma * args.gae_lambda * (1 - done)
        # [fast: scan by doubling] After k rounds an estimate holds 2^k terms.
        shift = 1
        while shift < args.num_steps:
            later = (0, 0, 0, 0, 0, shift)  # rows of zeros where there are none
            advantages = advantages + discounts * nn.functional.pad(advantages[shift:], later)
            discounts = discounts * nn.functional.pad(discounts[shift:], later)
            shift *= 2
        return advantages

    def prepare() -> None:
        """Make of the rollout the batch to learn from: log-probabilities, values, advantages and targets."""
        with torch.no_grad():
            rows = split(rollout, columns)
            obs, next_obs = obs_moments.standardise(rows["obs"]), obs_moments.standardise(rows["next_obs"])
            obs_moments.update(rows["obs"].reshape(batch_size, -1))
            return_moments.update(rows["discounted"].view(-1, 1))
            rewards = (rows["rewards"] / (return_moments.var + 1e-8).sqrt()).clamp(-10, 10)
            mean, log_std, values = agent(obs)
            *_, next_values = agent(next_obs)
            log_prob = normal_log_prob(rows["actions"], mean, log_std)
            advantages = gae(rewards, values, next_values, rows["terminated"], rows["done"])
            targets = advantages + values
            rows |= {"obs": obs, "log_prob": log_prob, "values": values}
            rows |= {"advantages": advantages, "targets": targets}
            batch.copy_(torch.cat([rows[name] for name in batch_columns], dim=2).view(batch_size, -1))
            unexplained = (targets - values).var(correction=0)
            record(explained_variance=1 - unexplained / targets.var(correction=0).clamp(min=1e-8))

    def update(indices: Tensor) -> None:
        """One gradient step on the rows `indices` of the batch, (minibatch_size,)."""
        rows = split(batch.index_select(0, indices), batch_columns)
        advantages = rows["advantages"]
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        mean, log_std, values = flat_agent(rows["obs"])  # [fast: flat]
        log_ratio = normal_log_prob(rows["actions"], mean, log_std) - rows["log_prob"]
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_losses = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)  # PPO, equation 7
        policy_loss = policy_losses.mean()
        value_errors = (values - rows["targets"]).square()
        if args.clip_vloss:
            change = (values - rows["values"]).clamp(-args.clip_coef, args.clip_coef)
            value_errors = torch.maximum(value_errors, (rows["values"] + change - rows["targets"]).square())
        value_loss = 0.5 * value_errors.mean()
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss  # PPO, equation 9
        optimizer.minimize(loss)  # [fast: flat]

        log_ratio, ratio = log_ratio.detach(), ratio.detach()
        record(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        # k1 and k3 of Schulman, "Approximating KL Divergence" (2020), and the share of clipped ratios.
        record(old_approx_kl=-log_ratio.mean(), approx_kl=(ratio - 1 - log_ratio).mean())
        record(clipfrac=((ratio - 1).abs() > args.clip_coef).float().mean())

    def iteration() -> None:
        """A rollout and all gradient steps on it; nothing waits for the device here."""
        for place in places:  # [fast: numbers as tensors]
            step(place)
        prepare()
        for _ in range(args.update_epochs):
            for indices in torch.randperm(batch_size, device=device).chunk(args.num_minibatches):
                update(indices)

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        for name, value in values.items():
            losses[name].copy_(value.detach())  # [fast: losses in place]

    def log_losses() -> None:
        """Write the latest losses; a loss or an observation that is not finite ends the run."""
        for name, loss in zip(losses, torch.stack([*losses.values()]).tolist(), strict=True):  # sync
            writer.add_scalar(f"losses/{name}", loss, global_step)
            if not math.isfinite(loss):
                sys.exit(f"{name} is {loss} at step {global_step}")
        if not carried.obs.isfinite().all():  # sync
            sys.exit(f"an observation is not finite at step {global_step}")

    def log_episodes() -> None:
        """Log means of the episodes that have ended since the last time."""
        number, total, length = carried.ended.tolist()  # sync
        carried.ended.zero_()
        if number:
            returns.append((number, total))
            writer.add_scalar("charts/episodic_return", total / number, global_step)
            writer.add_scalar("charts/episodic_length", length / number, global_step)

    def mean_return(least: int) -> float:
        """The mean return of the latest episodes, so many or more; nan if there are none."""
        number, total = 0, 0.0
        for more, of_these in reversed(returns):
            number, total = number + more, total + of_these
            if number >= least:
                break
        return total / number if number else math.nan

    def due(every: int | None) -> bool:
        """True once in so many agent steps, and in the last step; never if None."""
        return every is not None and (last or global_step % every < batch_size)

    def stop(number: int, _) -> None:
        """Have Ctrl+C and what Slurm sends end the run after its rollout; the same again ends it at once."""
        stopping.append(number)
        signal.signal(number, signal.SIG_DFL)

    if args.evaluate:
        for name in ("agent", "obs_moments"):
            state[name].load_state_dict(checkpoint[name])
        eval_returns = play_episodes(args, agent, best_actions, device)
        print(json.dumps(asdict(args) | {"eval_returns": eval_returns}))
        sys.exit()

    # [fast: one graph] Steps, preparation of the batch, gradient step.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes seconds
        torch._inductor.config.cpp.use_decompose_tanh = True  # by exp: faster where batches are large
        step, prepare, update = map(Compiled, (step, prepare, update))
    # [fast: graph capture] One launch for all kernels of an iteration.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    if cudagraphs:
        iteration = CudaGraphModule(iteration, warmup=5, device=device)
    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back.
    if args.compile or cudagraphs:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        drawn = rng.get_rng_state()
        for _ in range(6 if cudagraphs else 1):  # captured: four warm up, one records, one replays
            iteration()
        for name, item in state.items():
            item.load_state_dict(saved[name])
        rng.set_rng_state(drawn)
        carried.ended.zero_()  # a simulator stays where the warm-up has left it
    else:
        print("neither --compile nor a captured graph: this is for debugging", file=sys.stderr)
    if args.cudagraphs and not cudagraphs:
        print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)

    # ---- Training ------------------------------------------------------------------------------------------
    if args.resume:
        for name, item in state.items():
            item.load_state_dict(checkpoint[name])
        rng.set_rng_state(checkpoint["random"])

    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        run |= {"id": folder.name[-64:], "name": folder.name}
        wandb.init(**run, config=asdict(args), resume="allow", save_code=True, sync_tensorboard=True)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    writer = SummaryWriter(str(folder), purge_step=global_step + 1)
    writer.add_text("hyperparameters", f"```\n{json.dumps(asdict(args), indent=2)}\n```")

    eval_returns, last = [], global_step + batch_size > args.total_timesteps
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            learning_rate = args.learning_rate * (1 - global_step / total_steps if args.anneal_lr else 1)
            annealed_lr.fill_(learning_rate)  # [fast: numbers as tensors]
            iteration()
            global_step += batch_size
            updates += args.update_epochs * args.num_minibatches

            last = bool(stopping) or global_step + batch_size > args.total_timesteps
            if due(args.log_every) or due(args.checkpoint_every):
                log_losses()
                log_episodes()
                sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
                writer.add_scalar("charts/SPS", sps, global_step)
                writer.add_scalar("charts/learning_rate", learning_rate, global_step)
                bar.set_postfix_str(f"SPS {sps:.0f}, return {mean_return(10):.1f}")
                bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                more = {"progress": [global_step, updates, returns], "random": rng.get_rng_state()}
                save_checkpoint(folder / "checkpoint.pt", args, state, **more)
            if not stopping and due(args.eval_every):
                pause = time.perf_counter()
                eval_returns = play_episodes(args, agent, best_actions, device)
                score = float(np.mean(eval_returns))
                writer.add_scalar("charts/eval_return", score, global_step)
                best = folder / "best.pt"
                if not best.exists() or score > torch.load(best, map_location="cpu")["score"]:
                    save_checkpoint(best, args, state, score=score)
                sps_time += time.perf_counter() - pause

    # ---- End -----------------------------------------------------------------------------------------------
    if args.track:
        wandb.finish()  # whose last words come before the summary
    summary = {"script": Path(__file__).stem, "compile": False, "cudagraphs": False, **asdict(args)}
    summary["cudagraphs"] = cudagraphs  # [fast: graph capture]
    summary |= {"device": device.type, "folder": str(folder), "total_timesteps": global_step}
    summary |= {"updates": updates, "sps": sps, "eval_returns": eval_returns}
    summary["episodes"] = int(sum(number for number, _ in returns))
    for name, least in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = mean_return(least) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
