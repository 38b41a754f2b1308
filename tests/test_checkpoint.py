"""Runs end in order whatever ends them, and go on from checkpoints that hold all they need."""

import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ACTOR_CRITIC,
    DISCRETE,
    LEANRL,
    NOT_ATARI,
    OFF_POLICY,
    ON_POLICY,
    SCRIPTS,
    SHORT,
    TWINS,
    assert_same_numbers,
    checkpoints,
    curves,
    environment,
    play,
    resume_with_warm_up,
    run,
    scripted_world,
    start,
    world,
)
from envs import Bytes, Scripted, episode_end, game_rows, scripted_rows

TD3, PPO = "td3_continuous_action", "ppo_continuous_action"
# At a rate at which some of a gradient step is due at the end of a run.
RARE = dict.fromkeys(ACTOR_CRITIC, ("--updates-per-step", "0.7"))
RARE |= dict.fromkeys(DISCRETE, ("--train-frequency", "7", "--exploration-fraction", "1"))


def short(name: str, steps: int = 300) -> tuple[str, ...]:
    """The arguments for a short run of so many steps."""
    small = ("--batch-size", "8", *RARE[name]) if name in OFF_POLICY else ()
    return (*SHORT[name][:-1], str(steps), *small)


@pytest.fixture(scope="module")
def train_once(tmp_path_factory) -> Callable:
    @cache
    def train(name: str) -> tuple[dict, Path]:
        directory, options = tmp_path_factory.mktemp(name), ("--save-model", "--eval-episodes", "3")
        return play(name, *short(name), *options, directory=directory), directory

    return train


@pytest.fixture
def trained(train_once, tmp_path) -> Callable:
    """Gives what a script's run of 300 steps computed, and its checkpoint, in a copy of its folder."""

    def copied(name: str) -> tuple[dict, Path]:
        done, directory = train_once(name)
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
        [path] = checkpoints(tmp_path)
        return done, path

    return copied


def go_on(name: str, steps: int, path: Path, *args) -> dict:
    """Resume a run in runs/ from a checkpoint, or from the newest in a folder."""
    folder = path if path.is_dir() else path.parent
    return play(name, *short(name, steps), *args, "--resume", path, directory=folder.parent.parent)


def kept(result: dict) -> dict[str, dict | torch.Tensor]:
    """All that lasts in a run: networks, moments of Adam, normalisers, and the replay buffer."""
    found = {"buffer": result["buffer"]} if "size" in result else {}
    for name, value in result.items():
        if isinstance(value, torch.nn.Parameter):
            found[name] = value.detach()
        if (
            isinstance(value, torch.nn.Module) and name != "host_network"
        ):  # whose copy is made before an action
            found[name] = value.state_dict()
        if isinstance(value, torch.optim.Optimizer):
            found[name] = value.state_dict()["state"]
        if isinstance(value, result.get("RunningMoments", ())):
            found[name] = vars(value)
    return found


def learning_rate(optimizer) -> float:
    """The learning rate of an optimizer of PyTorch or of a twin's Adam."""
    return float(optimizer.lr if hasattr(optimizer, "lr") else optimizer.param_groups[0]["lr"])


