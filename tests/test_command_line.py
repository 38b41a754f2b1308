"""What a user sees: refusals in one line, the run summary, the logs, Ctrl+C, videos."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import LEANRL, OFF_POLICY, SCRIPTS, SEEDS, SHORT, TWINS, cli, environment, load, play, rendering, run
from gymnasium.utils.save_video import capped_cubic_video_schedule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PENDULUM = ("--env-id", "InvertedPendulum-v4")
# What is refused by script: arguments, and what the message has to name.
REFUSALS = {
    "td3_continuous_action": {
        "unknown environment": (("--env-id", "HalfCheetah-v99"), "--env-id"),
        "unknown module": (("--env-id", "no_such_module:Env-v0"), "--env-id"),
        "environment that was removed": (("--env-id", "HalfCheetah-v2"), "--env-id"),
        "discrete actions": (("--env-id", "CartPole-v1"), "--env-id"),
        "unbounded actions": (("--env-id", "envs:Unbounded-v0"), "--env-id"),
        "observations that are no Box": (("--env-id", "envs:DictObs-v0"), "--env-id"),
        "no batch": (("--batch-size", "0"), "--batch-size"),
        "tau above 1": (("--tau", "2"), "--tau"),
        "gamma that is no number": (("--gamma", "nan"), "--gamma"),
        "no learning": (("--learning-starts", "1000", "--total-timesteps", "1000"), "--learning-starts"),
        "no step after learning starts": (("--learning-starts", "999", "--total-timesteps", "1000"), "0 to 998"),
        "all environments at once": (
            ("--learning-starts", "950", "--total-timesteps", "1000", "--num-envs", "100"),
            "--learning-starts",
        ),
        "negative seed": (("--seed", "-1"), "--seed"),
        "seed beyond 64 bits": (("--seed", "99999999999999999999"), "--seed"),
        "buffer smaller than the batch": (("--buffer-size", "255"), "--buffer-size"),
        "buffer larger than memory": (("--buffer-size", "1000000000000"), "GiB"),
        "no environment": (("--num-envs", "0"), "--num-envs"),
        "endless learning rate": (("--exploration-noise", "inf"), "--exploration-noise"),
        "actions of whole numbers": (("--env-id", "envs:Integers-v0"), "real numbers"),
        "action that is always the same": (("--env-id", "envs:NoWidth-v0"), "--env-id"),
        "error of several lines": (("--env-id", "envs:Talkative-v0"), "RuntimeError: one line and another"),
        "error without words": (("--env-id", "envs:Silent-v0"), "--env-id: cannot make envs:Silent-v0: RuntimeError"),
        "folder without checkpoints": (("--resume", "."), "--resume"),
        "no checkpoint to evaluate": (("--evaluate", "nowhere"), "--evaluate"),
    },
    "sac_continuous_action": {
        "actions of whole numbers": (("--env-id", "envs:Integers-v0"), "real numbers"),
        "action that is always the same": (("--env-id", "envs:NoWidth-v0"), "--env-id"),
        "error of several lines": (("--env-id", "envs:Talkative-v0"), "RuntimeError: one line and another"),
        "negative entropy coefficient": (("--alpha", "-1"), "--alpha"),
        "folder without checkpoints": (("--evaluate", "."), "--evaluate"),
    },
    "ppo_continuous_action": {
        "Atari game": (("--env-id", "Breakout-v5"), "--env-id"),
        "discrete actions": (("--env-id", "CartPole-v1"), "--env-id"),
        "observations that are no Box": (("--env-id", "envs:DictObs-v0"), "--env-id"),
        "actions of whole numbers": (("--env-id", "envs:Integers-v0"), "real numbers"),
        "action that is always the same": (("--env-id", "envs:NoWidth-v0"), "--env-id"),
        "error of several lines": (("--env-id", "envs:Talkative-v0"), "RuntimeError: one line and another"),
        "error without words": (("--env-id", "envs:Silent-v0"), "--env-id: cannot make envs:Silent-v0: RuntimeError"),
        "folder without checkpoints": (("--resume", "."), "--resume"),
        "rest of a batch": (("--num-minibatches", "3"), "--num-minibatches"),
        "rows by themselves": (("--num-steps", "32", "--num-envs", "1", "--num-minibatches", "32"), "--norm-adv"),
        "no environment": (("--num-envs", "0"), "--num-envs"),
        "lambda above 1": (("--gae-lambda", "1.5"), "--gae-lambda"),
        "less than a rollout": (("--total-timesteps", "2047"), "--total-timesteps"),
        "negative divergence": (("--target-kl", "-0.1"), "--target-kl"),
    },
    "dqn": {
        "unknown environment": (("--env-id", "CartPole-v99"), "--env-id"),
        "continuous actions": (("--env-id", "Pendulum-v1"), "Discrete actions"),
        "observations that are no Box": (("--env-id", "envs:DictObs-v0"), "--env-id"),
        "error of several lines": (("--env-id", "envs:Talkative-v0"), "RuntimeError: one line and another"),
        "error without words": (("--env-id", "envs:Silent-v0"), "--env-id: cannot make envs:Silent-v0: RuntimeError"),
        "a share above 1": (("--start-e", "1.5"), "--start-e"),
        "no gradient step": (("--train-frequency", "0"), "--train-frequency"),
        "targets that never follow": (("--target-network-frequency", "0"), "--target-network-frequency"),
        "buffer smaller than the batch": (("--buffer-size", "127"), "--buffer-size"),
        "buffer larger than memory": (("--buffer-size", "1000000000000"), "GiB"),
        "buffer beyond 64 bits": (("--buffer-size", "10000000000000000000"), "GiB"),
        "no learning": (("--learning-starts", "989", "--total-timesteps", "999"), "--learning-starts"),
        "folder without checkpoints": (("--resume", "."), "--resume"),
    },
    "ppo_atari_envpool": {
        "environment of MuJoCo": (("--env-id", "HalfCheetah-v4"), "--env-id"),
        "unknown game": (("--env-id", "NoSuchGame-v5"), "--env-id"),
        "rest of a batch": (("--num-minibatches", "3"), "--num-minibatches"),
        "rows by themselves": (("--num-steps", "32", "--num-envs", "1", "--num-minibatches", "32"), "--norm-adv"),
        "no environment": (("--num-envs", "0"), "--num-envs"),
        "less than a rollout": (("--total-timesteps", "1023"), "--total-timesteps"),
        "negative number of threads": (("--env-threads", "-1"), "--env-threads"),
        "folder without checkpoints": (("--resume", "."), "--resume"),
    },
}


# Runs a script once for each of the arguments on standard input, and marks the ends of what it prints.
ONE_BY_ONE = """
import json, runpy, sys, traceback
path = sys.argv[1]
for arguments in json.load(sys.stdin):
    sys.argv, status = [path, "--no-cuda", *arguments], 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exit:
        status = exit.code
    except BaseException:
        traceback.print_exc()
    print("end", status, file=sys.stderr)
