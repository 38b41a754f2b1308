"""Runs end in order whatever ends them, and go on from checkpoints that hold all they need."""

import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from conftest import DISCRETE, OFF_POLICY, SCRIPTS, SHORT, TWINS, checkpoints, cli, curves, play, start
from envs import Bytes, Scripted, episode_end, game_rows, scripted_rows
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn, optim

TD3, PPO = "td3_continuous_action", "ppo_continuous_action"
# What a replay buffer holds: after 300 steps it is full in an eager script, and not yet in a twin.
CAPACITY = dict.fromkeys(OFF_POLICY, 256) | dict.fromkeys(TWINS, 400)


def short(name: str, steps: int = 300) -> tuple:
    """The arguments for a short run, at the end of which some of a gradient step is due."""
    rate = ("--train-frequency", 7, "--exploration-fraction", 1)
    rate = rate if name in DISCRETE else ("--updates-per-step", 0.7)
    small = ("--batch-size", 8, "--buffer-size", CAPACITY[name], *rate) if name in OFF_POLICY else ()
    return (*SHORT[name], *small, "--total-timesteps", steps)


@cache
def train_once(name: str) -> tuple[dict, TemporaryDirectory]:
    directory, options = TemporaryDirectory(), ("--save-model", "--eval-episodes", 3)
    return play(name, *short(name), *options, directory=Path(directory.name)), directory


def trained(name: str, directory: Path) -> tuple[dict, Path]:
    """What a script's run of 300 steps computed, and its checkpoint, in a copy of its folder."""
    done, original = train_once(name)
    shutil.copytree(original.name, directory, dirs_exist_ok=True)
    [path] = checkpoints(directory)
    return done, path


def go_on(name: str, steps: int, path: Path, *args) -> dict:
    """Resume a run from a checkpoint, or from the newest in a folder."""
    return play(name, *short(name, steps), *args, "--resume", path)


def lasting(result: dict) -> dict:
    """All that lasts in a run: progress, networks, moments of Adam, normalisers, replay buffer."""
    found = {key: result.get(key) for key in ("global_step", "updates", "updates_due", "returns")}
    found |= {"buffer": result["buffer"]} if "size" in result else {}
    for name, value in result.items():
        if isinstance(value, nn.Parameter):
            found[name] = value.detach()
        elif isinstance(value, nn.Module) and name != "host_network":  # copied before it acts
            found[name] = value.state_dict()
        elif isinstance(value, optim.Optimizer):
            found[name] = value.state_dict()["state"]
        elif isinstance(value, result.get("RunningMoments", ())):
            found[name] = vars(value)
    return found


