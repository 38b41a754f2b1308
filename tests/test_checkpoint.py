"""Runs end in order whatever ends them, and go on from checkpoints that hold all they need."""

import json
import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import conftest
import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    DQN,
    MANY,
    MEMORY,
    OFF_POLICY,
    Q_LEARNING,
    SCRIPTS,
    SHORT,
    TWINS,
    checkpoints,
    curves,
    play,
    recalled,
    run,
    start,
)
from envs import Bytes, Row, Scripted, episode_end, game_rows, scripted_rows
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.testing import assert_close

TD3, PPO = "td3_continuous_action", "ppo_continuous_action"
PAIRS = [*zip(SCRIPTS, TWINS, strict=True), *zip(TWINS, SCRIPTS, strict=True)]
# Signals, and the updates of 49 steps that count towards gradient steps, or of PPO's two rollouts.
ENDS = {f"{TD3}_torchcompile": (signal.SIGINT, 35), "dqn": (signal.SIGTERM, 7), PPO: (signal.SIGHUP, 20)}
ENDS |= {TD3: (signal.SIGUSR1, 35), "ppo": (signal.SIGUSR2, 20)}
# What a replay buffer holds: after 300 steps it is full in an eager script, and not yet in a twin.
CAPACITY = dict.fromkeys(OFF_POLICY, 256) | dict.fromkeys(TWINS, 400)
LATER = count(9_000_000_000)  # TensorBoard reads the files of a folder by the second in their names


def short(name: str, steps: int = 300) -> tuple:
    """The arguments for a short run, at the end of which some of a gradient step is due."""
    rate = ("--train-frequency", 7)
    rate = rate if name in DQN else ("--num-updates", 1) if name in MANY else ("--updates-per-step", 0.7)
    small = ("--batch-size", 8, "--buffer-size", CAPACITY[name], *rate) if name in OFF_POLICY else ()
    small += ("--exploration-fraction", 1) if name in Q_LEARNING else ()
    return (*SHORT[name], *small, "--total-timesteps", steps)


def save_in_order(checkpoint: dict, file: Path, save: Callable = torch.save) -> None:
    """In place of torch.save: what was logged is on the disk, and older ones are until this one is whole."""
    assert curves(file.parent)["charts/SPS"][-1][0] == checkpoint["progress"]["global_step"]
    assert [*file.parent.glob("[0-9]*.pt")] or not checkpoint["args"]["resume"]
    assert file.suffix != ".pt"
    save(checkpoint, file)


@cache
def train_once(name: str) -> tuple[dict, TemporaryDirectory]:
    directory, options = TemporaryDirectory(), ("--save-model", "--eval-episodes", 3)
    with patch("torch.save", save_in_order):
        return play(name, *short(name), *options, directory=Path(directory.name)), directory


def trained(name: str, directory: Path) -> tuple[dict, Path]:
    """What a script's run of 300 steps computed, and its checkpoint, in a copy of its folder."""
    done, original = train_once(name)
    shutil.copytree(original.name, directory, dirs_exist_ok=True)
    return done, checkpoints(directory)[0]


def go_on(name: str, steps: int, path: Path, *args) -> dict:
    """Resume a run from a checkpoint, or from the newest in a folder, some time later, with its arguments."""
    with patch("time.time", lambda: next(LATER)):
        return play(name, "--resume", path, "--total-timesteps", steps, *args)


def lasting(result: dict) -> dict:
    """All that lasts in a run: progress, networks, moments of Adam, normalisers, replay buffer."""
    found = {key: result.get(key) for key in ("global_step", "updates", "updates_due", "returns")}
    found |= {"buffer": result["buffer"]} if "size" in result else {}
    for name, item in result["state"].items():
        found[name] = {key: value for key, value in item.state_dict().items() if key != "param_groups"}
    return found


def whole_curves(folder: Path, result: dict) -> dict[str, list[tuple[int, float]]]:
    """What a run has logged, which has nothing twice, lacks no episode, and ends where the run does."""
    logged = curves(folder)
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(result["returns"])
    for key, points in logged.items():
        gaps = np.diff([step for step, _ in points])
        assert (gaps >= 0).all() if "episodic" in key else (gaps > 0).all()  # two may end at once
    assert max(step for points in logged.values() for step, _ in points) == result["global_step"]
    return logged


