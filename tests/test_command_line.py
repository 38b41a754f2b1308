"""What a user sees: refusals in one line, the run summary, the logs, videos."""

import importlib.util
import json
import math
import re
import sysconfig
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from unittest.mock import patch

import conftest
import mujoco
import numpy as np
import pytest
import torch
from capture import pretended_cuda
from conftest import DISCRETE, OFF_POLICY, SCRIPTS, SHORT, TWINS, checkpoints, cli, curves, load, play, run
from gymnasium.utils.save_video import capped_cubic_video_schedule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SAC, TD3, PPO = (f"{name}_continuous_action" for name in ("sac", "td3", "ppo"))
every = pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])

# ---- Arguments ---------------------------------------------------------------------------------------------
# What numbers are by name, and values that are refused, each with a word of the message.
INDEX = "seed learning_starts env_threads"
COUNT = "checkpoint_every eval_episodes log_every total_timesteps num_envs buffer_size batch_size num_steps "
COUNT += "policy_frequency target_network_frequency train_frequency num_minibatches update_epochs"
FRACTION = "gamma tau gae_lambda start_e end_e exploration_fraction"
NON_NEGATIVE = "learning_rate policy_lr q_lr updates_per_step alpha policy_noise noise_clip target_kl "
NON_NEGATIVE += "exploration_noise clip_coef ent_coef vf_coef max_grad_norm"
KINDS = {
    INDEX: {-1: "greater", 2**63: "less"},
    COUNT: {0: "greater", 2**63: "less"},
    FRACTION: {-0.01: "greater", 1.01: "less", math.inf: "less", math.nan: "less"},
    NON_NEGATIVE: {-0.01: "greater", math.inf: "finite", math.nan: "finite"},
}
NUMBERS = {name: values for names, values in KINDS.items() for name in names.split()}


def parse(name: str, **values):
    """The arguments of a script with these values, as after a command line that gives them."""
    script = load(name)
    with patch("tyro.cli", lambda args: args(**values)):
        return script["parse_args"]()


@every
def test_every_number_is_checked(name, refusal):
    for field in fields(load(name)["Args"]):
        assert (field.name in NUMBERS) == ("Annotated" in str(field.type)), field
        assert (field.name in NUMBERS) or type(field.default) not in (int, float), field
        for value, word in NUMBERS.get(field.name, {}).items():
            line = refusal(name, parse, **{field.name: value})
            assert line.startswith(f"--{field.name.replace('_', '-')}: Input should be ")
            assert word in line and line.endswith(f", got {value}")


@every
def test_arguments_have_to_fit_together(name, refusal):
    refused = partial(refusal, name, parse)
    assert refused(resume="a", evaluate="b") == "--resume and --evaluate exclude each other"
    if name in OFF_POLICY:
        # There is a gradient step, for which a run of DQN needs as many agent steps as count towards it.
        first, given = 10 if name in DISCRETE else 1, {"total_timesteps": 1000, "num_envs": 4}
        assert parse(name, learning_starts=996 - first, **given).learning_starts == 996 - first
        line = refused(learning_starts=997 - first, **given)
        assert line.startswith("--learning-starts has to leave some of ")
        assert parse(name, learning_starts=1000, evaluate="a", **given)
        sizes = {"batch_size": 64, "num_envs": 8}
        assert parse(name, buffer_size=64, **sizes).buffer_size == 64
        for size in ({"buffer_size": 63}, {"buffer_size": 64, "num_envs": 65}):
            assert refused(**sizes | size).endswith(f"a step of all environments, got {size['buffer_size']}")
    else:
        rollout = {"num_envs": 4, "num_steps": 25}
        assert parse(name, num_minibatches=50, total_timesteps=100, **rollout).num_minibatches == 50
        for number in (3, 100, 200):
            line = f"--num-minibatches takes a smaller divisor of 100, got {number}"
            assert refused(num_minibatches=number, **rollout) == line
        line = "--total-timesteps has to hold a rollout of 100, got 99"
        assert refused(num_minibatches=5, total_timesteps=99, **rollout) == line
        assert parse(name, num_minibatches=5, total_timesteps=99, evaluate="a", **rollout)


# Environments, what is said about them, and by which scripts.
UNFIT = [
    ("HalfCheetah-v99", "doesn't exist", (SAC, TD3, PPO, "dqn")),
    ("envs:DictObs-v0", "not Dict(", (SAC, TD3, PPO, "dqn")),
    ("CartPole-v1", "not Box(", (SAC, TD3, PPO)),
    ("envs:Unbounded-v0", "bounded vectors as actions", (SAC, TD3)),
    ("Pendulum-v1", "Discrete actions", ("dqn",)),
    ("CartPole-v1", "an Atari game of EnvPool", ("ppo_atari_envpool",)),
    ("NoSuchGame-v5", "not NoSuchGame-v5", ("ppo_atari_envpool",)),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("env_id", "words", "names"), UNFIT)
