"""Many agents at once are the agents of as many runs: their numbers, their folders, and nobody else's."""

import json
import os
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path
from statistics import NormalDist
from unittest.mock import Mock, patch

import numpy as np
import psutil
import pytest
import torch
from capture import captured_on_cpu
from conftest import SEEDS, checkpoints, curves, load, numbers, play, run, start
from envs import Faulty

REACHER = ("--env-id", "Reacher-v4", "--batch-size", 32, "--learning-starts", 64, "--total-timesteps", 120)
REACHER += ("--log-every", 20, "--eval-episodes", 2)
SHORT = ("--learning-starts", 50, "--batch-size", 8, "--total-timesteps", 110)
FAULTY = ("--env-id", "envs:Faulty-v0", "--learning-starts", 10, "--batch-size", 8, "--log-every", 2)

every = pytest.mark.parametrize("name", SEEDS)
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # to the bit, where nothing else is said


def of_agent(result: dict, agent: int) -> dict[str, torch.Tensor]:
    """What an agent has computed, under the names that `numbers` gives to what a run of one has."""
    found = {f"losses.{name}": loss[agent] for name, loss in result["losses"].items()}
    found |= {"buffer": result["buffer"][agent], "returns": torch.tensor(result["returns"][agent])}
    for name, item in result["states"][agent].items():
        values = dict(item.state_dict())
        if "alpha" in name:  # one number, where a run of one has a tensor without a dimension and a name
            values = {key if key in "0step" else f"{key}.0": value.squeeze() for key, value in values.items()}
        if "optimizer" in name:
            step, names = values.pop("step"), [key.partition(".")[2] for key in values if "avg." in key]
            values |= {f"step.{key}": step for key in names}
        found |= {f"{name}.{key}": value.detach() for key, value in values.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def without(found: dict[str, torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    """All but what has one of these parts in its name."""
    return {name: tensor for name, tensor in found.items() if not any(part in name for part in parts)}


class Draws:
    """Numbers in place of random ones, for each call and agent some: (agents, *shape)."""

    def __init__(self, *agents: int):
        self.calls, self.agents = count(), agents

    def uniform(self, *shape: int, kind: str = "random") -> torch.Tensor:
        call = next(self.calls)
        rngs = [np.random.default_rng([call, agent]) for agent in self.agents]
        return torch.from_numpy(np.stack([getattr(rng, kind)(shape) for rng in rngs]))

    def normal(self, *shape: int) -> torch.Tensor:
        return self.uniform(*shape, kind="standard_normal").float()


# ---- Numbers -----------------------------------------------------------------------------------------------
@every
def test_an_agent_begins_as_a_run_of_its_own_and_learns_as_that_does(name):
    """The networks, and what is seen and done at random, to the bit; then gradient steps by like draws."""
    options = ("--num-envs", 2, "--buffer-size", 500, "--batch-size", 16, "--updates-per-step", 0)
    options += ("--learning-starts", 88, "--total-timesteps", 92)
    together, twin = play(name, *options, "--seeds", 5, 1, 3), name.replace("_seeds", "_torchcompile")
    alone = [play(twin, *options, "--seed", seed) for seed in (5, 1, 3)]
    assert together["updates"] == 0
    assert together["drawn"][1:] == np.transpose([single["env_seeds"] for single in alone]).tolist()
    assert (together["streams"] >> 31).tolist() == together["drawn"][0]  # 2^31 numbers apart at least
    for agent, single in enumerate(alone):
        began, expected = of_agent(together, agent), numbers(single)
        assert_equal(without(began, "buffer", "optimizer"), without(expected, "buffer", "optimizer"))
        assert_equal(began["buffer"][:88], expected["buffer"][:88])
        single["buffer"].copy_(began["buffer"])  # with the steps of the policy, which draws other numbers
    assert not torch.equal(together["buffer"][0], together["buffer"][1])

    kinds = sorted((kind for kind in together["kinds"] if kind[-1] or len(kind) == 1), reverse=True)
    for_all, for_each = Draws(0, 1, 2), [Draws(agent) for agent in range(3)]
    for kind in (*kinds, *kinds):  # first with the actor
        with patch.dict(together["update"].__globals__, uniform=for_all.uniform, normal=for_all.normal):
            together["update"](*kind)
        for agent, (single, draws) in enumerate(zip(alone, for_each, strict=True)):
            indices = Mock(side_effect=lambda *_, draws=draws, **__: (92 * draws.uniform(16)[0]).long())
            noise = Mock(side_effect=lambda like, draws=draws: draws.normal(*like.shape)[0])
            with patch("torch.randint", indices), patch("torch.randn_like", noise):
                single["update"](*kind)
            found, expected = of_agent(together, agent), numbers(single)
            for part in ("losses.", "optimizer."):
                own = [{key: value for key, value in of.items() if part in key} for of in (found, expected)]
                assert_equal(*own, rtol=1e-3, atol=1e-5)
            # Adam's first steps divide by gradients of which some are little more than rounding.
            for key, value in without(expected, "losses.", "optimizer.").items():
                assert (found[key] - value).abs().mean() < 2e-5, key
    assert len({next(draws.calls) for draws in (for_all, *for_each)}) == 1  # all have drawn as often


@every
def test_random_numbers_are_splitmix64_and_normal(name):
    def splitmix64(state: int) -> int:
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    begins, (uniform, normal) = (0, 2**40, 2**62), (load(name)[kind] for kind in ("uniform", "normal"))
    with patch.dict(uniform.__globals__, streams=torch.tensor(begins)):
        drawn, sample = uniform(3, 1).squeeze(2), normal(1000)
    indices = [[begin + 1 + step for step in range(1003)] for begin in begins]
    bits = [[splitmix64(index * 0x9E3779B97F4A7C15 % 2**64) for index in row] for row in indices]
    assert bits[0][0] == 0xE220A8397B1DCDAF  # the first number from the seed 0
    expected = (torch.tensor([[z >> 12 for z in row] for row in bits]).double() + 0.5) * 2.0**-52
    assert_equal(drawn, expected[:, :3])
    assert_equal(sample, expected[:, 3:].clone().apply_(NormalDist().inv_cdf).float(), rtol=1e-5, atol=1e-6)


@every
def test_flags_change_no_number(name, tmp_path):
    """Compiled, and captured on the CPU: random numbers come from the counter in either case."""
    args = ("--num-seeds", 2, "--num-envs", 2, *SHORT)
    expected = play(name, *args, "--save-model", directory=tmp_path)
    assert expected["updates"] == 58
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = play(name, *args, "--compile")
    with captured_on_cpu():
        captured = play(name, *args, "--cudagraphs", cuda=True)
        resume = ("--resume", *sorted(tmp_path.glob("runs/*/110.pt")), "--total-timesteps", 130)
        on = play(name, *args, "--cudagraphs", *resume, cuda=True)
    assert captured["cudagraphs"] and on["updates"] == 78
    for agent in range(2):
        assert_equal(of_agent(captured, agent), of_agent(expected, agent), rtol=1e-5, atol=1e-6)
        assert_equal(of_agent(compiled, agent), of_agent(expected, agent), rtol=1e-3, atol=1e-3)


@every
def test_agents_do_not_depend_on_each_other_nor_on_one_that_is_lost(name, monkeypatch, tmp_path, capfd):
    """No bit of them changes with the number and seeds of others, nor where the reward of one is infinite."""

    def train(fault: str | None, steps: int, *args) -> dict:
        monkeypatch.setattr(Faulty, "made", count())
        monkeypatch.setattr(Faulty, "fault", fault)
        return run(name, *FAULTY, "--total-timesteps", steps, *args, directory=tmp_path)

    whole = train(None, 60, "--seeds", 1, 2, 3)
    pair = train(None, 60, "--seeds", 9, 3)
    assert whole["updates"] == 49
    assert_equal(of_agent(pair, 1), of_agent(whole, 2))
    for key in ("actor.fc1.weight", "buffer"):
        assert not torch.equal(of_agent(pair, 0)[key], of_agent(whole, 0)[key])

    capfd.readouterr()
    options = ("--seeds", 1, 2, 3, "--checkpoint-every", 2, "--eval-episodes", 2)
    broken = train("reward", 60, *options)  # of the second agent, in the sixth step
    told = capfd.readouterr()
    for agent in (0, 2):
        assert_equal(of_agent(broken, agent), of_agent(whole, agent))
    assert not of_agent(broken, 1)["critic.fc1.weight"].isfinite().all()
    reason = "a row is not finite at step 6"
    assert [line for line in told.err.splitlines() if "lost" in line] == [f"seed 2 is lost: {reason}"]
    summary = json.loads(told.out)
    assert summary["lost_seeds"] == {"2": reason}
    assert summary["episodic_return"] == summary["episodic_return_10"] == [3, None, 3]
    assert (summary["episodes"], summary["eval_returns"]) == ([20, 20, 20], [[3, 3], [], [3, 3]])

    # What it has left is from before the loss; the others go on without it, and all are evaluated.
    folders = [tmp_path / folder for folder in broken["folders"]]
    saved = [sorted(int(path.stem) for path in folder.glob("*.pt")) for folder in folders]
    assert saved == [[58, 60], [2, 4], [58, 60]]
    assert train(None, 70, "--seeds", 1, 3, "--resume", folders[0], folders[2])["updates"] == 59
    evaluated = train(None, 60, "--eval-episodes", 1, "--seeds", 1, 2, 3, "--evaluate", *folders)
    assert evaluated["eval_returns"] == [[3], [3], [3]]


@every
def test_a_run_ends_where_all_agents_are_lost(name, capfd):
    rates = ("--learning-rate", "1e38") if "td3" in name else ("--q-lr", "1e38", "--policy-lr", "1e38")
    with pytest.raises(SystemExit, match=f"^{name}.py: error: all agents are lost$"):  # status 1
        play(name, *SHORT, "--num-seeds", 2, "--log-every", 20, *rates)
    told = [line for line in capfd.readouterr().err.splitlines() if "lost" in line]
    assert [line.partition(":")[0] for line in told] == ["seed 1 is lost", "seed 2 is lost"]
    assert all(f"{name}.py: error: qf_loss is " in line and line.endswith(" at step 60") for line in told)


# ---- Folders and checkpoints -------------------------------------------------------------------------------
@every
def test_an_agent_has_folder_figures_and_checkpoints_as_a_run_of_one(name, tmp_path, capfd):
    together = run(name, *REACHER, "--checkpoint-every", 60, "--seeds", 3, 8, directory=tmp_path)
    folders, summary = [tmp_path / folder for folder in together["folders"]], together["summary"]
    assert (summary["seeds"], summary["lost_seeds"]) == ((3, 8), {})
    assert (summary["total_timesteps"], summary["updates"]) == (120, 55)
    assert summary["eval_returns"][0] != pytest.approx(summary["eval_returns"][1], rel=1e-2)
    assert all(writer.file_writer is None for writer in together["writers"])  # closed: nothing is left out
    siblings = [name.replace("_seeds", "_torchcompile"), name.removesuffix("_seeds")]
    for agent, (seed, script) in enumerate(zip((3, 8), siblings, strict=True)):
        assert f"Reacher-v4__{name}__{seed}__" in folders[agent].name
        alone = run(script, *REACHER, "--save-model", "--seed", seed, directory=tmp_path)
        logged, expected = curves(folders[agent]), curves(tmp_path / alone["folder"])
        assert logged.keys() == expected.keys()
        for tag, points in logged.items():
            assert [step for step, _ in points] == [step for step, _ in expected[tag]]
        returns = [value for _, value in logged["charts/episodic_return"]]
        assert returns == pytest.approx(together["returns"][agent])
        assert summary["episodic_return"][agent] == pytest.approx(np.mean(returns))
        assert summary["episodes"][agent] == len(returns) == 2
        # Each evaluates what the other has trained.
        evaluate = ("--env-id", "Reacher-v4", "--eval-episodes", 2, "--seed", seed, "--evaluate")
        for path in (folders[agent], folders[agent] / "120.pt"):
            own = summary["eval_returns"][agent]
            assert run(script, *evaluate, path)["eval_returns"] == pytest.approx(own, rel=1e-4)
        evaluated = run(name, *evaluate, tmp_path / alone["folder"], "--num-seeds", 1)
        assert evaluated["eval_returns"][0] == pytest.approx(alone["eval_returns"], rel=1e-4)

    def go_on(steps: int, *paths: Path, seeds: tuple[int, ...] = (3, 8)) -> dict:
        return run(name, *REACHER, "--total-timesteps", steps, "--seeds", *seeds, "--resume", *paths)

    loaded, first, second = (go_on(steps, *folders) for steps in (120, 140, 140))
    for key in ("updates", "updates_due", "returns"):
        assert loaded[key] == together[key]
    assert first["updates"] == 75
    for agent in range(2):
        assert_equal(*(without(of_agent(result, agent), "losses.") for result in (loaded, together)))
        assert_equal(of_agent(first, agent), of_agent(second, agent))

    (folders[1] / "120.pt").unlink()  # as if the run had been killed before it was written
    mixed = "--resume takes files of one step: the newest are of [120, 60]"
    for seeds, told in (((3, 8), mixed), ((8, 3), "120.pt is of seed 3, not 8")):
        with pytest.raises(SystemExit, match="2"):
            go_on(140, *folders, seeds=seeds)
        assert told in capfd.readouterr().err.splitlines()[-1]
    assert go_on(140, *(folder / "60.pt" for folder in folders))["updates"] == 75


REFUSED = {
    "--seeds 1 2 1": "--seeds takes different ones, and --resume and --evaluate a path for each",
    "--num-seeds 2 --resume a": "--seeds takes different ones, and --resume and --evaluate a path for each",
    "--seeds -1": "--seeds: Input should be greater than or equal to 0, got -1",
    "--num-seeds 0": "--num-seeds: Input should be greater than or equal to 1, got 0",
    "--track": "--track takes one agent a process",
    "--env-workers --capture-video": "--track takes one agent a process, and --env-workers and --cap",
}


@pytest.mark.parametrize("args", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(args, refusal):
    assert refusal(SEEDS[0], play, *args.split()).startswith(REFUSED[args])


# ---- Environments in processes of their own ----------------------------------------------------------------
@every
def test_environments_in_processes_of_their_own_compute_the_same(name):
    args = ("--env-id", "InvertedPendulum-v4", *SHORT, "--num-seeds", "2", "--num-envs", "2")
    in_turn, in_processes = (run(name, *args, *workers) for workers in ((), ("--env-workers",)))
    for agent in range(2):
        assert_equal(of_agent(in_processes, agent), of_agent(in_turn, agent))
        assert len(in_turn["returns"][agent]) > 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_a_checkpoint_and_no_process(number, tmp_path):
    """A terminal and `timeout` send it to all processes of the group; kill -9 comes to the run alone."""
    options = ("--learning-starts", "50", "--batch-size", "8", "--num-seeds", "2", "--env-workers")
    process = start(SEEDS[-1], tmp_path, *options, "--checkpoint-every", "100", start_new_session=True)
    while len(checkpoints(tmp_path)) < 2 and process.poll() is None:
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    killed = number == signal.SIGKILL
    (os.kill if killed else os.killpg)(process.pid, number)
    output, error = process.communicate(timeout=300)
    assert process.returncode == (-number if killed else 128 + number), error
    if not killed:
        assert "Traceback" not in error
        summary = json.loads(output)
        assert len(summary["episodic_return"]) == 2
        assert [int(path.stem) for path in checkpoints(tmp_path)[-2:]] == [summary["total_timesteps"]] * 2
    _, alive = psutil.wait_procs(workers, timeout=100)
    assert not alive
