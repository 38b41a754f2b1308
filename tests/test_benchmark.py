"""Tables are made of the results, samples become a run's figures, a profile tells where its time goes."""

import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from conftest import LEANRL, ROOT, SHORT, make_commit, scripted_world
from envs import ScriptedGames
from torch.autograd import DeviceType

from benchmark import curve, machine, profile_run, records, terminal
from benchmark.collection import COLLECTION
from benchmark.report import __main__ as report
from benchmark.report import learning, plots, speed
from benchmark.studies import cuda_code, environments
from benchmark.sweep import process

NAMES = sorted(path.stem for path in LEANRL.glob("*.py") if path.stem != "pool")


def test_the_collection_has_every_script_and_each_has_its_twin():
    scripts = {name for name in NAMES if not name.endswith("_multigpu")}
    assert scripts == {f"{name}{suffix}" for name in COLLECTION for suffix in ("", "_torchcompile")}


# ---- Tables ------------------------------------------------------------------------------------------------
def test_tables_are_those_of_the_results():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert report.render(path.read_text()) == path.read_text(), path


def test_a_table_of_results_that_are_not_there_is_absent():
    text = "before\n<!-- table: speed none.jsonl -->\nold\n<!-- end -->\nafter"
    assert report.render(text) == "before\n<!-- table: speed none.jsonl -->\n<!-- end -->\nafter"
    with pytest.raises(records.ResultsError, match="no table of kind sped"):
        report.render("<!-- table: sped cpu.jsonl -->\n<!-- end -->")


STUDY = """
from benchmark import records, tables

class Line(records.Timing):
    answer: int

check = records.check_of(Line)

def table(lines):
    return f"{len(lines)} line: {lines[0]['answer']}"

def plot(lines, curves):
    return tables.panels(1, "The answer")[0]
"""


