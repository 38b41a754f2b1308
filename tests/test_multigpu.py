"""Several processes are one with all of their environments: its numbers, one folder, one end."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import (
    SAVED,
    TESTS,
    assert_same_numbers,
    checkpoint,
    curves,
    environment,
    evaluation,
    play,
    scripted_world,
)
from slurm import wait_until

NAME, TWIN, RANKS = "ppo_atari_envpool_multigpu", "ppo_atari_envpool_torchcompile", 2
# Ten gradient steps, two epochs of five, on rollouts of ten steps of two environments of each rank.
TEN = ("--num-envs", 2, "--num-steps", 10, "--num-minibatches", 5, "--update-epochs", 2, "--no-anneal-lr")


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():  # by a run that failed
        dist.destroy_process_group()


@contextmanager
def torchrun(directory: Path, program: Path, *args) -> Iterator[subprocess.Popen]:
    """Start a program in so many processes, which end with the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    process = subprocess.Popen([*map(str, [*command, program, *args])], cwd=directory, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()


def rank_of(process: subprocess.Popen, rank: int) -> psutil.Process:
    """One of the processes that torchrun has started."""
    children = psutil.Process(process.pid).children()
    assert len(children) == RANKS
    return next(child for child in children if child.environ()["RANK"] == str(rank))


# ---- Numbers -----------------------------------------------------------------------------------------------
def test_one_rank_computes_what_the_twin_does():
    options = ("--num-envs", 3, "--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 2)
    options += ("--total-timesteps", 72, "--target-kl", 10, "--learning-rate", 1e-3)
    one, twin = play(NAME, *options), play(TWIN, *options)
    assert twin["updates"] >= 12
    for result in (one, twin):  # the time at which an episode ends is counted at the end of a rollout
        result["logged"] = {"charts/learning_rate": result["logged"]["charts/learning_rate"]}
    assert_same_numbers(one, twin, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict, list[dict]]:
    """Of a run with several ranks: its directory, its summary, and what each rank has kept."""
    directory = tmp_path_factory.mktemp("ranks")
    args = (*scripted_world(NAME), *TEN, "--total-timesteps", RANKS * 20, "--target-kl", 0.75)
    args += ("--compile", "--cudagraphs")  # without CUDA the second flag only says so
    args += (*SAVED, "--eval-every", 10**6, "--eval-episodes", 1)
    with torchrun(directory, TESTS / "ranks.py", directory, NAME, *args) as process:
        printed, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    return directory, json.loads(printed), [torch.load(directory / f"{rank}.pt") for rank in range(RANKS)]


def test_ranks_stay_equal_and_do_what_one_process_with_all_environments_does(trained):
    """After each gradient step; from rollouts in which ranks have unequal numbers of transitions."""
    directory, summary, (one, other) = trained
    assert (summary["ranks"], summary["updates"], summary["compile"]) == (RANKS, 10, True)
    assert len(summary["eval_returns"]) == 1
    assert not torch.equal(one["buffers"][0], other["buffers"][0])
    assert len(one["indices"]) == 10
    torch.testing.assert_close(one["params"], other["params"], rtol=0, atol=0)
    torch.testing.assert_close(one["indices"], other["indices"], rtol=0, atol=0)

    twin = play(TWIN, *TEN, "--num-envs", RANKS * 2, "--total-timesteps", RANKS * 20)
    # From the same seeds and noise, in worlds that do not depend on actions.
    whole = torch.cat([rank["buffers"][0] for rank in (one, other)], dim=1)
    torch.testing.assert_close(twin["buffer"], whole, rtol=0, atol=0.02)
    optimizer = twin["state"]["optimizer"]
    for tensor in optimizer.buffers():
        tensor.zero_()
    optimizer.params[0].data.copy_(one["before"][0])
    twin["buffer"].copy_(whole)
    twin["rollout_obs"].copy_(torch.cat([rank["obs"][0] for rank in (one, other)], dim=1))
    twin["prepare"]()
    valid = twin["batch"][:, -1]
    unequal = False
    for indices, params in zip(one["indices"], one["params"], strict=True):
        step, env = indices // 2, indices % 2
        rows = [step * RANKS * 2 + rank * 2 + env for rank in range(RANKS)]
        unequal |= bool(valid[rows[0]].sum() != valid[rows[1]].sum())
        twin["update"](torch.cat(rows))
        torch.testing.assert_close(optimizer.params[0].detach(), params, rtol=0, atol=1e-6)
    assert unequal
    [folder] = directory.glob("runs/*")
    logged = curves(folder)  # once, the losses of the last step
    for key, loss in twin["losses"].items():
        assert [value for _, value in logged[f"losses/{key}"]] == [pytest.approx(loss.item(), 1e-3, 1e-4)]


# ---- One run -----------------------------------------------------------------------------------------------
def test_as_many_ranks_go_on_with_a_run_until_a_signal_to_one_ends_all(trained, tmp_path, refusal):
    directory = tmp_path / "run"
    shutil.copytree(trained[0], directory)
    [run], file = directory.glob("runs/*"), checkpoint(directory)
    assert refusal(NAME, play, "--resume", run) == f"--resume takes as many ranks as before, {RANKS}, not 1"

    args = (*scripted_world(NAME), "--resume", run, "--total-timesteps", 10**6)
    with torchrun(directory, TESTS / "ranks.py", "-", NAME, *args) as process:
        assert wait_until(lambda: len(curves(run)["charts/SPS"]) >= 4, 300)
        rank_of(process, 1).send_signal(signal.SIGTERM)
        printed, told = process.communicate(timeout=60)
    assert process.returncode != 0 and f'{NAME}.py", line' not in told
    assert [*directory.glob("runs/*")] == [run]
    summary, step = json.loads(printed), torch.load(file)["progress"][0]
    begun = trained[1]["total_timesteps"]
    # Three rollouts of 40 steps, some of which only go on after an end.
    assert summary["total_timesteps"] == step >= begun + 3 * 30 and summary["eval_returns"] == []
    logged = curves(run)
    assert logged["charts/SPS"][-1][0] == step
    lengths = sum(length for at, length in logged["charts/episodic_length"] if at > begun)
    num_envs = 2 * RANKS  # whose last games have not ended
    assert step - begun - 6 * num_envs < lengths <= step - begun
    assert len(evaluation(TWIN, file, "--eval-episodes", 2)["eval_returns"]) == 2
