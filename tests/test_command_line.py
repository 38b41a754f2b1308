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
from conftest import OFF_POLICY, SCRIPTS, SHORT, TWINS, checkpoints, cli, curves, load, play, run
from gymnasium.utils.save_video import capped_cubic_video_schedule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

DQN, CHOICES, ATARI, PPO, SAC, TD3 = SCRIPTS
every = pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
# Integers that may be 0, and numbers that may not be above 1.
FROM_0 = ("seed", "learning_starts", "env_threads")
FRACTIONS = ("gamma", "tau", "gae_lambda", "start_e", "end_e", "exploration_fraction")
# Environments, what is said about them, and by which scripts.
UNFIT = [
    ("HalfCheetah-v99", "doesn't exist", (SAC, TD3, PPO, CHOICES, DQN)),
    ("envs:DictObs-v0", "not Dict(", (SAC, TD3, PPO, CHOICES, DQN)),
    ("CartPole-v1", "not Box(", (SAC, TD3, PPO)),
    ("envs:Unbounded-v0", "bounded vectors as actions", (SAC, TD3)),
    ("Pendulum-v1", "iscrete actions", (DQN, CHOICES)),
    ("CartPole-v1", "an Atari game of EnvPool", (ATARI,)),
    ("NoSuchGame-v5", "not NoSuchGame-v5", (ATARI,)),
]
LOSSES = {"dqn": "td_loss q_values", "td3": "qf1_values qf2_values qf1_loss qf2_loss qf_loss actor_loss"}
LOSSES["sac"] = f"{LOSSES['td3']} alpha alpha_loss"
LOSSES["ppo"] = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance"
# One game of Breakout takes some 200 steps.
GAME = ("--num-envs", "1", "--num-steps", "600", "--total-timesteps", "600", "--update-epochs", "1")
FILMED = {DQN: SHORT[DQN], TD3: ("--env-id", "InvertedPendulum-v4", *SHORT[TD3]), ATARI: GAME}


# ---- Arguments ---------------------------------------------------------------------------------------------
def parse(name: str, **values):
    """The arguments of a script with these values, as after a command line that gives them."""
    script = load(name)
    with patch("tyro.cli", lambda args: args(**values)):
        return script["parse_args"]()


@every
def test_every_number_is_checked(name, refusal):
    for field in fields(load(name)["Args"]):
        wrong = ()
        if "float" in str(field.type):
            wrong = (-0.01, 1.01 if field.name in FRACTIONS else math.inf, math.nan)
        elif "int" in str(field.type):
            wrong = (-1 if field.name in FROM_0 else 0, 2**63)
        assert wrong or type(field.default) not in (int, float), field
        for value in wrong:
            line = refusal(name, parse, **{field.name: value})
            assert line.startswith(f"--{field.name.replace('_', '-')}: Input should be ")
            assert line.endswith(f", got {value}")


@every
def test_arguments_have_to_fit_together(name, refusal):
    """What is parsed without a refusal fits."""
    refused = partial(refusal, name, parse)
    assert refused(resume="a", evaluate="b") == "--resume and --evaluate exclude each other"
    if name in OFF_POLICY:
        # There is a gradient step, for which a run of DQN needs as many agent steps as count towards it.
        most, given = 986 if name.startswith("dqn") else 995, {"total_timesteps": 1000, "num_envs": 4}
        parse(name, learning_starts=most, **given)
        parse(name, learning_starts=1000, evaluate="a", **given)
        told = f"--learning-starts has to leave some of --total-timesteps, got {most + 1}"
        assert refused(learning_starts=most + 1, **given) == told
        parse(name, buffer_size=64, batch_size=64, num_envs=8)
        for sizes in ({"batch_size": 65, "num_envs": 8}, {"batch_size": 64, "num_envs": 65}):
            assert refused(buffer_size=64, **sizes).startswith("--buffer-size has to hold a batch and a step")
    else:
        rollout = {"num_envs": 4, "num_steps": 25}
        parse(name, num_minibatches=50, total_timesteps=100, **rollout)
        parse(name, num_minibatches=5, total_timesteps=99, evaluate="a", **rollout)
        for number in (3, 100):
            told = f"--num-minibatches takes a smaller divisor of 100, got {number}"
            assert refused(num_minibatches=number, **rollout) == told
        told = "--total-timesteps has to hold a rollout of 100, got 99"
        assert refused(num_minibatches=5, total_timesteps=99, **rollout) == told


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("env_id", "words", "names"), UNFIT)
def test_an_environment_that_does_not_fit_is_refused(env_id, words, names, refusal):
    for name in names:
        line = refusal(name, run, "--env-id", env_id)
        assert line.startswith("--env-id ") and words in line


