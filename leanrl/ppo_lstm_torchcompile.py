# LeanRL 0.2.0
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium[classic-control]>=1.4,<1.5", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3", "filelock>=3.16",
#     "envpool>=1.2.5,<2",
# ]
# ///
"""PPO with an LSTM for discrete actions: the twin that compiles and captures.

Papers: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017); Huang et al.,
        "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track (2022).
        Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9 (1997).
Run:    python ppo_lstm_torchcompile.py --env-id CartPole-v1 --compile --cudagraphs
Twin:   ppo_lstm.py, eager, computes the same, up to rounding. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] policy, preparation of the batch, gradient step: each is compiled without a break;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and Adam a few operations on it in that graph;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches each of these at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: side by side] the two LSTMs, of policy and value, take each step together;
- [fast: recurrence as one operation] the LSTM's steps, and their gradients, are one node of the graph;
- [fast: scan by doubling] advantages take log2(T) operations in place of T.

Deviations from the papers:
- a truncated episode bootstraps from the value of its final observation, with the memory of that episode;
- policy and value have a memory each, which is forgotten where an episode begins.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
import tyro
from filelock import FileLock, Timeout
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._inductor.output_code import CompiledFxGraph
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- Arguments ---------------------------------------------------------------------------------------------
Fraction = Annotated[float, Field(ge=0, le=1)]
JSON = tyro.conf.arg(constructor=json.loads, metavar="JSON")
FIXED = ("env_id", "obs_keys", "seed", "num_envs")  # --resume may not change these


@dataclass
class Args:
    __pydantic_config__: ClassVar = {"allow_inf_nan": False}
    exp_name: str = Path(__file__).stem  # the name of this experiment
    seed: NonNegativeInt = 1  # seed of the experiment
    cuda: bool = True  # use a CUDA device if there is one
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"  # of networks; bfloat16 is for AMX and GPUs
    torch_deterministic: bool = False  # only deterministic algorithms: a seed repeats its run on a GPU, too
    track: bool = False  # also send the logs to Weights & Biases
    wandb_project_name: str = "leanrl"  # the project of the Weights & Biases run
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases run
    capture_video: bool = False  # record videos of the first environment under runs/<run>/videos
    save_model: bool = False  # write a checkpoint at the end
    checkpoint_every: PositiveInt | None = None  # agent steps between checkpoints; the newest two are kept
    resume: str | None = None  # go on with the run of this checkpoint, or of the newest in this folder
    evaluate: str | None = None  # do not train, evaluate this checkpoint, or the newest in this folder
    eval_episodes: PositiveInt | None = None  # episodes of an evaluation, else 10; if given, one ends the run
    eval_every: PositiveInt | None = None  # agent steps between evaluations; best.pt is the best agent
    compile: bool = False  # compile the policy, the preparation of the batch and the gradient step
    cudagraphs: bool = False  # capture the policy, the preparation of the batch and the gradient step

    env_id: str = "CartPole-v1"  # the id of the environment: any with discrete actions
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # arguments for gym.make or EnvPool
    obs_keys: tuple[str, ...] | None = None  # the parts of an observation that the agent sees, else all
    total_timesteps: PositiveInt = 500_000  # agent steps in all; a rollout beyond them is left out
    learning_rate: NonNegativeFloat = 2.5e-4  # the learning rate at the start
    num_envs: PositiveInt = 8  # the number of parallel environments
    env_backend: Literal["gymnasium", "envpool"] = "gymnasium"  # what steps the environments
    env_threads: NonNegativeInt = 0  # the number of EnvPool's threads; 0: one for each core
    num_steps: PositiveInt = 128  # the steps of each environment in a rollout
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: Fraction = 0.99  # the discount factor
    gae_lambda: Fraction = 0.95  # lambda of the generalised advantage estimate
    num_minibatches: PositiveInt = 4  # the number of minibatches, of whole environments, of a rollout
    update_epochs: PositiveInt = 4  # how often a rollout is learnt from
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: NonNegativeFloat = 0.2  # the bound on the ratio of probabilities, as a distance from 1
    clip_vloss: bool = True  # clip the value loss, too
    ent_coef: NonNegativeFloat = 0.01  # the weight of the entropy
    vf_coef: NonNegativeFloat = 0.5  # the weight of the value loss
    max_grad_norm: NonNegativeFloat = 0.5  # the norm that gradients are clipped to
    target_kl: NonNegativeFloat | None = None  # an epoch with a larger KL is the last one of its rollout


# ---- Environment -------------------------------------------------------------------------------------------
DISCRETE = gym.spaces.Discrete, gym.spaces.MultiDiscrete


class Episodes(gym.Wrapper):
    """An environment with `keep`: 0 where the latest observation is the first of an episode, else 1."""

    def reset(self, **options) -> tuple:
        self.keep = 0.0
        return self.env.reset(**options)

    def step(self, action: np.ndarray) -> tuple:
        self.keep = 1.0
        return self.env.step(action)


def make_env(args: Args, videos: Path | None = None) -> gym.Env:
    """Build an environment with flat observations, filmed into the folder `videos`."""
    if args.env_backend == "envpool":
        env = Pool(args, [], filmed=videos is not None)
    else:
        env = make(args, videos)
        try:
            env = gym.wrappers.FilterObservation(env, args.obs_keys) if args.obs_keys else env
        except (TypeError, ValueError) as error:
            refuse(f"--obs-keys: {error}")
        if not env.observation_space.is_np_flattenable:
            refuse(f"--env-id takes observations that can be flattened, not {env.observation_space}")
        env = gym.wrappers.FlattenObservation(env)
    if not isinstance(env.action_space, DISCRETE):
        refuse(f"--env-id takes discrete actions, not {env.action_space}")
    return Episodes(film(args, env, videos))


def make_envs(args: Args, seeds: list[int], videos: Path | None) -> gym.Env | SyncVectorEnv:
    """Build all environments; the step that ends an episode also resets its environment (SAME_STEP)."""
    if args.env_backend == "gymnasium":
        env_fns = [partial(make_env, args, videos if index == 0 else None) for index in range(args.num_envs)]
        return Envs(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    if videos:
        make_env(args, videos).close()  # refuses what does not render before all else
        print("--capture-video: of EnvPool's environments only evaluation is filmed", file=sys.stderr)
    envs = SameStep(args, seeds)
    envs.single_action_space = envs.action_space
    if not isinstance(envs.action_space, DISCRETE):
        refuse(f"--env-id takes discrete actions, not {envs.action_space}")
    return envs


# ---- Networks ----------------------------------------------------------------------------------------------
class Agent(nn.Module):
    """Policy and value: (T, n, obs_dim) to logits (T, n, num_logits) and value (T, n, 1).

    For `keep` and `memory` see `LSTM`. There are two memories, (2, n, ...), of the policy and of the value;
    those after the last step are returned, too.
    """

    def __init__(self, obs_dim: int, num_logits: int, device: torch.device):
        super().__init__()
        self.critic = Recurrent(obs_dim, 1, device, std=1.0)
        self.actor = Recurrent(obs_dim, num_logits, device, std=0.01)

    def forward(self, obs: Tensor, keep: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, actor_memory = self.actor(obs, keep, memory[0])
        value, critic_memory = self.critic(obs, keep, memory[1])
        return logits, value, torch.stack([actor_memory, critic_memory])


class Recurrent(nn.Module):
    """A network with a memory: (T, n, obs_dim) to (T, n, out_dim), and its memory after the last step."""

    def __init__(self, obs_dim: int, out_dim: int, device: torch.device, std: float):
        super().__init__()
        self.features = nn.Sequential(layer_init(nn.Linear(obs_dim, 64, device=device)), nn.Tanh())
        self.lstm = LSTM(64, 64, device)
        self.output = layer_init(nn.Linear(64, out_dim, device=device), std=std)

    def forward(self, obs: Tensor, keep: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        hidden, memory = self.lstm(self.features(obs), keep, memory)
        return self.output(hidden).float(), memory


class LSTM(nn.Module):
    """One layer, as `nn.LSTM`, with one bias and a memory that ends where an episode begins."""

    def __init__(self, input_dim: int, hidden_dim: int, device: torch.device):
        super().__init__()
        self.memory_dim = 2 * hidden_dim
        self.input = layer_init(nn.Linear(input_dim, 4 * hidden_dim, device=device), std=1.0)
        self.recurrent = layer_init(nn.Linear(hidden_dim, 4 * hidden_dim, False, device=device), std=1.0)

    def forward(self, x: Tensor, keep: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states, (T, n, hidden_dim), after each of the inputs x, (T, n, input_dim).

        memory: hidden and cell state before the first step, (n, 2 * hidden_dim); after the last one it is
        returned, too. keep: (T, n, 1), 0 where a step is the first of an episode, else 1.
        """
        weights = self.input.weight, self.recurrent.weight, self.input.bias
        return recurrence(x.float(), keep, memory, *weights)


