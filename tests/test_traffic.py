"""How often each script copies and waits: as often as docs/tricks.md says, and never in what is to be captured."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import DISCRETE, OFF_POLICY, ROOT, SCRIPTS, SEEDS, TWINS, changed, play
from traffic import TrafficError, counted_traffic

# Rollouts of eight steps, with four gradient steps each; or a gradient step after each of 40 steps, without a log entry.
ROLLOUTS = ("--num-envs", "2", "--num-steps", "8", "--num-minibatches", "2", "--update-epochs", "2", "--total-timesteps", "96")
SHORT = ("--learning-starts", "20", "--batch-size", "8", "--log-every", "1000", "--total-timesteps", "60")
STEADY = slice(24, 40)  # of the steps: two rollouts, or an even number of gradient steps
EACH_STEP = ("--train-frequency", "1", "--target-network-frequency", "2")
EVENTS = ("to the device", "to the host", "wait", "operation")
HEADER = (
    "| script | to the device | to the host | waits | operations | rollout: to the device | to the host | waits | operations |"
)


def count(command: str) -> list[Counter]:
    """What a script and its options count between steps of the environments; the run saves and evaluates, too."""
    name, *options = command.split()
    args = SHORT if name in (*OFF_POLICY, *SEEDS) else ROLLOUTS
    args += EACH_STEP if name in DISCRETE else ()
    options += ["--save-model", "--eval-episodes", "1"]
    with counted_traffic() as traffic, TemporaryDirectory() as directory:
        run = play(name, *args, *options, cuda=True, directory=Path(directory))
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
        # All alike, but for the operations of a gradient step with the actor, or the target of DQN, and one without.
        assert [step[:-1] for step in steps] == [steps[0][:-1]] * len(steps)
        cells = [*steps[0][:-1], sum(step[-1] for step in steps) / len(steps), *[""] * len(EVENTS)]
    else:
        # All alike, but for those that a rollout ends with.
        *steps, rollout, another = steps
        assert steps == [steps[0]] * len(steps)
        assert rollout == another
        cells = [*steps[0], *(counted - of_step for counted, of_step in zip(rollout, steps[0], strict=True))]
    return "| " + " | ".join([f"`{command}`", *(cell if cell == "" else f"{cell:g}" for cell in cells)]) + " |"


def test_the_table_has_every_script():
    assert {command.split()[0] for command in table()} == {*SCRIPTS, *TWINS, *SEEDS}


@pytest.mark.parametrize("command", table())
def test_copies_and_waits_are_those_of_the_table(command):
    assert row(command) == table()[command]


TD3, PPO = "td3_continuous_action_torchcompile", "ppo_continuous_action_torchcompile --act-device device"
NOISE, UPDATE = "torch.randn_like(mean)", '"""One gradient step on a new batch."""'
NEXT, ROLLOUT = "obs[:] = next_obs.reshape(obs.shape)", "buffer.copy_(rollout, non_blocking=True)"
ACTED = "actions = act(torch.from_numpy(obs).to(device, non_blocking=True))"
UNDER_WAY = "under way"
WAITED, COPIED = "to the host and wait in update", "to the device and wait in update"
# What a script has, what the fault makes of it, and what is said about that.
FAULTS = {
    "noise of the host": (TD3, NOISE, "torch.randn(mean.shape)", "tensors of the host and of the device"),
    "noise of the host, moved": (TD3, NOISE, "torch.randn(mean.shape).to(device)", "to the device and wait in act"),
    "noise of NumPy": (TD3, NOISE, "torch.from_numpy(np.zeros(mean.shape))", "tensors of the host and of the device"),
    "a batch on the host": (PPO, "+ 5, device=device)", "+ 5)", "to the host and wait in prepare"),
    "a rollout on the host": (PPO, "zeros_like(rollout, device=device)", "zeros_like(rollout)", "host and of the device"),
    "a size on the host": (TD3, "dtype=torch.int64, device=device)", "dtype=torch.int64)", "number of the host in update"),
    "a learning rate on the host": (
        PPO,
        "torch.tensor(args.learning_rate, device=device)",
        "torch.tensor(args.learning_rate)",
        "number of the host in update",
    ),
    "a number asked for": (TD3, UPDATE, f"{UPDATE}; size.item()", WAITED),
    "a number asked for, eagerly": ("td3_continuous_action", UPDATE, f"{UPDATE}; size.item()", WAITED),
    "a branch on a tensor": (TD3, UPDATE, f"{UPDATE}; size > 1 and None", WAITED),
    "a number copied": (TD3, UPDATE, f"{UPDATE}; torch.tensor(0.99, device=device)", COPIED),
    "a shape that values decide": (TD3, UPDATE, f"{UPDATE}; size[size > 0]", "wait in update"),
    "a row changed too early": (TD3, NEXT, f"{NEXT}; row_obs[:] = obs", UNDER_WAY),
    "observations changed too early": (TD3, ACTED, f"{ACTED}; obs.fill(0); actions = actions", UNDER_WAY),
    "a rollout changed too early": (PPO, ROLLOUT, f"{ROLLOUT}; rollout[0] = rollout[-1]", UNDER_WAY),
    "waiting": (TD3, UPDATE, f"{UPDATE}; torch.cuda.synchronize()", "wait in update"),
}
# Faults of the loop, which may copy and wait: what is counted too often.
TOO_OFTEN = {
    "a copy that is waited for": ("non_blocking=global_step > args.learning_starts", "", Counter(["wait"])),
    "a loss looked at": (
        "size.fill_(global_step)",
        'size.fill_(global_step); losses["qf1_loss"].item()',
        Counter(["wait", "to the host"]),
    ),
    "a number copied": (
        "size.fill_(global_step)",
        "size.copy_(torch.tensor(global_step), non_blocking=True)",
        Counter(["to the device"]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_belong_is_told(fault):
    command, passage, other, message = FAULTS[fault]
    with changed(command.split()[0], passage, other), pytest.raises(TrafficError, match=message):
        count(command)


@pytest.mark.parametrize("fault", TOO_OFTEN)
def test_what_is_done_too_often_is_counted(fault):
    passage, other, more = TOO_OFTEN[fault]
    with changed(TD3, passage, other):
        faulty = count(TD3)
    expected = [int(cell) for cell in table()[TD3].split("|")[2:5]]
    assert all([step[event] - more[event] for event in EVENTS[:3]] == expected for step in faulty)
