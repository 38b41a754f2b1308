"""The benchmark survives what can happen to it: with a stand-in for a script, which takes no time, and all else real."""

import fcntl
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import record
import results
import selection
import tables
from conftest import ROOT, SEEDS, make_commit
from job import Job, run_job
from places import wait_for_strays
from slurm import SlurmUnavailable, slurm_cluster, wait_until

# Prints a summary, after what the file named like its seed tells it to do, once or, with a trailing "!", each time. An object
# there is a part of the summary.
STAND_IN = """
import json, os, psutil, signal, sys, time, zipfile
from pathlib import Path
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # torch.utils.tensorboard takes seconds
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

options = dict(argument[2:].split("=") for argument in sys.argv[1:] if "=" in argument)
here, seed = Path(__file__).parent, int(options["seed"])
with (here / "starts.txt").open("a") as starts:
    starts.write(f"{Path(__file__).stem} {seed} {os.environ.get('OMP_NUM_THREADS')} {len(os.sched_getaffinity(0))}\\n")
behaviour = here / str(seed)
todo = behaviour.read_text() if behaviour.exists() else ""
if todo and not todo.endswith("!"):
    behaviour.unlink()
print("a line of the log", file=sys.stderr)
if todo.startswith("hang"):
    time.sleep(1000)
asked = []
if todo.startswith("save"):
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, _: os._exit(3) if number in asked else asked.append(number))
if todo.startswith("wait"):
    while (here / "hold").exists():
        time.sleep(0.05)
if todo.startswith("killed"):
    os.kill(os.getpid(), signal.SIGKILL)
if todo.startswith("orphan"):  # kills the process that watches it
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
if todo.startswith("abandoned"):  # kills the process that submitit has started, which started that
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(1000)
if todo.startswith("silent"):
    sys.exit()
if todo.startswith("deep"):
    sys.exit(print("[" * 100_000))
if todo.startswith("cut off"):  # the process that watches it leaves half an outcome.json, and dies
    Path("outcome.json").write_text('{"status": "ok", "summ')
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
if todo.startswith("fill"):
    with (here.parent / "disk" / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(2**20))
folder = Path(options.get("resume", "runs/one"))
first = max((int(path.stem) for path in folder.glob("*.pt")), default=0)
writer = EventFileWriter(str(folder))
if first:  # events of later steps are of what is lost
    writer.add_event(Event(step=first + 1, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))
for step, value in list(enumerate([*(step / 2 for step in range(1, 251)), float("inf")], start=1))[first:]:
    scalar = Summary.Value(tag="charts/episodic_return", simple_value=value)
    writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[scalar])))
    if every := int(options.get("checkpoint-every", 0)):
        with (here / "steps.txt").open("a") as steps:
            steps.write(f"{step}\\n")
        time.sleep(0.1 if "slowly" in todo else 0.02)
        if asked:
            time.sleep(0.5)
        if step % every == 0 or asked:
            writer.flush()
            zipfile.ZipFile(Path(folder, "new"), "w").close()
            Path(folder, "new").rename(Path(folder, f"{step}.pt"))
        if asked:
            sys.exit(143)
writer.close()
ballast = b"1" * 2**27
summary = {"script": Path(__file__).stem, "env_id": options["env-id"], "seed": seed, "total_timesteps": 250}
summary |= {"sps": 100.0 + seed, "startup_seconds": 1.0, "wall_seconds": 0.5, "device": "cpu"}
summary |= {"episodic_return": 100.0, "episodic_return_10": 120.0}
summary |= json.loads(todo.rstrip("!")) if todo.startswith("{") else {}
print(json.dumps(summary))
"""


# The sweep asks PyTorch for the number of GPUs, and nothing else: this takes no two seconds.
NO_GPU = "class cuda:\n    device_count = staticmethod(lambda: 0)\n"