def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Initialise a layer in place: orthogonal weights with gain `std`, no bias. Returns the layer."""
    nn.init.orthogonal_(layer.weight, std)
    if layer.bias is not None:
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


# [fast: recurrence as one operation] Step by step it compiles for minutes; docs/log.md has the times.
def lstm(gates: Tensor, keep: Tensor, memory: Tensor, weight: Tensor) -> list[Tensor]:
    """Hidden states, (T, k, n, h), and last cell state, by the inputs' share of the gates, (T, k, n, 4h).

    Of k LSTMs side by side (Greff et al., arXiv:1503.04069, II-A). Also all cell states, and the gates.
    """
    (hidden, cell), width = memory.chunk(2, dim=-1), weight.shape[-1]
    gates = gates.clone(memory_format=torch.contiguous_format)
    hiddens = gates.new_empty(*gates.shape[:-1], width)
    cells = torch.empty_like(hiddens)
    for t in range(len(gates)):
        gate = gates[t].baddbmm_(hidden * keep[t], weight.mT)  # in place: in float32 under autocast, too
        gate[..., : 2 * width].sigmoid_()
        i, f, g, o = gate.chunk(4, dim=-1)
        cell = torch.mul(f, cell * keep[t], out=cells[t]).addcmul_(i, g.tanh_())
        hidden = torch.mul(o.sigmoid_(), cell.tanh(), out=hiddens[t])
    return [hiddens, cell.clone(), cells, gates]


def lstm_shapes(gates: Tensor, keep: Tensor, memory: Tensor, weight: Tensor) -> list[Tensor]:
    hiddens = gates.new_empty(*gates.shape[:-1], weight.shape[-1])
    return [hiddens, torch.empty_like(hiddens[0]), torch.empty_like(hiddens), gates.new_empty(gates.shape)]


def lstm_backward(grads: list[Tensor], saved: list[Tensor]) -> list[Tensor]:
    """Gradients by the gates before their nonlinearities, `memory` and `weight` (Greff et al., II-B)."""
    (by_hiddens, by_cell), (keep, memory, weight, hiddens, _, cells, gates) = grads, saved
    with torch.autocast(gates.device.type, enabled=False):
        i, f, g, o = gates.chunk(4, dim=-1)
        before = torch.cat([memory[None], torch.cat([hiddens, cells], dim=-1)[:-1]]) * keep[:, None]
        last_hiddens, last_cells = before.chunk(2, dim=-1)
        # What does not depend on later steps, for all steps at once.
        tanh, forget = cells.tanh(), f * keep[:, None]
        slopes = [i * (1 - i) * g, f * (1 - f) * last_cells, (1 - g * g) * i, o * (1 - o) * tanh]
        slopes, slope = torch.cat(slopes, dim=-1), o * (1 - tanh * tanh)
        by_gates, by_hidden = torch.empty_like(slopes), by_hiddens[-1]
        by_earlier = torch.cat([torch.zeros_like(by_hiddens[:1]), by_hiddens[:-1]])
        for t in reversed(range(len(cells))):
            by_cell = torch.addcmul(by_cell, by_hidden, slope[t])
            parts = torch.cat([by_cell, by_cell, by_cell, by_hidden], dim=-1)
            by_gate = torch.mul(slopes[t], parts, out=by_gates[t])
            by_hidden, by_cell = torch.addcmul(by_earlier[t], by_gate @ weight, keep[t]), by_cell * forget[t]
        by_memory = torch.cat([by_hidden, by_cell], dim=-1)
        return [by_gates, by_memory, torch.einsum("tkng,tknh->kgh", by_gates, last_hiddens)]


def lstm_backward_shapes(grads: list[Tensor], saved: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (saved[-1], *saved[1:3])]


def lstm_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    by_gates, by_memory, by_weight = torch.ops.leanrl.lstm_backward([*grads[:2]], [*ctx.saved_tensors])
    return by_gates, None, by_memory, by_weight


def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[1:], *output)


# Once a process: a second copy that registered them anew would free what the first still calls.
if not hasattr(torch.ops.leanrl, "lstm"):
    operation = torch.library.custom_op("leanrl::lstm", lstm, mutates_args=())
    operation.register_fake(lstm_shapes)
    operation.register_autograd(lstm_gradients, setup_context=save)
    operation = torch.library.custom_op("leanrl::lstm_backward", lstm_backward, mutates_args=())
    operation.register_fake(lstm_backward_shapes)


def recurrence(
    x: Tensor, keep: Tensor, memory: Tensor, by_input: Tensor, by_hidden: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states, (T, n, h), and last memory, (n, 2h), by the weights of `LSTM`."""
    if memory.dim() == 2:
        each = (own[None] for own in (memory, by_input, by_hidden, bias))
        hiddens, memory = recurrence(x[:, None], keep, *each)
        return hiddens[:, 0], memory[0]
    # [fast: recurrence as one operation] Of k LSTMs: x is (T, k, n, i), memory and weights begin with k.
    gates = torch.einsum("tkni,kgi->tkng", x, by_input) + bias[:, None]
    hiddens, cell, *_ = torch.ops.leanrl.lstm(gates, keep, memory, by_hidden)
    return hiddens, torch.cat([hiddens[-1], cell], dim=-1)


