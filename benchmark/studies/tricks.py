"""Measure what docs/tricks.md names one by one: each against what it replaces, in micro- or milliseconds.

    ./run.sh python -m benchmark.studies.tricks [--output benchmark/results/tricks.jsonl]

Uses the sizes of the scripts on their default tasks, on the CUDA device if there is one. SAC: 17
observations, 6 actions, batches of 256, two critics of 256 and 256 units. PPO: 2048 steps, or minibatches of
256 times four frames. The variants of a row are interleaved; a figure is the median of 15 rounds. Nothing
else may run meanwhile. The file that --output names is written anew, one line a figure.
"""

import copy
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn, optim
from torch.func import functional_call, stack_module_state, vmap

from benchmark import records
from benchmark.machine import provenance
from benchmark.tables import by_machine, markdown
from benchmark.terminal import check_output

OBS, ACTIONS, BATCH, ROUNDS = 17, 6, 256, 15
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Line(records.Timing):
    """What a call of one variant takes."""

    title: str
    variant: str
    microseconds: float
    threads: int | None


check = records.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """Microseconds a call of each variant, and the ratio to the first one of its title."""
    rows, first, previous = [], {}, None
    for line in lines:
        base = first.setdefault(line["title"], line["microseconds"])
        figures = [f"{line['microseconds']:.2f}", f"{line['microseconds'] / base:.2f}"]
        named = rows and line["title"] == previous
        rows.append([f"…{line['variant']}" if named else f"{line['title']}: {line['variant']}", *figures])
        previous = line["title"]
    return markdown(["", "microseconds a call", "x the first of its name"], rows)


