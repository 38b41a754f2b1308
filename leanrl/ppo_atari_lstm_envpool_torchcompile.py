# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium>=1.4,<1.5", "envpool>=1.2.5,<2", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""PPO with an LSTM for Atari games of EnvPool: the twin that compiles and captures.

Papers: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017); Huang et al.,
        "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track (2022).
        Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9 (1997).
Run:    python ppo_atari_lstm_envpool_torchcompile.py --env-id Breakout-v5 --compile --cudagraphs
Twin:   ppo_atari_lstm_envpool.py, eager, computes the same, up to rounding and random draws. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] policy, preparation of the batch, gradient step: each is compiled without a break;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and Adam a few operations on it in that graph;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches each of these at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: recurrence as one operation] the LSTM's steps, and their gradients, are one node of the graph;
- [fast: scan by doubling] advantages take log2(T) operations in place of T.

Deviations from the papers:
- the step after the end of a game or life is masked out: EnvPool's `reset` cannot go on after a lost life;
- a truncated game bootstraps from the value of its final observation, with the memory of that game;
- the memory is forgotten where a game begins and after a lost life.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import argparse
import copy
import json
import math
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import envpool
import gymnasium as gym
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
    capture_video: bool = False  # film an episode of each evaluation; one is at the end
    checkpoint_every: PositiveInt | None = None  # agent steps between checkpoints; one is at the end
    resume: str | None = None  # go on with the run of this folder, with its arguments
    evaluate: str | None = None  # do not train, evaluate this checkpoint
    eval_every: PositiveInt | None = None  # agent steps between evaluations; one is at the end
    eval_episodes: PositiveInt = 10  # the episodes of an evaluation
    compile: bool = False  # compile the policy, the preparation of the batch and the gradient step
    cudagraphs: bool = False  # capture the policy, the preparation of the batch and the gradient step

    env_id: str = "Breakout-v5"  # the id of the game: any Atari game of EnvPool
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # further arguments of EnvPool
    total_timesteps: PositiveInt = 10_000_000  # agent steps in all; a rollout beyond them is left out
    learning_rate: NonNegativeFloat = 2.5e-4  # the learning rate at the start
    num_envs: PositiveInt = 8  # the number of parallel environments
    env_threads: NonNegativeInt = 0  # the number of threads that step the environments; 0 lets EnvPool choose
    num_steps: PositiveInt = 128  # the steps of each environment in a rollout
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: Fraction = 0.99  # the discount factor
    gae_lambda: Fraction = 0.95  # lambda of the generalised advantage estimate
    num_minibatches: PositiveInt = 4  # the number of minibatches, of whole environments, of a rollout
    update_epochs: PositiveInt = 4  # how often a rollout is learnt from
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: NonNegativeFloat = 0.1  # the bound on the ratio of probabilities, as a distance from 1
    clip_vloss: bool = True  # clip the value loss, too
    ent_coef: NonNegativeFloat = 0.01  # the weight of the entropy
    vf_coef: NonNegativeFloat = 0.5  # the weight of the value loss
    max_grad_norm: NonNegativeFloat = 0.5  # the norm that gradients are clipped to
    target_kl: NonNegativeFloat | None = None  # an epoch with a larger KL is the last one of its rollout

    def __post_init__(self):  # tyro tells what it raises, and exits with status 2
        if self.num_envs % self.num_minibatches:
            raise ValueError(f"--num-minibatches takes a divisor of --num-envs {self.num_envs}")
        batch_size = self.num_envs * self.num_steps
        if batch_size == self.num_minibatches:
            raise ValueError("--num-steps has to be at least 2 where a minibatch is one environment")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps has to hold the {batch_size} steps of a rollout")