# ---- Going on ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_what_is_loaded_is_what_was_saved_and_two_that_go_on_compute_the_same(name, trained, tmp_path):
    before, path = trained(name)
    shutil.copytree(tmp_path / "runs", tmp_path / "second" / "runs")
    [second_path] = checkpoints(tmp_path / "second")
    after = go_on(name, before["global_step"], second_path)  # no step is left to be done
    assert after["folder"] == second_path.parent
    for key in ("global_step", "updates", "returns", *(("updates_due",) if name in OFF_POLICY else ())):
        assert after[key] == before[key] != 0
    torch.testing.assert_close(kept(after), kept(before), rtol=0, atol=0)
    assert after["sequence"].entropy != before["sequence"].entropy  # other numbers are drawn from here on

    second = go_on(name, 500, second_path)
    time.sleep(1)  # TensorBoard reads the files of a folder by the second in their names
    first = go_on(name, 500, path)
    assert_same_numbers(first, second, rtol=0, atol=0)
    assert 400 < first["global_step"] <= 500
    if name in OFF_POLICY:  # as many gradient steps as in one run
        due = first["global_step"] - 101
        assert first["updates"] == (due // 7 if name in DISCRETE else math.ceil(0.7 * due))
    # What is scheduled is so over the steps that the second run knows of.
    if name in DISCRETE:
        shares = first["logged"]["charts/epsilon"]
        assert shares == [(step, pytest.approx(1 - 0.95 * step / 500)) for step in (400, 500)]
        assert first["epsilon"].item() == pytest.approx(1 - 0.95 * 499 / 500)
    if name in ON_POLICY:
        steps, rates = zip(*first["logged"]["charts/learning_rate"], strict=True)
        begins, rate = [before["global_step"], *steps[:-1]], first["args"].learning_rate
        assert rates == pytest.approx([rate * (1 - step / 500) for step in begins])
        assert learning_rate(first["optimizer"]) == pytest.approx(rates[-1])
    # The curves are one curve, with nothing twice.
    logged = curves(path.parent)
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(first["returns"])
    for key, points in logged.items():
        gaps = np.diff([step for step, _ in points])
        assert (gaps >= 0).all() if "episodic" in key else (gaps > 0).all()  # two may end at once
    assert logged["charts/SPS"][-1][0] == first["global_step"]


@pytest.mark.parametrize("name", ["sac_continuous_action", PPO])
def test_compiling_leaves_what_was_loaded(name, tmp_path):
    resume_with_warm_up(f"{name}_torchcompile", "--compile", directory=tmp_path)


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name in SCRIPTS])
def test_a_full_replay_buffer_goes_on_in_its_place(name, tmp_path):
    options = ("--buffer-size", "128")
    before = play(name, *short(name), *options, "--save-model", directory=tmp_path)
    after = go_on(name, 310, checkpoints(tmp_path)[0], *options)
    changed = (after["buffer"] != before["buffer"]).any(dim=1).nonzero().flatten().tolist()
    assert changed == [index % 128 for index in range(300, 310)] == list(range(44, 54))


@pytest.mark.parametrize("name", ["sac_continuous_action", "sac_continuous_action_torchcompile"])
def test_what_differs_is_told_and_holds_from_there_on(name, trained, capfd):
    before, path = trained(name)
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
    for part, rate in (("actor", 3e-4), ("critic", 1e-4), ("alpha", 1e-4)):
        assert learning_rate(after[f"{part}_optimizer"]) == rate
    after = go_on(name, 320, path.parent, "--q-lr", "1e-4", "--alpha", "0.5", "--no-autotune")
    assert "--autotune False from here on, it was True" in told()
    assert after["log_alpha"].exp().item() == after["losses"]["alpha"].item() == pytest.approx(0.5)