def test_an_environment_that_does_not_fit_is_refused(env_id, words, names, refusal):
    for name in names:
        line = refusal(name, run, "--env-id", env_id)
        assert line.startswith("--env-id ") and words in line


@pytest.mark.parametrize("name", [SAC, TD3, PPO, "dqn"])
def test_an_error_in_an_environment_of_the_users_own_shows_its_traceback(name):
    with pytest.raises(RuntimeError, match="one line\n  and another"):
        run(name, "--env-id", "envs:Talkative-v0")


@pytest.mark.parametrize("cuda", [False, True])
def test_what_compiling_lacks_is_told_in_one_line(cuda, tmp_path, monkeypatch, refusal):
    """A compiler, g++ or what compiles Triton's launchers for a GPU, or the headers of Python."""
    name, (usual, variable) = f"{TD3}_torchcompile", ("gcc", "CC") if cuda else ("g++", "CXX")
    monkeypatch.delenv(variable, raising=False)
    no_compiler = patch.dict("os.environ", PATH=str(tmp_path))
    no_header = patch("sysconfig.get_path", return_value=str(tmp_path))
    for missing, folder in ((no_compiler, sysconfig.get_path("include")), (no_header, tmp_path)):
        with missing, pretended_cuda("cpu") if cuda else nullcontext():
            line = refusal(name, play, *SHORT[name], "--compile", cuda=cuda)
        header = Path(folder) / "Python.h"
        assert line == f"--compile needs {header} and {usual}, or the compiler that {variable} names"


@every
def test_help_explains_every_argument(name, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit, match="0"):
        run(name, "--help")
    told = re.sub(r"[\s│]+", " ", capfd.readouterr().out)
    explained = dict(re.findall(r"(?m)^    (\w+): .* = .*  # (\S.*)$", conftest.text(name)))
    for field in fields(load(name)["Args"]):
        # Behind the argument, or behind both of its forms if it is a switch, and what it takes.
        flag, words = field.name.replace("_", "-"), re.escape(explained[field.name])
        assert re.search(rf" --{flag}(, --no-{flag}| \S.{{,60}}?)? {words} \(default: ", told), field.name


# ---- Summary and logs --------------------------------------------------------------------------------------
Q_LOSSES = "qf1_values qf2_values qf1_loss qf2_loss qf_loss actor_loss"
LOSSES = {
    "sac": f"{Q_LOSSES} alpha alpha_loss",
    "td3": Q_LOSSES,
    "dqn": "td_loss q_values",
    "ppo": "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance",
}