# [fast: side by side] Both LSTMs in one product a step: 9.6 ms for 128 steps and gradients, not 14.6.
class SideBySide(Agent):
    """An agent whose LSTMs take each step together, with the layers of `Recurrent`: change both."""

    def forward(self, obs: Tensor, keep: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        x = torch.stack([self.actor.features(obs), self.critic.features(obs)], dim=1)
        lstms = self.actor.lstm, self.critic.lstm
        weights = [[lstm.input.weight, lstm.recurrent.weight, lstm.input.bias] for lstm in lstms]
        hidden, memory = recurrence(x.float(), keep, memory, *map(torch.stack, zip(*weights, strict=True)))
        logits, value = self.actor.output(hidden[:, 0]), self.critic.output(hidden[:, 1])
        return logits.float(), value.float(), memory


# [fast: flat] Adam and the clipping of gradients are few operations each.
class Flat(nn.Module):
    """A network that computes with one flat tensor, `params`, of which its own parameters become views."""

    def __init__(self, network: nn.Module):
        super().__init__()
        # Sizes that 16 divides come first and keep the next aligned. A list hides the network from nn.Module.
        named = sorted(network.named_parameters(), key=lambda item: item[1].numel() % 16 != 0)
        self.network, self.shapes = [network], {name: param.shape for name, param in named}
        if any(hasattr(param, "flat") for _, param in named):
            raise ValueError("a parameter is in another Flat already")
        flat = nn.utils.parameters_to_vector(param for _, param in named).detach()
        self.frozen = {name for name, param in named if not param.requires_grad}
        self.params = nn.Parameter(flat, requires_grad=any(param.requires_grad for _, param in named))
        nn.utils.vector_to_parameters(flat, [param.requires_grad_(False) for _, param in named])
        for _, param in named:
            param.flat = True

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        parts = self.params.split([shape.numel() for shape in self.shapes.values()])
        views = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}
        views |= {name: views[name].detach() for name in self.frozen}
        return torch.func.functional_call(self.network[0], views, inputs)


