"""Many agents at once are the agents of as many runs: their numbers, their folders, and nobody else's."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import NormalDist
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from capture import captured_on_cpu
from conftest import SEEDS, checkpoints, curves, instances, load, play, rates, run, start
from envs import Faulty

REACHER = ("--env-id", "Reacher-v4", "--batch-size", 32, "--learning-starts", 64, "--total-timesteps", 120)
REACHER += ("--log-every", 20, "--eval-episodes", 2)
SHORT = ("--learning-starts", 50, "--batch-size", 8, "--total-timesteps", 110)
FAULTY = ("--env-id", "envs:Faulty-v0", "--learning-starts", 10, "--batch-size", 8, "--log-every", 2)

every = pytest.mark.parametrize("name", SEEDS)
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # to the bit, where nothing else is said


def of_agent(result: dict, agent: int | None = None) -> dict[str, torch.Tensor]:
    """What an agent has computed, or a run of one."""
    one = agent is None
    found = {f"losses.{name}": loss if one else loss[agent] for name, loss in result["losses"].items()}
    found["buffer"] = result["buffer"] if one else result["buffer"][agent]
    found["returns"] = torch.tensor(result["returns"] if one else result["returns"][agent])
    for name, item in (result["state"] if one else result["states"][agent]).items():
        # A number may have dimensions of one.
        found |= {f"{name}.{key}": value.detach().flatten() for key, value in item.state_dict().items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def first_seeds(step: int, num_envs: int, *seeds: int) -> list[int]:
    """What agents draw first from their seeds, where they begin or go on."""
    return [int(np.random.SeedSequence([seed, step]).generate_state(1 + num_envs)[0]) for seed in seeds]


# ---- Numbers -----------------------------------------------------------------------------------------------
@every
def test_an_agent_begins_as_a_run_of_its_own_and_learns_as_that_does(name):
    """The networks and what is seen and done at random, to the bit; by like draws, actions and gradients."""
    options = ("--num-envs", 2, "--buffer-size", 500, "--batch-size", 16, "--updates-per-step", 0)
    options += ("--learning-starts", 88, "--total-timesteps", 92)
    together, twin = play(name, *options, "--seeds", 5, 1, 3), name.replace("_seeds", "_torchcompile")
    alone = [play(twin, *options, "--seed", seed) for seed in (5, 1, 3)]
    assert together["updates"] == 0
    seeds = [env.seeds[0] for result in (together, *alone) for env in instances(result)]
    assert seeds[:6] == seeds[6:]
    # 2^31 numbers apart at least.
    assert (together["streams"] >> 31).tolist() == first_seeds(0, 2, 5, 1, 3)
    for agent, single in enumerate(alone):
        began, expected = of_agent(together, agent), of_agent(single)
        assert_equal(began["buffer"][:88], expected.pop("buffer")[:88])
        assert_equal({key: began[key] for key in expected}, expected)
        single["buffer"].copy_(began["buffer"])  # with the steps of the policy, which draws other numbers
    assert not torch.equal(together["buffer"][0], together["buffer"][1])

    script, streams = together["act"].__globals__, together["streams"].clone()
    uniform, normal = script["uniform"], script["normal"]

    @contextmanager
    def drawing_like(agent: int) -> Iterator[None]:
        """Let the run of one draw what an agent does."""
        with (
            patch.dict(script, streams=streams[agent : agent + 1]),
            patch("torch.randint", lambda *_, **__: (92 * uniform(16)[0]).long()),
            patch("torch.randn_like", lambda like: normal(*like.shape)[0]),
        ):
            yield

    obs = torch.randn(3, 2, 4)
    actions = together["act"](obs.flatten(0, 1)).view(3, 2, 2)
    for agent, single in enumerate(alone):
        with drawing_like(agent):
            assert_equal(actions[agent], single["act"](obs[agent]), rtol=1e-5, atol=1e-6)
    kinds = sorted((kind for kind in together["kinds"] if kind[-1] or len(kind) == 1), reverse=True)
    for kind in (*kinds, *kinds):  # first with the actor
        together["update"](*kind)
        for agent, single in enumerate(alone):
            with drawing_like(agent):
                single["update"](*kind)
            found = of_agent(together, agent)
            for key, expected in of_agent(single).items():
                if key.startswith("losses.") or "optimizer." in key:
                    assert_equal(found[key], expected, rtol=1e-3, atol=1e-5)
                else:  # Adam's first steps divide by gradients of which some are little more than rounding
                    assert (found[key] - expected).abs().mean() < 2e-5, key
    assert_equal(together["streams"], streams)  # all have drawn as often


@every
def test_random_numbers_are_splitmix64_and_normal(name):
    def splitmix64(index: int) -> int:
        z = index * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    begins, (uniform, normal) = (0, 2**40, 2**62), (load(name)[kind] for kind in ("uniform", "normal"))
    with patch.dict(uniform.__globals__, streams=torch.tensor(begins)):
        drawn, sample = uniform(3, 1).squeeze(2), normal(1000)
    bits = [[splitmix64(begin + step) for step in range(1, 1004)] for begin in begins]
    assert bits[0][0] == 0xE220A8397B1DCDAF  # the first number from the seed 0
    expected = (torch.tensor([[z >> 12 for z in row] for row in bits]).double() + 0.5) * 2.0**-52
    assert_equal(drawn, expected[:, :3])
    assert_equal(sample, expected[:, 3:].clone().apply_(NormalDist().inv_cdf).float(), rtol=1e-5, atol=1e-6)


@every
def test_flags_change_no_number(name, tmp_path):
    """Environments in processes of their own, compiled, captured on the CPU: all draw from the counter."""
    args = ("--num-seeds", 2, "--num-envs", 2, *SHORT)
    expected = play(name, *args, "--save-model", directory=tmp_path)
    assert expected["updates"] == 58
    in_processes = play(name, *args, "--env-workers")
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = play(name, *args, "--compile")
    with captured_on_cpu():
        captured = play(name, *args, "--cudagraphs", cuda=True)
        resume = ("--resume", *sorted(tmp_path.glob("runs/*/110.pt")), "--total-timesteps", 130)
        on = play(name, *args, "--cudagraphs", *resume, cuda=True)
    assert captured["summary"]["cudagraphs"] and on["updates"] == 78
    eager_on = play(name, *args, *resume)
    for agent in range(2):
        assert_equal(of_agent(in_processes, agent), of_agent(expected, agent))
        assert_equal(of_agent(captured, agent), of_agent(expected, agent), rtol=1e-5, atol=1e-6)
        assert_equal(of_agent(on, agent), of_agent(eager_on, agent), rtol=1e-5, atol=1e-6)
        assert_equal(of_agent(compiled, agent), of_agent(expected, agent), rtol=1e-3, atol=1e-3)


@every
def test_agents_do_not_depend_on_each_other_nor_on_one_that_is_lost(name, monkeypatch, tmp_path, capfd):
    """Nothing changes but rounding with their number, and no bit where the reward of one is infinite."""

    def train(fault: str | None, steps: int, *args) -> dict:
        monkeypatch.setattr(Faulty, "made", count())
        monkeypatch.setattr(Faulty, "fault", fault)
        return run(name, *FAULTY, "--total-timesteps", steps, *args, directory=tmp_path)

    whole, pair = train(None, 60, "--seeds", 1, 2, 3), train(None, 60, "--seeds", 3, 9)
    assert whole["updates"] == 49
    assert_equal(of_agent(pair, 0), of_agent(whole, 2), rtol=1e-4, atol=1e-4)

    capfd.readouterr()
    options = ("--seeds", 1, 2, 3, "--checkpoint-every", 2, "--eval-episodes", 2)
    broken = train("reward", 60, *options)  # of the second agent, in the sixth step
    told, reason = capfd.readouterr(), "a row is not finite at step 6"
    for agent in (0, 2):
        assert_equal(of_agent(broken, agent), of_agent(whole, agent))
    assert not of_agent(broken, 1)["qf1.fc1.weight"].isfinite().all()
    assert [line for line in told.err.splitlines() if "lost" in line] == [f"seed 2 is lost: {reason}"]
    summary = json.loads(told.out)
    assert summary["lost_seeds"] == {"2": reason}
    assert summary["episodic_return"] == summary["episodic_return_10"] == [3, None, 3]
    assert (summary["episodes"], summary["eval_returns"]) == ([20, 2, 20], [[3, 3], [], [3, 3]])

    # What it has left is from before the loss; the others go on without it, and all are evaluated.
    folders = [tmp_path / folder for folder in broken["folders"]]
    saved = [sorted(int(path.stem) for path in folder.glob("*.pt")) for folder in folders]
    assert saved == [[58, 60], [2, 4], [58, 60]]
    assert [curves(folder)["charts/episodic_return"][-1][0] for folder in folders] == [60, 6, 60]
    assert train(None, 70, "--resume", folders[0], folders[2])["updates"] == 59
    evaluated = train(None, 60, "--eval-episodes", 1, "--evaluate", *folders)
    assert evaluated["summary"]["eval_returns"] == [[3], [3], [3]]


@every
def test_a_run_ends_where_all_agents_are_lost(name, capfd):
    with pytest.raises(SystemExit, match=f"^{name}.py: error: all agents are lost$"):  # status 1
        play(name, *SHORT, "--num-seeds", 2, "--log-every", 20, *rates(name, 1e38))
    told = [line for line in capfd.readouterr().err.splitlines() if "lost" in line]
    assert [line.partition(":")[0] for line in told] == ["seed 1 is lost", "seed 2 is lost"]
    assert all(re.search(r"lost: \w+ is (nan|-?inf) at step 60$", line) for line in told)


# ---- Folders and checkpoints -------------------------------------------------------------------------------
@every
def test_an_agent_has_folder_figures_and_checkpoints_as_a_run_of_one(name, tmp_path, capfd):
    together = run(name, *REACHER, "--checkpoint-every", 60, "--seeds", 3, 8, directory=tmp_path)
    folders, summary = [tmp_path / folder for folder in together["folders"]], together["summary"]
    assert (summary["seeds"], summary["lost_seeds"]) == ((3, 8), {})
    assert summary["folder"] == [*map(str, together["folders"])]
    assert (summary["total_timesteps"], summary["updates"]) == (120, 55)
    assert all(writer.file_writer is None for writer in together["writers"])  # closed: nothing is left out
    siblings = [name.replace("_seeds", "_torchcompile"), name.removesuffix("_seeds")]
    for agent, (seed, script) in enumerate(zip((3, 8), siblings, strict=True)):
        assert f"Reacher-v4__{name}__{seed}__" in folders[agent].name
        alone = run(script, *REACHER, "--save-model", "--seed", seed, directory=tmp_path)
        logs = [curves(folder) for folder in (folders[agent], tmp_path / alone["folder"])]
        own, other = ({tag: [step for step, _ in points] for tag, points in log.items()} for log in logs)
        assert own == other
        returns = [value for _, value in logs[0]["charts/episodic_return"]]
        assert returns == pytest.approx(together["returns"][agent])
        assert summary["episodic_return"][agent] == pytest.approx(np.mean(returns))
        assert summary["episodes"][agent] == len(returns) == 2
        # Each evaluates what the other has trained.
        evaluate = ("--env-id", "Reacher-v4", "--eval-episodes", 2, "--seed", seed, "--evaluate")
        evaluated = run(script, *evaluate, folders[agent])
        expected = pytest.approx(summary["eval_returns"][agent], rel=1e-4)
        assert evaluated["summary"]["eval_returns"] == expected
        # Also twice, in the episodes of --seed.
        evaluate = (*evaluate[:4], "--seed", 77, "--evaluate")
        expected = run(script, *evaluate, tmp_path / alone["folder"])["summary"]["eval_returns"]
        assert expected != pytest.approx(alone["summary"]["eval_returns"], rel=1e-4)
        evaluated = run(name, *evaluate, *2 * [tmp_path / alone["folder"]], "--num-seeds", 2)
        assert evaluated["summary"]["eval_returns"] == 2 * [pytest.approx(expected, rel=1e-4)]
        assert evaluated["summary"]["eval_success_rate"] == [None, None]

    loaded = run(name, "--resume", *folders)
    for key in ("updates", "updates_due", "returns"):
        assert loaded[key] == together[key]
    for agent in range(2):
        assert_equal(of_agent(loaded | {"losses": together["losses"]}, agent), of_agent(together, agent))
    assert (loaded["streams"] >> 31).tolist() == first_seeds(120, 1, 3, 8)
    longer = ("--total-timesteps", 140, "--resume")
    (folders[1] / "120.pt").unlink()  # as if the run had been killed before it was written
    older = [folder / "60.pt" for folder in folders]
    for args, told in ((folders, "checkpoints of one step"), ((*older, "--seeds", 8, 3), "(3, 8)")):
        with pytest.raises(SystemExit, match="2"):
            run(name, *longer, *args)
        assert told in capfd.readouterr().err.splitlines()[-1]
    logs = [curves(folder) for folder in folders]
    run(name, "--total-timesteps", 60, "--resume", *older)  # without a step left it drops no entry
    assert [curves(folder) for folder in folders] == logs
    assert run(name, *longer, *older)["updates"] == 75


REFUSED = ["--seeds 1 2 1", "--seeds -1", "--num-seeds 0", "--track"]


@pytest.mark.parametrize("args", [*REFUSED, "--env-workers --capture-video"])
def test_what_cannot_work_is_refused_by_its_name(args, refusal):
    assert args.split()[0] in refusal(SEEDS[0], play, *args.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_a_checkpoint_and_no_process(number, tmp_path):
    """To the run, and to its environments in processes of their own, to which kill -9 does not come."""
    options = ("--learning-starts", "50", "--batch-size", "8", "--num-seeds", "2", "--env-workers")
    process = start(SEEDS[-1], tmp_path, *options, "--checkpoint-every", "100", start_new_session=True)
    while len(checkpoints(tmp_path)) < 2 and process.poll() is None:
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    for worker in workers:  # which leave all signals to the run
        blocked = int(re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{worker.pid}/status").read_text())[1], 16)
        others = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
        assert all(blocked >> (other - 1) & 1 for other in others)
    killed = number == signal.SIGKILL
    (os.kill if killed else os.killpg)(process.pid, number)
    output, error = process.communicate(timeout=300)
    assert process.returncode == (-number if killed else 128 + number), error
    if not killed:
        assert "Traceback" not in error
        last = json.loads(output)["total_timesteps"]
        assert [int(path.stem) for path in checkpoints(tmp_path)[-2:]] == [last, last]
    _, alive = psutil.wait_procs(workers, timeout=100)
    assert not alive
