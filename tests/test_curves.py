"""Learning curves: intervals over seeds, runs that have ended and runs that have not; and what sizes cost."""

import ast
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run
from torch.utils.tensorboard import SummaryWriter

from benchmark.collection import COLLECTION
from benchmark.report import learning, plots, results
from benchmark.studies import scaling

TD3, SWEEP = "td3_continuous_action", "2026-01-01-0"
MACHINE = {"versions": {"torch": "2"}, "hardware": {"cpu": "A CPU", "cores": 1, "gpu": None}}


def test_the_interval_is_that_of_the_mean_over_seeds():
    values = np.random.default_rng(11).normal(100, 10, size=(10, 3))
    low, high = learning.interval(values)
    # About 1.96 standard errors, of ten values a little less.
    errors = values.std(axis=0) / 10**0.5
    assert (np.abs((high - low) / (2 * 1.96 * errors) - 1) < 0.15).all()
    assert ((low < values.mean(axis=0)) & (values.mean(axis=0) < high)).all()
    assert learning.interval([5.0, 5.0]).tolist() == [5, 5]
    assert learning.interval([5.0]) is None


def line(seed: int, value: float | None, env_id="HalfCheetah-v4", mode="compile", **others) -> dict:
    """A line of results of a run that has reached this value."""
    about = {"format": 1, "sweep": SWEEP, "job": f"{TD3}-{mode}-{env_id}-1000000-seed{seed}", "attempts": 1}
    about |= {"algorithm": TD3, "mode": mode, "env_id": env_id, "seed": seed, "status": "ok"}
    about |= {"script": TD3, "steps": 1_000_000, "total_timesteps": 1_000_000, "episodic_return": value}
    return about | {"sps": 100.0, "startup_seconds": 1.0, "git_commit": None} | MACHINE | others


def test_returns_stand_beside_the_literature():
    runs = [line(1, 9000.0), line(2, 10000.0), line(3, None)]
    short = line(1, 500.0, "Hopper-v4", total_timesteps=300_000)
    behind, longer = line(4, 1.0, total_timesteps=900_000), line(1, 7000.0, steps=3_000_000)
    table, *below = learning.returns_table([short, *runs, behind, longer]).split("\n\n")
    first, second, third = table.split("\n")[2:]
    start = f"| {TD3}, HalfCheetah-v4 | 1.00M | 2 | 9500 [9000, 10000] |"
    assert first.startswith(f"{start} 9000, 10000 | 9583 ± 126 |")
    assert "9637 ± 859, best of a run" in first and "Tianshou 10201 ± 773, best of a run" in first
    assert second.startswith(f"| {TD3}, HalfCheetah-v4 | 1.00M of 3.00M | 1 | 7000 | 7000 | 9583 ± 126, 1M |")
    assert third.startswith(f"| {TD3}, Hopper-v4 | 0.30M of 1.00M | 1 | 500 | 500 | 3135 ± 360 |")
    assert below == [f"On their way: {TD3} HalfCheetah-v4 seed 4 at 0.90M: 1.0.", "A CPU; torch 2"]
    # The README's has what has ended.
    assert learning.returns_table([*runs, longer], short=True).split("\n")[2:] == [f"{start} 9583 ± 126 |"]


def curve(job: str, last: int = 1_000_000) -> dict:
    """The curve of a run, of two points."""
    points = {"step": [1, last], "seconds": [0.1, 1.0], "episodic_return": [0.0, 1.0]}
    return {"format": 1, "sweep": SWEEP, "job": job, "gpu_seconds": [], "gpu_utilization": []} | points


