"""What a user sees: refusals in one line, the run summary, the logs, Ctrl+C, videos."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import LEANRL, SCRIPTS, TWINS, cli, environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SHORT = ("--no-cuda", "--learning-starts", "100", "--total-timesteps", "300")
REFUSALS = {
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
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_arguments_are_refused_in_one_line(case, tmp_path):
    args, told = REFUSALS[case]
    process = cli("td3_continuous_action", "--no-cuda", *args, cwd=tmp_path)
    # MuJoCo's own warning about the model of an environment that is made before it is refused.
    lines = [line for line in process.stderr.splitlines() if line and not line.startswith("WARNING: compiler attribute")]
    assert process.returncode == 2
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("td3_continuous_action.py: error: ")
    assert told in lines[0]
    assert process.stdout == ""
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "MUJOCO_LOG.TXT"])


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_arguments_of_every_script_are_checked(name):
    assert cli(name, "--tau", "2").returncode == 2
    assert "--updates-per-step" in cli(name, "--help").stdout


@pytest.mark.parametrize("name", [SCRIPTS[0], TWINS[1]])
def test_summary_and_logs(name, tmp_path):
    args = ("--env-id", "InvertedPendulum-v4", *SHORT, "--num-envs", "2")
    process = cli(name, *args, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 1
    summary = json.loads(process.stdout)
    expected = {
        "script": name,
        "env_id": "InvertedPendulum-v4",
        "seed": 1,
        "total_timesteps": 300,
        "num_envs": 2,
        "device": "cpu",
        "compile": False,
        "cudagraphs": False,
        "updates": 198,
        "peak_device_memory_mb": None,
        "argv": list(args),
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["hardware"]["cores"] >= 1
    assert summary["episodes"] > 0
    for key in ("sps", "startup_seconds", "wall_seconds", "peak_memory_mb", "episodic_return", "episodic_return_10"):
        assert summary[key] > 0
    assert summary["git_commit"] is None or len(summary["git_commit"]) == 40
    assert "300/300" in process.stderr

    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith(f"InvertedPendulum-v4__{name}__1__")
    log = EventAccumulator(str(run_dir)).Reload()
    tags = set(log.Tags()["scalars"])
    losses = {"qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss"}
    assert {f"losses/{name}" for name in losses} <= tags
    assert [event.step for event in log.Scalars("charts/SPS")] == [100, 200, 300]
    returns = [event.value for event in log.Scalars("charts/episodic_return")]
    assert len(returns) == summary["episodes"]
    # One unit of reward a step: return and length are the same.
    assert returns == [event.value for event in log.Scalars("charts/episodic_length")]


def test_no_cuda_device_is_told_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    process = cli("td3_continuous_action_torchcompile", *SHORT[1:], "--cuda", "--cudagraphs")
    assert process.returncode == 0
    assert process.stderr.count("CUDA is not available: running on the CPU\n") == 1
    assert process.stderr.count("CUDA graphs need a CUDA device: running without them\n") == 1
    assert json.loads(process.stdout)["cudagraphs"] is False


@pytest.mark.parametrize(("name", "flags", "compiling"), [(SCRIPTS[1], (), False), (TWINS[1], ("--compile",), True)])
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


def test_diverged_run_stops_with_a_message():
    process = cli("td3_continuous_action", *SHORT, "--learning-rate", "1e30")
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].startswith("td3_continuous_action.py: error: losses/")
    assert process.stdout == ""


def test_videos_are_recorded(tmp_path):
    """On a machine without a display; skipped where OpenGL has no software renderer either."""
    rendering = {"MUJOCO_GL": "egl"}
    probe = "import gymnasium as gym; e = gym.make('InvertedPendulum-v4', render_mode='rgb_array'); e.reset(); e.render()"
    if subprocess.run([sys.executable, "-c", probe], env=os.environ | rendering, capture_output=True).returncode:
        pytest.skip("MUJOCO_GL=egl does not render here")
    args = ("--env-id", "InvertedPendulum-v4", *SHORT, "--capture-video")
    process = cli("sac_continuous_action", *args, cwd=tmp_path, env=rendering)
    assert process.returncode == 0, process.stderr
    videos = sorted(tmp_path.glob("runs/*/videos/*.mp4"))
    assert videos
    assert all(video.stat().st_size > 1000 for video in videos)


def test_tracking_works_offline(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    process = cli("td3_continuous_action", *SHORT, "--track", cwd=tmp_path, env={"WANDB_MODE": "offline"})
    assert process.returncode == 0, process.stderr
    json.loads(process.stdout.splitlines()[-1])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