def test_a_study_is_one_file_and_a_line_of_a_page_and_no_table_needs_pytorch(tmp_path):
    # Nor does it need what runs sweeps.
    shutil.copytree(ROOT / "benchmark", tmp_path / "benchmark", ignore=shutil.ignore_patterns("sweep"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmark" / "studies" / "new.py").write_text(STUDY)
    (tmp_path / "torch.py").write_text("raise ImportError('no PyTorch')")
    about = line("eager", None, answer=42)
    records.replace(tmp_path / "benchmark" / "results" / "new.jsonl", [about], lambda line: None)
    page, content = tmp_path / "README.md", "![plot](docs/plots/new-new.png)\n"
    for kind in ("new", "environments", "go1", "roofline", "small_networks"):
        content += f"<!-- table: {kind} {kind}.jsonl -->\n<!-- end -->\n"
    page.write_text(content)
    subprocess.run([sys.executable, "-m", "benchmark.report"], cwd=tmp_path, check=True)
    assert "<!-- table: new new.jsonl -->\n\n1 line: 42\n\n<!-- end -->" in page.read_text()
    others = page.read_text().split("<!-- table: ")[2:]
    assert len(others) == 4 and all("\n| --- |" in other for other in others)
    assert (tmp_path / "docs" / "plots" / "new-new.png").exists()


def line(mode: str, sps: float | None, gpu: str | None = None, **more) -> dict:
    """A line of results."""
    result = {"format": 1, "sweep": "a", "job": "b", "status": "ok", "attempts": 1, "algorithm": "sac"}
    result |= {"mode": mode, "env_id": "World-v0", "seed": 1, "script": "sac", "total_timesteps": 12_000}
    result |= {"sps": sps, "startup_seconds": 1.0, "cold_start": False, "git_commit": "0123456789"}
    result |= {"versions": {"python": "3.12.1", "envpool": None}}
    return result | {"hardware": {"cpu": "A CPU", "cores": 2, "gpu": gpu}} | more


def test_a_check_is_missed_where_a_run_has_no_episode():
    name, check = next((name, check) for name, algorithm in COLLECTION.items() for check in algorithm.checks)
    about = {"algorithm": name, "env_id": check.env_id, "steps": check.steps}
    done = line("compile", 1.0, **about, episodic_return=check.least)
    none = line("compile", 1.0, **about, episodic_return=None)
    verdicts = [(row[2], row[-1]) for runs in ([done], [done, none]) for row in speed.check_rows(runs)]
    value = f"{check.least:.1f}"
    assert verdicts == [(value, speed.PASSED), (f"{value}, 1 failed", speed.MISSED)]


def test_speed_table_gives_median_range_and_ratios():
    lines = [line("eager", 90), line("eager", 100, seed=2), line("sbx", 80, startup_seconds=None)]
    lines += [line("compile", 180, startup_seconds=20.0, cold_start=True), {"status": "failed"}]
    lines += [line("compile", 150, seed=2, startup_seconds=5.0), line("compile", 400, seed=3)]
    table = speed.speed_table(lines)
    assert "| sac: LeanRL eager | 95 (90-100) | 1.00 | 1.19 |  | 1.0 |" in table
    # Of seed 3 there is no pair.
    assert "| sac: LeanRL `--compile` | 180 (150-400) | 1.89 (1.50-2.00) | 2.25 | 20.0 | 3.0 |" in table
    assert "| sac: SBX (JAX) | 80 | 0.84 | 1.00 |  |  |" in table
    assert table.endswith("A CPU, 2 cores; no GPU; python 3.12.1; commit 0123456")


def test_a_column_that_is_empty_in_each_row_is_left_out():
    header, *_, row = (
        speed.speed_table([line("eager", 100, startup_seconds=None)]).split("\n\n")[0].splitlines()
    )
    assert header == "|  | steps/s, median (range) | x eager (by seed) |"
    assert row == "| sac: LeanRL eager | 100 | 1.00 |"


def test_others_with_many_environments_stand_beside_ours():
    modes = {}
    for run in environments.published_runs(64):
        modes.setdefault(run["algorithm"], set()).add(run["mode"])
    assert modes == {name: {*environments.PEERS, "compile"} for name in environments.SIZES}


def test_the_returns_of_a_sweep_are_means_over_seeds():
    about = {"algorithm": "td3_continuous_action", "steps": 500}
    lines = [line("eager", 1.0, **about, seed=seed, episodic_return=10.0 * seed) for seed in (1, 2)]
    assert "success" not in learning.sweep_table(lines)
    rates = ((1, 0.5, 40.0), (2, None, 45.0), (3, 1.0, 50.0))
    for seed, rate, value in rates:
        lines.append(line("both", 1.0, **about, seed=seed, episodic_return=value, success_rate=rate))
    lines.append(line("ranks", 1.0, **about, episodic_return=None))  # no episode
    lines.reverse()  # seeds are in order, whatever ended first
    header, _, both, eager = learning.sweep_table(lines).splitlines()
    assert header.endswith("| success rate |")
    title = "| td3_continuous_action, World-v0: LeanRL"
    assert eager == f"{title} eager | 500 | 2 | 15.0 [10.0, 20.0] | 10.0, 20.0 |  |"
    assert both.endswith("| 500 | 3 | 45.0 [40.0, 50.0] | 40.0, 45.0, 50.0 | 0.75 |")


def test_speed_plot_shows_medians_and_their_ratios():
    speeds = {"eager": (100, 120, 200), "compile": (240, 300, 900)}
    lines = [line(mode, sps) for mode, of_mode in speeds.items() for sps in of_mode]
    [axis] = plots.plot_speed(lines).axes
    assert [bar.get_width() for bar in axis.patches] == [300, 120]
    assert [text.get_text().split() for text in axis.texts] == [["300", "(2.50x)"], ["120", "(1.00x)"]]


def test_machines_are_never_mixed():
    lines = [line("eager", 100), line("compile", 200)]
    lines += [line("eager", 400, gpu="A GPU"), line("both", 2000, gpu="A GPU")]
    lines += [line("compile", 300), line("compile", 50, threads=1)]
    lines += [line("both", 3000, gpu="A GPU", runs_per_gpu=2)]
    lines[4]["hardware"]["mkl"] = "as on Intel"
    parts = speed.speed_table(lines).split("\n\n")
    expected = ["| 200 | 2.00 |", "A CPU, 2 cores; no GPU", "| 2000 | 5.00 |", "A GPU"]
    expected += ["| 300 |", "A CPU, 2 cores, MKL as on Intel; no GPU"]
    expected += ["| 50 |", "A CPU, 2 cores, OMP_NUM_THREADS=1; no GPU"]
    expected += ["| 3000 |", "A GPU, 2 runs at a time on it"]
    assert all(text in part for text, part in zip(expected, parts, strict=True))


def test_figures_of_several_agents_on_record_are_those_of_all():
    """GPU seconds are those of a million steps that learn, where they take five seconds or more."""
    lines = [line("both", 700, gpu_busy_seconds=busy) for busy in (4.0, 5.0, 6.0)]
    lines.append(line("eager", 2100, gpu_busy_seconds=1.0))
    lines.append(line("seeds_both", 400, gpu_busy_seconds=4.0, seeds=[1, 2, 3, 4]))
    rows = [
        row.split(" | ")
        for row in speed.speed_table([run | {"learning_starts": 2_000} for run in lines]).split("\n")
    ]
    busy = {row[0].partition(": ")[2]: row[-1] for row in rows if len(row) > 2}
    assert busy["LeanRL eager"] == " |" and busy["LeanRL `--compile --cudagraphs`"] == "500 |"
    assert busy["LeanRL seeds, 4 agents `--compile --cudagraphs`"] == "100 |"
    [bars] = plots.plot_speed(lines).axes
    labels = [text.get_text() for text in bars.get_yticklabels()]
    assert labels == ["seeds, 4 agents --compile --cudagraphs", "--compile --cudagraphs", "eager"]


# ---- Files of results --------------------------------------------------------------------------------------
RUN = line("eager", None, more="is welcome", seeds=[1, 2])
RUN |= {"episodic_return": [1.0, None]}
CURVE = {"format": 1, "sweep": "a", "job": "b", "step": [1, 2], "seconds": [1.0, 2.0]}
CURVE |= {"episodic_return": [0.0, 1.0], "gpu_seconds": [], "gpu_utilization": []}
RIGHT = [(records.check_run, RUN), (records.check_curve, CURVE)]
# What is changed in a right line, and what is told of it.
WRONG = [
    (0, {"hardware": {"cpu": "A CPU"}}, "hardware.cores: Field required"),
    (0, {"more": {"it": [float("-inf")]}}, "has a number that is not finite"),
    (0, {"episodic_return": [1.0, "high"]}, "episodic_return"),
    (0, {"status": "failed"}, "reason: Field required"),
    (0, {"format": 2}, "has format 2, and this version reads format 1"),
    (1, {"step": [1, "x"]}, "step.1: Input should be a valid integer"),
    (1, {"seconds": [1.0]}, "has lists of several lengths: step, seconds"),
    (1, {"gpu_utilization": [0.5]}, "has lists of several lengths: gpu_seconds"),
    (1, {"eval_step": [1]}, "has lists of several lengths: eval_step, eval_return"),
]
# Contents of lines that are none.
BROKEN = {b"[" * 100_000: "recursion", b"12": "is no line of results"}
BROKEN |= {b"\xff": "'utf-8' codec can't decode byte 0xff", b'{"format": 1, "sw': "Unterminated string"}
LINES = [(kind, json.dumps(RIGHT[kind][1] | change).encode(), told) for kind, change, told in WRONG]


@pytest.mark.parametrize(("kind", "content", "told"), [*LINES, *((0, *broken) for broken in BROKEN.items())])
def test_a_wrong_line_is_told_in_one_line_or_what_a_write_has_left(tmp_path, kind, content, told):
    path, (check, right) = tmp_path / "results.jsonl", RIGHT[kind]
    records.replace(path, [right], check)
    whole = path.read_bytes()
    for end in (b"", b"\n"):  # which an editor may leave out
        path.write_bytes(whole + content + end)
        with pytest.raises(records.ResultsError) as refused:
            records.read(path, check)
        message = str(refused.value)
        assert message.startswith(f"{path}, line 2: ") and told in message and "\n" not in message
    path.write_bytes(whole + content)
    assert records.read(path, check, growing=True) == [right]


def test_what_report_cannot_read_is_told_in_one_line(tmp_path):
    (tmp_path / "results.jsonl").mkdir()
    command = [sys.executable, "-m", "benchmark.report", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"report: error: [Errno 21] Is a directory: '{tmp_path / 'results.jsonl'}'\n"
    with pytest.raises(records.ResultsError, match="none is not the folder of a sweep"):
        report.report_folder(tmp_path / "none")


def test_a_sweep_tells_its_options(tmp_path, capsys):
    records.append(tmp_path / "results.jsonl", line("eager", 1.0, steps=500, wall_seconds=2.0))
    about = {"format": 1, "id": "a", "profile": "quick", "git_commit": None}
    records.append(tmp_path / "sweep.json", about | {"options": {"num-envs": "64", "double": ""}, "ranks": 2})
    report.report_folder(tmp_path)
    assert "\n--options num-envs 64 double \n" in capsys.readouterr().out


def test_nothing_but_json_is_written(tmp_path):
    (path := tmp_path / "results.jsonl").touch()
    with pytest.raises(ValueError):
        records.append(path, {"sps": float("nan")})
    assert not path.read_bytes()


def test_what_cannot_be_an_output_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "page.md").write_text("# A page")
    for name in ("no/results.jsonl", "page.md"):
        with pytest.raises(SystemExit, match="2"):
            terminal.lines_of_output(tmp_path / name, records.check_run)
        assert ": error: --output takes a file" in capsys.readouterr().err
    assert terminal.lines_of_output(tmp_path / "new.jsonl", records.check_run) == []


# ---- Code for a GPU ----------------------------------------------------------------------------------------
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
    extern = {"mm": 1, "randint": 1, "convolution_backward": 1}
    assert cuda_code.count(CODE) == (2, extern, {"triton_poi_0": "the source"})


# Of SAC the policy and the two halves of a step; PPO acts in NumPy, prepares a rollout, and learns from it.
@pytest.mark.parametrize(("script", "count"), [("sac_continuous_action", 3), ("ppo_continuous_action", 2)])
def test_each_kind_of_gradient_step_is_a_graph(monkeypatch, script, count):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    of_ppo = ["--num-steps", "16", "--num-minibatches", "2"]
    small = of_ppo if COLLECTION[script].on_policy else ["--buffer-size", "256"]
    graphs = cuda_code.graphs_of(script, "--env-id", "Reacher-v4", *small)
    assert len({graph.name for graph in graphs}) == len(graphs) == count
    cuda_code.move_to_cuda(graphs[1].module)
    assert "device(type='cpu')" not in graphs[1].module.code


def test_without_a_build_for_cuda_there_is_one_line(capsys):
    with patch("torch.version.cuda", None), patch("sys.argv", ["code"]), pytest.raises(SystemExit, match="2"):
        cuda_code.main()
    [told] = capsys.readouterr().err.splitlines()
    assert ": error: needs PyTorch for CUDA" in told


# ---- What is measured around a run -------------------------------------------------------------------------
# NVML with one GPU, which is half busy.
DRIVER = {"NVMLError": KeyError, "nvmlInit": lambda: None, "nvmlDeviceGetName": lambda _: "A GPU"}
DRIVER |= {"nvmlDeviceGetHandleByIndex": {0: "it"}.__getitem__}
DRIVER |= {"nvmlDeviceGetHandleByUUID": {"GPU-1": "it"}.__getitem__}
DRIVER |= {"nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=50)}
DRIVER |= {"nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * 2**20)}


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-1", "1", "GPU-2", ""])
def test_gpu_samples_become_an_area_and_a_peak(monkeypatch, visible):
    monkeypatch.setattr(process, "pynvml", SimpleNamespace(**DRIVER))
    sampler = process.GpuSampler(visible)
    for _ in range(5):
        sampler.sample()
    sampler.seconds = list(range(len(sampler.seconds)))
    whole, without_start_up = sampler.totals(float("inf")), sampler.totals(3.0)
    found = [sampler.name, *whole.values(), without_start_up["gpu_busy_seconds"]]
    assert found == (["A GPU", 2.0, 3.0, 1.5] if visible in (None, "0,1", "GPU-1") else [None] * 4)


def test_training_seconds_leave_out_the_start_up():
    assert process.training_seconds({"wall_seconds": 10.0, "startup_seconds": 4.0}) == 6
    assert process.training_seconds({"wall_seconds": None}) == float("inf")


def test_a_curve_leaves_out_the_time_for_which_its_run_was_stopped():
    # Taken up at 100, and what was done since 20 is lost: it goes on as at 20.
    assert curve.seconds_run([0, 100, 200], [10, 20, 110, 130, 201]) == [10, 20, 30, 50, 51]


def test_groups_end_with_their_last_value_and_average_the_other_column():
    ends, means = curve.grouped(list(range(1, 1001)), list(range(1000)))
    assert (len(ends), ends[0], ends[-1], means[0], means[-1]) == (100, 10, 1000, 4.5, 994.5)
    assert [column.tolist() for column in curve.grouped([3], [7.0])] == [[3], [7.0]]
    assert [column.tolist() for column in curve.grouped([], [])] == [[], []]


def test_the_end_of_a_log_has_the_last_state_of_a_progress_bar(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"first\n  0%|\r 50%|\r100%|\nTraceback\r\n")
    assert process.last_lines(tmp_path / "log.txt").splitlines() == ["first", "100%|", "Traceback"]


def test_the_end_of_a_log_of_ranks_has_what_a_rank_said(tmp_path):
    rank, log = tmp_path / "rank.py", tmp_path / "log.txt"
    rank.write_text("raise SystemExit('no such environment')")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", rank]
    with log.open("w") as stderr:
        subprocess.run(command, stderr=stderr)
    said, told = process.last_lines(log).splitlines()
    assert said == "no such environment" and "failed (exitcode: 1) local_rank: 0" in told


@pytest.mark.parametrize("printed", ["", "[" * 100_000, "[1]", '{"sps": 1}\n...'])
def test_a_run_that_ends_with_anything_but_an_object_has_printed_no_summary(printed, tmp_path):
    (tmp_path / "stdout.txt").write_text(printed)
    assert process.failure(0, machine.summary_of(tmp_path / "stdout.txt")) == "printed no summary"


EPYC = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
XEON = "cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon @ 2.20GHz\n"
CORE = "cpu family\t: 6\nmodel\t\t: 158\nmodel name\t: Intel(R) Core(TM) i7-8700 CPU\n"
PROCESSORS = {EPYC: "AMD EPYC (family 25, model 17)", XEON: "Xeon @ 2.20GHz (family 6, model 85)"}
PROCESSORS |= {CORE: "Intel(R) Core(TM) i7-8700 CPU", "processor\t: 0\nmodel name\t: ARM\n": "ARM"}
PROCESSORS |= {"processor\t: 0\nBogoMIPS\t: 50.00\n": platform.processor()}


def test_a_processor_whose_name_says_little_is_told_by_its_family():
    assert {cpuinfo: machine.processor(cpuinfo) for cpuinfo in PROCESSORS} == PROCESSORS


def test_what_a_run_is_made_with_is_asked_of_its_own_interpreter(tmp_path):
    (tmp_path / "script.py").touch()
    head = make_commit(tmp_path)
    own = {"envpool": "9.9", "sbx-rl": "0.1"}  # in the environment of the run, and not in this one
    for package, version in own.items():
        information = tmp_path / "packages" / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
        information.parent.mkdir(parents=True)
        information.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    about = machine.provenance((sys.executable, str(tmp_path / "script.py"), "--seed=1"), env, "A GPU")
    expected = {"python": platform.python_version(), "torch": metadata.version("torch"), **own}
    assert about["versions"].items() >= expected.items() and "stable-baselines3" not in about["versions"]
    cpu, cores, gpu, *_ = about["hardware"].values()
    assert cpu and (cores, gpu) == (len(os.sched_getaffinity(0)), "A GPU")
    assert about["git_commit"] == head
    (tmp_path / "script.py").write_text("changed = True")
    assert machine.commit(tmp_path) == f"{head}-dirty"
    lines = [line("eager", 1, git_commit=found) for found in (head, f"{head}-dirty", None)]
    assert speed.speed_table(lines).endswith(f"; commit {head[:7]}, {head[:7]}-dirty, some not recorded")


# ---- Links -------------------------------------------------------------------------------------------------
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"(?s)```.*?```", "", page.read_text())  # without code
    for link in re.findall(r"\]\((?!https?:)([^()\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        headings = re.findall(r"(?m)^#+ (.*)$", target.read_text()) if anchor else []
        # As GitHub makes anchors of headings.
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings]
        assert not anchor or anchor in anchors, link


# ---- Other libraries ---------------------------------------------------------------------------------------
# What CleanRL's scripts ask of gym 0.21 and of Gymnasium 0.29: two environments, cut off after seven steps.
OF_CLEANRL = """
from distutils.util import strtobool
import argparse, gym, gymnasium, numpy as np, torch
from torch.utils.tensorboard import SummaryWriter
parser = argparse.ArgumentParser()
for name in ("--env-id", "--seed", "--total-timesteps", "--learning-starts"):
    parser.add_argument(name)
args, device, writer = parser.parse_args(), torch.device("cpu"), SummaryWriter("run")
assert torch.get_num_threads() == 3 and strtobool("True")
assert (args.env_id, args.seed, args.learning_starts) == ("CartPole-v1", "3", "5")

def of_gym():
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id, max_episode_steps=7))
    env.seed(1)
    return env

def of_gymnasium():
    env = gymnasium.make(args.env_id, max_episode_steps=7)
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: 0 * obs)

old, envs = gym.vector.SyncVectorEnv([of_gym]), gymnasium.vector.SyncVectorEnv([of_gymnasium] * 2)
assert old.reset().shape == envs.reset(seed=1)[0][:1].shape
ended, lengths = [], []
for step in range(int(args.total_timesteps)):
    obs, rewards, dones, infos = old.step(np.array([step % 2]))
    assert len(infos) == 1 and dones[0] == ("episode" in infos[0]) == ("terminal_observation" in infos[0])
    ended += [(infos[0]["episode"]["l"], infos[0]["TimeLimit.truncated"])] if dones[0] else []
    obs, rewards, terminated, truncated, infos = envs.step(np.array([step % 2, 1]))
    for index in np.flatnonzero(terminated | truncated):
        assert not infos["final_observation"][index].any()
        lengths += [infos["final_info"][index]["episode"]["l"]] if index == 0 else []
    writer.add_scalar("charts/SPS", 1, step)

class Life(gymnasium.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, True, truncated, info

lives = gymnasium.vector.SyncVectorEnv([lambda: Life(of_gymnasium())])
lives.reset(seed=1)
assert lives.step(np.array([0]))[-1]["final_info"] == [None]
assert gymnasium.wrappers.GrayScaleObservation and gymnasium.wrappers.FrameStack
assert ended == [(7, True)] * 2 and lengths == [7, 7]
"""
# As a script of the original LeanRL logs, with the libraries of its time.
OF_LEANRL = """
import importlib.util, sys, time
import torch, wandb
assert torch.get_num_threads() == 3 and importlib.util.find_spec("wandb")
device = "cpu"
wandb.init(project="a", name="b", config={}, save_code=True)
for step in (100, 200, 300):
    time.sleep(0.2)
    wandb.log({"episode_return": 1.0, "speed": -1.0}, step=step)
wandb.log({"episode_return": 1.0}, step=10**9)
"""
# As RLtools, whose loop knows sizes and steps when it is compiled.
OF_RLTOOLS = """
import os, time
def TD3(env_factory, interface_name, enable_evaluation, **sizes):
    print("MKL found")
    assert interface_name.isidentifier() and not enable_evaluation and os.environ["MKL_NUM_THREADS"]
    assert env_factory().action_space.high == 1  # Pendulum-v1 itself has 2
    expected = dict.fromkeys(("ACTOR_HIDDEN_DIM", "CRITIC_HIDDEN_DIM"), 64)
    expected |= dict.fromkeys(("ACTOR_BATCH_SIZE", "CRITIC_BATCH_SIZE"), 32)
    assert sizes == expected | {"N_WARMUP_STEPS": 50, "STEP_LIMIT": 100}
    class State:
        def __init__(self, seed):
            self.seed, self.steps = seed, 0
        def step(self):
            self.steps += 1
            assert self.seed == 2 and self.steps <= 100
            time.sleep(0.01 if self.steps > 51 else 0)
    return type("Module", (), {"State": State})
"""
OF_MKL = "Metadata-Version: 2.1\nName: mkl\nVersion: 9\n"
# The program, its arguments, files beside it, and what its summary has; SPS are more than the first number.
PEERS = [
    (
        "cleanrl dqn --cleanrl . --env-id=CartPole-v1 --seed=3 --total-timesteps=20 --threads=3"
        " --learning-starts=5",
        {"cleanrl/dqn.py": OF_CLEANRL},
        (0, float("inf"), {"script": "cleanrl", "seed": 3, "device": "cpu"}),
    ),
    (
        "original . dqn_torchcompile --env-id=CartPole-v1 --seed=2 --total-timesteps=300 --threads=3"
        " --compile",
        {"leanrl/dqn_torchcompile.py": OF_LEANRL},
        (100, 500, {"script": "leanrl", "seed": 2, "device": "cpu"}),
    ),
    (  # 49 steps of a hundredth of a second
        "rl_tools td3_continuous_action --env-id=Pendulum-v1 --seed=2 --total-timesteps=100"
        " --learning-starts=50 --batch-size=32 --width=64",
        {"rltools.py": OF_RLTOOLS, "mkl-9.dist-info/METADATA": OF_MKL},
        (50, 100, {"script": "rltools", "blas": "MKL 9", "device": "cpu"}),
    ),
]


@pytest.mark.parametrize(("command", "files", "expected"), PEERS, ids=["cleanrl", "original", "rltools"])
def test_scripts_of_other_libraries_run_as_they_are_and_are_timed_where_they_learn(
    tmp_path, command, files, expected
):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    program, *args = command.split()
    start = [sys.executable, ROOT / "benchmark" / "peers" / f"{program}.py", *args]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(start, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary, (least, most, said) = json.loads(done.stdout.splitlines()[-1]), expected
    assert least < summary["sps"] <= most and summary.items() >= said.items()


# ---- Profiles ----------------------------------------------------------------------------------------------
PROFILED = [("sac_continuous_action", ("--updates-per-step", "0.2")), ("ppo_atari_envpool", ())]
PROFILED += [("ppo_continuous_action_torchcompile", ("--compile",))]


def profile(folder: Path, *args) -> int | str | None:
    """The status that a profile in this folder leaves with, run in this process."""
    with (
        chdir(folder),
        patch.multiple(sys, argv=["profile_run.py", *map(str, args)], path=[*sys.path]),
        patch.dict(sys.modules, {"__main__": sys.modules["__main__"]}),
        patch.object(terminal, "PROGRAM", "profile_run.py"),
        patch("signal.signal"),
        patch("envpool.make", ScriptedGames),
    ):
        try:
            profile_run.main()
        except SystemExit as left:
            return left.code
    return 0


@pytest.mark.parametrize(("name", "flags"), PROFILED)
def test_a_profile_tells_where_the_time_goes(name, flags, tmp_path, capsys):
    to = () if "continuous" in name else ("--trace", tmp_path / "profiles" / "trace.json.gz")
    assert profile(tmp_path, name, *to, *scripted_world(name), *SHORT[name], *flags, "--no-cuda") == 0
    printed = capsys.readouterr().out
    *tables_, told = printed.split("\n\n")
    [trace] = (tmp_path / "profiles").iterdir()
    assert told == f"trace: {trace}\n"
    rows = [[re.split(r"\s{2,}", line) for line in table.splitlines()[1:]] for table in tables_]
    parts, operators = ({part: float(share.rstrip("%")) for part, _, share, *_ in table} for table in rows)
    known = {"policy", "update", "environment", "waiting for the device", "the rest"}
    on_policy = COLLECTION[name.removesuffix("_torchcompile")].on_policy
    assert set(parts) == known | ({"prepare"} if on_policy else set())
    assert min(parts[part] for part in known - {"waiting for the device"}) > 0
    assert sum(parts.values()) == pytest.approx(100, abs=0.5)
    assert parts.keys().isdisjoint(operators)
    called = "## Call CompiledFxGraph" if "--compile" in flags else "aten::"
    assert any(operator.startswith(called) for operator in operators)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    # Or num_steps, of which SHORT has as many.
    assert sum(event.get("name") == "environment" for event in events) == 50
    assert "total_timesteps" not in printed  # it ends there


TRACE = "--trace takes a file that can be written, got /"
REFUSED = [
    (("sac",), f"takes one of: {' '.join(NAMES)}, got sac"),
    (("sac_continuous_action", "--trace", "/dev/null/trace"), TRACE),
    (("sac_continuous_action", "--trace", "/"), TRACE),
]
for name, most, needed in (("sac_continuous_action", 159, 160), ("ppo_continuous_action", 199, 200)):
    short = (name, *scripted_world(name), *SHORT[name], "--total-timesteps", most, "--no-cuda")
    REFUSED.append((short, f"a profile takes {needed} agent steps, and this run makes {most}: see --"))


@pytest.mark.parametrize(("args", "message"), REFUSED)
def test_why_there_is_no_profile_is_told_in_one_line(tmp_path, capsys, args, message):
    assert profile(tmp_path, *args) == 2
    output, error = capsys.readouterr()
    assert f".py: error: {message}" in error.splitlines()[-1]
    assert not output and "Traceback" not in error


def test_what_is_wrong_with_the_arguments_of_a_script_is_told_as_the_script_does(tmp_path, capsys):
    assert profile(tmp_path, "sac_continuous_action", "--gamma", "2") == 2
    assert "less than or equal to 1" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["while True:\n    break", "while not last:\n    last = 1\n" * 2])
def test_a_script_without_one_main_loop_is_refused(source, capsys):
    with pytest.raises(SystemExit, match="2"):
        profile_run.hooked(source, Path("script"))
    assert "loops `while not last:`" in capsys.readouterr().err


def test_what_runs_on_the_device_and_waits_within_a_part_are_counted_once():
    def event(name, microseconds, parent=None, device=DeviceType.CPU):
        times = {"time_range": SimpleNamespace(elapsed_us=lambda: microseconds)}
        return SimpleNamespace(name=name, cpu_parent=parent, device_type=device, **times)

    policy = event("policy", 100)
    events = [event("ProfilerStep*", 1000), policy, event("policy", 70, device=DeviceType.CUDA)]
    events += [event("environment", 200), event("cudaStreamSynchronize", 300)]
    events += [event("cudaMemcpyAsync", 10, event("aten::copy_", 20, policy))]
    events += [event("cudaMemcpyAsync", 30, event("aten::copy_", 40))]
    run_profile = profile_run.RunProfile()
    run_profile.names, run_profile.steps = ["policy", "update", "environment"], 2
    run_profile.profiler = SimpleNamespace(events=lambda: events)
    expected = {"policy": 50, "update": 0, "environment": 100, "waiting for the device": 165, "the rest": 185}
    assert run_profile.rows() == (500, expected)


# ---- run.sh ------------------------------------------------------------------------------------------------
def test_run_sh_tells_how_to_use_it_and_names_the_scripts():
    done = subprocess.run([ROOT / "run.sh", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    told = ["sweep --help", "train NAME", "logs to runs/", "profile NAME", "in profiles/", "python [ARGS]"]
    assert [text for text in [*told, "PYTHON names"] if text not in done.stdout] == []
    assert not done.stdout.startswith("#")
    done = subprocess.run([ROOT / "run.sh", "train", "none"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"run.sh: error: train takes one of: {' '.join(NAMES)}, got none\n"


# In place of Python: makes environments of itself, installs until a call waits, and notes what it is asked.
NOTING = """#!/bin/bash
echo "$@" >>"$NOTES"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" "$3/lib" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) for _ in {1..600}; do grep -q Waiting "$TOLD" && break; sleep 0.1; done ;;
esac
"""


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
def test_two_first_calls_of_run_sh_install_once(tmp_path):
    checkout, python = tmp_path / "checkout", tmp_path / "python"
    checkout.mkdir()
    shutil.copy(ROOT / "run.sh", checkout)
    shutil.copytree(ROOT / "requirements", checkout / "requirements")
    python.write_text(NOTING)
    python.chmod(0o755)
    notes, told = tmp_path / "notes", tmp_path / "told"
    env = os.environ | {"PYTHON": str(python), "NOTES": str(notes), "TOLD": str(told), "MKL_AS_ON_INTEL": "0"}
    with told.open("ab") as stderr:
        start = [checkout / "run.sh", "python"]
        calls = [subprocess.Popen([*start, name], env=env, stderr=stderr) for name in ("a", "b")]
    assert [call.wait() for call in calls] == [0, 0]
    assert sorted(line.split()[0] for line in told.read_text().splitlines()) == ["Installing", "Waiting"]
    notes = notes.read_text().splitlines()
    installed = [sum(note.startswith(what) for note in notes) for what in ("-m venv", "-m pip install")]
    assert installed == [1, 1] and {*notes[-2:]} == {"a", "b"}


def test_run_sh_mends_an_environment_without_pip_and_takes_one_of_the_users_own(tmp_path):
    """As Ctrl+C in the first second of the first call leaves it."""
    shutil.copy(ROOT / "run.sh", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    env = os.environ | {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "MKL_AS_ON_INTEL": "0"}
    done = subprocess.run([tmp_path / "run.sh", "python"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "No matching distribution found" in done.stderr
    assert subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"]).returncode == 0
    own = ["python", "-c", "import sys; print(sys.prefix)"]
    for prefix, status in ((Path(sys.prefix), 0), (venv, 2)):
        env["VENV"] = os.path.relpath(prefix, tmp_path)
        done = subprocess.run(
            [tmp_path / "run.sh", *own], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == status
        told = f"run.sh: error: VENV={env['VENV']} lacks something: {venv}/bin/python -m pip install"
        assert (done.stdout.strip() == str(prefix)) if status == 0 else done.stderr.startswith(told)


PRODUCT = """
import hashlib, os, torch
torch.set_num_threads(1)
a = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
assert torch.allclose(a @ a, (a.double() @ a.double()).float(), atol=1e-3)
print(hashlib.sha256((a @ a).numpy()).hexdigest(), os.environ["LD_PRELOAD"])
"""
CPUINFO = Path("/proc/cpuinfo")
AMD = CPUINFO.exists() and "AuthenticAMD" in CPUINFO.read_text()
ABLE = AMD and shutil.which("cc") and " " not in str(ROOT) and Path(sys.prefix) == ROOT / ".venv"


@pytest.mark.skipif(not ABLE, reason="needs an AMD processor, a compiler and the environment of run.sh")
def test_run_sh_has_mkl_take_other_code_on_amd():
    """What tells is that it sums in another order, as precisely."""
    options = {"env": os.environ | {"LD_PRELOAD": "", "CC": "cc -O2"}, "capture_output": True, "check": True}

    def product(*program) -> list[str]:
        return subprocess.run([*program, "-c", PRODUCT], **options).stdout.decode().split()

    own, preloaded = product(sys.executable), product(ROOT / "run.sh", "python")
    assert own[0] != preloaded[0]
    options["env"] |= {"MKL_AS_ON_INTEL": "0"}
    assert product(ROOT / "run.sh", "python") == own
    for library, expected in ((preloaded[1], "as on Intel"), ("/no/mkl_as_on_intel.so", None), ("", None)):
        about = machine.provenance((sys.executable, __file__), os.environ | {"LD_PRELOAD": library}, None)
        assert about["hardware"].get("mkl") == expected
