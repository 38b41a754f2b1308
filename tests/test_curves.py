"""Learning curves: intervals over seeds, runs that have ended and runs that have not; and what sizes cost a script."""

import ast
import json
import subprocess
from pathlib import Path

import learning
import numpy as np
import plots
import pytest
import results
import scaling
import tables
from conftest import ROOT, run
from torch.utils.tensorboard import SummaryWriter

TD3 = "td3_continuous_action"


def test_the_interval_is_that_of_the_mean_over_seeds():
    values = np.random.default_rng(11).normal(100, 10, size=(10, 3))
    low, high = learning.interval(values)
    # About 1.96 standard errors, of ten values a little less.
    errors = values.std(axis=0) / 10**0.5
    assert (np.abs((high - low) / (2 * 1.96 * errors) - 1) < 0.15).all()
    assert ((low < values.mean(axis=0)) & (values.mean(axis=0) < high)).all()
    assert (learning.interval(values) == [low, high]).all()  # the same each time, for the tables' sake
    assert learning.interval([5.0, 5.0]).tolist() == [5, 5]
    assert learning.interval([5.0]) is None


def line(seed: int, value: float | None, steps: int = 1_000_000, algorithm: str = TD3, env_id: str = "HalfCheetah-v4") -> dict:
    """A line of results of a run that has reached this value."""
    about = {"format": 1, "sweep": "2026-01-01-0", "job": f"{algorithm}-compile-{env_id}-1000000-seed{seed}", "attempts": 1}
    about |= {"algorithm": algorithm, "mode": "compile", "env_id": env_id, "seed": seed, "status": "ok", "script": algorithm}
    about |= {"total_timesteps": steps, "steps": 1_000_000, "sps": 100.0, "startup_seconds": 1.0, "episodic_return": value}
    return about | {"versions": {"torch": "2"}, "hardware": {"cpu": "A CPU", "cores": 1, "gpu": None}, "git_commit": None}


def test_returns_stand_beside_the_literature():
    runs = [line(1, 9000.0), line(2, 10000.0), line(1, 500.0, steps=300_000, env_id="Hopper-v4"), line(3, None)]
    table = learning.returns_table([runs[2], *runs[:2], runs[3]])
    first, second = table.split("\n")[2:4]
    assert first.startswith(f"| {TD3}, HalfCheetah-v4 | 1.00M | 2 | 9500 [9000, 10000] | 9000, 10000 | 9583 ± 126 |")
    assert "9637 ± 859, best of a run" in first
    assert "Tianshou 10201 ± 773, best of a run" in first
    assert second.startswith(f"| {TD3}, Hopper-v4 | 0.30M of 1.00M | 1 | 500 | 500 | 3135 ± 360 |")
    assert table.endswith("\n\nA CPU; torch 2")
    behind = learning.returns_table([*runs[:2], line(3, 1.0, steps=900_000)])
    assert behind.split("\n")[2] == first
    assert behind.split("\n\n")[1:] == [f"On their way: {TD3} HalfCheetah-v4 seed 3 at 0.90M: 1.0.", "A CPU; torch 2"]
    short = learning.returns_table(runs, short=True).split("\n")[2:]
    assert short == [f"| {TD3}, HalfCheetah-v4 | 1.00M | 2 | 9500 [9000, 10000] | 9583 ± 126 |"]


def curve(job: str, last: int) -> dict:
    """The curve of a run, of two points."""
    points = {
        "step": [1, last],
        "seconds": [0.1, 1.0],
        "episodic_return": [0.0, 1.0],
        "gpu_seconds": [],
        "gpu_utilization": [],
    }
    return {"format": 1, "sweep": "2026-01-01-0", "job": job, **points}


