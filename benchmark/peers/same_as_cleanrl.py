"""Train TD3 with our eager script and with CleanRL's, on the same random numbers; compare the parameters.

    .venv-peers/bin/python benchmark/peers/same_as_cleanrl.py [--env-id=ID]

Both scripts run as they are, on a CPU, from the same weights and the same first state. Ours draws the first
actions, the batches and all noise; CleanRL's, that of the package cleanrl 1.2.0, is given the same numbers.
Then only rounding tells them apart, which grows later. Prints the greatest difference between two parameters
in 30 steps of the optimizers, and how far one has moved. ID is an environment with actions in [-1, 1]:
CleanRL's networks see those of the environment. Episodes of Hopper-v4 end, those of Reacher-v4 are cut. What
it runs in is the environment of `./run.sh peers`.

Exit status: 0 if they differ by less than a ten-thousandth of how far they moved, else 1.
"""

import argparse
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack, chdir, redirect_stdout
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import cleanrl  # beside this file: it makes `benchmark` importable
import gymnasium
import torch
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.buffers import ReplayBuffer
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from benchmark import LEANRL


def train(path: Path, options: list[str], patches: list[tuple]) -> list[Tensor]:
    """Run a script with patches (owner, name, new); gives the parameters after each step of an optimizer."""
    learnt = []

    def note(optimizer: Optimizer, *_) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        learnt.append(torch.nn.utils.parameters_to_vector(params).detach())

    hook = register_optimizer_step_post_hook(note)
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(sys.stderr), ExitStack() as stack:
        for owner, name, new in [*patches, (sys, "argv", [str(path), *options])]:
            stack.enter_context(patch.object(owner, name, new))
        runpy.run_path(str(path), run_name="__main__")
    hook.remove()
    return learnt


def noted(function: Callable, notes: list) -> Callable:
    """A function that also notes what it returns."""

    def call(*args, **options) -> Tensor:
        notes.append(function(*args, **options))
        return notes[-1]

    return call


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="Hopper-v4")
    args = parser.parse_args()
    # After an odd number of random steps both have the actor learn in the first of 20 gradient steps. One
    # seed gives the same weights, as both make their networks in the same order.
    options = [f"--env-id={args.env_id}", "--seed=1", "--learning-starts=301", "--total-timesteps=322"]
    seeds, actions, batches, noise = [], [], [], []
    reset, step = SyncVectorEnv.reset, SyncVectorEnv.step

    def reset_and_note(envs: SyncVectorEnv, *, seed: list[int]) -> tuple:
        seeds.append(seed)
        return reset(envs, seed=seed)

    def step_and_note(envs: SyncVectorEnv, chosen) -> tuple:
        actions.append(chosen[0].copy())
        return step(envs, chosen)

    patches = [(SyncVectorEnv, "reset", reset_and_note), (SyncVectorEnv, "step", step_and_note)]
    patches += [(torch, "randint", noted(torch.randint, batches))]
    patches += [(torch, "randn_like", noted(torch.randn_like, noise))]
    ours = train(LEANRL / "td3_continuous_action.py", [*options, "--no-cuda"], patches)

    torch.set_flush_denormal(False)  # ours turns it on
    cleanrl.stand_in()
    root = Path(metadata.distribution("cleanrl").locate_file(""))
    actions, batches, noise = iter(actions), iter(batches), iter(noise)
    patches = [(SyncVectorEnv, "reset", lambda envs: reset(envs, seed=seeds[0]))]
    patches += [(gymnasium.spaces.Box, "sample", lambda space: next(actions))]
    patches += [(ReplayBuffer, "sample", lambda buffer, size: buffer._get_samples(next(batches).numpy()))]
    patches += [(torch, "randn_like", lambda like, device: next(noise))]
    patches += [(torch, "normal", lambda mean, std: mean + std * next(noise))]
    theirs = train(root / "cleanrl" / "td3_continuous_action.py", [*options, "--cuda=False"], patches)

    first = {len(params): params for params in reversed(ours)}  # of the critics and of the actor
    pairs = list(zip(ours, theirs, strict=True))
    difference = torch.stack([(our - their).abs().max() for our, their in pairs]).max().item()
    moved = torch.stack([(our - first[len(our)]).abs().max() for our in ours]).max().item()
    print(f"after {len(pairs)} steps of the optimizers: difference {difference:.1e}, moved {moved:.1e}")
    return 0 if difference < 1e-4 * moved else 1  # NaN is no number below


if __name__ == "__main__":
    sys.exit(main())
