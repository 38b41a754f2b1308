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

import psutil
import pytest
from conftest import LEANRL, ROOT, make_commit
from slurm import slurm_cluster, wait_until

from benchmark import records
from benchmark.collection import COLLECTION
from benchmark.machine import checkpoint_in, script_in, step_of
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
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
writer = EventFileWriter(str(folder))
if first:  # events of later steps are of what is lost
    log = SessionLog(status=SessionLog.START)
    writer.add_event(Event(step=first + 1, wall_time=time.time(), session_log=log))
returns = [*(step / 2 for step in range(1, 251)), float("inf")]
for step, value in list(enumerate(returns, start=1))[first:]:
    scalar = Summary.Value(tag="charts/episodic_return", simple_value=value)
    writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[scalar])))
    if step % 50 == 0:
        scalar = Summary.Value(tag="charts/eval_return", simple_value=value)
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
ballast = b"1" * 2**27
summary = {"script": Path(__file__).stem, "env_id": options["env-id"], "seed": seed, "total_timesteps": 250}
summary |= {"sps": 100.0 + seed, "startup_seconds": 1.0, "wall_seconds": 0.5}
print(json.dumps(summary | said))
"""
WAIT = "while not (here / 'go').exists(): time.sleep(0.05)"
# The sweep asks PyTorch for the number of GPUs and for the step of a checkpoint, scipy for what is a tensor:
# this takes no two seconds.
NO_GPU = "class Tensor:\n    pass\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"
NO_GPU += "def load(file, **_):\n    return {'progress': [int(file.read_text())]}\n"


class House:
    """A copy of benchmark/ beside a stand-in for TD3's eager script."""

    def __init__(self, path: Path):
        self.path, self.leanrl, self.folder = path, path / "leanrl", path / "sweep"
        left_out = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / "benchmark", path / "benchmark", ignore=left_out)
        (path / "torch.py").write_text(NO_GPU)
        executors = path / "benchmark" / "sweep" / "executors.py"
        content = executors.read_text()
        for often, more_often in {"pause = 0.25": "pause = 0.05", "= 2.0, 90.0": "= 0.5, 90.0"}.items():
            assert often in content
            content = content.replace(often, more_often)
        executors.write_text(content)
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
    assert curve["eval_step"] == [50, 100, 150, 200, 250] == [2 * value for value in curve["eval_return"]]
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
        assert line["cpu_busy_seconds"] > 0.1 and 128 < line["peak_memory_mb"] < 1000
        assert line["versions"]["python"] == platform.python_version()
        assert line["hardware"]["cores"] == len(os.sched_getaffinity(0))
    assert_nothing_is_missing_or_twice(house.curves()[0])
    assert "| td3_continuous_action: LeanRL eager | 101 (100-102) | 1.00 |" in output
    plots = sorted(path.name for path in (house.folder / "plots").glob("*.png"))
    assert plots == ["return-by-step.png", "return-by-time.png", "speed.png"]
    assert str(house.folder / "plots") in output
    assert "[3/3]" in error


