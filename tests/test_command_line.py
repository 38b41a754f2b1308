"""What a user sees: refusals in one line, the run summary, the logs, videos."""

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from unittest.mock import patch

import conftest
import mujoco
import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    MEMORY,
    OFF_POLICY,
    SCRIPTS,
    SHORT,
    TWINS,
    checkpoints,
    cli,
    load,
    play,
    run,
    takes,
    world,
)
from gymnasium.utils.save_video import capped_cubic_video_schedule
from moviepy import VideoFileClip
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

every = pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
TD3, BREAKOUT = "td3_continuous_action", "ppo_atari_envpool"
CONTINUOUS = [name for name in SCRIPTS if conftest.algorithm(name).actions == "continuous"]
# Integers that may be 0, and numbers that may not be above 1.
SIGNED = {"v_min", "v_max"}
FROM_0 = ("seed", "learning_starts", "env_threads")
FRACTIONS = ("gamma", "tau", "gae_lambda", "q_lambda", "start_e", "end_e", "exploration_fraction")
# Environments, what is said about them, and by which scripts.
UNFIT = [
    ("HalfCheetah-v99", "doesn't exist", [name for name in SCRIPTS if name not in ATARI]),
    ("no_such.module:World-v0", "No module named 'no_such'", [name for name in SCRIPTS if name not in ATARI]),
    ("HalfCheetah-v3", "moved to", [name for name in SCRIPTS if name not in ATARI]),
    ("Pusher-v4", "only supported on", [name for name in SCRIPTS if name not in ATARI]),
    ("envs:GraphObs-v0", "not Graph(", [name for name in SCRIPTS if name not in ATARI]),
    ("CartPole-v1", "not Discrete(2)", CONTINUOUS),
    ("envs:Integers-v0", "vectors of floats as actions", CONTINUOUS),
    ("envs:Unbounded-v0", "bounded vectors of floats", [name for name in CONTINUOUS if name in OFF_POLICY]),
    ("envs:Flat-v0", "bounded vectors of floats", [name for name in CONTINUOUS if name in OFF_POLICY]),
    ("Pendulum-v1", "iscrete actions", [name for name in SCRIPTS if name in conftest.DISCRETE]),
    ("envs:Codes-v0", "takes Discrete actions", ["pqn", "dqn"]),
    ("CartPole-v1", "an Atari game of EnvPool", ATARI[::2]),
    ("NoSuchGame-v5", "not NoSuchGame-v5", ATARI[::2]),
]
# One game of Breakout takes some 200 steps.
GAME = ("--num-envs", "1", "--num-steps", "600", "--total-timesteps", "600", "--update-epochs", "1")
SMALL_FRAMES = ("--env-kwargs", '{"width": 128, "height": 128}')
FILMED = {
    "dqn": SHORT["dqn"],
    TD3: ("--env-id", "InvertedPendulum-v4", *SMALL_FRAMES, *SHORT[TD3]),
    BREAKOUT: GAME,
}


# ---- Arguments ---------------------------------------------------------------------------------------------
def parse(name: str, **values):
    """The arguments of a script with these values, as after a command line that gives them."""
    script = load(name)
    with patch("tyro.cli", lambda kind, **_: kind(**values)):
        return script["parse_args"]()


@every
def test_every_number_is_checked(name, refusal):
    for field in fields(load(name)["Args"]):
        wrong = ()
        if "float" in str(field.type):
            wrong = (-0.01, 1.01 if field.name in FRACTIONS else math.inf, math.nan)
            wrong = wrong[1:] if field.name in SIGNED else wrong
        elif "int" in str(field.type):
            wrong = (-1 if field.name in FROM_0 else 0,)
        assert wrong or type(field.default) not in (int, float), field
        for value in wrong:
            line = refusal(name, parse, **{field.name: value})
            assert line.startswith(f"--{field.name.replace('_', '-')}: Input should be ")
            assert line.endswith(f", got {value}")


