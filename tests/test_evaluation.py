"""Evaluation along the way: it changes no number of the run, keeps the best agent, and is not lost."""

import math
import os

import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    ON_POLICY,
    SCRIPTS,
    SHORT,
    TWINS,
    assert_same_numbers,
    checkpoints,
    play,
    run,
    world,
)
from envs import Balance, ScriptedGames

TD3 = "td3_continuous_action_torchcompile"
# Twins, whose loops differ from the eager scripts' in a few tagged lines.
OTHERS = [TD3, "dqn_torchcompile", "ppo_torchcompile"]
EVERY = ("--eval-every", 100, "--eval-episodes", 2)


def train(name: str, *args, **options) -> dict:
    """Train for some 300 steps, on a pole, whose returns depend on the agent; Atari's in scripted games."""
    if name in ATARI:
        return play(name, *SHORT[name], *args, **options)
    frequent = () if name in ON_POLICY else ("--log-every", 50)
    return run(name, *world(name, "Balance"), *SHORT[name], *frequent, *args, **options)


@pytest.mark.parametrize("name", [*SCRIPTS, *OTHERS])
def test_evaluation_changes_no_number_and_the_best_agent_is_kept(name, tmp_path):
    """Of a compiled run neither: tests/test_twins.py evaluates all of them."""
    without = train(name)
    evaluated = train(name, *EVERY, "--save-model", directory=tmp_path)
    assert_same_numbers(without, evaluated, rtol=0, atol=0)
    steps, means = zip(*evaluated["logged"]["charts/eval_return"], strict=True)
    assert [step // 100 for step in steps] == sorted({step // 100 for step in steps}) and len(steps) >= 2
    [best] = tmp_path.glob("runs/*/best.pt")
    kept = torch.load(best, weights_only=True)["progress"]
    assert evaluated["summary"]["best_eval_return"] == kept["best_eval"] == pytest.approx(max(means))
    assert kept["global_step"] == kept["last_eval"] == steps[np.argmax(means)]
    os.utime(best)  # the newest of its folder
    again = train(name, "--evaluate", best.parent, "--eval-episodes", 2, "--num-envs", 1, directory=tmp_path)
    assert np.mean(again["summary"]["eval_returns"]) == pytest.approx(kept["best_eval"])
    # A run that goes on evaluates at its next hundred, not at its first log entry.
    on = train(name, *EVERY, "--resume", best.parent, "--total-timesteps", 500, directory=tmp_path)
    later = [step // 100 for step, _ in on["logged"]["charts/eval_return"]]
    assert later == sorted({*later}) and steps[-1] // 100 < later[0] == (steps[-1] // 100 + 1)


@pytest.mark.parametrize("name", ["sac_continuous_action_torchcompile", "ppo"])
def test_an_evaluation_that_was_killed_is_made_again(name, tmp_path, monkeypatch):
    """And what goes on is a numbered checkpoint, not the best agent, which has no replay buffer."""
    reset, seeds = Balance.reset, []

    def die_in_the_second(self, *, seed=None, options=None):
        if seed is not None:
            seeds.append(seed)
            if seeds.count(seed) == 2:  # all evaluations have the same
                raise KeyboardInterrupt
        return reset(self, seed=seed, options=options)

    monkeypatch.setattr(Balance, "reset", die_in_the_second)
    longer = ("--total-timesteps", 500, "--checkpoint-every", 50)
    # Rollouts so short that one ends between a checkpoint and the next evaluation.
    longer += ("--num-steps", 20) if name in ON_POLICY else ()
    with pytest.raises(KeyboardInterrupt):
        train(name, *EVERY, *longer, directory=tmp_path)
    monkeypatch.setattr(Balance, "reset", reset)
    [*_, newest] = checkpoints(tmp_path)
    step = int(newest.stem)
    assert step // 100 == 1  # from before the evaluation
    better = torch.load(newest)
    better["progress"]["best_eval"] = 1e9
    torch.save(better, newest)
    best = (newest.parent / "best.pt").read_bytes()
    gone_on = train(name, *EVERY, *longer, "--resume", newest.parent, directory=tmp_path)
    assert (newest.parent / "best.pt").read_bytes() == best  # the best of the whole run
    assert gone_on["logged"]["charts/eval_return"][0][0] // 100 == 2
    with pytest.raises(SystemExit, match="2"):
        train(name, "--resume", newest.parent / "best.pt", directory=tmp_path)


@pytest.mark.parametrize("name", [TD3, "ppo", "ppo_atari_envpool"])
def test_the_best_agent_of_steps_that_are_done_again_goes(name, tmp_path):
    """An earlier one stays, and so does a file of that name that is no checkpoint."""
    train(name, *EVERY, "--save-model", directory=tmp_path)
    [file] = tmp_path.glob("runs/*/best.pt")
    best = torch.load(file)
    for more, later in enumerate((False, None, True), start=4):
        if later:
            torch.save(best | {"progress": {"global_step": 10_000}}, file)
        elif later is None:
            file.write_text("mine")
        steps = ("--total-timesteps", 100 * more, "--eval-every", 10**9)
        on = train(name, "--resume", file.parent, *steps, directory=tmp_path)
        assert file.exists() is not bool(later)
        assert (on["summary"]["best_eval_return"] is None) is bool(later)


def test_a_best_agent_that_is_gone_does_not_count_and_one_goes_only_if_steps_are_done(tmp_path):
    train(TD3, *EVERY, "--save-model", directory=tmp_path)
    [best] = tmp_path.glob("runs/*/best.pt")
    torch.save(torch.load(best) | {"progress": {"global_step": 10_000}}, best)
    with pytest.raises(TypeError, match="typo"):
        train(TD3, "--resume", best.parent, "--env-kwargs", '{"typo": 1}')
    assert train(TD3, "--resume", best.parent)["summary"]["best_eval_return"] is not None and best.exists()
    best.unlink()
    steps = ("--total-timesteps", 400, "--eval-every", 100)
    again = train(TD3, "--resume", best.parent, *steps)["summary"]["best_eval_return"]
    assert again == torch.load(best)["progress"]["best_eval"]


@pytest.mark.parametrize("name", [TD3, "ppo"])
def test_the_best_agent_of_an_easier_task_does_not_count(name, tmp_path):
    env_id = "CartPole-v1" if name == "ppo" else "InvertedPendulum-v4"  # rewards are 1
    kwargs = '{"max_episode_steps": %d}'
    options = ("--env-id", env_id, *SHORT[name], "--env-kwargs", kwargs % 5, "--save-model")
    run(name, *options, *EVERY, directory=tmp_path)
    [best] = tmp_path.glob("runs/*/best.pt")
    more = ("--total-timesteps", 600, "--env-kwargs", kwargs % 2)
    on = run(name, "--resume", best.parent, *more, directory=tmp_path)
    assert on["summary"]["best_eval_return"] == 2


@pytest.mark.parametrize("name", [*SCRIPTS, *TWINS])
def test_sps_leaves_out_evaluations_and_what_is_before_learning(name, monkeypatch):
    """By a clock that ticks with each step of an environment: once, or before learning ten times."""
    ticks, step, games_step = [], Balance.step, ScriptedGames.step
    before_learning = 0 if name in ON_POLICY else 100

    def ticking(self, action):
        ticks.append(10 if len(ticks) < before_learning else 1)
        return step(self, action)

    def ticking_games(self, actions):
        ticks.extend(1 for row in self.step_ahead if row.valid)
        return games_step(self, actions)

    monkeypatch.setattr(Balance, "step", ticking)
    monkeypatch.setattr(ScriptedGames, "step", ticking_games)
    monkeypatch.setattr("time.perf_counter", lambda: sum(ticks))
    logged = train(name, *EVERY)["logged"]
    rates = [rate for entry, rate in logged["charts/SPS"] if entry > 100]
    assert len(logged["charts/eval_return"]) >= 2 and len(rates) >= 2
    assert rates == pytest.approx([1] * len(rates))


def test_a_mean_that_is_not_finite_is_never_the_best(tmp_path, monkeypatch):
    """By environments, but for the one to learn in, whose only step has such a reward."""
    step, means, saved, save = Balance.step, [math.nan, 3, math.nan, math.inf, 2, 5], [], torch.save
    made = iter([None, *means, 0])  # the last is evaluated in at the end

    def step_of_the_next(self, action):
        if not hasattr(self, "mean"):
            self.mean = next(made)
        return (
            step(self, action) if self.mean is None else (np.zeros(2, np.float32), self.mean, True, False, {})
        )

    monkeypatch.setattr(Balance, "step", step_of_the_next)
    monkeypatch.setattr(
        "torch.save", lambda data, file: saved.append(data["progress"]["best_eval"]) or save(data, file)
    )
    result = train(TD3, "--eval-every", 50, "--eval-episodes", 1, "--save-model", directory=tmp_path)
    logged = [mean for _, mean in result["logged"]["charts/eval_return"]]
    assert logged == pytest.approx(means, nan_ok=True)
    assert saved == [3, 5, 5] and result["summary"]["best_eval_return"] == 5
