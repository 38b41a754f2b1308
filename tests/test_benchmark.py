"""The tables are made from the results, and the tour runs."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import report


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    assert report.render(path.read_text()) == path.read_text()


def line(mode: str, sps: float, round_index: int = 0, startup: float | None = 1.0) -> dict:
    hardware = {"cpu": "A CPU", "cores": 2, "gpu": None}
    return {"algorithm": "sac", "mode": mode, "round": round_index, "sps": sps, "startup_seconds": startup} | {
        "versions": {"python": "3.12.1", "envpool": None},
        "hardware": hardware,
        "git_commit": "0123456789",
    }


def test_speed_table_gives_median_range_and_ratios():
    runs = [line("eager", 100), line("compile", 150, 0, 20.0), line("compile", 200, 1, 5.0), line("compile", 250, 2, 6.0)]
    table = report.speed_table([*runs, line("sbx", 80, startup=None)])
    assert "| sac: LeanRL `--compile` | 200 (150-250) | 2.00 | 2.50 | 20.0 | 5.5 |" in table
    assert "| sac: SBX (JAX) | 80 | 0.80 | 1.00 |  |  |" in table
    assert table.endswith("A CPU, 2 cores; no GPU; python 3.12.1; commit 0123456")


def test_sweep_writes_one_line_a_run_and_tells_failures(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark" / "sweep.py"), "--scripts", "td3_continuous_action", "--modes", "eager"]
    output = tmp_path / "results.jsonl"
    options = ["--total-timesteps", "1100", "--rounds", "2", "--output", str(output)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["mode"], line["round"], line["updates"]) for line in lines] == [("eager", 0, 99), ("eager", 1, 99)]
    assert "| td3_continuous_action: LeanRL eager |" in done.stdout

    failed = subprocess.run([*command, "--total-timesteps", "10"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "--learning-starts takes a number from 0 to 9" in failed.stderr