def test_runs_share_a_pretended_gpu(house):
    (house.path / "torch.py").write_text(NO_GPU.replace("0", "1"))
    for seed in range(2):
        house.tell(seed, WAIT)
    process = house.start("--runs-per-gpu", "2", seeds=2, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
    assert wait_until(lambda: len(house.starts()) == 2)  # neither has ended
    (house.leanrl / "go").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0
    share = str(len(os.sched_getaffinity(0)) // 2)
    assert [start[2:] for start in house.starts()] == [[share, share]] * 2
    assert [line["runs_per_gpu"] for line in house.lines()] == [2, 2]
    assert {line["cold_start"] for line in house.lines()} == {True, None}  # the other had begun to compile


def test_places_have_cores_of_their_own_and_take_shares_of_gpus_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(8)}, raising=False)
    args = selection.Args(runs_per_gpu=2)
    machine = ThisMachine(args, workers=2, ranks=2, gpus=["3", "5", "6", "7", "9"], lock=0)
    assert machine.free([], 9) == [0, 1, 2, 3] and machine.free([], 1) == [0]
    assert machine.free([Attempt(tmp_path, None, tmp_path, place) for place in (0, 2)], 9) == [1, 3]
    folders = [tmp_path / str(place) for place in range(4)]
    for folder in folders:
        folder.mkdir()
    with patch("subprocess.Popen"):
        machine.start(folders, [Job([], "", 1.0, ranks=ranks) for ranks in (2, 1, 9, 2)], [0, 1, 2, 3])
    jobs = [json.loads((folder / "job.json").read_text()) for folder in folders]
    assert [job["gpu"] for job in jobs] == ["3,5", "6", "3,5", "6,7"]
    assert len({core for job in jobs for core in job["cores"]}) == 8
    assert [(job["threads"], len(job["cores"])) for job in jobs] == [(1, 2), (2, 2), (None, 2), (1, 2)]


def test_ranks_end_with_a_process_around_them_that_is_killed(tmp_path):
    """torchrun ends its ranks, which are in sessions of their own, when it is asked to end."""
    (program := tmp_path / "torchrun.py").write_text("""
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (Path("asked").touch(), sys.exit()))
Path("began").touch()
time.sleep(60)
""")
    job = Job([sys.executable, str(program)], str(tmp_path / "cache"), 60.0, ranks=2)
    write_job(tmp_path, job)
    command = [sys.executable, "-m", "benchmark.sweep.process", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT)
    assert wait_until((tmp_path / "began").exists)
    process.kill()
    process.wait()
    assert wait_until((tmp_path / "asked").exists)


def test_no_helper_outlives_a_run_that_is_ended():
    """Not even one of a session of its own, as those of torchrun."""
    sleep = "import time; time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-c', '{sleep}'], start_new_session=True)"
    program = f"import subprocess, sys; print({start}.pid, flush=True); {sleep}"
    command, pipe = [sys.executable, "-c", program], {"stdout": subprocess.PIPE, "process_group": 0}
    with subprocess.Popen(command, **pipe) as process, patch("signal.signal"):
        helper = psutil.Process(int(process.stdout.readline()))
        assert sweep_process.end(process, resumable=False) == -signal.SIGKILL
    assert not psutil.wait_procs([helper], timeout=60)[1]


def test_real_scripts_are_what_the_sweep_takes_them_for(tmp_path):
    """One is stopped and goes on from its checkpoint, in the folder that it had."""
    script, folder = "td3_continuous_action", tmp_path / "job"
    folder.mkdir()

    def start(steps: int) -> subprocess.Popen:
        command = [sys.executable, str(LEANRL / f"{script}.py"), "--env-id=InvertedPendulum-v4", "--no-cuda"]
        command += ["--learning-starts=100", "--log-every=10", f"--total-timesteps={steps}"]
        command.append("--checkpoint-every=99999")
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
    line, curve = record.lines_of(run, sweep_folder.read_outcome(folder), 1)
    assert (line["status"], line["resumed"], line["total_timesteps"]) == ("ok", step, step + 200)
    assert line["startup_seconds"] > 0.5 and line["sps"] > 0
    assert 0 < curve["step"][-1] <= step + 200


def test_a_run_with_long_arguments_has_a_name_that_a_folder_can_have(tmp_path):
    several = [("env-kwargs", json.dumps({"scale" * 60: scale})) for scale in (1, 2)]
    runs = [selection.Run("sac", "eager", "A/B", seed, 9, 1, None, (o,)) for o in several for seed in (1, 2)]
    assert len({run.name for run in runs}) == 4
    for run in runs:
        (tmp_path / run.name).mkdir()
        assert run.name.endswith(f"-seed{run.seed}")  # by which tables are sorted