class Adam(nn.Module):
    """`torch.optim.AdamW` of one tensor (arXiv:1711.05101), Adam without decay, with the gradient clipped."""

    def __init__(self, params: Tensor, lr: float | Tensor, eps=1e-8, max_norm=math.inf, decay=0.0):
        super().__init__()
        self.params, self.lr, self.eps, self.max_norm, self.decay = [params], lr, eps, max_norm, decay
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
            # Stacked, or a CPU would compute them anew for each few parameters: 25 us for 11,000, not 102.
            correction, step_size, *clip = torch.stack(numbers).unbind()
            grad = grad * clip[0] if clip else grad
            exp_avg = self.exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq = self.exp_avg_sq.lerp_(grad * grad, 1 - beta2)
            denominator = exp_avg_sq.sqrt() / correction + self.eps
            if self.decay:
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
        self.calls, self.next_look, self.likeness, self.graph, self.inputs = 0, 1, None, None, []

    def __call__(self, *args: Tensor) -> Tensor | None:
        self.calls += 1
        likeness = [(arg.dtype, arg.device, arg.shape, arg.stride()) for arg in args]
        if self.calls == self.next_look or likeness != self.likeness:
            return self.look(likeness, args)
        for place, arg in zip(self.places, args, strict=True):
            self.inputs[place] = arg
        results = self.graph([*self.inputs])
        return results[0] if results else None

    def look(self, likeness: list[tuple], args: tuple[Tensor, ...]) -> Tensor | None:
        """Call it with the guards of `torch.compile`; note Inductor's graph and the tensors that it takes."""
        self.next_look = self.calls + min(self.calls // 2 + 1, 997)  # odd and even calls, for what alternates
        call, notes = CompiledFxGraph.__call__, []

        def note(graph: CompiledFxGraph, inputs: list[Tensor]) -> list[Tensor]:
            ids, tensors = [id(tensor) for tensor in inputs], [tensor.detach() for tensor in inputs]
            notes.append((graph, ids, tensors, call(graph, inputs)))
            return notes[-1][-1]

        stance = torch.compiler.set_stance("fail_on_recompile" if self.graph else "default")
        with stance, patch.object(CompiledFxGraph, "__call__", note):
            result = self.guarded(*args)
        if len(notes) != 1:  # another backend: each call is guarded
            return result
        [(graph, ids, inputs, results)] = notes
        if self.graph not in (None, graph) or any(ids.count(id(arg)) != 1 for arg in args):
            raise RuntimeError("the function was compiled anew, or does not use each of its arguments")
        self.places = [ids.index(id(arg)) for arg in args]
        for place, tensor in enumerate(self.inputs):
            if place not in self.places and tensor.data_ptr() != inputs[place].data_ptr():
                raise RuntimeError(f"a tensor of shape {[*tensor.shape]} was replaced: write to it in place")
        if len(results) != (result is not None) or any(tensor.requires_grad for tensor in results):
            raise TypeError("a compiled function returns one tensor without history, or none")
        self.graph, self.inputs, self.likeness = graph, inputs, likeness
        return result


# ---- Run: command line, checkpoints, signals, evaluation ---------------------------------------------------
def refuse(message: str) -> NoReturn:
    """Say in one line on standard error what is wrong with the arguments, and exit with status 2."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def command_line() -> list[str]:
    """What was typed, with `--flag=False` and `--flag False` as `--no-flag`, and integers as 1e6 in full."""
    typed, words = [], []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        typed += [option, value] if equals and option.startswith("--") else [word]
    for word in typed:
        kind = Args.__annotations__.get(words[-1][2:].replace("-", "_") if words else "")
        if kind is bool and word in ("False", "false"):
            words[-1] = f"--no-{words[-1][2:]}"
        elif not (kind is bool and word in ("True", "true")):
            whole = "int" in str(kind) and re.fullmatch(r"\d+\.?\d*[eE]\+?\d+", word) and float(word) % 1 == 0
            words.append(f"{float(word):.0f}" if whole else word)
    return words


def parse_args() -> tuple[Args, dict]:
    """The arguments, and the checkpoint that gives --resume its defaults, and --evaluate its environment."""
    args, checkpoint, saved = tyro.cli(Args, args=command_line()), {}, {}
    if args.resume and args.evaluate:
        refuse("--resume and --evaluate exclude each other")
    if args.resume or args.evaluate:
        checkpoint = load_checkpoint(args)
        of_env = {"env_id", "env_kwargs", "env_backend", "obs_keys", "actor_hidden_dim"}
        kept = vars(args).keys() & of_env if args.evaluate else vars(args).keys()
        saved = {name: checkpoint["args"][name] for name in sorted(kept & checkpoint["args"].keys())}
        args = tyro.cli(Args, args=command_line(), default=Args(**saved))  # again, over these
    try:
        TypeAdapter(Args).validate_python(vars(args))
    except ValidationError as invalid:
        error = invalid.errors()[0]
        refuse(f"--{error['loc'][0].replace('_', '-')}: {error['msg']}, got {error['input']}")
    for name, value in saved.items():
        option, now = f"--{name.replace('_', '-')}", getattr(args, name)
        if now != value and name in FIXED:
            refuse(f"{option} has to stay {value}, as in {checkpoint['file']}, got {now}")
        if now != value and name != "resume":
            print(f"{option} {now}{' from here on' if args.resume else ''}, it was {value}", file=sys.stderr)
    return args, checkpoint


def read(file: Path) -> dict:
    """The content of a checkpoint, of which nothing is executed; of another file, the error."""
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # torch.load raises what it likes
        return {"error": str(error).split("Unpickler error: ")[-1][:300]}


def load_checkpoint(args: Args) -> dict:
    """Read the checkpoint to resume or evaluate, of a folder the newest."""
    path = Path(args.resume or args.evaluate)
    in_folder = path.glob("[0-9]*.pt" if args.resume else "*.pt")  # none if it is a file itself
    file = max(in_folder, key=lambda file: file.stat().st_mtime_ns, default=path).resolve()
    script = (checkpoint := read(file)).get("script")
    if not script:
        refuse(f"{file} is not a checkpoint or a folder with one: {checkpoint.get('error', 'no script')}")
    if args.resume and (script != Path(__file__).stem or not file.stem.isdecimal()):
        refuse(f"--resume takes a numbered checkpoint of this script, not {file} of {script}.py")
    print(f"{'Going on from' if args.resume else 'Evaluating'} {file}", file=sys.stderr)
    return checkpoint | {"file": file}


def save_checkpoint(args: Args, writer: SummaryWriter, name: str, state: dict, progress: dict, **more):
    """Write a checkpoint into the run's folder, whole or not at all; of numbered ones the newest two stay."""
    writer.flush()  # so that the curves of a run that is killed have no gap
    folder, checkpoint = Path(writer.log_dir), {key: item.state_dict() for key, item in state.items()}
    checkpoint |= {"script": Path(__file__).stem, "args": asdict(args), "progress": progress, **more}
    torch.save(checkpoint, folder / "checkpoint.new")
    (folder / "checkpoint.new").replace(folder / name)
    for outdated in sorted(folder.glob("[0-9]*.pt"), key=lambda file: file.stat().st_mtime_ns)[:-2]:
        outdated.unlink()


def load_states(state: dict, checkpoint: dict) -> None:
    """Give modules and optimizers their states back; settings of an optimizer are those of the arguments."""
    for name, item in state.items():
        if name not in checkpoint:
            refuse(f"{checkpoint['file']} of {checkpoint['script']}.py has no {name}")
        settings = {key: value for key, value in item.state_dict().items() if key == "param_groups"}
        try:
            item.load_state_dict(checkpoint[name] | settings)
        except (RuntimeError, ValueError) as error:  # of other sizes
            refuse(f"{checkpoint['file']} of {checkpoint['script']}.py does not fit: {str(error)[:300]}")


def take_up(args: Args, checkpoint: dict, progress: dict) -> None:
    """Make a checkpoint the newest of its run, and forget a best agent that is later or of another task."""
    os.utime(checkpoint["file"])  # the newest from here on
    best = checkpoint["file"].with_name("best.pt")
    if read(best).get("progress", progress)["global_step"] > progress["global_step"]:
        best.unlink()
    if not best.exists() or args.env_kwargs != checkpoint["args"].get("env_kwargs", {}):
        progress["best_eval"] = -math.inf


def stop_on_signals() -> list[int]:
    """The list to which Ctrl+C and what Slurm sends add their numbers; the same one again ends at once."""
    received = []

    def note(number: int, _) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    for name in {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"} & {*dir(signal)}:  # not all on Windows
        number = getattr(signal, name)
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, note)
    return received


def evaluate(args: Args, env: gym.Env, network: nn.Module, policy: Callable, stopping: list[int]) -> tuple:
    """Play whole episodes with a policy from an observation to an action: their returns and last infos.

    The network is in evaluation mode meanwhile, as dropout and batch normalisation ask for.
    """
    returns, infos = [], []
    network.eval()
    seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes or 10)
    bar = tqdm(total=len(seeds), desc="evaluation", unit="episode", leave=not args.eval_every, miniters=0)
    for seed in seeds.tolist():
        (obs, info), over, steps, score = env.reset(seed=seed), False, 0, 0.0
        while not over and not stopping:
            obs, reward, terminated, truncated, info = env.step(policy(obs))
            over, steps, score = np.any(terminated | truncated), steps + 1, score + np.sum(reward).item()
            bar.postfix = f"step {steps}, return {score:.1f}"
            bar.update(0)
        bar.update(int(over))
        returns += [score] if over else []
        infos += [info.get(0, info)] if over else []  # of an environment of EnvPool's that is alone
    bar.close()
    env.close()
    network.train()
    return returns, infos


