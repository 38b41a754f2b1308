"""The tables are made from the results, and a run's samples become its figures."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import job
import report


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    assert report.render(path.read_text()) == path.read_text()


def line(mode: str, sps: float, startup: float | None = 1.0, cold: bool = False, gpu: str | None = None, **more) -> dict:
    """A line of results, as far as a table needs it."""
    hardware = {"cpu": "A CPU", "cores": 2, "gpu": gpu}
    result = {"algorithm": "sac", "env_id": "World-v0", "mode": mode, "sps": sps, "status": "ok", "startup_seconds": startup}
    result |= {"cold_start": cold, "versions": {"python": "3.12.1", "envpool": None}, "hardware": hardware}
    return result | {"git_commit": "0123456789"} | more


def test_speed_table_gives_median_range_and_ratios():
    runs = [line("eager", 100), line("compile", 150, 20.0, cold=True), line("compile", 200, 5.0), line("compile", 250, 6.0)]
    table = report.speed_table([*runs, line("sbx", 80, startup=None), {"status": "failed"}])
    assert "| sac: LeanRL `--compile` | 200 (150-250) | 2.00 | 2.50 | 20.0 | 5.5 |" in table
    assert "| sac: SBX (JAX) | 80 | 0.80 | 1.00 |  |  |" in table
    assert table.endswith("A CPU, 2 cores; no GPU; python 3.12.1; commit 0123456")


def test_machines_are_never_mixed():
    runs = [line("eager", 100), line("compile", 200), line("eager", 400, gpu="A GPU"), line("both", 2000, gpu="A GPU")]
    first, first_machine, second, second_machine = report.speed_table(runs).split("\n\n")
    assert "| sac: LeanRL `--compile` | 200 | 2.00 |" in first
    assert "| sac: LeanRL `--compile --cudagraphs` | 2000 | 5.00 |" in second
    assert "no GPU" in first_machine
    assert "A GPU" in second_machine


def test_gpu_seconds_are_given_per_million_steps():
    runs = [line("both", 700, gpu="A GPU", gpu_busy_seconds=busy, total_timesteps=10_000) for busy in (4.0, 5.0, 6.0)]
    assert "| sac: LeanRL `--compile --cudagraphs` | 700 (700-700) |  |  |  | 1.0 | 500 |" in report.speed_table(runs)


def test_a_table_of_results_that_are_not_there_is_absent():
    text = "before\n<!-- table: speed none.jsonl -->\nold\n<!-- end -->\nafter"
    assert report.render(text) == "before\n<!-- table: speed none.jsonl -->\n<!-- end -->\nafter"


class Driver:
    """A stand-in for NVML with one GPU, which is half busy."""

    class NVMLError(Exception):
        pass

    def __init__(self, uuid: str = "GPU-1"):
        self.uuid = uuid

    def nvmlInit(self):  # noqa: N802 (NVML's name)
        pass

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index:
            raise self.NVMLError
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != self.uuid:
            raise self.NVMLError
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return type("Rates", (), {"gpu": 50})

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return type("Memory", (), {"used": 3 * 2**20})


@pytest.mark.parametrize("visible", [None, "0", "0,1", "GPU-1"])
def test_gpu_samples_become_an_area_and_a_peak(monkeypatch, visible):
    monkeypatch.setattr(job, "pynvml", Driver())
    sampler = job.GpuSampler(visible)
    for second in range(5):
        sampler.sample()
        sampler.seconds[-1] = float(second)
    assert sampler.totals(float("inf")) == {"gpu_busy_seconds": 2.0, "gpu_memory_mb": 3.0}
    assert sampler.totals(3.0)["gpu_busy_seconds"] == 1.5  # without start-up


@pytest.mark.parametrize("visible", ["1", "GPU-2", ""])
def test_a_gpu_that_is_not_there_gives_no_figures(monkeypatch, visible):
    monkeypatch.setattr(job, "pynvml", Driver())
    sampler = job.GpuSampler(visible)
    sampler.sample()
    assert sampler.totals(float("inf")) == {"gpu_busy_seconds": None, "gpu_memory_mb": None}


def test_groups_end_with_their_last_value_and_average_the_other_column():
    ends, means = job.grouped(list(range(1, 1001)), list(range(1000)))
    assert (len(ends), ends[0], ends[-1]) == (100, 10, 1000)
    assert (means[0], means[-1]) == (4.5, 994.5)
    assert [column.tolist() for column in job.grouped([3], [7.0])] == [[3], [7.0]]
    assert [column.tolist() for column in job.grouped([], [])] == [[], []]


def test_the_end_of_a_log_has_the_last_state_of_a_progress_bar(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"first\n  0%|\r 50%|\r100%|\nTraceback\r\n")
    assert job.last_lines(log).splitlines() == ["first", "100%|", "Traceback"]
