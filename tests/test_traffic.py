"""How often scripts copy and wait: as often as the table below says, and never in what is to be captured."""

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from conftest import ACTOR_CRITIC, DQN, MEMORY, OFF_POLICY, SAVED, SCRIPTS, TWINS, checkpoint, play
from traffic import TrafficError, counted_traffic

# A gradient step after each of 22 steps, without a log entry; or four rollouts of eight, with four of them.
STEPS = ("--learning-starts", 20, "--batch-size", 8, "--log-every", 1000, "--total-timesteps", 42)
EACH_STEP = ("--train-frequency", 1, "--target-network-frequency", 2)
ROLLOUTS = ("--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 2)
# Of the steps an even number of gradient steps, or the second rollout and the third.
STEADY = {"off-policy": slice(24, 40), "on-policy": slice(8, 24)}
EVENTS = ("to the device", "to the host", "wait", "operation")
OVERLAPPED = [name for name in ACTOR_CRITIC if name in TWINS]


def row(command: str) -> str:
    """The line of the table for a script and its options, counted in a run that saves and evaluates, too."""
    name, *options = command.split()
    off_policy = name in OFF_POLICY
    if off_policy:
        args = (*STEPS, *options, *(EACH_STEP if name in DQN else ()))
    else:
        num_envs = int(options[-1]) if options else 2
        args = (*ROLLOUTS, "--num-envs", num_envs, "--total-timesteps", 32 * num_envs)
    # Of one with a memory in a world that cuts no episode: what that costs beyond other steps is not counted.
    terminate = patch.multiple("envs", TERMINATED=(1,) * 8, TRUNCATED=(0,) * 8)
    world = terminate if name in MEMORY else nullcontext()
    with world, counted_traffic() as traffic, TemporaryDirectory() as directory:
        args += (*SAVED, "--eval-every", 10**6, "--eval-episodes", 1)
        run = play(name, *args, cuda=True, directory=Path(directory))
        assert checkpoint(Path(directory))
    assert run["updates"] >= 16
    counted = [after - before for before, after in pairwise(traffic.steps)]
    counted = counted[STEADY["off-policy" if off_policy else "on-policy"]]
    if name in OVERLAPPED:
        # While actions are on their way all is launched but the policy and the row that is stored.
        assert all(0 < step["operation"] - step["operation meanwhile"] < 50 for step in counted)
    steps = sorted(([step[event] for event in EVENTS] for step in counted), key=lambda step: step[-1])
    if off_policy:
        # All alike, but for the operations: a gradient step may be one with the actor, or the target of DQN.
        cells = steps[0][:-1]
        assert [step[:-1] for step in steps] == [cells] * len(steps)
    else:
        # All alike, but for those that a rollout ends with.
        *steps, rollout, another = steps
        assert steps == [steps[0]] * len(steps) and rollout == another
        added = [end - of_step for end, of_step in zip(rollout, steps[0], strict=True)]
        cells = [*steps[0][:-1], *added[:-1]]
    return " ".join(map(str, cells))


# Copies to the device and to the host, and waits, of a step and, on-policy, what a rollout adds. Another line
# is right if what is copied or waited for at each step is meant to be.
TABLE = """\
dqn: 2 1 1
dqn_torchcompile: 1 1 1
ppo: 1 1 1 1 1 1
ppo_torchcompile: 0 0 0 1 7 7
ppo_torchcompile --num-envs 257: 1 1 1 1 1 1
ppo_atari_envpool: 1 1 1 1 1 1
ppo_atari_envpool_torchcompile: 1 1 1 1 1 1
ppo_atari_lstm_envpool: 2 1 1 1 1 1
ppo_atari_lstm_envpool_torchcompile: 2 1 1 1 1 1
ppo_continuous_action: 1 1 1 1 2 2
ppo_continuous_action_torchcompile: 0 0 0 1 8 8
ppo_continuous_action_torchcompile --num-envs 257: 1 1 1 1 2 2
ppo_continuous_action_lstm: 2 1 1 1 2 2
ppo_continuous_action_lstm_torchcompile: 2 1 1 1 2 2
ppo_lstm: 2 1 1 1 1 1
ppo_lstm_torchcompile: 2 1 1 1 1 1
pqn: 1 1 1 1 1 1
pqn_torchcompile: 0 0 0 1 2 2
pqn_torchcompile --num-envs 65: 1 1 1 1 1 1
pqn_atari_envpool: 1 1 1 1 1 1
pqn_atari_envpool_torchcompile: 1 1 1 1 1 1
sac_continuous_action: 2 1 1
sac_continuous_action_torchcompile: 2 1 1
td3_continuous_action: 2 1 1
td3_continuous_action_torchcompile: 2 1 1
fast_td3: 2 1 1
fast_td3_torchcompile: 2 1 1
"""
TABLE = dict(line.split(": ") for line in TABLE.splitlines())


@pytest.mark.parametrize("command", [*TABLE, *(name for name in (*SCRIPTS, *TWINS) if name not in TABLE)])
def test_copies_and_waits_are_those_of_the_table(command):
    """And of a script that the table does not have, all steps are alike and nothing is refused."""
    counted = row(command)
    assert counted == TABLE.get(command, counted)


# What may stand in a function that is to be captured, or not.
FAULTS = {
    "size.item()": "to the host and wait in update",
    "torch.tensor(0.99, device=device)": "to the device and wait in update",
    "size[size > 0]": "wait in update",
    "size.nonzero()": "wait in update",
    "torch.cuda.synchronize()": "wait in update",
    "torch.histogram(size.float(), 3)": "histogram",  # which only a CPU has
    "size + torch.zeros(1)": "tensors of the host and of the device",
    "size + torch.tensor(1)": "number of the host in update",
}


@pytest.mark.parametrize("statement", FAULTS)
def test_what_does_not_belong_into_a_graph_is_refused(statement):
    with counted_traffic(), pytest.raises(Exception, match=FAULTS[statement]):
        names = {"torch": torch, "device": (device := torch.device("cuda")), "__name__": "__main__"}
        names["size"] = torch.ones(1, device=device)
        exec(f"def update(): {statement}\nupdate()", names)


def test_copies_and_waits_are_counted():
    device = torch.device("cuda")
    with counted_traffic() as traffic:
        on_device, on_host = torch.ones(2, device=device), torch.ones(2)

        def counted() -> list[int]:
            found = [traffic.counts[event] for event in EVENTS[:3]]
            traffic.counts.clear()
            return found

        counted()
        on_device.sum().item()
        assert counted() == [0, 1, 1]
        on_host.to(device)
        assert counted() == [1, 0, 1]
        on_host.to(device, non_blocking=True)
        assert counted() == [1, 0, 0]
        arriving = on_device.to("cpu", non_blocking=True)
        assert arriving.isnan().all() and counted() == [0, 1, 0]
        torch.cuda.synchronize()
        assert not arriving.isnan().any() and counted() == [0, 0, 1]
        on_device.copy_(on_host, non_blocking=True)
        on_host[0] = 7
        with pytest.raises(TrafficError, match="changed with a copy of it"):
            torch.cuda.synchronize()
