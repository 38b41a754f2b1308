# LeanRL 0.1.0
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tensordict>=0.15.3,<0.16",
#     "torch>=2.11,<2.16", "gymnasium[classic-control]>=1.4,<1.5", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3", "filelock>=3.16",
# ]
# ///
"""Deep Q-learning (DQN) for discrete actions: the twin that compiles and captures.

Papers: Mnih et al., "Human-level control through deep reinforcement learning", Nature 518 (2015),
        doi:10.1038/nature14236; with --double, van Hasselt et al., "Deep Reinforcement Learning with Double
        Q-learning", arXiv:1509.06461 (2015).
Run:    python dqn_torchcompile.py --env-id CartPole-v1 --compile --cudagraphs
Twin:   dqn.py, eager, computes the same, up to rounding and random numbers. Read their diff.
Tags, at each place that differs; docs/tricks.md has a chapter on each:
- [fast: one graph] the policy and the gradient step: each is compiled without a break;
- [fast: flat] the parameters of a network are one tensor, and Adam a few operations on it in that graph;
- [fast: numbers as tensors] a graph would freeze a number that changes;
- [fast: losses in place] tensors to write to: what a captured function returns is cloned at each call;
- [fast: graph capture] a CUDA graph launches a whole gradient step at once;
- [fast: warm-up] all is compiled and captured before the first step, on the state, which is then put back;
- [fast: acting in NumPy] for a few small products a call of PyTorch takes longer than they do.

Deviations from the paper; the first four are CleanRL's:
- two small layers in place of convolutions, and the hyper-parameters of classic control;
- Adam in place of RMSProp;
- rewards are not clipped, and the error is squared as it is (paper: both clipped to [-1, 1]);
- transitions are drawn with replacement;
- evaluation takes the best actions (paper: a random one in twenty);
- the gradient steps come before the environment step: they see the buffer up to the previous transition.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import copy
import json
import math
import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from filelock import FileLock, Timeout
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- Arguments ---------------------------------------------------------------------------------------------
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass
class Args:
    __pydantic_config__: ClassVar = {"allow_inf_nan": False}
    exp_name: str = Path(__file__).stem  # the name of this experiment
    seed: NonNegativeInt = 1  # seed of the experiment
    cuda: bool = True  # use a CUDA device if there is one
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # high: TF32 on CUDA; medium: bfloat16
    track: bool = False  # also send the logs to Weights & Biases
    wandb_project_name: str = "leanrl"  # the project of the Weights & Biases run
    wandb_entity: str | None = None  # the entity (team) of the Weights & Biases run
    capture_video: bool = False  # record videos of the first environment under runs/<run>/videos
    save_model: bool = False  # write a checkpoint at the end
    checkpoint_every: PositiveInt | None = None  # agent steps between checkpoints; the newest two are kept
    resume: str | None = None  # go on with the run of this checkpoint, or of the newest in this folder
    evaluate: str | None = None  # do not train, evaluate this checkpoint, or the newest in this folder
    eval_episodes: PositiveInt | None = None  # episodes of an evaluation, else 10; also makes one at the end
    eval_every: PositiveInt | None = None  # agent steps between evaluations; best.pt is the best agent
    log_every: PositiveInt = 100  # agent steps between two log entries
    compile: bool = False  # compile the policy and the gradient step with torch.compile
    cudagraphs: bool = False  # capture the policy and the gradient step as CUDA graphs

    env_id: str = "CartPole-v1"  # the id of the environment: any with Box observations and Discrete actions
    total_timesteps: PositiveInt = 500_000  # agent steps in all, over all environments
    num_envs: PositiveInt = 1  # the number of parallel environments
    buffer_size: PositiveInt = 10_000  # transitions that the replay buffer holds, over all environments
    gamma: Fraction = 0.99  # the discount factor
    tau: Fraction = 1.0  # how far the target network moves towards the network at each of its updates
    target_network_frequency: PositiveInt = 500  # agent steps between two updates of the target network
    batch_size: PositiveInt = 128  # the number of transitions in a gradient step
    start_e: Fraction = 1.0  # epsilon, the share of random actions, at the beginning
    end_e: Fraction = 0.05  # epsilon at the end of the exploration fraction, and from then on
    exploration_fraction: Fraction = 0.5  # the part of total_timesteps over which epsilon falls, linearly
    learning_starts: NonNegativeInt = 10_000  # agent steps before those that count towards a gradient step
    train_frequency: PositiveInt = 10  # agent steps between gradient steps, however many environments
    learning_rate: NonNegativeFloat = 2.5e-4  # the learning rate
    double: bool = False  # double DQN: the network chooses the next action, and the target network values it


# ---- Environment -------------------------------------------------------------------------------------------
def make_env(args: Args, videos: Path | None = None) -> gym.Env:
    """Build an environment with flat observations, filmed into the folder `videos`."""
    try:
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if videos else {}))
    except gym.error.Error as error:
        refuse(f"--env-id {args.env_id}: {error}")
    obs, actions = env.observation_space, env.action_space
    if not (isinstance(obs, gym.spaces.Box) and isinstance(actions, gym.spaces.Discrete)):
        refuse(f"--env-id takes Box observations and Discrete actions, not {obs} and {actions}")
    if videos:
        env = gym.wrappers.RecordVideo(env, str(videos), disable_logger=True)
    return gym.wrappers.RecordEpisodeStatistics(gym.wrappers.FlattenObservation(env))


# ---- Networks ----------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """Action values: (batch, obs_dim), of bytes in units of 255, to (batch, num_actions)."""

    def __init__(self, obs_dim: int, num_actions: int, device: torch.device):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 120, device=device)
        self.fc2 = nn.Linear(120, 84, device=device)
        self.fc3 = nn.Linear(84, num_actions, device=device)

    def forward(self, obs: Tensor) -> Tensor:
        x = obs / 255 if obs.dtype == torch.uint8 else obs
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def linear_schedule(start_e: float, end_e: float, duration: float, t: int) -> float:
    """Epsilon at step t: it goes from start_e to end_e within `duration` steps and stays there."""
    return start_e + (end_e - start_e) * (min(t / duration, 1) if duration else 1)


# [fast: flat] Adam and the updates of targets are few operations each. Measured for SAC: 1.05.
class Flat(nn.Module):
    """A network that computes with one flat tensor, `params`, of which its own parameters become views."""

    def __init__(self, network: nn.Module):
        super().__init__()
        # Sizes that 16 divides come first and keep the next aligned. A list hides the network from nn.Module.
        named = sorted(network.named_parameters(), key=lambda item: item[1].numel() % 16 != 0)
        self.network, self.shapes = [network], {name: param.shape for name, param in named}
        flat = nn.utils.parameters_to_vector(param for _, param in named).detach()
        self.params = nn.Parameter(flat, requires_grad=all(param.requires_grad for _, param in named))
        nn.utils.vector_to_parameters(flat, [param.requires_grad_(False) for _, param in named])

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        parts = self.params.split([shape.numel() for shape in self.shapes.values()])
        views = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}
        return torch.func.functional_call(self.network[0], views, inputs)


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
        (grad,) = torch.autograd.grad(loss, self.params[0])
        with torch.no_grad():
            if self.max_norm < math.inf:
                grad = grad * (self.max_norm / (grad.square().sum().sqrt() + 1e-6)).clamp(max=1)
            step, beta1, beta2 = self.step.add_(1), 0.9, 0.999
            exp_avg = self.exp_avg.lerp_(grad, 1 - beta1)
            exp_avg_sq = self.exp_avg_sq.lerp_(grad * grad, 1 - beta2)
            denominator = exp_avg_sq.sqrt() / (1 - beta2**step).sqrt() + self.eps
            self.params[0].sub_(exp_avg / denominator * (self.lr / (1 - beta1**step)))


# ---- Run: command line, checkpoints, signals, evaluation ---------------------------------------------------
def refuse(message: str) -> NoReturn:
    """Say in one line on standard error what is wrong with the arguments, and exit with status 2."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def parse_args() -> tuple[Args, dict]:
    """The arguments, and the checkpoint that gives --resume its defaults, and --evaluate its env_id."""
    args, checkpoint, saved = tyro.cli(Args), {}, {}
    if args.resume and args.evaluate:
        refuse("--resume and --evaluate exclude each other")
    if args.resume or args.evaluate:
        checkpoint = load_checkpoint(args)
        names = vars(args).keys() & checkpoint["args"] if args.resume else ["env_id"]
        saved = {name: checkpoint["args"][name] for name in sorted(names)}
        args = tyro.cli(Args, default=Args(**saved))  # again, over these
    try:
        TypeAdapter(Args).validate_python(vars(args))
    except ValidationError as invalid:
        error = invalid.errors()[0]
        refuse(f"--{error['loc'][0].replace('_', '-')}: {error['msg']}, got {error['input']}")
    for name, value in saved.items():
        option, now = f"--{name.replace('_', '-')}", getattr(args, name)
        if now != value and name in ("env_id", "seed", "num_envs", "buffer_size"):
            refuse(f"{option} has to stay {value}, as in {checkpoint['file']}, got {now}")
        if now != value and name != "resume":
            print(f"{option} {now} from here on, it was {value}", file=sys.stderr)
    return args, checkpoint