# ---- Going on ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_a_run_goes_on_from_what_was_saved_and_as_a_second_one_does(name, tmp_path):
    before, path = trained(name, tmp_path)
    begin, second_path = before["global_step"], tmp_path / "second" / path.name
    shutil.copytree(path.parent, second_path.parent)
    second = go_on(name, 500, second_path)
    time.sleep(1)  # TensorBoard reads the files of a folder by the second in their names
    first = go_on(name, 500, path)
    torch.testing.assert_close(lasting(second), lasting(first), rtol=0, atol=0)
    end, logged, whole = first["global_step"], first["logged"], curves(path.parent)
    assert begin + 100 < end <= 500
    if name in OFF_POLICY:  # as many gradient steps as in one run, and rows where they would be
        assert first["updates"] == ((end - 101) // 7 if name in DISCRETE else math.ceil(0.7 * (end - 101)))
        rows = (first["buffer"] != before["buffer"]).any(dim=1).nonzero().flatten().tolist()
        assert rows == sorted(step % CAPACITY[name] for step in range(300, 500))
    else:  # what is scheduled is so over the steps that the second run knows of
        steps, rates = zip(*logged["charts/learning_rate"], strict=True)
        left = 1 - np.array([begin, *steps[:-1]]) / 500
        assert rates == pytest.approx(first["args"].learning_rate * left)
    if name in DISCRETE:
        assert logged["charts/epsilon"] == [
            (step, pytest.approx(1 - 0.95 * step / 500)) for step in (400, 500)
        ]
        assert first["epsilon"].item() == pytest.approx(1 - 0.95 * 499 / 500)
    # The curves are one curve, with nothing twice.
    assert [value for _, value in whole["charts/episodic_return"]] == pytest.approx(first["returns"])
    for key, points in whole.items():
        gaps = np.diff([step for step, _ in points])
        assert (gaps >= 0).all() if "episodic" in key else (gaps > 0).all()  # two may end at once
    assert whole["charts/SPS"][-1][0] == end

    # A run without a step left has what was saved, and its curves end there.
    after = go_on(name, begin, second_path)
    assert after["folder"] == second_path.parent
    assert before["updates"] > 0
    torch.testing.assert_close(lasting(after), lasting(before), rtol=0, atol=0)
    assert after["sequence"].entropy != before["sequence"].entropy  # other numbers are drawn from here on
    points = curves(second_path.parent)
    assert max(step for of_name in points.values() for step, _ in of_name) == begin
    assert [value for _, value in points["charts/episodic_return"]] == pytest.approx(before["returns"])


@pytest.mark.parametrize("name", ["sac_continuous_action", "sac_continuous_action_torchcompile"])
def test_what_differs_is_told_and_holds_from_there_on(name, tmp_path, capfd):
    before, path = trained(name, tmp_path)
    learnt = before["log_alpha"].exp().item()
    assert abs(learnt - 0.5) > 0.1

    def told() -> list[str]:
        return sorted(line for line in capfd.readouterr().err.splitlines() if line.startswith("--"))

    after = go_on(name, 310, path, "--q-lr", "1e-4", "--exp-name", "another", "--save-model")
    assert told() == [
        "--eval-episodes None from here on, it was 3",
        f"--exp-name another from here on, it was {name}",
        "--q-lr 0.0001 from here on, it was 0.001",
        "--total-timesteps 310 from here on, it was 300",
    ]
    assert after["folder"] == path.parent
    assert after["log_alpha"].exp().item() == pytest.approx(learnt, abs=0.02)
    optimizers = [after[f"{part}_optimizer"] for part in ("actor", "critic", "alpha")]
    rates = [item.param_groups[0]["lr"] if name in SCRIPTS else item.lr for item in optimizers]
    assert rates == [3e-4, 1e-4, 1e-4]
    after = go_on(name, 320, path.parent, "--q-lr", "1e-4", "--alpha", "0.5", "--no-autotune")
    assert "--autotune False from here on, it was True" in told()
    assert after["log_alpha"].exp().item() == after["losses"]["alpha"].item() == pytest.approx(0.5)


def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path, refusal):
    _, path = trained(TD3, tmp_path)
    good, other, trace = torch.load(path, weights_only=True), tmp_path / "other.pt", tmp_path / "executed"
    # What leaves a trace where unpickling executes it.
    executed = type("Executed", (), {"__reduce__": lambda _: (Path.touch, (trace,))})()
    same = (*short(TD3), "--save-model", "--eval-episodes", "3")
    for name, value, was in (("seed", 2, 1), ("num_envs", 2, 1), ("buffer_size", 999, 256)):
        told = refusal(TD3, play, *same, f"--{name.replace('_', '-')}", value, "--resume", path)
        assert told.startswith(f"{path} is of {name} {was}, not {value}")
    twin = f"{TD3}_torchcompile"
    assert refusal(twin, play, "--resume", path).startswith(f"{path} is of script {TD3}, not {twin}")
    for flag in ("--resume", "--evaluate"):
        told = refusal(TD3, play, *same, "--env-id", "Hopper-v4", flag, path)
        assert told.startswith(f"{path} is of env_id envs:Scripted-v0, not Hopper-v4")

    for broken in (list(good), {key: good[key] for key in good if key != "args"}, executed):
        torch.save(broken, other)
        assert refusal(TD3, play, "--resume", other).startswith(f"{other} is not a checkpoint")
    for content in (path.read_bytes()[:-1000], b"", b"nothing", pickle.dumps(executed)):
        other.write_bytes(content)
        assert refusal(TD3, play, "--evaluate", other).startswith(f"{other} is not a checkpoint")
    assert not trace.exists()
    for nothing in (tmp_path / "nowhere", tmp_path / "runs"):
        assert refusal(TD3, play, "--resume", nothing).startswith(f"{nothing} is not a checkpoint")

    # A network that was changed since, by the user, shows where it does not fit.
    torch.save(good | {"actor": {key: tensor[:1] for key, tensor in good["actor"].items()}}, other)
    with pytest.raises(RuntimeError, match="size mismatch for fc1"):
        play(TD3, *same, "--resume", other)


