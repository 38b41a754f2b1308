"""Learning curves: intervals over seeds, the literature, what is published; and the studies."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from benchmark import records, tables
from benchmark.report import learning, plots
from benchmark.studies import environments, small_networks, timing

TD3, SWEEP = "td3_continuous_action", "2026-01-01-0"
MACHINE = {"versions": {"torch": "2"}, "hardware": {"cpu": "A CPU", "cores": 1, "gpu": None}}


def test_the_interval_is_that_of_the_mean_over_seeds():
    values = np.random.default_rng(11).normal(100, 10, size=(10, 3))
    low, high = learning.interval(values)
    # About 1.96 standard errors, of ten values a little less.
    errors = values.std(axis=0) / 10**0.5
    assert (np.abs((high - low) / (2 * 1.96 * errors) - 1) < 0.15).all()
    assert ((low < values.mean(axis=0)) & (values.mean(axis=0) < high)).all()
    assert learning.interval([4.0, 5.0, 9.0, 5.0]).tolist() == [4, 9]


def line(seed: int, value: float | None, env_id="HalfCheetah-v4", mode="compile", **others) -> dict:
    """A line of results of a run that has reached this value."""
    about = {"format": 1, "sweep": SWEEP, "job": f"{TD3}-{mode}-{env_id}-1000000-seed{seed}", "attempts": 1}
    about |= {"algorithm": TD3, "mode": mode, "env_id": env_id, "seed": seed, "status": "ok"}
    about |= {"script": TD3, "steps": 1_000_000, "total_timesteps": 1_000_000, "episodic_return": value}
    return about | {"sps": 100.0, "startup_seconds": 1.0, "git_commit": None} | MACHINE | others


def test_returns_stand_beside_the_literature():
    runs = [line(1, 9000.0), line(2, 10000.0), line(3, None)]
    hopper, longer = line(1, 500.0, "Hopper-v4"), line(1, 7000.0, steps=3_000_000, total_timesteps=3_000_000)
    table, below = learning.returns_table([hopper, *runs, longer]).split("\n\n")
    first, second, third = table.split("\n")[2:]
    start = f"| {TD3}, HalfCheetah-v4 | 1.00M | 2 | 9500 (9000 to 10000) |"
    assert first.startswith(f"{start} 9000, 10000 | 9583 ± 126 |")
    assert second.startswith(f"| {TD3}, HalfCheetah-v4 | 3.00M | 1 | 7000 | 7000 | 9583 ± 126, 1M |")
    assert third.startswith(f"| {TD3}, Hopper-v4 | 1.00M | 1 | 500 | 500 | 3135 ± 360 |")
    assert below == "A CPU; torch 2"
    assert first.endswith("| authors 9637 ± 859, best of a run; Tianshou 10201 ± 773, best of a run |")
    five = [line(seed, 9000.0) for seed in range(1, 6)]
    assert "| 5 | 9000 [9000, 9000] | all 9000 |" in learning.returns_table(five)
    # The README's has one environment of each script.
    assert learning.returns_table([hopper, *runs], short=True).split("\n")[2:] == [f"{start} 9583 ± 126 |"]
    # A sweep's has what its modes have reached.
    assert learning.sweep_table([runs[1], runs[2], runs[0]]).split("\n")[2:] == [
        f"| {TD3}, HalfCheetah-v4: LeanRL `--compile` | 1,000,000 | 2 | 9500 (9000 to 10000) | 9000, 10000 |"
    ]


def test_a_source_of_the_literature_has_one_row():
    source = {"source": "CleanRL", "about": "a page", "url": "an address", "spread_of": "deviation of seeds"}
    source |= {"returns": "training", "seeds": 3, "version": "-v4", "algorithm": "sac"}
    lines = [source | change for change in ({}, {"version": "-v1"}, {"algorithm": "dqn", "seeds": 4})]
    _, _, *rows = learning.literature_table([*lines, source | {"returns": "evaluation"}]).split("\n")
    start = "| CleanRL: [a page](an address)"
    assert rows == [
        f"{start} | dqn (-v4), sac (-v4, -v1) | 3/4 | seeds | training |",
        f"{start} | sac (-v4) | 3 | seeds | evaluation |",
    ]


def curve(job: str, last: int = 1_000_000) -> dict:
    """The curve of a run, of two points."""
    points = {"step": [1, last], "seconds": [0.1, 1.0], "episodic_return": [0.0, 1.0]}
    return {"format": 1, "sweep": SWEEP, "job": job} | points


def test_a_variant_has_a_colour_and_a_seed_a_line():
    runs = [line(seed, 1.0, variant=variant, job=f"{variant}{seed}") for variant in "ab" for seed in (1, 2)]
    [axis] = learning.plot_variants(runs, [curve(run["job"]) for run in runs]).axes
    assert [drawn.get_color() for drawn in axis.lines] == ["C0", "C0", "C1", "C1"]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seed 10 ended in three modes, 8 failed."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    ended = [line(10, value, mode=mode) for mode, value in (("both", 8e3), ("compile", 9e3), ("eager", 7e3))]
    failed = line(8, 1.0, status="failed", reason="", log="")
    records.replace(folder / "results.jsonl", [*ended, failed])
    records.replace(folder / "curves.jsonl", [curve(run["job"]) for run in ended], records.check_curve)
    return folder


def taken_over(name: str = "learning") -> tuple[list[dict], list[dict]]:
    """The published lines, and the published curves."""
    lines = records.read(learning.RESULTS / f"{name}.jsonl")
    return lines, records.read(learning.RESULTS / f"{name}.curves.jsonl", records.check_curve)


def test_a_run_is_published_once_and_the_last_time_it_was_made(sweep):
    learning.take_over([sweep])
    lines, drawn = taken_over()
    # Not what failed; and a seed once, in a mode in which people run the twin.
    assert [(run["seed"], run["episodic_return"]) for run in lines] == [(10, 9000)]
    records.append(sweep / "results.jsonl", line(10, 700.0, sweep="later", resume="/somewhere/runs/a_run"))
    records.append(sweep / "results.jsonl", line(9, 500.0))
    records.append(sweep / "curves.jsonl", curve(lines[0]["job"]) | {"sweep": "later", "step": [1, 2]})
    records.append(sweep / "curves.jsonl", curve(line(9, None)["job"]))
    learning.take_over([sweep])
    lines, drawn = taken_over()
    assert [(run["episodic_return"], run.get("resume")) for run in lines] == [(500, None), (700, "a_run")]
    assert [found["step"] for found in drawn] == [[1, 1_000_000], [1, 2]]


def test_variants_have_a_table_of_their_own(sweep):
    with pytest.raises(records.ResultsError, match="--variant takes runs of one mode, not both, "):
        learning.take_over([sweep], "truncation")
    kept = [run for run in records.read(sweep / "results.jsonl") if run["mode"] == "compile"]
    records.replace(sweep / "results.jsonl", kept)
    for variant in ("truncation", "none"):
        learning.take_over([sweep], variant)
    lines, _ = taken_over("ablation")
    records.replace(learning.RESULTS / "learning.jsonl", [line(1, 500.0), line(1, 500.0, "Hopper-v4")])
    _, _, *rows = learning.ablation_table(lines).split("\n\n")[0].split("\n")
    # Below the default of as many steps.
    reached = {"default": 500, "truncation": 9000, "none": 9000}
    expected = [
        f"| HalfCheetah-v4: {name} | 1.00M | 1 | {value} | {value} |" for name, value in reached.items()
    ]
    assert rows == expected
    with pytest.raises(records.ResultsError, match="--file takes one with variants only, not learning"):
        learning.take_over([sweep], "truncation", "learning")


def test_the_mean_is_that_of_all_seeds_and_of_episodes_that_end_at_one_step():
    _, (axis,) = tables.panels(1, "")
    learning.draw(axis, [curve("0", 1000), curve("1", 980)])
    assert (len(axis.lines), len(axis.collections)) == (3, 1)
    assert axis.get_legend_handles_labels()[1] == ["LeanRL, 2 seeds"]
    of_many = curve("0") | {
        "step": [1, 500_000, 500_000, 1_000_000],
        "episodic_return": [0.0, 10.0, 30.0, 40.0],
    }
    grid, values = plots.on_one_grid([of_many], "step", "episodic_return")
    assert values[0, np.searchsorted(grid, 5e5)] == pytest.approx(20, abs=1)


def test_evaluations_are_drawn_by_steps_and_time_begins_after_start_up():
    runs = [line(seed, 1.0, startup_seconds=40.0) for seed in (1, 2, 3)]
    curves = [curve(run["job"]) | {"seconds": [41.0, 45.0]} for run in runs]
    for of_seed, value in zip(curves, (10.0, 20.0), strict=False):  # of the third there is none
        of_seed |= {"eval_step": [250_000, 750_000], "eval_return": [value, 2 * value]}
    by_step, by_time = (plots.plot_returns(runs, curves, key).axes[0] for key in ("step", "seconds"))
    _, drawn = by_step.lines
    assert drawn.get_label() == "--compile, evaluation of 2 seeds"
    assert drawn.get_ydata()[[0, -1]].tolist() == [15, 30]
    assert [found.get_xdata()[[0, -1]].tolist() for found in by_time.lines] == [[1, 5]]


def test_ablations_fit_the_scripts():
    diffs = list((ROOT / "docs" / "ablation").glob("*.diff"))
    assert diffs
    for path in diffs:
        subprocess.run(["git", "apply", "--check", path], cwd=ROOT, check=True)


# ---- Studies -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", small_networks.SCRIPTS)
def test_a_copy_with_small_networks_differs_in_these_only(script, tmp_path):
    text = (ROOT / "leanrl" / f"{script}_torchcompile.py").read_text()
    small = small_networks.resized(script, 64, tmp_path).read_text()
    ast.parse(small)
    changed = [pair for pair in zip(text.split("\n"), small.split("\n"), strict=True) if pair[0] != pair[1]]
    assert len(changed) >= 3
    assert all(old.replace("256", "64") == new for old, new in changed)


def test_libraries_get_the_sizes_of_ours(tmp_path):
    python = tmp_path / "python"
    about = {"script": TD3, "mode": "sbx", "width": 64, "env_id": "Pendulum-v1", "batch_size": 32, "seed": 1}
    given = {*small_networks.command(about, 2000, python, tmp_path)}
    assert {TD3, "--env-id=Pendulum-v1", "--width=64", "--batch-size=32"} <= given
    for mode in ("envpool", "cleanrl", "sb3"):
        given = {*environments.command("ppo_continuous_action", mode, 64, 1, python, tmp_path)}
        sizes = {"--batch-size=256"} if mode == "sb3" else {"--num-minibatches=8", "--update-epochs=10"}
        assert {"--num-envs=64", "--num-steps=32"} | sizes <= given


def test_runs_are_timed_and_those_that_fail_are_told_of_and_left_out(tmp_path, capsys):
    def points():
        for program in ("print('{\"sps\": 100}')", "raise SystemExit('no more')", "print('{\"sps\": 300}')"):
            command = [sys.executable, "-c", program]
            yield timing.Point({"program": program}, lambda _, command=command: command)

    lines, status = timing.time_runs(points(), tmp_path / "runs.jsonl", records.check_of(records.Timing))
    assert status == 1 and "no more" in capsys.readouterr().err
    assert [found["sps"] for found in lines] == [100, 300]
    assert records.read(tmp_path / "runs.jsonl", lambda _: None) == lines