@pytest.mark.parametrize("name", [SAC, TD3, PPO, CHOICES, DQN])
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
@every
def test_summary_bar_and_logs(name, tmp_path, capfd):
    """Of a run that asks for a CUDA device, and twins for graphs, on a machine that has none.

    And PyTorch is set as the arguments say.
    """
    options = ("--num-envs", "2", "--exp-name", "an_experiment", *(["--cudagraphs"] if name in TWINS else []))
    options += ("--matmul-precision", "high")
    can_flush = torch.set_flush_denormal(False)  # not every processor can
    with patch("torch.cuda.is_available", lambda: False):
        done = play(name, *SHORT[name], *options, cuda=True, directory=tmp_path)
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    assert (torch.tensor(1e-39) * 1 == 0) == can_flush
    printed = capfd.readouterr()
    told = "CUDA is not available: running on the CPU\nCUDA graphs need a CUDA device: running without them\n"
    assert printed.err.startswith(told if name in TWINS else told.partition("\n")[0])
    [line] = printed.out.splitlines()
    summary, args = json.loads(line), asdict(done["args"])
    steps, returns = done["global_step"], done["returns"]
    assert 200 < steps <= 300
    assert all(summary.pop(key) > 0 for key in ("sps", "startup_seconds", "wall_seconds"))
    expected = args | {"script": name, "device": "cpu", "compile": False, "cudagraphs": False}
    expected |= {"total_timesteps": steps, "updates": done["updates"], "episodes": len(returns)}
    expected |= {"episodic_return": np.mean(returns[-100:]), "episodic_return_10": np.mean(returns[-10:])}
    assert summary == expected | {"eval_returns": [], "best_eval_return": None}
    # How far it is of how far it goes, how fast, and the recent return.
    recent = f"{np.mean(returns[-10:]):.1f}"
    assert re.search(rf"\r[^\r]*{steps}/300 \[[^\r]*, SPS \d+, return {recent}\]", printed.err)

    [folder] = (tmp_path / "runs").iterdir()
    env_id = "Breakout-v5" if "atari" in name else args["env_id"].replace(":", "_")
    assert re.fullmatch(rf"{env_id}__an_experiment__1__\d{{10}}\.\d{{3}}", folder.name)
    assert not checkpoints(tmp_path)
    logged = curves(folder)
    scheduled = "epsilon" if name.startswith("dqn") else "" if name in OFF_POLICY else "learning_rate"
    charts = [f"charts/{tag}" for tag in f"SPS episodic_return episodic_length {scheduled}".split()]
    assert logged.keys() == {*charts, *(f"losses/{tag}" for tag in LOSSES[name[:3]].split())}
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(returns)
    if name in OFF_POLICY:
        assert [step for step, _ in logged["charts/SPS"]] == [100, 200, 300]
        assert done["updates"] == 198
    else:  # an entry a rollout
        assert len(logged["charts/SPS"]) == done["updates"] / 10 >= 3
    table = EventAccumulator(str(folder)).Reload().Tensors("hyperparameters/text_summary")[0]
    assert b"\ngamma|0.99\n" in table.tensor_proto.string_val[0]


def test_a_run_has_a_folder_of_its_own_in_runs(tmp_path):
    (directory := tmp_path / "a" / "b").mkdir(parents=True)
    with patch("time.time", return_value=1.7e9):
        play(DQN, *SHORT[DQN], "--exp-name", "/../../o\\ut", directory=directory)
        with pytest.raises(FileExistsError):  # in the same millisecond
            play(DQN, *SHORT[DQN], "--exp-name", "/../../o\\ut", directory=directory)
    *outer, folder = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert outer == [tmp_path / "a", directory, directory / "runs"]
    assert folder.name == "envs_ScriptedChoices-v0___.._.._o_ut__1__1700000000.000"
    assert len(list(folder.glob("events.*"))) == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_tracking_works_offline(tmp_path):
    options = {"cwd": tmp_path, "env": {"WANDB_MODE": "offline"}}
    for args in (("--save-model",), ("--total-timesteps", "400", "--resume")):
        process = cli(DQN, *SHORT[DQN], "--no-cuda", "--track", *args, *checkpoints(tmp_path), **options)
        assert process.returncode == 0, process.stderr
        json.loads(process.stdout.splitlines()[-1])
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


@pytest.mark.parametrize("name", FILMED)
def test_videos_of_training_and_evaluation(name, tmp_path, monkeypatch):
    """MuJoCo's without a display; skipped where OpenGL has no software renderer either."""
    if name == TD3:
        monkeypatch.setenv("MUJOCO_GL", conftest.rendering()["MUJOCO_GL"])
    options = (*FILMED[name], "--capture-video", "--save-model")
    done = run(name, *options, "--eval-episodes", "2", directory=tmp_path)
    episodes = sum(map(capped_cubic_video_schedule, range(len(done["returns"]))))
    assert videos(tmp_path, "videos/from_step_0") in (episodes, episodes + 1)  # the last is not over
    assert episodes and videos(tmp_path, "evaluation/videos") == 2
    step, [path] = done["global_step"], checkpoints(tmp_path)
    run(name, *options, "--total-timesteps", 3 * step, "--resume", path)
    assert videos(tmp_path, f"videos/from_step_{step}")


@pytest.mark.parametrize("name", [SAC, TD3, PPO])
def test_videos_follow_what_runs_away(name, tmp_path):
    script = load(name)
    renderer = script["make_env"](script["Args"](), tmp_path / "videos").unwrapped.mujoco_renderer
    assert renderer.camera_id >= 0
    assert renderer.model.cam_mode[renderer.camera_id] == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
