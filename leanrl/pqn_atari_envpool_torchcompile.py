# LeanRL 0.2.0
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium>=1.4,<1.5", "envpool>=1.2.5,<2", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3", "filelock>=3.16",
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

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NoReturn
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
import tyro
from filelock import FileLock, Timeout
from gymnasium.utils.save_video import capped_cubic_video_schedule, save_video
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
FIXED = ("env_id", "seed", "num_envs")  # --resume may not change these


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

    env_id: str = "Breakout-v5"  # the id of the game: any Atari game of EnvPool
    env_kwargs: Annotated[dict, JSON] = field(default_factory=dict)  # arguments for EnvPool
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


# ---- Environment -------------------------------------------------------------------------------------------
class Games(gym.Wrapper):
    """EnvPool's games, with the returns of whole games in the infos, the first one filmed into `videos`."""

    def __init__(self, games: gym.Env, num_envs: int, videos: Path | None, learning: bool):
        super().__init__(games)
        self.learning = learning
        self.returns, self.lengths, self.valid = np.zeros(num_envs), np.zeros(num_envs, dtype=int), True
        self.videos, self.frames, self.game = videos, [], 0

    def reset(self, **_) -> tuple:
        return self.env.reset()  # EnvPool was given the seeds when it made the games

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.returns += info["reward"]  # not clipped
        self.lengths += self.valid
        self.valid = ~(terminated | truncated)
        info["_episode"] = over = (info["terminated"] > 0) | truncated
        if np.count_nonzero(over):
            info["episode"] = {"r": self.returns.copy(), "l": self.lengths.copy()}
            self.returns[over], self.lengths[over] = 0, 0
        if self.videos and capped_cubic_video_schedule(self.game) and len(self.frames) < 3000:
            self.frames.append(self.env.render(env_ids=[0])[0])
        if self.videos and over[0]:
            save_video(self.frames, str(self.videos), fps=15, episode_index=self.game)
            self.frames, self.game = [], self.game + 1
        return obs, rewards, terminated if self.learning else over & ~truncated, truncated, info


def make_envs(args: Args, step: int, videos: Path | None = None, learning: bool = True) -> Games:
    """Build the games, stepped by EnvPool; the step after a lost life or the end of a game is no transition.

    Observations are the last four frames, (num_envs, 4, 84, 84), uint8; if `learning`, rewards are signs.
    If `learning`, a lost life looks like an end. EnvPool has it end there in evaluation, too: it serves the
    next ball only then. `step`, where training begins, is part of the seed, so that a run that goes on plays
    other games.
    """
    try:
        import envpool
    except ImportError:
        refuse("the games need the package envpool: requirements/envpool.txt")
    if envpool.registration.registry.specs.get(args.env_id, ("",))[0] != "envpool.atari":
        refuse(f"--env-id takes an Atari game of EnvPool, such as Breakout-v5, not {args.env_id}")
    # EnvPool takes 31 bits. From one seed it counts up: then seeds 1 and 2 share all games but one.
    seeds = np.random.SeedSequence([args.seed, step, not learning]).generate_state(args.num_envs) >> 1
    options = {"seed": seeds.tolist(), "num_threads": args.env_threads, "env_type": "gymnasium"}
    options |= {"num_envs": args.num_envs, "batch_size": args.num_envs, "episodic_life": True}
    options |= {"reward_clip": learning, "render_mode": "rgb_array" if videos else None}
    options |= {"stack_num": 4, "img_height": 84, "img_width": 84, "gray_scale": True}
    try:  # a key that is in both is a TypeError
        games = envpool.make(args.env_id, **options, **args.env_kwargs)
    except Exception as error:
        refuse(f"--env-kwargs: {str(error)[:200]}")
    return Games(games, args.num_envs, videos, learning)


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
def as_shape(part: Tensor, shape: torch.Size) -> Tensor:
    """A view with this shape of a flat part, of which the channels of a convolution come last."""
    return part.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if len(shape) == 4 else part.view(shape)


class Flat(nn.Module):
    """A network that computes with one flat tensor, `params`, of which its own parameters become views."""

    def __init__(self, network: nn.Module):
        super().__init__()
        # Sizes that 16 divides come first and keep the next aligned. A list hides the network from nn.Module.
        named = sorted(network.named_parameters(), key=lambda item: item[1].numel() % 16 != 0)
        self.network, self.shapes = [network], {name: param.shape for name, param in named}
        if any(hasattr(param, "flat") for _, param in named):
            raise ValueError("a parameter is in another Flat already")
        flat = torch.cat([(p.movedim(1, -1) if p.dim() == 4 else p).flatten() for _, p in named]).detach()
        self.frozen = {name for name, param in named if not param.requires_grad}
        self.params = nn.Parameter(flat, requires_grad=any(param.requires_grad for _, param in named))
        for (_, param), part in zip(named, flat.split([p.numel() for _, p in named]), strict=True):
            param.requires_grad_(False).data = as_shape(part, param.shape)
            param.flat = True

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        parts = self.params.split([shape.numel() for shape in self.shapes.values()])
        shaped = zip(self.shapes.items(), parts, strict=True)
        views = {name: as_shape(part, shape) for (name, shape), part in shaped}
        views |= {name: views[name].detach() for name in self.frozen}
        return torch.func.functional_call(self.network[0], views, inputs)


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


