"""What a user sees: refusals in one line, the run summary, the logs, videos."""

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
import envpool
import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    MANY,
    MEMORY,
    OFF_POLICY,
    RAINBOW,
    SAVED,
    SCRIPTS,
    SHORT,
    TWINS,
    load,
    play,
    run,
    takes,
)
from moviepy import VideoFileClip
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

each = pytest.mark.parametrize("name", SCRIPTS)  # a twin has its arguments and environments to the letter
TD3 = "td3_continuous_action"
CONTINUOUS = [name for name in SCRIPTS if conftest.algorithm(name).actions == "continuous"]
# Integers that may be 0, and numbers that may not be above 1.
SIGNED = {"v_min", "v_max", "target_entropy_ratio"}
FROM_0 = ("seed", "learning_starts", "env_threads", "privileged_dim")
FRACTIONS = ("gamma", "tau", "gae_lambda", "q_lambda", "start_e", "end_e", "exploration_fraction")
# Environments whose actions a script does not take, and what it says.
UNFIT = [
    ("CartPole-v1", "not Discrete(2)", CONTINUOUS),
    ("envs:Unbounded-v0", "bounded vectors", [name for name in CONTINUOUS if name in OFF_POLICY]),
    ("envs:WalksNext-v0", "SAME_STEP autoreset", [TD3]),
    ("Pendulum-v1", "iscrete actions", [name for name in SCRIPTS if name in conftest.DISCRETE]),
    ("envs:Codes-v0", "Discrete actions", ["pqn", "dqn"]),
]


# ---- Arguments ---------------------------------------------------------------------------------------------
@each
def test_every_number_is_checked(name):
    kind = load(name)["Args"]
    for field in fields(kind):
        wrong = ()
        if "float" in str(field.type):
            wrong = (-0.01, 1.01 if field.name in FRACTIONS else math.inf, math.nan)
            wrong = wrong[1:] if field.name in SIGNED else wrong
        elif "int" in str(field.type):
            wrong = (-1 if field.name in FROM_0 else 0, 1.5)
        assert wrong or type(field.default) not in (int, float), field
        for value in wrong:
            with pytest.raises(ValidationError, match=rf"\n{field.name}\n"):
                kind(**{field.name: value})


@each
def test_arguments_have_to_fit_together(name):
    if name in OFF_POLICY:
        wrong = {"--buffer-size has to": {"buffer_size": 65, "num_envs": 8, "batch_size": 65}}
        wrong |= {"--v-min": {"v_min": 5, "v_max": 5}} if takes(name, "v_min") else {}
        wrong |= {"--alpha": {"alpha": 0}} if takes(name, "target_entropy_ratio") else {}
    else:
        fits = {"num_envs": 4, "num_steps": 25, "num_minibatches": 2, "total_timesteps": 100}
        load(name)["Args"](**fits)
        wrong = {"--num-minibatches": fits | {"num_minibatches": 3}}
        wrong |= {"--total-timesteps": fits | {"total_timesteps": 99}}
    for told, values in wrong.items():
        with pytest.raises(ValidationError, match=f"Value error, {told}"):
            load(name)["Args"](**values)


def test_what_is_typed_is_refused_with_its_name_and_what_it_takes(refusal, tmp_path):
    """All scripts read it by the same text."""
    wrong = {"--gamma 1.5": "gamma Input should be less than or equal to 1", "--num-envs 0": "num_envs"}
    wrong |= {"--seed 1.5": "--seed: invalid literal for int()", "--env-kwargs [4]": "valid dictionary"}
    for typed, told in wrong.items():
        assert told in refusal(TD3, run, *typed.split(), directory=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("env_id", "words", "names"), UNFIT)
def test_an_environment_that_does_not_fit_is_refused_and_leaves_nothing(
    env_id, words, names, refusal, tmp_path
):
    for name in names:
        line = refusal(name, run, "--env-id", env_id, directory=tmp_path)
        assert line.startswith("--env-id takes ") and words in line
    assert not [*tmp_path.iterdir()]


