"""What settings around the twins are worth: guards, start-up, threads, precision, MKL's choice of code.

    ./run.sh python -m benchmark.studies.compile_settings [--scripts NAME ...] [--settings NAME ...]
        [--output FILE]

Compiles each twin under each setting in a process of its own, in a copy where the setting changes its text,
on the CPU: with an empty cache, unless another setting has the same code, and then with a full one. Then all
take turns at gradient steps (of SAC and TD3 with and without the actor), first alone on the machine and then
beside one process that is always busy: a figure is the median of 15 rounds. Nothing else may run meanwhile;
it takes five minutes a script. FILE gets a line for each, in place of those that it has of the same scripts.
docs/log.md shows benchmark/results/settings.jsonl.

Exit status: 0 done, 2 a bad argument; a setting with which a script fails is told and left out.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from benchmark import LEANRL
from benchmark.machine import provenance
from benchmark.report import results
from benchmark.report.tables import settings_table
from benchmark.terminal import check_names, lines_of_output

ROUNDS = 15
# The arguments of a short run, and the gradient steps of a round.
SCRIPTS = {
    "sac_continuous_action": (["--total-timesteps=310", "--learning-starts=300"], 8),
    "td3_continuous_action": (["--total-timesteps=310", "--learning-starts=300"], 8),
    "ppo_continuous_action": (["--total-timesteps=4096"], 40),
    "ppo_atari_envpool": (["--total-timesteps=2048"], 2),
    "dqn": (["--total-timesteps=400", "--learning-starts=300"], 60),
}


@dataclass(frozen=True)
class Setting:
    """What is done to a twin: code before it, its text, code after its run, environment, arguments."""

    before: str = ""
    replace: tuple[str, str] | None = None
    after: str = ""
    env: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def compiled_with(options: str) -> tuple[str, str]:
    """The replacement that compiles a twin's functions with more options."""
    return "fullgraph=True)", f"fullgraph=True, options={options})"