"""


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_arguments_are_refused_in_one_line(name, tmp_path):
    cases = REFUSALS[name]
    command = [sys.executable, "-c", ONE_BY_ONE, str(LEANRL / f"{name}.py")]
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True}
    process = subprocess.run(command, input=json.dumps([arguments for arguments, _ in cases.values()]), **options)
    printed = process.stderr.split("end 2\n")
    assert len(printed) == len(cases) + 1, process.stderr
    assert printed.pop() == process.stdout == ""
    for (case, (_, told)), lines in zip(cases.items(), printed, strict=True):
        # MuJoCo and Gymnasium warn of an environment that is made before it is refused.
        others = re.compile(r"WARNING: compiler attribute.*|.*UserWarning: .*WARN: .*|\s+logger\.warn\(.*|")
        lines = [line for line in lines.splitlines() if not others.fullmatch(line)]
        assert len(lines) == 1, (case, lines)
        assert lines[0].startswith(f"{name}.py: error: "), case
        assert told in lines[0], case
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "MUJOCO_LOG.TXT"])


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS, *SEEDS])
def test_arguments_of_every_script_are_checked_and_explained(name, monkeypatch, capfd):
    with pytest.raises(SystemExit) as raised:
        run(name, "--gamma", "2")
    assert raised.value.code == 2
    assert capfd.readouterr().err.startswith(f"{name}.py: error: --gamma takes a number from 0 to 1, got 2.0")
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as raised:
        run(name, "--help")
    assert raised.value.code == 0
    told = re.sub(r"[\s│]+", " ", capfd.readouterr().out)
    source = (LEANRL / f"{name}.py").read_text()
    for field in fields(load(name)["Args"]):
        [words] = re.findall(rf"(?m)^    {field.name}: .*  # (\S.*)$", source)
        # Behind the argument, or behind both of its forms if it is a switch, and what it takes.
        flag = field.name.replace("_", "-")
        assert re.search(rf" --{flag}(, --no-{flag}| \S.{{,60}}?)? {re.escape(words)} \(default: ", told), field.name


def summary_and_log(name: str, args: tuple[str, ...], directory: Path) -> tuple[dict, EventAccumulator]:
    """Run a script as a command with --no-cuda; returns its checked summary, and its log."""
    process = cli(name, "--no-cuda", *args, cwd=directory)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 1
    summary = json.loads(process.stdout)
    expected = {
        "script": name,
        "seed": 1,
        "device": "cpu",
        "compile": False,
        "cudagraphs": False,
        "cuda": False,
        "checkpoint_every": None,
        "eval_returns": [],
    }
    assert {key: summary[key] for key in expected} == expected
    for key in ("sps", "startup_seconds", "wall_seconds"):
        assert summary[key] > 0
    given = asdict(load(name)["Args"]())
    for flag, value in pairwise(args):
        if flag.startswith("--") and not value.startswith("--"):
            key = flag[2:].replace("-", "_")
            given[key] = type(given[key])(value)
    told_otherwise = {"total_timesteps", "cuda", "capture_video", "compile", "cudagraphs"}
    assert {key: summary[key] for key in given.keys() - told_otherwise} == {
        key: given[key] for key in given.keys() - told_otherwise
    }
    assert f" {summary['total_timesteps']}/" in process.stderr

    (run_dir,) = (directory / "runs").iterdir()
    assert run_dir.name.startswith(f"{summary['env_id']}__{name}__1__")
    return summary, EventAccumulator(str(run_dir)).Reload()


def assert_logs_losses(log: EventAccumulator, *names: str) -> None:
    """Check that the log has these losses."""
    assert {f"losses/{name}" for name in names} <= set(log.Tags()["scalars"])


def assert_episodes_of_the_pendulum(summary: dict, log: EventAccumulator) -> None:
    """Check what was logged of the episodes."""
    assert summary["env_id"] == "InvertedPendulum-v4"
    returns = [event.value for event in log.Scalars("charts/episodic_return")]
    assert len(returns) == summary["episodes"] > 0
    assert np.mean(returns[-100:]) == pytest.approx(summary["episodic_return"])
    assert np.mean(returns[-10:]) == pytest.approx(summary["episodic_return_10"])
    # One unit of reward a step: return and length are the same.
    assert returns == [event.value for event in log.Scalars("charts/episodic_length")]


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action_torchcompile"])
def test_summary_and_logs(name, tmp_path):
    summary, log = summary_and_log(name, (*PENDULUM, *SHORT[name], "--num-envs", "2"), tmp_path)
    assert [summary[key] for key in ("total_timesteps", "num_envs", "updates")] == [300, 2, 198]
    assert_logs_losses(log, "qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss")
    assert [event.step for event in log.Scalars("charts/SPS")] == [100, 200, 300]
    assert_episodes_of_the_pendulum(summary, log)


@pytest.mark.parametrize("name", ["dqn", "dqn_torchcompile"])
def test_summary_logs_and_videos_of_dqn(name, tmp_path):
    """It needs no OpenGL to show what it does."""
    flags = ("--capture-video",) if name == "dqn" else ()
    summary, log = summary_and_log(name, (*SHORT[name], "--num-envs", "2", *flags), tmp_path)
    assert summary["env_id"] == "CartPole-v1"
    assert [summary[key] for key in ("total_timesteps", "num_envs", "updates")] == [300, 2, 198]
    assert_logs_losses(log, "td_loss", "q_values")
    assert [event.step for event in log.Scalars("charts/epsilon")] == [100, 200, 300]
    assert len(log.Scalars("charts/episodic_return")) == summary["episodes"] > 0
    assert all(video.stat().st_size > 1000 for video in tmp_path.glob("runs/*/videos/*.mp4"))
    assert any(tmp_path.glob("runs/*/videos/*.mp4")) == bool(flags)


PPO_LOSSES = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "explained_variance")


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_continuous_action_torchcompile"])
def test_summary_and_logs_of_ppo(name, tmp_path):
    summary, log = summary_and_log(name, (*PENDULUM, *SHORT[name]), tmp_path)
    steps = [event.step for event in log.Scalars("charts/SPS")]
    # Two rollouts of 100 rows are certain, and a third is left out only if there were no episodes.
    assert len(steps) == 3
    assert 200 < steps[-1] == summary["total_timesteps"] <= 300
    assert [summary[key] for key in ("num_envs", "updates")] == [2, 30]
    assert_logs_losses(log, *PPO_LOSSES)
    assert [event.step for event in log.Scalars("charts/learning_rate")] == steps
    assert_episodes_of_the_pendulum(summary, log)


def test_summary_logs_and_video_of_a_game(tmp_path):
    """One game of Breakout takes some 200 steps."""
    rollout = ("--num-envs", "1", "--num-steps", "600", "--total-timesteps", "600", "--update-epochs", "1")
    summary, log = summary_and_log("ppo_atari_envpool", (*rollout, "--capture-video"), tmp_path)
    assert summary["env_id"] == "Breakout-v5"
    assert summary["updates"] == 4
    assert_logs_losses(log, *PPO_LOSSES)
    returns = [event.value for event in log.Scalars("charts/episodic_return")]
    assert len(returns) == summary["episodes"] > 0
    videos = list(tmp_path.glob("runs/*/videos/*.mp4"))
    assert len(videos) == sum(map(capped_cubic_video_schedule, range(len(returns))))
    assert all(video.stat().st_size > 1000 for video in videos)


def test_no_cuda_device_is_told_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    name = "td3_continuous_action_torchcompile"
    process = cli(name, *SHORT[name], "--cuda", "--cudagraphs")
    assert process.returncode == 0
    assert process.stderr.count("CUDA is not available: running on the CPU\n") == 1
    assert process.stderr.count("CUDA graphs need a CUDA device: running without them\n") == 1
    assert json.loads(process.stdout)["cudagraphs"] is False


def read_until(words: str, process: subprocess.Popen) -> None:
    """Read what a process prints on standard error until these words."""
    told = ""
    while words not in told:
        character = process.stderr.read(1)
        assert character, told
        told += character


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("td3_continuous_action", ()),
        ("td3_continuous_action_torchcompile", ("--compile",)),
        ("ppo_continuous_action", ()),
        ("ppo_continuous_action", ("--num-steps", "1000000")),
    ],
    ids=["off-policy", "while compiling", "on-policy", "in a long rollout"],
)
def test_interrupted_run_tells_what_ran(name, flags, tmp_path):
    command = [sys.executable, str(LEANRL / f"{name}.py"), "--no-cuda", *flags]
    # An ignored SIGINT is inherited, as from a shell's background job; Python then installs no handler for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    read_until("/1000000 [", process)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    if "--num-steps" in flags:
        read_until("ending after this rollout and what is learnt from it; once more to end at once\n", process)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    steps = json.loads(stdout)["total_timesteps"]
    assert steps == 0 if "--compile" in flags else 0 < steps < 1_000_000


def test_nobody_who_reads_the_summary_is_no_fault():
    name = "ppo_continuous_action"
    command = [sys.executable, str(LEANRL / f"{name}.py"), "--no-cuda", *PENDULUM, *SHORT[name]]
    reading, writing = os.pipe()
    os.close(reading)
    with TemporaryDirectory() as directory:
        options = {"cwd": directory, "env": environment(), "stderr": subprocess.PIPE, "text": True}
        process = subprocess.run(command, stdout=writing, **options)
    os.close(writing)
    assert process.returncode == 0
    assert " 300/300 " in process.stderr or "/300 [" in process.stderr
    assert "Traceback" not in process.stderr
    assert "BrokenPipeError" not in process.stderr


@pytest.mark.parametrize("name", ["td3_continuous_action", "ppo_continuous_action"])
def test_runs_of_one_second_have_folders_of_their_own(name, tmp_path):
    small = ("--batch-size", "8") if name in OFF_POLICY else ()
    with patch("time.time", return_value=1.7e9):
        folders = [play(name, *SHORT[name], *small, "--save-model", directory=tmp_path)["logger"].folder for _ in range(3)]
    first = f"envs_Scripted-v0__{name}__1__1700000000"
    assert [folder.name for folder in folders] == [first, f"{first}_2", f"{first}_3"]
    for folder in folders:
        assert len(list((tmp_path / folder).glob("*.pt"))) == len(list((tmp_path / folder).glob("events.*"))) == 1


@pytest.mark.parametrize("taken", ["../../outside", "/tmp/outside/deeper", "a\\b", ".."])
def test_no_name_leaves_runs(taken, tmp_path):
    name, directory = "td3_continuous_action", tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    play(name, *SHORT[name], "--batch-size", "8", "--exp-name", taken, directory=directory)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert [path.name for path in directory.iterdir()] == ["runs"]
    [folder] = (directory / "runs").iterdir()
    assert len(list(folder.glob("events.*"))) == 1
    assert "\\" not in folder.name


def test_compiling_without_a_compiler_is_refused_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    name = "td3_continuous_action_torchcompile"
    with pytest.raises(SystemExit) as raised:
        play(name, *SHORT[name], "--compile")
    assert raised.value.code == 2
    assert capfd.readouterr().err == f"{name}.py: error: --compile needs a C++ compiler such as g++, or one that CXX names\n"


def test_tracking_without_a_login_is_refused_in_one_line(tmp_path, monkeypatch):
    for variable in [variable for variable in os.environ if variable.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    home = {name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "NETRC")}
    name = "td3_continuous_action"
    process = cli(name, "--no-cuda", *PENDULUM, *SHORT[name], "--track", stdin=subprocess.DEVNULL, env=home)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(f"{name}.py: error: --track cannot start Weights & Biases: ")
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


@pytest.mark.parametrize("variable", ["glfw", "nonsense"])
def test_videos_without_opengl_are_refused_in_one_line(variable):
    """GLFW without a display, and a value that MuJoCo does not know: as where a library is missing, its import fails."""
    name = "td3_continuous_action"
    variables = {"MUJOCO_GL": variable, "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    process = cli(name, "--no-cuda", *PENDULUM, *SHORT[name], "--capture-video", env=variables)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(f"{name}.py: error: --env-id --capture-video: cannot make Inverted")
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("name", ["td3_continuous_action", "ppo_continuous_action"])
def test_diverged_run_stops_with_a_message(name):
    process = cli(name, "--no-cuda", *SHORT[name], "--learning-rate", "1e30")
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].startswith(f"{name}.py: error: losses/")
    assert process.stdout == ""


@pytest.mark.parametrize("name", ["sac_continuous_action", "ppo_continuous_action"])
def test_videos_are_recorded(name, tmp_path):
    """On a machine without a display; skipped where OpenGL has no software renderer either."""
    process = cli(name, "--no-cuda", *PENDULUM, *SHORT[name], "--capture-video", cwd=tmp_path, env=rendering())
    assert process.returncode == 0, process.stderr
    videos = sorted(tmp_path.glob("runs/*/videos/*.mp4"))
    assert videos
    assert all(video.stat().st_size > 1000 for video in videos)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if "continuous" in name])
def test_videos_follow_what_runs_away(name):
    probe = f"""