def log(runs: Path, seed: int, episodes: int) -> None:
    """What a run leaves that has logged episodes of a thousand steps and a second, and has not ended."""
    runs.mkdir(parents=True)
    (runs / "starts.txt").write_text("0\n")
    script = f"/somewhere/leanrl/{TD3}_torchcompile.py"
    command = ["python", script, "--compile", "--env-id=HalfCheetah-v4", f"--seed={seed}"]
    about = {"command": [*command, "--total-timesteps=1000000"], "versions": {"torch": "1"}}
    about |= {"hardware": {"cpu": "Another", "cores": 8, "gpu": "A GPU"}, "git_commit": "abc"}
    (runs / "about.json").write_text(json.dumps(about))
    with SummaryWriter(str(runs / "a_run")) as writer:
        for episode in range(episodes):
            writer.add_scalar("charts/episodic_return", episode, 1000 * (episode + 1), walltime=episode + 1)
        for step, value in ((50_000, 50.0), (100_000, 100.0), (150_000, float("nan"))):
            writer.add_scalar("charts/eval_return", value, step)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seed 10 ended in three modes, 8 failed, 9 died early and goes on; 13 goes on in modes not taken."""
    folder = tmp_path / "sweep"
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    for seed, number, episodes in ((8, 1, 300), (9, 9, 20), (9, 10, 200)):
        log(folder / "jobs" / line(seed, None)["job"] / str(number) / "runs", seed, episodes)
    for mode in ("tf32", "cleanrl"):
        log(folder / "jobs" / line(13, None, mode=mode)["job"] / "1" / "runs", 13, 200)
    (folder / "sweep.json").write_text(json.dumps({"id": SWEEP}))
    ended = [line(10, value, mode=mode) for mode, value in (("both", 8e3), ("compile", 9e3), ("eager", 7e3))]
    failed = line(8, 1.0, status="failed", reason="", log="")
    results.replace(folder / "results.jsonl", [*ended, failed])
    results.replace(folder / "curves.jsonl", [curve(run["job"]) for run in ended], results.check_curve)
    return folder


def taken_over(name: str = "learning") -> tuple[list[dict], list[dict]]:
    """The published lines, and the published curves."""
    lines = results.read(learning.RESULTS / f"{name}.jsonl")
    return lines, results.read(learning.RESULTS / f"{name}.curves.jsonl", results.check_curve)


def test_runs_are_taken_over_as_far_as_they_are(sweep):
    learning.take_over([sweep])
    lines, drawn = taken_over()
    # Not what failed; and a seed once, in a mode in which people run the twin.
    assert [(run["seed"], run["mode"]) for run in lines] == [(9, "compile"), (10, "compile")]
    reached = [lines[0][key] for key in ("total_timesteps", "episodic_return", "sps", "git_commit")]
    assert reached == [200_000, 149.5, None, "abc"]
    assert lines[0]["hardware"]["gpu"] == "A GPU"
    assert [found["job"] for found in drawn] == [run["job"] for run in lines]
    assert (drawn[0]["step"][-1], drawn[0]["seconds"][-1], len(drawn[0]["step"])) == (200_000, 200.0, 100)
    assert (drawn[0]["eval_step"], drawn[0]["eval_return"]) == ([50_000, 100_000], [50, 100])
    # Later it has ended, and takes the place of what it was, for good.
    before = (sweep / "results.jsonl").read_bytes()
    results.append(sweep / "results.jsonl", line(9, 700.0, resume="/somewhere/runs/a_run"))
    results.append(sweep / "curves.jsonl", curve(lines[0]["job"]))
    learning.take_over([sweep])
    (sweep / "results.jsonl").write_bytes(before)
    learning.take_over([sweep])
    lines, drawn = taken_over()
    assert [(run["episodic_return"], run.get("resume")) for run in lines] == [(700, "a_run"), (9000, None)]
    assert drawn[0]["step"] == [1, 1_000_000]


def test_variants_have_a_table_of_their_own(sweep, monkeypatch):
    monkeypatch.setattr("sys.argv", ["learning", "--file", "ablation", str(sweep)])
    with pytest.raises(SystemExit):  # without --variant
        learning.main()
    assert not list(learning.RESULTS.glob("*.jsonl"))
    with pytest.raises(results.ResultsError, match="--variant takes runs of one mode, not both, "):
        learning.take_over([sweep], "truncation")
    [other] = (sweep / "jobs").glob("*-tf32-*")
    shutil.rmtree(other)
    lines = results.read(sweep / "results.jsonl")
    results.replace(learning.RESULTS / "cpu.jsonl", lines)
    with pytest.raises(results.ResultsError, match="--file takes one with variants only, not cpu"):
        learning.take_over([sweep], "truncation", "cpu")
    results.replace(sweep / "results.jsonl", [run for run in lines if run["mode"] not in ("both", "eager")])
    for variant in ("truncation", "both"):
        learning.take_over([sweep], variant)
    assert not (learning.RESULTS / "learning.jsonl").exists()

    def rows() -> list[str]:
        table = learning.ablation_table(taken_over("ablation")[0]).split("\n\n")[0]
        return [row.split(" | ")[0].removeprefix("| HalfCheetah-v4: ") for row in table.split("\n")[2:]]

    assert rows() == ["truncation", "both"]
    table = learning.ablation_table(taken_over("ablation")[0])
    assert "HalfCheetah-v4: both | 1.00M | 1 | 9000 | 9000 |" in table  # without what is under way
    results.replace(learning.RESULTS / "learning.jsonl", [line(1, 500.0), line(1, 500.0, "Hopper-v4")])
    assert rows() == ["default", "truncation", "both"]
    longer = line(1, 500.0, steps=3_000_000)
    results.replace(learning.RESULTS / "learning.jsonl", [longer])
    assert rows() == ["truncation", "both"]
    other = line(2, 500.0, algorithm="sac_continuous_action", variant="both")
    results.append(learning.RESULTS / "ablation.jsonl", other)
    assert {*rows()} == {f"{TD3}, truncation", f"{TD3}, both", "sac_continuous_action, both"}


def test_plots_have_a_row_an_environment():
    runs = [line(1, 9000.0), line(2, 9500.0), line(1, 500.0, "Hopper-v4"), line(2, 1.0, "Walker2d-v4")]
    curves = [curve(run["job"]) for run in runs[:3]]
    axes = learning.plot_returns_of(TD3, runs, curves).axes
    assert [axis.get_title() for axis in axes] == 2 * ["HalfCheetah-v4"] + 2 * ["Hopper-v4"]
    shown = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in axes[1::2]]
    assert shown == [["LeanRL, 2 seeds", "CleanRL, 1M steps"], ["LeanRL, 1 seed", "CleanRL, 1M steps"]]
    assert [axis.lines[-1].get_ydata()[0] for axis in axes[1::2]] == [9583, 3135]
    runs.append(line(3, 1.0, steps=3_000_000))  # is under way, and not in the README
    curves.append(curve(runs[-1]["job"]))
    overview = learning.plot_overview(runs, curves).axes
    of_two = plots.plot_returns(runs, curves, "step").axes
    titles = [f"{TD3}, {task}" for task in ("HalfCheetah-v4, 1,000,000 steps", "Hopper-v4")]
    assert [axis.get_title() for axis in of_two[:3]] == [*titles, f"{TD3}, HalfCheetah-v4, 3,000,000 steps"]
    assert [axis.get_title() for axis in overview] == [f"{TD3}, HalfCheetah-v4"]
    assert learning.plot_returns_of("sac_continuous_action", runs, curves) is None


@pytest.mark.parametrize(("key", "lines", "intervals"), [("step", 4, 1), ("seconds", 3, 0)])
def test_a_mean_is_drawn_by_steps_and_each_seed_by_time(key, lines, intervals):
    _, (axis,) = plots.panels(1, "")
    learning.draw(axis, [curve("0", 1000), curve("1", 980), curve("2", 500)], key)
    assert (len(axis.lines), len(axis.collections)) == (lines, intervals)
    assert sorted(axis.get_legend_handles_labels()[1]) == ["LeanRL, 2 seeds", "LeanRL, under way"]


def test_of_episodes_that_end_at_one_step_the_mean_is_drawn():
    of_many = curve("0") | {"step": [1, 500_000, 500_000, 1_000_000], "seconds": [1.0, 2.0, 2.0, 3.0]}
    of_many["episodic_return"] = [0.0, 10.0, 30.0, 40.0]
    _, (axis,) = plots.panels(1, "")
    learning.draw(axis, [of_many], "step")
    assert axis.lines[0].get_ydata().tolist() == [0, 20, 40]
    grid, values = plots.on_one_grid([of_many], "step", "episodic_return")
    assert values[0, np.searchsorted(grid, 5e5)] == pytest.approx(20, abs=1)


def test_figures_of_cleanrl_are_told_apart():
    """Points side by side, also of equal figures; levels over the time of the runs."""
    _, (by_step, by_time) = plots.panels(2, "")
    by_time.plot([0, 20], [0, 1])
    for axis, key in ((by_step, "step"), (by_time, "seconds")):
        learning.mark(axis, "ppo_atari_envpool", "Pong-v5", key)
    points = [point for point, *_ in by_step.containers]
    assert [point.get_xdata()[0] for point in points] == [10, 10.25, 10.5]
    levels = by_time.lines[1:]
    assert [level.get_xdata()[[0, -1]].tolist() for level in levels] == 3 * [[0, 20]]
    for drawn in (points, levels):
        assert [found.get_ydata()[0] for found in drawn] == [20.45, 20.6, 20.6]
        assert len({(found.get_marker(), found.get_linestyle()) for found in drawn}) == 3


def test_evaluations_are_drawn_by_steps_beside_training():
    """Of the seeds that have two or more."""
    runs = [line(seed, 1.0) for seed in (1, 2, 3, 4)]
    curves = [curve(run["job"]) for run in runs]
    curves[0] |= {"eval_step": [250_000, 750_000], "eval_return": [10.0, 30.0]}
    curves[1] |= {"eval_step": [250_000, 750_000], "eval_return": [20.0, 40.0]}
    curves[2] |= {"eval_step": [500_000], "eval_return": [50.0]}
    by_step, by_time = learning.plot_returns_of(TD3, runs, curves).axes
    figures = (plots.plot_returns(runs, curves, key) for key in ("step", "seconds"))
    of_sweep, of_sweep_by_time = (figure.axes[0] for figure in figures)
    for axis, last in ((by_step, 0.75), (of_sweep, 750_000)):
        [drawn] = [found for found in axis.lines if "evaluation of 2 seeds" in found.get_label()]
        assert drawn.get_ydata()[[0, -1]].tolist() == [15, 35] and drawn.get_linestyle() == "--"
        assert drawn.get_xdata()[-1] == last
    for axis in (by_time, of_sweep_by_time):
        assert not any("evaluation" in found.get_label() for found in axis.lines)


def test_time_for_which_a_run_stood_still_is_left_out():
    stopped = {"step": [100, 200, 300, 400, 500], "seconds": [20, 22, 24, 1024, 1027]}
    assert learning.at_work(stopped).tolist() == pytest.approx([20, 22, 24, 26.5, 29.5])
    # Episodes that grow take longer, and so do groups of them, without standing still.
    growing = {"step": [10, 20, 30, 40, 500, 5000], "seconds": [1, 1.1, 1.2, 1.3, 6, 50]}
    assert learning.at_work(growing).tolist() == pytest.approx(growing["seconds"])
    assert learning.at_work({"step": [10, 10], "seconds": [1, 2]}).tolist() == [1, 2]
    in_two_environments = {"step": [10, 10, 20, 20], "seconds": [1, 1, 2, 2]}
    assert learning.at_work(in_two_environments).tolist() == [1, 1, 2, 2]


def test_ablations_fit_the_scripts():
    diffs = list((ROOT / "docs" / "ablation").glob("*.diff"))
    assert diffs
    for path in diffs:
        subprocess.run(["git", "apply", "--check", path], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", scaling.DEFAULTS)
def test_a_widened_copy_differs_in_its_networks_only(script):
    text, wide = (ROOT / "leanrl" / f"{script}_torchcompile.py").read_text(), scaling.widened(script, 1024)
    ast.parse(wide)
    changed = [pair for pair in zip(text.split("\n"), wide.split("\n"), strict=True) if pair[0] != pair[1]]
    width = str(scaling.DEFAULTS[script]["width"])
    assert len(changed) >= (2 if script == "dqn" else 3)
    assert all("Linear" in old or "layer" in old for old, _ in changed)
    assert all(old.replace(width, "1024") == new for old, new in changed)


@pytest.mark.parametrize("script", scaling.DEFAULTS)
def test_sizes_leave_the_gradient_steps_per_agent_step_as_they_are(script):
    for point in scaling.points(scaling.Args(scripts=(script,))):
        given, envs = point.arguments, point.sizes["num_envs"]
        if COLLECTION[script].on_policy:
            rollout = envs * given["num-steps"]
            assert rollout == given["num-minibatches"] * point.sizes["batch_size"]
            assert given["total-timesteps"] % rollout == 0
            rate = 4 / 256 if "atari" in script else 10 / 64
            assert point.axis == "batch_size" or point.updates_per_step == rate
        else:
            # Then the first step that is timed owes as many gradient steps for its agent steps as all do.
            assert given["learning-starts"] % envs == 0
            assert given["total-timesteps"] - given["learning-starts"] >= 128


@pytest.mark.parametrize("envs", [1, 64])
@pytest.mark.parametrize("script", [TD3, "dqn"])
def test_updates_are_counted_as_they_are(script, envs, tmp_path):
    point = scaling.Measurement(script, "compile", "num_envs", envs)
    given = point.arguments | {"batch-size": 8, "total-timesteps": 640}
    discrete = COLLECTION[script].actions == "discrete"
    given["env-id"] = "CartPole-v1" if discrete else "InvertedPendulum-v4"
    done = run(script, *(f"--{key}={value}" for key, value in given.items()), directory=tmp_path)
    # From the first step that learns on: a step of the environments after learning-starts.
    assert done["updates"] == int((640 - scaling.STARTS - envs) * point.updates_per_step)


def test_sbx_gets_the_sizes_of_a_point(tmp_path):
    command = scaling.Measurement("dqn", "sbx", "width", 1024).command(tmp_path, tmp_path / "python")
    assert {"dqn", "--env-id=CartPole-v1", "--width=1024", "--num-envs=1", "--batch-size=128"} <= set(command)


def test_the_plot_of_sizes_shows_from_where_another_resource_binds():
    def point(axis: str, value: int, rate: float, mode: str = "compile") -> dict:
        about = {"script": TD3, "mode": mode, "axis": axis, "value": value, "status": "ok"}
        return about | {"sps": rate, "updates_per_second": rate, "peak_memory_mb": 500.0} | MACHINE

    batches = [point("batch_size", *pair) for pair in ((64, 200), (256, 190), (1024, 100), (4096, 26))]
    widths = [point("width", *pair) for pair in ((64, 300), (256, 200), (1024, 20))]
    envs = [point("num_envs", value, 1000 * value) for value in (1, 4, 16)]  # twice as many cost nothing more
    figure = scaling.plot([*batches, point("batch_size", 256, 95, mode="sbx"), *widths, *envs], [])
    of_envs, of_batches, of_widths, _ = figure.axes
    assert [axis.get_xlabel() for axis in figure.axes[:3]] == ["environments", "batch", "width"]
    # A row costs 78, 21, 9.8 and 9.4 us: from 1024 on a batch costs what its rows cost.
    assert of_batches.lines[0].get_ydata().round(1).tolist() == [78.1, 20.6, 9.8, 9.4]
    filled = [[line.get_xdata() for line in axis.lines if line.get_zorder() == 3] for axis in figure.axes]
    assert filled == [[], [[1024]], [[1024]], []]
    assert [len(axis.lines) for axis in (of_envs, of_batches, of_widths)] == [1, 3, 2]
    # Of a study under way: what there is, with all of it in the legend.
    figure = scaling.plot([*widths, *(other | {"script": "dqn"} for other in batches)], [])
    assert [axis.axison for axis in figure.axes] == [False, True, True, False]
    assert [text.get_text() for text in figure.axes[-1].get_legend().get_texts()] == ["dqn", TD3]
