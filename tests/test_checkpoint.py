"""Runs end in order whatever ends them, and go on from checkpoints that hold all they need."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import conftest
import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    DQN,
    MANY,
    MEMORY,
    OFF_POLICY,
    Q_LEARNING,
    RAINBOW,
    SAVED,
    SCRIPTS,
    SHORT,
    TWINS,
    checkpoint,
    curves,
    evaluation,
    play,
    recalled,
)
from envs import Row, Scripted, ScriptedGames, game_rows, scripted_rows
from torch.testing import assert_close

TD3, PPO = "td3_continuous_action", "ppo_continuous_action"
# Signals, and the updates of 49 steps that count towards gradient steps, or of PPO's two rollouts.
ENDS = {f"{TD3}_torchcompile": (signal.SIGINT, 35), "dqn": (signal.SIGTERM, 7), PPO: (signal.SIGINT, 20)}
# A script and its other file.
PAIRS = [*zip(SCRIPTS, TWINS, strict=True), *zip(TWINS, SCRIPTS, strict=True)]
# What a replay buffer holds: after 300 steps it is full in an eager script, and not yet in a twin.
CAPACITY = dict.fromkeys(OFF_POLICY, 256) | dict.fromkeys(TWINS, 400)
LATER = count(9_000_000_000)  # TensorBoard reads the files of a folder by the second in their names


def short(name: str, steps: int = 300) -> tuple:
    """The arguments for a short run, at the end of which some of a gradient step is due."""
    rate = () if name in MANY else ("--updates-per-step", 0.7)
    rate = ("--train-frequency", 7) if name in (*DQN, *RAINBOW) else rate
    small = ("--batch-size", 8, "--buffer-size", CAPACITY[name], *rate) if name in OFF_POLICY else ()
    small += ("--exploration-fraction", 1) if name in Q_LEARNING else ()
    small += ("--no-noisy",) if name in RAINBOW else ()
    return (*SHORT[name], *small, "--total-timesteps", steps)


@cache
def train_once(name: str) -> tuple[dict, TemporaryDirectory]:
    directory = TemporaryDirectory()
    return play(name, *short(name), *SAVED, directory=Path(directory.name)), directory


def by_script(*cases: tuple) -> list:
    """Have one worker do what begins with the run of a script, which is the first value of a case."""
    return [pytest.param(*case, marks=pytest.mark.xdist_group(case[0])) for case in cases]


def trained(name: str, directory: Path) -> tuple[dict, Path]:
    """What a script's run of 300 steps computed, and its folder, copied."""
    done, original = train_once(name)
    shutil.copytree(original.name, directory, dirs_exist_ok=True)
    return done, checkpoint(directory).parent


def go_on(name: str, steps: int, folder: Path, *args) -> dict:
    """Resume a run, some time later, with its arguments."""
    with patch("time.time", lambda: next(LATER)):
        return play(name, "--resume", folder, "--total-timesteps", steps, *args)


def lasting(result: dict) -> dict:
    """All that lasts in a run: progress, networks, moments of Adam, normalisers, replay buffer."""
    found = {key: result.get(key) for key in ("global_step", "updates", "updates_due", "returns")}
    if "size" in result:
        found["buffer"] = result["buffer"].clone()
    if "sample" in result:  # what goes on marks where its episodes begin
        found["buffer"][:, 8] = 0
    if "replay" in result:  # a run that goes on ends what was before: over and valid of the last two steps
        found |= {
            "buffer": result["buffer"][:, [0, 1, 2, 5]].clone(),
            "frames": result["replay"].frames.clone(),
        }
        found["priorities"] = result["priorities"].clone()
    return found | {name: item.state_dict() for name, item in result["state"].items()}


def whole_curves(folder: Path, result: dict) -> dict[str, list[tuple[int, float]]]:
    """What a run has logged, which has nothing twice, lacks no episode, and ends where the run does."""
    logged = curves(folder)
    assert [value for _, value in logged["charts/episodic_return"]] == pytest.approx(result["returns"])
    for key, points in logged.items():
        gaps = np.diff([step for step, _ in points])
        assert (gaps >= 0).all() if "episodic" in key else (gaps > 0).all()  # two may end at once
    assert max(step for points in logged.values() for step, _ in points) == result["global_step"]
    return logged


