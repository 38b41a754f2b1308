"""One process of a run with several, as torchrun starts it, that keeps what each gradient step leaves.

    torchrun ... tests/ranks.py FOLDER NAME [ARGS]

Runs the script NAME, its games in place of EnvPool's, and writes FOLDER/<rank>.pt; with - it keeps nothing.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from capture import without_inductor
from conftest import run
from envs import ScriptedGames
from torch import Tensor


class Order:
    """The rows of a batch in some order: whoever takes the next minibatch has learnt from the last one."""

    def __init__(self, rows: Tensor, kept: dict[str, list]):
        self.rows, self.kept = rows, kept

    def __getitem__(self, index: slice) -> Tensor:  # Inductor has a pattern with a slice of one
        return self.rows[index]

    def chunk(self, count: int) -> Iterator[Tensor]:
        script = sys.modules["__main__"]  # whose body is running
        self.kept["buffers"].append(script.buffer.clone())
        self.kept["obs"].append(torch.as_tensor(script.rollout_obs).clone())
        self.kept["before"].append(script.flat_agent.params.detach().clone())
        for indices in self.rows.chunk(count):
            yield indices
            self.kept["indices"].append(indices)
            self.kept["params"].append(script.flat_agent.params.detach().clone())
        if len(self.kept["buffers"]) == 1:  # an epoch of which only the mean over ranks is below --target-kl
            script.losses["approx_kl"].fill_(script.rank)


def main(folder: str, name: str, *args: str) -> None:
    """Run a script with these arguments, and write what it has kept."""
    kept = {kind: [] for kind in ("buffers", "obs", "before", "indices", "params")}
    randperm, broadcast, rank = torch.randperm, torch.distributed.broadcast, int(os.environ["RANK"])

    def sent(tensor: Tensor | Order, *args) -> None:
        broadcast(getattr(tensor, "rows", tensor), *args)

    def shuffled(*args, **options) -> Order:
        torch.rand(rank)  # as environments may that draw from PyTorch's generator
        return randperm(*args, **options) if folder == "-" else Order(randperm(*args, **options), kept)

    with (
        without_inductor(),
        patch("envpool.make", ScriptedGames),
        patch("torch.randperm", shuffled),
        patch("torch.distributed.broadcast", sent),
    ):
        run(name, *args, directory=Path.cwd())
    if folder != "-":
        torch.save(kept, Path(folder) / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