@every
def test_flags_and_integers_may_be_written_as_elsewhere(name, monkeypatch):
    """As by sweeps of Weights & Biases, by LeanRL, and by hand; nothing else is changed."""
    typed = ["--cuda", "False", "--track=false", "--capture_video=True", "--save-model"]
    typed += ["--total-timesteps=2e3", "--seed", "1.5E+1", "--gamma", "1e-1", "--exp-name", "lr=1e3"]
    monkeypatch.setattr("sys.argv", ["a", *typed, "--wandb-entity", "", "--wandb-project-name", "1e5"])
    args, _ = load(name)["parse_args"]()
    assert [args.cuda, args.track, args.capture_video, args.save_model] == [False, False, True, True]
    assert [args.total_timesteps, args.seed, args.gamma] == [2000, 15, 0.1]
    assert [args.exp_name, args.wandb_entity, args.wandb_project_name] == ["lr=1e3", "", "1e5"]


def test_mujoco_without_its_renderer_is_told_in_one_line():
    """MuJoCo asks for the library of MUJOCO_GL as soon as it is imported, film or none."""
    process = cli(TD3, "--no-cuda", env={"MUJOCO_GL": "none-such"})
    assert process.returncode == 2
    [line] = process.stderr.splitlines()
    assert line.endswith("environment variable MUJOCO_GL: none-such; unset MUJOCO_GL or install that library")
    process = cli(TD3, "--no-cuda", "--env-id", "HalfChetah-v4", env={"MUJOCO_GL": "egl"})
    assert process.returncode == 2 and "MUJOCO_GL" not in process.stderr


def test_what_is_no_integer_is_refused(monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    for wrong in ("1.2.3e4", "1.5e0"):
        with pytest.raises(SystemExit, match="2"):
            run("dqn", "--seed", wrong)
        assert "Error parsing --seed: invalid literal for int()" in capfd.readouterr().err


@pytest.mark.parametrize("name", OFF_POLICY)
def test_a_run_without_a_gradient_step_says_so(name, capfd):
    steps = ("--learning-starts", 100, "--total-timesteps", 90, "--eval-episodes", 1)
    done = run(name, *world(name, "Scripted"), *steps)
    assert done["updates"] == 0 and done["global_step"] == 90 and len(done["summary"]["eval_returns"]) == 1
    assert "\nno gradient step was made\n" in capfd.readouterr().err


@pytest.mark.parametrize("name", [TD3, "ppo"])
def test_deterministic_algorithms_on_request(name):
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        run(name, *world(name, "Scripted"), *SHORT[name], "--torch-deterministic")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@every
def test_arguments_have_to_fit_together(name, refusal):
    four, passed = ("--num-envs", 4), patch("torch.set_flush_denormal", side_effect=StopIteration)
    cases = [("--resume and --evaluate exclude each other", "--resume", "a", "--evaluate", "b")]
    if name in OFF_POLICY:
        sizes = ("--buffer-size", 64)
        told = "--buffer-size has to hold a batch and a step of all environments, got 64"
        for size, num_envs in ((64, 8), (8, 64), (65, 8), (8, 65)):
            fits = max(size, num_envs) == 64
            cases += [(None if fits else told, *sizes, "--batch-size", size, "--num-envs", num_envs)]
        if takes(name, "v_min"):
            cases += [("--v-min has to be below --v-max, got 5.0 and 5.0", "--v-min", 5, "--v-max", 5)]
            cases += [("--std-min may not be above --std-max, got 0.5 and 0.4", "--std-min", 0.5)]
            cases += [(None, "--std-min", 0.4)]
    else:
        rollout = (*four, "--num-steps", 25, "--num-minibatches")
        told = "--num-minibatches takes a smaller divisor of 100, got "
        fits = 2 if name in MEMORY else 50
        if name in MEMORY:
            told = "--num-minibatches takes a divisor of --num-envs 4, got "
            single = "--num-steps has to be at least 2 where a minibatch is one environment, got 1"
            cases += [(single, *four, "--num-steps", 1, "--num-minibatches", 4)]
        cases += [(f"{told}{number}", *rollout, number) for number in (3, 100)]
        told = "--total-timesteps has to hold a rollout of 100, got 99"
        cases += [
            (told, *rollout, fits, "--total-timesteps", 99),
            (None, *rollout, fits, "--total-timesteps", 100),
        ]
    for told, *args in cases:
        with passed:  # what comes after the arguments is not reached
            if told:
                assert refusal(name, run, *args) == told
            else:
                with pytest.raises(StopIteration):
                    run(name, *args)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("env_id", "words", "names"), UNFIT)