class Executed:
    """Leaves a trace where unpickling executes it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_what_is_no_checkpoint_of_this_run_is_refused(trained, tmp_path, capfd):
    _, path = trained(TD3)
    good, other, trace = torch.load(path, weights_only=True), tmp_path / "other.pt", tmp_path / "executed"
    same = (*world(TD3, "Scripted"), *short(TD3), "--save-model", "--eval-episodes", "3")

    def refusal(flag: str, path: Path, *args, script: str = TD3) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as raised:
            run(script, *same, flag, path, *args, directory=tmp_path)
        assert raised.value.code == 2
        line = capfd.readouterr().err.removesuffix("\n")
        assert "\n" not in line
        return line.removeprefix(f"{script}.py: error: ")

    twin = f"{TD3}_torchcompile"
    assert refusal("--resume", path, script=twin).startswith(f"{path} is of script {TD3}, not {twin}")
    for name, value, was in (("seed", 2, 1), ("num_envs", 2, 1), ("buffer_size", 999, 1_000_000)):
        flag = f"--{name.replace('_', '-')}"
        assert refusal("--resume", path, flag, value).startswith(f"{path} is of {name} {was}, not {value}")
    for flag in ("--resume", "--evaluate"):
        told = refusal(flag, path, "--env-id", "Hopper-v4")
        assert told.startswith(f"{path} is of env_id envs:Scripted-v0, not Hopper-v4")

    for broken in (list(good), {key: good[key] for key in good if key != "args"}, Executed(trace)):
        torch.save(broken, other)
        assert refusal("--resume", other).startswith(f"{other} is not a checkpoint")
    for content in (path.read_bytes()[:-1000], b"", b"nothing", pickle.dumps(Executed(trace))):
        other.write_bytes(content)
        assert refusal("--evaluate", other).startswith(f"{other} is not a checkpoint")
    assert not trace.exists()
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "nowhere", tmp_path / "empty"):
        assert refusal("--resume", nothing).startswith(f"{nothing} is not a checkpoint")

    # A network that was changed since, by the user, shows where it does not fit.
    torch.save(good | {"actor": {key: tensor[:1] for key, tensor in good["actor"].items()}}, other)
    with pytest.raises(RuntimeError, match="size mismatch for fc1"):
        run(TD3, *same, "--resume", other, directory=tmp_path)


def test_the_newest_two_checkpoints_are_kept_and_nothing_else_is_removed(tmp_path, monkeypatch):
    write = torch.save

    def save(checkpoint: dict, file: Path) -> None:
        """In place of torch.save: what was logged is on the disk before."""
        assert curves(file.parent)["charts/SPS"][-1][0] == checkpoint["progress"][0]
        write(checkpoint, file)

    monkeypatch.setattr(torch, "save", save)
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


def check_after_kill(name: str, directory: Path, more_steps: int) -> None:
    """Go on with a run that was killed: it is at its newest checkpoint, and so are its curves."""
    paths = checkpoints(directory)
    assert 1 <= len(paths) <= 3  # the third is removed after the first is whole
    *_, (step, updates, *_, returns) = (torch.load(path, weights_only=True)["progress"] for path in paths)
    options = (*FREQUENT[name], "--total-timesteps", step + more_steps, "--resume", paths[-1])
    after = play(name, *options, directory=directory)
    assert after["returns"][: len(returns)] == returns
    assert after["updates"] > updates if more_steps else after["updates"] == updates

    logged = curves(paths[-1].parent)
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(after["returns"])
    for tag in ("charts/SPS", "losses/qf_loss" if name == TD3 else "losses/value_loss"):
        steps = [step for step, _ in logged[tag]]
        assert (np.diff(steps) > 0).all()
        assert steps[-1] == after["global_step"]
        # An entry for ten steps of TD3, of losses after the first 50, or for the two updates of a rollout.
        first = 50 if "qf" in tag else 0
        assert len(steps) == ((after["global_step"] - first) // 10 if name == TD3 else after["updates"] / 2)


@pytest.mark.parametrize("name", FREQUENT)
def test_kill_9_at_any_moment_loses_no_checkpoint_and_leaves_whole_curves(name, tmp_path, capfd):
    """A run is halted at many moments, and its folder copied: it is then as kill -9 would leave it."""
    process, newest = start(name, tmp_path, *FREQUENT[name], stderr=subprocess.DEVNULL), 100
    try:
        for moment in range(16):
            while not any(int(path.stem) > newest for path in checkpoints(tmp_path)):
                assert process.poll() is None
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.05))
            process.send_signal(signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            shutil.copytree(tmp_path / "runs", tmp_path / str(moment) / "runs")
            newest = int(checkpoints(tmp_path)[-1].stem)
            process.send_signal(signal.SIGCONT)
        [folder] = tmp_path.glob("runs/*")
        with pytest.raises(SystemExit) as raised:
            steps = ("--total-timesteps", newest)
            play(name, *FREQUENT[name], *steps, "--resume", folder, directory=tmp_path)
        assert raised.value.code == 2
        line = capfd.readouterr().err.splitlines()[-1]
        assert line == f"{name}.py: error: --resume: a run is at work in {folder}"
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    time.sleep(1)  # so that the file of another process comes later, by the second in its name
    for moment in range(16):
        check_after_kill(name, tmp_path / str(moment), more_steps=0 if moment % 2 else 100)
    check_after_kill(name, tmp_path, more_steps=100)


@pytest.fixture
def raising(monkeypatch) -> Iterator[Callable]:
    """Has the scripted environment raise a signal once, in its n-th step, from 0 on."""

    def unhandled(*_) -> None:
        raise AssertionError

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, unhandled) for number in numbers}
    step = Scripted.step

    def raise_at(number: int, n: int) -> None:
        def raising_step(env: Scripted, action: np.ndarray):
            if len(env.actions) == n:
                monkeypatch.setattr(Scripted, "step", step)
                signal.raise_signal(number)
            return step(env, action)

        monkeypatch.setattr(Scripted, "step", raising_step)

    yield raise_at
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", ["td3_continuous_action_torchcompile", "dqn", PPO])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(name, number, raising, tmp_path, capfd):
    raising(number, 149 if name in OFF_POLICY else 60)
    with pytest.raises(SystemExit) as raised:
        play(name, *short(name), "--save-model", "--eval-episodes", "3", directory=tmp_path)
    assert raised.value.code == 128 + number
    summary = json.loads(capfd.readouterr().out)
    [path] = checkpoints(tmp_path)
    steps, updates, *_ = torch.load(path, weights_only=True)["progress"]
    assert [summary[key] for key in ("total_timesteps", "updates", "eval_returns")] == [steps, updates, []]
    assert int(path.stem) == steps
    # 49 steps that count towards gradient steps; of PPO what is learnt from two rollouts.
    assert (steps, updates) == {"td3": (150, 35), "dqn": (150, 7), "ppo": (steps, 20)}[name[:3]]


def test_a_signal_ends_an_evaluation(trained, raising, tmp_path, capfd):
    done, path = trained(TD3)
    first = episode_end(done["env"].unwrapped.seeds[0], 0)[0]
    raising(signal.SIGINT, first)
    capfd.readouterr()
    with pytest.raises(SystemExit) as raised:
        play(TD3, "--evaluate", path, directory=tmp_path)
    assert raised.value.code == 130
    assert json.loads(capfd.readouterr().out)["eval_returns"] == done["eval_returns"][:1]


def test_what_nohup_ignores_is_ignored(raising):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raising(signal.SIGHUP, 149)
    assert play(TD3, *short(TD3))["global_step"] == 300


RAISING_TWICE = """
import runpy, signal, sys
from envs import Scripted

