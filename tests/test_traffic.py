"""How often scripts copy and wait: as often as docs/tricks.md says, and never in what is to be captured."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import DQN, OFF_POLICY, ROOT, SCRIPTS, SEEDS, TWINS, changed, play
from traffic import counted_traffic

# A gradient step after each of 40 steps, without a log entry; or rollouts of eight, with four of them.
STEPS = ("--learning-starts", 20, "--batch-size", 8, "--log-every", 1000, "--total-timesteps", 60)
EACH_STEP = ("--train-frequency", 1, "--target-network-frequency", 2)
ROLLOUTS = ("--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 2)
STEADY = slice(24, 40)  # of the steps: two rollouts, or an even number of gradient steps
EVENTS = ("to the device", "to the host", "wait", "operation")
SAC, TD3, PPO = (f"{name}_continuous_action_torchcompile" for name in ("sac", "td3", "ppo"))


def row(command: str) -> str:
    """The row of the table for a script and its options, counted in a run that saves and evaluates, too."""
    name, *options = command.split()
    off_policy = name in (*OFF_POLICY, *SEEDS)
    if off_policy:
        args = (*STEPS, *options, *(EACH_STEP if name in DQN else ()))
    else:
        num_envs = int(options[-1]) if options else 2
        args = (*ROLLOUTS, "--num-envs", num_envs, "--total-timesteps", 48 * num_envs)
    with counted_traffic() as traffic, TemporaryDirectory() as directory:
        run = play(name, *args, "--save-model", "--eval-episodes", 1, cuda=True, directory=Path(directory))
        assert [*Path(directory).glob(f"runs/*/{run['global_step']}.pt")]
    assert run["updates"] >= 16
    counted = [after - before for before, after in pairwise(traffic.steps)][STEADY]
    if name in (SAC, TD3, *SEEDS):
        # While actions are on their way all is launched but the policy and the row that is stored.
        assert all(0 < step["operation"] - step["operation meanwhile"] < 50 for step in counted)
    steps = sorted(([step[event] for event in EVENTS] for step in counted), key=lambda step: step[-1])
    if off_policy:
        # All alike, but for the operations: a gradient step may be one with the actor, or the target of DQN.
        cells = [*steps[0][:-1], sum(step[-1] for step in steps) / len(steps), *[""] * len(EVENTS)]
        assert [step[:-1] for step in steps] == [cells[:3]] * len(steps)
    else:
        # All alike, but for those that a rollout ends with.
        *steps, rollout, another = steps
        assert steps == [steps[0]] * len(steps) and rollout == another
        cells = [*steps[0], *(end - of_step for end, of_step in zip(rollout, steps[0], strict=True))]
    return f"| `{command}` | {' | '.join(cell if cell == '' else f'{cell:g}' for cell in cells)} |"


# The rows of the table by their first cell.
SECTION = (ROOT / "docs" / "tricks.md").read_text().split("## Copies and waits")[1].split("\n## ")[0]
TABLE = {line.split("`")[1]: line for line in SECTION.splitlines() if line.startswith("| `")}


def test_the_table_has_every_script():
    assert {command.split()[0] for command in TABLE} == {*SCRIPTS, *TWINS, *SEEDS}


@pytest.mark.parametrize("command", TABLE)
def test_copies_and_waits_are_those_of_the_table(command):
    assert row(command) == TABLE[command]


# Passages of twins, what takes their place, and how it shows: what a gradient step begins with is refused.
UPDATE, PLACE = '"""One gradient step on a new batch."""', "            size.fill_("
FAULTS = [
    (TD3, UPDATE, f"{UPDATE}; size.item()", "to the host and wait in update"),
    (TD3, UPDATE, f"{UPDATE}; torch.tensor(0.99, device=device)", "to the device and wait in update"),
    (TD3, UPDATE, f"{UPDATE}; size[size > 0]", "wait in update"),
    (TD3, UPDATE, f"{UPDATE}; size.nonzero()", "wait in update"),
    (TD3, UPDATE, f"{UPDATE}; torch.cuda.synchronize()", "wait in update"),
    (TD3, UPDATE, f"{UPDATE}; torch.histogram(buffer[0], 3)", "histogram"),  # which only a CPU has
    (TD3, "torch.randn_like(mean)", "torch.randn(mean.shape)", "tensors of the host and of the device"),
    (TD3, "torch.tensor(1, device=device)", "torch.tensor(1)", "number of the host in update"),
    (PPO, "+ 5, device=device)", "+ 5)", "to the host and wait in prepare"),
    (PPO, "            prepare()", "            rollout[0] = 7; prepare()", "changed with a copy of it"),
    (SAC, "            actions_arrived.synchronize()", "            pass", "nan"),
    (SAC, "                actions_arrived.record()", "                pass", "nan"),
    # In the loop copies and waits are counted.
    (TD3, PLACE, f'            losses["qf1_loss"].item()\n{PLACE}', r"\| 2 \| 2 \| 2 \|"),
    (TD3, PLACE, f"            torch.ones(()).to(device)\n{PLACE}", r"\| 3 \| 1 \| 2 \|"),
    (TD3, PLACE, f"            torch.ones(()).to(device, non_blocking=True)\n{PLACE}", r"\| 3 \| 1 \| 1 \|"),
]


@pytest.mark.parametrize(("name", "passage", "other", "message"), FAULTS)
def test_what_does_not_belong_is_told(name, passage, other, message):
    with changed(name, passage, other), pytest.raises(Exception, match=message):
        assert row(name) == TABLE[name]
