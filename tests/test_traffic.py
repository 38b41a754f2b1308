"""How often scripts copy and wait: as often as docs/tricks.md says, and never in what is to be captured."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import DISCRETE, OFF_POLICY, ROOT, SCRIPTS, SEEDS, TWINS, changed, play
from traffic import TrafficError, counted_traffic

SAC, TD3, PPO = (f"{name}_continuous_action_torchcompile" for name in ("sac", "td3", "ppo"))
# A gradient step after each of 40 steps, without a log entry; or rollouts of eight, with four of them.
STEPS = ("--learning-starts", 20, "--batch-size", 8, "--log-every", 1000, "--total-timesteps", 60)
EACH_STEP = ("--train-frequency", 1, "--target-network-frequency", 2)
ROLLOUTS = ("--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 2)
STEADY = slice(24, 40)  # of the steps: two rollouts, or an even number of gradient steps
EVENTS = ("to the device", "to the host", "wait", "operation")
COLUMNS = "to the device | to the host | waits | operations |"
HEADER = f"| script | {COLUMNS} rollout: {COLUMNS}"


def count(command: str) -> list[Counter]:
    """What a script and its options count between environment steps; the run saves and evaluates, too."""
    name, *options = command.split()
    if name in (*OFF_POLICY, *SEEDS):
        args = (*STEPS, *options, *(EACH_STEP if name in DISCRETE else ()))
    else:
        num_envs = int(options[options.index("--num-envs") + 1]) if options else 2
        args = (*ROLLOUTS, "--num-envs", num_envs, "--total-timesteps", 48 * num_envs)
    with counted_traffic() as traffic, TemporaryDirectory() as directory:
        run = play(name, *args, "--save-model", "--eval-episodes", 1, cuda=True, directory=Path(directory))
        assert [*Path(directory).glob(f"runs/*/{run['global_step']}.pt")]
    assert run["updates"] >= 16
    return traffic.between_steps()[STEADY]


def row(command: str) -> str:
    """The row of the table for a script and its options, counted."""
    name, counted = command.split()[0], count(command)
    steps = sorted(([step[event] for event in EVENTS] for step in counted), key=lambda step: step[-1])
    if name in (*OFF_POLICY, *SEEDS):
        # All alike, but for the operations: a gradient step may be one with the actor, or the target of DQN.
        cells = [*steps[0][:-1], sum(step[-1] for step in steps) / len(steps), *[""] * len(EVENTS)]
        assert [step[:-1] for step in steps] == [cells[:3]] * len(steps)
    else:
        # All alike, but for those that a rollout ends with.
        *steps, rollout, another = steps
        assert steps == [steps[0]] * len(steps) and rollout == another
        cells = [*steps[0], *(end - of_step for end, of_step in zip(rollout, steps[0], strict=True))]
    if name in (SAC, TD3, *SEEDS):
        # While actions are on their way all is launched but the policy and the row that is stored.
        assert all(0 < step["operation"] - step["operation meanwhile"] < 50 for step in counted)
    return f"| `{command}` | {' | '.join(cell if cell == '' else f'{cell:g}' for cell in cells)} |"


# The rows of the table by their first cell.
LINES = (ROOT / "docs" / "tricks.md").read_text().split(HEADER)[1].split("\n\n")[0].splitlines()
TABLE = {line.split("`")[1]: line for line in LINES if line.startswith("| `")}


def test_the_table_has_every_script():
    assert {command.split()[0] for command in TABLE} == {*SCRIPTS, *TWINS, *SEEDS}


@pytest.mark.parametrize("command", TABLE)
def test_copies_and_waits_are_those_of_the_table(command):
    assert row(command) == TABLE[command]


NOISE, UPDATE = "torch.randn_like(mean)", '"""One gradient step on a new batch."""'
BOTH = "tensors of the host and of the device"
# Passages of twins, what takes their place, and how it shows. First statements in a gradient step.
STATEMENTS = {
    "size.item()": "to the host and wait in update",
    "size > 1 and None": "to the host and wait in update",
    "torch.tensor(0.99, device=device)": "to the device and wait in update",
    "size[size > 0]": "wait in update",
    "torch.cuda.synchronize()": "wait in update",
}
FAULTS = [(TD3, UPDATE, f"{UPDATE}; {statement}", message) for statement, message in STATEMENTS.items()]
FAULTS += [
    (TD3, NOISE, "torch.randn(mean.shape)", BOTH),
    (TD3, NOISE, "torch.randn(mean.shape).to(device)", "to the device and wait in act"),
    (TD3, "torch.tensor(1, device=device)", "torch.tensor(1)", "number of the host in update"),
    (PPO, "+ 5, device=device)", "+ 5)", "to the host and wait in prepare"),
    (PPO, "zeros_like(rollout, device=device)", "zeros_like(rollout)", BOTH),
    (PPO, "            prepare()", "            rollout[0] = 7; prepare()", "changed with a copy of it"),
    (SAC, "            actions_arrived.synchronize()", "            pass", "nan"),
    (SAC, "                actions_arrived.record()", "                pass", "nan"),
]
# Statements of the loop, which may copy and wait, but are counted in the row of the table.
STATEMENTS = {
    'losses["qf1_loss"].item()': r"\| 2 \| 2 \| 2 \|",
    "torch.ones(()).to(device)": r"\| 3 \| 1 \| 2 \|",
    "torch.ones(()).to(device, non_blocking=True)": r"\| 3 \| 1 \| 1 \|",
}
PLACE = "            size.fill_("
FAULTS += [(TD3, PLACE, f"            {code}\n{PLACE}", message) for code, message in STATEMENTS.items()]


@pytest.mark.parametrize(("name", "passage", "other", "message"), FAULTS)
def test_what_does_not_belong_is_told(name, passage, other, message):
    with changed(name, passage, other), pytest.raises((TrafficError, AssertionError), match=message):
        assert row(name) == TABLE[name]
