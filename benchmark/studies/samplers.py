"""What a draw of prioritised replay takes, with its weights and then its new priorities, by sampler.

    OMP_NUM_THREADS=1 taskset -c 1 .venv-torchrl/bin/python -m benchmark.studies.samplers
        [--cleanrl CLONE] [--output FILE]

On the CPU: the script's own; a prefix sum over all rows, in float64; of a clone of CleanRL the
buffer of rainbow_atari.py, which also fetches its rows, of a byte here; TorchRL's, if it is installed. Its
extension needs the very PyTorch that it was built for:

    python3 -m venv .venv-torchrl && .venv-torchrl/bin/pip install torch==2.14.1 torchrl==0.14.1 \\
        envpool==1.2.5 gymnasium tyro pydantic tqdm tensorboard

Samplers take turns; a figure is the median of 15 rounds. Nothing else may run meanwhile; it takes five
minutes. FILE is written anew. docs/tricks.md shows benchmark/results/samplers.jsonl.
"""

import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmark import LEANRL
from benchmark.studies import tricks
from benchmark.tables import by, by_machine, markdown

ALPHA = BETA = 0.5
CPU = torch.device("cpu")
check = tricks.check


@dataclass
class Args(tricks.Args):
    cleanrl: Path | None = None
    """a clone of CleanRL"""


@by_machine
def table(lines: list[dict]) -> str:
    """Microseconds by sizes and sampler."""
    groups, samplers = by(lines, "title").items(), dict.fromkeys(line["variant"] for line in lines)
    rows = [[title, *(f"{line['microseconds']:,.0f}" for line in group)] for (title,), group in groups]
    return markdown(["microseconds a draw", *samplers], rows)


# Each draws rows, which have these errors at the beginning, and gives them the new ones.
def two_levels(errors: Tensor, new: Tensor) -> Iterator[Tensor]:
    script = runpy.run_path(str(LEANRL / "rainbow_atari_envpool.py"), run_name="script")
    args = script["Args"](buffer_size=len(errors), batch_size=len(new), buffer_file="none")
    of_script, no_frames = script["Replay"].__init__.__globals__, np.zeros(1, np.uint8)
    with patch.dict(of_script, open_frames=lambda *_, anew: no_frames):  # which would take 7 GB
        replay = script["Replay"](args, CPU)
    replay.priorities.view(-1)[: len(errors)] = errors**ALPHA
    replay.group_sums.copy_(replay.priorities.sum(1, dtype=torch.float64))
    while True:
        rows, priorities, _ = replay.draw(len(new), BETA)
        replay.reprioritise(rows, priorities, new**ALPHA)
        yield rows


def flat(errors: Tensor, new: Tensor) -> Iterator[Tensor]:
    priorities = errors**ALPHA
    while True:
        ends = priorities.cumsum(0, dtype=torch.float64)
        parts = (torch.arange(len(new)) + torch.rand(len(new), dtype=torch.float64)) / len(new)
        rows = torch.searchsorted(ends, parts * ends[-1], right=True).clamp(max=len(ends) - 1)
        weights = priorities[rows] ** -BETA
        weights = weights / weights.max()
        priorities[rows] = new**ALPHA
        yield rows


def cleanrl(errors: Tensor, new: Tensor, clone: Path) -> Iterator[list[int]]:
    utilities = ("cleanrl_utils", "cleanrl_utils.atari_wrappers")  # of games, which nobody plays here
    with patch.dict(sys.modules, {name: MagicMock() for name in utilities}):
        script = runpy.run_path(str(clone / "cleanrl" / "rainbow_atari.py"), run_name="script")
    buffer = script["PrioritizedReplayBuffer"](len(errors), (), CPU, 1, 0.99, ALPHA, BETA)
    buffer.size = len(errors)
    buffer.update_priorities(range(len(errors)), errors.numpy())
    while True:
        rows = buffer.sample(len(new)).indices
        buffer.update_priorities(rows, new.numpy())
        yield rows


def torchrl(errors: Tensor, new: Tensor) -> Iterator[Tensor]:
    from torchrl.data import LazyTensorStorage, PrioritizedSampler

    sampler, storage = PrioritizedSampler(len(errors), ALPHA, BETA), LazyTensorStorage(len(errors))
    storage.set(torch.arange(len(errors)), torch.zeros(len(errors), dtype=torch.uint8))
    sampler.update_priority(torch.arange(len(errors)), errors, storage=storage)
    while True:
        rows, _ = sampler.sample(storage, len(new))
        sampler.update_priority(rows, new, storage=storage)
        yield rows


def figures(clone: Path | None) -> list[dict]:
    """A line for each sampler and size."""
    made = {"two_levels": two_levels, "flat": flat}
    made |= {"CleanRL": partial(cleanrl, clone=clone)} if clone else {}
    made |= {"TorchRL": torchrl} if find_spec("torchrl") else {}
    lines = []
    for size, batch in ((size, batch) for size in (100_000, 1_000_000) for batch in (32, 256)):
        errors, new = torch.rand(size) + 1e-3, torch.rand(batch) + 1e-3
        draws = {name: partial(next, make(errors, new)) for name, make in made.items()}
        lines += tricks.compare(f"{batch} of {size:,} rows", 50, **draws)
    return lines


if __name__ == "__main__":
    args = tyro.cli(Args)
    tricks.measure(partial(figures, args.cleanrl), table, args.output)
