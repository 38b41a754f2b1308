"""Checkpoints hold all that a run needs to go on, in the eager script and in the twin, and survive what happens to runs."""

import errno
import io
import json
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    ACTOR_CRITIC,
    DISCRETE,
    NOT_ATARI,
    OFF_POLICY,
    ON_POLICY,
    SCRIPTS,
    SHORT,
    TWINS,
    checkpoints,
    cli,
    curves,
    play,
    rendering,
    resume_with_warm_up,
    run,
    start,
    world,
)
from envs import Bytes, episode_end, observation, reward

PAIRS = [*zip(SCRIPTS, TWINS, strict=True), *zip(TWINS, SCRIPTS, strict=True), *zip(SCRIPTS, SCRIPTS, strict=True)]


def short(name: str, steps: int) -> tuple[str, ...]:
    """The arguments for a short run of so many steps."""
    return (*SHORT[name][:-1], str(steps))


def held(globals_: dict) -> dict[str, torch.Tensor]:
    """All that a checkpoint of this run would hold."""
    buffer = {"buffer": globals_["buffer"][: globals_["size"]]} if "size" in globals_ else {}
    return globals_["tensors"] | buffer


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda name: name)
def test_what_is_loaded_is_what_was_saved(first, second, tmp_path):
    """Parameters, moments of Adam, buffers, normalisers and counters, from either script of a pair into the other."""
    before = play(first, *short(first, 300), "--save-model", directory=tmp_path)
    seed = torch.initial_seed()
    [path] = checkpoints(tmp_path)
    # No step is left to be done.
    after = play(second, *short(second, before["global_step"]), "--resume", path, directory=tmp_path)
    for name in ("global_step", "updates", "episodes"):
        assert after[name] == before[name], name
    assert after["logger"].logged == len(before["episodes"]) > 0
    assert before["updates"] > 0
    torch.testing.assert_close(held(after), held(before), rtol=0, atol=0)
    steps = [tensor for name, tensor in held(after).items() if ".step." in name]
    assert steps
    assert all(step > 0 for step in steps)
    assert after["logger"].folder.samefile(tmp_path / before["logger"].folder)
    assert torch.initial_seed() != seed  # what is drawn from here on is not what the first run drew


@pytest.mark.parametrize("script", SCRIPTS)
def test_compiling_leaves_what_was_loaded(script, tmp_path):
    resume_with_warm_up(script, "--compile", directory=tmp_path)


def wait_for_another_second() -> None:
    """TensorBoard reads a folder in the order of the names: the second, and a counter, whose 10 comes before its 9."""
    time.sleep(1)


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_two_resumes_compute_and_log_the_same(name, tmp_path):
    small = ("--batch-size", "32") if name in OFF_POLICY else ()
    steps = 2300 if "atari" not in name else 600
    (tmp_path / "first").mkdir()
    play(name, *short(name, 300), *small, "--save-model", directory=tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    wait_for_another_second()
    runs = []
    for directory in (tmp_path / "first", tmp_path / "second"):
        [path] = checkpoints(directory)
        runs.append(play(name, *short(name, steps), *small, "--resume", path, directory=directory))
    assert runs[0]["global_step"] > steps - 200
    assert runs[0]["episodes"] == runs[1]["episodes"]
    torch.testing.assert_close(held(runs[1]), held(runs[0]), rtol=0, atol=0)
    first, second = (curves(path) for path in tmp_path.glob("*/runs/*"))
    assert len(first.pop("charts/SPS")) == len(second.pop("charts/SPS"))
    assert first == second
    [losses, *_] = [points for name, points in first.items() if name.endswith(("/qf_loss", "/td_loss", "/value_loss"))]
    assert len(losses) > 3
    assert max(step for step, _ in losses) > steps - 200


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name in SCRIPTS])
def test_a_full_replay_buffer_goes_on_in_its_place(name, tmp_path):
    options = ("--buffer-size", "128", "--batch-size", "32")
    before = play(name, *short(name, 300), *options, "--save-model", directory=tmp_path)
    old = before["buffer"].clone()
    after = play(name, *short(name, 310), *options, "--resume", checkpoints(tmp_path)[0], directory=tmp_path)
    changed = (after["buffer"] != old).any(dim=1).nonzero().flatten().tolist()
    assert changed == [index % 128 for index in range(300, 310)] == list(range(44, 54))