# ---- Going on ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_a_run_goes_on_from_what_was_saved(name, tmp_path):
    before, path = trained(name, tmp_path)
    begin, on = before["global_step"], go_on(name, 500, path)
    end, logged = on["global_step"], on["logged"]
    assert begin + 100 < end <= 500
    # Other numbers are drawn from here on, by PyTorch and by the environments.
    first = np.random.SeedSequence([1, 0]).generate_state(4).tolist()
    assert torch.initial_seed() not in {1, *first}
    seeds = ([seed for env in conftest.instances(r) for seed in env.seeds] for r in (before, on))
    assert set.intersection(*map(set, seeds)) <= {None}
    if name in OFF_POLICY:  # as many gradient steps as in one run, and rows where they would be
        each = 1 if name in MANY else 0.7
        assert on["updates"] == ((end - 101) // 7 if name in DQN else math.ceil(each * (end - 101)))
        rows = (on["buffer"] != before["buffer"]).any(dim=1).nonzero().flatten().tolist()
        assert rows == sorted(step % CAPACITY[name] for step in range(300, 500))
    else:  # what is scheduled is so over the steps that the second run knows of
        steps, rates = zip(*logged["charts/learning_rate"], strict=True)
        left = 1 - np.array([begin, *steps[:-1]]) / 500
        assert rates == pytest.approx(on["args"].learning_rate * left)
    if name in Q_LEARNING:
        steps, epsilons = np.transpose(logged["charts/epsilon"])
        assert len(steps) >= 2
        least = on["args"].end_e
        assert epsilons == pytest.approx(1 - (1 - least) * steps / 500)
    whole_curves(path.parent, on)

    # A run without a step left has what was saved, and takes nothing from what was done since.
    after = go_on(name, begin, path)
    assert after["folder"] == path.parent
    assert before["updates"] > 0
    assert_close(lasting(after), lasting(before), rtol=0, atol=0)
    whole_curves(path.parent, on)


@pytest.mark.parametrize("name", ["sac_continuous_action", "sac_continuous_action_torchcompile"])
def test_arguments_are_the_old_ones_and_what_differs_is_told_and_holds_from_there_on(name, tmp_path, capfd):
    before, path = trained(name, tmp_path)
    learnt = before["state"]["log_alpha"][0].exp().item()
    assert abs(learnt - 0.5) > 0.1
    capfd.readouterr()
    after = go_on(name, 310, path, "--q-lr", "1e-4", "--exp-name", "another")
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"Going on from {path}"
    assert sorted(line for line in lines if line.startswith("--")) == [
        f"--exp-name another from here on, it was {name}",
        "--q-lr 0.0001 from here on, it was 0.001",
        "--total-timesteps 310 from here on, it was 300",
    ]
    different = {"resume": str(path), "exp_name": "another", "total_timesteps": 310, "q_lr": 1e-4}
    assert vars(after["args"]) == vars(before["args"]) | different
    assert after["state"]["log_alpha"][0].exp().item() == pytest.approx(learnt, abs=0.02)
    optimizers = [after["state"][f"{part}_optimizer"] for part in ("actor", "q", "alpha")]
    rates = [item.param_groups[0]["lr"] if name in SCRIPTS else item.lr for item in optimizers]
    assert rates == [3e-4, 1e-4, 1e-4]
    after = go_on(name, 320, path.parent, "--alpha", "0.5", "--no-autotune")
    assert f"Going on from {path.parent / '310.pt'}\n" in capfd.readouterr().err
    assert (
        after["state"]["log_alpha"][0].exp().item() == after["losses"]["alpha"].item() == pytest.approx(0.5)
    )


def test_a_folder_is_enough_to_go_on_and_to_evaluate(tmp_path, capfd):
    small = ("--env-id", "envs:Scripted-v0", *SHORT[TD3], "--batch-size", 16, "--checkpoint-every", 100)
    folder = tmp_path / run(TD3, *small, directory=tmp_path)["folder"]
    on = run(TD3, "--resume", folder, "--total-timesteps", 400)["summary"]
    assert [int(path.stem) for path in checkpoints(tmp_path)] == [300, 400]
    assert [on[key] for key in ("learning_starts", "batch_size", "updates")] == [100, 16, 299]
    assert len(run(TD3, "--evaluate", folder)["summary"]["eval_returns"]) == 10
    assert f"Evaluating {folder / '400.pt'}\n" in capfd.readouterr().err


def test_networks_of_a_run_have_the_sizes_that_it_began_with(tmp_path, refusal):
    """Also of an agent that is evaluated, by the other script, too."""
    sizes = ("--actor-hidden-dim", 8, "--critic-hidden-dim", 16, "--num-atoms", 11, "--v-max", 50)
    first = play("fast_td3", *sizes, *SHORT["fast_td3"], "--save-model", directory=tmp_path)
    [path] = checkpoints(tmp_path)
    for name in ("fast_td3", "fast_td3_torchcompile"):
        evaluated = play(name, "--evaluate", path)
        assert_close(evaluated["state"]["actor"].state_dict(), first["state"]["actor"].state_dict())
        assert evaluated["envs"].num_envs == 1 and len(evaluated["summary"]["eval_returns"]) == 10
    for flag, was in zip(sizes[::2], sizes[1::2], strict=True):
        assert refusal("fast_td3", play, "--resume", path, flag, 12).startswith(f"{flag} has to stay {was}")


def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path, refusal):
    _, path = trained(TD3, tmp_path)
    good, other, trace = torch.load(path, weights_only=True), tmp_path / "300.pt", tmp_path / "executed"
    for flag, value, was in (("seed", 2, 1), ("num-envs", 2, 1), ("buffer-size", 999, 256)):
        told = refusal(TD3, play, "--resume", path, f"--{flag}", value)
        assert told == f"--{flag} has to stay {was}, as in {path}, got {value}"
    for flag in ("--resume", "--evaluate"):
        told = refusal(TD3, play, flag, path, "--env-id", "Hopper-v4")
        assert told == f"--env-id has to stay envs:Scripted-v0, as in {path}, got Hopper-v4"
    shutil.copy(path, best := tmp_path / "best.pt")
    for name, file in ((f"{TD3}_torchcompile", path), (TD3, best)):
        told = refusal(name, play, "--resume", file)
        assert told == f"--resume takes a numbered checkpoint of this script, not {file} of {TD3}.py"

    # What leaves a trace where unpickling executes it.
    executed = type("Executed", (), {"__reduce__": lambda _: (Path.touch, (trace,))})()
    for content in ({key: good[key] for key in good if key != "script"}, executed):
        torch.save(content, other)
        assert refusal(TD3, play, "--resume", other).startswith(f"{other} is not a checkpoint")
    for content in (path.read_bytes()[:-1000], b"", b"nothing"):
        other.write_bytes(content)
        assert refusal(TD3, play, "--evaluate", other).startswith(f"{other} is not a checkpoint")
    # What the user added to it may be nothing that is loaded without executing code.
    torch.save(good | {"progress": good["progress"] | {"best": np.float64(1)}}, other)
    assert "numpy" in refusal(TD3, play, "--resume", other)
    for nothing in (tmp_path / "nowhere", tmp_path / "runs"):
        assert refusal(TD3, play, "--resume", nothing).startswith(f"{nothing} is not a checkpoint")
    assert not trace.exists()

    # Of another script, also if that takes other arguments.
    torch.save(good | {"args": good["args"] | {"actor_hidden_dim": 512}}, other)
    for file in (path, other):
        assert refusal(PPO, play, "--evaluate", file) == f"{file} of {TD3}.py has no agent"

    # A network or a task that was changed since: it says where they do not fit.
    torch.save(good | {"actor": {key: tensor[:1] for key, tensor in good["actor"].items()}}, other)
    told = refusal(TD3, play, "--resume", other)
    assert told.startswith(f"{other} of {TD3}.py does not fit: ") and "size mismatch for fc1" in told
    narrow = {key: tensor[:, :1] if key == "fc1.weight" else tensor for key, tensor in good["actor"].items()}
    narrow["fc9.bias"] = torch.zeros(1)
    torch.save(good | {"actor": narrow, "args": good["args"] | {"actor_hidden_dim": 512}}, other)
    told = refusal(TD3, play, "--evaluate", other)
    unlike = "of other sizes, or not in both: ['fc1.weight', 'fc9.bias']"
    assert told == f"{other} of {TD3}.py does not fit: {unlike}"