SETTINGS = {
    "as it is": Setting(),
    "cpp_wrapper off": Setting(replace=('cpp_wrapper = device.type == "cpu"', "cpp_wrapper = False")),
    "vec_isa_ok off": Setting(replace=("vec_isa_ok = True", "vec_isa_ok = None")),
    "one graph a gradient step": Setting(
        replace=(
            "functions = (act, update_critic, update_actor)\n        act, update_critic, update_actor =",
            "functions = (act, update)\n        act, update =",
        )
    ),
    "install_free_tensors": Setting(before="torch._dynamo.config.install_free_tensors = True"),
    "use_recursive_dict_tags_for_guards": Setting(
        before="torch._dynamo.config.use_recursive_dict_tags_for_guards = True"
    ),
    "no guards on modules": Setting(
        replace=compiled_with("{'guard_filter_fn': torch.compiler.skip_guard_on_all_nn_modules_unsafe}")
    ),
    "no guards": Setting(replace=compiled_with("{'guard_filter_fn': lambda guards: [False] * len(guards)}")),
    "skip_guard_eval_unsafe": Setting(after="torch.compiler.set_stance(skip_guard_eval_unsafe=True)"),
    "MKL's own choice of code": Setting(env={"LD_PRELOAD": ""}),
    "--matmul-precision medium": Setting(arguments=("--matmul-precision=medium",)),
    "OMP_WAIT_POLICY=passive": Setting(env={"OMP_WAIT_POLICY": "passive"}),
    "GOMP_SPINCOUNT=1000": Setting(env={"GOMP_SPINCOUNT": "1000"}),
    "GOMP_SPINCOUNT=10000": Setting(env={"GOMP_SPINCOUNT": "10000"}),
    "GOMP_SPINCOUNT=100000": Setting(env={"GOMP_SPINCOUNT": "100000"}),
    # By glibc's malloc.
    "freed memory is kept": Setting(env={"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}),
    "OMP_NUM_THREADS=1": Setting(env={"OMP_NUM_THREADS": "1"}),
}
# A process runs the twin, and for each line that it reads so many gradient steps, whose seconds it prints.
CHILD = """
import runpy, sys, time

import torch

{before}
script = runpy.run_path(sys.argv[0], run_name="__main__")
{after}
update, steps = script["update"], {steps}
kinds = {{"sac": [(True, True), (False, True)], "td3": [(True,), (False,)], "dqn": [(False,)]}}
if {script!r}[:3] in kinds:
    kinds = kinds[{script!r}[:3]]
else:
    kinds = [(torch.arange(script["batch_size"] // script["args"].num_minibatches),)]


def seconds():
    start = time.perf_counter()
    for step in range(steps):
        update(*kinds[step % len(kinds)])
    return time.perf_counter() - start


for _ in sys.stdin:
    time.sleep(0.1)  # until the threads of the process before this one spin no more
    seconds()
    print(seconds(), flush=True)
"""


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(SCRIPTS)
    """eager scripts; their twins are timed"""
    settings: tuple[str, ...] = tuple(SETTINGS)
    """names of settings beside "as it is", of which those apply that change something in a script"""
    output: Path | None = None
    """a file of results to write to"""


class Twin:
    """A twin that has run under a setting, and takes gradient steps when told to."""

    def __init__(self, script: str, setting: Setting, folder: Path, cache: Path):
        path = folder / f"{script}_torchcompile.py"
        path.write_text(text_of(script).replace(*setting.replace or ("", "")))
        arguments, self.steps = SCRIPTS[script]
        child = CHILD.format(before=setting.before, after=setting.after, steps=self.steps, script=script)
        argv = [str(path), "--compile", "--no-cuda", *arguments, *setting.arguments]
        command = [sys.executable, "-c", f"import sys\nsys.argv = {argv!r}\n{child}"]
        env = os.environ | setting.env | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        with (folder / "log.txt").open("ab") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
        if not (summary := self.process.stdout.readline()):
            raise RuntimeError((folder / "log.txt").read_text()[-2000:])
        self.startup_seconds: float = json.loads(summary)["startup_seconds"]

    def microseconds(self) -> float:
        """Take the gradient steps of a round, and tell what one took."""
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline()) / self.steps * 1e6

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def text_of(script: str) -> str:
    """The text of a script's twin."""
    return (LEANRL / f"{script}_torchcompile.py").read_text()


def applies(script: str, setting: Setting) -> bool:
    """Whether a setting changes anything in a script."""
    preloaded = "mkl_as_on_intel" in os.environ.get("LD_PRELOAD", "")
    return (setting.replace or ("",))[0] in text_of(script) and (preloaded or "LD_PRELOAD" not in setting.env)


def measure(script: str, names: list[str]) -> list[dict]:
    """The lines of a script, one a setting."""
    lines = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        twins = {}
        for setting in names:
            folder = Path(name) / str(names.index(setting))
            folder.mkdir()
            changes = SETTINGS[setting]
            code = (changes.before, changes.replace, changes.arguments, changes.env.get("OMP_NUM_THREADS"))
            cache = Path(name) / f"cache{hash(code)}"
            cold_seconds = None
            try:
                if not cache.exists():
                    with Twin(script, changes, folder, cache) as cold:
                        cold_seconds = cold.startup_seconds
                twins[setting] = stack.enter_context(Twin(script, changes, folder, cache))
            except RuntimeError as error:
                print(f"{script}, {setting}: fails\n{error}", file=sys.stderr)
                continue
            startup = {"cold_seconds": cold_seconds, "warm_seconds": twins[setting].startup_seconds}
            print(
                f"{script}, {setting}: starts up in {cold_seconds} and {twins[setting].startup_seconds} s",
                flush=True,
            )
            lines.append(
                {"format": results.FORMAT, "status": "ok", "script": script, "setting": setting, **startup}
            )
        for key in ("microseconds", "in_company"):
            rounds = {setting: [] for setting in twins}
            if key == "in_company":
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(busy.kill)
            for _ in range(1 + ROUNDS):  # the first warms up
                for setting, twin in twins.items():
                    rounds[setting].append(twin.microseconds())
            for line in lines:
                line[key] = statistics.median(rounds[line["setting"]][1:])
    path = str(LEANRL / f"{script}_torchcompile.py")
    return [line | provenance((sys.executable, path), dict(os.environ), None) for line in lines]


def main() -> None:
    args = tyro.cli(Args)
    for name, known in (("scripts", SCRIPTS), ("settings", SETTINGS)):
        check_names(name, getattr(args, name), known)
    kept, lines = lines_of_output(args.output, results.check_setting), []
    for script in args.scripts:
        names = dict.fromkeys(["as it is", *args.settings])
        timed = measure(script, [name for name in names if applies(script, SETTINGS[name])])
        lines += timed
        if args.output:
            kept = [line for line in kept if line["script"] != script] + timed
            results.replace(args.output, kept, results.check_setting)
    print(settings_table(lines))


if __name__ == "__main__":
    main()
