"""The benchmark survives what can happen to it: with a stand-in for a script, and all else real."""

import itertools
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import LEANRL, ROOT, SEEDS, make_commit
from slurm import SlurmUnavailable, slurm_cluster, wait_until

from benchmark.report import results, tables
from benchmark.sweep import __main__ as sweep
from benchmark.sweep import folder as sweep_folder
from benchmark.sweep import runs as selection
from benchmark.sweep.executors import write_job
from benchmark.sweep.process import Job, run_job

# Prints a summary, after what the file named like its seed says in Python, once or, with a trailing "!", each
# time. It may set `said`, a part of the summary, and `pause`, which follows each step with checkpoints.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # torch.utils.tensorboard takes seconds
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

def end_in_order():
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, _: os._exit(3) if number in asked else asked.append(number))

options = dict(argument[2:].split("=") for argument in sys.argv[1:] if "=" in argument)
here, seed = Path(__file__).parent, int(options["seed"])
with (here / "starts.txt").open("a") as starts:
    threads, cores = os.environ.get("OMP_NUM_THREADS"), len(os.sched_getaffinity(0))
    starts.write(f"{Path(__file__).stem} {seed} {threads} {cores}\\n")
print("a line of the log", file=sys.stderr)
asked, said, pause = [], {}, 0.02
if (told := here / str(seed)).exists():
    todo = told.read_text()
    todo.endswith("!") or told.unlink()
    exec(todo.rstrip("!"))
folder = Path(options.get("resume", "runs/one"))
first = max((int(path.stem) for path in folder.glob("*.pt")), default=0)
writer = EventFileWriter(str(folder))
if first:  # events of later steps are of what is lost
    log = SessionLog(status=SessionLog.START)
    writer.add_event(Event(step=first + 1, wall_time=time.time(), session_log=log))
returns = [*(step / 2 for step in range(1, 251)), float("inf")]
for step, value in list(enumerate(returns, start=1))[first:]:
    scalar = Summary.Value(tag="charts/episodic_return", simple_value=value)
    writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[scalar])))
    if every := int(options.get("checkpoint-every", 0)):
        with (here / "steps.txt").open("a") as steps:
            steps.write(f"{step}\\n")
        time.sleep(0.5 if asked else pause)
        if step % every == 0 or asked:
            writer.flush()
            Path(folder, f"{step}.pt").touch()
        if asked:
            sys.exit(128 + asked[0])