# ---- Environment -------------------------------------------------------------------------------------------
class Games(gym.Wrapper):
    """EnvPool's games. Infos say which are over, and have scores and lengths over all lives of a game.

    After the end of a game or life the next step only goes on: it is no transition. `first`, (num_games,), is
    True where the latest observation comes from such a step, or from `reset`.
    """

    def __init__(self, games: gym.Env, num_games: int):
        super().__init__(games)
        self.scores, self.lengths = np.zeros(num_games), np.zeros(num_games, dtype=int)
        self.first, self.ended = np.ones(num_games, dtype=bool), np.zeros(num_games, dtype=bool)

    def reset(self, **_) -> tuple:
        return self.env.reset()  # EnvPool was given the seeds when it made the games

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        self.first, self.ended = self.ended, terminated | truncated
        self.scores += infos["reward"]  # not clipped
        self.lengths += ~self.first
        over = (infos["terminated"] > 0) | truncated
        infos |= {"over": over, "scores": self.scores, "lengths": self.lengths}
        self.scores, self.lengths = self.scores * ~over, self.lengths * ~over
        return obs, rewards, terminated, truncated, infos


def make_games(args: Args, seeds: list[int], learning: bool = True, stack: int = 4) -> Games:
    """Build a game for each seed; a lost life looks like an end, without which EnvPool serves no next ball.

    Observations are the latest frames, (num_games, stack, 84, 84), uint8; if `learning`, rewards are signs.
    """
    options = {"env_type": "gymnasium", "num_envs": len(seeds), "seed": seeds, "episodic_life": True}
    options |= {"stack_num": stack, "reward_clip": learning, "num_threads": args.env_threads}
    options |= {"render_mode": "rgb_array" if args.capture_video else None}
    return Games(envpool.make(args.env_id, **options, **args.env_kwargs), len(seeds))


# ---- Networks ----------------------------------------------------------------------------------------------
class Agent(nn.Module):
    """Policy and value: (T, n, 84, 84, 1) of uint8 to logits (T, n, actions) and values (T, n, 1).

    For `keep` and `memory` see `LSTM`. The memory after the last step is returned, too.
    """

    def __init__(self, num_actions: int, device: torch.device):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(1, 32, 8, stride=4, device=device)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2, device=device)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1, device=device)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512, device=device)),
            nn.ReLU(),
        )
        self.lstm = LSTM(512, 128, device)
        self.actor = layer_init(nn.Linear(128, num_actions, device=device), std=0.01)
        self.critic = layer_init(nn.Linear(128, 1, device=device), std=1.0)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs: Tensor, keep: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.network(obs.flatten(0, 1).permute(0, 3, 1, 2) / 255.0)
        hidden, memory = self.lstm(features.view(*obs.shape[:2], -1), keep, memory)
        return self.actor(hidden).float(), self.critic(hidden).float(), memory


class LSTM(nn.Module):
    """One layer, as `nn.LSTM`, with one bias and a memory that ends where an episode begins."""

    def __init__(self, input_dim: int, hidden_dim: int, device: torch.device):
        super().__init__()
        self.memory_dim = 2 * hidden_dim
        self.input = layer_init(nn.Linear(input_dim, 4 * hidden_dim, device=device), std=1.0)
        self.recurrent = nn.Linear(hidden_dim, 4 * hidden_dim, bias=False, device=device)
        nn.init.orthogonal_(self.recurrent.weight)

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
    nn.init.zeros_(layer.bias)
    return layer