# ---- Backends: gym.make and EnvPool ------------------------------------------------------------------------
def make(args: Args, videos: Path | None) -> gym.Env:
    """What `gym.make` gives; errors of an environment of the user's own keep their traceback."""
    try:
        return gym.make(args.env_id, **args.env_kwargs, **({"render_mode": "rgb_array"} if videos else {}))
    except gym.error.Error as error:  # such as of an id that there is not
        refuse(f"--env-id {args.env_id}: {error}")
    except Exception as error:
        unloaded = "MUJOCO_GL" in os.environ and "mujoco" not in sys.modules  # whose import asks for it
        unloaded &= "mujoco" in str(gym.registry.get(args.env_id))
        module, colon, _ = args.env_id.partition(":")
        missing = getattr(error.__cause__, "name", None)  # what gym.make could not import
        ours = unloaded or args.env_kwargs or isinstance(error, ImportError | TypeError)
        ours = f"{module}.".startswith(f"{missing}.") if colon else ours
        if not (ours or (videos and "render_mode" in str(error))):
            raise
        refuse(f"--env-id {args.env_id}: {error}{'; unset MUJOCO_GL or install that library' * unloaded}")


def film(args: Args, env: gym.Env, videos: Path | None) -> gym.Env:
    """Have an environment filmed into the folder `videos`; refuses one that does not render."""
    if not videos:
        return env
    try:
        env.reset()
        assert env.render() is not None, "no image"
    except Exception as error:  # of whatever draws
        undecided = "OpenGL" in str(error) and sys.platform == "linux" and "MUJOCO_GL" not in os.environ
        remedy = "; without a display set MUJOCO_GL=egl" * undecided
        refuse(f"--capture-video: {args.env_id} does not render: {type(error).__name__}: {error}{remedy}")
    return gym.wrappers.RecordVideo(env, str(videos), disable_logger=True)


class Envs(SyncVectorEnv):
    """Environments stepped in turn, with infos by index: to merge them takes 10 of the 74 us of a step."""

    def _add_info(self, vector_infos: dict, env_info: dict, env_num: int) -> dict:
        vector_infos.setdefault(env_num, {}).update(env_info)
        return vector_infos