def test_an_environment_that_does_not_fit_is_refused_and_leaves_nothing(
    env_id, words, names, refusal, tmp_path
):
    filmed = ("--capture-video",) if "Discrete(2)" in words else ()
    for name in names:
        line = refusal(name, run, "--env-id", env_id, *filmed, directory=tmp_path)
        assert line.startswith("--env-id ") and words in line
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ATARI])
def test_an_error_in_an_environment_of_the_users_own_shows_its_traceback(name, monkeypatch):
    """Also on a machine that renders without a display."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.delitem(sys.modules, "mujoco", raising=False)
    for env_id in (world(name, "Talkative")[1], world(name, "Talkative")[1].removeprefix("envs:")):
        with pytest.raises(RuntimeError, match="one line\n  and another"):
            run(name, "--env-id", env_id)


@pytest.mark.parametrize("variable", ["CXX", "TORCHINDUCTOR_CACHE_DIR"])
def test_what_compiling_lacks_is_told_in_one_line(variable, tmp_path):
    """A compiler that is not there, or a path with a space."""
    twin, where = f"{TD3}_torchcompile", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    where |= {variable: str(tmp_path / "no where"), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    process = cli(twin, *world(TD3, "Scripted"), *SHORT[TD3], "--no-cuda", "--compile", env=where)
    [line] = process.stderr.splitlines()
    assert (process.returncode, process.stdout) == (2, "")
    assert line.startswith(f"{twin}.py: error: --compile: ") and str(tmp_path / "no") in line


@every
def test_help_explains_every_argument(name, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit, match="0"):
        run(name, "--help")
    told = re.sub(r"[\s│]+", " ", capfd.readouterr().out)
    for field in fields(load(name)["Args"]):
        # Behind the argument, or behind both of its forms if it is a switch, and what it takes.
        flag = field.name.replace("_", "-")
        assert re.search(rf" --{flag}(, --no-{flag}| \S.{{,60}}?)? [a-z\d][^()]{{9,90}} \(default: ", told), (
            field.name
        )


# ---- Summary and logs --------------------------------------------------------------------------------------
@every
def test_summary_bar_and_logs(name, tmp_path, capfd):
    """Of a run that asks for a CUDA device, and twins for graphs, on a machine that has none.

    And PyTorch is set as the arguments say.
    """
    options = ("--num-envs", "2", "--exp-name", "an_experiment", *(["--cudagraphs"] if name in TWINS else []))
    options += ("--precision", "tf32")
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
    expected["folder"] = str(done["folder"])
    expected |= {"episodic_return": np.mean(returns[-100:]), "episodic_return_10": np.mean(returns[-10:])}
    expected |= {} if name in ATARI else {"success_rate": None, "eval_success_rate": None}
    assert summary == expected | {"eval_returns": [], "best_eval_return": None}
    # How far it is of how far it goes, how fast, and the recent return.
    recent = f"{np.mean(returns[-10:]):.1f}"
    assert re.search(rf"\r[^\r]*{steps}/300 \[[^\r]*, SPS \d+, return {recent}\]", printed.err)

    [folder] = (tmp_path / "runs").iterdir()
    env_id = args["env_id"].replace(":", "_")
    assert re.fullmatch(rf"{env_id}__an_experiment__1__\d{{10}}\.\d{{6}}", folder.name)
    assert not checkpoints(tmp_path)
    logged = conftest.curves(folder)
    scheduled = {"epsilon": takes(name, "start_e"), "learning_rate": name not in OFF_POLICY}
    charts = [
        "SPS",
        "episodic_return",
        "episodic_length",
        *(tag for tag, is_it in scheduled.items() if is_it),
    ]
    charts = [f"charts/{tag}" for tag in charts]
    assert logged.keys() == {*charts, *(f"losses/{tag}" for tag in conftest.algorithm(name).losses)}
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(returns)
    if name in OFF_POLICY:
        assert [step for step, _ in logged["charts/SPS"]] == [100, 200, 300]
        assert done["updates"] == 198
    else:  # an entry a rollout
        updates = (2 if name in MEMORY else 5) * (1 if name in ATARI else 2)
        assert len(logged["charts/SPS"]) == done["updates"] / updates >= 3
    table = EventAccumulator(str(folder)).Reload().Tensors("hyperparameters/text_summary")[0]
    assert b"\ngamma|0.99\n" in table.tensor_proto.string_val[0]


def test_a_run_has_a_folder_of_its_own_in_runs(tmp_path):
    (directory := tmp_path / "a" / "b").mkdir(parents=True)
    with patch("time.time", return_value=1.7e9):
        play("dqn", *SHORT["dqn"], "--exp-name", "/../../o\\ut", directory=directory)
        with pytest.raises(FileExistsError):  # in the same microsecond
            play("dqn", *SHORT["dqn"], "--exp-name", "/../../o\\ut", directory=directory)
    *outer, folder = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert outer == [tmp_path / "a", directory, directory / "runs"]
    assert folder.name == "envs_ScriptedChoices-v0___.._.._o_ut__1__1700000000.000000"
    assert len(list(folder.glob("events.*"))) == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_tracking_works_offline(tmp_path):
    """Of a run that goes on, under the name that it was begun with. W&B takes ten seconds to end it."""
    run("dqn", *SHORT["dqn"], "--save-model", directory=tmp_path)
    # W&B keeps the code of a script that lies below the current folder.
    script = shutil.copy(conftest.LEANRL / "dqn.py", tmp_path)
    options = {"env": conftest.environment(WANDB_MODE="offline"), "capture_output": True, "text": True}
    more = ("--total-timesteps", 400, "--capture-video", "--track")
    command = [sys.executable, script, "--no-cuda", *more, "--resume", *checkpoints(tmp_path)]
    process = subprocess.run(list(map(str, command)), cwd=tmp_path, **options)
    assert process.returncode == 0, process.stderr
    json.loads(process.stdout.splitlines()[-1])
    [folder], [records] = tmp_path.glob("runs/*"), tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert records.name == f"run-{folder.name[-64:]}.wandb"
    for metric in (b"losses/td_loss", b"charts/episodic_return", b"charts/SPS"):
        assert metric in records.read_bytes()  # they are framed, not compressed: names can be read
    assert (records.parent / "files" / "code" / "dqn.py").read_text() == Path(script).read_text()
    assert [*records.parent.glob("files/media/videos/**/*.mp4")]


# ---- Videos ------------------------------------------------------------------------------------------------
def videos(directory: Path, folder: str) -> int:
    """The number of videos of runs in a directory, all of which show something."""
    found = [*directory.glob(f"runs/*/{folder}/*.mp4")]
    for video in found:
        with VideoFileClip(str(video)) as clip:
            assert clip.get_frame(0).std() > 1
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
    run(name, "--total-timesteps", step + (700 if name == BREAKOUT else 60), "--resume", path)
    assert videos(tmp_path, f"videos/from_step_{step}")


@pytest.mark.parametrize("name", CONTINUOUS)
def test_videos_follow_what_runs_away(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", conftest.rendering()["MUJOCO_GL"])
    script = load(name)
    args = script["Args"](env_id="HalfCheetah-v4", env_backend="gymnasium")
    renderer = script["make_env"](args, tmp_path / "videos").unwrapped.mujoco_renderer
    assert renderer.camera_id >= 0
    assert renderer.model.cam_mode[renderer.camera_id] == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
