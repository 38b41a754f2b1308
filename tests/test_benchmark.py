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
import torch
from capture import without_inductor
from conftest import INDUCTOR, LEANRL, ROOT, SHORT, make_commit, scripted_world, text
from envs import ScriptedGames
from torch.autograd import DeviceType
from torch.utils.tensorboard import SummaryWriter

from benchmark import curve, machine, profile_run, records, terminal
from benchmark.collection import COLLECTION
from benchmark.report import __main__ as report
from benchmark.report import plots, speed
from benchmark.studies import tricks
from benchmark.sweep import process

NAMES = sorted(path.stem for path in LEANRL.glob("*.py") if path.stem != "pool")


def test_the_collection_has_every_script_and_each_has_its_twin():
    scripts = {name for name in NAMES if not name.endswith("_multigpu")}
    assert scripts == {f"{name}{suffix}" for name in COLLECTION for suffix in ("", "_torchcompile")}


# ---- Tables ------------------------------------------------------------------------------------------------
def test_tables_are_those_of_the_results():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert report.render(path.read_text()) == path.read_text(), path


def line(mode: str, sps: float | None, gpu: str | None = None, **more) -> dict:
    """A line of results."""
    result = {"format": 1, "sweep": "a", "job": "b", "status": "ok", "attempts": 1, "algorithm": "sac"}
    result |= {"mode": mode, "env_id": "World-v0", "seed": 1, "script": "sac", "total_timesteps": 12_000}
    result |= {"sps": sps, "startup_seconds": 1.0, "cold_start": False, "git_commit": "0123456789"}
    result |= {"versions": {"torch": "2", "envpool": None}}
    return result | {"hardware": {"cpu": "A CPU", "cores": 2, "gpu": gpu}} | more


def test_speed_table_gives_median_range_and_ratios():
    lines = [line("eager", 90), line("eager", 100, seed=2), line("sbx", 80, startup_seconds=None)]
    lines += [line("compile", 180, startup_seconds=20.0, cold_start=True), {"status": "failed"}]
    lines += [line("compile", 150, seed=2, startup_seconds=5.0), line("compile", 400, seed=3)]
    table = speed.speed_table(lines)
    assert "| …LeanRL eager | 95 (90-100) | 1.00 |  | 1.0 |" in table
    # Of seed 3 there is no pair.
    assert "| …LeanRL `--compile` | 180 (150-400) | 1.89 (1.50-2.00) | 20.0 | 3.0 |" in table
    assert "| sac: SBX (JAX) | 80 | 0.84 |  |  |" in table
    assert table.endswith("A CPU, 2 cores; torch 2; commit 0123456")


def test_a_long_name_stands_in_the_first_row_of_its_runs():
    lines = [line(mode, 1.0, steps=steps) for steps in (10, 20) for mode in ("eager", "compile")]
    names = [row.split(" | ")[0] for row in speed.speed_table(lines).split("\n")[2:6]]
    first = [f"| sac, World-v0, {steps} steps: LeanRL eager" for steps in (10, 20)]
    assert names == [first[0], "| …LeanRL `--compile`", first[1], "| …LeanRL `--compile`"]
    calls = [line("", None, title=title, variant=of, microseconds=1.0) for title in "ab" for of in "xy"]
    names = [row.split(" | ")[0] for row in tricks.table(calls).split("\n")[2:6]]
    assert names == ["| a: x", "| …y", "| b: x", "| …y"]


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
    expected = ["| 200 | 2.00 |", "A CPU, 2 cores", "| 2000 | 5.00 |", "A GPU"]
    expected += ["| 300 |", "A CPU, 2 cores, MKL as on Intel"]
    expected += ["| 50 |", "A CPU, 2 cores, OMP_NUM_THREADS=1"]
    expected += ["| 3000 |", "A GPU, 2 runs at a time on it"]
    assert all(text in part for text, part in zip(expected, parts, strict=True))


def test_below_a_table_stand_the_versions_that_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    versions = {"LeanRL": "1", "python": "3", "torch": "2"}
    lines = [line("eager", 1.0, git_commit=str(number) * 40, versions=versions) for number in range(5)]
    records.replace(tmp_path / "runs.jsonl", lines)
    kinds = [f"<!-- table: {kind} runs.jsonl -->\n<!-- end -->" for kind in ("speed", "versions")]
    page = report.render("\n".join(kinds))
    told = [text.split("\n")[-3] for text in page.split("<!-- end -->")[:2]]
    assert told == ["A CPU, 2 cores; LeanRL 1, torch 2; 5 commits", "LeanRL 1, python 3, torch 2"]
    assert report.render(page) == page