# ---- Going on ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", by_script(*zip([*SCRIPTS, *TWINS], strict=True)))
def test_a_run_goes_on_from_what_was_saved(name, tmp_path):
    before, folder = trained(name, tmp_path)
    begin, saved = before["global_step"], (folder / "checkpoint.pt").read_bytes()
    # A run without a step left has what was saved.
    after = go_on(name, begin, folder)
    assert before["updates"] > 0
    missing = {*before["left_out"]} - {"host_network"}  # a twin's copy, on the host, of what is in `state`
    assert not missing, f"{missing}: add these to `state`, of which checkpoints are made, if they change"
    assert_close(lasting(after), lasting(before), rtol=0, atol=0)
    assert (folder / "checkpoint.pt").read_bytes() == saved

    on = go_on(name, 500, folder)
    end, logged = on["global_step"], on["logged"]
    assert begin + 100 < end <= 500 and on["folder"] == folder
    # Other numbers are drawn from here on, by PyTorch and by the environments.
    first = np.random.SeedSequence([1, 0]).generate_state(4) >> 1
    assert torch.initial_seed() not in {1, *first.tolist()}
    seeds = ([seed for env in conftest.instances(r) for seed in env.seeds] for r in (before, on))
    assert set.intersection(*map(set, seeds)) <= {None}
    if name in OFF_POLICY:  # as many gradient steps as in one run, and rows where they would be
        each = 1 if name in MANY else 0.7
        assert on["updates"] == ((end - 101) // 7 if name in Q_LEARNING else math.ceil(each * (end - 101)))
    if name in OFF_POLICY and name not in RAINBOW:  # of which tests/test_replay.py looks at each row
        rows = lasting(on)["buffer"] != lasting(before)["buffer"]
        rows = rows.any(dim=1).nonzero().flatten().tolist()
        assert rows == sorted(step % CAPACITY[name] for step in range(300, 500))
    if name not in OFF_POLICY:  # what is scheduled is so over the steps that the second run knows of
        steps, rates = zip(*logged["charts/learning_rate"], strict=True)
        left = 1 - np.array([begin, *steps[:-1]]) / 500
        assert rates == pytest.approx(on["args"].learning_rate * left)
    if name in Q_LEARNING:
        steps, epsilons = np.transpose(logged["charts/epsilon"])
        assert len(steps) >= 2
        least = on["args"].end_e
        assert epsilons == pytest.approx(1 - (1 - least) * steps / 500)
    whole_curves(folder, on)


@pytest.mark.parametrize("name", [f"{TD3}_torchcompile", PPO])
def test_after_kill_9_a_run_goes_on_with_the_same_numbers_each_time(name, tmp_path):
    """From its checkpoint; the curves of its folder have no gap."""
    often = ("--log-every", 10) if name in OFF_POLICY else ()
    options = (*short(name, 10**6), *often, "--checkpoint-every", 100)
    script, *args = conftest.LEANRL / f"{name}.py", "--no-cuda", "--env-id", "envs:Scripted-v0", *options
    command, quiet = (
        [sys.executable, script, *args],
        {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
    )
    process = subprocess.Popen([*map(str, command)], cwd=tmp_path, env=conftest.environment(), **quiet)
    try:
        while len([*tmp_path.glob("runs/*/checkpoint.pt")]) == 0:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)  # so that it may be anywhere
    finally:
        process.kill()
        process.wait()
    file = checkpoint(tmp_path)
    step, *_, returns = torch.load(file, weights_only=True)["progress"]
    copies = [shutil.copytree(file.parent, tmp_path / copy) for copy in ("a", "b")]
    one, other = (go_on(name, step + 200, folder) for folder in copies)
    conftest.assert_same_numbers(one, other, rtol=0, atol=0)
    assert one["returns"][: len(returns)] == returns and one["global_step"] > step + 100
    logged = whole_curves(copies[0], one)
    assert name not in OFF_POLICY or [at for at, _ in logged["charts/SPS"]] == [*range(10, step + 201, 10)]
    if name in OFF_POLICY:  # and what it had computed is that of a run that ends there
        alone, kept = play(name, *short(name, step), *often), torch.load(file, weights_only=True)
        assert_close(kept["buffer"], alone["buffer"][: len(kept["buffer"])], rtol=0, atol=0)
        assert_close(kept["actor"], alone["state"]["actor"].state_dict(), rtol=0, atol=0)


def test_arguments_are_the_old_ones_but_for_what_is_typed(tmp_path, refusal):
    """All scripts read them by the same text; what has to stay is their own."""
    name = "sac_continuous_action"
    before, folder = trained(name, tmp_path)
    after = go_on(name, 310, folder, "--tau", "0.5", "--exp-name", "another")
    different = {"resume": str(folder), "exp_name": "another", "total_timesteps": 310, "tau": 0.5}
    assert vars(after["args"]) == vars(before["args"]) | different
    for flag, value, was in (
        ("num-envs", 2, 1),
        ("q-lr", 0.1, 0.001),
        ("env-id", "A-v1", "envs:Scripted-v0"),
    ):
        told = refusal(name, conftest.run, "--resume", folder, f"--{flag}", value)
        assert told == f"--{flag} has to stay {was}, as in {folder / 'checkpoint.pt'}"


@pytest.mark.parametrize("name", [name for name in (*SCRIPTS, *TWINS) if conftest.takes(name, "v_min")])
def test_what_values_and_priorities_are_made_of_has_to_stay(name):
    kept = ("v_min", "v_max", "n_atoms", "dueling", "noisy", "distributional", "prioritized_replay_alpha")
    fixed = conftest.load(name)["FIXED"]
    assert all(argument in fixed for argument in kept if conftest.takes(name, argument))


def test_a_checkpoint_is_replaced_whole(tmp_path):
    """By one that was written before beside it, to which the log already reaches."""
    save, seen = torch.save, []

    def save_in_order(content: dict, file: Path) -> None:
        assert file.suffix != ".pt" and (len(seen) == 0 or checkpoint(tmp_path))
        seen.append(content["progress"][0])
        assert curves(file.parent)["charts/SPS"][-1][0] == seen[-1]
        save(content, file)

    often = ("--log-every", "50", "--checkpoint-every", "50")
    with patch("torch.save", save_in_order):
        play(TD3, *short(TD3, 200), *often, directory=tmp_path)
    assert seen == [50, 100, 150, 200]
    files = [file.name for file in checkpoint(tmp_path).parent.iterdir() if "tfevents" not in file.name]
    assert files == ["checkpoint.pt"]


# ---- Ends --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ENDS)
def test_a_signal_ends_a_run_with_a_checkpoint(name, tmp_path, monkeypatch, capfd):
    number, updates = ENDS[name]
    monkeypatch.setattr(Scripted, "raises", {149 if name in OFF_POLICY else 60: number})
    with pytest.raises(SystemExit, match=f"{128 + number}"):
        play(name, *short(name), *SAVED, "--eval-every", 10**6, directory=tmp_path)
    summary = json.loads(capfd.readouterr().out)
    steps, counted, *_ = torch.load(checkpoint(tmp_path), weights_only=True)["progress"]
    assert (steps, counted) == (150 if name in OFF_POLICY else steps, updates)
    assert [summary[key] for key in ("total_timesteps", "updates", "eval_returns")] == [steps, updates, []]


def test_the_same_signal_again_ends_a_run_at_once():
    """Also within a rollout, and after another one. The environment raises SIGINT, SIGTERM and SIGINT."""
    process = conftest.cli(PPO, "--no-cuda", "--env-id", "envs:Interrupted-v0", "--total-timesteps", "2048")
    assert (process.returncode, process.stdout) == (-signal.SIGINT, "")
    assert "Traceback" not in process.stderr


# ---- Evaluation --------------------------------------------------------------------------------------------
def expected_actions(name: str, done: dict, rows: list[Row]) -> np.ndarray:
    """What the networks of a run take for the best actions at the steps of an episode."""
    state, obs = done["state"], np.stack([row.obs for row in rows])
    if name in RAINBOW:
        obs = torch.from_numpy(obs)
    elif name in ATARI:  # frames come last; an agent with a memory sees the newest alone
        obs = torch.from_numpy(obs[:, -1:] if name in MEMORY else obs).movedim(1, -1)
    else:
        obs = obs.reshape(len(obs), -1)
        obs = done["obs_moments"].standardise(obs) if "obs_moments" in done else obs
        obs = torch.from_numpy(obs).float()
    with torch.no_grad():
        if name in OFF_POLICY and name not in Q_LEARNING:
            actions = state["actor"](state.get("obs_normalizer", torch.nn.Identity())(obs))
            # Of a Gaussian the mean; of environments, the middle of their bounds is 0.
            outputs = torch.tanh(actions[0]) if isinstance(actions, tuple) else actions
        elif name in Q_LEARNING:
            outputs = state["q_network"].eval()(obs)
            outputs = outputs.softmax(2) @ torch.linspace(-10, 10, 51) if name in RAINBOW else outputs
        elif name in MEMORY:
            valid = torch.tensor([[row.valid] for row in rows])
            outputs = recalled(state["agent"], obs[:, None], valid)[0][:, 0]
        else:
            outputs = state["agent"](obs)[0]
    if name in ATARI or name in conftest.DISCRETE:
        first = 0 if name in ATARI else done["envs"].single_action_space.start
        return outputs.argmax(dim=1).numpy() + first
    space = done["envs"].single_action_space
    if name in OFF_POLICY:
        return space.low + (outputs.numpy() + 1) / 2 * (space.high - space.low)
    return outputs.numpy().clip(space.low, space.high)


@pytest.mark.parametrize(("first", "second"), by_script(*PAIRS))
def test_evaluation_takes_the_best_actions_also_of_the_other_script(first, second, tmp_path):
    """In episodes of other environments than those of training, and it leaves nothing behind."""
    done, folder = trained(first, tmp_path)
    files, made, kind = {*tmp_path.rglob("*")}, [], ScriptedGames if first in ATARI else Scripted
    make = kind.__init__
    with patch.object(kind, "__init__", lambda *args, **kw: made.append(args[0]) or make(*args, **kw)):
        told = evaluation(second, folder / "checkpoint.pt", "--eval-episodes", 3, directory=tmp_path)
    assert {*tmp_path.rglob("*")} == files and len(told["eval_returns"]) == 3
    of_run = vars(done["args"])
    assert all(told[name] == of_run[name] for name in ("env_id", "gamma", "num_envs", "total_timesteps"))
    trained_with = {seed for env in conftest.instances(done) for seed in env.seeds if seed is not None}
    envs, games = made[-3:], made[-1]
    for index in range(3):
        seed, rows = (games if first in ATARI else envs[index]).seeds[index if first in ATARI else 0], []
        assert seed not in trained_with and seed < 2**31
        for row in (game_rows if first in ATARI else scripted_rows)(seed):
            rows.append(row)
            if row.over:
                break
        assert told["eval_returns"][index] == pytest.approx(sum(row.score for row in rows))
        best = expected_actions(first, done, rows)
        taken = [step[index] for step in games.actions] if first in ATARI else envs[index].actions
        assert np.array(taken[: len(best)]).reshape(best.shape) == pytest.approx(best, abs=1e-5)


def test_code_in_a_checkpoint_is_not_executed(tmp_path):
    _, folder = trained(TD3, tmp_path)
    saved, trace = torch.load(folder / "checkpoint.pt"), tmp_path / "executed"
    executed = type("Executed", (), {"__reduce__": lambda _: (Path.touch, (trace,))})()
    torch.save(saved | {"progress": executed}, folder / "checkpoint.pt")
    with pytest.raises(Exception, match="weights_only"):
        play(TD3, "--resume", folder)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["fast_td3", "fast_sac"])
def test_networks_of_a_run_have_the_sizes_that_it_began_with(name, tmp_path):
    """Also of an agent that is evaluated, by the other script, too."""
    sizes = ("--actor-hidden-dim", 8, "--critic-hidden-dim", 16, "--num-atoms", 11, "--v-max", 50)
    play(name, *sizes, *SHORT[name], *SAVED, directory=tmp_path)
    for script in (name, f"{name}_torchcompile"):
        assert len(evaluation(script, checkpoint(tmp_path))["eval_returns"]) == 10
