"""Train TD3 with our eager script and with CleanRL's, on the same random numbers; compare the parameters.

    .venv-peers/bin/python benchmark/peers/same_as_cleanrl.py [--env-id=ID] [--total-timesteps=N]

Both scripts run as they are, on a CPU, from the same weights and the same first state. Ours draws the first
actions, the batches and all noise; CleanRL's, that of the package cleanrl 1.2.0, is given the same numbers.
Then only rounding tells them apart, which learning and physics blow up within some hundred steps. Prints,
after so many steps of the optimizers, the greatest difference so far between two parameters and how far one
has moved. ID is an environment with actions in [-1, 1]: CleanRL's networks see those of the environment.
Random steps are odd in number, so that both have the actor learn in the first gradient step.

Exit status: 0 after thirty steps they differ by less than a thousandth of how far they moved, 1 by more.
"""

import argparse
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack, chdir
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import cleanrl
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
        learnt.append(torch.nn.utils.parameters_to_vector(params).detach().clone())

    hook = register_optimizer_step_post_hook(note)
    with ExitStack() as stack, TemporaryDirectory() as folder:
        stack.enter_context(chdir(folder))
        for owner, name, new in [*patches, (sys, "argv", [str(path), *options])]:
            stack.enter_context(patch.object(owner, name, new))
        runpy.run_path(str(path), run_name="__main__")
    hook.remove()
    return learnt


def noted(function: Callable, notes: list) -> Callable:
    """A function that also notes a copy of what it returns."""

    def call(*args, **options) -> Tensor:
        result = function(*args, **options)
        notes.append(result.clone())
        return result

    return call


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="Hopper-v4")
    parser.add_argument("--total-timesteps", type=int, default=900)
    args = parser.parse_args()
    options = [f"--env-id={args.env_id}", f"--total-timesteps={args.total_timesteps}"]
    options += ["--learning-starts=301", "--seed=1"]
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

    cleanrl.stand_in()
    root = Path(metadata.distribution("cleanrl").locate_file(""))
    actions, batches, noise = iter(actions), iter(batches), iter(noise)
    patches = [(SyncVectorEnv, "reset", lambda envs: reset(envs, seed=seeds[0]))]
    patches += [(gymnasium.spaces.Box, "sample", lambda space: next(actions))]
    patches += [(ReplayBuffer, "sample", lambda buffer, size: buffer._get_samples(next(batches).numpy()))]
    patches += [(torch, "randn_like", lambda like, device: next(noise))]
    patches += [(torch, "normal", lambda mean, std: mean + std * next(noise))]
    theirs = train(root / "cleanrl" / "td3_continuous_action.py", [*options, "--cuda=False"], patches)

    first, difference, moved, same = {}, 0.0, 0.0, False
    print("optimizer steps  difference  moved")
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True), start=1):
        first.setdefault(len(our), our)  # the critics and the actor have different sizes
        difference = max(difference, (our - their).abs().max().item())
        moved = max(moved, (our - first[len(our)]).abs().max().item())
        if number == 30:
            same = difference < 1e-3 * moved
        if number in (1, 10, 30, 100, 300, len(ours)):
            print(f"{number:15}  {difference:10.1e}  {moved:5.1e}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