class House:
    """A copy of benchmark/ beside a stand-in for TD3's eager script."""

    def __init__(self, path: Path):
        self.path, self.leanrl, self.folder = path, path / "leanrl", path / "sweep"
        shutil.copytree(ROOT / "benchmark", path / "benchmark", ignore=shutil.ignore_patterns("results", "__pycache__"))
        (path / "benchmark" / "torch.py").write_text(NO_GPU)
        self.leanrl.mkdir()
        (self.leanrl / "td3_continuous_action.py").write_text(STAND_IN)

    def tell(self, seed: int, behaviour: str) -> None:
        """Have the stand-in do something when it runs with this seed."""
        (self.leanrl / str(seed)).write_text(behaviour)

    def command(self, *args, seeds: int = 3) -> list[str]:
        base = [sys.executable, str(self.path / "benchmark" / "sweep.py"), "--scripts", "td3_continuous_action"]
        selection = ["--modes", "eager", "--seeds", *map(str, range(seeds)), "--folder", str(self.folder)]
        return [*base, *selection, *map(str, args)]

    def sweep(self, *args, seeds: int = 3, **options) -> subprocess.CompletedProcess:
        """Run a sweep to its end."""
        return subprocess.run(self.command(*args, seeds=seeds), capture_output=True, text=True, timeout=180, **options)

    def start(self, *args, seeds: int = 3, **options) -> subprocess.Popen:
        """Start a sweep."""
        options |= {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.command(*args, seeds=seeds), **options)

    def job(self, checkpoint_every: int, time_limit: float) -> Job:
        """What a sweep would hand to submitit for the stand-in with seed 0."""
        folder = self.path / "job"
        folder.mkdir()
        script = self.leanrl / "td3_continuous_action.py"
        command = (sys.executable, str(script), "--env-id=A", "--seed=0", f"--checkpoint-every={checkpoint_every}")
        return Job(folder, command, self.path / "cache", time_limit, resumable=True)

    def start_job(self, job: Job) -> multiprocessing.Process:
        """Run a job without a sweep."""
        process = multiprocessing.get_context("spawn").Process(target=run_job, args=(job,))
        process.start()
        return process

    def steps(self) -> list[str]:
        """The steps that the stand-in has noted, with checkpoints only."""
        path = self.leanrl / "steps.txt"
        return path.read_text().split() if path.exists() else []

    def stand_ins(self) -> list[str]:
        """The stand-ins that run."""
        done = subprocess.run(["pgrep", "-f", f"{self.leanrl}/td3"], capture_output=True, text=True)
        return done.stdout.split()

    def starts(self) -> list[str]:
        """A line for each start of the stand-in: script, seed, threads, cores."""
        path = self.leanrl / "starts.txt"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_starts(self, count: int) -> None:
        assert wait_until(lambda: len(self.starts()) >= count)

    def lines(self) -> list[dict]:
        """The results, which have to be in order."""
        lines = results.read(self.folder / "results.jsonl")
        curves = results.read(self.folder / "curves.jsonl", results.check_curve)
        assert [curve["job"] for curve in curves] == [line["job"] for line in lines if line["status"] == "ok"]
        assert len({line["job"] for line in lines}) == len(lines)
        return lines

    def done(self) -> list[int]:
        return sorted(line["seed"] for line in self.lines() if line["status"] == "ok")


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def test_a_sweep_writes_a_line_and_a_curve_a_run_a_table_and_plots(house):
    done = house.sweep()
    assert done.returncode == 0, done.stderr
    lines = house.lines()
    assert [(line["seed"], line["mode"], line["status"], line["attempts"]) for line in lines] == [
        (seed, "eager", "ok", 1) for seed in range(3)
    ]
    assert [line["cold_start"] for line in lines] == [True, False, False]
    assert all(line["cpu_busy_seconds"] > 0.1 and line["gpu_busy_seconds"] is None for line in lines)
    curve = results.read(house.folder / "curves.jsonl", results.check_curve)[0]
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

    again = house.sweep(seeds=4)
    assert again.returncode == 0
    assert len(house.starts()) == 4
    assert house.done() == [0, 1, 2, 3]


def test_workers_have_their_own_cores(house):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    assert house.sweep("--workers", "2", seeds=4).returncode == 0
    share = len(os.sched_getaffinity(0)) // 2
    assert [line.split()[2:] for line in house.starts()] == [[str(share)] * 2] * 4
    assert house.done() == [0, 1, 2, 3]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="processes are not grouped by session here")
def test_runs_give_way_to_other_work_as_the_sweep_does(house):
    (house.leanrl / "hold").touch()
    house.tell(0, "wait")
    sweep = house.start(seeds=1, preexec_fn=lambda: os.nice(5))
    house.wait_for_starts(1)
    groups = [Path(f"/proc/{process}/autogroup").read_text() for process in house.stand_ins()]
    (house.leanrl / "hold").unlink()
    assert sweep.wait(60) == 0
    assert [group.split()[-1] for group in groups] == ["5"]


