"""The tables are made from the results, and a run's samples become its figures."""

import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import cuda_code
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


def graph(version: str, launches: int | None, **more) -> dict:
    """A line of cuda_code.jsonl; of a graph without code, if there are no launches."""
    result = {"format": results.FORMAT, "script": "sac", "env_id": "World-v0", "graph": "act", "torch": version}
    result |= {"triton": "3.7.1", "git_commit": "0123456789", "generated": launches is not None}
    if launches is None:
        return result | {"error": "AssertionError: in lower: assert True"} | more
    counted = {"extern_calls": {"mm": 4, "randint": 1}, "kernels": 2, "compiled": 2, "spilling": 1, "errors": []}
    return result | {"triton_launches": launches, **counted} | more


def test_cuda_code_table_has_a_column_for_each_version_and_tells_of_failures():
    first, error, made_with = report.cuda_code_table([graph("2.13.0", 3), graph("2.9.1", None)]).split("\n\n")
    assert "Triton launches, torch 2.9.1 | Triton launches, torch 2.13.0 |" in first
    assert "| sac, World-v0: act | fails | 3 | mm 4, randint 1 | 2 of 2 | 1 |" in first
    assert error == "torch 2.9.1 fails: `AssertionError: in lower: assert True`"
    assert made_with == "torch 2.9.1 with Triton 3.7.1, torch 2.13.0 with Triton 3.7.1; commit 0123456"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (graph("2.13.0", 3) | {"triton_launches": "3"}, "triton_launches"),
        (graph("2.13.0", 3) | {"generated": False}, "error"),
        (graph("2.13.0", 3, compiled=1), "neither compile nor have an error"),
        (graph("2.13.0", None, format=0), "format 0"),
    ],
)
def test_a_wrong_line_of_cuda_code_is_refused(tmp_path, line, reason):
    path = tmp_path / "cuda_code.jsonl"
    right = [graph("2.13.0", 3), graph("2.11.0", None)]
    results.replace(path, right)
    assert results.read_code(path) == right
    results.replace(path, [*right, line])
    with pytest.raises(results.ResultsError, match=f"line 3: .*{reason}"):
        results.read_code(path)


# As Inductor writes it, shortened.
CODE = """
triton_poi_0 = async_compile.triton('triton_poi_0', '''the source''', device_str='cuda')
class Runner:
    def call(self, args):
        triton_poi_0.run(arg0_1, buf0, 4, stream=raw_stream0)
        extern_kernels.mm(reinterpret_tensor(buf0, (2, 2), (2, 1), 0), arg1_1, out=buf1)
        aten.randint.low_out(0, 1, [1], out=buf2)
        buf3 = torch.ops.aten.convolution_backward.default(buf1, arg2_1)
        triton_poi_0.run(buf3, buf4, 4, stream=raw_stream0)
        # triton_poi_0.run(buf3, buf4, 4, stream=raw_stream0)
runner = Runner(partitions=[])
def benchmark_compiled_module():
    extern_kernels.mm(arg1_1, arg1_1, out=buf1)
"""


def test_launches_are_counted_where_the_code_runs():
    launches, extern, sources = cuda_code.count(CODE)
    assert launches == 2
    assert extern == {"mm": 1, "randint": 1, "convolution_backward": 1}
    assert sources == {"triton_poi_0": "the source"}


@pytest.mark.parametrize(
    ("script", "small", "names"),
    [
        (
            "sac_continuous_action",
            ["--buffer-size", "256"],
            ["act", "update(update_actor=False, update_target=True)", "update(update_actor=True, update_target=True)"],
        ),
        ("ppo_continuous_action", ["--num-steps", "16", "--num-minibatches", "2"], ["act", "prepare", "update"]),
    ],
)
def test_each_kind_of_gradient_step_is_a_graph(monkeypatch, script, small, names):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    graphs = cuda_code.graphs_of(script, "--env-id", "Reacher-v4", *cuda_code.SCRIPTS[script][1], *small)
    assert [graph.name for graph in graphs] == names
    cuda_code.move_to_cuda(graphs[1].module)
    assert "device(type='cpu')" not in graphs[1].module.code


def test_without_a_build_for_cuda_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(sys, "argv", ["cuda_code.py"])
    with pytest.raises(SystemExit) as end:
        cuda_code.main()
    assert end.value.code == 2
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith("cuda_code.py: error: needs a build of PyTorch for CUDA")


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