@dataclass
class Args:
    output: Path | None = None
    """a file of results to write anew"""


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compare(title: str, calls: int, **variants: Callable[[], object]) -> list[dict]:
    """Time variants of one thing, interleaved: a line for each, with the microseconds that a call takes."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(ROUNDS + 1):
        for name, variant in variants.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                variant()
            synchronize()
            if round_index:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / calls)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    about = [{"title": title, "variant": name.replace("_", " ")} for name in medians]
    return [line | {"microseconds": 1e6 * x} for line, x in zip(about, medians.values(), strict=True)]


def mlp(activation: type[nn.Module], *sizes: int) -> nn.Sequential:
    """Linear layers of these sizes, on the CPU, with an activation between two."""
    layers = [nn.Linear(before, after) for before, after in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, activation())][:-1])


def single_critic() -> nn.Sequential:
    """One critic as plain modules: (batch, obs + actions) to (batch, 1)."""
    return mlp(nn.ReLU, OBS + ACTIONS, 256, 256, 1).to(DEVICE)


class BatchedCritics(nn.Module):
    """Two critics as batched matrix products: (batch, obs + actions) to (2, batch)."""

    def __init__(self):
        super().__init__()
        pairs = list(zip(single_critic()[::2], single_critic()[::2], strict=True))
        weights = (torch.stack([layer.weight.detach().T for layer in pair]) for pair in pairs)
        biases = (torch.stack([layer.bias.detach() for layer in pair])[:, None] for pair in pairs)
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(2, -1, -1)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.bmm(x, weight) + bias
            x = x.relu() if index < 2 else x
        return x.squeeze(-1)


def critics() -> list[dict]:
    x = torch.randn(BATCH, OBS + ACTIONS, device=DEVICE)
    ensemble = BatchedCritics()
    pair = [single_critic(), single_critic()]
    stacked, _ = stack_module_state(pair)
    skeleton = copy.deepcopy(pair[0]).to("meta")

    def gradients(values: Tensor, params: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(values.square().mean(), [*params])

    def batched_layer() -> tuple[Tensor, ...]:
        return gradients(ensemble(x), ensemble.parameters())

    def at_once() -> tuple[Tensor, ...]:
        values = vmap(lambda params: functional_call(skeleton, params, (x,)))(stacked)
        return gradients(values, stacked.values())

    def one_by_one() -> tuple[Tensor, ...]:
        return gradients(torch.stack([critic(x) for critic in pair]), nn.ModuleList(pair).parameters())

    calls = (at_once, one_by_one, batched_layer)
    rows = compare("two critics, forward and backward", 20, **{call.__name__: call for call in calls})
    torch._dynamo.config.trace_autograd_ops = True  # as the twins
    compiled = {f"{call.__name__}_compiled": torch.compile(call, fullgraph=True) for call in calls}
    return rows + compare("the same", 20, **compiled)


def sampling() -> list[dict]:
    sizes, calls = [OBS, ACTIONS, 1, 1, OBS], 200
    rows = torch.randn(1_000_000, sum(sizes), device=DEVICE)
    columns = [torch.randn(1_000_000, size, device=DEVICE) for size in sizes]
    once = torch.randn(1_000_001, OBS + ACTIONS + 2, device=DEVICE)
    next_row = torch.arange(1, 1_000_001, device=DEVICE)

    def anew(fetch: Callable[[Tensor], object]) -> Callable[[], object]:
        """Fetch other rows at each call: those of the last are in the caches."""
        drawn = torch.randint(1_000_000, ((ROUNDS + 1) * calls, BATCH), device=DEVICE)
        batches = iter(drawn.unbind())
        return lambda: fetch(next(batches))

    def from_next_row(indices: Tensor) -> tuple[Tensor, Tensor]:
        return once.index_select(0, indices), once.index_select(0, next_row.index_select(0, indices))

    return compare(
        "a batch out of a million transitions",
        calls,
        one_index_select=anew(lambda indices: rows.index_select(0, indices)),
        one_indexing=anew(lambda indices: rows[indices]),
        observations_stored_once=anew(from_next_row),
        a_tensor_a_field=anew(lambda indices: [column[indices] for column in columns]),
    )


def optimizers() -> list[dict]:
    kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
    variants = {}
    for name, options in kinds.items():
        critic = BatchedCritics()
        for parameter in critic.parameters():
            parameter.grad = torch.randn_like(parameter)
        variants[name] = optim.Adam(critic.parameters(), **options).step
    return compare("a step of Adam on the critics", 50, **variants)


def gradients() -> list[dict]:
    obs = torch.randn(BATCH, OBS, device=DEVICE)
    critic = BatchedCritics()
    actor = mlp(nn.ReLU, OBS, 256, 256, ACTIONS).append(nn.Tanh()).to(DEVICE)
    actor_params = list(actor.parameters())

    def loss() -> Tensor:
        return critic(torch.cat([obs, actor(obs)], dim=1)).mean()

    named = {"inputs_named": lambda: loss().backward(inputs=actor_params)}
    return compare("the actor's gradient", 20, **named, critics_too=lambda: loss().backward())


def targets() -> list[dict]:
    """The twins have one tensor a network."""
    one, other = ([p.detach() for p in BatchedCritics().parameters()] for _ in range(2))
    flat_one, flat_other = (nn.utils.parameters_to_vector(tensors) for tensors in (one, other))

    def loop() -> None:
        for target, parameter in zip(one, other, strict=True):
            target.lerp_(parameter, 0.005)

    variants = {"one_tensor": lambda: flat_one.lerp_(flat_other, 0.005)}
    variants |= {"foreach": lambda: torch._foreach_lerp_(one, other, 0.005), "loop": loop}
    return compare("target networks", 100, **variants)


def denormals() -> list[dict]:
    """Adam on weights whose gradient has been zero for long: flushed and not."""

    def step_from(first_moment: float) -> Callable[[], None]:
        weight = torch.zeros(256, 256, device=DEVICE, requires_grad=True)
        weight.grad = torch.zeros_like(weight)
        optimizer = optim.Adam([weight], fused=True)
        optimizer.step()

        def step() -> None:
            optimizer.state[weight]["exp_avg"].fill_(first_moment)
            optimizer.step()

        return step

    variants = {"flushed_to_zero": step_from(0.0), "denormal": step_from(1e-40)}
    return compare("a step of Adam on dead weights", 50, **variants)


def advantages() -> list[dict]:
    deltas, discounts = torch.randn(2048, 1, device=DEVICE), torch.full((2048, 1), 0.94, device=DEVICE)

    def doubling() -> Tensor:
        sums, factors, shift = deltas, discounts, 1
        while shift < len(deltas):
            sums = sums + factors * F.pad(sums[shift:], (0, 0, 0, shift))
            factors = factors * F.pad(factors[shift:], (0, 0, 0, shift))
            shift *= 2
        return sums

    def loop() -> Tensor:
        sums, following = torch.empty_like(deltas), torch.zeros_like(deltas[0])
        for step in range(len(deltas) - 1, -1, -1):
            sums[step] = following = deltas[step] + discounts[step] * following
        return sums

    variants = {"doubling": doubling, "doubling_compiled": torch.compile(doubling), "loop": loop}
    return compare("advantages of 2048 steps", 2, **variants)


def compare_acting(title: str, network: nn.Sequential, obs: Tensor, hidden: Callable, choose: Callable):
    """Time what acts on observations, (num_envs, obs): the network, and `choose` on what it gives."""
    torch._dynamo.reset()  # else it would compile the second size for all
    layers = [[parameter.detach().numpy() for parameter in layer.parameters()] for layer in network[::2]]
    host_obs, on_device = obs.numpy(), copy.deepcopy(network).to(DEVICE)

    def in_numpy() -> np.ndarray:
        x = host_obs
        for weight, bias in layers[:-1]:
            x = hidden(x @ weight.T + bias)
        return choose(x @ layers[-1][0].T + layers[-1][1])

    def in_pytorch() -> np.ndarray:
        return choose(on_device(obs.to(DEVICE))).cpu().numpy()

    with torch.no_grad():
        variants = {"in_numpy": in_numpy, "in_pytorch": in_pytorch, "compiled": torch.compile(in_pytorch)}
        return compare(title, 200, **variants)


def acting(num_envs: int) -> list[dict]:
    actor, title = mlp(nn.Tanh, OBS, 64, 64, ACTIONS), f"PPO's actions for {num_envs} environments"
    return compare_acting(title, actor, torch.randn(num_envs, OBS), np.tanh, lambda actions: actions)


def exploring(num_envs: int) -> list[dict]:
    epsilon, share = torch.tensor(0.1), torch.tensor(0.1, device=DEVICE)

    def choose(values: Tensor | np.ndarray) -> Tensor | np.ndarray:
        if isinstance(values, np.ndarray):
            explores, random = torch.rand(num_envs) < epsilon, torch.randint(2, (num_envs,))
            return np.where(explores.numpy(), random.numpy(), values.argmax(axis=1))
        best = values.argmax(dim=1)
        return torch.where(torch.rand_like(values[:, 0]) < share, torch.randint_like(best, 2), best)

    network, title = mlp(nn.ReLU, 4, 120, 84, 2), f"DQN's actions for {num_envs} environments"
    return compare_acting(title, network, torch.randn(num_envs, 4), lambda x: x.clip(min=0), choose)


def convolutions() -> list[dict]:
    frames = torch.randint(256, (BATCH, 84, 84, 4), dtype=torch.uint8, device=DEVICE)
    variants = {}
    for name in ("channels_last", "channels_first"):
        convolutions = (nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3))
        layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
        network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512))
        memory_format = torch.channels_last if name == "channels_last" else torch.contiguous_format
        network.to(DEVICE, memory_format=memory_format)
        x = frames.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
        variants[name] = lambda network=network, x=x: network(x / 255.0).square().mean().backward()
    return compare("a minibatch of frames, forward and backward", 2, **variants)


def figures() -> list[dict]:
    """All that is timed: a line for each variant."""
    found = [*denormals(), *critics(), *sampling(), *optimizers(), *gradients(), *targets(), *advantages()]
    found += [line for num_envs in (1, 256, 1024) for line in acting(num_envs)]
    found += [line for num_envs in (1, 64, 256) for line in exploring(num_envs)]
    return [*found, *convolutions()]


def main(output: Path | None) -> None:
    """Print the table of the figures, and write their lines to a file, if there is one."""
    check_output(output)
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else None
    made_with = provenance((sys.executable, __file__), dict(os.environ), gpu)
    about = {"format": records.FORMAT, "status": "ok"}
    lines = [about | figure | made_with for figure in figures()]
    print(table(lines))
    if output:
        records.replace(output, lines, check)


if __name__ == "__main__":
    main(tyro.cli(Args).output)