# ---- Selection and arguments -------------------------------------------------------------------------------
def test_learning_takes_one_mode_and_the_seeds_of_each_script_in_rounds():
    runs = selection.select(selection.Args(profile="learning"), gpus=["0"])
    assert {(run.mode, run.checkpoint_every) for run in runs} == {("both", 50_000)}
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for script, algorithm in COLLECTION.items():
        chosen = [(run.env_id, run.seed) for run in runs if run.algorithm == script]
        assert sorted(chosen) == sorted(itertools.product(algorithm.env_ids, algorithm.seeds))


def test_checks_are_run_as_the_collection_has_them_and_have_to_stay_within_bounds(house):
    name, check = "td3_continuous_action", COLLECTION["td3_continuous_action"].checks[0]
    runs = selection.select(selection.Args(profile="check", scripts=(name,)), gpus=[])
    of_first = [run for run in runs if run.env_id == check.env_id]
    assert {(run.mode, run.steps) for run in of_first} == {("compile", check.steps)}
    assert [run.seed for run in of_first] == [1, 2, 3]
    checks, within = COLLECTION[name].checks, max(check.least for check in COLLECTION[name].checks)
    assert {(run.env_id, run.options) for run in runs} == {(check.env_id, check.options) for check in checks}
    for seed in (0, 1):
        house.tell(seed, f"said['episodic_return'] = {within + seed}!")
    output, _ = house.sweep("--profile", "check", "--workers", 1, seeds=2)
    for check in checks:
        row = f"{check.env_id}: LeanRL eager | {check.steps:,} | {within:.1f}, {within + 1:.1f} | "
        assert f"{row}{check.least:g} to {check.most:g} | passed |" in output
    house.tell(2, f"said['episodic_return'] = {max(check.most for check in checks) + 1}!")
    output, _ = house.sweep("--profile", "check", "--workers", 1, seeds=3, status=1)
    assert output.count("**missed**") == len(checks)
    house.tell(3, "sys.exit(1)!")
    output, _ = house.sweep("--profile", "check", "--workers", 1, seeds=4, status=1)
    assert output.count(", 1 failed |") == len(checks)