def test_after_kill_9_finished_runs_are_not_repeated(house):
    house.tell(1, "wait")
    (house.leanrl / "hold").touch()
    sweep = house.start()
    house.wait_for_starts(2)
    sweep.kill()
    sweep.wait()
    assert wait_until(lambda: not house.stand_ins())  # the run ends with its sweep
    assert house.done() == [0]
    (house.leanrl / "hold").unlink()
    again = house.sweep()
    assert again.returncode == 0, again.stderr
    assert house.done() == [0, 1, 2]
    assert [line.split()[1] for line in house.starts()] == ["0", "1", "1", "2"]


def assert_nothing_is_missing_or_twice(curve: dict) -> None:
    """A curve of the stand-in: see the first test."""
    assert curve["step"] == [*range(3, 151, 3), *range(152, 251, 2)]
    assert (curve["episodic_return"][0], curve["episodic_return"][-1]) == (1.0, 124.75)
    assert curve["seconds"] == sorted(curve["seconds"])
    assert curve["seconds"][-1] > 250 * 0.02


def test_after_kill_9_runs_go_on_from_their_checkpoints(house):
    moments = random.Random(1)
    for _ in range(10):
        noted = len(house.steps())
        sweep = house.start("--checkpoint-every", "10", seeds=1)
        assert wait_until(lambda noted=noted: len(house.steps()) > noted)
        time.sleep(moments.uniform(0, 0.2))
        sweep.kill()
        sweep.wait()
        assert wait_until(lambda: not house.stand_ins())
    done = house.sweep("--checkpoint-every", "10", seeds=1)
    assert done.returncode == 0, done.stderr
    steps = list(map(int, house.steps()))
    lost = [before - after + 1 for before, after in itertools.pairwise(steps) if after <= before]
    assert len(house.starts()) == 11
    assert max(lost) <= 10
    [line] = house.lines()
    assert line["resumed"] % 10 == 0
    assert line["resumed"] > 0
    assert_nothing_is_missing_or_twice(results.read(house.folder / "curves.jsonl", results.check_curve)[0])
    assert [path.name for path in house.folder.rglob("*.pt")] == ["250.pt"]
    assert f"| {line['algorithm']}" not in done.stdout  # the table of speeds leaves it out


@pytest.mark.parametrize("reader", ["", "gone"])  # Ctrl+C ends both of `./run.sh 2>&1 | tee log`
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_runs_that_end_in_order_lose_nothing_when_their_sweep_is_stopped(house, number, reader):
    house.tell(0, "save!")
    sweep = house.start("--checkpoint-every", "100", seeds=1)
    assert wait_until(lambda: len(house.steps()) > 25)
    if reader == "gone":
        sweep.stderr.close()
    sweep.send_signal(number)
    sweep.communicate(timeout=30)
    assert sweep.returncode == (-number if number == signal.SIGKILL else 130)
    assert wait_until(lambda: not house.stand_ins())
    stopped = int(house.steps()[-1])
    assert 25 < stopped < 100
    done = house.sweep("--checkpoint-every", "100", seeds=1)
    assert done.returncode == 0, done.stderr
    assert list(map(int, house.steps())) == list(range(1, 252))
    assert [line["resumed"] for line in house.lines()] == [stopped]


def test_a_run_that_takes_too_long_leaves_a_checkpoint(house):
    house.tell(0, "save slowly!")
    job = house.job(checkpoint_every=1000, time_limit=8)
    house.start_job(job).join(60)
    assert json.loads((job.folder / "outcome.json").read_text())["reason"] == "took longer than 8 s"
    [path] = job.folder.glob("runs/one/*.pt")
    assert path.stem == house.steps()[-1]


def test_what_slurm_signals_to_each_process_of_a_job_costs_no_checkpoint(house):
    house.tell(0, "save slowly!")
    job = house.job(checkpoint_every=1000, time_limit=60)
    process = house.start_job(job)
    assert wait_until(lambda: len(house.steps()) > 5)
    [stand_in] = house.stand_ins()
    os.kill(int(stand_in), signal.SIGUSR2)  # the time is nearly up
    before = len(house.steps())
    assert wait_until(lambda: len(house.steps()) > before + 1)
    for _ in range(2):
        process.terminate()
        time.sleep(0.2)
    process.join(60)
    [path] = job.folder.glob("runs/one/*.pt")
    assert path.stem == house.steps()[-1]


def test_a_job_that_slurm_puts_back_into_its_queue_goes_on_from_its_checkpoint(house):
    """It starts anew in the folder that it had."""
    job = house.job(checkpoint_every=10, time_limit=60)
    first = house.start_job(job)
    assert wait_until(lambda: len(house.steps()) > 25)
    first.kill()
    first.join()
    assert wait_until(lambda: not house.stand_ins())
    (job.folder / "runs" / "one" / "999.pt").touch()  # a crash of the machine may leave a file without content
    house.start_job(job).join(60)
    outcome = json.loads((job.folder / "outcome.json").read_text())
    assert 20 <= outcome["resumed"] <= 250
    assert_nothing_is_missing_or_twice(outcome["curve"])


