"""Tables are made from the results, and a run's samples become its figures."""

import os
import platform
import subprocess
import sys
from importlib import metadata

import pytest
from conftest import ROOT, commit

sys.path.insert(0, str(ROOT / "benchmark"))
import job
import report
import results


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

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "A GPU"

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
    assert sampler.name == "A GPU"
    assert sampler.totals(float("inf")) == {"gpu_busy_seconds": 2.0, "gpu_memory_mb": 3.0}
    assert sampler.totals(3.0)["gpu_busy_seconds"] == 1.5  # without start-up


@pytest.mark.parametrize("visible", ["1", "GPU-2", ""])
def test_a_gpu_that_is_not_there_gives_no_figures(monkeypatch, visible):
    monkeypatch.setattr(job, "pynvml", Driver())
    sampler = job.GpuSampler(visible)
    sampler.sample()
    assert sampler.name is None
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


def test_what_a_run_is_made_with_is_asked_of_its_own_interpreter(tmp_path):
    head = commit(tmp_path)
    for package, version in {"envpool": "9.9", "sbx-rl": "0.1"}.items():  # in the environment of the run, and not in this one
        information = tmp_path / "packages" / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
        information.parent.mkdir(parents=True)
        information.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    about = job.provenance((sys.executable, str(tmp_path / "script.py"), "--seed=1"), env, "A GPU")
    expected = {"python": platform.python_version(), "torch": metadata.version("torch"), "envpool": "9.9", "sbx-rl": "0.1"}
    assert about["versions"].items() >= expected.items()
    assert "stable-baselines3" not in about["versions"]
    assert about["hardware"]["cpu"]
    assert (about["hardware"]["cores"], about["hardware"]["gpu"]) == (len(os.sched_getaffinity(0)), "A GPU")
    assert about["git_commit"] == head


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert job.provenance((sys.executable, __file__), dict(os.environ), None)["git_commit"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "is nested too deep"),
        (b"[]", "is no line of results"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b'{"format": 1, "sps": NaN}', "has a number that is not finite in sps"),
        (b'{"format": 1, "sps": 1e999}', "has a number that is not finite in sps"),
        (b'{"format": 1, "more": {"it": [-Infinity]}}', "has a number that is not finite in more"),
    ],
)
@pytest.mark.parametrize("name", ["results.jsonl", "curves.jsonl"])
def test_a_line_that_is_none_is_refused_in_one_line(tmp_path, name, content, message):
    for file in ("results.jsonl", "curves.jsonl"):
        (tmp_path / file).touch()
    (tmp_path / name).write_bytes(content + b"\n")
    done = subprocess.run([sys.executable, report.__file__, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"report.py: error: {tmp_path / name}, line 1: {message}\n"


def test_a_folder_in_place_of_results_is_refused_in_one_line(tmp_path):
    (tmp_path / "results.jsonl").mkdir()
    done = subprocess.run([sys.executable, report.__file__, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"report.py: error: [Errno 21] Is a directory: '{tmp_path / 'results.jsonl'}'\n"


@pytest.mark.parametrize("content", ["{", "[]", '{"title": "a"}'])
def test_figures_that_are_none_are_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr(report, "PUBLISHED", tmp_path)
    (tmp_path / "tricks.jsonl").write_text(f"{content}\n")
    with pytest.raises(results.ResultsError, match="line 1"):
        report.render("<!-- table: tricks tricks.jsonl -->\n<!-- end -->")


@pytest.mark.parametrize("write", [results.append, lambda path, line: results.replace(path, [line])])
def test_nothing_but_json_is_written(tmp_path, write):
    path = tmp_path / "results.jsonl"
    with pytest.raises(ValueError):
        write(path, {"sps": float("nan")})
    assert not path.exists() or not path.read_bytes()
