"""The benchmark survives what can happen to it: with a stand-in for a script, and all else real."""

import itertools
import json
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
from conftest import LEANRL, ROOT, make_commit
from slurm import slurm_cluster, wait_until

from benchmark import records
from benchmark.collection import COLLECTION
from benchmark.machine import checkpoint_in, step_of
from benchmark.modes import LIBRARIES
from benchmark.sweep import __main__ as sweep
from benchmark.sweep import folder as sweep_folder
from benchmark.sweep import process as sweep_process
from benchmark.sweep import runs as selection
from benchmark.sweep.executors import Attempt, ThisMachine, write_job
from benchmark.sweep.process import Job

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
checkpoint = folder / "checkpoint.pt"
first = int(checkpoint.read_text()) if "resume" in options else 0
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
        time.sleep(1 if asked else pause)
        if step % every == 0 or asked:
            writer.flush()
            checkpoint.with_suffix(".new").write_text(str(step))
            checkpoint.with_suffix(".new").replace(checkpoint)
        if asked:
            sys.exit(128 + asked[0])
writer.close()
summary = {"script": Path(__file__).stem, "env_id": options["env-id"], "seed": seed, "total_timesteps": 250}
summary |= {"sps": 100.0 + seed, "startup_seconds": 1.0, "wall_seconds": 0.5}
print(json.dumps(summary | said))
"""
WAIT = "while not (here / 'go').exists(): time.sleep(0.05)"
# The sweep asks PyTorch for the number of GPUs and for the step of a checkpoint, scipy for what is a tensor:
# this takes no two seconds.
NO_GPU = "class Tensor:\n    pass\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"
NO_GPU += "def load(file, **_):\n    return {'progress': [int(file.read_text())]}\n"
# What is asked more often than in use, by the file of benchmark/sweep/ that says so.
OFTEN = {
    "executors.py": {"pause = 0.25": "pause = 0.05", "= 2.0, 90.0": "= 0.5, 90.0"},
    "__main__.py": {"REFUSED_SECONDS = 60": "REFUSED_SECONDS = 1"},
}


class House:
    """A copy of benchmark/ beside a stand-in for TD3's eager script."""

    def __init__(self, path: Path):
        self.path, self.leanrl, self.folder = path, path / "leanrl", path / "sweep"
        left_out = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / "benchmark", path / "benchmark", ignore=left_out)
        (path / "torch.py").write_text(NO_GPU)
        for name, changes in OFTEN.items():
            file = path / "benchmark" / "sweep" / name
            content = file.read_text()
            for often, more_often in changes.items():
                assert often in content
                content = content.replace(often, more_often)
            file.write_text(content)
        self.leanrl.mkdir()
        (self.leanrl / "td3_continuous_action.py").write_text(STAND_IN)

    def tell(self, seed: int, behaviour: str) -> None:
        """Have the stand-in do something when it runs with this seed."""
        (self.leanrl / str(seed)).write_text(behaviour)

    def start(self, *args, seeds: int = 3, **options) -> subprocess.Popen:
        """Start a sweep."""
        command = [sys.executable, "-m", "benchmark.sweep", "--folder", self.folder]
        command += ["--scripts", "td3_continuous_action", "--modes", "eager", "--seeds", *range(seeds), *args]
        options |= {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": self.path}
        return subprocess.Popen(list(map(str, command)), **options)

    def sweep(self, *args, status: int = 0, **options) -> tuple[str, str]:
        """Run a sweep to its end, which has this status; gives what it prints, and what it says meanwhile."""
        process = self.start(*args, **options)
        output, error = process.communicate(timeout=300)
        assert process.returncode == status and "Traceback" not in error, error
        return output, error

    def running(self) -> bool:
        """Whether a stand-in runs."""
        return not subprocess.run(["pgrep", "-f", f"{self.leanrl}/td3"], capture_output=True).returncode

    def starts(self) -> list[list[str]]:
        """What is known of each start of the stand-in: script, seed, threads, cores."""
        path = self.leanrl / "starts.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[int]:
        """The steps that the stand-in has noted, with checkpoints only."""
        path = self.leanrl / "steps.txt"
        return list(map(int, path.read_text().split())) if path.exists() else []

    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints in the folder of the sweep."""
        return [int(path.read_text()) for path in self.folder.rglob("checkpoint.pt")]

    def curves(self) -> list[dict]:
        return records.read(self.folder / "curves.jsonl", records.check_curve)

    def lines(self) -> list[dict]:
        """The results, which have to be in order."""
        lines = records.read(self.folder / "results.jsonl")
        done = [line["job"] for line in lines if line["status"] == "ok"]
        assert [curve["job"] for curve in self.curves()] == done
        assert len({line["job"] for line in lines}) == len(lines)
        return lines

    def done(self) -> list[int]:
        return sorted(line["seed"] for line in self.lines() if line["status"] == "ok")


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def assert_nothing_is_missing_or_twice(curve: dict, least_seconds: float = 0) -> None:
    """Of 250 episodes the first 50 groups have three: the means of 1, 2, 3 and of 249 and 250, halved."""
    assert curve["step"] == [*range(3, 151, 3), *range(152, 251, 2)]
    assert (curve["episodic_return"][0], curve["episodic_return"][-1]) == (1.0, 124.75)
    assert curve["seconds"] == sorted(curve["seconds"])
    assert least_seconds < curve["seconds"][-1] < 1e6


# ---- What is measured --------------------------------------------------------------------------------------
def test_a_sweep_writes_a_line_and_a_curve_a_run_a_table_and_plots(house):
    head = make_commit(house.path)
    said = {"versions": {"python": "2.7"}, "hardware": None, "git_commit": 1, "peak_memory_mb": 1.0}
    house.tell(1, f"said = {said}")  # the harness knows better
    output, error = house.sweep()
    keys = ("seed", "mode", "status", "attempts", "cold_start", "git_commit", "gpu_busy_seconds")
    for seed, line in enumerate(house.lines()):
        assert [line[key] for key in keys] == [seed, "eager", "ok", 1, seed == 0, head, None]
        assert 10 < line["peak_memory_mb"] < 1000
        assert line["versions"]["python"] == platform.python_version()
        assert "LeanRL" not in line["versions"]  # its scripts do not begin with a version
        assert line["hardware"]["cores"] == len(os.sched_getaffinity(0))
    assert_nothing_is_missing_or_twice(house.curves()[0])
    assert "| td3_continuous_action: LeanRL eager | 101 (100-102) | 1.00 |" in output
    plots = sorted(path.name for path in (house.folder / "plots").glob("*.png"))
    assert plots == ["return-by-step.png", "return-by-time.png", "speed.png"]
    assert str(house.folder / "plots") in output
    assert "[3/3]" in error


def test_places_have_cores_of_their_own_and_take_gpus_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(8)})
    args = selection.Args(runs_per_gpu=2)
    machine = ThisMachine(args, workers=2, gpus=["3", "5", "6"], lock=0)
    assert machine.free([], 9) == [0, 1, 2, 3] and machine.free([], 1) == [0]
    assert machine.free([Attempt(tmp_path, None, tmp_path, place) for place in (0, 2)], 9) == [1, 3]
    folders = [tmp_path / str(place) for place in range(4)]
    for folder in folders:
        folder.mkdir()
    with patch("subprocess.Popen"):
        machine.start(folders, [Job([], "", 1.0)] * 4, [0, 1, 2, 3])
    jobs = [json.loads((folder / "job.json").read_text()) for folder in folders]
    assert [job["gpu"] for job in jobs] == ["3", "5", "3", "5"]
    assert {job["runs_per_gpu"] for job in jobs} == {2}
    assert len({core for job in jobs for core in job["cores"]}) == 8
    assert {(job["threads"], len(job["cores"])) for job in jobs} == {(2, 2)}
    with pytest.raises(SystemExit):  # three GPUs are not enough
        ThisMachine(args, workers=4, gpus=machine.gpus, lock=0)


def test_real_scripts_are_what_the_sweep_takes_them_for(tmp_path):
    """One is stopped and goes on from its checkpoint, in the folder that it had."""
    script, folder = "td3_continuous_action", tmp_path / "1"
    folder.mkdir()

    def start(steps: int) -> subprocess.Popen:
        command = [sys.executable, str(LEANRL / f"{script}.py"), "--env-id=InvertedPendulum-v4", "--no-cuda"]
        command += ["--learning-starts=100", "--log-every=10", f"--total-timesteps={steps}"]
        command += ["--checkpoint-every=99999", "--buffer-size=10000"]
        write_job(folder, Job(command, str(tmp_path / "cache"), 300, resumable=True))
        return subprocess.Popen([sys.executable, "-m", "benchmark.sweep.process", folder], cwd=ROOT)

    first, log = start(100_000), folder / "log.txt"
    assert wait_until(lambda: log.exists() and "SPS" in log.read_text())  # is training
    for _ in range(2):  # as Slurm may send it to each process of a job
        first.terminate()
        time.sleep(0.1)
    assert first.wait(60) == 130
    step = step_of(checkpoint_in(folder / "runs"))
    assert start(step + 200).wait(120) == 0
    run = selection.Run(script, "eager", "A", 1, 9, 1)
    record = sweep_folder.Record(tmp_path, selection.Args())
    line, curve = record.lines_of(run, sweep_folder.read_outcome(folder), folder)
    assert (line["status"], line["resumed"], line["total_timesteps"]) == ("ok", step, step + 200)
    assert line["startup_seconds"] > 0.5 and line["sps"] > 0
    assert 0 < curve["step"][-1] <= step + 200


# ---- Selection and arguments -------------------------------------------------------------------------------
def test_learning_takes_one_mode_and_the_seeds_of_each_script_in_rounds():
    runs = selection.select(selection.Args(profile="learning"), gpus=["0"])
    assert {(run.mode, run.checkpoint_every) for run in runs} == {("both", 50_000)}
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for script, algorithm in COLLECTION.items():
        chosen = [(run.env_id, run.seed) for run in runs if run.algorithm == script]
        assert sorted(chosen) == sorted(itertools.product(algorithm.env_ids, algorithm.seeds))
    # Where runs find environments of benchmark/, such as those of the checks.
    assert str(ROOT) in sweep_process.variables(Job([], "", 1.0))["PYTHONPATH"].split(os.pathsep)


def test_checks_are_run_as_the_collection_has_them_and_have_to_stay_within_bounds(house):
    name, checks = "td3_continuous_action", COLLECTION["td3_continuous_action"].checks
    runs = selection.select(selection.Args(profile="check", scripts=(name,)), gpus=[])
    found = sorted((run.mode, run.env_id, run.steps, run.options, run.seed) for run in runs)
    of_all = itertools.product(checks, (1, 2, 3))
    assert found == sorted(("compile", check.env_id, check.steps, check.options, n) for check, n in of_all)
    within = max(check.least for check in checks)
    house.tell(0, f"said['episodic_return'] = {within}!")
    output, _ = house.sweep("--profile", "check", "--workers", 1, seeds=1)
    for check in checks:
        row = f"{check.env_id}: LeanRL eager | {check.steps:,} | {within:.1f} | "
        assert f"{row}{check.least:g} to {check.most:g} |\n" in output
    assert "All are within bounds." in output
    house.tell(1, f"said['episodic_return'] = {max(check.most for check in checks) + 1}!")
    output, _ = house.sweep("--profile", "check", "--workers", 1, seeds=2, status=1)
    assert output.count("**missed**") == len(checks) and "All are" not in output


def commands(args: selection.Args, gpus: str = "") -> dict[tuple[str, str], list[str]]:
    """The commands of a selection, by script and mode."""
    return {(run.algorithm, run.mode): run.command(args) for run in selection.select(args, list(gpus))}


def test_peers_have_their_own_scripts_flags_interpreters_and_threads(tmp_path):
    clones = {"leanrl": "sac_continuous_action", "cleanrl": "pqn"}
    for library, script in clones.items():
        (tmp_path / library).mkdir()
        (tmp_path / library / f"{script}.py").touch()
    python = Path(sys.executable)
    args = selection.Args(seeds=(3,), peers=python, leanrl=tmp_path, cleanrl=tmp_path)
    with patch.object(selection, "LEANRL_PYTHON", python):
        selection.check_args(args)
    found = commands(args)
    interpreter, program, clone, script, *flags = found["td3_continuous_action", "leanrl_compile"]
    assert interpreter.endswith(".venv-leanrl/bin/python") and clone == str(tmp_path)
    assert (Path(program).name, script) == ("original.py", "td3_continuous_action_torchcompile")
    assert "--compile" in flags and "--compile" not in found["td3_continuous_action", "leanrl"]
    assert ("ppo_atari_envpool", "leanrl") not in found  # its Atari script needs gym
    clone = f"--cleanrl={tmp_path}"  # for what CleanRL's package does not have
    assert clone in found["pqn", "cleanrl"] and clone not in found["ppo", "cleanrl"]
    for mode in ("cleanrl", "eager"):  # or it would need 56 GB
        assert "--buffer-size=100000" in found["rainbow_atari_envpool", mode]
    # PyTorch takes all cores, unless it is told what our scripts tell it.
    ours = {name for name in COLLECTION if "set_num_threads(1)" in (LEANRL / f"{name}.py").read_text()}
    for (script, mode), command in found.items():
        assert "--seed=3" in command
        assert ("--threads=1" in command) == (script in ours and mode in LIBRARIES)
    assert {mode for script, mode in found if script in ours} >= {"cleanrl", "sb3", "sbx"}


def refused(capsys, folder: Path, *args) -> str:
    """What a sweep that would be of one run says when it refuses to start with status 2."""
    command = ["sweep", "--modes", "eager", "--seeds", "1", "--folder", str(folder), *args]
    with patch("sys.argv", command), patch("signal.signal"):
        try:
            status = sweep.main()
        except SystemExit as left:
            status = left.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--modes", "sbx"], "--modes cleanrl, sb3, sbx, rltools need --peers"),
        (["--modes", "leanrl"], "--modes leanrl, leanrl_compile, leanrl_both need --leanrl: "),
        (["--modes", "cudagraphs"], "cudagraphs needs CUDA, and there is no device"),
        (["--profile", "check", "--env-ids", "A"], "--env-ids does not go with --profile check, "),
        (["--scripts", "dqn", "--env-ids", "A"], "--env-ids fits none of --scripts, which take "),
        (["--workers", "1000"], "--workers and --runs-per-gpu: 1000 runs at a time, and there are"),
        (["--runs-per-gpu", "2"], "--runs-per-gpu takes 1 where there is no GPU"),
        (["--options", "no-compile", ""], "--options does not take no-compile"),
        (["--options", "precision", "float32", "--modes", "tf32"], "--options does not take precision, "),
    ],
)
def test_bad_arguments_are_told_in_one_line(tmp_path, capsys, args, message):
    assert message in refused(capsys, tmp_path, *args)
    assert not (tmp_path / "jobs").exists()


def test_what_tables_do_not_tell_apart_has_folders_of_its_own(tmp_path, capsys):
    """By default; else it is refused. Names are short enough for a disk, however long arguments are."""
    several = [selection.Args(options={"env-kwargs": json.dumps({"a/b": "c" * 300 + end})}) for end in "12"]
    folders = {sweep_folder.default_folder(args) for args in several}
    assert len(folders) == 2 and all(len(folder.name) < 150 for folder in folders)
    assert all(len(run.name) < 250 for run in selection.select(several[0], []))
    sweep_folder.describe(tmp_path, selection.Args())
    for other in (("--profile", "speed"), ("--options", "num-envs", "64")):
        assert f"{tmp_path}: has a sweep with {other[0]} " in refused(capsys, tmp_path, *other)


# ---- What can happen to a run ------------------------------------------------------------------------------
# What a stand-in does, and how it is told of.
FAILURES = {
    "sys.exit('a loss is nan')": "exit status 1",
    "time.sleep(99)": "took longer than 3 s",
    "os.kill(os.getppid(), 9); time.sleep(99)": "the process that ran it died",  # who watches it dies
    "said = {'wall_seconds': 'long'}": "printed a summary that wall_seconds",
}


def test_a_run_that_fails_is_tried_again_and_then_recorded(house):
    """A seed for each that fails each time, one that fails once, and one that is done at once."""
    always = dict(enumerate(FAILURES, start=101))
    for seed, behaviour in always.items():
        house.tell(seed, f"{behaviour}!")
    house.tell(1, "os.kill(os.getpid(), 9)")
    others = [seed for seed in always if seed != 102]  # which hangs
    _, error = house.sweep("--workers", 2, "--seeds", 0, 1, *others, status=1)
    assert house.done() == [0, 1] and "killed by SIGKILL" in error
    output, _ = house.sweep("--time-limit", 0.05, "--workers", 2, "--seeds", 102, status=1)
    assert not house.running()
    lines = {line["seed"]: line for line in house.lines()}
    attempts = {0: 1, 1: 2, 101: 2, 102: 2, 103: 2, 104: 1}  # a summary that makes no sense stays so
    assert {seed: line["attempts"] for seed, line in lines.items()} == attempts
    for seed, behaviour in always.items():
        assert lines[seed]["reason"].startswith(FAILURES[behaviour])
        assert f"failed: {lines[seed]['job']}: {lines[seed]['reason']}" in output
    assert lines[101]["log"] == "a line of the log\na loss is nan"
    share = str(len(os.sched_getaffinity(0)) // 2)  # of the cores, for each of the workers
    assert {tuple(start[2:]) for start in house.starts()} == {(share, share)}

    # What failed is tried again, and only that; what is not selected stays on record.
    (house.leanrl / "101").unlink()
    starts = len(house.starts())
    house.sweep("--seeds", 0, 1, 101, env=os.environ | {"PATH": ""})  # without git
    assert len(house.starts()) == starts + 1 and len(house.lines()) == len(lines)
    lines |= {line["seed"]: line for line in house.lines()}
    assert house.done() == [0, 1, 101]
    assert (lines[101]["attempts"], lines[101]["git_commit"]) == (3, None)  # those of the first call included


def test_after_kill_9_runs_go_on_from_their_checkpoints(house):
    for _ in range(2):
        noted = len(house.steps())
        process = house.start("--checkpoint-every", 10, seeds=1)
        assert wait_until(lambda noted=noted: len(house.steps()) > noted + 11)
        process.kill()
        process.wait()
        assert wait_until(lambda: not house.running())
    output, _ = house.sweep("--checkpoint-every", 10, seeds=1)
    lost = [before - after + 1 for before, after in itertools.pairwise(house.steps()) if after <= before]
    assert len(house.starts()) == 3 and max(lost, default=0) <= 10
    [line], [curve] = house.lines(), house.curves()
    assert line["resumed"] % 10 == 0 and line["resumed"] >= 20
    assert_nothing_is_missing_or_twice(curve, least_seconds=250 * 0.02)
    assert house.checkpoints() == [250]
    assert f"| {line['algorithm']}" not in output  # the table of speeds leaves it out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_runs_that_end_in_order_lose_nothing_when_their_sweep_is_stopped(house, number):
    house.tell(0, "end_in_order(); pause = 0.05")
    process = house.start("--checkpoint-every", 1000, seeds=1, start_new_session=True)
    assert wait_until(lambda: len(house.steps()) > 5)
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
    assert wait_until(lambda: not house.running())
    stopped = house.steps()[-1]
    house.tell(0, "pause = 0")
    house.sweep("--checkpoint-every", 1000, seeds=1)
    assert house.steps() == list(range(1, 252))
    assert [line["resumed"] for line in house.lines()] == [stopped]


def test_a_run_that_takes_too_long_leaves_a_checkpoint(house):
    # By SIGUSR2 Slurm tells that the time is nearly up.
    house.tell(0, "end_in_order(); os.kill(os.getpid(), signal.SIGUSR2); pause = 0.1")
    house.sweep("--checkpoint-every", 1000, "--time-limit", 0.1, "--attempts", 1, seeds=1, status=1)
    assert [line["reason"] for line in house.lines()] == ["took longer than 6 s"]
    assert house.checkpoints() == house.steps()[-1:] != []


# ---- What can happen to a sweep ----------------------------------------------------------------------------
def test_after_kill_9_finished_runs_are_not_repeated(house, capsys):
    house.tell(1, WAIT)
    process = house.start()
    assert wait_until(lambda: len(house.starts()) == 2)
    with pytest.raises(SystemExit, match="2"):  # two in a folder exclude each other
        sweep_folder.claim(house.folder, seconds=0.5)
    assert f"error: --folder {house.folder}: another sweep is at work there" in capsys.readouterr().err
    process.kill()
    process.wait()
    assert wait_until(lambda: not house.running())  # the run ends with its sweep
    assert house.done() == [0]
    house.sweep()
    assert house.done() == [0, 1, 2]

    # Killed before it wrote the last curve's line, and while it wrote the last result's.
    results, curves = (house.folder / name for name in ("results.jsonl", "curves.jsonl"))
    results.write_bytes(results.read_bytes()[:-20])
    curves.write_bytes(b"".join(curves.read_bytes().splitlines(keepends=True)[:-1]))
    house.sweep()
    assert house.done() == [0, 1, 2]
    # The last run had left all that is needed.
    assert [seed for _, seed, *_ in house.starts()] == ["0", "1", "1", "2"]


# ---- Slurm -------------------------------------------------------------------------------------------------
# One Slurm for all its tests, in whichever worker.
on_slurm = pytest.mark.xdist_group("slurm")
SLURM = ("--cluster", "slurm", "--cores-per-job", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The variables of a Slurm of one node."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@on_slurm
def test_slurm_gives_the_lines_of_a_local_sweep_and_keeps_the_jobs_of_a_killed_one(house, cluster):
    house.sweep(seeds=1)
    local, house.folder = house.lines(), house.path / "slurm"
    for seed, behaviour in enumerate((WAIT, WAIT, "os.kill(os.getpid(), 9)")):
        house.tell(seed, behaviour)
    options = (*SLURM, "--partition", "debug", "--workers", "2", "--slurm-options", "oversubscribe", "true")
    process = house.start(*options, env=cluster)
    assert wait_until(lambda: len(house.starts()) == 3 and len([*house.folder.rglob("slurm_job")]) == 3)
    process.kill()
    process.wait()
    # What Slurm does not take once is given to it again.
    (programs := house.path / "bin").mkdir()
    (sbatch := programs / "sbatch").write_text(f"""#!/bin/sh
rm {programs}/refuse 2>/dev/null && echo "sbatch: error: Socket timed out" >&2 && exit 1
exec {shutil.which("sbatch")} "$@"
""")
    sbatch.chmod(0o755)
    (programs / "refuse").touch()
    (house.leanrl / "go").touch()
    _, error = house.sweep(*options, env=cluster | {"PATH": f"{programs}:{cluster['PATH']}"})
    assert "seed2 now: sbatch: error: Socket timed out" in error
    assert len(house.starts()) == 5  # the third has failed once
    lines = sorted(house.lines(), key=lambda line: line["seed"])
    assert [line["attempts"] for line in lines] == [1, 1, 3]
    for line in (*lines, *local):
        for key in ("sweep", "attempts", "peak_memory_mb", "cold_start", "threads"):
            del line[key]
    assert lines[:1] == local
    # What it refuses from the start ends the sweep, with what sbatch has said.
    _, error = house.sweep("--cluster", "slurm", "--partition", "none", "--seeds", 9, env=cluster, status=2)
    assert "sweep: error: Slurm refused the runs: sbatch: error: " in error.splitlines()[-1]


@on_slurm
def test_a_run_that_slurm_requeues_goes_on_from_its_checkpoint_and_ctrl_c_cancels_it(house, cluster):
    house.tell(0, "pause = 0.05")
    process = house.start(*SLURM, "--checkpoint-every", 10, seeds=1, env=cluster)
    assert wait_until(lambda: len(house.steps()) > 25)

    def ask(*command: str) -> str:
        return subprocess.run(command, env=cluster, capture_output=True, text=True).stdout

    [number] = ask("squeue", "--me", "--noheader", "--array", "--format=%i").split()
    ask("scontrol", "requeue", number)
    time.sleep(1.5)  # what starts in the second in which it was stopped counts as stopped

    def started_again() -> bool:
        """Slurm would wait for two minutes."""
        ask("scontrol", "update", f"JobId={number}", "StartTime=now")
        return len(house.starts()) == 2

    house.tell(0, "end_in_order()")
    assert wait_until(started_again, 180)
    noted = len(house.steps())
    assert wait_until(lambda: len(house.steps()) > noted)
    assert house.steps()[noted] > 20
    process.terminate()
    assert process.wait(60) == 130
    # A cancelled job is in the queue until its node has cleaned up after it.
    assert wait_until(lambda: not ask("squeue", "--noheader"))
    assert not house.running() and house.checkpoints() == house.steps()[-1:]
    house.sweep("--checkpoint-every", 10, seeds=1)  # on this machine
    assert_nothing_is_missing_or_twice(house.curves()[0], least_seconds=250 * 0.02)