def test_the_newest_two_checkpoints_are_kept_and_nothing_else_is_removed(tmp_path, monkeypatch, capfd):
    write, options = RecordWriter.write, ("--log-every", "10", "--checkpoint-every", "50")
    monkeypatch.setattr(torch, "save", save_in_order)
    monkeypatch.setattr(RecordWriter, "write", lambda *entry: time.sleep(0.002) or write(*entry))
    play(TD3, *short(TD3, 200), *options, directory=tmp_path)
    [folder] = tmp_path.glob("runs/*")
    others = ["best.pt", "notes.txt"]
    for other in others:
        (folder / other).write_text("mine")
    # Of a run that went on from the older one the newest are that and what it wrote last.
    for begin, end, kept in (("150.pt", 230, [200, 230]), ("200.pt", 210, [200, 210]), ("", 300, [260, 300])):
        go_on(TD3, end, folder / begin)
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".pt", ".new", ".txt"))
        assert found == [*(f"{step}.pt" for step in kept), *others]
    # One that dies before its first checkpoint has written entries over those of later steps.
    with patch("torch.save", side_effect=MemoryError), pytest.raises(MemoryError):
        go_on(TD3, 350, folder / "260.pt")
    capfd.readouterr()
    go_on(TD3, 400, folder)
    assert f"Going on from {folder.resolve() / '260.pt'}\n" in capfd.readouterr().err