def test_gpu_seconds_are_those_of_a_million_steps_that_learn():
    """Where these take ten seconds or more."""
    half = [line("both", 700, gpu_busy_seconds=busy, learning_starts=2_000) for busy in (4.0, 5.0, 6.0)]
    short = line("eager", 1100, gpu_busy_seconds=1.0, learning_starts=2_000)
    assert [speed.busy_per_million(runs) for runs in (half, [short])] == [500, None]


# ---- Files of results --------------------------------------------------------------------------------------
RUN = line("eager", None, more="is welcome", episodic_return=1.0)
CURVE = {"format": 1, "sweep": "a", "job": "b", "step": [1, 2], "seconds": [1.0, 2.0]}
CURVE |= {"episodic_return": [0.0, 1.0]}
# What is changed in a right line, and what is told of it.
WRONG = [
    (RUN, {"hardware": {"cpu": "A CPU"}}, "hardware.cores: Field required"),
    (RUN, {"more": {"it": [float("-inf")]}}, "has a number that is not finite"),
    (RUN, {"format": 2}, "has format 2, and this version reads format 1"),
    (CURVE, {"eval_step": [1]}, "has lists of several lengths: eval_step, eval_return"),
]


@pytest.mark.parametrize(("right", "change", "told"), WRONG)
def test_a_wrong_line_is_told_in_one_line_or_what_a_write_has_left(tmp_path, right, change, told):
    path, check = tmp_path / "results.jsonl", records.check_run if right is RUN else records.check_curve
    records.replace(path, [right], check)
    with path.open("a") as file:
        file.write(json.dumps(right | change))
    with pytest.raises(records.ResultsError) as refused:
        records.read(path, check)
    assert str(refused.value) == f"{path}, line 2: {told}"
    assert records.read(path, check, growing=True) == [right]