def test_a_run_finds_the_environments_of_the_checks(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    named = {check.env_id for algorithm in COLLECTION.values() for check in algorithm.checks}
    of_modules = sorted(env_id.split(":") for env_id in named if ":" in env_id)
    program = "import gymnasium, importlib, sys; sys.path[0] = sys.argv[1]\n"  # as that of a script
    program += f"for module, name in {of_modules}: importlib.import_module(module); gymnasium.spec(name)"
    command = [sys.executable, "-c", program, LEANRL]
    subprocess.run(command, cwd=tmp_path, env=sweep_process.variables(Job([], "", 1.0)), check=True)
    assert len(of_modules) == 2


def test_runs_of_the_original_leanrl_have_its_script_flags_and_interpreter(tmp_path):
    (tmp_path / "leanrl").mkdir()
    (tmp_path / "leanrl" / "sac_continuous_action.py").touch()
    python = Path(sys.executable)
    args = selection.Args(scripts=("td3_continuous_action", "ppo_atari_envpool"), leanrl=tmp_path)
    with patch.object(selection, "LEANRL_PYTHON", python):
        selection.check_args(args)
    runs = [run for run in selection.select(args, gpus=[]) if run.mode.startswith("leanrl")]
    assert {run.algorithm for run in runs} == {"td3_continuous_action"}  # its Atari script needs gym
    commands = {run.mode: run.command(args) for run in runs}
    assert commands.keys() == {"leanrl", "leanrl_compile"}  # without a GPU
    interpreter, program, clone, script, *flags = commands["leanrl_compile"]
    assert interpreter.endswith(".venv-leanrl/bin/python") and clone == str(tmp_path)
    assert (Path(program).name, script) == ("original.py", "td3_continuous_action_torchcompile")
    assert "--compile" in flags and not {"--compile", "--cudagraphs"} & {*commands["leanrl"]}
    without = selection.select(selection.Args(peers=python), gpus=[])
    assert {"cleanrl", "sb3", "sbx", "rltools", "eager", "compile"} == {run.mode for run in without}


def test_cleanrls_scripts_that_its_package_does_not_have_run_from_a_clone(tmp_path):
    (tmp_path / "cleanrl").mkdir()
    args = selection.Args(scripts=("ppo", "pqn"), modes=("cleanrl",), peers=Path(sys.executable))
    assert {run.algorithm for run in selection.select(args, gpus=[])} == {"ppo"}
    args.cleanrl = tmp_path
    with pytest.raises(SystemExit):
        selection.check_args(args)
    (tmp_path / "cleanrl" / "pqn.py").touch()
    selection.check_args(args)
    commands = {r.algorithm: r.command(args) for r in selection.select(args, gpus=[])}
    assert f"--cleanrl={tmp_path}" in commands["pqn"] and f"--cleanrl={tmp_path}" not in commands["ppo"]


def test_libraries_take_one_thread_where_our_scripts_do():
    """Unless told, PyTorch takes all cores."""
    ours = {name for name in COLLECTION if "set_num_threads(1)" in (LEANRL / f"{name}.py").read_text()}
    args = selection.Args(peers=Path(sys.executable))
    runs = selection.select(args, gpus=[])
    for run in runs:
        on_one = "--threads=1" in run.command(args)
        assert on_one == (run.algorithm in ours and run.mode in LIBRARIES), run
    assert {run.mode for run in runs if run.algorithm in ours} >= {"cleanrl", "sb3", "sbx"}


def test_a_run_in_several_processes_is_started_by_torchrun():
    args = selection.Args(modes=("compile", "ranks_both"), seeds=(3,), ranks=4, options={"num_envs": "2"})
    runs = [run for run in selection.select(args, gpus=list("0123")) if run.mode == "ranks_both"]
    assert {run.algorithm for run in runs} == {"ppo_atari_envpool"}
    for run in runs:
        _, *torchrun, script, compiled, graphs, _, seed = run.command(args)[:10]
        assert torchrun == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        assert script == str(LEANRL / f"{run.algorithm}_multigpu.py")
        assert [compiled, graphs, seed] == ["--compile", "--cudagraphs", "--seed=3"]
        assert run.name.endswith(f"-{run.steps}-ranks=4-num-envs=2-seed3")
        assert script_in(run.command(args)) == Path(script)
    assert "ranks_both" not in {run.mode for run in selection.select(args, gpus=list("012"))}


def refused(capsys, folder: Path, *args, gpus: tuple[str, ...] = ()) -> list[str]:
    """What a sweep that would be of one run says, in lines, when it refuses to start with status 2."""
    command = ["sweep", "--modes", "eager", "--seeds", "1", "--folder", str(folder), *args]
    found = patch.object(sweep, "visible_gpus", lambda args: gpus)
    with patch("sys.argv", command), patch("signal.signal"), found:
        try:
            status = sweep.main()
        except SystemExit as left:
            status = left.code
    assert status == 2
    return capsys.readouterr().err.splitlines()


PRECISION = "--options does not take precision, which the mode tf32 sets"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--modes", "fast"],
            "--modes takes cleanrl, leanrl, leanrl_compile, leanrl_both, sb3, sbx, rltools, eager, ",
        ),
        (["--modes", "sbx"], "--modes cleanrl, sb3, sbx, rltools need --peers"),
        (["--modes", "leanrl"], "--modes leanrl, leanrl_compile, leanrl_both need --leanrl: "),
        (["--leanrl", "/"], "--leanrl takes a clone of the original LeanRL, got /"),
        (["--profile", "check", "--env-ids", "A"], "--env-ids does not go with --profile check, "),
        (["--profile", "check", "--leanrl", "/"], "peers do not go with --profile check"),
        (["--scripts", "dqn", "--env-ids", "A"], "--env-ids fits none of --scripts, which take "),
        (["--peers", "/"], "--peers takes a Python interpreter, got /"),
        (["--modes", "cudagraphs"], "nothing is selected"),
        (["--cluster", "pbs"], "--cluster takes local, slurm; got pbs"),
        (["--workers", "0"], "--workers takes a number from 1"),
        (["--workers", "1000"], "--workers and --runs-per-gpu: 1000 runs at a time, and there are"),
        (["--runs-per-gpu", "2"], "--runs-per-gpu takes 1 where there is no GPU"),
        (["--options", "seed", "5"], "--options does not take seed: use --seeds"),
        (["--modes", "seeds"], "--modes takes cleanrl, "),
        (["--options", "precision", "float32", "--modes", "tf32"], PRECISION),
        (["--options", "env_id", "Acrobot-v1"], "--options does not take env-id: use --env-ids, "),
        (["--options", "no-compile", ""], "--options does not take no-compile: use --modes"),
        (["--options", "no-cuda", ""], "--options does not take no-cuda: use CUDA_VISIBLE_DEVICES= in "),
        (["--options", "num-envs", "2", "evaluate", "runs"], "--options does not take evaluate: use the "),
        (["--folder", "/dev/null"], "--folder takes a folder that can be written to, got /dev/null: "),
    ],
)
def test_bad_arguments_are_told_in_one_line(tmp_path, capsys, args, message):
    *before, told = refused(capsys, tmp_path, *args)
    skipped = ["skipped: cudagraphs needs CUDA, and there is no device"]
    assert before == (skipped if "cudagraphs" in args else [])
    assert told.partition(": error: ")[2].startswith(message)
    assert not (tmp_path / "jobs").exists()