def load_checkpoint(args: Args) -> dict:
    """Read the checkpoint to resume or evaluate, of a folder the newest; nothing in it is executed."""
    path = Path(args.resume or args.evaluate)
    in_folder = path.glob("[0-9]*.pt" if args.resume else "*.pt")  # none if it is a file itself
    file = max(in_folder, key=lambda file: file.stat().st_mtime_ns, default=path).resolve()
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        script = checkpoint["script"]
    except Exception as error:  # torch.load raises what it likes where a file is none of its own
        refuse(f"{file} is not a checkpoint or a folder with one: {type(error).__name__}")
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


if __name__ == "__main__":
    # ---- Setup ---------------------------------------------------------------------------------------------
    args, checkpoint = parse_args()
    first_learning_step = args.learning_starts + args.num_envs + args.train_frequency
    if not args.evaluate and first_learning_step > args.total_timesteps:
        refuse(f"--learning-starts has to leave some of --total-timesteps, got {args.learning_starts}")
    if args.buffer_size < max(args.batch_size, args.num_envs):
        refuse(f"--buffer-size has to hold a batch and a step of all environments, got {args.buffer_size}")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if args.cuda and device.type == "cpu":
        print("CUDA is not available: running on the CPU", file=sys.stderr)
    torch.set_flush_denormal(True)  # Adam's moments of dead weights become denormal, at which a CPU is slow
    torch.set_num_threads(1)  # small networks: as fast as two alone, four times as fast beside a busy process
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.manual_seed(args.seed)

    progress = {"global_step": 0, "updates": 0, "updates_due": 0, "returns": [], "last_eval": 0}
    progress |= {"best_eval": -math.inf} | (checkpoint["progress"] if args.resume else {})
    global_step, updates = progress["global_step"], progress["updates"]
    updates_due, returns = progress["updates_due"], progress["returns"]  # this very list

    name = re.sub(r"[^\w.=-]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.6f}")
    folder = checkpoint["file"].parent if args.resume else Path("runs", name)
    folder.mkdir(parents=True, exist_ok=bool(args.resume))
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)  # held as long as this name lives
    except Timeout:
        refuse(f"--resume: a run is at work in {folder}")

    videos = folder / f"videos/from_step_{global_step}" if args.capture_video and not args.evaluate else None
    env_fns = [partial(make_env, args, videos if index == 0 else None) for index in range(args.num_envs)]
    # The step that ends an episode also resets its environment; infos["final_obs"] has what it ended with.
    envs = SyncVectorEnv(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    obs_dim, obs_dtype = envs.single_observation_space.shape[0], np.dtype(np.float32)
    if envs.single_observation_space.dtype == np.uint8:
        obs_dtype = np.dtype(np.uint8)
    num_actions, first_action = int(envs.single_action_space.n), int(envs.single_action_space.start)

    q_network = QNetwork(obs_dim, num_actions, device)
    target_network = copy.deepcopy(q_network).requires_grad_(False)
    flat_network, flat_target = Flat(q_network), Flat(target_network)  # [fast: flat]
    optimizer = Adam(flat_network.params, lr=args.learning_rate)
    # What checkpoints hold beside the replay buffer: add modules and optimizers of your own.
    state = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}

    # A row of the replay buffer is a whole transition: one copy stores it, one gather fetches a batch.
    # Action, reward and terminated are float32; where observations are bytes, so is the row.
    columns = [12 // obs_dtype.itemsize, obs_dim, obs_dim]
    capacity = 0 if args.evaluate else args.buffer_size // args.num_envs * args.num_envs
    buffer = torch.from_numpy(np.zeros((capacity, sum(columns)), obs_dtype)).to(device)
    # [fast: numbers as tensors] Rows in use, at least one for the warm-up.
    size = torch.tensor(min(max(global_step, 1), capacity), device=device)
    epsilon = torch.zeros((), device=device)
    exploration_steps = args.exploration_fraction * args.total_timesteps
    schedule = partial(linear_schedule, args.start_e, args.end_e, exploration_steps)
    names = ("q_values", "td_loss")
    losses = {name: torch.zeros((), device=device) for name in names}  # [fast: losses in place]

    # ---- Algorithm -----------------------------------------------------------------------------------------
    def act(obs: Tensor) -> Tensor:
        """Actions for obs (num_envs, obs_dim), random with probability epsilon, or the best: (num_envs,)."""
        with torch.no_grad():
            values = q_network(obs)
            best = values.argmax(dim=1)
            explores = torch.rand_like(values[:, 0]) < epsilon
            return torch.where(explores, torch.randint_like(best, num_actions), best)

    def torch_policy(obs: np.ndarray) -> np.ndarray:
        """Actions for obs (num_envs, obs_dim), as an array (num_envs,)."""
        return act(torch.from_numpy(obs).to(device, non_blocking=True)).cpu().numpy()  # sync

    # [fast: acting in NumPy] For 1, 64, 256 environments 14, 63, 111 us; in PyTorch 27, 89, 140.
    def numpy_values(obs: np.ndarray) -> np.ndarray:
        """Action values (num_envs, num_actions) of linear layers with ReLU between them, by NumPy."""
        for weight, bias in layers[:-1]:
            obs = (obs @ weight.T + bias).clip(min=0)
        return obs @ layers[-1][0].T + layers[-1][1]

    def numpy_policy(obs: np.ndarray) -> np.ndarray:
        """Actions as those of `torch_policy`, by NumPy and the host's random numbers."""
        explores, random_actions = torch.rand(len(obs)) < epsilon, torch.randint(num_actions, (len(obs),))
        return np.where(explores.numpy(), random_actions.numpy(), numpy_values(obs).argmax(axis=1))

    host_network = copy.deepcopy(q_network).cpu()
    host_params = Flat(host_network).params.detach()  # one copy brings all parameters to the host
    layers = [[p.numpy() for p in layer.parameters()] for layer in host_network.children()]
    host_params.normal_()  # the values have to agree whatever these are; the first step brings the real ones
    example = torch.randn(64, obs_dim)
    try:
        same = np.allclose(numpy_values(example.numpy()), host_network(example), atol=1e-2)
    except (ValueError, IndexError):  # other layers, or layers that do not follow each other
        same = False
    act_in_numpy = same and not [*q_network.buffers()] and obs_dtype == np.float32 and args.num_envs <= 64
    policy = numpy_policy if act_in_numpy else torch_policy
    epsilon = epsilon.cpu() if act_in_numpy else epsilon
    if not (act_in_numpy or args.evaluate):
        print("acting in PyTorch: NumPy is for 64 environments, floats, Linear and ReLU", file=sys.stderr)

    def best_action(obs: np.ndarray) -> int:
        """The action of the highest value at one observation, (obs_dim,)."""
        with torch.no_grad():
            values = q_network(torch.from_numpy(obs.astype(obs_dtype)).to(device)[None])
            return int(values.argmax()) + first_action

    def update_network() -> None:
        """One gradient step on a new batch."""
        indices = torch.randint(2**62, (args.batch_size,), device=device) % size  # [fast: numbers as tensors]
        scalars, obs, next_obs = buffer.index_select(0, indices).split(columns, dim=1)
        actions, rewards, terminated = scalars.flatten().view(torch.float32).view(-1, 3).unbind(1)
        with torch.no_grad():
            next_values = flat_target(next_obs)  # [fast: flat]
            chosen_by = flat_network(next_obs) if args.double else next_values  # van Hasselt, equation 4
            next_actions = chosen_by.argmax(dim=1, keepdim=True)
            target = rewards + args.gamma * (1 - terminated) * next_values.gather(1, next_actions)[:, 0]
        values = flat_network(obs)  # [fast: flat]
        q_values = values.gather(1, actions.long()[:, None])[:, 0]
        loss = F.mse_loss(q_values, target)  # Mnih et al., algorithm 1
        optimizer.minimize(loss)  # [fast: flat]
        record(q_values=q_values.mean(), td_loss=loss)

    def update(with_target: bool) -> None:
        """One gradient step and, if asked for, one of the target network."""
        update_network()
        if with_target:
            flat_target.params.lerp_(flat_network.params.detach(), args.tau)  # [fast: flat]

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
    if args.resume:
        buffer[:size] = checkpoint.pop("buffer")

    # [fast: one graph] The policy, the gradient step. Measured, with NumPy acting: 1.82 times eager.
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too, without a break
        torch._inductor.config.cpp_wrapper = device.type == "cpu"  # what calls the kernels is compiled, too
        torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: trying them takes 5 s
        compiled = partial(torch.compile, fullgraph=True)
        act, update_network = compiled(act), compiled(update_network)
    # [fast: graph capture] One launch for all kernels of a call. A graph has no branches: one for each kind.
    cudagraphs = args.cudagraphs and device.type == "cuda"
    kinds = [(False,), (True,)]
    if cudagraphs:
        act = CudaGraphModule(act, warmup=5, device=device)
        graphs = {kind: CudaGraphModule(partial(update, *kind), warmup=5, device=device) for kind in kinds}

        def update(*kind: bool) -> None:
            graphs[kind]()

    elif args.cudagraphs:
        print("CUDA graphs need a CUDA device: running without them", file=sys.stderr)
    # [fast: warm-up] Compile, warm up and capture before the first step, on the state, and put it back.
    if (args.compile or cudagraphs) and not args.evaluate:
        saved = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
        try:
            for kind in (6 if cudagraphs else 1) * kinds:  # captured: four warm up, one records, one replays
                if not act_in_numpy:
                    act(torch.zeros(args.num_envs, obs_dim, dtype=buffer.dtype, device=device))
                update(*kind)
        except InductorError as error:  # no C++ compiler, no Python.h, a space in a path
            if not isinstance(error.inner_exception, CppCompileError | InvalidCxxCompiler):
                raise
            refuse(f"--compile: {str(error.inner_exception)[-300:]}")
        load_states(state, saved)

    sequence = np.random.SeedSequence([args.seed, global_step])  # a run that goes on draws other numbers
    seed, *env_seeds = sequence.generate_state(1 + args.num_envs).tolist()
    torch.manual_seed(seed)
    obs = envs.reset(seed=env_seeds)[0].astype(obs_dtype)
    scalars = np.zeros((args.num_envs, 3), np.float32)

    if args.track:
        import wandb

        run = {"project": args.wandb_project_name, "entity": args.wandb_entity, "config": asdict(args)}
        wandb.init(**run, id=folder.name[-64:], name=folder.name, resume="allow", sync_tensorboard=True)
    writer = SummaryWriter(str(folder), purge_step=global_step + 1 if args.resume else None)  # later ones go
    table = "\n".join(f"{name}|{value}" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"param|value\n-|-\n{table}")

    last = bool(args.evaluate) or global_step >= args.total_timesteps
    bar = tqdm(total=args.total_timesteps, initial=global_step, unit="step", miniters=1, disable=last)
    stopping = stop_on_signals()
    first_update, saved_step = updates, global_step
    eval_every, checkpoint_every = args.eval_every or math.inf, args.checkpoint_every or math.inf  # never
    host_updates = -1  # [fast: acting in NumPy] gradient steps that the host's parameters have seen
    startup_seconds = time.perf_counter() - START_TIME
    sps, sps_step, sps_time = None, global_step, time.perf_counter()
    with closing(envs), writer, bar:
        while not last:
            epsilon.fill_(schedule(global_step))  # [fast: numbers as tensors]
            if act_in_numpy and updates != host_updates:  # [fast: acting in NumPy] sync
                host_params.copy_(flat_network.params.detach())
                host_updates = updates
            actions = policy(obs)
            if global_step >= args.learning_starts:
                if updates == first_update:
                    sps_step, sps_time = global_step, time.perf_counter()  # from the first step that learns
                updates_due += min(args.num_envs, global_step - args.learning_starts)

            while updates_due >= args.train_frequency:  # a GPU works on these while environments step
                updates, updates_due = updates + 1, updates_due - args.train_frequency
                update(updates * args.train_frequency % args.target_network_frequency < args.train_frequency)

            next_obs, rewards, terminated, truncated, infos = envs.step(actions + first_action)
            position, global_step = global_step % capacity, global_step + args.num_envs
            final_obs = next_obs.copy()
            for index in np.flatnonzero(terminated | truncated):
                final_obs[index] = infos["final_obs"][index]
                episode = infos["final_info"]["episode"]
                returns.append(float(episode["r"][index]))
                writer.add_scalar("charts/episodic_return", episode["r"][index], global_step)
                writer.add_scalar("charts/episodic_length", episode["l"][index], global_step)

            scalars[:, 0], scalars[:, 1], scalars[:, 2] = actions, rewards, terminated
            rows = np.concatenate([scalars.view(obs_dtype), obs, final_obs], axis=1, dtype=obs_dtype)
            if not np.isfinite(rows if obs_dtype == np.float32 else scalars).all():
                sys.exit(f"{Path(__file__).name}: error: a transition is not finite at step {global_step}")
            buffer[position : position + args.num_envs].copy_(torch.from_numpy(rows), non_blocking=True)
            size.fill_(min(global_step, capacity))  # [fast: numbers as tensors]
            obs = next_obs.astype(obs_dtype)

            last = bool(stopping) or global_step >= args.total_timesteps
            if last or global_step % args.log_every < args.num_envs:
                if updates > first_update:
                    log_losses()
                sps = (global_step - sps_step) / (time.perf_counter() - sps_time)
                writer.add_scalar("charts/epsilon", schedule(global_step), global_step)
                writer.add_scalar("charts/SPS", sps, global_step)
                bar.postfix = f"SPS {sps:.0f}, return {np.mean(returns[-10:]) if returns else math.nan:.1f}"
                bar.update(global_step - bar.n)
                progress |= {"global_step": global_step, "updates": updates, "updates_due": updates_due}
                if global_step // eval_every > progress["last_eval"] // eval_every:
                    pause = time.perf_counter()
                    scores = evaluate(args, make_env(args), best_action, stopping)
                    if not stopping:
                        progress["last_eval"], mean = global_step, float(np.mean(scores))
                        writer.add_scalar("charts/eval_return", mean, global_step)
                        if progress["best_eval"] < mean < math.inf:
                            progress["best_eval"] = mean
                            save_checkpoint(args, writer, "best.pt", state, progress)
                    sps_time += time.perf_counter() - pause
                at_the_end = last and (args.save_model or args.checkpoint_every)
                if at_the_end or global_step - saved_step >= checkpoint_every:
                    rows = buffer[:global_step].clone()  # a view would be saved with all of its memory
                    save_checkpoint(args, writer, f"{global_step}.pt", state, progress, buffer=rows)
                    saved_step = global_step

    # ---- End -----------------------------------------------------------------------------------------------
    eval_returns = []
    if args.evaluate or (args.eval_episodes and not stopping):
        env = make_env(args, folder / "evaluation" / "videos" if args.capture_video else None)
        eval_returns = evaluate(args, env, best_action, stopping)
    if args.track:
        wandb.finish()  # whose last words come before the summary
    summary = {"script": Path(__file__).stem, **asdict(args), "total_timesteps": global_step, "sps": sps}
    summary |= {"device": device.type, "compile": args.compile, "cudagraphs": cudagraphs}  # [fast: one graph]
    best = progress["best_eval"] if math.isfinite(progress["best_eval"]) else None
    summary |= {"eval_returns": eval_returns, "best_eval_return": best}
    summary |= {"updates": updates, "episodes": len(returns)}
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
