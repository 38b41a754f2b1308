"""Scripts copy and wait no more than they have to, and never in what is to be captured."""

from contextlib import nullcontext
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from conftest import ACTOR_CRITIC, DQN, MEMORY, OFF_POLICY, RAINBOW, SAVED, TWINS, checkpoint, play
from traffic import TrafficError, counted_traffic

# A gradient step after each of 22 steps, without a log entry; or four rollouts of eight, with four of them.
STEPS = ("--learning-starts", 20, "--batch-size", 8, "--log-every", 1000, "--total-timesteps", 42)
EACH_STEP = ("--train-frequency", 1, "--target-network-frequency", 2)
ROLLOUTS = ("--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 2)
# Of the steps an even number of gradient steps, or the second rollout and the third.
STEADY = {"off-policy": slice(24, 40), "on-policy": slice(8, 24)}
# Twins that act in NumPy, and with so many environments in PyTorch.
IN_NUMPY = ("ppo_torchcompile", "ppo_continuous_action_torchcompile", "pqn_torchcompile")
MANY = [f"{name} --num-envs {65 if 'pqn' in name else 257}" for name in IN_NUMPY]
EAGER = ("sac_continuous_action", "dqn", "ppo_continuous_action_lstm", "ppo_atari_envpool")  # of each kind
EVENTS = ("to the device", "to the host", "wait", "operation")
OVERLAPPED = [name for name in ACTOR_CRITIC if name in TWINS]


@pytest.mark.parametrize("command", [*EAGER, *TWINS, *MANY])
def test_steps_are_alike_and_wait_for_their_actions_alone(command, tmp_path):
    """In a run that saves and evaluates, too; what a rollout ends with is alike as well."""
    name, *options = command.split()
    num_envs = int(options[-1]) if options else 2
    if name in OFF_POLICY:
        args = (*STEPS, *(EACH_STEP if name in (*DQN, *RAINBOW) else ()))
        args += ("--buffer-size", 100) if name in RAINBOW else ()
    else:
        args = (*ROLLOUTS, "--num-envs", num_envs, "--total-timesteps", 32 * num_envs)
    # Of one with a memory in a world that cuts no episode: what that costs beyond other steps is not counted.
    terminate = patch.multiple("envs", TERMINATED=(1,) * 8, TRUNCATED=(0,) * 8)
    args += (*SAVED, "--eval-every", 10**6, "--eval-episodes", 1)
    with terminate if name in MEMORY else nullcontext(), counted_traffic() as traffic:
        run = play(name, *args, cuda=True, directory=tmp_path)
        assert checkpoint(tmp_path)
    assert run["updates"] >= 16
    counted = [after - before for before, after in pairwise(traffic.steps)]
    counted = counted[STEADY["off-policy" if name in OFF_POLICY else "on-policy"]]
    if name in OVERLAPPED:
        # While actions are on their way all is launched but the policy and the row that is stored.
        assert all(0 < step["operation"] - step["operation meanwhile"] < 50 for step in counted)
    steps = sorted(([step[event] for event in EVENTS] for step in counted), key=lambda step: step[-1])
    if name not in OFF_POLICY:
        *steps, rollout, another = steps
        cuts = 2 * 5 if name in MEMORY and name not in TWINS else 0  # of two memories, in five passes
        assert rollout == another and rollout[2] <= 9 + cuts
    # A gradient step may be one with the actor, or the target of DQN: then it has more operations.
    same = [step[: 3 if name in OFF_POLICY else 4] for step in steps]
    assert same == [same[0]] * len(steps)
    to_device, to_host, waits = same[0][:3]
    in_numpy = name in IN_NUMPY and not options
    assert (to_host, waits) == ((0, 0) if in_numpy else (1, 1)) and to_device <= 2


# What must not stand in a function that is to be captured.
FAULTS = {
    "size.item()": "to the host and wait in update",
    "torch.tensor(0.99, device=device)": "to the device and wait in update",
    "size[size > 0]": "wait in update",
    "torch.cuda.synchronize()": "wait in update",
    "size + torch.zeros(1)": "tensors of the host and of the device",
    "size + torch.tensor(1)": "number of the host in update",
}


def test_copies_and_waits_are_counted_and_refused_in_a_graph():
    device = torch.device("cuda")
    for statement, told in FAULTS.items():
        with counted_traffic(), pytest.raises(TrafficError, match=told):
            names = {"torch": torch, "device": device, "size": torch.ones(1, device=device)}
            exec(f"def update(): {statement}\nupdate()", names | {"__name__": "__main__"})
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