def test_a_folder_of_another_profile_or_version_and_more_workers_than_gpus_are_refused(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text('{"format": 0}\n{"format": 0}\n')
    [told] = refused(capsys, tmp_path)
    error = f"{tmp_path / 'results.jsonl'}, line 1: has format 0, and this version reads format 1"
    assert told.endswith(f": error: --folder {tmp_path}: {error}")
    [told] = refused(capsys, tmp_path, "--profile", "speed")
    begun = f": error: --folder {tmp_path}: has a sweep with "
    assert told.endswith(f"{begun}--profile quick, not speed")
    # Tables would not tell them apart.
    [told] = refused(capsys, tmp_path, "--options", "num-envs", "64", "double", "")
    assert told.endswith(f"{begun}--options none, not double num-envs 64")
    [told] = refused(capsys, tmp_path, "--ranks", "3")
    assert told.endswith(f"{begun}--ranks 2, not 3")
    [told] = refused(capsys, tmp_path, "--workers", "2", gpus=("0",))
    assert ": error: --workers takes a number from 1 to 1, the GPUs at hand, got 2" in told
    ranks = ("--modes", "ranks", "--scripts", "ppo_atari_envpool")
    [told] = refused(capsys, tmp_path, *ranks, "--workers", "2", gpus=("0", "1", "2"))
    assert ": error: --workers takes a number from 1 to 1, the GPUs at hand for 2 ranks each, got 2" in told


def test_what_tables_do_not_tell_apart_has_folders_of_its_own():
    several = [{}, {"options": {"num_envs": "64"}}, {"options": {"num-envs": "4"}}, {"ranks": 4}]
    several += [{"options": {"env-kwargs": json.dumps({"a/b": "c" * 300 + end})}} for end in "12"]
    folders = [sweep_folder.default_folder(selection.Args(**arguments)) for arguments in several]
    assert len({*folders}) == len(several)
    orders = [dict(order) for order in itertools.permutations([("gamma", "0.9"), ("num_envs", "4")])]
    assert len({sweep_folder.default_folder(selection.Args(options=order)) for order in orders}) == 1
    assert all(folder.parent == ROOT / "sweeps" and len(folder.name) < 150 for folder in folders)


# ---- What can happen to a run ------------------------------------------------------------------------------
# What a stand-in does, and how it is told of.
FAILURES = {
    "os.kill(os.getpid(), 9)": "killed by SIGKILL",
    "sys.exit('a loss is nan')": "exit status 1",
    "import atexit; atexit.register(os._exit, 4)": "exit status 4",  # after its summary
    "time.sleep(99)": "took longer than 3 s",
    "os.kill(os.getppid(), 9); time.sleep(99)": "the process that ran it died",  # who watches it dies
    "said = {'wall_seconds': 'long'}": "printed a summary that wall_seconds",
    "said = {'more': [float('nan')]}": "printed a summary that has a number that is not finite",
}


def test_a_run_that_fails_is_tried_again_and_then_recorded(house):
    """A seed for each that fails each time, two that fail once, and one that is done at once."""
    always = dict(enumerate(FAILURES, start=101))
    once = {1: always[101], 2: always[105]}
    for seed, behaviour in (once | always).items():
        house.tell(seed, behaviour + ("!" if seed in always else ""))
    output, _ = house.sweep("--time-limit", 0.05, "--seeds", 0, *once, *always, "--workers", 2, status=1)
    assert not house.running()
    lines = {line["seed"]: line for line in house.lines()}
    assert lines.keys() == {0, *once, *always}
    assert [lines[seed]["attempts"] for seed in (0, *once, *always)] == [1, 2, 2, 2, 2, 2, 2, 2, 1, 1]
    for seed, behaviour in always.items():
        line = lines[seed]
        assert line["reason"].startswith(FAILURES[behaviour])
        assert f"failed: {line['job']}: {line['reason']}" in output
        if seed <= 104:
            assert line["log"].startswith("a line of the log")
            assert line["versions"]["python"] == platform.python_version()
    share = str(len(os.sched_getaffinity(0)) // 2)  # of the cores, for each of the workers
    assert {tuple(start[2:]) for start in house.starts()} == {(share, share)}

    # What failed is tried again, and only that; what is not selected stays on record.
    (house.leanrl / "101").unlink()
    starts = len(house.starts())
    house.sweep("--seeds", 0, 1, 101, env=os.environ | {"PATH": ""})  # without git
    assert len(house.starts()) == starts + 1
    lines |= {line["seed"]: line for line in house.lines()}
    assert house.done() == [0, 1, 2, 101]
    assert (lines[101]["attempts"], lines[101]["git_commit"]) == (3, None)  # those of the first call included
    assert len(house.lines()) == len(lines)


def test_after_kill_9_runs_go_on_from_their_checkpoints(house):
    for moment in (0, 0.07, 0.15):
        noted = len(house.steps())
        process = house.start("--checkpoint-every", 10, seeds=1)
        assert wait_until(lambda noted=noted: len(house.steps()) > noted + 11)
        time.sleep(moment)
        process.kill()
        process.wait()
        assert wait_until(lambda: not house.running())
    output, _ = house.sweep("--checkpoint-every", 10, seeds=1)
    lost = [before - after + 1 for before, after in itertools.pairwise(house.steps()) if after <= before]
    assert len(house.starts()) == 4
    assert max(lost) <= 10
    [line], [curve] = house.lines(), house.curves()
    assert line["resumed"] % 10 == 0 and line["resumed"] >= 30
    assert_nothing_is_missing_or_twice(curve, least_seconds=250 * 0.02)
    assert house.checkpoints() == [250]
    assert f"| {line['algorithm']}" not in output  # the table of speeds leaves it out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_runs_that_end_in_order_lose_nothing_when_their_sweep_is_stopped(house, number):
    house.tell(0, "end_in_order(); pause = 0.05")
    process = house.start("--checkpoint-every", 1000, seeds=1, start_new_session=True)
    assert wait_until(lambda: len(house.steps()) > 5)
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
    assert wait_until(lambda: not house.running())
    stopped = house.steps()[-1]
    house.tell(0, "pause = 0")
    house.sweep("--checkpoint-every", 1000, seeds=1)
    assert house.steps() == list(range(1, 252))
    assert [line["resumed"] for line in house.lines()] == [stopped]


def test_a_run_that_takes_too_long_leaves_a_checkpoint(house):
    # By SIGUSR2 Slurm tells that the time is nearly up.
    house.tell(0, "end_in_order(); os.kill(os.getpid(), signal.SIGUSR2); pause = 0.1")
    house.sweep("--checkpoint-every", 1000, "--time-limit", 0.05, "--attempts", 1, seeds=1, status=1)
    assert [line["reason"] for line in house.lines()] == ["took longer than 3 s"]
    assert house.checkpoints() == house.steps()[-1:] != []


# ---- What can happen to a sweep ----------------------------------------------------------------------------
def test_after_kill_9_finished_runs_are_not_repeated(house, capsys):
    house.tell(1, WAIT)
    process = house.start()
    assert wait_until(lambda: len(house.starts()) == 2)
    with pytest.raises(SystemExit, match="2"):  # two in a folder exclude each other
        sweep_folder.claim(house.folder, seconds=0.5)
    waits, refusal = capsys.readouterr().err.splitlines()
    assert waits.endswith("waiting for another sweep, or the runs of one that was killed, to end")
    assert refusal.endswith(f"error: --folder {house.folder}: another sweep is at work there")
    process.kill()
    process.wait()
    assert wait_until(lambda: not house.running())  # the run ends with its sweep
    assert house.done() == [0]

    results_, curves = (house.folder / name for name in ("results.jsonl", "curves.jsonl"))
    for cut, ended in ((), True), ((results_, curves), True), ((results_,), False), ((curves,), False):
        for path in cut:  # killed before it wrote the last lines, or while it wrote one
            whole = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(whole[:-1]) if ended else b"".join(whole)[:-20])
        house.sweep()
        assert house.done() == [0, 1, 2]
    # The last run had left all that is needed.
    assert [seed for _, seed, *_ in house.starts()] == ["0", "1", "1", "2"]

    # On a disk that was full files are empty.
    [outcome] = house.folder.glob("jobs/*seed2/*/outcome.json")
    results_.write_bytes(b"".join(results_.read_bytes().splitlines(keepends=True)[:-1]))
    outcome.write_text("")
    house.sweep()
    assert house.done() == [0, 1, 2] and len(house.starts()) == 5
    curves.unlink()
    report = [sys.executable, "-m", "benchmark.report", house.folder]
    assert "| td3_continuous_action: LeanRL eager |" in subprocess.check_output(report, cwd=ROOT, text=True)
    (house.folder / "sweep.json").write_text("")
    _, error = house.sweep(status=2)
    assert error.endswith(
        "sweep.json is not the description of one sweep: remove it, and the folder is new\n"
    )


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
    house.sweep()
    local, house.folder = house.lines(), house.path / "slurm"
    for seed, behaviour in enumerate((WAIT, WAIT, "os.kill(os.getpid(), 9)")):
        house.tell(seed, behaviour)
    options = (*SLURM, "--partition", "debug", "--workers", "2", "--slurm-options", "oversubscribe", "true")
    process = house.start(*options, env=cluster)
    assert wait_until(lambda: len(house.starts()) == 5 and len([*house.folder.rglob("slurm_job")]) == 3)
    process.kill()
    process.wait()
    for env, told in ((cluster, "Slurm's job "), (os.environ | {"SLURM_CONF": "/"}, "squeue does not say ")):
        _, error = house.sweep(env=env, status=2)
        assert f"sweep: error: --cluster local: {told}" in error.splitlines()[-1]
    (house.leanrl / "go").touch()
    house.sweep(*options, env=cluster)
    assert len(house.starts()) == 7  # the third has failed once
    lines = sorted(house.lines(), key=lambda line: line["seed"])
    assert [line["attempts"] for line in lines] == [1, 1, 2]
    for line in (*lines, *local):
        for key in ("sweep", "attempts", "cpu_busy_seconds", "peak_memory_mb", "cold_start", "threads"):
            del line[key]
    assert lines == local
    # What it refuses is told in one line, behind what sbatch itself has said.
    _, error = house.sweep("--cluster", "slurm", "--partition", "none", "--seeds", 9, env=cluster, status=2)
    assert "sweep: error: Slurm refused the runs: sbatch: error: " in error.splitlines()[-1]


@on_slurm
def test_slurm_is_asked_again_and_may_take_its_time_to_answer(house, cluster):
    (programs := house.path / "bin").mkdir()
    (sbatch := programs / "sbatch").write_text(f"""#!/bin/sh
[ -e {programs}/refuse ] && touch {programs}/refused && echo "sbatch: error: Socket timed out" >&2 && exit 1
{shutil.which("sbatch")} "$@" && touch {programs}/taken && sleep 1
""")
    sbatch.chmod(0o755)
    again, main = "REFUSED_SECONDS = 60", house.path / "benchmark" / "sweep" / "__main__.py"
    assert again in main.read_text()
    main.write_text(main.read_text().replace(again, "REFUSED_SECONDS = 1"))
    # With a second thread, to which the kernel could give a signal.
    env = cluster | {"PATH": f"{programs}:{cluster['PATH']}", "OPENBLAS_NUM_THREADS": "2"}
    house.tell(0, WAIT.replace("go", "fail") + "\nos.kill(os.getpid(), 9)")
    house.tell(1, WAIT)
    process = house.start(*SLURM, "--workers", 2, seeds=2, env=env)
    assert wait_until(lambda: len(house.starts()) == 2)
    (programs / "refuse").touch()
    (house.leanrl / "fail").touch()
    assert wait_until((programs / "refused").exists)
    (programs / "refuse").unlink()
    (house.leanrl / "go").touch()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "seed0 now: sbatch: error: Socket timed out" in error
    assert sorted((line["seed"], line["attempts"]) for line in house.lines()) == [(0, 2), (1, 1)]

    # A job that Slurm has taken when Ctrl+C is pressed is cancelled, too.
    (programs / "taken").unlink()
    (house.leanrl / "go").unlink()
    house.tell(2, WAIT)
    process = house.start(*SLURM, "--seeds", 2, env=env, start_new_session=True)
    assert wait_until((programs / "taken").exists)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: sbatch ends before it has told of the job
    assert process.wait(60) == 130
    queue = {"args": ["squeue", "--noheader"], "env": cluster, "capture_output": True, "check": True}
    assert wait_until(lambda: not subprocess.run(**queue).stdout)
    assert len([*house.folder.rglob("slurm_job")]) == 3  # of the first seed two, of the last none


@on_slurm
def test_a_run_that_slurm_requeues_goes_on_from_its_checkpoint(house, cluster):
    house.tell(0, "pause = 0.05")
    process = house.start(*SLURM, "--checkpoint-every", 10, seeds=1, env=cluster)
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

    assert wait_until(started_again, 180)
    process.communicate(timeout=120)
    assert process.returncode == 0
    [line], [curve] = house.lines(), house.curves()
    assert line["resumed"] >= 20
    assert_nothing_is_missing_or_twice(curve, least_seconds=250 * 0.02)


@on_slurm
def test_ctrl_c_cancels_the_jobs_on_slurm(house, cluster):
    house.tell(0, "end_in_order()")
    process = house.start(*SLURM, "--checkpoint-every", 200, seeds=1, env=cluster)
    assert wait_until(lambda: len(house.steps()) > 25)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    queue = {"args": ["squeue", "--noheader"], "env": cluster, "capture_output": True, "check": True}
    # A cancelled job is in the queue until its node has cleaned up after it.
    assert wait_until(lambda: not subprocess.run(**queue).stdout)
    assert not house.running()
    assert house.checkpoints() == house.steps()[-1:]
