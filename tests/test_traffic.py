"""How often scripts copy and wait: as often as docs/tricks.md says, and never in what is to be captured."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import DISCRETE, OFF_POLICY, ROOT, SCRIPTS, SEEDS, TWINS, changed, play
from traffic import TrafficError, counted_traffic

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


def table() -> dict[str, str]:
    """The rows of the table in docs/tricks.md by their first cell."""
    after = (ROOT / "docs" / "tricks.md").read_text().split(HEADER)[1]
    rows = [line for line in after.split("\n\n")[0].splitlines() if line.startswith("| `")]
    return {row.split("`")[1]: row for row in rows}


def row(command: str) -> str:
    """The row of the table for a script and its options, counted."""
    steps = sorted(([step[event] for event in EVENTS] for step in count(command)), key=lambda step: step[-1])
    if command.split()[0] in (*OFF_POLICY, *SEEDS):
        # All alike, but for the operations: a gradient step may be one with the actor, or the target of DQN.
        assert [step[:-1] for step in steps] == [steps[0][:-1]] * len(steps)
        cells = [*steps[0][:-1], sum(step[-1] for step in steps) / len(steps), *[""] * len(EVENTS)]
    else:
        # All alike, but for those that a rollout ends with.
        *steps, rollout, another = steps
        assert steps == [steps[0]] * len(steps)
        assert rollout == another
        cells = [*steps[0], *(counted - of_step for counted, of_step in zip(rollout, steps[0], strict=True))]
    return (
        "| " + " | ".join([f"`{command}`", *(cell if cell == "" else f"{cell:g}" for cell in cells)]) + " |"
    )


def test_the_table_has_every_script():
    assert {command.split()[0] for command in table()} == {*SCRIPTS, *TWINS, *SEEDS}


@pytest.mark.parametrize("command", table())
def test_copies_and_waits_are_those_of_the_table(command):
    assert row(command) == table()[command]


SAC, TD3, PPO = (f"{name}_continuous_action_torchcompile" for name in ("sac", "td3", "ppo"))
NOISE, UPDATE = "torch.randn_like(mean)", '"""One gradient step on a new batch."""'
BOTH = "tensors of the host and of the device"
# What is said about statements in a gradient step.
STATEMENTS = {
    "size.item()": "to the host and wait in update",
    "size > 1 and None": "to the host and wait in update",
    "torch.tensor(0.99, device=device)": "to the device and wait in update",
    "size[size > 0]": "wait in update",
    "torch.cuda.synchronize()": "wait in update",
}
FAULTS = [(TD3, UPDATE, f"{UPDATE}; {statement}", message) for statement, message in STATEMENTS.items()]
FAULTS += [
    ("td3_continuous_action", UPDATE, f"{UPDATE}; size.item()", "to the host and wait in update"),
    (TD3, NOISE, "torch.randn(mean.shape)", BOTH),
    (TD3, NOISE, "torch.randn(mean.shape).to(device)", "to the device and wait in act"),
    (TD3, "torch.tensor(1, device=device)", "torch.tensor(1)", "number of the host in update"),
    (PPO, "+ 5, device=device)", "+ 5)", "to the host and wait in prepare"),
    (PPO, "zeros_like(rollout, device=device)", "zeros_like(rollout)", BOTH),
    (
        PPO,
        "            prepare()",
        "            rollout[0] = 7; prepare()",
        "changed with a copy of it under way",
    ),
]
FAULTS += [
    (SAC, "            actions_arrived.synchronize()", "            pass", "nan"),
    (SAC, "                actions_arrived.record()", "                pass", "nan"),
]
# Statements of the loop, which may copy and wait, and what is counted too often.
TOO_OFTEN = {
    'losses["qf1_loss"].item()': ("wait", "to the host"),
    "torch.ones(()).to(device)": ("wait", "to the device"),
    "torch.ones(()).to(device, non_blocking=True)": ("to the device",),
}


@pytest.mark.parametrize(("name", "passage", "other", "message"), FAULTS)
def test_what_does_not_belong_is_told(name, passage, other, message):
    with changed(name, passage, other), pytest.raises((TrafficError, AssertionError), match=message):
        count(name)


@pytest.mark.parametrize("name", [SAC, TD3, *SEEDS])
def test_gradient_steps_are_launched_while_actions_are_on_their_way(name):
    for step in count(name):
        # All but the policy and the row that is stored.
        assert step["operation"] - 50 < step["operation meanwhile"] < step["operation"]


@pytest.mark.parametrize("statement", TOO_OFTEN)
def test_what_is_done_too_often_is_counted(statement):
    with changed(TD3, "            size.fill_(", f"            {statement}\n            size.fill_("):
        faulty = count(TD3)
    expected = [int(cell) for cell in table()[TD3].split("|")[2:5]]
    assert all(
        [step[event] - (event in TOO_OFTEN[statement]) for event in EVENTS[:3]] == expected for step in faulty
    )
