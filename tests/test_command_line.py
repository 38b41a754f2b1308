"""What a user sees: refusals in one line, the run summary, the logs, videos."""

import importlib.util
import json
import math
import re
import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from unittest.mock import patch

import mujoco
import numpy as np
import pytest
import torch
from conftest import (
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
    load,
    play,
    rendering,
    run,
    text,
)
from gymnasium.utils.save_video import capped_cubic_video_schedule
from pretended import pretended_cuda
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TD3 = "td3_continuous_action"
PENDULUM = ("--env-id", "InvertedPendulum-v4")

# ---- Arguments ---------------------------------------------------------------------------------------------
# What numbers are by name, and values that are refused, each with a word of the message.
INDEX, COUNT = {-1: "greater", 2**63: "less"}, {0: "greater", 2**63: "less"}
FRACTION = {-0.01: "greater", 1.01: "less", math.inf: "less", math.nan: "less"}
NON_NEGATIVE = {-0.01: "greater", math.inf: "finite", math.nan: "finite"}
NUMBERS = {
    **dict.fromkeys(("seed", "learning_starts", "env_threads"), INDEX),
    **dict.fromkeys(("checkpoint_every", "eval_episodes", "log_every", "total_timesteps", "num_envs"), COUNT),
    **dict.fromkeys(("buffer_size", "batch_size", "policy_frequency", "target_network_frequency"), COUNT),
    **dict.fromkeys(("train_frequency", "num_steps", "num_minibatches", "update_epochs"), COUNT),
    **dict.fromkeys(("gamma", "tau", "gae_lambda", "start_e", "end_e", "exploration_fraction"), FRACTION),
    **dict.fromkeys(("learning_rate", "policy_lr", "q_lr", "updates_per_step", "alpha"), NON_NEGATIVE),
    **dict.fromkeys(("policy_noise", "noise_clip", "exploration_noise"), NON_NEGATIVE),
    **dict.fromkeys(("clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "target_kl"), NON_NEGATIVE),
}


@pytest.fixture
def refusal(capfd) -> Callable:
    """Gives the line in which a call is refused, without the name of the script."""

    def told(name: str, call: Callable) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as raised:
            call()
        assert raised.value.code == 2
        printed = capfd.readouterr()
        [line] = printed.err.splitlines()
        assert printed.out == ""
        assert line.startswith(f"{name}.py: error: ")
        return line.removeprefix(f"{name}.py: error: ")

    return told


def parse(name: str, **values):
    """The arguments of a script with these values, as after a command line that gives them."""
    script = load(name)
    with patch("tyro.cli", lambda args: args(**values)):
        return script["parse_args"]()


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_every_number_is_checked(name, refusal):
    for field in fields(load(name)["Args"]):
        assert (field.name in NUMBERS) == ("Annotated" in str(field.type)), field
        assert (field.name in NUMBERS) or type(field.default) not in (int, float), field
        for value, word in NUMBERS.get(field.name, {}).items():
            line = refusal(name, lambda field=field, value=value: parse(name, **{field.name: value}))
            assert line.startswith(f"--{field.name.replace('_', '-')}: Input should be ")
            assert word in line and line.endswith(f", got {value}")


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_arguments_have_to_fit_together(name, refusal):
    def refused(**values) -> str:
        return refusal(name, lambda: parse(name, **values))

    assert refused(resume="a", evaluate="b") == "--resume and --evaluate exclude each other"
    if name in OFF_POLICY:
        # There is a gradient step, for which a run of DQN needs as many agent steps as count towards it.
        first = 10 if name in DISCRETE else 1
        given = {"total_timesteps": 1000, "num_envs": 4}
        assert parse(name, learning_starts=996 - first, **given).learning_starts == 996 - first
        assert refused(learning_starts=997 - first, **given).startswith(
            "--learning-starts has to leave some of "
        )
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


CONTINUOUS = {"HalfCheetah-v99": "doesn't exist", "CartPole-v1": "not Box(", "envs:DictObs-v0": "not Dict("}
UNFIT = {
    "sac_continuous_action": CONTINUOUS | {"envs:Unbounded-v0": "bounded vectors as actions"},
    "td3_continuous_action": CONTINUOUS | {"envs:Unbounded-v0": "bounded vectors as actions"},
    "ppo_continuous_action": CONTINUOUS | {"Breakout-v5": "doesn't exist"},
    "dqn": {
        "CartPole-v99": "doesn't exist",
        "Pendulum-v1": "Discrete actions",
        "envs:DictObs-v0": "not Dict(",
    },
    "ppo_atari_envpool": {"CartPole-v1": "an Atari game of EnvPool", "NoSuchGame-v5": "not NoSuchGame-v5"},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_environments_that_do_not_fit_are_refused(name, refusal):
    for env_id, words in UNFIT[name].items():
        line = refusal(name, lambda env_id=env_id: run(name, "--env-id", env_id))
        assert line.startswith("--env-id ") and words in line


@pytest.mark.parametrize("name", NOT_ATARI)
def test_an_error_in_an_environment_of_the_users_own_shows_its_traceback(name):
    with pytest.raises(RuntimeError, match="one line\n  and another"):
        run(name, "--env-id", "envs:Talkative-v0")


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_compiling_without_a_compiler_or_the_headers_of_python_is_refused(
    cuda, missing, tmp_path, monkeypatch, refusal
):
    """The former is g++ for code for the CPU, and what compiles Triton's launchers for that of a GPU."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    if missing == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        header = tmp_path / "Python.h"
        monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    name = f"{TD3}_torchcompile"
    with pretended_cuda("cpu") if cuda else nullcontext():
        line = refusal(name, lambda: play(name, *SHORT[name], "--compile", cuda=cuda))
    usual, variable = ("gcc", "CC") if cuda else ("g++", "CXX")
    assert line == f"--compile needs {header} and {usual}, or the compiler that {variable} names"


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_help_explains_every_argument(name, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as raised:
        run(name, "--help")
    assert raised.value.code == 0
    told = re.sub(r"[\s│]+", " ", capfd.readouterr().out)
    explained = dict(re.findall(r"(?m)^    (\w+): .* = .*  # (\S.*)$", text(name)))
    for field in fields(load(name)["Args"]):
        # Behind the argument, or behind both of its forms if it is a switch, and what it takes.
        flag, words = field.name.replace("_", "-"), re.escape(explained[field.name])
        assert re.search(rf" --{flag}(, --no-{flag}| \S.{{,60}}?)? {words} \(default: ", told), field.name


# ---- Summary and logs --------------------------------------------------------------------------------------
Q_LOSSES = {"qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss"}
PPO_LOSSES = {"value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"}
LOSSES = {
    "sac": Q_LOSSES | {"alpha", "alpha_loss"},
    "td3": Q_LOSSES,
    "dqn": {"td_loss", "q_values"},
    "ppo": PPO_LOSSES | {"explained_variance"},
}
SUMMARY = {"script", "sps", "device", "compile", "cudagraphs", "updates", "episodes", "eval_returns"}
SUMMARY |= {"episodic_return", "episodic_return_10", "startup_seconds", "wall_seconds"}


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_summary_bar_and_logs(name, tmp_path, capfd):
    done = play(name, *SHORT[name], "--num-envs", "2", "--exp-name", "an_experiment", directory=tmp_path)
    printed = capfd.readouterr()
    [line] = printed.out.splitlines()
    summary, args = json.loads(line), asdict(done["args"])
    steps, returns = done["global_step"], done["returns"]
    assert summary.keys() == args.keys() | SUMMARY
    assert {key: summary[key] for key in args} == args | {"total_timesteps": steps}
    assert 200 < steps <= 300
    measured = ("sps", "startup_seconds", "wall_seconds")
    assert all(summary[key] > 0 for key in measured)
    expected = {"script": name, "device": "cpu", "compile": False, "cudagraphs": False, "eval_returns": []}
    expected |= {"updates": done["updates"], "episodes": len(returns)}
    expected |= {"episodic_return": np.mean(returns[-100:]), "episodic_return_10": np.mean(returns[-10:])}
    assert {key: summary[key] for key in SUMMARY.difference(measured)} == expected
    # How far it is of how far it goes, how fast, and the recent return.
    recent = f"{np.mean(returns[-10:]):.1f}"
    assert re.search(rf"\r[^\r]*{steps}/300 \[[^\r]*, SPS \d+, return {recent}\]", printed.err)

    [folder] = (tmp_path / "runs").iterdir()
    env_id = "Breakout-v5" if "atari" in name else args["env_id"].replace(":", "_")
    assert re.fullmatch(rf"{env_id}__an_experiment__1__\d{{10}}\.\d{{3}}", folder.name)
    assert not checkpoints(tmp_path)
    logged = curves(folder)
    charts = {"SPS", "episodic_return", "episodic_length"}
    charts |= {"learning_rate"} if name in ON_POLICY else {"epsilon"} if name in DISCRETE else set()
    assert logged.keys() == {f"charts/{tag}" for tag in charts} | {
        f"losses/{tag}" for tag in LOSSES[name[:3]]
    }
    assert logged == {
        tag: [(step, pytest.approx(value, nan_ok=True)) for step, value in points]
        for tag, points in done["logged"].items()
    }
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(returns)
    if name in OFF_POLICY:
        assert [step for step, _ in logged["charts/SPS"]] == [100, 200, 300]
        assert done["updates"] == 198
    else:  # an entry a rollout
        assert len(logged["charts/SPS"]) == done["updates"] / 10 >= 3
    table = EventAccumulator(str(folder)).Reload().Tensors("hyperparameters/text_summary")[0]
    assert b"\ngamma|0.99\n" in table.tensor_proto.string_val[0]


def test_what_needs_a_cuda_device_is_told(capfd):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    name = "dqn_torchcompile"
    assert play(name, *SHORT[name], "--cudagraphs", cuda=True)["summary"]["cudagraphs"] is False
    told = capfd.readouterr().err.splitlines()[:2]
    assert told[0] == "CUDA is not available: running on the CPU"
    assert told[1] == "CUDA graphs need a CUDA device: running without them"


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside/deeper", "a\\b", ".."])
def test_a_run_has_a_folder_of_its_own_in_runs(name, tmp_path):
    directory = tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    options = (*SHORT["dqn"], "--exp-name", name)
    with patch("time.time", return_value=1.7e9):
        play("dqn", *options, directory=directory)
        with pytest.raises(FileExistsError):  # in the same millisecond
            play("dqn", *options, directory=directory)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert folders == [tmp_path / "a", directory, directory / "runs", next((directory / "runs").iterdir())]
    assert len(list(folders[-1].glob("events.*"))) == 1
    assert re.fullmatch(r"envs_ScriptedChoices-v0__[\w.]+__1__1700000000.000", folders[-1].name)


def test_tracking_works_offline(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")

    def track(*args) -> None:
        options = {"cwd": tmp_path, "env": {"WANDB_MODE": "offline"}}
        process = cli("dqn", *SHORT["dqn"], "--no-cuda", "--track", *args, **options)
        assert process.returncode == 0, process.stderr
        json.loads(process.stdout.splitlines()[-1])

    track("--save-model")
    track("--total-timesteps", "400", "--resume", checkpoints(tmp_path)[0])
    # Records are framed, not compressed: names can be read.
    logs = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1  # one run
    metrics = (b"losses/td_loss", b"charts/episodic_return", b"charts/SPS")
    for log in logs:
        assert all(metric in log.read_bytes() for metric in metrics)


# ---- Videos ------------------------------------------------------------------------------------------------
def videos(directory: Path, folder: str) -> list[Path]:
    """The videos of runs in a directory, all of which show something."""
    found = sorted(directory.glob(f"runs/*/{folder}/*.mp4"))
    assert all(video.stat().st_size > 1000 for video in found)
    return found


# One game of Breakout takes some 200 steps.
GAME = ("--num-envs", "1", "--num-steps", "600", "--total-timesteps", "600", "--update-epochs", "1")


@pytest.mark.parametrize(("name", "options"), [("dqn", SHORT["dqn"]), ("ppo_atari_envpool", GAME)])
def test_videos_of_training_and_evaluation(name, options, tmp_path):
    options = (*options, "--capture-video", "--save-model")
    done = run(name, *options, "--eval-episodes", "2", directory=tmp_path)
    episodes = sum(map(capped_cubic_video_schedule, range(len(done["returns"]))))
    assert len(videos(tmp_path, "videos/from_step_0")) in (episodes, episodes + 1)  # the last is not over
    assert episodes and len(videos(tmp_path, "evaluation/videos")) == 2
    step, [path] = done["global_step"], checkpoints(tmp_path)
    run(name, *options, "--total-timesteps", 3 * step, "--resume", path, directory=tmp_path)
    assert videos(tmp_path, f"videos/from_step_{step}")


def test_videos_of_mujoco(tmp_path):
    """On a machine without a display; skipped where OpenGL has no software renderer either."""
    options = (*PENDULUM, *SHORT[TD3], "--capture-video", "--eval-episodes", "1", "--no-cuda")
    process = cli(TD3, *options, cwd=tmp_path, env=rendering())
    assert process.returncode == 0, process.stderr
    assert videos(tmp_path, "videos/from_step_0")
    assert len(videos(tmp_path, "evaluation/videos")) == 1


@pytest.mark.parametrize("name", [name for name in NOT_ATARI if name not in DISCRETE])
def test_videos_follow_what_runs_away(name, tmp_path):
    script = load(name)
    renderer = script["make_env"](script["Args"](), tmp_path / "videos").unwrapped.mujoco_renderer
    assert renderer.camera_id >= 0
    assert renderer.model.cam_mode[renderer.camera_id] == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