# ---- What is measured around a run -------------------------------------------------------------------------
# NVML with one GPU, which is half busy.
DRIVER = {"NVMLError": KeyError, "nvmlInit": lambda: None, "nvmlDeviceGetName": lambda _: "A GPU"}
DRIVER |= {"nvmlDeviceGetHandleByIndex": {0: "it"}.__getitem__}
DRIVER |= {"nvmlDeviceGetHandleByUUID": {"GPU-1": "it"}.__getitem__}
DRIVER |= {"nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=50)}
DRIVER |= {"nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * 2**20)}


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-1", "1", ""])
def test_gpu_samples_become_an_area_and_a_peak(monkeypatch, visible):
    monkeypatch.setattr(process, "pynvml", SimpleNamespace(**DRIVER))
    sampler = process.GpuSampler(visible)
    for _ in range(5):
        sampler.sample()
    sampler.seconds = list(range(len(sampler.seconds)))
    whole, without_start_up = sampler.totals(float("inf")), sampler.totals(3.0)
    found = [sampler.name, *whole.values(), without_start_up["gpu_busy_seconds"]]
    assert found == (["A GPU", 2.0, 3.0, 1.5] if visible in (None, "0,1", "GPU-1") else [None] * 4)
    assert process.training_seconds({"wall_seconds": 10.0, "startup_seconds": 4.0}) == 6


def test_a_curve_leaves_out_the_time_for_which_its_run_was_stopped():
    # Taken up at 100, and what was done since 20 is lost: it goes on as at 20.
    assert curve.seconds_run([0, 100, 200], [10, 20, 110, 130, 201]) == [10, 20, 30, 50, 51]


def test_a_curve_is_of_the_finite_returns_that_a_run_logged(tmp_path):
    (tmp_path / "starts.txt").write_text("0\n")
    with SummaryWriter(str(tmp_path / "a_run")) as writer:
        for step, value in ((1000, 1.0), (2000, 3.0)):
            writer.add_scalar("charts/episodic_return", value, step, walltime=step / 100)
            writer.add_scalar("charts/eval_return", value if step == 1000 else float("nan"), step)
    found = curve.in_groups(curve.logged(tmp_path))
    returns = {"step": [1000, 2000], "seconds": [10, 20], "episodic_return": [1, 3]}
    assert found == returns | {"eval_step": [1000], "eval_return": [1]}


def test_groups_end_with_their_last_value_and_average_the_other_column():
    ends, means = curve.grouped(list(range(1, 1001)), list(range(1000)))
    assert (len(ends), ends[0], ends[-1], means[0], means[-1]) == (100, 10, 1000, 4.5, 994.5)
    assert [column.tolist() for column in curve.grouped([], [])] == [[], []]


def test_the_end_of_a_log_has_the_last_state_of_a_progress_bar(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"first\n  0%|\r 50%|\r100%|\nTraceback\r\n")
    assert process.last_lines(log).splitlines() == ["first", "100%|", "Traceback"]


@pytest.mark.parametrize("printed", ["", "[1]", '{"sps": 1}\n...'])
def test_a_run_that_ends_with_anything_but_an_object_has_printed_no_summary(printed, tmp_path):
    (tmp_path / "stdout.txt").write_text(printed)
    assert process.failure(0, machine.summary_of(tmp_path / "stdout.txt")) == "printed no summary"


def test_a_processor_whose_name_says_little_is_told_by_its_family():
    numbers = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: "
    names = {"AMD EPYC": "AMD EPYC (family 25, model 17)", "Core(TM) i7-8700": "Core(TM) i7-8700"}
    assert {name: machine.processor(f"{numbers}{name}\nstepping\t: 1\n") for name in names} == names
    assert machine.processor("processor\t: 0\nBogoMIPS\t: 50.00\n") == platform.processor()


def test_what_a_run_is_made_with_is_asked_of_its_own_interpreter(tmp_path):
    (tmp_path / "script.py").touch()
    head = make_commit(tmp_path)
    information = tmp_path / "packages" / "envpool-9.9.dist-info" / "METADATA"  # not of this environment
    information.parent.mkdir(parents=True)
    information.write_text("Metadata-Version: 2.1\nName: envpool\nVersion: 9.9\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    about = machine.provenance((sys.executable, str(tmp_path / "script.py"), "--seed=1"), env, "A GPU")
    expected = {"python": platform.python_version(), "torch": metadata.version("torch"), "envpool": "9.9"}
    expected |= {"LeanRL": text("dqn").splitlines()[0].split()[-1]}
    assert about["versions"].items() >= expected.items() and "stable-baselines3" not in about["versions"]
    assert about["hardware"]["gpu"] == "A GPU" and about["git_commit"] == head
    (tmp_path / "script.py").write_text("changed = True")
    assert machine.commit(tmp_path) == f"{head}-dirty"


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
# What CleanRL's scripts ask of gym 0.21 and of Gymnasium 0.29: environments, cut off after seven steps.
OF_CLEANRL = """
from distutils.util import strtobool
import argparse, time, gym, gymnasium, numpy as np, torch
from torch.utils.tensorboard import SummaryWriter
parser = argparse.ArgumentParser()
for name in ("--env-id", "--seed", "--total-timesteps", "--learning-starts"):
    parser.add_argument(name)
args, device, writer = parser.parse_args(), torch.device("cpu"), SummaryWriter("run")
assert torch.get_num_threads() == 3 and strtobool("True")
assert (args.env_id, args.seed, args.learning_starts) == ("CartPole-v1", "3", "5")

class Falls(gym.Wrapper):  # in the last step of the second episode
    def step(self, action):
        obs, reward, _, truncated, info = self.env.step(action)
        return obs, reward, truncated and len(ended) == 1, truncated, info

def of_gym():
    env = gym.wrappers.RecordEpisodeStatistics(Falls(gym.make(args.env_id, max_episode_steps=7)))
    env.seed(1)
    return env

def of_gymnasium():
    env = gymnasium.make(args.env_id, max_episode_steps=7)
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: 0 * obs)

old, envs = gym.vector.SyncVectorEnv([of_gym]), gymnasium.vector.SyncVectorEnv([of_gymnasium] * 2)
assert old.reset().shape == envs.reset(seed=1)[0][:1].shape
ended, lengths = [], []
time.sleep(1)  # its start-up, which does not count
for step in range(int(args.total_timesteps)):
    time.sleep(0.01)
    obs, rewards, dones, infos = old.step(np.array([step % 2]))
    assert len(infos) == 1 and dones[0] == ("episode" in infos[0]) == ("terminal_observation" in infos[0])
    ended += [(infos[0]["episode"]["l"], infos[0]["TimeLimit.truncated"])] if dones[0] else []
    obs, rewards, terminated, truncated, infos = envs.step(np.array([step % 2, 1]))
    for index in np.flatnonzero(terminated | truncated):
        assert not infos["final_observation"][index].any()
        lengths += [infos["final_info"][index]["episode"]["l"]] if index == 0 else []
    writer.add_scalar("charts/SPS", 1, step)
assert ended == [(7, True), (7, False)] and lengths == [7, 7]
"""
# As a script of the original LeanRL logs, with the libraries of its time.
OF_LEANRL = """
import importlib.util, time
import torch, wandb
assert torch.get_num_threads() == 3 and importlib.util.find_spec("wandb")
device = "cpu"
wandb.init(project="a", name="b", config={}, save_code=True)
time.sleep(1)  # its start-up
for step in (100, 200, 300):
    time.sleep(0.2)
    wandb.log({"episode_return": 1.0, "speed": -1.0}, step=step)
wandb.log({"episode_return": 1.0}, step=10**9)
"""
# As RLtools, whose loop knows sizes and steps when it is compiled.
OF_RLTOOLS = """
import time
def TD3(env_factory, interface_name, enable_evaluation, **sizes):
    print("MKL found")
    assert interface_name.isidentifier() and not enable_evaluation
    assert env_factory().action_space.high == 1  # Pendulum-v1 itself has 2
    expected = dict.fromkeys(("ACTOR_HIDDEN_DIM", "CRITIC_HIDDEN_DIM"), 64)
    expected |= dict.fromkeys(("ACTOR_BATCH_SIZE", "CRITIC_BATCH_SIZE"), 32)
    assert sizes == expected | {"N_WARMUP_STEPS": 50, "STEP_LIMIT": 100}
    time.sleep(1)  # it compiles
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
# The program, its arguments, files beside it, and what its summary has: speed is between two numbers.
PEERS = [
    (
        "cleanrl dqn --cleanrl . --env-id=CartPole-v1 --seed=3 --total-timesteps=20 --threads=3"
        " --learning-starts=5",
        {"cleanrl/dqn.py": OF_CLEANRL},
        (25, 100, {"script": "cleanrl", "seed": 3}),
    ),
    (
        "original . dqn_torchcompile --env-id=CartPole-v1 --seed=2 --total-timesteps=300 --threads=3"
        " --compile",
        {"leanrl/dqn_torchcompile.py": OF_LEANRL},
        (200, 500, {"script": "leanrl", "seed": 2}),
    ),
    (  # 49 steps of a hundredth of a second
        "rl_tools td3_continuous_action --env-id=Pendulum-v1 --seed=2 --total-timesteps=100"
        " --learning-starts=50 --batch-size=32 --width=64",
        {"rltools.py": OF_RLTOOLS, "mkl-9.dist-info/METADATA": OF_MKL},
        (50, 100, {"script": "rltools", "blas": "MKL 9"}),
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
PROFILED = [("sac_continuous_action", ("--updates-per-step", "0.2"))]
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
        torch._inductor.config.patch(INDUCTOR),  # which the script changes
    ):
        try:
            profile_run.main()
        except SystemExit as left:
            return left.code
    return 0


@pytest.mark.parametrize(("name", "flags"), PROFILED)
def test_a_profile_tells_where_the_time_goes(name, flags, tmp_path, capsys):
    to = ("--trace", tmp_path / "profiles" / "trace.json.gz") if "ppo" in name else ()
    with without_inductor():
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
    called = "## Call CompiledFxGraph" if "--compile" in flags else "aten::"
    assert any(operator.startswith(called) for operator in operators)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    # Or num_steps, of which SHORT has as many.
    assert sum(event.get("name") == "environment" for event in events) == 50
    assert "total_timesteps" not in printed  # it ends there


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
def test_run_sh_names_the_scripts():
    done = subprocess.run([ROOT / "run.sh", "train", "none"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"run.sh: error: train takes one of: {' '.join(NAMES)}, got none\n"


# In place of Python: makes environments of itself, installs until a call waits, and notes what it is asked.
NOTING = """#!/bin/bash
echo "$@" >>"$NOTES"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" "$3/lib" && cp "$0" "$3/bin/python" ;;
  "-m pip --version") grep -q "^-m venv" "$NOTES" ;;
  "-m pip "*) for _ in {1..600}; do grep -q Waiting "$TOLD" && break; sleep 0.1; done ;;
  "-c import tensordict"*) exit 1 ;;