writer.close()
ballast = b"1" * 2**27
summary = {"script": Path(__file__).stem, "env_id": options["env-id"], "seed": seed, "total_timesteps": 250}
summary |= {"sps": 100.0 + seed, "startup_seconds": 1.0, "wall_seconds": 0.5, "device": "cpu"}
summary |= {"episodic_return": 100.0, "episodic_return_10": 120.0}
print(json.dumps(summary | said))
"""
WAIT = "while (here / 'hold').exists(): time.sleep(0.05)"
# The sweep asks PyTorch for the number of GPUs, and nothing else: this takes no two seconds.
NO_GPU = "class cuda:\n    device_count = staticmethod(lambda: 0)\n"


class House:
    """A copy of benchmark/ beside a stand-in for TD3's eager script."""

    def __init__(self, path: Path):
        self.path, self.leanrl, self.folder = path, path / "leanrl", path / "sweep"
        left_out = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / "benchmark", path / "benchmark", ignore=left_out)
        (path / "torch.py").write_text(NO_GPU)
        self.leanrl.mkdir()
        (self.leanrl / "td3_continuous_action.py").write_text(STAND_IN)

    def tell(self, seed: int, behaviour: str) -> None:
        """Have the stand-in do something when it runs with this seed."""
        (self.leanrl / str(seed)).write_text(behaviour)

    def command(self, *args, seeds: int = 3) -> list[str]:
        program = [sys.executable, "-m", "benchmark.sweep", "--folder", self.folder]
        selected = ["--scripts", "td3_continuous_action", "--modes", "eager", "--seeds", *range(seeds)]
        return list(map(str, [*program, *selected, *args]))

    def sweep(self, *args, seeds: int = 3, **options) -> subprocess.CompletedProcess:
        """Run a sweep to its end."""
        options = {"capture_output": True, "text": True, "timeout": 300, "cwd": self.path} | options
        return subprocess.run(self.command(*args, seeds=seeds), **options)

    def start(self, *args, seeds: int = 3, **options) -> subprocess.Popen:
        """Start a sweep."""
        options |= {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": self.path}
        return subprocess.Popen(self.command(*args, seeds=seeds), **options)

    def job(self, checkpoint_every: int, time_limit: float) -> Path:
        """The folder of what a sweep would have a process do for the stand-in with seed 0."""
        (folder := self.path / "job").mkdir()
        command = [sys.executable, str(self.leanrl / "td3_continuous_action.py"), "--env-id=A", "--seed=0"]
        command.append(f"--checkpoint-every={checkpoint_every}")
        write_job(folder, Job(command, str(self.path / "cache"), time_limit, resumable=True))
        return folder

    def steps(self) -> list[int]:
        """The steps that the stand-in has noted, with checkpoints only."""
        path = self.leanrl / "steps.txt"
        return list(map(int, path.read_text().split())) if path.exists() else []

    def stand_ins(self) -> list[int]:
        """The stand-ins that run."""
        done = subprocess.run(["pgrep", "-f", f"{self.leanrl}/td3"], capture_output=True, text=True)
        return list(map(int, done.stdout.split()))

    def starts(self) -> list[list[str]]:
        """What is known of each start of the stand-in: script, seed, threads, cores."""
        path = self.leanrl / "starts.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_starts(self, count: int) -> None:
        assert wait_until(lambda: len(self.starts()) >= count)

    def curves(self) -> list[dict]:
        return results.read(self.folder / "curves.jsonl", results.check_curve)

    def lines(self) -> list[dict]:
        """The results, which have to be in order."""
        lines = results.read(self.folder / "results.jsonl")
        done = [line["job"] for line in lines if line["status"] == "ok"]
        assert [curve["job"] for curve in self.curves()] == done
        assert len({line["job"] for line in lines}) == len(lines)
        return lines

    def done(self) -> list[int]:
        return sorted(line["seed"] for line in self.lines() if line["status"] == "ok")


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def start_job(folder: Path) -> multiprocessing.Process:
    """Run a job without a sweep."""
    process = multiprocessing.get_context("spawn").Process(target=run_job, args=(folder,))
    process.start()
    return process


def outcome_of(folder: Path) -> dict:
    return json.loads((folder / "outcome.json").read_text())


# ---- What is measured --------------------------------------------------------------------------------------
def test_a_sweep_writes_a_line_and_a_curve_a_run_a_table_and_plots(house):
    head = make_commit(house.path)
    said = {"versions": {"python": "2.7"}, "hardware": None, "git_commit": 1, "peak_memory_mb": 1.0}
    house.tell(1, f"said = {said}")  # the harness knows better
    done = house.sweep()
    assert done.returncode == 0, done.stderr
    lines = house.lines()
    keys = ("seed", "mode", "status", "attempts", "cold_start", "git_commit", "gpu_busy_seconds")
    assert [tuple(line[key] for key in keys) for line in lines] == [
        (seed, "eager", "ok", 1, seed == 0, head, None) for seed in range(3)
    ]
    for line in lines:
        assert line["cpu_busy_seconds"] > 0.1 and 128 < line["peak_memory_mb"] < 1000
        assert line["versions"]["python"] == platform.python_version()
        assert line["hardware"]["cores"] == len(os.sched_getaffinity(0))
    curve = house.curves()[0]
    assert len(curve["step"]) == 100
    assert curve["step"][-1] == 250
    # Of 250 episodes the first 50 groups have three: the means of 1, 2, 3 and of 249 and 250, halved.
    assert (curve["episodic_return"][0], curve["episodic_return"][-1]) == (1.0, 124.75)
    assert all(0 < second < 60 for second in curve["seconds"])
    assert "| td3_continuous_action: LeanRL eager | 101 (100-102) | 1.00 |" in done.stdout
    plots = sorted(path.name for path in (house.folder / "plots").glob("*.png"))
    assert plots == ["return-by-step.png", "return-by-time.png", "speed.png"]
    assert str(house.folder / "plots") in done.stdout
    assert "[3/3]" in done.stderr


def test_runs_share_a_gpu(house, capsys):
    """One that is pretended."""
    (house.path / "torch.py").write_text(NO_GPU.replace("0", "1"))
    for seed in range(2):
        house.tell(seed, f"{WAIT}!")
    (house.leanrl / "hold").touch()
    process = house.start("--runs-per-gpu", "2", seeds=2, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
    house.wait_for_starts(2)  # neither has ended
    (house.leanrl / "hold").unlink()
    process.communicate(timeout=60)
    assert process.returncode == 0
    cores = len(os.sched_getaffinity(0))
    assert [start[2:] for start in house.starts()] == [[str(cores // 2)] * 2] * 2
    assert [line["runs_per_gpu"] for line in house.lines()] == [2, 2]
    on_one = [line | {"hardware": line["hardware"] | {"gpu": "NVIDIA Pretended"}} for line in house.lines()]
    alone = [line | {"runs_per_gpu": 1} for line in on_one]
    assert "NVIDIA Pretended, 2 runs at a time on it" in tables.speed_table(on_one)
    assert len(tables.machines(on_one + alone)) == 2  # no table of both
    with patch.object(sweep, "visible_gpus", lambda args: ["0"]):
        assert refused(capsys, house.path, "--workers", "2").startswith("--workers takes a number from 1 to ")
        assert "cores" in refused(capsys, house.path, "--runs-per-gpu", str(cores + 1))
    with patch.object(sweep, "visible_gpus", lambda args: []):
        assert "where there is no GPU" in refused(capsys, house.path, "--runs-per-gpu", "2")


def test_a_run_of_several_agents_is_one_line_without_a_curve(house):
    """Of which one was lost: it counts as a run of the others, and is not repeated."""
    sibling = house.leanrl / "td3_continuous_action_seeds.py"
    sibling.write_text(f"{STAND_IN}\nimport shutil\nshutil.copytree(folder, 'runs/another')\n")
    agents = {"seeds": [1, 2, 3], "lost_seeds": {"2": "qf_loss is nan at step 9"}}
    agents |= {"episodic_return": [90.0, None, 70.0], "episodic_return_10": [95.0, None, 75.0]}
    house.tell(1, f"said = {agents}")
    scripts = ("--scripts", "td3_continuous_action", "ppo_continuous_action")
    done = house.sweep(*scripts, "--modes", "seeds", "--seeds", "1", "--checkpoint-every", "10")
    assert done.returncode == 0, done.stderr
    reason = "needs leanrl/ppo_continuous_action_seeds.py, which there is not"
    assert done.stderr.splitlines()[0] == f"skipped: seeds {reason}"
    [line] = house.lines()
    assert (line["script"], line["seed"], line["attempts"]) == (sibling.stem, 1, 1)
    assert {key: line[key] for key in agents} == agents
    [curve] = house.curves()
    assert (curve["step"], curve["seconds"], curve["episodic_return"]) == ([], [], [])
    assert not list(house.folder.rglob("*.pt"))  # it could not go on from what run_job finds
    assert "| td3_continuous_action: LeanRL seeds, 2 agents `--compile` | 101 |" in done.stdout
    assert f"lost: the agent of seed 2 in {line['job']}: qf_loss is nan at step 9" in done.stdout
    assert [path.name for path in (house.folder / "plots").iterdir()] == ["speed.png"]


def test_real_scripts_are_what_the_sweep_takes_them_for(tmp_path):
    """One is stopped and goes on from its checkpoint, in the folder that it had; another has two agents."""
    run = selection.Run("td3_continuous_action", "eager", "A", 1, 9, 1)
    book = sweep_folder.Record(tmp_path, "quick")

    def job(script: str, steps: int, *options: str) -> Path:
        (folder := tmp_path / script).mkdir(exist_ok=True)
        command = [sys.executable, str(LEANRL / f"{script}.py"), "--env-id=InvertedPendulum-v4", "--no-cuda"]
        command += ["--learning-starts=100", "--log-every=10", f"--total-timesteps={steps}", *options]
        write_job(folder, Job(command, str(tmp_path / "cache"), 60, "--checkpoint-every=99999" in options))
        return folder

    agents = job("td3_continuous_action_seeds", 200, "--num-seeds=2")
    single = job("td3_continuous_action", 100_000, "--checkpoint-every=99999")
    first, second = start_job(agents), start_job(single)
    log = single / "log.txt"
    assert wait_until(lambda: log.exists() and "SPS" in log.read_text())  # is training
    for _ in range(2):  # as Slurm may send it to each process of a job
        second.terminate()
        time.sleep(0.1)
    second.join(60)
    [saved] = single.glob("runs/*/[0-9]*.pt")
    step = int(saved.stem)
    single = job("td3_continuous_action", step + 200, "--checkpoint-every=99999")
    for process in (first, start_job(single)):
        process.join(60)
    line, curve = book.lines_of(run, outcome_of(single), 1)
    assert (line["status"], line["resumed"], line["total_timesteps"]) == ("ok", step, step + 200)
    assert line["startup_seconds"] > 0.5 and line["sps"] > 0
    assert 0 < curve["step"][-1] <= step + 200
    line, curve = book.lines_of(run, outcome_of(agents), 1)
    assert (line["status"], line["seeds"], line["lost_seeds"]) == ("ok", [1, 2], {})
    assert len(line["episodic_return"]) == 2 and curve["step"] == []


# ---- Selection and arguments -------------------------------------------------------------------------------
def test_learning_takes_one_mode_and_the_seeds_of_each_script_in_rounds():
    runs = selection.select(selection.Args(profile="learning"), gpus=["0"])
    assert {(run.mode, run.checkpoint_every) for run in runs} == {("both", 50_000)}
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for script, task in selection.TASKS.items():
        chosen = [(run.env_id, run.seed) for run in runs if run.algorithm == script]
        assert sorted(chosen) == sorted(itertools.product(task.learning_env_ids, task.learning_seeds))


def test_each_seed_of_the_selection_is_a_run_of_several_agents():
    runs = selection.select(selection.Args(modes=("both", "seeds_both"), seeds=(3, 5)), gpus=["0"])
    of_several = [run for run in runs if run.mode == "seeds_both"]
    assert {run.algorithm for run in of_several} == {name.removesuffix("_seeds") for name in SEEDS}
    assert [run.seed for run in of_several] == sorted([3, 5] * len(SEEDS))
    for run in of_several:
        _, script, *flags = run.command(None)
        assert Path(script).name == f"{run.algorithm}_seeds.py"
        assert {"--compile", "--cudagraphs", f"--seed={run.seed}"} <= set(flags)


def test_modes_that_a_machine_cannot_run_are_skipped_with_the_reason(capsys):
    with pytest.raises(SystemExit, match="2"):
        selection.select(selection.Args(modes=("cudagraphs", "both")), gpus=[])
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "skipped: both needs CUDA, and there is no device"
    assert second == "skipped: cudagraphs needs CUDA, and there is no device"
    assert "nothing is selected" in third


def refused(capsys, folder: Path, *args) -> str:
    """The line in which a sweep that would be of one run has refused to start, with status 2."""
    command = ["sweep", "--modes", "eager", "--seeds", "1", "--folder", str(folder), *map(str, args)]
    names = patch("benchmark.terminal.PROGRAM", "sweep"), patch.object(sweep, "PROGRAM", "sweep")
    with patch("sys.argv", command), names[0], names[1], patch("signal.signal"):
        try:
            status = sweep.main()
        except SystemExit as left:
            status = left.code
    assert status == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("sweep: error: ")
    return told.removeprefix("sweep: error: ")


MODES = "eager, twin, compile, cudagraphs, both, tf32, seeds, seeds_both, cleanrl, sb3, sbx"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scripts", "c51"], "--scripts takes sac_continuous_action, td3_"),
        (["--modes", "fast"], f"--modes takes {MODES}; got fast"),
        (["--modes", "sbx"], "--modes cleanrl, sb3, sbx need --peers"),
        (["--profile", "long"], "--profile takes quick, speed, full, learning; got long"),
        (["--cluster", "pbs"], "--cluster takes local, slurm; got pbs"),
        (["--seeds"], "nothing is selected"),
        (["--scripts"], "nothing is selected"),
        (["--workers", "0"], "--workers takes a number from 1"),
        (["--workers", "1000"], "--workers and --runs-per-gpu: 1000 runs at a time, and there are"),
        (["--total-timesteps", "0"], "--total-timesteps takes a number from 1"),
        (["--folder", "/proc/a"], "--folder takes a folder that can be written to, got /proc/a: "),
        (["--folder", "/dev/null"], "--folder takes a folder that can be written to, got /dev/null: "),
    ],
)
def test_bad_arguments_are_told_in_one_line(tmp_path, capsys, args, message):
    with patch.object(sweep, "visible_gpus", lambda args: []):
        assert refused(capsys, tmp_path, *args).startswith(message)
    assert not (tmp_path / "jobs").exists()


def test_a_folder_of_another_profile_or_version_is_refused(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text('{"format": 0}\n{"format": 0}\n')
    error = f"{tmp_path / 'results.jsonl'}, line 1: has format 0, and this version reads format 1"
    assert refused(capsys, tmp_path) == f"--folder {tmp_path}: {error}"
    message = f"--folder {tmp_path}: has a sweep of profile quick, not speed"
    assert refused(capsys, tmp_path, "--profile", "speed") == message


# ---- What can happen to a run ------------------------------------------------------------------------------
# What a stand-in does, and how it is told of.
FAILURES = {
    "os.kill(os.getpid(), 9)": "killed by SIGKILL",
    "sys.exit('all agents are lost')": "exit status 1",
    "time.sleep(99)": "took longer than 6 s",
    # Who watches it dies.
    "os.kill(os.getppid(), 9); time.sleep(99)": "the process that ran it died",
    "said = {'wall_seconds': 'long'}": "printed a summary that ",
    "said = {'more': [float('nan')]}": "printed a summary that has a number that is not finite",
}


def test_a_run_that_fails_is_tried_again_and_then_recorded(house):
    """A seed for each that fails each time, two that fail once, and one that is done at once."""
    always = dict(enumerate(FAILURES, start=101))
    once = {1: always[101], 2: always[104]}
    for seed, behaviour in (once | always).items():
        house.tell(seed, behaviour + ("!" if seed in always else ""))
    done = house.sweep("--time-limit", 0.1, "--seeds", 0, *once, *always, "--workers", 2)
    assert done.returncode == 1
    assert not house.stand_ins()
    lines = {line["seed"]: line for line in house.lines()}
    assert lines.keys() == {0, *once, *always}
    assert [lines[seed]["attempts"] for seed in (0, *once, *always)] == [1, 2, 2, 2, 2, 2, 2, 1, 1]
    for seed, behaviour in always.items():
        line = lines[seed]
        assert line["reason"].startswith(FAILURES[behaviour])
        assert f"failed: {line['job']}: {line['reason']}" in done.stdout
        if seed <= 103:
            assert line["log"].startswith("a line of the log")
            assert line["versions"]["python"] == platform.python_version()
    assert "wall_seconds" in lines[105]["reason"]
    assert "Traceback" not in done.stderr
    share = str(len(os.sched_getaffinity(0)) // 2)  # of the cores, for each of the workers
    assert {tuple(start[2:]) for start in house.starts()} == {(share, share)}

    # What failed is tried again, and only that; what is not selected stays on record.
    (house.leanrl / "101").unlink()
    starts = len(house.starts())
    assert house.sweep("--seeds", 0, 1, 101, env=os.environ | {"PATH": ""}).returncode == 0  # without git
    assert len(house.starts()) == starts + 1
    assert house.done() == [0, 1, 2, 101]
    lines = {line["seed"]: line for line in house.lines()}
    assert (lines[101]["attempts"], lines[101]["git_commit"]) == (3, None)  # those of the first call included
    assert lines.keys() == {0, *once, *always}


def assert_nothing_is_missing_or_twice(curve: dict) -> None:
    """A curve of the stand-in: see the first test."""
    assert curve["step"] == [*range(3, 151, 3), *range(152, 251, 2)]
    assert (curve["episodic_return"][0], curve["episodic_return"][-1]) == (1.0, 124.75)
    assert curve["seconds"] == sorted(curve["seconds"])
    assert curve["seconds"][-1] > 250 * 0.02


def test_after_kill_9_runs_go_on_from_their_checkpoints(house):
    for moment in (0, 0.07, 0.15):
        noted = len(house.steps())
        process = house.start("--checkpoint-every", "10", seeds=1)
        assert wait_until(lambda noted=noted: len(house.steps()) > noted + 11)
        time.sleep(moment)
        process.kill()
        process.wait()
        assert wait_until(lambda: not house.stand_ins())
    done = house.sweep("--checkpoint-every", "10", seeds=1)
    assert done.returncode == 0, done.stderr
    pairs = itertools.pairwise(house.steps())
    lost = [before - after + 1 for before, after in pairs if after <= before]
    assert len(house.starts()) == 4
    assert max(lost) <= 10
    [line] = house.lines()
    assert line["resumed"] % 10 == 0
    assert line["resumed"] >= 30
    assert_nothing_is_missing_or_twice(house.curves()[0])
    assert [path.name for path in house.folder.rglob("*.pt")] == ["250.pt"]
    assert f"| {line['algorithm']}" not in done.stdout  # the table of speeds leaves it out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_runs_that_end_in_order_lose_nothing_when_their_sweep_is_stopped(house, number):
    house.tell(0, "end_in_order()!")
    process = house.start("--checkpoint-every", "100", seeds=1, start_new_session=True)
    assert wait_until(lambda: len(house.steps()) > 25)
    if number == signal.SIGTERM:
        process.stderr.close()  # Ctrl+C ends both of `./run.sh 2>&1 | tee log`
    # A terminal signals the sweep and submitit's processes at once.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    if number == signal.SIGKILL:
        process.wait()
        with pytest.raises(SystemExit, match="2"):  # until the run has saved, no other sweep can begin
            sweep_folder.claim(house.folder, seconds=0)
    _, error = process.communicate(timeout=30)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    if number == signal.SIGINT:
        assert error.endswith("stopped; 0 of 1 runs are done; start again to go on\n")
        assert "Traceback" not in error
    assert wait_until(lambda: not house.stand_ins())
    stopped = house.steps()[-1]
    assert 25 < stopped < 100
    done = house.sweep("--checkpoint-every", "100", seeds=1)
    assert done.returncode == 0, done.stderr
    assert house.steps() == list(range(1, 252))
    assert [line["resumed"] for line in house.lines()] == [stopped]


def test_a_run_that_takes_too_long_leaves_a_checkpoint(house):
    house.tell(0, "end_in_order(); pause = 0.1")
    job = house.job(checkpoint_every=1000, time_limit=5)
    process = start_job(job)
    assert wait_until(lambda: len(house.steps()) > 5)
    os.kill(*house.stand_ins(), signal.SIGUSR2)  # by which Slurm tells that the time is nearly up
    before = len(house.steps())
    process.join(60)
    assert len(house.steps()) > before + 1
    assert outcome_of(job)["reason"] == "took longer than 5 s"
    assert [int(path.stem) for path in job.glob("runs/one/*.pt")] == house.steps()[-1:]


# ---- What can happen to a sweep ----------------------------------------------------------------------------
def test_after_kill_9_finished_runs_are_not_repeated(house, capsys):
    house.tell(1, WAIT)
    (house.leanrl / "hold").touch()
    process = house.start()
    house.wait_for_starts(2)
    with pytest.raises(SystemExit, match="2"):  # two in a folder exclude each other
        sweep_folder.claim(house.folder, seconds=0.5)
    waits, refusal = capsys.readouterr().err.splitlines()
    assert waits.endswith("waiting for another sweep, or the runs of one that was killed, to end")
    assert refusal.endswith(f"error: --folder {house.folder}: another sweep is at work there")
    process.kill()
    process.wait()
    assert wait_until(lambda: not house.stand_ins())  # the run ends with its sweep
    assert house.done() == [0]
    (house.leanrl / "hold").unlink()
    again = house.sweep()
    assert again.returncode == 0, again.stderr
    assert house.done() == [0, 1, 2]
    assert [seed for _, seed, *_ in house.starts()] == ["0", "1", "1", "2"]


def test_what_a_sweep_could_not_write_any_more_is_restored(house):
    assert house.sweep().returncode == 0
    files = [house.folder / name for name in ("results.jsonl", "curves.jsonl")]
    for cut, ended in ((files, True), (files[:1], False), (files[1:], False)):
        for path in cut:  # killed before it wrote the last lines, or while it wrote one
            whole = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(whole[:-1]) if ended else b"".join(whole)[:-20])
        assert house.sweep().returncode == 0
        assert house.done() == [0, 1, 2]
    assert len(house.starts()) == 3  # the last run had left all that is needed


# ---- Slurm -------------------------------------------------------------------------------------------------
# One Slurm for all its tests, in whichever worker.
on_slurm = pytest.mark.xdist_group("slurm")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The variables of a Slurm of one node; in CI it has to be there."""
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
            yield os.environ | variables
    except SlurmUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


SLURM = ("--cluster", "slurm", "--cores-per-job", "1")


@on_slurm
def test_slurm_gives_the_lines_that_a_local_sweep_gives(house, cluster):
    assert house.sweep().returncode == 0
    local = house.lines()
    house.folder = house.path / "slurm"
    house.tell(1, "os.kill(os.getpid(), 9)")
    done = house.sweep(*SLURM, "--partition", "debug", "--workers", "1", env=cluster)
    assert done.returncode == 0, done.stderr
    lines = sorted(house.lines(), key=lambda line: line["seed"])
    varies = ("sweep", "attempts", "cpu_busy_seconds", "peak_memory_mb", "cold_start", "threads")
    assert [{key: value for key, value in line.items() if key not in varies} for line in lines] == [
        {key: value for key, value in line.items() if key not in varies} for line in local
    ]
    assert [line["attempts"] for line in lines] == [1, 2, 1]


@on_slurm
def test_what_slurm_refuses_is_told_in_one_line(house, cluster):
    done = house.sweep("--cluster", "slurm", "--partition", "none", env=cluster)
    assert done.returncode == 2
    # Before it stands what sbatch itself has said.
    assert "sweep: error: Slurm refused the runs: sbatch: error: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@on_slurm
def test_a_sweep_on_slurm_takes_up_the_jobs_of_one_that_was_killed(house, cluster):
    (house.leanrl / "hold").touch()
    house.tell(1, WAIT)
    options = (*SLURM, "--workers", "2", "--slurm-options", "oversubscribe", "true")
    process = house.start(*options, env=cluster)
    house.wait_for_starts(2)
    process.kill()
    process.wait()
    (house.leanrl / "hold").unlink()
    done = house.sweep(*options, env=cluster)
    assert done.returncode == 0, done.stderr
    assert house.done() == [0, 1, 2]
    assert len(house.starts()) == 3


@on_slurm
def test_a_run_that_slurm_requeues_goes_on_from_its_checkpoint(house, cluster):
    process = house.start(*SLURM, "--checkpoint-every", "10", seeds=1, env=cluster)
    assert wait_until(lambda: len(house.steps()) > 25)

    def ask(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=cluster, capture_output=True, text=True)

    [number] = ask("squeue", "--me", "--noheader", "--array", "--format=%i").stdout.split()
    assert ask("scontrol", "requeue", number).returncode == 0
    time.sleep(1.5)  # what starts in the second in which it was stopped counts as stopped

    def started_again() -> bool:
        """Slurm would wait for two minutes."""
        ask("scontrol", "update", f"JobId={number}", "StartTime=now")
        return len(house.starts()) == 2

    assert wait_until(started_again, 180)  # by itself Slurm starts it after two minutes
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert house.lines()[0]["resumed"] >= 20
    assert_nothing_is_missing_or_twice(house.curves()[0])


@on_slurm
def test_ctrl_c_cancels_the_jobs_on_slurm(house, cluster):
    house.tell(0, "end_in_order()")
    process = house.start(*SLURM, "--checkpoint-every", "200", seeds=1, env=cluster)
    assert wait_until(lambda: len(house.steps()) > 25)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    queue = {"args": ["squeue", "--noheader"], "env": cluster, "capture_output": True, "check": True}
    # A cancelled job is in the queue until its node has cleaned up after it.
    assert wait_until(lambda: not subprocess.run(**queue).stdout)
    assert not house.stand_ins()
    assert [int(path.stem) for path in house.folder.rglob("*.pt")] == house.steps()[-1:]