# ---- Ends --------------------------------------------------------------------------------------------------
def test_after_kill_9_a_run_goes_on_from_its_newest_checkpoint(tmp_path, capfd):
    often = ("--log-every", "10", "--checkpoint-every", "10")
    process = start(TD3, tmp_path, *map(str, short(TD3, 10**6)), *often, stderr=subprocess.DEVNULL)
    try:
        while not any(int(path.stem) > 200 for path in checkpoints(tmp_path)):
            assert process.poll() is None
            time.sleep(0.01)
        [folder] = tmp_path.glob("runs/*")
        with pytest.raises(SystemExit, match="2"):
            go_on(TD3, 200, folder)
        assert capfd.readouterr().err.endswith(f"{TD3}.py: error: --resume: a run is at work in {folder}\n")
    finally:
        process.kill()
        process.communicate()
    progress = torch.load(checkpoints(tmp_path)[-1], weights_only=True)["progress"]
    step, returns = progress["global_step"], progress["returns"]
    after = go_on(TD3, step + 100, folder)
    assert after["returns"][: len(returns)] == returns and after["updates"] > progress["updates"]
    logged = whole_curves(folder, after)
    assert [entry for entry, _ in logged["charts/SPS"]] == [*range(10, step + 101, 10)]


@pytest.mark.parametrize("name", ENDS)
def test_a_signal_ends_a_run_with_a_checkpoint(name, tmp_path, monkeypatch, capfd):
    number, updates = ENDS[name]
    monkeypatch.setattr(Scripted, "raises", {149 if name in OFF_POLICY else 60: number})
    with pytest.raises(SystemExit, match=f"{128 + number}"):
        play(name, *short(name), "--save-model", "--eval-episodes", "3", directory=tmp_path)
    summary, [path] = json.loads(capfd.readouterr().out), checkpoints(tmp_path)
    progress = torch.load(path, weights_only=True)["progress"]
    steps = progress["global_step"]
    assert (int(path.stem), progress["updates"]) == (150 if name in OFF_POLICY else steps, updates)
    assert [summary[key] for key in ("total_timesteps", "updates", "eval_returns")] == [steps, updates, []]


def test_a_signal_ends_an_evaluation(tmp_path, monkeypatch, capfd):
    done, path = trained(TD3, tmp_path)
    first = episode_end(done["env"].unwrapped.seeds[0], 0)[0]
    monkeypatch.setattr(Scripted, "raises", {first: signal.SIGINT})  # in the second episode
    capfd.readouterr()
    with pytest.raises(SystemExit, match="130"):
        play(TD3, "--evaluate", path)
    assert json.loads(capfd.readouterr().out)["eval_returns"] == done["summary"]["eval_returns"][:1]


@pytest.mark.parametrize("name", ["ppo", "ppo_torchcompile"])
def test_a_signal_in_an_evaluation_ends_the_run(name, tmp_path, monkeypatch, capfd):
    """That after the first rollout; before it, its two environments have had fifty steps each."""
    monkeypatch.setattr(Scripted, "raises", {60: signal.SIGTERM})
    with pytest.raises(SystemExit, match="143"):
        play(name, *SHORT[name], "--eval-every", 1, "--eval-episodes", 50, "--save-model", directory=tmp_path)
    summary, [path] = json.loads(capfd.readouterr().out), checkpoints(tmp_path)
    assert (summary["updates"], summary["best_eval_return"], summary["eval_returns"]) == (10, None, [])
    assert summary["total_timesteps"] == int(path.stem) <= 100


def test_what_nohup_ignores_is_ignored(monkeypatch):
    monkeypatch.setattr(Scripted, "raises", {149: signal.SIGHUP})
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert play(TD3, *short(TD3))["global_step"] == 300
    signal.signal(signal.SIGHUP, handler)


