# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium>=1.4,<1.5", "envpool>=1.2.5,<2", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""Parallelised Q-network (PQN) for Atari games of EnvPool: the twin that compiles and captures.

Paper:  Gallici et al., "Simplifying Deep Temporal Difference Learning", arXiv:2407.04811 (2024).
Run:    python pqn_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile --cudagraphs
Twin:   pqn_atari_envpool.py, eager, computes the same, up to rounding. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] policy, preparation of the batch, gradient step: each is compiled without a break;
- [fast: direct calls] compiled code is called without the guards of `torch.compile`, as a graph is;
- [fast: flat] the parameters of a network are one tensor, and RAdam a few operations on it in that graph;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches each of these at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: scan by doubling] returns take log2(T) operations in place of T.

Deviations from the paper; the hyper-parameters and the network are CleanRL's:
- a layer is normalised over all of its features, at all places (authors' code: at each place);
- 8 environments with rollouts of 128 steps (paper: 128 and 32), which are learnt from four times (twice);
- epsilon falls with each step of the environments, not with each rollout;
- the step after the end of a game or life is masked out: EnvPool's `reset` cannot go on after a lost life;
- a truncated game bootstraps from the value of its final observation.
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
from typing import Annotated, Literal
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
    q_lambda: Fraction = 0.65  # lambda of the returns that are learnt from
    start_e: Fraction = 1.0  # epsilon, the share of random actions, at the beginning
    end_e: Fraction = 0.01  # epsilon at the end of the exploration fraction, and from then on
    exploration_fraction: Fraction = 0.1  # the part of total_timesteps over which epsilon falls, linearly
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
class QNetwork(nn.Module):
    """Action values: (batch, 84, 84, 4) of uint8 to (batch, num_actions)."""

    def __init__(self, num_actions: int, device: torch.device):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4, device=device)),
            Norm([20, 20, 32], device=device),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2, device=device)),
            Norm([9, 9, 64], device=device),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1, device=device)),
            Norm([7, 7, 64], device=device),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512, device=device)),
            nn.LayerNorm(512, device=device),
            nn.ReLU(),
            layer_init(nn.Linear(512, num_actions, device=device)),
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, obs: Tensor) -> Tensor:
        return self.network(obs.permute(0, 3, 1, 2) / 255.0).float()


class Norm(nn.LayerNorm):
    """Layer normalisation of all features of (batch, channels, height, width), in memory with channels last.

    In that order are its weights, (height, width, channels), too: else eager code copies features to the
    other order and back, and compiled code takes long for the weights' gradient (docs/log.md has the times).
    """

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.movedim(1, -1)).movedim(-1, 1)


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


# [fast: flat] RAdam and the clipping of gradients are few operations each.
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


class RAdam(nn.Module):
    """`torch.optim.RAdam` of one tensor (Liu et al., arXiv:1908.03265), with the gradient clipped."""

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
            step, beta1, beta2 = self.step.add_(1).double(), 0.9, 0.999  # float32 rounds rho by a tenth
            # Liu et al., algorithm 2. Where rho is small, a step is one with momentum alone: up to 5, as in
            # PyTorch (paper: 4).
            rho_inf = 2 / (1 - beta2) - 1
            rho = rho_inf - 2 * step * beta2**step / (1 - beta2**step)
            r_squared = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
            rectified = torch.where(rho > 5, (r_squared * (1 - beta2**step)).sqrt(), 1)
            clip = (self.max_norm / (grad.square().sum().sqrt() + 1e-6)).clamp(max=1)
            # Stacked, or a CPU would compute them anew for each few parameters.
            numbers = torch.stack([rho, rectified * self.lr / (1 - beta1**step), clip.double()])
            rho, step_size, clip = numbers.float().unbind()
            grad = grad * clip
            exp_avg = self.exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq = self.exp_avg_sq.lerp_(grad * grad, 1 - beta2)
            denominator = torch.where(rho > 5, exp_avg_sq.sqrt() + self.eps, 1)
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


