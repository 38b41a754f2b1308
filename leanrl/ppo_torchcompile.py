# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium[classic-control]>=1.4,<1.5", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""Proximal Policy Optimization (PPO) for discrete actions: the twin that compiles and captures.

Papers: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017); Huang et al.,
        "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track (2022).
Run:    python ppo_torchcompile.py --env-id CartPole-v1 --compile --cudagraphs
Twin:   ppo.py, eager, computes the same, up to rounding. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] policy, preparation of the batch, gradient step: each is compiled without a break;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and Adam a few operations on it in that graph;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches each of these at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: acting in NumPy] for a few small products a call of PyTorch takes longer than they do;
- [fast: scan by doubling] advantages take log2(T) operations in place of T.

Deviations from the papers:
- a truncated episode bootstraps from the value of its final observation.
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
    compile: bool = False  # compile the policy, the preparation of the batch and the gradient step
    cudagraphs: bool = False  # capture the policy, the preparation of the batch and the gradient step

    env_id: str = "CartPole-v1"  # the id of the environment: any with discrete actions
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of the environment
    total_timesteps: PositiveInt = 500_000  # agent steps in all; a rollout beyond them is left out
    learning_rate: NonNegativeFloat = 2.5e-4  # the learning rate at the start
    num_envs: PositiveInt = 4  # the number of parallel environments
    num_steps: PositiveInt = 128  # the steps of each environment in a rollout
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: Fraction = 0.99  # the discount factor
    gae_lambda: Fraction = 0.95  # lambda of the generalised advantage estimate
    num_minibatches: PositiveInt = 4  # the number of minibatches that a rollout is divided into
    update_epochs: PositiveInt = 4  # how often a rollout is learnt from
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: NonNegativeFloat = 0.2  # the bound on the ratio of probabilities, as a distance from 1
    clip_vloss: bool = True  # clip the value loss, too
    ent_coef: NonNegativeFloat = 0.01  # the weight of the entropy
    vf_coef: NonNegativeFloat = 0.5  # the weight of the value loss
    max_grad_norm: NonNegativeFloat = 0.5  # the norm that gradients are clipped to
    target_kl: NonNegativeFloat | None = None  # an epoch with a larger KL is the last one of its rollout

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
class Agent(nn.Module):
    """Policy and value: (..., obs_dim) to logits (..., num_logits) and value (..., 1)."""

    def __init__(self, obs_dim: int, num_logits: int, device: torch.device):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1, device=device), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64, device=device)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_logits, device=device), std=0.01),
        )

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(obs).float(), self.critic(obs).float()  # acting takes `actor` alone


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Initialise a layer in place: orthogonal weights with gain `std`, no bias. Returns the layer."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def categorical_log_prob(actions: Tensor, logits: Tensor, nvec: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, (..., 1), of actions (..., len(nvec)) under logits (..., sum(nvec)).

    An action has independent parts, of which each is one of as many choices as `nvec` says.
    """
    log_prob, entropy = 0, 0
    for action, part in zip(actions.long().split(1, dim=-1), logits.split(nvec, dim=-1), strict=True):
        log_probs = part.log_softmax(dim=-1)
        log_prob = log_prob + log_probs.gather(-1, action)
        entropy = entropy - (log_probs.exp() * log_probs).sum(dim=-1, keepdim=True)
    return log_prob, entropy


def split(rows: Tensor, columns: dict[str, int]) -> dict[str, Tensor]:
    """Views of rows (..., all widths), one of each column by its name: (..., its width)."""
    return dict(zip(columns, rows.split([*columns.values()], dim=-1), strict=True))


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
    if not isinstance(action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        sys.exit(f"--env-id takes discrete actions, not {action_space}")
    # The sizes of the choices that make an action: one for Discrete, several for MultiDiscrete.
    several = isinstance(action_space, gym.spaces.MultiDiscrete)
    nvec = np.ravel(action_space.nvec if several else action_space.n).tolist()
    first_action, action_dim = np.ravel(action_space.start), len(nvec)
    score_parts = [slice(sum(nvec[:i]), sum(nvec[: i + 1])) for i in range(action_dim)]

    agent = Agent(obs_dim, sum(nvec), device)
    flat_agent = Flat(agent)  # [fast: flat]
    annealed_lr = torch.tensor(args.learning_rate, device=device)  # [fast: numbers as tensors]
    optimizer = Adam(flat_agent.params, annealed_lr, eps=1e-5, max_norm=args.max_grad_norm)
    state = {"agent": agent, "optimizer": optimizer}  # what checkpoints hold: add modules and optimizers
    # Columns of a rollout, in which a row is a whole transition, and of the batch made of it.
    inputs = {"obs": obs_dim, "actions": action_dim}
    columns = inputs | {"rewards": 1, "terminated": 1, "done": 1, "next_obs": obs_dim}
    batch_columns = inputs | {"log_prob": 1, "advantages": 1, "targets": 1, "values": 1}
    rollout = np.zeros((args.num_steps, args.num_envs, sum(columns.values())), np.float32)
    buffer = torch.zeros(rollout.shape, device=device)
    batch_size = args.num_envs * args.num_steps
    batch = torch.zeros(batch_size, sum(batch_columns.values()), device=device)
    total_steps = args.total_timesteps // batch_size * batch_size  # of whole rollouts
    names = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    names += ["explained_variance"]
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:  # [fast: one graph]
        """The policy's logits (num_envs, sum(nvec)) at obs (num_envs, obs_dim), on the device."""
        return agent.actor(obs).float()

    def torch_policy(obs: np.ndarray) -> np.ndarray:
        """The policy's logits, (num_envs, sum(nvec)), at obs (num_envs, obs_dim)."""
        with torch.no_grad():
            obs = torch.from_numpy(obs).to(device, non_blocking=True)
            return act(obs).cpu().numpy()  # sync

    # [fast: acting in NumPy] A call of PyTorch costs more than these three small products.
    def numpy_policy(obs: np.ndarray) -> np.ndarray:
        """The same in NumPy, by the parameters of each of `layers`, set in the loop once a rollout."""
        for params in layers:
            obs = obs @ params[0].T + params[1] if params else np.tanh(obs)
        return obs

    others = [layer for layer in agent.actor.children() if type(layer) is not nn.Tanh]
    act_in_numpy = all(type(layer) is nn.Linear and layer.bias is not None for layer in others)
    act_in_numpy &= type(agent.actor) is nn.Sequential and args.precision != "bfloat16"
    act_in_numpy &= args.num_envs <= 256
    if act_in_numpy:  # `act` may do more than these layers: compare, at weights whose outputs are not near 0
        params, rng = flat_agent.params.detach(), np.random.default_rng(0)
        before = params.clone()
        params.copy_(torch.from_numpy(rng.normal(scale=0.5, size=len(params))))
        layers = [[p.cpu().numpy() for p in layer.parameters()] for layer in agent.actor]
        example = rng.normal(scale=3, size=(64, obs_dim)).astype(np.float32)
        act_in_numpy = np.allclose(numpy_policy(example), torch_policy(example), atol=0.1)
        params.copy_(before)
    policy = numpy_policy if act_in_numpy else torch_policy
    if not act_in_numpy:
        told = "NumPy is for an act of Linear and Tanh alone, in float32, and 256 environments"
        print(f"acting in PyTorch: {told}", file=sys.stderr)

    def choose(scores: np.ndarray) -> np.ndarray:
        """The choice of the highest score in each part: (n, len(nvec)) of (n, sum(nvec))."""
        return np.stack([scores[:, part].argmax(axis=1) for part in score_parts], axis=1)

    def to_actions(choices: np.ndarray) -> np.ndarray:
        """Choices (n, len(nvec)) as environments take them."""
        return (choices + first_action).reshape(len(choices), *action_space.shape)

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The policy's most likely actions, as environments take them, at obs (n, obs_dim)."""
        obs = torch.from_numpy(obs.astype(np.float32)).to(device)
        with torch.no_grad():
            return to_actions(choose(agent.actor(obs).float().cpu().numpy()))

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
            rows = split(buffer, columns)
            logits, values = agent(rows["obs"])
            *_, next_values = agent(rows["next_obs"])
            log_prob, _ = categorical_log_prob(rows["actions"], logits, nvec)
            advantages = gae(rows["rewards"], values, next_values, rows["terminated"], rows["done"])
            targets = advantages + values
            rows |= {"log_prob": log_prob, "values": values, "advantages": advantages, "targets": targets}
            batch.copy_(torch.cat([rows[name] for name in batch_columns], dim=2).view(batch_size, -1))
            unexplained = (targets - values).var(correction=0)
            record(explained_variance=1 - unexplained / targets.var(correction=0).clamp(min=1e-8))

    def update(indices: Tensor) -> None:
        """One gradient step on the rows `indices` of the batch, (minibatch_size,)."""
        rows = split(batch.index_select(0, indices), batch_columns)
        advantages = rows["advantages"]
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        logits, values = flat_agent(rows["obs"])  # [fast: flat]
        log_prob, entropy = categorical_log_prob(rows["actions"], logits, nvec)
        log_ratio = log_prob - rows["log_prob"]
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_losses = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)  # PPO, equation 7
        policy_loss = policy_losses.mean()
        value_errors = (values - rows["targets"]).square()
        if args.clip_vloss:
            change = (values - rows["values"]).clamp(-args.clip_coef, args.clip_coef)
            value_errors = torch.maximum(value_errors, (rows["values"] + change - rows["targets"]).square())
        value_loss = 0.5 * value_errors.mean()
        entropy = entropy.mean()
        loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss  # PPO, equation 9
        optimizer.minimize(loss)  # [fast: flat]

        log_ratio, ratio = log_ratio.detach(), ratio.detach()
        record(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        # k1 and k3 of Schulman, "Approximating KL Divergence" (2020), and the share of clipped ratios.
        record(old_approx_kl=-log_ratio.mean(), approx_kl=(ratio - 1 - log_ratio).mean())
        record(clipfrac=((ratio - 1).abs() > args.clip_coef).float().mean())

    def learn() -> int:
        """All gradient steps on the batch; returns how many."""
        steps = 0
        for _ in range(args.update_epochs):
            for indices in torch.randperm(batch_size, device=device).chunk(args.num_minibatches):
                update(indices)
                steps += 1
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:  # sync, once an epoch
                break
        return steps

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
        agent.load_state_dict(checkpoint["agent"])
        eval_returns = evaluate(args, agent, best_actions, folder / f"videos/{time.time():.0f}")
        print(json.dumps(asdict(args) | {"eval_returns": eval_returns}))
        sys.exit()

    # [fast: one graph] Policy, preparation of the batch, gradient step.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes seconds
        act, prepare, update = map(Compiled, (act, prepare, update))
    # [fast: graph capture] One launch for all kernels of a call.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    if cudagraphs:
        act, prepare, update = map(partial(CudaGraphModule, warmup=5, device=device), (act, prepare, update))
    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back.
    if args.compile or cudagraphs:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        for _ in range(6 if cudagraphs else 1):  # captured: four warm up, one records, one replays
            if not act_in_numpy:
                torch_policy(np.zeros((args.num_envs, obs_dim), np.float32))
            prepare()
            update(torch.arange(batch_size // args.num_minibatches, device=device))
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
            annealed_lr.fill_(learning_rate)  # [fast: numbers as tensors]
            if act_in_numpy:  # [fast: acting in NumPy] sync: the weights, the same for a whole rollout
                layers = [[p.cpu().numpy() for p in layer.parameters()] for layer in agent.actor]
            # With Gumbel's noise on the logits the highest one is a draw from their softmax (Gumbel, 1954).
            noise = -torch.empty(args.num_steps, args.num_envs, sum(nvec)).exponential_().log().numpy()
            for step in range(args.num_steps):
                choices = choose(policy(obs) + noise[step])
                next_obs, rewards, terminated, truncated, infos = envs.step(to_actions(choices))
                done, final_obs = terminated | truncated, next_obs.copy()
                global_step += args.num_envs
                episode_return += rewards
                episode_length += 1
                for index in np.flatnonzero(done):
                    final_obs[index] = infos["final_obs"][index]
                    log_episode(index)
                store(obs, choices, rewards, terminated, done, final_obs)
                obs = next_obs.astype(np.float32)

            buffer.copy_(torch.from_numpy(rollout), non_blocking=True)  # log_losses waits for it
            prepare()
            updates += learn()

            last = bool(stopping) or global_step + batch_size > args.total_timesteps
            log_losses()
            sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
            writer.add_scalar("charts/SPS", sps, global_step)
            writer.add_scalar("charts/learning_rate", learning_rate, global_step)
            bar.set_postfix_str(f"SPS {sps:.0f}, return {np.mean(returns[-10:] or math.nan):.1f}")
            bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                progress = [global_step, updates, returns]
                save_checkpoint(folder / "checkpoint.pt", args, state, progress=progress)
            if not stopping and (due(args.eval_every) or (last and args.capture_video)):
                pause = time.perf_counter()
                eval_returns = evaluate(args, agent, best_actions, folder / f"videos/{global_step}")
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