def test_learning_takes_one_mode_and_the_seeds_of_each_script_in_rounds():
    runs = selection.select(selection.Args(profile="learning"), gpus=["0"])
    assert {(run.mode, run.checkpoint_every) for run in runs} == {("both", 50_000)}
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for script, task in selection.TASKS.items():
        chosen = [(run.env_id, run.seed) for run in runs if run.algorithm == script]
        assert sorted(chosen) == sorted(itertools.product(task.learning_env_ids, task.learning_seeds))


def test_a_run_of_several_agents_is_one_line_without_a_curve(house):
    sibling = house.leanrl / "td3_continuous_action_seeds.py"
    sibling.write_text(f"{STAND_IN}\nimport shutil\nshutil.copytree(folder, 'runs/another')\n")
    returns = {"episodic_return": [90.0, None], "episodic_return_10": [95.0, None]}
    house.tell(1, json.dumps({"seeds": [1, 2], **returns}))
    scripts = ("--scripts", "td3_continuous_action", "ppo_continuous_action")
    done = house.sweep(*scripts, "--modes", "seeds", "--seeds", "1", "--checkpoint-every", "10")
    assert done.returncode == 0, done.stderr
    reason = "needs leanrl/ppo_continuous_action_seeds.py, which there is not"
    assert done.stderr.splitlines()[0] == f"skipped: seeds {reason}"
    [line] = house.lines()
    assert (line["script"], line["seed"], line["seeds"]) == (sibling.stem, 1, [1, 2])
    assert {key: line[key] for key in returns} == returns
    [curve] = results.read(house.folder / "curves.jsonl", results.check_curve)
    assert (curve["step"], curve["seconds"], curve["episodic_return"]) == ([], [], [])
    assert not list(house.folder.rglob("*.pt"))  # it could not go on from what run_job finds
    assert "| td3_continuous_action: LeanRL seeds, 2 agents `--compile` | 101 |" in done.stdout
    assert [path.name for path in (house.folder / "plots").iterdir()] == ["speed.png"]


def test_each_seed_of_the_selection_is_a_run_of_several_agents():
    runs = selection.select(selection.Args(modes=("both", "seeds_both"), seeds=(3, 5)), gpus=["0"])
    of_several = [run for run in runs if run.mode == "seeds_both"]
    assert {run.algorithm for run in of_several} == {name.removesuffix("_seeds") for name in SEEDS}
    assert [run.seed for run in of_several] == sorted([3, 5] * len(SEEDS))
    for run in of_several:
        _, script, *flags = run.command(None)
        assert Path(script).name == f"{run.algorithm}_seeds.py"
        assert {"--compile", "--cudagraphs", f"--seed={run.seed}"} <= set(flags)


def test_a_run_that_ended_after_its_sweep_is_not_repeated(house):
    assert house.sweep(seeds=2).returncode == 0
    for name in ("results.jsonl", "curves.jsonl"):  # as if the sweep had been killed before it wrote the last line
        path = house.folder / name
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert house.sweep(seeds=2).returncode == 0
    assert house.done() == [0, 1]
    assert len(house.starts()) == 2


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("killed", "killed by SIGKILL"),
        ("cut off", "the process that ran it died"),
        ("hang", "took longer than 6 s"),
        ("silent", "printed no summary"),
        ("orphan", "the process that ran it died"),
        ("abandoned", "the process that ran it died"),
    ],
)
def test_a_run_that_fails_is_tried_again_and_then_recorded(house, behaviour, reason):
    house.tell(0, behaviour)
    house.tell(1, f"{behaviour}!")
    done = house.sweep("--time-limit", 0.1 if behaviour == "hang" else 5)
    assert done.returncode == 1
    lines = {line["seed"]: line for line in house.lines()}
    assert [(lines[seed]["status"], lines[seed]["attempts"]) for seed in range(3)] == [("ok", 2), ("failed", 2), ("ok", 1)]
    assert [lines[seed]["cold_start"] for seed in (0, 2)] == [False, False]  # what has died had begun to compile
    assert lines[1]["reason"] == reason
    if behaviour not in ("orphan", "abandoned", "cut off"):
        assert lines[1]["log"] == "a line of the log"
        assert lines[1]["versions"]["python"] == platform.python_version()
    assert not house.stand_ins()
    assert f"failed: {lines[1]['job']}: {reason}" in done.stdout

    (house.leanrl / "1").unlink()
    assert house.sweep().returncode == 0  # what failed is tried again
    assert house.done() == [0, 1, 2]
    assert len(house.starts()) == 6
    assert {line["attempts"] for line in house.lines() if line["seed"] == 1} == {3}  # those of the first call included