def test_the_newest_two_checkpoints_are_kept_and_nothing_else_is_removed(tmp_path, monkeypatch):
    write, write_entry = torch.save, RecordWriter.write

    def save(checkpoint: dict, file: Path) -> None:
        """In place of torch.save: what was logged is on the disk before, and no part of it has the name."""
        assert curves(file.parent)["charts/SPS"][-1][0] == checkpoint["progress"][0]
        assert file.suffix != ".pt"
        write(checkpoint, file)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(RecordWriter, "write", lambda *entry: time.sleep(0.005) or write_entry(*entry))
    options = ("--log-every", "10", "--checkpoint-every", "50")
    play(TD3, *short(TD3, 200), *options, directory=tmp_path)
    [folder] = tmp_path.glob("runs/*")
    others = [folder / name for name in ("best.pt", "notes.pt", "notes.txt")]
    for other in others:
        other.write_text("mine")

    def kept_after(steps: int, path: Path) -> list[str]:
        assert go_on(TD3, steps, path, *options)["global_step"] == steps
        assert [other.read_text() for other in others] == 3 * ["mine"]
        assert not (folder / "checkpoint.new").exists()
        return [path.name for path in checkpoints(tmp_path)]

    assert [path.name for path in checkpoints(tmp_path)] == ["150.pt", "200.pt"]
    assert kept_after(230, folder / "150.pt") == ["200.pt", "230.pt"]
    # Of a run that went on from the older one the newest is what it wrote last.
    assert kept_after(210, folder / "200.pt") == ["210.pt", "230.pt"]
    assert kept_after(300, folder) == ["260.pt", "300.pt"]


# ---- Ends --------------------------------------------------------------------------------------------------
FREQUENT = {
    TD3: ("--learning-starts", "50", "--batch-size", "8", "--log-every", "10", "--checkpoint-every", "10"),
    PPO: ("--num-steps", "32", "--num-minibatches", "2", "--update-epochs", "1", "--checkpoint-every", "10"),
}