def test_the_same_signal_again_ends_a_run_at_once():
    """Also within a rollout, and after another one. The environment raises SIGINT, SIGTERM and SIGINT."""
    process = conftest.cli(PPO, "--no-cuda", "--env-id", "envs:Interrupted-v0", "--total-timesteps", "2048")
    assert (process.returncode, process.stdout) == (-signal.SIGINT, "")
    assert "Traceback" not in process.stderr


# ---- Evaluation --------------------------------------------------------------------------------------------
def best_actions(name: str, done: dict, rows: list[Row]) -> np.ndarray:
    """What the networks of a run take for the best actions at the steps of an episode."""
    state, obs = done["state"], np.stack([row.obs for row in rows])

    def remembering(obs: torch.Tensor) -> torch.Tensor:
        return recalled(state["agent"], obs[:, None], torch.tensor([[row.valid] for row in rows]))[0][:, 0]

    with torch.no_grad():
        if name in ATARI and name in MEMORY:
            return remembering(torch.from_numpy(obs[:, -1, :, :, None])).argmax(dim=1).numpy()
        if name in ATARI:
            obs = torch.from_numpy(obs.transpose(0, 2, 3, 1).copy())
            values = state["q_network"](obs) if name in Q_LEARNING else state["agent"](obs)[0]
            return values.argmax(dim=1).numpy()
        space, obs = done["env"].unwrapped.action_space, obs.reshape(len(obs), -1)
        if name in conftest.DISCRETE:
            obs = torch.from_numpy(obs if name in Q_LEARNING and obs.dtype == np.uint8 else obs.astype("f4"))
            if name in Q_LEARNING:
                values = state["q_network"](obs)
            else:
                values = remembering(obs) if name in MEMORY else state["agent"](obs)[0]
            return values.argmax(dim=1).numpy() + space.start
        if name not in OFF_POLICY:
            obs = torch.from_numpy(done["obs_moments"].standardise(obs)).float()
            mean = remembering(obs) if name in MEMORY else state["agent"](obs)[0]
            return mean.numpy().clip(space.low, space.high)
        see = state.get("obs_normalizer", torch.nn.Identity())
        actions = state["actor"](see(torch.from_numpy(obs).float()))
        actions = torch.tanh(actions[0]) if isinstance(actions, tuple) else actions  # of a Gaussian, its mean
        return space.low + (actions.numpy() + 1) / 2 * (space.high - space.low)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_evaluation_takes_the_best_actions_also_of_the_other_script(first, second, tmp_path, capfd):
    done, path = trained(first, tmp_path)
    capfd.readouterr()
    again = play(second, "--evaluate", path.parent, directory=tmp_path)
    told, evaluated = capfd.readouterr().err, [result["summary"]["eval_returns"] for result in (done, again)]
    assert re.search(r"\revaluation: 100%.* 10/10 ", told) and told.startswith(f"Evaluating {path}\n")
    assert (again["global_step"], again["updates"], len(evaluated[1])) == (0, 0, 10)
    assert len(list(tmp_path.glob("runs/*"))) == 2 and checkpoints(tmp_path) == [path]  # a folder of its own
    assert evaluated[1][:3] == evaluated[0]  # the same episodes

    env = done["env"].unwrapped
    rows = list(islice((game_rows if first in ATARI else scripted_rows)(env.seeds[0]), 100))
    ends = [index for index, row in enumerate(rows) if row.over][:3]
    # A reset passes by the row after an end.
    episodes = [rows[begin : end + 1] for begin, end in zip([0, ends[0] + 2, ends[1] + 2], ends, strict=True)]
    assert evaluated[0] == pytest.approx([sum(row.score for row in rows) for rows in episodes])
    best = np.concatenate([best_actions(first, done, rows) for rows in episodes])
    for actions in (env.actions, again["env"].unwrapped.actions[: len(best)]):
        assert np.array(actions).reshape(best.shape) == pytest.approx(best, abs=1e-5)


def test_evaluation_sees_bytes_as_training_does():
    done = play("dqn", "--env-id", "envs:BytesChoices-v0", *short("dqn"), "--eval-episodes", "5")
    env = done["env"].unwrapped
    seen = [row for row in islice(scripted_rows(env.seeds[0], Bytes.image), 50) if row.valid]
    assert np.array_equal(best_actions("dqn", done, seen[: len(env.actions)]), env.actions)