def test_what_failed_and_is_not_selected_stays(house):
    house.tell(0, "silent!")
    assert house.sweep(seeds=1).returncode == 1
    assert house.sweep("--seeds", "1").returncode == 0
    assert [(line["seed"], line["status"]) for line in house.lines()] == [(0, "failed"), (1, "ok")]


def test_a_summary_that_makes_no_sense_is_a_failure(house):
    wrong = {"sps": '"fast"', "startup_seconds": "NaN", "wall_seconds": '"long"', "more": '{"it": [-Infinity]}'}
    for seed, (key, value) in enumerate(wrong.items()):
        house.tell(seed, f'{{"{key}": {value}}}!')
    done = house.sweep(seeds=len(wrong))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for line, key in zip(house.lines(), wrong, strict=True):
        assert line["reason"].startswith("printed a summary that ")
        assert key in line["reason"]
    (house.leanrl / "0").unlink()
    assert house.sweep(seeds=1).returncode == 0  # what failed is tried again
    assert len(house.starts()) == len(wrong) + 1


def test_what_the_harness_knows_counts_and_not_what_a_summary_says_of_it(house):
    house.tell(1, json.dumps({"versions": {"python": "2.7"}, "hardware": None, "git_commit": 1, "peak_memory_mb": 1.0}))
    head = make_commit(house.path)
    assert house.sweep(seeds=2).returncode == 0
    for line in house.lines():
        assert line["versions"]["python"] == platform.python_version()
        assert line["hardware"]["cores"] == len(os.sched_getaffinity(0))
        assert line["git_commit"] == head
        assert 128 < line["peak_memory_mb"] < 1000


def test_a_sweep_needs_no_git(house):
    done = house.sweep(seeds=1, env=os.environ | {"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert house.lines()[0]["git_commit"] is None


# What is left where a write was cut off, or somebody has edited.
NONSENSE = [b"", b'{"status": "ok", "summ', b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"status": ["ok"]}', b'{"status": "ok"}']
NONSENSE += [b'{"format": 1, "profile": "quick", "git_commit": null}', None]  # None: a folder


def leave(path: Path, content: bytes | None) -> None:
    """Have a file with this content there, or a folder."""
    path.unlink(missing_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: str(content)[:20])
def test_what_is_no_outcome_and_no_description_counts_for_none(tmp_path, capsys, content):
    leave(tmp_path / "outcome.json", content)
    assert record.read_outcome(tmp_path) is None
    leave(tmp_path / "sweep.json", content)
    with pytest.raises(SystemExit, match="2"):
        record.describe(tmp_path, "quick")
    assert capsys.readouterr().err.endswith(f": error: --folder {tmp_path}: sweep.json is not readable\n")


@pytest.mark.parametrize("name", ["results.jsonl", "running.lock", "jobs"])
def test_a_folder_for_a_file_or_the_reverse_is_told_in_one_line(house, name):
    house.folder.mkdir()
    leave(house.folder / name, b"" if name == "jobs" else None)
    done = house.sweep()
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"sweep.py: error: --folder {house.folder}: ")
    assert name in message
    assert "Traceback" not in done.stderr
    assert not house.starts()


def test_a_line_that_is_nested_too_deep_is_told_in_one_line(house):
    assert house.sweep(seeds=1).returncode == 0
    path = house.folder / "results.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n" + path.read_bytes())
    assert refused(house.sweep()) == f"--folder {house.folder}: {path}, line 1: is nested too deep"


def test_two_sweeps_in_one_folder_exclude_each_other(house):
    house.tell(0, "hang")
    first = house.start()
    house.wait_for_starts(1)
    second = house.sweep()
    assert second.returncode == 2
    assert second.stderr.splitlines()[-1] == f"sweep.py: error: --folder {house.folder}: another sweep is at work there"
    first.send_signal(signal.SIGINT)
    assert first.wait(30) == 130