@pytest.mark.parametrize("name", NOT_ATARI)
def test_the_schedule_and_the_curves_go_on(name, tmp_path):
    options = ("--checkpoint-every", "100", *(("--exploration-fraction", "1") if name in DISCRETE else ()))
    play(name, *short(name, 400), *options, directory=tmp_path)
    newest = checkpoints(tmp_path)[-1]
    wait_for_another_second()
    after = play(name, *short(name, 800), *options, "--resume", newest.parent, directory=tmp_path)
    assert len(list(tmp_path.glob("runs/*"))) == 1
    assert len(checkpoints(tmp_path)) == 2
    logged = curves(newest.parent)
    if name in ON_POLICY:
        rates = dict(logged["charts/learning_rate"])
        # The last rollout of the second run, which knew of 800 steps.
        assert min(rates.values()) == pytest.approx(after["learning_rate"])
        assert after["learning_rate"] < 3e-4 / 2
    if name in DISCRETE:
        # Down to 0.05 within 400 steps, and from the 400th on within the 800 that the second run knew of.
        shares = dict(logged["charts/epsilon"])
        assert [shares[step] for step in (200, 400, 600, 800)] == pytest.approx([0.525, 0.05, 0.2875, 0.05])
        assert after["epsilon"].item() == pytest.approx(1 - 0.95 * 799 / 800)
    assert logged["charts/episodic_return"] == [
        (step, pytest.approx(value)) for step, value, _ in after["episodes"][: after["logger"].logged]
    ]


def test_a_run_without_checkpoints_writes_none(tmp_path):
    play("td3_continuous_action", *SHORT["td3_continuous_action"], directory=tmp_path)
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize("name", ["td3_continuous_action", "ppo_continuous_action"])
def test_kill_9_at_any_moment_loses_no_checkpoint_and_leaves_whole_curves(name, tmp_path):
    chance = random.Random(1)
    apart = 10 if name in OFF_POLICY else 32  # at most so many steps are from one log entry to the next
    options = ("--learning-starts", "50", "--batch-size", "8", "--log-every", "10")
    options = options if name in OFF_POLICY else ("--num-steps", "32", "--num-minibatches", "2")
    options = (*options, "--checkpoint-every", "20")
    for _ in range(10):
        resume = ("--resume", str(checkpoints(tmp_path)[-1].parent)) if checkpoints(tmp_path) else ()
        known = len(checkpoints(tmp_path)) and int(checkpoints(tmp_path)[-1].stem)
        process = start(name, tmp_path, *options, *resume)
        # Until it has gone on, and then for a moment more.
        while (not checkpoints(tmp_path) or int(checkpoints(tmp_path)[-1].stem) <= known) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        for path in checkpoints(tmp_path):
            torch.load(path, weights_only=True)
    [folder] = tmp_path.glob("runs/*")
    newest = int(checkpoints(tmp_path)[-1].stem)
    total = newest // 100 * 100 + 100
    process = start(name, tmp_path, *options, "--resume", str(folder), "--total-timesteps", str(total))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    logged = curves(folder)
    steps = [step for step, _ in logged["charts/SPS"]]
    gaps = np.diff(steps, prepend=0)
    assert set(gaps) == {10} if name in OFF_POLICY else 0 < gaps.min() <= gaps.max() <= apart
    assert total - apart <= steps[-1] <= total
    episodes = [step for step, _ in logged["charts/episodic_return"]]
    assert len(episodes) == len(set(episodes))
    assert episodes == sorted(episodes)