esac
"""


def test_run_sh_installs_once_also_what_a_call_that_was_stopped_has_left(tmp_path):
    """An environment without pip, as Ctrl+C in the first second of the first call leaves it."""
    checkout, python = tmp_path / "checkout", tmp_path / "python"
    checkout.mkdir()
    shutil.copy(ROOT / "run.sh", checkout)
    shutil.copytree(ROOT / "requirements", checkout / "requirements")
    python.write_text(NOTING)
    python.chmod(0o755)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(python, checkout / ".venv" / "bin" / "python")
    notes, told = tmp_path / "notes", tmp_path / "told"
    env = os.environ | {"PYTHON": str(python), "NOTES": str(notes), "TOLD": str(told), "MKL_AS_ON_INTEL": "0"}
    with told.open("ab") as stderr:
        start = [checkout / "run.sh", "python"]
        calls = [subprocess.Popen([*start, name], env=env, stderr=stderr) for name in ("a", "b")]
        assert [call.wait() for call in calls] == [0, 0]
    assert sorted(line.split()[0] for line in told.read_text().splitlines()) == ["Installing", "Waiting"]
    noted = notes.read_text().splitlines()
    installed = [sum(note.startswith(what) for note in noted) for what in ("-m venv", "-m pip install")]
    assert installed == [1, 1] and {*noted[-2:]} == {"a", "b"}
    # An environment of the user's own is taken as it is.
    env["VENV"] = str(checkout / ".venv")
    done = subprocess.run([*start, "c"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        f"run.sh: error: VENV={env['VENV']} lacks something"
    )