def test_a_sweep_waits_for_the_runs_of_one_that_was_killed_and_says_so(tmp_path, capsys):
    path = tmp_path / "running.lock"
    with path.open("w") as stray:
        fcntl.flock(stray, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            wait_for_strays(path, seconds=1.5)
    told, refusal = capsys.readouterr().err.splitlines()
    assert told == "waiting for the runs of a sweep that was killed to end"
    assert refusal.endswith(f"error: runs of another sweep are still going on in {tmp_path}")
    wait_for_strays(path)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_stops_the_children(house, number, group):
    house.tell(1, "hang")
    sweep = house.start(start_new_session=True)
    house.wait_for_starts(2)
    # A terminal signals the sweep and submitit's processes at once.
    (os.killpg if group else os.kill)(sweep.pid, number)
    _, error = sweep.communicate(timeout=30)
    assert "Traceback" not in error
    assert sweep.returncode == 130
    assert error.endswith("stopped; 1 of 3 runs are done; start again to go on\n")
    assert not house.stand_ins()
    assert house.done() == [0]


@pytest.mark.parametrize("name", ["results.jsonl", "curves.jsonl"])
def test_a_last_line_that_was_cut_off_is_restored(house, name):
    assert house.sweep(seeds=2).returncode == 0
    path = house.folder / name
    path.write_bytes(path.read_bytes()[:-20])
    assert house.sweep().returncode == 0
    assert house.done() == [0, 1, 2]
    assert len(house.starts()) == 3


def test_a_full_disk_stops_the_sweep_and_loses_nothing(house):
    disk = house.path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.strip()}")
    try:
        house.folder = disk / "sweep"
        house.tell(1, "fill")
        full = house.sweep()
        assert full.returncode == 1
        message = f"no space is left in {house.folder}; {{}} of 3 runs are done; start again to go on"
        assert full.stderr.splitlines()[-1] == message.format(1)
        assert house.done() == [0]
        still = house.sweep()
        assert (still.returncode, still.stderr.splitlines()[-1]) in [(1, message.format(0)), (1, message.format(1))]
        assert house.done() == [0]
        (disk / "filler").unlink()
        again = house.sweep()
        assert again.returncode == 0, again.stderr
        assert house.done() == [0, 1, 2]
        assert [line.split()[1] for line in house.starts()] == ["0", "1", "1", "2"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_append_leaves_nothing_behind_where_it_does_not_fit(tmp_path):
    path = tmp_path / "results.jsonl"
    results.append(path, {"first": 1})
    program = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT / "benchmark")!r})
import results
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
results.append(Path({str(path)!r}), {{"second": "longer than the rest of the disk"}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "OSError" in done.stderr
    assert path.read_text() == '{"first": 1}\n'


LINE = {"format": 1, "sweep": "a", "job": "b", "status": "ok", "attempts": 1, "algorithm": "c", "mode": "eager", "env_id": "d"}
LINE |= {"seed": 1, "script": "c", "total_timesteps": 5, "sps": None, "startup_seconds": 1.0, "versions": {"python": "3.12.1"}}
LINE |= {"hardware": {"cpu": "A CPU", "cores": 2, "gpu": None}, "more": "is welcome"}


@pytest.mark.parametrize(
    "rest",
    [b'{"format": 1, "sw', b'{"format": 1, "sw\n', b"\xff\xfe\x00\n", b"12\n", b'{"format": 1}\n', b"\n\n", b"[" * 99999],
)
def test_the_remains_of_a_write_are_left_out(tmp_path, rest):
    path = tmp_path / "results.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + rest)
    assert results.recover(path) == [LINE]


def test_what_is_no_remains_of_a_write_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"format": 1, "sw\n' + json.dumps(LINE) + "\n")
    with pytest.raises(results.ResultsError, match="line 1"):
        results.recover(path)
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | {"format": 2}) + "\n")
    with pytest.raises(results.ResultsError, match="line 2: has format 2, and this version reads format 1"):
        results.recover(path)


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line in which a bad argument was told."""
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    return line.removeprefix("sweep.py: error: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scripts", "c51"], "--scripts takes sac_continuous_action, td3_"),
        (["--modes", "fast"], "--modes takes eager, twin, compile, cudagraphs, both, seeds, seeds_both, sb3, sbx; got fast"),
        (["--modes", "sbx"], "--modes sb3 and sbx need --peers"),
        (["--profile", "long"], "--profile takes quick, speed, full, learning; got long"),
        (["--cluster", "pbs"], "--cluster takes local, slurm; got pbs"),
        (["--seeds"], "nothing is selected"),
        (["--scripts"], "nothing is selected"),
        (["--workers", "0"], "--workers takes a number from 1"),
        (["--workers", "1000"], "--workers 1000 is 1000 runs at a time, and there are"),
        (["--total-timesteps", "0"], "--total-timesteps takes a number from 1"),
        (["--folder", "/proc/sweep"], "--folder takes a folder that can be written to, got /proc/sweep: "),
        (["--folder", "/dev/null"], "--folder takes a folder that can be written to, got /dev/null: "),
    ],
)
def test_bad_arguments_are_told_in_one_line(house, args, message):
    assert refused(house.sweep(*args)).startswith(message)
    assert not house.starts()


def test_modes_that_a_machine_cannot_run_are_skipped_with_the_reason(house):
    done = house.sweep("--modes", "cudagraphs", "both", env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    first, second, third = done.stderr.splitlines()
    assert first == "skipped: cudagraphs needs CUDA, and there is no device"
    assert second == "skipped: both needs CUDA, and there is no device"
    assert "nothing is selected" in third


def test_results_of_another_version_are_refused(house):
    assert house.sweep(seeds=1).returncode == 0
    path = house.folder / "results.jsonl"
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    message = f"--folder {house.folder}: {path}, line 1: has format 0, and this version reads format 1"
    assert refused(house.sweep()) == message
    command = [sys.executable, house.path / "benchmark" / "report.py", house.folder]
    report = subprocess.run(command, capture_output=True, text=True)
    assert report.returncode == 2
    assert report.stderr == f"report.py: error: {path}, line 1: has format 0, and this version reads format 1\n"


def test_a_folder_of_another_profile_is_refused(house):
    assert house.sweep(seeds=1).returncode == 0
    assert refused(house.sweep("--profile", "speed")) == f"--folder {house.folder}: has a sweep of profile quick, not speed"


# One Slurm for all its tests, in whichever worker.
on_slurm = pytest.mark.xdist_group("slurm")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The variables of a Slurm of one node; in CI it has to be there."""
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
            yield variables
    except SlurmUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@on_slurm