class Pool(gym.Wrapper):
    """EnvPool's environments, with vectors as observations: of named parts by the order of their names.

    Without seeds, one to evaluate in, without the axis in front. EnvPool takes seeds of 31 bits.
    """

    def __init__(self, args: Args, seeds: list[int], filmed: bool = False):
        self.alone = not seeds
        seeds = seeds or np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(1).tolist()
        try:
            import envpool
        except ImportError:
            refuse("--env-backend envpool needs the package envpool: requirements/envpool.txt")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        kwargs = {"num_envs": len(seeds), "batch_size": len(seeds), "seed": [seed >> 1 for seed in seeds]}
        kwargs |= {"num_threads": min(args.env_threads or cores, len(seeds))}
        kwargs |= {"render_mode": "rgb_array" if filmed else None}
        try:  # a key that is in both is a TypeError
            super().__init__(envpool.make(args.env_id, "gymnasium", **kwargs, **args.env_kwargs))
        except Exception as error:  # of the id, an argument or what the environment needs
            refuse(f"--env-id {args.env_id}: {str(error)[:200]}")
        if self.env.config.get("max_num_players", 1) > 1:
            refuse(f"--env-id {args.env_id}: more than one player")
        space = self.env.observation_space
        self.keys = sorted({*(args.obs_keys or space)}) if isinstance(space, gym.spaces.Dict) else None
        parts = {key: space.spaces.get(key) for key in self.keys} if self.keys else {"": space}
        boxes = all(isinstance(part, gym.spaces.Box | gym.spaces.MultiBinary) for part in parts.values())
        if not boxes or (args.obs_keys and not self.keys):
            refuse(f"--env-id and --obs-keys take boxes as observations, of {space}")
        self.observation_space = gym.spaces.flatten_space(gym.spaces.Dict(parts))

    def vectors(self, obs: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        """Observations as they come from EnvPool, of n environments, as (n, obs_dim), or of one."""
        parts = [obs[key] for key in self.keys] if self.keys else [obs]
        vectors = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        return vectors[0] if self.alone else vectors

    def reset(self, **_) -> tuple[np.ndarray, dict]:
        return self.vectors(self.env.reset()[0]), {}

    def step(self, actions: np.ndarray) -> tuple:
        actions = np.asarray(actions)[None] if self.alone else actions
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        infos = {index: {"is_success": success} for index, success in enumerate(info.get("is_success", ()))}
        return self.vectors(obs), rewards, terminated, truncated, infos

    def render(self) -> np.ndarray:
        return self.env.render(env_ids=[0])[0]


class SameStep(Pool):
    """A pool of which the step that ends an episode also resets its environment; infos are Gymnasium's."""

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        over = np.flatnonzero(terminated | truncated)
        infos = {index: {"final_obs": obs[index], "final_info": infos.get(index, {})} for index in over}
        if len(over):
            obs = obs.copy()
            obs[over] = self.vectors(self.env.reset(over)[0])
        return obs, rewards, terminated, truncated, infos


if __name__ == "__main__":
    # ---- Setup ---------------------------------------------------------------------------------------------
    args, checkpoint = parse_args()
    batch_size = args.num_envs * args.num_steps
    if not args.evaluate and args.num_envs % args.num_minibatches:
        refuse(f"--num-minibatches takes a divisor of --num-envs {args.num_envs}, got {args.num_minibatches}")
    if not args.evaluate and batch_size == args.num_minibatches:
        refuse("--num-steps has to be at least 2 where a minibatch is one environment, got 1")
    if not args.evaluate and args.total_timesteps < batch_size:
        refuse(f"--total-timesteps has to hold a rollout of {batch_size}, got {args.total_timesteps}")
    total_steps = args.total_timesteps // batch_size * batch_size  # of whole rollouts
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.cuda and device.type == "cpu":
        print("CUDA is not available: running on the CPU", file=sys.stderr)
    if args.torch_deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for cuBLAS, read at its first use
        torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal, at which a CPU is slow
    torch.set_num_threads(1)  # small networks; EnvPool has threads of its own
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.set_autocast_dtype(device.type, torch.bfloat16)
    torch.set_autocast_enabled(device.type, args.precision == "bfloat16")
    torch.set_autocast_cache_enabled(False)  # it would keep the first weights for good
    # As PyTorch's products, and the twin's LSTM; cuDNN's default is TF32.
    if device.type == "cuda":  # no effect elsewhere, and `torch.export` asks that convolutions have the same
        torch.backends.cudnn.rnn.fp32_precision = "tf32" if args.precision == "tf32" else "ieee"
    torch.manual_seed(args.seed)

    progress = {"global_step": 0, "updates": 0, "returns": [], "successes": []}
    progress |= {"last_eval": 0, "best_eval": -math.inf} | (checkpoint["progress"] if args.resume else {})
    global_step, updates = progress["global_step"], progress["updates"]
    returns, successes = progress["returns"], progress["successes"]  # not copies: checkpoints have them

    name = re.sub(r"[^\w.=-]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.6f}")
    folder = checkpoint["file"].parent if args.resume else Path("runs", name)
    videos = folder / f"videos/from_step_{global_step}" if args.capture_video and not args.evaluate else None
    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    *env_seeds, seed = sequence.generate_state(args.num_envs + 1).tolist()
    envs = make_envs(args, env_seeds, videos)
    obs_dim, action_space = envs.observation_space.shape[-1], envs.single_action_space
    # The sizes of the choices that make an action: one for Discrete, several for MultiDiscrete.
    several = isinstance(action_space, gym.spaces.MultiDiscrete)
    nvec = np.ravel(action_space.nvec if several else action_space.n).tolist()
    first_action, action_dim = np.ravel(action_space.start), len(nvec)
    score_parts = [slice(sum(nvec[:i]), sum(nvec[: i + 1])) for i in range(action_dim)]  # np.split: 5 us more

    folder.mkdir(parents=True, exist_ok=bool(args.resume or videos))  # a refused run leaves none
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)  # held as long as this name lives
    except Timeout:
        refuse(f"--resume: a run is at work in {folder}")

    agent = SideBySide(obs_dim, sum(nvec), device)  # [fast: side by side]
    flat_agent = Flat(agent)  # [fast: flat]
    annealed_lr = torch.tensor(args.learning_rate, device=device)  # [fast: numbers as tensors]
    optimizer = Adam(flat_agent.params, annealed_lr, eps=1e-5, max_norm=args.max_grad_norm)
    state = {"agent": agent, "optimizer": optimizer}  # what checkpoints hold: add modules and optimizers
    # Columns of a rollout, with a row for each step and one for the last obs, and of the batch made of it.
    columns = {"obs": obs_dim, "actions": action_dim, "rewards": 1, "terminated": 1, "bootstrap": 1}
    columns |= {"keep": 1}  # 0 where obs is the first of an episode
    batch_columns = {"obs": obs_dim, "actions": action_dim, "log_prob": 1, "advantages": 1, "targets": 1}
    batch_columns |= {"values": 1, "keep": 1}
    rollout = torch.zeros(args.num_steps + 1, args.num_envs, sum(columns.values()))
    steps = {name: column.numpy() for name, column in split(rollout, columns).items()}
    rollout_obs, rollout_actions, rollout_keep = steps["obs"], steps["actions"], steps["keep"]
    rollout_rewards, rollout_terminated = steps["rewards"][:, :, 0], steps["terminated"][:, :, 0]
    rollout_bootstrap = steps["bootstrap"]
    buffer = torch.zeros_like(rollout, device=device)
    batch = torch.zeros(args.num_steps, args.num_envs, sum(batch_columns.values()), device=device)
    # Hidden and cell states, of policy and value: now, before the rollout, and the policy's in evaluation.
    memory = torch.zeros(2, args.num_envs, agent.critic.lstm.memory_dim, device=device)
    actor_memory, first_memory, eval_memory = memory[0], memory.clone(), memory[0, :1].clone()
    names = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    names += ["explained_variance"]
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor, keep: Tensor) -> Tensor:
        """The policy's logits (num_envs, sum(nvec)) at obs, on the device; its memory moves on."""
        logits, new_memory = agent.actor(obs[None], keep[None], actor_memory)
        actor_memory.copy_(new_memory)
        return logits[0]

    def policy(obs: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """The policy's logits, (num_envs, sum(nvec)), at obs (num_envs, obs_dim).

        Its memory moves on; where keep, (num_envs, 1), is 0 it starts empty.
        """
        with torch.no_grad():
            obs = torch.from_numpy(obs).to(device, non_blocking=True)
            keep = torch.from_numpy(keep).to(device, non_blocking=True)
            return act(obs, keep).cpu().numpy()  # sync

    def choose(scores: np.ndarray) -> np.ndarray:
        """The choice of the highest score in each part: (n, len(nvec)) of (n, sum(nvec))."""
        return np.stack([scores[:, part].argmax(axis=1) for part in score_parts], axis=1)

    def bootstrap(step: int, cut: np.ndarray, final_obs: np.ndarray) -> np.ndarray:
        """Values (num_envs, 1) of what ended an episode that is `cut`, (num_envs,), in this step; else 0.

        The memory that belongs to them comes from the rollout, taken in once more up to this step.
        """
        values = np.zeros((args.num_envs, 1), np.float32)
        if cut.any():
            obs = np.concatenate([rollout_obs[: step + 1, cut], final_obs[None, cut].astype(np.float32)])
            keep = np.concatenate([rollout_keep[: step + 1, cut], np.ones((1, cut.sum(), 1), np.float32)])
            initial = first_memory.index_select(1, torch.from_numpy(np.flatnonzero(cut)).to(device))
            with torch.no_grad():
                obs, keep = torch.from_numpy(obs).to(device), torch.from_numpy(keep).to(device)
                *_, of_steps, _ = agent(obs, keep, initial)
            values[cut] = of_steps[-1].cpu().numpy()  # sync
        return values

    def best_action(env: Episodes, obs: np.ndarray) -> np.ndarray:
        """The policy's most likely action at one observation, (obs_dim,), the latest one of env."""
        obs = torch.from_numpy(obs[None, None].astype(np.float32)).to(device)
        keep = torch.tensor([[[env.keep]]], device=device)
        with torch.no_grad():
            logits, new_memory = agent.actor(obs, keep, eval_memory)
            eval_memory.copy_(new_memory)
            scores = logits[0].cpu().numpy()
        return (choose(scores)[0] + first_action).reshape(action_space.shape)[()]

    def gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor) -> Tensor:
        """Generalised advantage estimates (Schulman et al., arXiv:1506.02438, equation 16), all (T, n, 1)."""
        advantages = rewards + args.gamma * (1 - terminated) * next_values - values
        discounts = args.gamma * args.gae_lambda * (1 - done)
        # [fast: scan by doubling] After k rounds an estimate holds 2^k terms. For 2048 steps 0.2 ms, not 9.
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
            last_obs, last_keep, done = rows["obs"][-1:], rows["keep"][-1:], 1 - rows["keep"][1:]
            rows = {name: column[:-1] for name, column in rows.items()}
            logits, values, new_memory = agent(rows["obs"], rows["keep"], first_memory)
            memory.copy_(new_memory)  # the policy's is there already, up to rounding
            *_, last_values, _ = agent(last_obs, last_keep, memory)
            next_values = torch.where(done > 0, rows["bootstrap"], torch.cat([values[1:], last_values]))
            log_prob, _ = categorical_log_prob(rows["actions"], logits, nvec)
            advantages = gae(rows["rewards"], values, next_values, rows["terminated"], done)
            targets = advantages + values
            rows |= {"log_prob": log_prob, "values": values, "advantages": advantages, "targets": targets}
            batch.copy_(torch.cat([rows[name] for name in batch_columns], dim=2))
            unexplained = (targets - values).var(correction=0)
            record(explained_variance=1 - unexplained / targets.var(correction=0).clamp(min=1e-8))

    def update(indices: Tensor) -> None:
        """One gradient step on all steps of the environments `indices`, (num_envs / num_minibatches,)."""
        rows = split(batch.index_select(1, indices), batch_columns)
        advantages = rows["advantages"]
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        initial = first_memory.index_select(1, indices)
        logits, values, _ = flat_agent(rows["obs"], rows["keep"], initial)  # [fast: flat]
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
        record(old_approx_kl=-log_ratio.mean())
        record(approx_kl=(ratio - 1 - log_ratio).mean())
        record(clipfrac=((ratio - 1).abs() > args.clip_coef).float().mean())

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        for name, value in values.items():
            losses[name].copy_(value.detach())  # [fast: losses in place]

    def log_losses() -> None:
        """Write the latest losses; one that is not finite ends the run."""
        for name, loss in zip(losses, torch.stack([*losses.values()]).tolist(), strict=True):  # sync
            writer.add_scalar(f"losses/{name}", loss, global_step)
            if not math.isfinite(loss):
                sys.exit(f"{Path(__file__).name}: error: {name} is {loss} at step {global_step}")

    # ---- Training ------------------------------------------------------------------------------------------
    if args.evaluate or args.resume:
        load_states({"agent": agent} if args.evaluate else state, checkpoint)

    # [fast: one graph] Policy, preparation of the batch, gradient step. Measured, on a CPU: 0.82 times eager.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes 5 s
        act, prepare, update = map(Compiled, (act, prepare, update))
    # [fast: graph capture] One launch for all kernels of a call.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    if cudagraphs:
        captured = partial(CudaGraphModule, warmup=5, device=device)
        act, prepare, update = captured(act), captured(prepare), captured(update)
    elif args.cudagraphs:
        print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)
    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back.
    if (args.compile or cudagraphs) and not args.evaluate:
        saved = {name: {k: t.clone() for k, t in item.state_dict().items()} for name, item in state.items()}
        try:
            for _ in range(6 if cudagraphs else 1):  # captured: four warm up, one records, one replays
                policy(rollout_obs[0], rollout_keep[0])
                prepare()
                update(torch.arange(args.num_envs // args.num_minibatches, device=device))
        except InductorError as error:  # no C++ compiler, no Python.h, a space in a path
            if not isinstance(error.inner_exception, CppCompileError | InvalidCxxCompiler):
                raise
            refuse(f"--compile: {str(error.inner_exception)[-300:]}")
        load_states(state, saved)
        memory.zero_()

    torch.manual_seed(seed)
    rollout_obs[-1], _ = envs.reset(seed=env_seeds)  # a rollout begins with it
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)

    last = bool(args.evaluate) or global_step + batch_size > args.total_timesteps
    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "entity": args.wandb_entity, "config": asdict(args)}
        run |= {"id": folder.name[-64:], "name": folder.name, "resume": "allow", "save_code": True}
        wandb.init(**run, sync_tensorboard=True)
    purge_step = global_step + 1 if args.resume and not last else None  # entries of steps done again go
    writer = SummaryWriter(str(folder), purge_step=purge_step)
    table = "\n".join(f"{name}|{value}" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"param|value\n-|-\n{table}")

    if args.resume and not last:
        take_up(args, checkpoint, progress)
    bar = tqdm(total=args.total_timesteps, initial=global_step, unit="step", miniters=1, disable=last)
    stopping = stop_on_signals()
    startup_seconds = time.perf_counter() - START_TIME
    saved_step = global_step
    eval_every, checkpoint_every = args.eval_every or math.inf, args.checkpoint_every or math.inf  # never
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, bar:
        while not last:
            remaining = 1 - global_step / total_steps if args.anneal_lr else 1
            annealed_lr.fill_(args.learning_rate * remaining)  # [fast: numbers as tensors]
            rollout[0] = rollout[-1]
            first_memory.copy_(memory)
            # With Gumbel's noise on the logits the highest one is a draw from their softmax (Gumbel, 1954).
            noise = -torch.empty(args.num_steps, args.num_envs, sum(nvec)).exponential_().log().numpy()
            for step in range(args.num_steps):
                scores = policy(rollout_obs[step], rollout_keep[step]) + noise[step]
                rollout_actions[step] = choices = choose(scores)
                given = (choices + first_action).reshape(args.num_envs, *action_space.shape)
                next_obs, rewards, terminated, truncated, infos = envs.step(given)
                rollout_rewards[step] = rewards
                done, final_obs = terminated | truncated, next_obs.copy()
                global_step += args.num_envs
                episode_return += rewards
                episode_length += 1
                for index in np.flatnonzero(done):
                    final_obs[index], info = infos[index]["final_obs"], infos[index]["final_info"]
                    returns.append(episode_return[index].item())
                    writer.add_scalar("charts/episodic_return", returns[-1], global_step)
                    writer.add_scalar("charts/episodic_length", episode_length[index], global_step)
                    episode_return[index] = episode_length[index] = 0
                    if "is_success" in info:
                        successes.append(float(np.all(info["is_success"])))
                        writer.add_scalar("charts/success_rate", np.mean(successes[-100:]), global_step)
                rollout_bootstrap[step] = bootstrap(step, truncated & ~terminated, final_obs)
                rollout_terminated[step], rollout_keep[step + 1] = terminated, ~done[:, None]
                rollout_obs[step + 1] = next_obs
                if not np.isfinite(np.column_stack([final_obs, next_obs, rewards])).all():
                    sys.exit(f"{Path(__file__).name}: error: a row is not finite at step {global_step}")

            buffer.copy_(rollout, non_blocking=True)  # the log waits for it before the rollout changes
            prepare()
            for _ in range(args.update_epochs):
                for indices in torch.randperm(args.num_envs, device=device).chunk(args.num_minibatches):
                    update(indices)
                    updates += 1
                if args.target_kl is not None and losses["approx_kl"] > args.target_kl:  # sync, once an epoch
                    break
            log_losses()
            sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
            writer.add_scalar("charts/SPS", sps, global_step)
            writer.add_scalar("charts/learning_rate", args.learning_rate * remaining, global_step)
            bar.postfix = f"SPS {sps:.0f}, return {np.mean(returns[-10:]) if returns else math.nan:.1f}"
            bar.update(global_step - bar.n)
            progress |= {"global_step": global_step, "updates": updates}
            if global_step // eval_every > progress["last_eval"] // eval_every:
                pause = time.perf_counter()
                env = make_env(args)
                scores, _ = evaluate(args, env, agent, partial(best_action, env), stopping)
                if not stopping:
                    progress["last_eval"], mean = global_step, float(np.mean(scores))
                    writer.add_scalar("charts/eval_return", mean, global_step)
                    if progress["best_eval"] < mean < math.inf:
                        progress["best_eval"] = mean
                        save_checkpoint(args, writer, "best.pt", state, progress)
                sps_time += time.perf_counter() - pause
            last = bool(stopping) or global_step + batch_size > args.total_timesteps
            at_the_end = last and (args.save_model or args.checkpoint_every)
            if at_the_end or global_step - saved_step >= checkpoint_every:
                save_checkpoint(args, writer, f"{global_step}.pt", state, progress)
                saved_step = global_step

    # ---- End -----------------------------------------------------------------------------------------------
    eval_returns, eval_infos = [], []
    if args.evaluate or (args.eval_episodes and not stopping):
        env = make_env(args, folder / "evaluation" / "videos" if args.capture_video else None)
        eval_returns, eval_infos = evaluate(args, env, agent, partial(best_action, env), stopping)
    if args.track:
        for video in sorted(folder.rglob("*.mp4")):
            wandb.log({str(video.relative_to(folder).with_suffix("")): wandb.Video(str(video))})
        wandb.finish()  # whose last words come before the summary
    summary = {"script": Path(__file__).stem, **asdict(args), "total_timesteps": global_step, "sps": sps}
    summary |= {"device": device.type, "compile": args.compile, "cudagraphs": cudagraphs}  # [fast: one graph]
    best = progress["best_eval"] if math.isfinite(progress["best_eval"]) else None
    summary |= {"eval_returns": eval_returns, "best_eval_return": best}
    eval_successes = [float(np.all(info["is_success"])) for info in eval_infos if "is_success" in info]
    for name, rates in {"success_rate": successes[-100:], "eval_success_rate": eval_successes}.items():
        summary[name] = float(np.mean(rates)) if rates else None
    summary |= {"folder": str(folder), "updates": updates, "episodes": len(returns)}
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
