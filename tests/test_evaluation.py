"""Evaluation along the way: it changes no number of the run, keeps the best agent, and takes no time."""

import conftest
import numpy as np
import pytest
import torch
from conftest import ATARI, ON_POLICY, SAVED, SCRIPTS, SHORT, assert_same_numbers
from envs import Balance, ScriptedGames

TD3 = "td3_continuous_action_torchcompile"
# Twins, whose loops differ from the eager scripts' in a few tagged lines.
OTHERS = [TD3, "dqn_torchcompile", "ppo_torchcompile"]
EVERY = ("--eval-every", 100, "--eval-episodes", 2)


def train(name: str, *args, **options) -> dict:
    """Train for some 300 steps, on a pole, whose returns depend on the agent; Atari's in scripted games."""
    if name in ATARI:
        return conftest.play(name, *SHORT[name], *args, **options)
    frequent = () if name in ON_POLICY else ("--log-every", 50)
    return conftest.run(name, *conftest.world(name, "Balance"), *SHORT[name], *frequent, *args, **options)


@pytest.mark.parametrize("name", [*SCRIPTS, *OTHERS])
def test_evaluation_changes_no_number_and_the_best_agent_is_kept(name, tmp_path):
    """Of a compiled run neither: tests/test_twins.py evaluates all of them."""
    without = train(name)
    evaluated = train(name, *EVERY, *SAVED, directory=tmp_path)
    assert_same_numbers(without, evaluated, rtol=0, atol=0)
    steps, means = zip(*evaluated["logged"]["charts/eval_return"], strict=True)
    assert len({*steps}) == len(steps) >= 2 and steps[-1] == evaluated["global_step"]  # one is at the end
    assert np.mean(evaluated["eval_returns"]) == pytest.approx(means[-1])
    [best] = tmp_path.glob("runs/*/best.pt")
    assert evaluated["best_eval"] == pytest.approx(max(means))
    returns = conftest.evaluation(name, best, "--eval-episodes", 2)["eval_returns"]
    assert np.mean(returns) == pytest.approx(max(means), rel=1e-5)
    # The best of a run that goes on is that of all of it.
    file = best.with_name("checkpoint.pt")
    kept = torch.load(file, weights_only=True)
    kept["progress"][-1] = 1e9
    torch.save(kept, file)
    content = best.read_bytes()
    on = train(name, *EVERY, "--resume", best.parent, "--total-timesteps", 500, directory=tmp_path)
    assert on["logged"]["charts/eval_return"][0][0] > steps[-1]
    assert on["best_eval"] == 1e9 and best.read_bytes() == content


@pytest.mark.parametrize("name", [*SCRIPTS, *OTHERS])
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


@pytest.mark.parametrize("fault", ["observation", "reward"])
@pytest.mark.parametrize("name", [*SCRIPTS[:1], "ppo_continuous_action", "ppo_continuous_action_lstm", "dqn"])
def test_an_evaluation_that_is_not_finite_ends_the_run_and_is_no_best(name, fault, tmp_path, monkeypatch):
    """By environments, but for those to learn in, of which each gives no number in its third step."""
    step, made, learn_in = Balance.step, [], 2 if name in ON_POLICY else 1

    def step_of_the_next(self, action):
        if self not in made:
            made.append(self)
        obs, reward, *ends = step(self, action)
        if made.index(self) >= learn_in and self.left == 97:
            obs, reward = (obs * np.nan, reward) if fault == "observation" else (obs, np.nan)
        return obs, reward, *ends

    monkeypatch.setattr(Balance, "step", step_of_the_next)
    with pytest.raises(SystemExit, match=r"^an evaluation is not finite$"):
        train(name, *EVERY, *SAVED, directory=tmp_path)
    assert not [*tmp_path.glob("runs/*/*.pt")]