@every
def test_summary_bar_and_logs(name, tmp_path, capfd):
    done = play(name, *SHORT[name], "--num-envs", "2", "--exp-name", "an_experiment", directory=tmp_path)
    printed = capfd.readouterr()
    [line] = printed.out.splitlines()
    summary, args = json.loads(line), asdict(done["args"])
    steps, returns = done["global_step"], done["returns"]
    assert 200 < steps <= 300
    assert all(summary.pop(key) > 0 for key in ("sps", "startup_seconds", "wall_seconds"))
    expected = args | {"script": name, "device": "cpu", "compile": False, "cudagraphs": False}
    expected |= {"total_timesteps": steps, "updates": done["updates"], "episodes": len(returns)}
    expected |= {"episodic_return": np.mean(returns[-100:]), "episodic_return_10": np.mean(returns[-10:])}
    assert summary == expected | {"eval_returns": []}
    # How far it is of how far it goes, how fast, and the recent return.
    recent = f"{np.mean(returns[-10:]):.1f}"
    assert re.search(rf"\r[^\r]*{steps}/300 \[[^\r]*, SPS \d+, return {recent}\]", printed.err)

    [folder] = (tmp_path / "runs").iterdir()
    env_id = "Breakout-v5" if "atari" in name else args["env_id"].replace(":", "_")
    assert re.fullmatch(rf"{env_id}__an_experiment__1__\d{{10}}\.\d{{3}}", folder.name)
    assert not checkpoints(tmp_path)
    logged = curves(folder)
    scheduled = "epsilon" if name in DISCRETE else "" if name in OFF_POLICY else "learning_rate"
    charts = [f"charts/{tag}" for tag in f"SPS episodic_return episodic_length {scheduled}".split()]
    assert logged.keys() == {*charts, *(f"losses/{tag}" for tag in LOSSES[name[:3]].split())}
    for tag, points in done["logged"].items():
        assert logged[tag] == [(step, pytest.approx(value, nan_ok=True)) for step, value in points]
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(returns)
    if name in OFF_POLICY:
        assert [step for step, _ in logged["charts/SPS"]] == [100, 200, 300]
        assert done["updates"] == 198
    else:  # an entry a rollout
        assert len(logged["charts/SPS"]) == done["updates"] / 10 >= 3
    table = EventAccumulator(str(folder)).Reload().Tensors("hyperparameters/text_summary")[0]
    assert b"\ngamma|0.99\n" in table.tensor_proto.string_val[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_what_needs_a_cuda_device_is_told(capfd):
    name = "dqn_torchcompile"
    assert play(name, *SHORT[name], "--cudagraphs", cuda=True)["summary"]["cudagraphs"] is False
    told = "CUDA is not available: running on the CPU\nCUDA graphs need a CUDA device: running without them\n"
    assert capfd.readouterr().err.startswith(told)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside/deeper", "a\\b", ".."])
def test_a_run_has_a_folder_of_its_own_in_runs(name, tmp_path):
    (directory := tmp_path / "a" / "b").mkdir(parents=True)
    with patch("time.time", return_value=1.7e9):
        play("dqn", *SHORT["dqn"], "--exp-name", name, directory=directory)
        with pytest.raises(FileExistsError):  # in the same millisecond
            play("dqn", *SHORT["dqn"], "--exp-name", name, directory=directory)
    *outer, folder = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert outer == [tmp_path / "a", directory, directory / "runs"]
    assert re.fullmatch(r"envs_ScriptedChoices-v0__[\w.]+__1__1700000000.000", folder.name)
    assert len(list(folder.glob("events.*"))) == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_tracking_works_offline(tmp_path):
    def track(*args) -> None:
        options = {"cwd": tmp_path, "env": {"WANDB_MODE": "offline"}}
        process = cli("dqn", *SHORT["dqn"], "--no-cuda", "--track", *args, **options)
        assert process.returncode == 0, process.stderr
        json.loads(process.stdout.splitlines()[-1])

    track("--save-model")
    track("--total-timesteps", "400", "--resume", checkpoints(tmp_path)[0])
    # Records are framed, not compressed: names can be read.
    first, second = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert first.name == second.name  # one run
    for metric in (b"losses/td_loss", b"charts/episodic_return", b"charts/SPS"):
        assert metric in first.read_bytes() and metric in second.read_bytes()


# ---- Videos ------------------------------------------------------------------------------------------------
def videos(directory: Path, folder: str) -> int:
    """The number of videos of runs in a directory, all of which show something."""
    found = [*directory.glob(f"runs/*/{folder}/*.mp4")]
    assert all(video.stat().st_size > 1000 for video in found)
    return len(found)


# One game of Breakout takes some 200 steps.
GAME = ("--num-envs", "1", "--num-steps", "600", "--total-timesteps", "600", "--update-epochs", "1")


@pytest.mark.parametrize(("name", "options"), [("dqn", SHORT["dqn"]), ("ppo_atari_envpool", GAME)])
def test_videos_of_training_and_evaluation(name, options, tmp_path):
    options = (*options, "--capture-video", "--save-model")
    done = run(name, *options, "--eval-episodes", "2", directory=tmp_path)
    episodes = sum(map(capped_cubic_video_schedule, range(len(done["returns"]))))
    assert videos(tmp_path, "videos/from_step_0") in (episodes, episodes + 1)  # the last is not over
    assert episodes and videos(tmp_path, "evaluation/videos") == 2
    step, [path] = done["global_step"], checkpoints(tmp_path)
    run(name, *options, "--total-timesteps", 3 * step, "--resume", path)
    assert videos(tmp_path, f"videos/from_step_{step}")


def test_videos_of_mujoco(tmp_path):
    """On a machine without a display; skipped where OpenGL has no software renderer either."""
    options = (*SHORT[TD3], "--capture-video", "--eval-episodes", "1", "--no-cuda")
    process = cli(TD3, "--env-id", "InvertedPendulum-v4", *options, cwd=tmp_path, env=conftest.rendering())
    assert process.returncode == 0, process.stderr
    assert videos(tmp_path, "videos/from_step_0")
    assert videos(tmp_path, "evaluation/videos") == 1


@pytest.mark.parametrize("name", [SAC, TD3, PPO])
def test_videos_follow_what_runs_away(name, tmp_path):
    script = load(name)
    renderer = script["make_env"](script["Args"](), tmp_path / "videos").unwrapped.mujoco_renderer
    assert renderer.camera_id >= 0
    assert renderer.model.cam_mode[renderer.camera_id] == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