def step(env, action, act=Scripted.step):
    if len(env.actions) in (10, 20):
        print("step", len(env.actions), file=sys.stderr)
        signal.raise_signal(signal.SIGTERM)
    return act(env, action)

Scripted.step, sys.argv = step, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_same_signal_again_ends_a_run_at_once(tmp_path):
    """Also within a rollout."""
    command = [sys.executable, "-c", RAISING_TWICE, LEANRL / f"{PPO}.py", "--no-cuda"]
    command += [*scripted_world(PPO), "--total-timesteps", "2048"]
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True}
    process = subprocess.run(command, **options)
    assert process.returncode == -signal.SIGTERM
    assert "step 10" in process.stderr and "step 20" in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


@pytest.mark.parametrize("what", ["loss", "transition"])
@pytest.mark.parametrize("name", NOT_ATARI)
def test_what_is_not_finite_ends_a_run_and_leaves_its_checkpoint(name, what, trained, monkeypatch):
    _, path = trained(name)
    saved = path.read_bytes()
    options = ["--checkpoint-every", "100", *(("--log-every", "1") if name in OFF_POLICY else ())]
    if what == "loss":
        options += ["--q-lr" if name.startswith("sac") else "--learning-rate", "1e7"]
    else:
        monkeypatch.setattr("envs.reward", lambda episode, step: math.nan)
    with pytest.raises(SystemExit) as raised:
        go_on(name, 600, path, *options)
    # A message as the status is printed, and the status is 1.
    fault = "a transition is not finite" if what == "transition" else r"[a-z_0-9]+ is (nan|-?inf)"
    assert re.fullmatch(rf"{name}\.py: error: {fault} at step \d+", raised.value.code)
    assert list(path.parent.glob("*.pt")) == [path]
    assert path.read_bytes() == saved


# ---- Evaluation --------------------------------------------------------------------------------------------
def best_actions(name: str, done: dict, obs: np.ndarray) -> np.ndarray:
    """What the networks of a run take for the best actions where an environment shows this."""
    with torch.no_grad():
        if "atari" in name:
            return done["agent"](torch.from_numpy(obs.transpose(0, 2, 3, 1).copy()))[0].argmax(dim=1).numpy()
        space, obs = done["env"].unwrapped.action_space, obs.reshape(len(obs), -1)
        if name in ON_POLICY:
            obs = done["obs_moments"].standardise(obs)
        obs = torch.as_tensor(obs, dtype=torch.uint8 if obs.dtype == np.uint8 else torch.float32)
        if name in DISCRETE:
            return done["q_network"](obs).argmax(dim=1).numpy() + space.start
        if name in ON_POLICY:
            return done["agent"](obs)[0].numpy().clip(space.low, space.high)
        actions = torch.tanh(done["actor"](obs)[0]) if name.startswith("sac") else done["actor"](obs)
        return space.low + (actions.numpy() + 1) / 2 * (space.high - space.low)


PAIRS = [*zip(SCRIPTS, TWINS, strict=True), *zip(TWINS, SCRIPTS, strict=True)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_evaluation_takes_the_best_actions_also_of_the_other_script(first, second, trained, tmp_path, capfd):
    done, path = trained(first)
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
    assert np.array(env.actions).reshape(best.shape) == pytest.approx(best, abs=1e-5)
    others = np.array(again["env"].unwrapped.actions[: len(best)])
    assert others.reshape(best.shape) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in DISCRETE if name in SCRIPTS])
def test_evaluation_sees_bytes_as_training_does(name):
    done = run(name, *world(name, "Bytes"), *short(name), "--eval-episodes", "5")
    env = done["env"].unwrapped
    lengths = [episode_end(env.seeds[0], episode)[0] for episode in range(5)]
    seen = [(episode, step) for episode, length in enumerate(lengths) for step in range(length)]
    images = np.stack([Bytes.image(env.seeds[0], *where) for where in seen])
    assert np.array_equal(best_actions(name, done, images), env.actions)