if __name__ == "__main__":
    # ---- Setup ---------------------------------------------------------------------------------------------
    args, checkpoint = parse_args()
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches or batch_size == args.num_minibatches:
        refuse(f"--num-minibatches takes a smaller divisor of {batch_size}, got {args.num_minibatches}")
    if not args.evaluate and args.total_timesteps < batch_size:
        refuse(f"--total-timesteps has to hold a rollout of {batch_size}, got {args.total_timesteps}")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.cuda and device.type == "cpu":
        print("CUDA is not available: running on the CPU", file=sys.stderr)
    if args.torch_deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for cuBLAS, read at its first use
        torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal, at which a CPU is slow
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.set_autocast_dtype(device.type, torch.bfloat16)
    torch.set_autocast_enabled(device.type, args.precision == "bfloat16")
    torch.set_autocast_cache_enabled(False)  # it would keep the first weights for good
    torch.manual_seed(args.seed)

    progress = {"global_step": 0, "updates": 0, "returns": [], "last_eval": 0}
    progress |= {"best_eval": -math.inf} | (checkpoint["progress"] if args.resume else {})
    global_step, updates = progress["global_step"], progress["updates"]
    returns = progress["returns"]  # this very list

    name = re.sub(r"[^\w.=-]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.6f}")
    folder = checkpoint["file"].parent if args.resume else Path("runs", name)
    videos = folder / f"videos/from_step_{global_step}" if args.capture_video and not args.evaluate else None
    envs = make_envs(args, global_step, videos)

    folder.mkdir(parents=True, exist_ok=bool(args.resume or videos))  # a refused run leaves none
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)  # held as long as this name lives
    except Timeout:
        refuse(f"--resume: a run is at work in {folder}")

    num_actions = int(envs.action_space.n)
    q_network = QNetwork(num_actions, device)
    flat_q_network = Flat(q_network)  # [fast: flat]
    annealed_lr = torch.tensor(args.learning_rate, device=device)  # [fast: numbers as tensors]
    optimizer = RAdam(flat_q_network.params, annealed_lr, max_norm=args.max_grad_norm)
    state = {"q_network": q_network, "optimizer": optimizer}  # what checkpoints hold: add yours

    # Columns of a rollout, with a row for each step and one for the last obs, and of the batch made of it.
    columns = dict.fromkeys(["actions", "values", "rewards", "terminated", "valid"], 1)
    batch_columns = dict.fromkeys(["actions", "targets", "valid"], 1)
    rollout = torch.zeros(args.num_steps + 1, args.num_envs, len(columns))
    steps = {name: column.numpy()[:, :, 0] for name, column in split(rollout, columns).items()}
    # Channels come last: 283 ms a minibatch, not 366.
    rollout_obs = torch.zeros(args.num_steps + 1, args.num_envs, 84, 84, 4, dtype=torch.uint8, device=device)
    buffer = torch.zeros_like(rollout, device=device)
    batch = torch.zeros(batch_size, len(batch_columns), device=device)
    exploration_steps = args.exploration_fraction * args.total_timesteps
    schedule = partial(linear_schedule, args.start_e, args.end_e, exploration_steps)
    names = ["td_loss", "q_values"]
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """For obs (num_envs, 84, 84, 4): the best actions and their values as columns, (num_envs, 2)."""
        with torch.no_grad():
            values, actions = q_network(obs).max(dim=1)
            return torch.stack([actions.float(), values], dim=1)

    def best_action(obs: np.ndarray) -> np.ndarray:
        """The action of the highest value, (1,), at obs (1, 4, 84, 84)."""
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
        # [fast: scan by doubling] After k rounds a sum holds 2^k terms; docs/tricks.md times it.
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
                sys.exit(f"{Path(__file__).name}: error: {name} is {loss} at step {global_step}")

    # ---- Training ------------------------------------------------------------------------------------------
    if args.evaluate or args.resume:
        load_states({"q_network": q_network} if args.evaluate else state, checkpoint)

    # [fast: one graph] Policy, preparation of the batch, gradient step.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.fallback_random = device.type == "cpu"  # as eager, and faster
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes 5 s
        torch._inductor.config.max_pointwise_cat_inputs = 18  # one GPU kernel joins the gradient's 18 parts
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
                act(rollout_obs[0])
                prepare()
                update(torch.arange(batch_size // args.num_minibatches, device=device))
        except InductorError as error:  # no C++ compiler, no Python.h, a space in a path
            if not isinstance(error.inner_exception, CppCompileError | InvalidCxxCompiler):
                raise
            refuse(f"--compile: {str(error.inner_exception)[-300:]}")
        load_states(state, saved)

    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    torch.manual_seed(int(sequence.generate_state(1)[0]))
    next_obs, _ = envs.reset()
    rollout_obs[-1].copy_(torch.from_numpy(next_obs).permute(0, 2, 3, 1))  # a rollout begins with it
    steps["valid"][-1], valid = 1, np.ones(args.num_envs, dtype=bool)

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
    saved_step = global_step
    eval_every, checkpoint_every = args.eval_every or math.inf, args.checkpoint_every or math.inf  # never
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, bar:
        while not last:
            remaining = 1 - global_step / args.total_timesteps if args.anneal_lr else 1
            annealed_lr.fill_(args.learning_rate * remaining)  # [fast: numbers as tensors]
            rollout_obs[0].copy_(rollout_obs[-1])
            steps["valid"][0] = steps["valid"][-1]
            chances = torch.rand(args.num_steps, args.num_envs).numpy()
            random_actions = torch.randint(num_actions, chances.shape).numpy()
            for step in range(args.num_steps):
                best_actions, steps["values"][step] = act(rollout_obs[step]).T.cpu().numpy()  # sync
                explores = chances[step] < schedule(global_step)
                steps["actions"][step] = np.where(explores, random_actions[step], best_actions)
                actions = steps["actions"][step].astype(np.int32)
                next_obs, rewards, terminated, truncated, infos = envs.step(actions)
                frames = torch.from_numpy(next_obs).to(device, non_blocking=True)
                rollout_obs[step + 1].copy_(frames.permute(0, 2, 3, 1))
                steps["rewards"][step], steps["terminated"][step] = rewards, terminated
                global_step += int(np.count_nonzero(valid))
                for index in np.flatnonzero(infos["_episode"]):
                    returns.append(float(infos["episode"]["r"][index]))
                    writer.add_scalar("charts/episodic_return", returns[-1], global_step)
                    writer.add_scalar("charts/episodic_length", infos["episode"]["l"][index], global_step)
                steps["valid"][step + 1] = valid = ~(terminated | truncated)  # else the next only goes on

            buffer.copy_(rollout, non_blocking=True)  # the log waits for it before the rollout changes
            prepare()
            for _ in range(args.update_epochs):
                for indices in torch.randperm(batch_size, device=device).chunk(args.num_minibatches):
                    update(indices)
                    updates += 1
            log_losses()
            sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
            writer.add_scalar("charts/SPS", sps, global_step)
            writer.add_scalar("charts/epsilon", schedule(global_step), global_step)
            writer.add_scalar("charts/learning_rate", args.learning_rate * remaining, global_step)
            bar.postfix = f"SPS {sps:.0f}, return {np.mean(returns[-10:]) if returns else math.nan:.1f}"
            bar.update(global_step - bar.n)
            progress |= {"global_step": global_step, "updates": updates}
            if global_step // eval_every > progress["last_eval"] // eval_every:
                pause = time.perf_counter()
                game = make_envs(replace(args, num_envs=1), 0, learning=False)
                scores, _ = evaluate(args, game, q_network, best_action, stopping)
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
    eval_returns = []
    if args.evaluate or (args.eval_episodes and not stopping):
        videos = folder / "evaluation" / "videos" if args.capture_video else None
        env = make_envs(replace(args, num_envs=1), 0, videos, learning=False)
        eval_returns, _ = evaluate(args, env, q_network, best_action, stopping)
    if args.track:
        for video in sorted(folder.rglob("*.mp4")):
            wandb.log({str(video.relative_to(folder).with_suffix("")): wandb.Video(str(video))})
        wandb.finish()  # whose last words come before the summary
    summary = {"script": Path(__file__).stem, **asdict(args), "total_timesteps": global_step, "sps": sps}
    summary |= {"device": device.type, "compile": args.compile, "cudagraphs": cudagraphs}  # [fast: one graph]
    best = progress["best_eval"] if math.isfinite(progress["best_eval"]) else None
    summary |= {"eval_returns": eval_returns, "best_eval_return": best}
    summary |= {"folder": str(folder), "updates": updates, "episodes": len(returns)}
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