@pytest.mark.parametrize("name", FREQUENT)
def test_kill_9_at_any_moment_loses_no_checkpoint_and_leaves_whole_curves(name, tmp_path, capfd):
    """A run is halted at many moments, and its folder copied: it is then as kill -9 would leave it."""
    process, newest = start(name, tmp_path, *FREQUENT[name], stderr=subprocess.DEVNULL), 100
    left = [*(tmp_path / str(moment) for moment in range(8)), tmp_path]
    try:
        for moment, directory in enumerate(left[:-1]):
            while not any(int(path.stem) > newest for path in checkpoints(tmp_path)):
                assert process.poll() is None
                time.sleep(0.005)
            time.sleep(0.007 * moment)
            process.send_signal(signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            shutil.copytree(tmp_path / "runs", directory / "runs")
            newest = int(checkpoints(tmp_path)[-1].stem)
            process.send_signal(signal.SIGCONT)
        [folder] = tmp_path.glob("runs/*")
        with pytest.raises(SystemExit, match="2"):
            play(name, *FREQUENT[name], "--total-timesteps", newest, "--resume", folder)
        line = capfd.readouterr().err.splitlines()[-1]
        assert line == f"{name}.py: error: --resume: a run is at work in {folder}"
    finally:
        process.kill()
        process.communicate()
    time.sleep(1)  # so that the file of another process comes later, by the second in its name
    for moment, directory in enumerate(left):
        paths, more_steps = checkpoints(directory), 100 * (moment % 2)
        assert 1 <= len(paths) <= 3  # the third is removed after the first is whole
        *_, (step, updates, *_, returns) = (torch.load(path, weights_only=True)["progress"] for path in paths)
        options = (*FREQUENT[name], "--total-timesteps", step + more_steps, "--resume", paths[-1])
        after = play(name, *options)
        assert after["returns"][: len(returns)] == returns
        assert after["updates"] > updates if more_steps else after["updates"] == updates

        # It is at its newest checkpoint, and so are its curves.
        logged, end = curves(paths[-1].parent), after["global_step"]
        assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(after["returns"])
        for tag in ("charts/SPS", "losses/qf_loss" if name == TD3 else "losses/value_loss"):
            steps = [step for step, _ in logged[tag]]
            assert (np.diff(steps) > 0).all() and steps[-1] == end
            # An entry for ten steps of TD3, of losses after the first 50, or for two updates of a rollout.
            entries = (end - 50 * ("qf" in tag)) // 10 if name == TD3 else after["updates"] / 2
            assert len(steps) == entries


# 49 steps that count towards gradient steps; of PPO what is learnt from two rollouts.
@pytest.mark.parametrize(
    ("name", "number", "updates"),
    [(f"{TD3}_torchcompile", signal.SIGINT, 35), ("dqn", signal.SIGTERM, 7), (PPO, signal.SIGHUP, 20)],
)
def test_a_signal_ends_a_run_with_a_checkpoint(name, number, updates, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Scripted, "raises", {149 if name in OFF_POLICY else 60: number})
    with pytest.raises(SystemExit, match=f"{128 + number}"):
        play(name, *short(name), "--save-model", "--eval-episodes", "3", directory=tmp_path)
    summary, [path] = json.loads(capfd.readouterr().out), checkpoints(tmp_path)
    steps, *_ = progress = torch.load(path, weights_only=True)["progress"]
    assert [summary[key] for key in ("total_timesteps", "updates", "eval_returns")] == [*progress[:2], []]
    assert (int(path.stem), progress[1]) == (150 if name in OFF_POLICY else steps, updates)


def test_a_signal_ends_an_evaluation(tmp_path, monkeypatch, capfd):
    done, path = trained(TD3, tmp_path)
    first = episode_end(done["env"].unwrapped.seeds[0], 0)[0]
    monkeypatch.setattr(Scripted, "raises", {first: signal.SIGINT})  # in the second episode
    capfd.readouterr()
    with pytest.raises(SystemExit, match="130"):
        play(TD3, "--evaluate", path)
    assert json.loads(capfd.readouterr().out)["eval_returns"] == done["eval_returns"][:1]


def test_what_nohup_ignores_is_ignored(monkeypatch):
    monkeypatch.setattr(Scripted, "raises", {149: signal.SIGHUP})
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert play(TD3, *short(TD3))["global_step"] == 300
    signal.signal(signal.SIGHUP, handler)


def test_the_same_signal_again_ends_a_run_at_once():
    """Also within a rollout, and after another one. The environment raises SIGINT, SIGTERM and SIGINT."""
    process = cli(PPO, "--no-cuda", "--env-id", "envs:Interrupted-v0", "--total-timesteps", "2048")
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


# ---- Evaluation --------------------------------------------------------------------------------------------
def best_actions(name: str, done: dict, obs: np.ndarray) -> np.ndarray:
    """What the networks of a run take for the best actions where an environment shows this."""
    with torch.no_grad():
        if "atari" in name:
            return done["agent"](torch.from_numpy(obs.transpose(0, 2, 3, 1).copy()))[0].argmax(dim=1).numpy()
        space, obs = done["env"].unwrapped.action_space, obs.reshape(len(obs), -1)
        if name not in OFF_POLICY:
            obs = done["obs_moments"].standardise(obs)
        obs = torch.as_tensor(obs, dtype=torch.uint8 if obs.dtype == np.uint8 else torch.float32)
        if name in DISCRETE:
            return done["q_network"](obs).argmax(dim=1).numpy() + space.start
        if name not in OFF_POLICY:
            return done["agent"](obs)[0].numpy().clip(space.low, space.high)
        actions = torch.tanh(done["actor"](obs)[0]) if name.startswith("sac") else done["actor"](obs)
        return space.low + (actions.numpy() + 1) / 2 * (space.high - space.low)


PAIRS = [*zip(SCRIPTS, TWINS, strict=True), *zip(TWINS, SCRIPTS, strict=True)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_evaluation_takes_the_best_actions_also_of_the_other_script(first, second, tmp_path, capfd):
    done, path = trained(first, tmp_path)
    saved = path.read_bytes()
    capfd.readouterr()
    again = play(second, "--evaluate", path.parent, directory=tmp_path)
    assert re.search(r"\revaluation: 100%.* 10/10 ", capfd.readouterr().err)
    assert again["global_step"] == again["updates"] == 0
    assert path.read_bytes() == saved
    assert len(list(tmp_path.glob("runs/*"))) == 2  # it has a folder of its own
    assert len(again["eval_returns"]) == 10
    assert again["eval_returns"][:3] == done["eval_returns"]  # the same episodes

    env = done["env"].unwrapped
    rows = list(islice((game_rows if "atari" in first else scripted_rows)(env.seeds[0]), 100))
    ends = [index for index, row in enumerate(rows) if row.over][:3]
    # A reset passes by the row after an end.
    episodes = [rows[begin : end + 1] for begin, end in zip([0, ends[0] + 2, ends[1] + 2], ends, strict=True)]
    assert done["eval_returns"] == pytest.approx([sum(row.score for row in rows) for rows in episodes])
    best = best_actions(first, done, np.stack([row.obs for rows in episodes for row in rows]))
    for actions in (env.actions, again["env"].unwrapped.actions[: len(best)]):
        assert np.array(actions).reshape(best.shape) == pytest.approx(best, abs=1e-5)


def test_evaluation_sees_bytes_as_training_does():
    done = play("dqn", "--env-id", "envs:BytesChoices-v0", *short("dqn"), "--eval-episodes", "5")
    env = done["env"].unwrapped
    lengths = [episode_end(env.seeds[0], episode)[0] for episode in range(5)]
    seen = [(episode, step) for episode, length in enumerate(lengths) for step in range(length)]
    images = np.stack([Bytes.image(env.seeds[0], *where) for where in seen])
    assert np.array_equal(best_actions("dqn", done, images), env.actions)