def test_slurm_gives_the_lines_that_a_local_sweep_gives(house, cluster):
    assert house.sweep().returncode == 0
    local = house.lines()
    house.folder = house.path / "slurm"
    house.tell(1, "killed")
    done = house.sweep("--cluster", "slurm", "--partition", "debug", "--cores-per-job", "1", env=os.environ | cluster)
    assert done.returncode == 0, done.stderr
    lines = sorted(house.lines(), key=lambda line: line["seed"])
    varies = ("sweep", "attempts", "cpu_busy_seconds", "peak_memory_mb", "cold_start", "threads")
    assert [{key: value for key, value in line.items() if key not in varies} for line in lines] == [
        {key: value for key, value in line.items() if key not in varies} for line in local
    ]
    assert [line["attempts"] for line in lines] == [1, 2, 1]


@on_slurm
def test_the_workers_are_the_jobs_of_the_array_that_run_at_once(house, cluster):
    house.tell(1, "silent!")
    done = house.sweep("--cluster", "slurm", "--workers", "1", "--cores-per-job", "1", env=os.environ | cluster)
    assert done.returncode == 1, done.stderr
    assert house.done() == [0, 2]
    assert len(house.starts()) == 4


@on_slurm
@pytest.mark.parametrize("options", [("--partition", "none"), ("--slurm-options", "exclusive", "perhaps")])
def test_what_slurm_refuses_is_told_in_one_line(house, cluster, options):
    done = house.sweep("--cluster", "slurm", *options, env=os.environ | cluster)
    assert done.returncode == 2
    # Before it stands what sbatch itself has said.
    assert done.stderr.splitlines()[-1].startswith("sweep.py: error: Slurm refused the runs: sbatch: error: ")
    assert "Traceback" not in done.stderr


@on_slurm
def test_a_sweep_on_slurm_takes_up_the_jobs_of_one_that_was_killed(house, cluster):
    (house.leanrl / "hold").touch()
    house.tell(1, "wait")
    environment = os.environ | cluster
    options = ("--cluster", "slurm", "--cores-per-job", "1", "--workers", "2", "--slurm-options", "oversubscribe", "true")
    sweep = house.start(*options, env=environment)
    house.wait_for_starts(2)
    sweep.kill()
    sweep.wait()
    (house.leanrl / "hold").unlink()
    done = house.sweep(*options, env=environment)
    assert done.returncode == 0, done.stderr
    assert house.done() == [0, 1, 2]
    assert len(house.starts()) == 3