def log_prob_and_entropy(actions: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions and entropies, all three (batch, 1), under logits (batch, actions)."""
    log_probs = logits.log_softmax(dim=-1)
    return log_probs.gather(-1, actions), -(log_probs.exp() * log_probs).sum(dim=-1, keepdim=True)


def split(rows: Tensor, columns: dict[str, int]) -> dict[str, Tensor]:
    """Views of rows (..., all widths), one of each column by its name: (..., its width)."""
    return dict(zip(columns, rows.split([*columns.values()], dim=-1), strict=True))


# [fast: recurrence as one operation] Step by step it compiles for minutes.
def lstm(gates: Tensor, keep: Tensor, memory: Tensor, weight: Tensor) -> list[Tensor]:
    """Hidden states, (T, k, n, h), and last cell state, by the inputs' share of the gates, (T, k, n, 4h).

    Of k LSTMs side by side (Greff et al., arXiv:1503.04069, II-A). Also all cell states, and the gates.
    """
    (hidden, cell), width = memory.chunk(2, dim=-1), weight.shape[-1]
    gates = gates.clone(memory_format=torch.contiguous_format)
    hiddens = gates.new_empty(*gates.shape[:-1], width)
    cells = torch.empty_like(hiddens)
    # Views of all steps at once: to index each would take as long as to compute it.
    steps = keep == 0, gates, gates[..., : 2 * width], *gates.chunk(4, dim=-1), hiddens, cells
    for begins, gate, sigmoids, i, f, g, o, to_hidden, to_cell in zip(*steps, strict=True):
        hidden, cell = hidden.masked_fill(begins, 0), cell.masked_fill(begins, 0)
        gate.baddbmm_(hidden, weight.mT)  # in place: in float32 under autocast, too
        sigmoids.sigmoid_()
        cell = torch.mul(f, cell, out=to_cell).addcmul_(i, g.tanh_())
        hidden = torch.mul(o.sigmoid_(), cell.tanh(), out=to_hidden)
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
    acting = len(x) == 1 and not torch.is_grad_enabled()  # one step is compiled with the rest
    hiddens, cell, *_ = (lstm if acting else torch.ops.leanrl.lstm)(gates, keep, memory, by_hidden)
    return hiddens, torch.cat([hiddens[-1], cell], dim=-1)


# [fast: flat] Adam and the clipping of gradients are few operations each.
class FlatImages(nn.Module):
    """A network whose trainable parameters become views of one tensor, `params`.

    There the channels of a convolution come last, as in the images.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        named = [(name, param) for name, param in network.named_parameters() if param.requires_grad]
        named.sort(key=lambda item: item[1].numel() % 16 != 0)  # sizes that 16 divides keep the next aligned
        self.network, self.shapes = [network], {name: param.shape for name, param in named}
        params = [param.movedim(1, -1) if param.dim() == 4 else param for _, param in named]
        self.params = nn.Parameter(torch.cat([param.flatten() for param in params]).detach())
        for (_, param), view in zip(named, self.views().values(), strict=True):
            param.requires_grad_(False).data = view.detach()

    def views(self) -> dict[str, Tensor]:
        """The parameters by their names."""
        views, parts = {}, self.params.split([shape.numel() for shape in self.shapes.values()])
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            last = shape[:1] + shape[2:] + shape[1:2]  # channels, if it is of a convolution
            views[name] = part.view(last).movedim(-1, 1) if len(shape) == 4 else part.view(shape)
        return views

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return torch.func.functional_call(self.network[0], self.views(), inputs)


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


def evaluate_lives(args: Args, network: nn.Module, policy: Callable, videos: Path) -> list[float]:
    """Scores, not clipped, of whole games, one in each of as many, by a policy from obs to actions.

    It is told, too, which observations are the first of a game or of a life.
    """
    network.eval()  # as dropout and batch normalisation ask for
    returns, playing = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes) >> 1
    frames = []  # of the first game
    with closing(make_games(args, seeds.tolist(), learning=False, stack=1)) as games:
        obs, _ = games.reset()
        while playing.any():
            if args.capture_video and playing[0] and len(frames) < 3000:
                frames.append(games.env.render(env_ids=[0])[0])
            obs, _, _, _, infos = games.step(policy(obs, games.first))
            returns[playing] += infos["reward"][playing]
            playing &= ~infos["over"]
    if frames:
        from gymnasium.utils.save_video import save_video  # it needs moviepy

        save_video(frames, str(videos), fps=15)
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
    # As PyTorch's products, and the twin's LSTM; cuDNN's default is TF32.
    if device.type == "cuda":  # no effect elsewhere, and `torch.export` asks that convolutions have the same
        torch.backends.cudnn.rnn.fp32_precision = "tf32" if args.precision == "tf32" else "ieee"
    torch.manual_seed(args.seed)

    global_step, updates, returns = checkpoint["progress"] if args.resume else [0, 0, []]
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}".replace("/", "_").replace(":", "_")
    folder = checkpoint["file"].parent if checkpoint else Path(f"runs/{name}")
    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    envs = make_games(args, (sequence.generate_state(args.num_envs) >> 1).tolist(), stack=1)

    agent = Agent(int(envs.action_space.n), device)
    flat_agent = FlatImages(agent)  # [fast: flat]
    annealed_lr = torch.tensor(args.learning_rate, device=device)  # [fast: numbers as tensors]
    optimizer = Adam(flat_agent.params, annealed_lr, eps=1e-5, max_norm=args.max_grad_norm)
    # What checkpoints hold: add modules and optimizers of your own.
    state = {"agent": agent, "optimizer": optimizer}

    # Columns of a rollout, with a row for each step and one for the last obs, and of the batch made of it.
    columns = dict.fromkeys(["actions", "log_prob", "values", "rewards", "terminated", "valid", "keep"], 1)
    batch_columns = dict.fromkeys(["actions", "log_prob", "advantages", "targets", "values", "valid"], 1)
    batch_columns |= {"keep": 1}
    batch_size = args.num_envs * args.num_steps
    rollout = torch.zeros(args.num_steps + 1, args.num_envs, len(columns))
    steps = {name: column.numpy()[:, :, 0] for name, column in split(rollout, columns).items()}
    rollout_obs = torch.zeros(args.num_steps + 1, args.num_envs, 84, 84, 1, dtype=torch.uint8, device=device)
    buffer = torch.zeros_like(rollout, device=device)
    batch = torch.zeros(args.num_steps, args.num_envs, len(batch_columns), device=device)
    # Hidden and cell states: now, and before the rollout.
    memory = torch.zeros(args.num_envs, agent.lstm.memory_dim, device=device)
    first_memory = memory.clone()
    names = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
    names += ["explained_variance"]
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor, keep: Tensor) -> Tensor:
        """For obs (num_envs, 84, 84, 1): actions, log-probabilities and values as columns, (num_envs, 3).

        The memory moves on; where keep, (num_envs, 1), is 0 it starts empty.
        """
        with torch.no_grad():
            logits, values, new_memory = agent(obs[None], keep[None], memory)
            memory.copy_(new_memory)
            logits, values = logits[0], values[0]
            gumbel = -torch.empty_like(logits).exponential_().log()
            actions = (logits + gumbel).argmax(dim=1, keepdim=True)  # drawn in proportion to exp(logits)
            log_prob, _ = log_prob_and_entropy(actions, logits)
            return torch.cat([actions.float(), log_prob, values], dim=1)

    def remembering() -> Callable:
        """A policy with an empty memory of its own: the likeliest actions, as games take them, (n,).

        It takes obs (n, 1, 84, 84) and first (n,), whether these are the first of a game or of a life.
        """
        own_memory = torch.zeros((), device=device)

        def best_actions(obs: np.ndarray, first: np.ndarray) -> np.ndarray:
            nonlocal own_memory
            own_memory = own_memory.expand(len(obs), agent.lstm.memory_dim)
            keep = torch.from_numpy(~first).to(device).float()[None, :, None]
            with torch.no_grad():
                frames = torch.from_numpy(obs).to(device).permute(0, 2, 3, 1)[None].contiguous()
                logits, _, own_memory = agent(frames, keep, own_memory)
                return logits[0].argmax(dim=1).int().cpu().numpy()

        return best_actions

    def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
        """Mean of x over the rows with valid = 1, 0-dim; 0 if there are none."""
        return (x * valid).sum() / valid.sum().clamp(min=1)

    def masked_gae(rewards: Tensor, values: Tensor, terminated: Tensor, valid: Tensor) -> Tensor:
        """Generalised advantage estimates, (T, n, 1) (Schulman et al., arXiv:1506.02438, equation 16).

        rewards, terminated: (T, n, 1). values, valid: (T + 1, n, 1), with the last obs. Where a row is not
        valid its step only reset the game or went on after a lost life: the recursion stops on both sides of
        it, and a truncated game bootstraps from its observation, the final one.
        """
        deltas = rewards + args.gamma * (1 - terminated) * values[1:] - values[:-1]
        deltas, discounts = valid[:-1] * deltas, args.gamma * args.gae_lambda * valid[:-1] * valid[1:]
        # [fast: scan by doubling] After k rounds an estimate holds 2^k terms.
        advantages, shift = deltas, 1
        while shift < args.num_steps:
            later = (0, 0, 0, 0, 0, shift)  # rows of zeros where there are none
            advantages = advantages + discounts * nn.functional.pad(advantages[shift:], later)
            discounts = discounts * nn.functional.pad(discounts[shift:], later)
            shift *= 2
        return advantages

    def prepare() -> None:
        """Make of the rollout the batch to learn from: advantages and value targets."""
        with torch.no_grad():
            rows = split(buffer, columns)
            _, last_values, _ = agent(rollout_obs[-1:], rows["keep"][-1:], memory)
            values = torch.cat([rows["values"][:-1], last_values])
            advantages = masked_gae(rows["rewards"][:-1], values, rows["terminated"][:-1], rows["valid"])
            targets = advantages + values[:-1]
            rows |= {"advantages": advantages, "targets": targets}
            parts = [rows[name][: args.num_steps] for name in batch_columns]
            batch.copy_(torch.cat(parts, dim=2))

            values, valid = values[:-1], rows["valid"][:-1]
            error = targets - values
            unexplained = masked_mean((error - masked_mean(error, valid)).square(), valid)
            variance = masked_mean((targets - masked_mean(targets, valid)).square(), valid)
            record(explained_variance=1 - unexplained / variance.clamp(min=1e-8))

    def update(indices: Tensor) -> None:
        """One gradient step on all steps of the environments `indices`, (num_envs / num_minibatches,)."""
        obs = rollout_obs[:-1].index_select(1, indices)
        rows = split(batch.index_select(1, indices), batch_columns)
        advantages, valid = rows["advantages"], rows["valid"]
        if args.norm_adv:
            centred = advantages - masked_mean(advantages, valid)
            variance = (centred.square() * valid).sum() / (valid.sum() - 1).clamp(min=1)
            advantages = centred / (variance.sqrt() + 1e-8)

        initial = first_memory.index_select(0, indices)
        logits, values, _ = flat_agent(obs, rows["keep"], initial)  # [fast: flat]
        log_prob, entropy = log_prob_and_entropy(rows["actions"].long(), logits)
        log_ratio = log_prob - rows["log_prob"]
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_losses = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)  # PPO, equation 7
        policy_loss = masked_mean(policy_losses, valid)
        value_errors = (values - rows["targets"]).square()
        if args.clip_vloss:
            change = (values - rows["values"]).clamp(-args.clip_coef, args.clip_coef)
            value_errors = torch.maximum(value_errors, (rows["values"] + change - rows["targets"]).square())
        value_loss = 0.5 * masked_mean(value_errors, valid)
        entropy = masked_mean(entropy, valid)
        loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss  # PPO, equation 9
        optimizer.minimize(loss)  # [fast: flat]

        log_ratio, ratio = log_ratio.detach(), ratio.detach()
        record(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        # k1 and k3 of Schulman, "Approximating KL Divergence" (2020), and the share of clipped ratios.
        record(old_approx_kl=masked_mean(-log_ratio, valid))
        record(approx_kl=masked_mean(ratio - 1 - log_ratio, valid))
        record(clipfrac=masked_mean(((ratio - 1).abs() > args.clip_coef).float(), valid))

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

    def store(row: int, obs: np.ndarray) -> None:
        """Write observations (num_envs, 1, 84, 84) into a row of the rollout."""
        frames = torch.from_numpy(obs).to(device, non_blocking=True)
        rollout_obs[row].copy_(frames.permute(0, 2, 3, 1))

    def due(every: int | None) -> bool:
        """True once in so many agent steps, and in the last step; never if None."""
        return every is not None and (last or global_step // every > rollout_step // every)

    def stop(number: int, _) -> None:
        """Have Ctrl+C and what Slurm sends end the run after its rollout; the same again ends it at once."""
        stopping.append(number)
        signal.signal(number, signal.SIG_DFL)

    if args.evaluate:
        agent.load_state_dict(checkpoint["agent"])
        eval_returns = evaluate_lives(args, agent, remembering(), folder / f"videos/{time.time():.0f}")
        print(json.dumps(asdict(args) | {"eval_returns": eval_returns}))
        sys.exit()

    # [fast: one graph] Policy, preparation of the batch, gradient step.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes seconds
        torch._inductor.config.max_pointwise_cat_inputs = 16  # one GPU kernel joins the gradient's 15 parts
        act, prepare, update = map(Compiled, (act, prepare, update))
    # [fast: graph capture] One launch for all kernels of a call.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    if cudagraphs:
        act, prepare, update = map(partial(CudaGraphModule, warmup=5, device=device), (act, prepare, update))
    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back.
    if args.compile or cudagraphs:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        for _ in range(6 if cudagraphs else 1):  # captured: four warm up, one records, one replays
            act(rollout_obs[0], split(rollout[0], columns)["keep"].to(device))
            prepare()
            update(torch.arange(args.num_envs // args.num_minibatches, device=device))
        for name, item in state.items():
            item.load_state_dict(saved[name])
        memory.zero_()
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

    torch.manual_seed(int(sequence.generate_state(1)[0]))
    store(-1, envs.reset()[0])  # where a rollout begins
    steps["valid"][-1] = 1
    eval_returns, last = [], global_step + batch_size > args.total_timesteps
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, tqdm(total=args.total_timesteps, initial=global_step) as bar:
        while not last:
            remaining = 1 - global_step / args.total_timesteps if args.anneal_lr else 1
            annealed_lr.fill_(args.learning_rate * remaining)  # [fast: numbers as tensors]
            rollout_step = global_step
            rollout_obs[0].copy_(rollout_obs[-1])
            rollout[0] = rollout[-1]  # whether it is a transition, and begins an episode
            first_memory.copy_(memory)
            for step in range(args.num_steps):
                keep = split(rollout[step], columns)["keep"].to(device, non_blocking=True)
                rollout[step, :, :3] = act(rollout_obs[step], keep)  # sync: action, log_prob, value
                actions = rollout[step, :, 0].int().numpy()
                next_obs, rewards, terminated, truncated, infos = envs.step(actions)
                store(step + 1, next_obs)
                steps["rewards"][step], steps["terminated"][step] = rewards, terminated
                steps["valid"][step + 1] = ~(terminated | truncated)  # else the next step only goes on
                steps["keep"][step + 1] = ~envs.first
                global_step += int(np.count_nonzero(steps["valid"][step]))
                for index in np.flatnonzero(infos["over"]):
                    returns.append(infos["scores"][index].item())
                    writer.add_scalar("charts/episodic_return", returns[-1], global_step)
                    writer.add_scalar("charts/episodic_length", infos["lengths"][index], global_step)

            buffer.copy_(rollout, non_blocking=True)  # the log waits for it before the rollout changes
            prepare()
            for _ in range(args.update_epochs):
                for indices in torch.randperm(args.num_envs, device=device).chunk(args.num_minibatches):
                    update(indices)
                    updates += 1
                if args.target_kl is not None and losses["approx_kl"] > args.target_kl:  # sync, once an epoch
                    break

            last = bool(stopping) or global_step + batch_size > args.total_timesteps
            log_losses()
            sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
            writer.add_scalar("charts/SPS", sps, global_step)
            writer.add_scalar("charts/learning_rate", args.learning_rate * remaining, global_step)
            bar.set_postfix_str(f"SPS {sps:.0f}, return {np.mean(returns[-10:] or math.nan):.1f}")
            bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                progress = [global_step, updates, returns]
                save_checkpoint(folder / "checkpoint.pt", args, state, progress=progress)
            if not stopping and (due(args.eval_every) or (last and args.capture_video)):
                pause = time.perf_counter()
                eval_returns = evaluate_lives(args, agent, remembering(), folder / f"videos/{global_step}")
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