def log(runs: Path, seed: int, episodes: int) -> None:
    """What a run leaves that has logged so many episodes, each a thousand steps and a second long, and has not ended."""
    runs.mkdir(parents=True)
    (runs / "starts.txt").write_text("0\n")
    script = f"/somewhere/leanrl/{TD3}_torchcompile.py"
    command = ["python", script, "--compile", "--env-id=HalfCheetah-v4", f"--seed={seed}", "--total-timesteps=1000000"]
    about = {"versions": {"torch": "1"}, "hardware": {"cpu": "Another", "cores": 8, "gpu": "A GPU"}, "git_commit": "abc"}
    (runs / "about.json").write_text(json.dumps({"command": command, **about}))
    writer = SummaryWriter(str(runs / "a_run"))
    for episode in range(episodes):
        writer.add_scalar("charts/episodic_return", episode, (episode + 1) * 1000, walltime=episode + 1)
    writer.close()


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of which seed 10 has ended, seed 8 has failed, and seed 9 died early once, and has then logged 200 episodes.

    Of two runs with several agents seed 11 has ended.
    """
    published, folder = tmp_path / "published", tmp_path / "sweep"
    published.mkdir()
    monkeypatch.setattr(learning, "PUBLISHED", published)
    ended = line(10, 9000.0)
    for seed, number, episodes in ((8, 1, 300), (9, 9, 20), (9, 10, 200)):
        log(folder / "jobs" / line(seed, None)["job"] / str(number) / "runs", seed, episodes)
    (folder / "sweep.json").write_text(json.dumps({"id": "2026-01-01-0"}))
    failed, job = line(8, 1.0) | {"status": "failed", "reason": "", "log": ""}, line(12, None)["job"]
    several = line(11, None) | {"mode": "seeds", "seeds": [11, 12], "episodic_return": [8000.0, None]}
    log(folder / "jobs" / job / "1" / "runs", 12, 200)
    (folder / "jobs" / job / "1" / "runs" / "another_run").mkdir()
    results.replace(folder / "results.jsonl", [ended, failed, several])
    results.replace(folder / "curves.jsonl", [curve(ended["job"], 1_000_000)], results.check_curve)
    return folder


def test_runs_are_taken_over_as_far_as_they_are(sweep):
    learning.take_over([sweep])
    lines = results.read(learning.PUBLISHED / "learning.jsonl")
    assert [run["seed"] for run in lines] == [9, 10]  # neither the one that failed nor those of several agents
    assert (lines[0]["total_timesteps"], lines[0]["episodic_return"], lines[0]["sps"]) == (200_000, 149.5, None)
    assert (lines[0]["mode"], lines[0]["git_commit"], lines[0]["hardware"]["gpu"]) == ("compile", "abc", "A GPU")
    drawn = results.read(learning.PUBLISHED / "learning.curves.jsonl", results.check_curve)
    assert [found["job"] for found in drawn] == [run["job"] for run in lines]
    assert (drawn[0]["step"][-1], drawn[0]["seconds"][-1], len(drawn[0]["step"])) == (200_000, 200.0, 100)
    # Later it has ended, and takes the place of what it was, for good.
    before = (sweep / "results.jsonl").read_bytes()
    results.append(sweep / "results.jsonl", line(9, 700.0) | {"resume": "/somewhere/runs/a_run"})
    results.append(sweep / "curves.jsonl", curve(lines[0]["job"], 1_000_000))
    learning.take_over([sweep])
    (sweep / "results.jsonl").write_bytes(before)
    learning.take_over([sweep])
    lines = results.read(learning.PUBLISHED / "learning.jsonl")
    assert [(run["episodic_return"], run.get("resume")) for run in lines] == [(700, "a_run"), (9000, None)]
    assert results.read(learning.PUBLISHED / "learning.curves.jsonl", results.check_curve)[0]["step"] == [1, 1_000_000]


def test_a_seed_counts_once(sweep):
    ended = line(10, 9000.0)
    runs = [ended, *(ended | {"mode": mode, "job": ended["job"].replace("compile", mode)} for mode in ("both", "eager"))]
    runs[1]["episodic_return"] = 8000.0
    results.replace(sweep / "results.jsonl", runs)
    results.replace(sweep / "curves.jsonl", [curve(run["job"], 1_000_000) for run in runs], results.check_curve)
    learning.take_over([sweep])
    lines = results.read(learning.PUBLISHED / "learning.jsonl")
    assert {(run["mode"], run["seed"], run["episodic_return"]) for run in lines if run["seed"] == 10} == {("both", 10, 8000)}


def test_runs_of_other_lengths_are_other_runs():
    runs = [line(1, 9000.0), line(2, 10000.0), line(1, 7000.0) | {"steps": 3_000_000}]
    rows = [row.split(" | ")[1:4] for row in learning.returns_table(runs).split("\n")[2:4]]
    assert rows == [["1.00M", "2", "9500 [9000, 10000]"], ["1.00M of 3.00M", "1", "7000"]]


def test_variants_have_a_table_of_their_own(sweep):
    for variant in ("truncation", "both"):
        learning.take_over([sweep], variant)
    assert not (learning.PUBLISHED / "learning.jsonl").exists()
    table = learning.ablation_table(results.read(learning.PUBLISHED / "ablation.jsonl")).split("\n")
    assert [row.split(" | ")[0] for row in table[2:4]] == ["| HalfCheetah-v4: truncation", "| HalfCheetah-v4: both"]
    results.replace(learning.PUBLISHED / "learning.jsonl", [line(1, 500.0), line(1, 500.0, env_id="Hopper-v4")])
    table = learning.ablation_table(results.read(learning.PUBLISHED / "ablation.jsonl")).split("\n")
    assert [row.split(" | ")[0] for row in table[2:5]] == [
        "| HalfCheetah-v4: as it is",
        "| HalfCheetah-v4: truncation",
        "| HalfCheetah-v4: both",
    ]


def test_plots_have_a_row_an_environment(sweep):
    runs = [line(1, 9000.0), line(2, 9500.0), line(1, 500.0, env_id="Hopper-v4"), line(2, 1.0, env_id="Walker2d-v4")]
    curves = [curve(run["job"], 1_000_000) for run in runs[:3]]
    literature = (ROOT / "benchmark" / "results" / "literature.jsonl").read_bytes()
    (learning.PUBLISHED / "literature.jsonl").write_bytes(literature)
    figure = learning.plot_returns_of(TD3, runs, curves)
    assert [axis.get_title() for axis in figure.axes] == 2 * ["HalfCheetah-v4"] + 2 * ["Hopper-v4"]
    shown = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in figure.axes]
    assert shown == 2 * [["LeanRL, 2 seeds", "CleanRL, 1M steps"]] + 2 * [["LeanRL, 1 seed", "CleanRL, 1M steps"]]
    levels = [axis.lines[-1].get_ydata()[0] for axis in figure.axes[1::2]]
    assert levels == [9583, 3135]
    assert [axis.get_title() for axis in learning.plot_overview(runs, curves).axes] == [f"{TD3}, HalfCheetah-v4"]
    assert learning.plot_returns_of("sac_continuous_action", runs, curves) is None


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "ablation").glob("*.diff")), ids=lambda path: path.stem)
def test_ablations_fit_the_script(path):
    subprocess.run(["git", "apply", "--check", str(path)], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", scaling.DEFAULTS)
def test_a_widened_copy_differs_in_its_networks_only(script):
    text, wide = (ROOT / "leanrl" / f"{script}_torchcompile.py").read_text(), scaling.widened(script, 1024)
    ast.parse(wide)
    changed = [pair for pair in zip(text.split("\n"), wide.split("\n"), strict=True) if pair[0] != pair[1]]
    width = str(scaling.DEFAULTS[script]["width"])
    assert len(changed) >= (2 if script == "dqn" else 3)
    assert all(old.replace(width, "1024") == new and ("Linear" in old or "layer" in old) for old, new in changed)


@pytest.mark.parametrize("script", scaling.DEFAULTS)
def test_sizes_leave_the_gradient_steps_per_agent_step_as_they_are(script):
    for point in scaling.points(scaling.Args(scripts=(script,))):
        given, envs = point.arguments, point.sizes["num_envs"]
        if script.startswith("ppo"):
            rollout = envs * given["num-steps"]
            assert rollout == given["num-minibatches"] * point.sizes["batch_size"]
            assert given["total-timesteps"] % rollout == 0
            assert point.axis == "batch_size" or point.updates_per_step == (4 / 256 if "atari" in script else 10 / 64)
        else:
            # Then the first step that is timed owes as many gradient steps for its agent steps as all do.
            assert given["learning-starts"] % envs == 0
            assert given["total-timesteps"] - given["learning-starts"] >= 128


@pytest.mark.parametrize("envs", [1, 64])
@pytest.mark.parametrize("script", ["td3_continuous_action", "dqn"])
def test_updates_are_counted_as_they_are(script, envs, tmp_path):
    point = scaling.Measurement(script, "compile", "num_envs", envs)
    arguments = [f"--{key}={value}" for key, value in (point.arguments | {"batch-size": 8, "total-timesteps": 640}).items()]
    world = "CartPole-v1" if script == "dqn" else "InvertedPendulum-v4"
    done = run(script, *arguments, "--env-id", world, directory=tmp_path)
    # From the first step that learns on; the clock starts a step of the environments after learning-starts.
    assert done["updates"] == int((640 - scaling.STARTS - envs) * point.updates_per_step)


def test_a_point_is_timed_again_unless_code_and_machine_are_the_same():
    now = {"git_commit": "abc", "hardware": {"cpu": "A CPU", "cores": 2, "gpu": None}, "threads": None}
    assert scaling.same_code_and_machine(now, now)
    for other in ({"git_commit": "abd"}, {"threads": 1}, {"hardware": now["hardware"] | {"mkl": "as on Intel"}}):
        assert not scaling.same_code_and_machine(now | other, now)
    for commit in ("abc-dirty", None):
        assert not scaling.same_code_and_machine(now | {"git_commit": commit}, now | {"git_commit": commit})


def test_sbx_gets_the_sizes_of_a_point(tmp_path):
    command = scaling.Measurement("dqn", "sbx", "width", 1024).command(tmp_path, tmp_path / "python")
    assert {"dqn", "--env-id=CartPole-v1", "--width=1024", "--num-envs=1", "--batch-size=128"} <= set(command)


def test_the_scaling_table_shows_from_where_another_resource_binds():
    def point(axis: str, value: int, updates: float, mode: str = "compile") -> dict:
        about = {"script": TD3, "mode": mode, "axis": axis, "value": value, "sps": updates, "updates_per_second": updates}
        return about | {
            "peak_memory_mb": 500.0,
            "status": "ok",
            **{key: line(1, 0.0)[key] for key in ("versions", "hardware")},
        }

    batches = [point("batch_size", value, updates) for value, updates in ((64, 200), (256, 190), (1024, 100), (4096, 26))]
    widths = [point("width", value, updates) for value, updates in ((64, 300), (256, 200), (1024, 20))]
    table = tables.scaling_table([*batches, point("batch_size", 256, 95, mode="sbx"), *widths])
    # A row costs 78, 21, 9.8 and 9.4 us: from 1024 on a batch costs what its rows cost.
    assert f"| {TD3}, batch **1024** | 100 | 100.0 | 10 per row of a batch | 500 |  |  |" in table
    assert f"| {TD3}, batch 256 | 190 | 190.0 | 21 per row of a batch | 500 | 95 | 2.00 |" in table
    assert f"| {TD3}, width **1024** | 20 | 20.0 | 50000 per gradient step | 500 |  |  |" in table
    assert table.count("**") == 4
    envs = [point("num_envs", value, 1000 * value) for value in (1, 4, 16)]  # twice as many cost nothing more
    assert "**" not in tables.scaling_table(envs)
    figure = plots.plot_scaling([*batches, *widths, *envs])
    assert [axis.get_xlabel() for axis in figure.axes[:3]] == ["environments", "batch", "width"]


@pytest.mark.parametrize(("key", "lines", "intervals"), [("step", 4, 1), ("seconds", 3, 0)])
def test_a_mean_is_drawn_by_steps_and_each_seed_by_time(key, lines, intervals):
    _, (axis,) = plots.panels(1, "")
    learning.draw(axis, [curve("0", 1000), curve("1", 980), curve("2", 500)], key)
    assert (len(axis.lines), len(axis.collections)) == (lines, intervals)
    assert sorted(axis.get_legend_handles_labels()[1]) == ["LeanRL, 2 seeds", "LeanRL, under way"]


def test_time_for_which_a_run_stood_still_is_left_out():
    stood = {"step": [100, 200, 300, 400, 500], "seconds": [20.0, 22.0, 24.0, 1024.0, 1027.0]}
    assert learning.at_work(stood).tolist() == pytest.approx([20, 22, 24, 26.5, 29.5])
    # Episodes that grow take longer, and so do groups of them, without standing still.
    grew = {"step": [10, 20, 30, 40, 500, 5000], "seconds": [1.0, 1.1, 1.2, 1.3, 6.0, 50.0]}
    assert learning.at_work(grew).tolist() == pytest.approx(grew["seconds"])
    at_once = {"step": [10, 10], "seconds": [1.0, 2.0]}
    assert learning.at_work(at_once).tolist() == at_once["seconds"]
    together = {"step": [10, 10, 20, 20], "seconds": [1.0, 1.0, 2.0, 2.0]}  # in two environments
    assert learning.at_work(together).tolist() == together["seconds"]
