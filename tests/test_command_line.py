"""What a user sees: refusals in one line, the run summary, the logs, Ctrl+C, videos."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import LEANRL, SCRIPTS, SHORT, TWINS, cli, environment, rendering
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
        "negative seed": (("--seed", "-1"), "--seed"),
        "seed beyond 64 bits": (("--seed", "99999999999999999999"), "--seed"),
        "buffer smaller than the batch": (("--buffer-size", "255"), "--buffer-size"),
        "buffer larger than memory": (("--buffer-size", "1000000000000"), "GiB"),
        "no environment": (("--num-envs", "0"), "--num-envs"),
        "endless learning rate": (("--exploration-noise", "inf"), "--exploration-noise"),
        "run shorter than its profile": (("--profile", ".", "--total-timesteps", "25050"), "--total-timesteps"),
        "profile where no folder can be": (("--profile", "/dev/null/profile"), "--profile"),
    },
    "ppo_continuous_action": {
        "Atari game": (("--env-id", "Breakout-v5"), "--env-id"),
        "discrete actions": (("--env-id", "CartPole-v1"), "--env-id"),
        "observations that are no Box": (("--env-id", "envs:DictObs-v0"), "--env-id"),
        "rest of a batch": (("--num-minibatches", "3"), "--num-minibatches"),
        "no environment": (("--num-envs", "0"), "--num-envs"),
        "lambda above 1": (("--gae-lambda", "1.5"), "--gae-lambda"),
        "less than a rollout": (("--total-timesteps", "2047"), "--total-timesteps"),
        "negative divergence": (("--target-kl", "-0.1"), "--target-kl"),
    },
    "ppo_atari_envpool": {
        "environment of MuJoCo": (("--env-id", "HalfCheetah-v4"), "--env-id"),
        "unknown game": (("--env-id", "NoSuchGame-v5"), "--env-id"),
        "rest of a batch": (("--num-minibatches", "3"), "--num-minibatches"),
        "no environment": (("--num-envs", "0"), "--num-envs"),
        "less than a rollout": (("--total-timesteps", "1023"), "--total-timesteps"),
        "negative number of threads": (("--env-threads", "-1"), "--env-threads"),
    },
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in REFUSALS.items() for case in cases])
def test_bad_arguments_are_refused_in_one_line(name, case, tmp_path):
    args, told = REFUSALS[name][case]
    process = cli(name, "--no-cuda", *args, cwd=tmp_path)
    # MuJoCo's own warning about the model of an environment that is made before it is refused.
    lines = [line for line in process.stderr.splitlines() if line and not line.startswith("WARNING: compiler attribute")]
    assert process.returncode == 2
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith(f"{name}.py: error: ")
    assert told in lines[0]
    assert process.stdout == ""
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "MUJOCO_LOG.TXT"])


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_arguments_of_every_script_are_checked(name):
    assert cli(name, "--gamma", "2").returncode == 2
    assert "--total-timesteps" in cli(name, "--help").stdout


def summary_and_log(name: str, args: tuple[str, ...], directory: Path) -> tuple[dict, EventAccumulator]:
    """Run a script as a command with --no-cuda; returns its checked summary, and its log."""
    args = ("--no-cuda", *args)
    process = cli(name, *args, cwd=directory)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 1
    summary = json.loads(process.stdout)
    expected = {
        "script": name,
        "seed": 1,
        "device": "cpu",
        "compile": False,
        "cudagraphs": False,
        "peak_device_memory_mb": None,
        "argv": list(args),
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["hardware"]["cores"] >= 1
    for key in ("sps", "startup_seconds", "wall_seconds", "peak_memory_mb"):
        assert summary[key] > 0
    assert summary["git_commit"] is None or len(summary["git_commit"]) == 40
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
    assert summary["versions"]["envpool"]
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


@pytest.mark.parametrize(
    ("name", "flags", "compiling"),
    [
        ("td3_continuous_action", (), False),
        ("td3_continuous_action_torchcompile", ("--compile",), True),
        ("ppo_continuous_action", (), False),
    ],
)
def test_interrupted_run_tells_what_ran(name, flags, compiling, tmp_path):
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
    told = ""
    while "/1000000 [" not in told:
        character = process.stderr.read(1)
        assert character, told
        told += character
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    steps = json.loads(stdout)["total_timesteps"]
    assert steps == 0 if compiling else 0 < steps < 1_000_000


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


@pytest.mark.parametrize("name", [name for name in SCRIPTS if "atari" not in name])
def test_videos_follow_what_runs_away(name, tmp_path):
    probe = f"""
import runpy
script = runpy.run_path({str(LEANRL / name)!r} + ".py")
[env] = script["make_envs"](script["Args"](capture_video=True, num_envs=1), {str(tmp_path)!r}).envs
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
