"""Profile a script after its warm-up: where the time of a step goes, and which operators and kernels take it.

    python -m benchmark.profile_run NAME [--trace FILE] [ARGS]        what ./run.sh profile calls

Runs leanrl/NAME.py with ARGS, eager, compiled or captured, until 50 steps of its environments are profiled,
ten after learning starts (PPO: the second rollout and what is learnt from the first), and ends it. Prints
two tables, and writes a trace for chrome://tracing or https://ui.perfetto.dev: by default a new file in
profiles/.

The script knows nothing of it. Right before its main loop a statement is inserted that wraps the functions a
step calls: as callables, because a captured graph that is replayed enters no Python function.
"""

import argparse
import ast
import signal
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from benchmark import LEANRL
from benchmark.terminal import refuse

STEPS = 50  # of a script that learns in each step; of PPO, a rollout
STEP = "ProfilerStep*"  # how the profiler names a step
LONGEST = 12  # rows of operators or kernels
WIDTH = 64  # of a name in a table


class ProfileOverError(SystemExit):
    """Ends a run whose profile is taken, or which is too short for one: then the message says so."""


def hooked(source: str, path: Path) -> ast.Module:
    """A script with `begin_profile(globals())` before its main loop; line numbers stay as they were."""
    tree = ast.parse(source, str(path))
    [call] = ast.parse("begin_profile(globals())").body
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    loops = [
        (body, index)
        for body in bodies
        for index, node in enumerate(body)
        if isinstance(node, ast.While) and ast.unparse(node.test) == "not last"
    ]
    if len(loops) != 1:
        refuse(f"{path} has {len(loops)} loops `while not last:`, and one is what is profiled")
    [(body, index)] = loops
    body.insert(index, ast.copy_location(call, body[index]))
    return ast.fix_missing_locations(tree)


def run_script(path: Path, args: list[str], begin_profile: Callable[[dict], None]) -> None:
    """Run a script as Python would, with the hook before its main loop."""
    sys.argv[:] = [str(path), *args]
    sys.path[0] = str(path.parent)
    # Where tyro looks for the texts of --help.
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    vars(module).update(__file__=str(path), begin_profile=begin_profile)
    exec(compile(hooked(path.read_text(), path), str(path), "exec"), vars(module))


class RunProfile:
    """The profile of a run, from its main loop on."""

    def begin(self, run: dict) -> None:
        """Wrap the functions that a step calls, globals of a script that is about to begin its main loop.

        Raises ProfileOverError in the call that ends the profile, or at once where there will be none.
        """
        args, on_policy = run["args"], "rollout" in run
        self.device = run["device"].type
        self.steps = args.num_steps if on_policy else STEPS
        random_steps = 0 if on_policy else max(args.learning_starts - run["global_step"], 0)
        wait = self.steps if on_policy else random_steps // args.num_envs + 10
        needed = (wait + self.steps) * args.num_envs
        left = 0 if run["last"] else args.total_timesteps - run["global_step"]
        if needed > left:
            raise ProfileOverError(
                f"a profile takes {needed} agent steps, and this run makes {left}: see --total-timesteps"
            )

        policy = "policy" if "policy" in run else "act"  # what the loop calls, in PyTorch or in NumPy
        functions = {policy: "policy", "prepare": "prepare", "update": "update"}
        functions = {function: name for function, name in functions.items() if function in run}
        self.names = [*functions.values(), "environment"]
        for function, name in functions.items():
            run[function] = self.named(name, run[function])
        step_envs = self.named("environment", run["envs"].step)

        def step(actions: object) -> tuple:
            result = step_envs(actions)
            self.profiler.step()
            if self.profiler.step_num == wait + self.steps:
                self.profiler.stop()
                raise ProfileOverError
            return result

        run["envs"].step = step
        # The profiler's first step is slower than others: it is taken and thrown away.
        schedule = torch.profiler.schedule(wait=wait - 1, warmup=1, active=self.steps, repeat=1)
        self.profiler = torch.profiler.profile(schedule=schedule)
        self.profiler.start()

    @staticmethod
    def named(name: str, function: Callable) -> Callable:
        """The function, its calls recorded under this name."""

        def call(*args):
            with record_function(name):
                return function(*args)

        return call

    def report(self) -> None:
        """Print the tables."""
        total, rows = self.rows()
        print(f"{'parts of a step, under the profiler':{WIDTH}}{'us a step':>10}{'share':>8}")
        for name, time in rows.items():
            print(f"{name:{WIDTH}}{time:10.1f}{time / total:8.1%}")
        for title, costs in self.costliest().items():
            print(f"\n{title:{WIDTH}}{'us a step':>10}{'share':>8}{'calls':>8}")
            for name, time, calls in costs[:LONGEST]:
                name = name if len(name) < WIDTH else f"{name[: WIDTH - 4]}..."
                print(f"{name:{WIDTH}}{time:10.1f}{time / total:8.1%}{calls:8.1f}")

    def rows(self) -> tuple[float, dict[str, float]]:
        """The microseconds that a step takes, and its parts."""
        times: dict[str, float] = defaultdict(float)
        for event in self.profiler.events():
            # On CUDA, what a function launched has an entry of its name there, too.
            if event.device_type != DeviceType.CPU:
                continue
            waits = event.name.endswith("Synchronize") or event.name == "cudaMemcpyAsync"
            name = "waiting for the device" if waits and not self.inside(event) else event.name
            times[name] += event.time_range.elapsed_us() / self.steps
        rows = {name: times[name] for name in (*self.names, "waiting for the device")}
        return times[STEP], rows | {"the rest": times[STEP] - sum(rows.values())}

    def inside(self, event) -> bool:
        """Whether an event is part of a named function, whose time has it already."""
        while event := event.cpu_parent:
            if event.name in self.names:
                return True
        return False

    def costliest(self) -> dict[str, list[tuple[str, float, float]]]:
        """Operators and, on CUDA, kernels: own microseconds and calls a step, the costliest first."""
        tables: dict[str, list] = {"kernels on the device": []} if self.device == "cuda" else {}
        tables["operators on the CPU, without what they call"] = []
        *kernels, operators = tables.values()
        for event in self.profiler.key_averages():
            calls = event.count / self.steps
            if event.device_type == DeviceType.CPU and event.key not in (*self.names, STEP):
                operators.append((event.key, event.self_cpu_time_total / self.steps, calls))
            elif event.device_type != DeviceType.CPU and kernels and not event.is_user_annotation:
                kernels[0].append((event.key, event.self_device_time_total / self.steps, calls))
        return {title: sorted(costs, key=lambda cost: -cost[1]) for title, costs in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("--trace", type=Path)
    options, args = parser.parse_known_args()  # all else is the script's, --help included
    default = Path("profiles", f"{options.name}-{datetime.now():%m%d-%H%M%S}.json.gz")
    trace = (options.trace or default).absolute()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profile, problem = RunProfile(), "the run was over before its profile"
    try:
        run_script(LEANRL / f"{options.name}.py", args, profile.begin)
    except ProfileOverError as over:  # told here, where the progress bar is closed
        problem = over.code
    if problem:
        refuse(problem)
    profile.profiler.export_chrome_trace(str(trace))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, with no traceback
    profile.report()
    print(f"\ntrace: {trace}")


if __name__ == "__main__":
    main()
