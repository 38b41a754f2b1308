# LeanRL 0.3.1
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<2.16", "gymnasium>=1.4,<1.5", "envpool>=1.2.5,<2", "numpy>=2,<3", "tyro>=1,<2",
#     "pydantic>=2,<3", "tqdm>=4.66", "tensorboard>=2.18", "wandb>=0.19", "moviepy>=2,<3",
# ]
# ///
"""PPO with an LSTM for Atari games of EnvPool: the eager script.

Papers: Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347 (2017); Huang et al.,
        "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track (2022).
        Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9 (1997).
Run:    python ppo_atari_lstm_envpool.py --env-id Breakout-v5
Twin:   ppo_atari_lstm_envpool_torchcompile.py computes the same, compiled and captured. Read their diff.

Deviations from the papers:
- the step after the end of a game or life is masked out: EnvPool's `reset` cannot go on after a lost life;
- a truncated game bootstraps from the value of its final observation, with the memory of that game;
- the memory is forgotten where a game begins and after a lost life.
"""

import time

START_TIME = time.perf_counter()  # the imports below are part of the start-up

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Literal

import envpool
import gymnasium as gym
import numpy as np
import torch
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn, optim
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


def later_beginnings(keep: Tensor) -> list[int]:
    """The steps but the first one in which an episode begins in any environment."""
    lowest = keep[1:].amin(dim=(1, 2)).cpu()  # sync
    return [step for step, kept in enumerate(lowest.tolist(), start=1) if kept == 0]


def recurrence(
    x: Tensor, keep: Tensor, memory: Tensor, by_input: Tensor, by_hidden: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states, (T, n, h), and last memory, (n, 2h), by the weights of `LSTM`."""
    weights, hiddens = [by_input, by_hidden, bias, torch.zeros_like(bias)], []
    begins = later_beginnings(keep) if len(x) > 1 else []
    with torch.autocast(x.device.type, enabled=False):  # in float32: it takes many steps
        state = [part[None].contiguous() for part in memory.chunk(2, dim=-1)]
        # All steps up to the next beginning at once, as nn.LSTM calls it.
        for steps, kept in zip(x.tensor_split(begins), keep.tensor_split(begins), strict=True):
            state = [torch.where(kept[:1] > 0, part, 0) for part in state]
            # With biases, one layer, no dropout, training, one direction, steps come first.
            hidden, *state = torch.lstm(steps, state, weights, True, 1, 0.0, True, False, False)
            hiddens.append(hidden)
        return torch.cat(hiddens), torch.cat(state, dim=-1)[0]


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
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
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
    losses: dict[str, Tensor] = {}  # the latest, for the log
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
        advantages = torch.zeros_like(values)
        for t in reversed(range(args.num_steps)):
            advantages[t] = deltas[t] + discounts[t] * advantages[t + 1]
        return advantages[:-1]

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
        logits, values, _ = agent(obs, rows["keep"], initial)
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
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()

        log_ratio, ratio = log_ratio.detach(), ratio.detach()
        record(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        # k1 and k3 of Schulman, "Approximating KL Divergence" (2020), and the share of clipped ratios.
        record(old_approx_kl=masked_mean(-log_ratio, valid))
        record(approx_kl=masked_mean(ratio - 1 - log_ratio, valid))
        record(clipfrac=masked_mean(((ratio - 1).abs() > args.clip_coef).float(), valid))

    def record(**values: Tensor) -> None:
        """Keep the latest values for the log; nothing waits for the device here."""
        losses.update({name: value.detach() for name, value in values.items()})

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
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
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
    summary |= {"device": device.type, "folder": str(folder), "total_timesteps": global_step}
    summary |= {"updates": updates, "sps": sps, "episodes": len(returns), "eval_returns": eval_returns}
    for name, count in {"episodic_return": 100, "episodic_return_10": 10}.items():
        summary[name] = float(np.mean(returns[-count:])) if returns else None
    summary |= {"startup_seconds": startup_seconds, "wall_seconds": time.perf_counter() - START_TIME}
    print(json.dumps(summary))
    if stopping:
        sys.exit(128 + stopping[0])