QUICK = dict.fromkeys(OFF_POLICY, ("--learning-starts", "50", "--batch-size", "8"))
QUICK |= dict.fromkeys(ON_POLICY, ("--num-steps", "64"))


def wait_for_checkpoint(directory: Path, process: subprocess.Popen) -> Path:
    """Wait for a checkpoint newer than there are, and return it."""
    known = checkpoints(directory)
    while checkpoints(directory) in ([], known) and process.poll() is None:
        time.sleep(0.02)
    return checkpoints(directory)[-1]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("name", ["td3_continuous_action", "ppo_continuous_action"])
def test_a_signal_ends_a_run_in_order_and_with_a_checkpoint(name, number, status, tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests run under nohup, it is ignored
    process = start(name, tmp_path, *QUICK[name], "--checkpoint-every", "200")
    due = wait_for_checkpoint(tmp_path, process)
    process.send_signal(number)
    output, error = process.communicate(timeout=60)
    assert process.returncode == status, error
    assert json.loads(output)["total_timesteps"] == int(checkpoints(tmp_path)[-1].stem) > int(due.stem)


def test_a_run_at_work_under_nohup_goes_on_and_keeps_others_out_of_its_folder(tmp_path, capfd):
    name = "td3_continuous_action"
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = start(name, tmp_path, *QUICK[name], "--checkpoint-every", "200")
    finally:
        signal.signal(signal.SIGHUP, handler)
    folder = wait_for_checkpoint(tmp_path, process).parent
    process.send_signal(signal.SIGHUP)
    wait_for_checkpoint(tmp_path, process)
    with pytest.raises(SystemExit) as raised:
        play(name, *QUICK[name], "--resume", folder, directory=tmp_path)
    assert raised.value.code == 2
    assert capfd.readouterr().err.splitlines()[1:] == [
        "--checkpoint-every None from here on, it was 200",
        f"{name}.py: error: {folder} cannot be written to: a run is at work",
    ]
    wait_for_checkpoint(tmp_path, process)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    # Nobody is at work there any more.
    steps = ("--total-timesteps", checkpoints(tmp_path)[-1].stem)
    assert play(name, *QUICK[name], *steps, "--resume", folder, directory=tmp_path)["logger"].folder == folder


@pytest.mark.parametrize("name", ["td3_continuous_action", "ppo_continuous_action"])
@pytest.mark.parametrize(("number", "status"), [(None, 141), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_whose_errors_nobody_reads_any_more_saves_and_ends(name, number, status, tmp_path):
    process = start(name, tmp_path, *QUICK[name], "--save-model")
    told = process.stderr.read(100)  # as in `2>&1 | head -c 100`
    if number:  # as in `2>&1 | tee log`, which hears the signal, too
        process.send_signal(number)
    process.stderr.close()
    output = process.stdout.read()
    assert process.wait(timeout=60) in ((status, 141) if number else (status,))
    assert "Traceback" not in told + output
    assert json.loads(output)["total_timesteps"] == int(checkpoints(tmp_path)[-1].stem) > 0


def test_an_evaluation_whose_errors_nobody_reads_prints_its_summary(tmp_path):
    name = "td3_continuous_action"
    play(name, *SHORT[name], "--save-model", directory=tmp_path)
    process = start(name, tmp_path, "--no-cuda", "--env-id", "envs:Scripted-v0", "--evaluate", checkpoints(tmp_path)[0])
    process.stderr.readline()  # which checkpoint it is
    process.stderr.close()
    output = process.stdout.read()
    assert process.wait(timeout=60) == 141
    assert len(json.loads(output)["eval_returns"]) < 10


class FullDisk(io.StringIO):
    """Has room for what is written first."""

    def write(self, text: str) -> int:
        if self.tell() > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.mark.parametrize(("name", "options"), [("td3_continuous_action", ("--log-every", "1")), ("ppo_continuous_action", ())])
def test_a_full_disk_under_standard_error_ends_no_run(name, options, tmp_path, monkeypatch):
    """Neither the progress bar nor the warning of a checkpoint that cannot be written."""
    monkeypatch.setattr(sys, "stderr", FullDisk())
    monkeypatch.setattr(torch, "save", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    logger = play(name, *SHORT[name], *options, "--checkpoint-every", "1", directory=tmp_path)["logger"]
    assert logger.bar.disable
    assert logger.stopping == checkpoints(tmp_path) == []


class Executed:
    """Leaves a trace where unpickling executes it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path, capfd):
    name = "td3_continuous_action"
    arguments = ("--no-cuda", "--env-id", "envs:Scripted-v0", *SHORT[name])
    play(name, *SHORT[name], "--save-model", directory=tmp_path)
    [path] = checkpoints(tmp_path)
    good = torch.load(path, weights_only=True)

    def refusal(script: str, *args) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as raised:
            run(script, *args, directory=tmp_path)
        assert raised.value.code == 2
        *told, line = capfd.readouterr().err.splitlines()
        # Which checkpoint it is, and what differs.
        what = r"checkpoint: \S+\.pt|--[a-z-]+ \S+ (from here on|is ignored), it was \S+"
        assert all(re.fullmatch(what, one) for one in told)
        return line.removeprefix(f"{script}.py: error: ")

    def none_of(path: Path) -> str:
        return f"checkpoint or a folder with one (--save-model), {path} is neither: "

    takes = "--resume takes a checkpoint"
    other = tmp_path / "other.pt"
    assert refusal("sac_continuous_action", "--resume", path, "--env-id", "envs:Scripted-v0").startswith(
        f"{takes} of algorithm sac_continuous_action, {path} has td3_continuous_action"
    )
    assert refusal(name, "--resume", path, "--env-id", "Hopper-v4").startswith(f"{takes} of env_id Hopper-v4, {path} has ")
    torch.save(good | {"identity": good["identity"] | {"format": 1}}, other)
    assert refusal(name, "--resume", other, *arguments[1:]) == f"{takes} of format 2, {other} has 1"
    parameters = next(key for key in good["state"] if key.startswith("actor.params"))
    smaller = good["state"] | {parameters: good["state"][parameters][:5]}
    torch.save(good | {"state": smaller}, other)
    assert f"with {parameters} of shape" in refusal(name, "--resume", other, *arguments[1:])
    assert f"with {parameters} of shape" in refusal(name, "--evaluate", other, *arguments[1:])
    missing = {key: tensor for key, tensor in good["state"].items() if key != parameters}
    torch.save(good | {"state": missing}, other)
    assert "has None" in refusal(name, "--resume", other, *arguments[1:])
    torch.save(good | {"state": good["state"] | {"actor.params.fc9.weight": torch.zeros(1)}}, other)
    assert "with actor.params.fc9.weight of shape None" in refusal(name, "--resume", other, *arguments[1:])
    for flag in ("--num-envs", "--seed"):
        assert refusal(name, "--resume", path, *arguments[1:], flag, "2").startswith(
            f"{takes} of {flag[2:].replace('-', '_')} 2, "
        )
    assert "with buffer of shape" in refusal(name, "--resume", path, *arguments[1:], "--buffer-size", "256")
    assert good.keys() == {"identity", "progress", "state"}
    parts = [{key: value for key, value in good.items() if key != part} for part in good]
    for broken in (*parts, good | {"identity": {"format": 2}}, list(good)):
        torch.save(broken, other)
        assert refusal(name, "--resume", other, *arguments[1:]).startswith(f"--resume takes a {none_of(other)}")
    assert "exclude each other" in refusal(name, "--resume", path, "--evaluate", path, *arguments[1:])
    for content in (path.read_bytes()[:-1000], b"", b"no checkpoint", pickle.dumps(Executed(tmp_path / "executed"))):
        other.write_bytes(content)
        assert refusal(name, "--resume", other, *arguments[1:]).startswith(f"--resume takes a {none_of(other)}")
    torch.save(Executed(tmp_path / "executed"), other)
    assert refusal(name, "--evaluate", other, *arguments[1:]).startswith(f"--evaluate takes a {none_of(other)}")
    assert not (tmp_path / "executed").exists()
    assert refusal(name, "--resume", tmp_path / "nowhere", *arguments[1:]).startswith(takes)
    (empty := tmp_path / "empty").mkdir()
    assert refusal(name, "--resume", empty, *arguments[1:]).startswith(f"--resume takes a {none_of(empty)}")


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_cannot_be_written_to_is_refused(link, tmp_path, capfd):
    # In its place a file, below which not even root can write, or a link to a disk that is not there.
    (tmp_path / "runs").symlink_to("nowhere") if link else (tmp_path / "runs").touch()
    name = "td3_continuous_action"
    with pytest.raises(SystemExit) as raised:
        play(name, *SHORT[name], "--save-model", directory=tmp_path)
    assert raised.value.code == 2
    assert re.fullmatch(
        rf"{name}\.py: error: runs/\S+ cannot be written to: .*(Not a|No such file or) directory: .*\n", capfd.readouterr().err
    )


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a few megabytes."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def check_after_full_disk(process: subprocess.CompletedProcess, directory: Path) -> None:
    """Training went on, with a warning, and the checkpoints that there are are whole."""
    assert process.returncode == 0, process.stderr
    assert "warning: no checkpoint runs/" in process.stderr
    assert json.loads(process.stdout)["total_timesteps"] > 0
    kept = checkpoints(directory)
    assert 1 <= len(kept) <= 2
    for path in kept:
        torch.load(path, weights_only=True)
    assert not list(directory.glob("runs/*/*.new"))


def test_a_disk_too_small_for_a_checkpoint_stops_nothing(small_disk):
    name = "td3_continuous_action"
    # Two checkpoints of 2.3 MiB fit, a third, which is written before the first is removed, does not.
    options = ("--env-id", "envs:Scripted-v0", "--learning-starts", "50", "--total-timesteps", "600")
    check_after_full_disk(cli(name, "--no-cuda", *options, "--checkpoint-every", "100", cwd=small_disk), small_disk)


def test_a_disk_that_is_full_stops_nothing(small_disk):
    options = ("--learning-starts", "50", "--batch-size", "8", "--log-every", "10", "--total-timesteps", "2000")
    process = start("td3_continuous_action", small_disk, *options, "--checkpoint-every", "100")
    while not checkpoints(small_disk):
        time.sleep(0.02)
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        for size in (2**16, 1):
            with suppress(OSError):
                while True:
                    filler.write(bytes(size))
    output, error = process.communicate(timeout=120)
    check_after_full_disk(subprocess.CompletedProcess([], process.returncode, output, error), small_disk)


def test_a_future_that_is_given_up_is_kept_until_the_run_has_saved_beyond_it(tmp_path):
    name = "td3_continuous_action"
    options = ("--learning-starts", "50", "--batch-size", "8", "--log-every", "10", "--checkpoint-every", "50")
    play(name, *options, "--total-timesteps", "200", directory=tmp_path)
    assert [int(path.stem) for path in checkpoints(tmp_path)] == [150, 200]
    older, newer = checkpoints(tmp_path)
    folder, future = older.parent, newer.read_bytes()
    (folder / "best.pt").touch()  # not ours

    def go_on(steps: int, path: Path) -> list[str]:
        play(name, *options, "--total-timesteps", str(steps), "--resume", path, directory=tmp_path)
        return sorted(path.name for path in folder.glob("*.pt"))

    # Nothing is trained, nothing is lost.
    assert go_on(150, older) == ["150.pt", "200.pt", "best.pt"]
    play(name, "--evaluate", older, directory=tmp_path)
    # A run that ends before the other.
    assert go_on(170, older) == ["150.pt", "170.pt", "200.pt", "best.pt"]
    assert newer.read_bytes() == future
    # One that comes beyond, from where its first checkpoint is not the newest.
    assert go_on(280, folder / "170.pt") == ["270.pt", "280.pt", "best.pt"]


def told(error: str) -> list[str]:
    """What a run has told of arguments that differ, sorted."""
    return sorted(line for line in error.splitlines() if line.startswith("--"))


def test_what_differs_is_told_when_a_run_goes_on(tmp_path, capfd):
    name = "sac_continuous_action"
    first = play(name, *short(name, 300), "--batch-size", "8", "--save-model", directory=tmp_path)
    [path] = checkpoints(tmp_path)

    def go_on(*args) -> dict:
        capfd.readouterr()
        (tmp_path / "copy").mkdir(exist_ok=True)
        resume = ("--resume", shutil.copy(path, tmp_path / "copy"))
        return play(name, *short(name, 310), "--batch-size", "8", "--save-model", *args, *resume, directory=tmp_path)

    learnt = first["log_alpha"].exp().item()
    assert abs(learnt - 0.5) > 0.1
    after = go_on("--alpha", "0.5", "--q-lr", "1e-4", "--exp-name", "another")
    assert told(capfd.readouterr().err) == [
        "--alpha 0.5 is ignored, it was 0.2",
        "--exp-name another is ignored, it was sac_continuous_action",
        "--q-lr 0.0001 from here on, it was 0.001",
        "--total-timesteps 310 from here on, it was 300",
    ]
    assert after["log_alpha"].exp().item() == pytest.approx(learnt, abs=0.02)
    after = go_on("--alpha", "0.5", "--no-autotune")
    assert told(capfd.readouterr().err) == [
        "--alpha 0.5 from here on, it was 0.2",
        "--autotune False from here on, it was True",
        "--total-timesteps 310 from here on, it was 300",
    ]
    assert after["log_alpha"].exp().item() == after["losses"]["alpha"].item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", [name for name in ACTOR_CRITIC if name in SCRIPTS])
def test_gradient_steps_are_owed_from_the_step_resumed_at(name, tmp_path):
    options = ("--num-envs", "2", "--batch-size", "8")

    def train(steps: int, starts: str = "100", rate: str = "0.7", *args) -> int:
        options_ = (*options, "--learning-starts", starts, "--updates-per-step", rate, "--total-timesteps", str(steps))
        return play(name, *options_, *args, directory=tmp_path)["updates"]

    done = train(300, "100", "0.7", "--save-model")
    resume = ("--resume", checkpoints(tmp_path)[0])
    assert train(400, "100", "0.7", *resume) == train(400) > done + 60
    # A fraction of a step was owed at most.
    assert train(400, "100", "0.2", *resume) - done in (20, 21)
    assert train(400, "100", "4", *resume) - done in (400, 401)
    assert train(400, "10", "0.7", *resume) - done in (70, 71)
    # Where learning stopped: 48 of the 50 steps after it choose their actions knowing of new transitions.
    assert train(400, "350", "0.7", *resume) - done in (34, 35)


def test_agent_steps_towards_the_next_gradient_step_of_dqn_are_kept(tmp_path):
    """Of 200 steps that count, the 28th gradient step takes 196; the other four count in the run that goes on."""
    options = (*SHORT["dqn"][4:], "--train-frequency", "7", "--batch-size", "8")
    assert play("dqn", *options, "--save-model", directory=tmp_path)["updates"] == 28
    resume = ("--resume", checkpoints(tmp_path)[0], "--total-timesteps", "303")
    assert play("dqn", *options, *resume, directory=tmp_path)["updates"] == 28
    assert play("dqn", *options, *resume[:-1], "304", directory=tmp_path)["updates"] == 29


@pytest.fixture
def made(monkeypatch) -> list[gym.Env]:
    """The environments that are made, the last of which is that of an evaluation."""
    environments, make = [], gym.make
    monkeypatch.setattr(
        "gymnasium.make", lambda *args, **options: environments.append(make(*args, **options)) or environments[-1]
    )
    return environments


@pytest.mark.parametrize("name", [name for name in DISCRETE if name in SCRIPTS])
def test_evaluation_sees_bytes_as_training_does(name, made):
    trained = run(name, *world(name, "Bytes"), *SHORT[name], "--batch-size", "8", "--eval-episodes", "5")
    env = made[-1].unwrapped
    lengths = [episode_end(env.seeds[0], episode)[0] for episode in range(5)]
    images = [Bytes.image(env.seeds[0], episode, step) for episode, length in enumerate(lengths) for step in range(length)]
    with torch.no_grad():
        best = trained["q_network"](torch.from_numpy(np.stack(images)).flatten(1)).argmax(dim=1)
    assert np.array_equal(best + 5, env.actions)


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_evaluation_repeats_itself_and_changes_nothing(name, tmp_path):
    trained = play(name, *SHORT[name], "--save-model", "--eval-episodes", "3", directory=tmp_path)
    assert len(trained["eval_returns"]) == 3
    again = play(name, "--evaluate", checkpoints(tmp_path)[0], "--eval-episodes", "3", directory=tmp_path)
    assert again["global_step"] == again["updates"] == 0
    acting = {
        key: tensor
        for key, tensor in held(again).items()
        if ".params." in key and key.startswith(("actor", "agent", "q_network"))
    }
    acting |= {key: tensor for key, tensor in held(again).items() if key.startswith("obs_moments")}
    saved = torch.load(checkpoints(tmp_path)[0], weights_only=True)["state"]
    torch.testing.assert_close({key: tensor.detach() for key, tensor in acting.items()}, {key: saved[key] for key in acting})
    assert again["eval_returns"] == trained["eval_returns"]  # the same games, whose rewards do not depend on the actions


@pytest.mark.parametrize("name", NOT_ATARI)
def test_evaluation_takes_the_best_actions_sums_the_rewards_and_shows_a_bar(name, made, tmp_path, capfd):
    trained = play(name, *SHORT[name], "--eval-episodes", "3", directory=tmp_path)
    assert re.search(r"\revaluation: 100%.* 3/3 ", capfd.readouterr().err)
    env = made[-1].unwrapped
    seed = env.seeds[0]
    lengths = [episode_end(seed, episode)[0] for episode in range(3)]
    expected = [sum(reward(episode, step) for step in range(length)) for episode, length in enumerate(lengths)]
    assert trained["eval_returns"] == pytest.approx(expected)
    steps = [(episode, step) for episode, length in enumerate(lengths) for step in range(length)]
    best = [trained["best_action"](observation(seed, *step)) for step in steps]
    assert np.array_equal(best, env.actions)


def test_evaluation_plays_whole_episodes(tmp_path):
    name = "ppo_continuous_action"
    arguments = ("--env-id", "InvertedPendulum-v4", "--total-timesteps", "4096", "--num-steps", "512", "--save-model")
    trained = run(name, *arguments, "--eval-episodes", "2", directory=tmp_path)
    again = run(name, "--env-id", "InvertedPendulum-v4", "--evaluate", checkpoints(tmp_path)[0].parent, directory=tmp_path)
    assert len(again["eval_returns"]) == 10
    assert again["eval_returns"][:2] == trained["eval_returns"]  # the same episodes


def test_videos_of_the_trained_agent(tmp_path):
    name, pendulum = "td3_continuous_action", ("--env-id", "InvertedPendulum-v4")
    assert cli(name, "--no-cuda", *pendulum, *SHORT[name], "--save-model", cwd=tmp_path).returncode == 0
    options = ("--evaluate", checkpoints(tmp_path)[0], "--eval-episodes", "1", "--capture-video")
    process = cli(name, "--no-cuda", *pendulum, *options, cwd=tmp_path, env=rendering())
    assert process.returncode == 0, process.stderr
    assert len(json.loads(process.stdout)["eval_returns"]) == 1
    assert [video.stat().st_size > 1000 for video in tmp_path.glob("runs/*/evaluation/videos/*.mp4")] == [True]