import runpy
script = runpy.run_path({str(LEANRL / name)!r} + ".py")
env = script["make_env"](script["Args"](), film=True)
env.reset(seed=1)
for x in (0, 100):
    qpos, qvel = env.unwrapped.data.qpos.copy(), env.unwrapped.data.qvel.copy()
    qpos[0] = x
    env.unwrapped.set_state(qpos, qvel)
    red, green, blue = env.unwrapped.render().astype(int).reshape(-1, 3).T
    print(((red > 150) & (blue < green) & (green < red - 20)).sum())  # the cheetah is orange, the floor black and green
"""
    process = subprocess.run([sys.executable, "-c", probe], env=environment(**rendering()), capture_output=True, text=True)
    here, far = map(int, process.stdout.split())
    assert here > 1000
    assert far > here / 2


def test_tracking_works_offline(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    name = "td3_continuous_action"
    script = shutil.copy(LEANRL / f"{name}.py", tmp_path)  # W&B saves code that is below the folder it is run in
    arguments = ("--no-cuda", *PENDULUM, *SHORT[name], "--track")

    def track(*args) -> None:
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment(WANDB_MODE="offline")}
        process = subprocess.run([sys.executable, script, *arguments, *map(str, args)], **options)
        assert process.returncode == 0, process.stderr
        json.loads(process.stdout.splitlines()[-1])

    track("--save-model")
    [checkpoint] = tmp_path.glob("runs/*/*.pt")
    track("--total-timesteps", 400, "--resume", checkpoint)
    # Records are framed, not compressed: names can be read.
    logs = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1  # one run
    for log in logs:
        assert all(metric in log.read_bytes() for metric in (b"losses/qf_loss", b"charts/episodic_return", b"charts/SPS"))
        assert list(log.parent.glob("files/code/**/*.py"))