@on_slurm
def test_a_run_that_slurm_requeues_goes_on_from_its_checkpoint(house, cluster):
    environment = os.environ | cluster
    options = ("--cluster", "slurm", "--cores-per-job", "1", "--checkpoint-every", "10")
    process = house.start(*options, seeds=1, env=environment)
    assert wait_until(lambda: len(house.steps()) > 25)
    asked = {"env": environment, "capture_output": True, "text": True}
    [number] = subprocess.run(["squeue", "--me", "--noheader", "--array", "--format=%i"], **asked).stdout.split()
    assert subprocess.run(["scontrol", "requeue", number], **asked).returncode == 0

    def started_again() -> bool:
        """Slurm would wait for two minutes."""
        subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], **asked)
        return len(house.starts()) == 2

    assert wait_until(started_again)
    process.communicate(timeout=120)
    assert process.returncode == 0
    [line] = house.lines()
    assert line["resumed"] >= 20
    assert_nothing_is_missing_or_twice(results.read(house.folder / "curves.jsonl", results.check_curve)[0])


@on_slurm
def test_ctrl_c_cancels_the_jobs_on_slurm(house, cluster):
    house.tell(0, "save!")
    environment = os.environ | cluster
    options = ("--cluster", "slurm", "--cores-per-job", "1", "--checkpoint-every", "200")
    sweep = house.start(*options, seeds=1, env=environment)
    assert wait_until(lambda: len(house.steps()) > 25)
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(60) == 130
    squeue = ["squeue", "--noheader"]
    # A cancelled job is in the queue until its node has cleaned up after it.
    assert wait_until(lambda: not subprocess.run(squeue, env=environment, capture_output=True, check=True).stdout)
    assert not house.stand_ins()
    assert [path.stem for path in house.folder.rglob("*.pt")] == house.steps()[-1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "one"}, "seed"),
        ({"status": "fine"}, "status"),
        ({"mode": "fast"}, "mode"),
        ({"hardware": {"cpu": "A CPU"}}, "hardware"),
        ({"sps": "fast"}, "sps"),
        ({"sps": float("nan")}, "sps"),
        ({"episodic_return": [1.0, "high"]}, "episodic_return"),
        ({"seeds": 4}, "seeds"),
        ({"wall_seconds": "long"}, "wall_seconds"),
        ({"gpu_busy_seconds": "many"}, "gpu_busy_seconds"),
        ({"status": "failed"}, "reason"),
    ],
)
def test_lines_that_do_not_fit_the_format_are_refused(tmp_path, change, message):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    assert results.read(path) == [LINE]
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | change) + "\n")
    with pytest.raises(results.ResultsError, match=f"line 2: .*{message}") as error:
        results.read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"step": [1, "x"]}, {"seconds": [1.0]}, {"gpu_utilization": [0.5]}])
def test_curves_that_do_not_fit_the_format_are_refused(tmp_path, change):
    curve = {"format": 1, "sweep": "a", "job": "b", "step": [1, 2], "seconds": [1.0, 2.0], "episodic_return": [0.0, 1.0]}
    curve |= {"gpu_seconds": [], "gpu_utilization": []}
    results.check_curve(curve)
    with pytest.raises(ValueError):
        results.check_curve(curve | change)


def test_runs_share_a_gpu(house):
    """One that is pretended."""
    (house.path / "benchmark" / "torch.py").write_text(NO_GPU.replace("0", "1"))
    pretended = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    cores = len(os.sched_getaffinity(0))
    for seed in range(2):
        house.tell(seed, "wait!")
    (house.leanrl / "hold").touch()
    process = house.start("--runs-per-gpu", "2", seeds=2, env=pretended)
    house.wait_for_starts(2)  # neither has ended
    (house.leanrl / "hold").unlink()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert [line.split()[2:] for line in house.starts()] == [[str(cores // 2)] * 2] * 2
    assert [line["runs_per_gpu"] for line in house.lines()] == [2, 2]
    on_one = [line | {"hardware": line["hardware"] | {"gpu": "NVIDIA Pretended"}} for line in house.lines()]
    alone = [line | {"runs_per_gpu": 1} for line in on_one]
    assert "NVIDIA Pretended, 2 runs at a time on it" in tables.speed_table(on_one)
    assert len(tables.machines(on_one + alone)) == 2  # no table of both
    for args, told in ((("--workers", "2"), "--workers takes"), (("--runs-per-gpu", str(cores + 1)), "cores")):
        refused = house.sweep(*args, env=pretended)
        assert refused.returncode == 2
        assert told in refused.stderr
    (house.path / "benchmark" / "torch.py").unlink()  # the real one
    refused = house.sweep("--runs-per-gpu", "2", env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert "where there is no GPU" in refused.stderr
