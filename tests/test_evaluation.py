"""Evaluation along the way: it changes no number of the run, keeps the best agent, and takes no time."""

from contextlib import AbstractContextManager, ExitStack
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import (
    ATARI,
    MEMORY,
    ON_POLICY,
    SAVED,
    SCRIPTS,
    SHORT,
    assert_same_numbers,
    empty_memory,
    evaluation,
    load,
    play,
    run,
    takes,
    world,
)
from envs import Balance, ScriptedGames

EVERY = ("--eval-every", 100, "--eval-episodes", 2)


def train(name: str, *args, **options) -> dict:
    """Train for some 300 steps, on a pole, whose returns depend on the agent; Atari's in scripted games."""
    if name in ATARI:
        return play(name, *SHORT[name], *args, **options)
    frequent = () if name in ON_POLICY else ("--log-every", 50)
    return run(name, *world(name, "Balance"), *SHORT[name], *frequent, *args, **options)


def ticking(before_learning: int) -> AbstractContextManager:
    """Have a clock that ticks with each step of an environment: once, or before learning ten times."""
    ticks, step, games_step = [], Balance.step, ScriptedGames.step

    def step_and_tick(self, action):
        ticks.append(10 if len(ticks) < before_learning else 1)
        return step(self, action)

    def step_games_and_tick(self, actions):
        ticks.extend(1 for row in self.step_ahead if row.valid)
        return games_step(self, actions)

    stack = ExitStack()
    stack.enter_context(patch.object(Balance, "step", step_and_tick))
    stack.enter_context(patch.object(ScriptedGames, "step", step_games_and_tick))
    stack.enter_context(patch("time.perf_counter", lambda: sum(ticks)))
    return stack


@pytest.mark.parametrize("name", SCRIPTS)
def test_evaluation_changes_no_number_and_takes_no_time_and_the_best_agent_is_kept(name, tmp_path):
    """SPS leaves out what is before learning, too. Of twins, test_twins.py compares runs that evaluate."""
    without = train(name)
    with ticking(0 if name in ON_POLICY else 100):
        evaluated = train(name, *EVERY, *SAVED, directory=tmp_path)
    assert_same_numbers(without, evaluated, rtol=0, atol=0)
    speeds = [speed for step, speed in evaluated["logged"]["charts/SPS"] if step > 100]
    assert len(speeds) >= 2 and speeds == pytest.approx([1] * len(speeds))
    steps, means = zip(*evaluated["logged"]["charts/eval_return"], strict=True)
    assert len({*steps}) == len(steps) >= 2 and steps[-1] == evaluated["global_step"]  # one is at the end
    assert np.mean(evaluated["eval_returns"]) == pytest.approx(means[-1])
    [best] = tmp_path.glob("runs/*/best.pt")
    assert torch.load(best)["score"] == pytest.approx(max(means))
    more = ("--buffer-size", 10**13) if takes(name, "buffer_size") else ()  # nobody has the memory
    returns = evaluation(name, best, "--eval-episodes", 2, *more)["eval_returns"]
    assert np.mean(returns) == pytest.approx(max(means), rel=1e-5)
    # The best of a run that goes on is that of all of it.
    torch.save(torch.load(best) | {"score": 1e9}, best)
    content = best.read_bytes()
    on = train(name, *EVERY, "--resume", best.parent, "--total-timesteps", 400, directory=tmp_path)
    assert on["logged"]["charts/eval_return"][0][0] > steps[-1]
    assert best.read_bytes() == content


@pytest.mark.parametrize("fault", ["observation", "reward"])
@pytest.mark.parametrize("name", ["sac_continuous_action", "ppo_continuous_action_lstm"])
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
        train(name, *EVERY, "--checkpoint-every", 100, directory=tmp_path)
    assert [file.name for file in tmp_path.glob("runs/*/*.pt")] == ["checkpoint.pt"]  # of before it


@pytest.mark.parametrize("name", MEMORY)
def test_a_memory_that_is_no_number_does_not_outlast_its_episode(name):
    script, device = load(name), torch.device("cpu")
    agent = script["Agent"](3, device) if name in ATARI else script["Agent"](5, 3, device)
    obs = torch.zeros(4, 2, 84, 84, 1, dtype=torch.uint8) if name in ATARI else torch.randn(4, 2, 5)
    keep, memory = torch.ones(4, 2, 1), empty_memory(agent, 2)
    keep[0], memory[..., :1] = 0, torch.nan
    with torch.no_grad():
        assert all(part.isfinite().all() for part in agent(obs, keep, memory))
        keep[0, 1] = 1
        assert any(part.isnan().any() for part in agent(obs, keep, memory.fill_(torch.nan)))