def evaluate_games(args: Args, network: nn.Module, policy: Callable, videos: Path) -> list[float]:
    """Scores, not clipped, of whole games, one in each of as many, by a policy from obs to actions."""
    network.eval()  # as dropout and batch normalisation ask for
    returns, playing = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    seeds = np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.eval_episodes) >> 1
    frames = []  # of the first game
    with closing(make_games(args, seeds.tolist(), learning=False)) as games:
        obs, _ = games.reset()
        while playing.any():
            if args.capture_video and playing[0] and len(frames) < 3000:
                frames.append(games.env.render(env_ids=[0])[0])
            obs, _, _, _, infos = games.step(policy(obs))
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
    torch.manual_seed(args.seed)

    global_step, updates, returns = checkpoint["progress"] if args.resume else [0, 0, []]
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time()}".replace("/", "_").replace(":", "_")
    folder = checkpoint["file"].parent if checkpoint else Path(f"runs/{name}")
    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    envs = make_games(args, (sequence.generate_state(args.num_envs) >> 1).tolist())

    num_actions = int(envs.action_space.n)
    q_network = QNetwork(num_actions, device)
    flat_q_network = FlatImages(q_network)  # [fast: flat]
    annealed_lr = torch.tensor(args.learning_rate, device=device)  # [fast: numbers as tensors]
    optimizer = RAdam(flat_q_network.params, annealed_lr, max_norm=args.max_grad_norm)
    # What checkpoints hold: add modules and optimizers of your own.
    state = {"q_network": q_network, "optimizer": optimizer}

    # Columns of a rollout, with a row for each step and one for the last obs, and of the batch made of it.
    columns = dict.fromkeys(["actions", "values", "rewards", "terminated", "valid"], 1)
    batch_columns = dict.fromkeys(["actions", "targets", "valid"], 1)
    batch_size = args.num_envs * args.num_steps
    rollout = torch.zeros(args.num_steps + 1, args.num_envs, len(columns))
    steps = {name: column.numpy()[:, :, 0] for name, column in split(rollout, columns).items()}
    # Channels come last: so a CPU computes convolutions faster.
    rollout_obs = torch.zeros(args.num_steps + 1, args.num_envs, 84, 84, 4, dtype=torch.uint8, device=device)
    buffer = torch.zeros_like(rollout, device=device)
    batch = torch.zeros(batch_size, len(batch_columns), device=device)
    names = ["td_loss", "q_values"]
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]
    stopping = []  # signals received

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """For obs (num_envs, 84, 84, 4): the best actions and their values as columns, (num_envs, 2)."""
        with torch.no_grad():
            values, actions = q_network(obs).max(dim=1)
            return torch.stack([actions.float(), values], dim=1)

    def epsilon() -> float:
        """The share of random actions now."""
        exploration_steps = args.exploration_fraction * args.total_timesteps
        return linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)

    def best_actions(obs: np.ndarray) -> np.ndarray:
        """The actions of the highest value, as games take them, (n,), at obs (n, 4, 84, 84)."""
        with torch.no_grad():
            values = q_network(torch.from_numpy(obs).to(device).permute(0, 2, 3, 1).contiguous())
            return values.argmax(dim=1).int().cpu().numpy()

    def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
        """Mean of x over the rows with valid = 1, 0-dim; 0 if there are none."""
        return (x * valid).sum() / valid.sum().clamp(min=1)

    def masked_lambda_returns(rewards: Tensor, values: Tensor, terminated: Tensor, valid: Tensor) -> Tensor:
        """Returns Q(lambda), (T, n, 1), where V is the highest value (Gallici et al., section 4):

        R_t = r_t + gamma ((1 - lambda) V_{t+1} + lambda R_{t+1}), and lambda is 0 after the last step. So
        R_t - V_t are the advantages of PPO.

        rewards, terminated: (T, n, 1). values, valid: (T + 1, n, 1), with the last obs. Where a row is not
        valid its step only reset the game or went on after a lost life: the recursion stops on both sides of
        it, and a truncated game bootstraps from its observation, the final one.
        """
        deltas = rewards + args.gamma * (1 - terminated) * values[1:] - values[:-1]
        deltas, discounts = valid[:-1] * deltas, args.gamma * args.q_lambda * valid[:-1] * valid[1:]
        # [fast: scan by doubling] After k rounds a sum holds 2^k terms.
        advantages, shift = deltas, 1
        while shift < args.num_steps:
            later = (0, 0, 0, 0, 0, shift)  # rows of zeros where there are none
            advantages = advantages + discounts * nn.functional.pad(advantages[shift:], later)
            discounts = discounts * nn.functional.pad(discounts[shift:], later)
            shift *= 2
        return values[:-1] + advantages

    def prepare() -> None:
        """Make of the rollout the batch to learn from, with the returns as targets."""
        with torch.no_grad():
            rows = split(buffer, columns)
            last_values = q_network(rollout_obs[-1]).amax(dim=1, keepdim=True)
            values = torch.cat([rows["values"][:-1], last_values[None]])
            rewards, terminated = rows["rewards"][:-1], rows["terminated"][:-1]
            rows["targets"] = masked_lambda_returns(rewards, values, terminated, rows["valid"])
            parts = [rows[name][: args.num_steps] for name in batch_columns]
            batch.copy_(torch.cat(parts, dim=2).view(batch_size, -1))

    def update(indices: Tensor) -> None:
        """One gradient step on the rows `indices` of the batch, (minibatch_size,)."""
        obs = rollout_obs.view(-1, 84, 84, 4).index_select(0, indices)
        rows = split(batch.index_select(0, indices), batch_columns)
        q_values = flat_q_network(obs).gather(1, rows["actions"].long())  # [fast: flat]
        loss = masked_mean((q_values - rows["targets"]).square(), rows["valid"])
        optimizer.minimize(loss)  # [fast: flat]
        record(td_loss=loss, q_values=masked_mean(q_values, rows["valid"]))

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
        """Write observations (num_envs, 4, 84, 84) into a row of the rollout."""
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
        q_network.load_state_dict(checkpoint["q_network"])
        eval_returns = evaluate_games(args, q_network, best_actions, folder / f"videos/{time.time():.0f}")
        print(json.dumps(asdict(args) | {"eval_returns": eval_returns}))
        sys.exit()

    # [fast: one graph] Policy, preparation of the batch, gradient step.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes seconds
        torch._inductor.config.max_pointwise_cat_inputs = 18  # one GPU kernel joins the gradient's 18 parts
        act, prepare, update = map(Compiled, (act, prepare, update))
    # [fast: graph capture] One launch for all kernels of a call.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    if cudagraphs:
        act, prepare, update = map(partial(CudaGraphModule, warmup=5, device=device), (act, prepare, update))
    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back.
    if args.compile or cudagraphs:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        for _ in range(6 if cudagraphs else 1):  # captured: four warm up, one records, one replays
            act(rollout_obs[0])
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
            rollout[0] = rollout[-1]  # whether it is a transition
            chances = torch.rand(args.num_steps, args.num_envs).numpy()
            random_actions = torch.randint(num_actions, chances.shape).numpy()
            for step in range(args.num_steps):
                actions, steps["values"][step] = act(rollout_obs[step]).T.cpu().numpy()  # sync
                explores = chances[step] < epsilon()
                steps["actions"][step] = np.where(explores, random_actions[step], actions)
                actions = steps["actions"][step].astype(np.int32)
                next_obs, rewards, terminated, truncated, infos = envs.step(actions)
                store(step + 1, next_obs)
                steps["rewards"][step], steps["terminated"][step] = rewards, terminated
                steps["valid"][step + 1] = ~(terminated | truncated)  # else the next step only goes on
                global_step += int(np.count_nonzero(steps["valid"][step]))
                for index in np.flatnonzero(infos["over"]):
                    returns.append(infos["scores"][index].item())
                    writer.add_scalar("charts/episodic_return", returns[-1], global_step)
                    writer.add_scalar("charts/episodic_length", infos["lengths"][index], global_step)

            buffer.copy_(rollout, non_blocking=True)  # the log waits for it before the rollout changes
            prepare()
            for _ in range(args.update_epochs):
                for indices in torch.randperm(batch_size, device=device).chunk(args.num_minibatches):
                    update(indices)
                    updates += 1

            last = bool(stopping) or global_step + batch_size > args.total_timesteps
            log_losses()
            sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
            writer.add_scalar("charts/SPS", sps, global_step)
            writer.add_scalar("charts/epsilon", epsilon(), global_step)
            writer.add_scalar("charts/learning_rate", args.learning_rate * remaining, global_step)
            bar.set_postfix_str(f"SPS {sps:.0f}, return {np.mean(returns[-10:] or math.nan):.1f}")
            bar.update(global_step - bar.n)
            if due(args.checkpoint_every):
                writer.flush()  # so that the curves of a run that is killed have no gap
                progress = [global_step, updates, returns]
                save_checkpoint(folder / "checkpoint.pt", args, state, progress=progress)
            if not stopping and (due(args.eval_every) or (last and args.capture_video)):
                pause = time.perf_counter()
                eval_returns = evaluate_games(args, q_network, best_actions, folder / f"videos/{global_step}")
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