def test_an_environment_beside_the_current_folder_is_found(tmp_path, monkeypatch):
    """In a module there, which registers it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    lines = ("import gymnasium, envs", "gymnasium.register('Mine-v0', entry_point=envs.Scripted)")
    (tmp_path / "of_mine.py").write_text("\n".join(lines))
    assert run(TD3, *SHORT[TD3], "--env-id", "of_mine:Mine-v0", directory=tmp_path)["updates"] > 0


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name in OFF_POLICY])
def test_a_run_without_a_gradient_step_has_a_summary(name):
    small = ("--buffer-size", 1000)
    done = play(name, *small, "--learning-starts", 100, "--total-timesteps", 90)
    assert (done["updates"], done["global_step"], done["summary"]["updates"]) == (0, 90, 0)


# ---- Summary and logs --------------------------------------------------------------------------------------
# Twins end as their eager scripts do.
@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS[::4]])
def test_summary_bar_and_logs(name, tmp_path, capfd):
    """Of a run that asks for a CUDA device, and twins for graphs, on a machine that has none."""
    num_envs = "1" if name in RAINBOW else "2"  # of two games the last step may be one too many
    options = (
        "--num-envs",
        num_envs,
        "--exp-name",
        "an_experiment",
        *(["--cudagraphs"] if name in TWINS else []),
    )
    options += ("--precision", "tf32")
    can_flush = torch.set_flush_denormal(False)  # not every processor can
    with patch("torch.cuda.is_available", lambda: False):
        done = play(name, *SHORT[name], *options, cuda=True, directory=tmp_path)
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    assert (torch.tensor(1e-39) * 1 == 0) == can_flush
    printed = capfd.readouterr()
    told = "CUDA graphs need a CUDA device: running without them\n"
    assert printed.err.count(told) == (name in TWINS)
    told = "neither --compile nor a captured graph: this is for debugging"
    assert printed.err.count(told) == (name in TWINS)
    [line] = printed.out.splitlines()
    summary, args = json.loads(line), asdict(done["args"])
    steps, returns = done["global_step"], done["returns"]
    assert 200 < steps <= 300
    assert all(summary.pop(key) > 0 for key in ("sps", "startup_seconds", "wall_seconds"))
    expected = args | {"script": name, "device": "cpu", "compile": False, "cudagraphs": False}
    expected |= {"total_timesteps": steps, "updates": done["updates"], "episodes": len(returns)}
    expected["folder"] = str(done["folder"])
    expected |= {"episodic_return": np.mean(returns[-100:]), "episodic_return_10": np.mean(returns[-10:])}
    assert summary == expected | {"eval_returns": []}
    # How far it is of how far it goes, how fast, and the recent return.
    recent = f"{np.mean(returns[-10:]):.1f}"
    assert re.search(rf"\r[^\r]*{steps}/300 \[[^\r]*, SPS \d+, return {recent}\]", printed.err)

    [folder] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(rf"{args['env_id'].replace(':', '_')}__an_experiment__1__\d{{10}}\.\d+", folder.name)
    assert not [*folder.glob("*.pt")]
    logged = conftest.curves(folder)
    scheduled = {"epsilon": takes(name, "start_e"), "learning_rate": name not in OFF_POLICY}
    scheduled["beta"] = takes(name, "prioritized_replay_beta")
    charts = {"SPS", "episodic_return", "episodic_length", *(tag for tag in scheduled if scheduled[tag])}
    expected = {f"charts/{tag}" for tag in charts}
    expected |= {f"losses/{tag}" for tag in conftest.algorithm(name).losses}
    assert logged.keys() == expected, "its entry in benchmark/collection.py names other losses"
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(returns)
    if name in OFF_POLICY:
        assert [step for step, _ in logged["charts/SPS"]] == [100, 200, 300]
        assert done["updates"] == (49 if name in RAINBOW else 99 if name in MANY else 198)
    else:  # an entry a rollout
        updates = (2 if name in MEMORY else 5) * (1 if name in ATARI else 2)
        assert len(logged["charts/SPS"]) == done["updates"] / updates >= 3
    table = EventAccumulator(str(folder)).Reload().Tensors("hyperparameters/text_summary")[0]
    assert b'"gamma": 0.99' in table.tensor_proto.string_val[0]


def test_tracking_works_offline(tmp_path):
    """Of a run that goes on, under the name that it was begun with. W&B takes ten seconds to end it."""
    run("dqn", *SHORT["dqn"], *SAVED, directory=tmp_path)
    # W&B keeps the code of a script that lies below the current folder.
    script, folder = shutil.copy(conftest.LEANRL / "dqn.py", tmp_path), conftest.checkpoint(tmp_path).parent
    options = {"env": conftest.environment(WANDB_MODE="offline"), "capture_output": True, "text": True}
    more = ("--total-timesteps", 400, "--capture-video", "--track")
    command = [sys.executable, script, "--no-cuda", *more, "--resume", folder]
    process = subprocess.run(list(map(str, command)), cwd=tmp_path, **options)
    assert process.returncode == 0, process.stderr
    json.loads(process.stdout.splitlines()[-1])
    [records] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert records.name == f"run-{folder.name[-64:]}.wandb"
    for metric in (b"losses/td_loss", b"charts/episodic_return", b"charts/SPS"):
        assert metric in records.read_bytes()  # they are framed, not compressed: names can be read
    assert (records.parent / "files" / "code" / "dqn.py").read_text() == Path(script).read_text()
    assert [*records.parent.glob("files/videos/*/*.mp4")]


# ---- Videos ------------------------------------------------------------------------------------------------
# One game of Breakout takes some 200 steps.
GAME = ("--num-envs", "1", "--num-steps", "100", "--total-timesteps", "200", "--update-epochs", "1")
FILMED = {"dqn": SHORT["dqn"], "ppo_atari_envpool": GAME}


def films(folder: Path) -> list[Path]:
    """The films of a run, all of which show something."""
    found = sorted(folder.glob("videos/*/*.mp4"), key=lambda film: int(film.parent.name))
    for film in found:
        with VideoFileClip(str(film)) as clip:
            assert clip.get_frame(0).std() > 1
    return found


@pytest.mark.parametrize("name", FILMED)
def test_the_first_episode_of_each_evaluation_is_filmed(name, tmp_path):
    often = ("--capture-video", "--eval-every", 100, "--eval-episodes", 1, *SAVED)
    done = run(name, *FILMED[name], *often, directory=tmp_path)
    folder, steps = tmp_path / done["folder"], [step for step, _ in done["logged"]["charts/eval_return"]]
    before = films(folder)
    assert [int(film.parent.name) for film in before] == steps != []
    conftest.evaluation(name, folder / "checkpoint.pt", games=envpool.make)
    assert films(folder)[:-1] == before
