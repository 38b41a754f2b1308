"""How the cost of a script grows with the number of environments, the size of a batch and the width of the networks.

    python benchmark/scaling.py [--scripts NAME ...] [--axes AXIS ...] [--peers PYTHON] [--output FILE]

Times each twin with --compile along one axis at a time, with the gradient steps per agent step of its defaults, and, where
there is an interpreter with requirements/peers.txt, SBX beside it. Nothing else may run meanwhile; it takes half an hour on
two cores. A width other than the script's is that of a copy of it, changed in the section "Networks" (of Atari the layer
behind the convolutions). FILE gets a line a point, in place of an earlier one of the same point; docs/benchmark.md shows
benchmark/results/scaling.jsonl.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import results
import tyro
from job import provenance, summary_of
from tables import scaling_table

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmark" / "peers.py"
NUM_ENVS = (1, 4, 16, 64, 256)
SIZES = (64, 256, 1024)
AXES = {"num_envs": NUM_ENVS, "batch_size": (*SIZES, 4096), "width": SIZES}
# Environments, batch and width of the defaults.
DEFAULTS = {
    "sac_continuous_action": {"num_envs": 1, "batch_size": 256, "width": 256},
    "td3_continuous_action": {"num_envs": 1, "batch_size": 256, "width": 256},
    "ppo_continuous_action": {"num_envs": 1, "batch_size": 64, "width": 64},
    "ppo_atari_envpool": {"num_envs": 8, "batch_size": 256, "width": 512},
}
STARTS = 500  # agent steps of SAC and TD3 before they learn
ROLLOUTS = 3


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(DEFAULTS)
    """eager scripts; their twins are timed"""
    axes: tuple[str, ...] = tuple(AXES)
    """num_envs, batch_size, width"""
    peers: Path | None = None
    """the interpreter of an environment with requirements/peers.txt, for SBX"""
    output: Path | None = None
    """a file of results to write to"""


@dataclass(frozen=True)
class Point:
    """One run: what it is of, and where on an axis."""

    script: str
    mode: str
    axis: str
    value: int

    @property
    def sizes(self) -> dict[str, int]:
        return DEFAULTS[self.script] | {self.axis: self.value}

    @property
    def num_steps(self) -> int:
        """Of PPO, the steps of a rollout in each environment: as many in all as by default, at least 128, and one batch."""
        envs, batch = self.sizes["num_envs"], self.sizes["batch_size"]
        return max(128, batch // envs, (1024 if "atari" in self.script else 2048) // envs)

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments of the script: of SAC and TD3 about as long a run for any size, of PPO as many rollouts."""
        envs, batch, width = self.sizes.values()
        if not self.script.startswith("ppo"):
            cost = max(1, batch / 256) * max(1, width / 256) ** 1.5
            steps = STARTS + max(120, int(1500 / cost))
            return {"num-envs": envs, "batch-size": batch, "learning-starts": STARTS, "total-timesteps": steps}
        rollout = envs * self.num_steps
        steps = {"num-steps": self.num_steps, "total-timesteps": ROLLOUTS * rollout}
        return {"num-envs": envs, "num-minibatches": rollout // batch, **steps}

    @property
    def updates_per_step(self) -> float:
        """Gradient steps per agent step."""
        if not self.script.startswith("ppo"):
            return 1.0
        return (4 if "atari" in self.script else 10) / self.sizes["batch_size"]

    def command(self, folder: Path, peers: Path | None) -> tuple[str, ...]:
        """The command that runs it; a copy of the script is made in `folder`."""
        if self.mode == "sbx":
            envs, batch, width = self.sizes.values()
            settle = envs * self.num_steps if self.script.startswith("ppo") else max(20, 2 * envs)
            given = {key: value for key, value in self.arguments.items() if key != "num-minibatches"}
            given |= {"batch-size": batch, "width": width, "settle": settle}
            given["total-timesteps"] += settle  # in which JAX compiles
            options = [f"--{key}={value}" for key, value in given.items()]
            return (str(peers.absolute()), str(PEERS), "sbx", self.script, "--env-id=HalfCheetah-v4", "--seed=1", *options)
        path = ROOT / "leanrl" / f"{self.script}_torchcompile.py"
        if self.axis == "width":
            path = folder / path.name
            path.write_text(widened(self.script, self.value))
        options = [f"--{key}={value}" for key, value in self.arguments.items()]
        return (sys.executable, str(path), "--compile", "--no-cuda", *options)


def widened(script: str, width: int) -> str:
    """The text of a twin whose networks have another width."""
    text = (ROOT / "leanrl" / f"{script}_torchcompile.py").read_text()
    [networks] = re.findall(r"^# ---- Networks .*?^# ---- Algorithm", text, re.DOTALL | re.MULTILINE)
    return text.replace(networks, re.sub(rf"\b{DEFAULTS[script]['width']}\b", str(width), networks))


def points(args: Args) -> Iterator[Point]:
    """All that is to be timed, ours and SBX's in turn; the default of a script is on each of its axes."""
    for script in args.scripts:
        for axis in args.axes:
            for value in sorted({*AXES[axis], DEFAULTS[script][axis]}):
                yield Point(script, "compile", axis, value)
                if args.peers and "atari" not in script:  # SBX has no policy for images
                    yield Point(script, "sbx", axis, value)


def measure(point: Point, peers: Path | None) -> dict:
    """The line of a point. Raises RuntimeError where the run does not end well."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = point.command(folder, peers)
        with (folder / "out.txt").open("wb") as out, (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
        summary = summary_of(folder / "out.txt")
        if status or not summary or not summary.get("sps"):
            raise RuntimeError(f"{' '.join(command)}\n{(folder / 'log.txt').read_text()[-2000:]}")
    line = {"format": results.FORMAT, "script": point.script, "mode": point.mode, "axis": point.axis, "value": point.value}
    line |= {"sps": summary["sps"], "updates_per_second": summary["sps"] * point.updates_per_step}
    line |= {"peak_memory_mb": round(usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10), 1)}
    original = PEERS if point.mode == "sbx" else ROOT / "leanrl" / f"{point.script}_torchcompile.py"
    return line | provenance((command[0], str(original)), dict(os.environ), None)


def main() -> None:
    args = tyro.cli(Args)
    for name, known in (("scripts", DEFAULTS), ("axes", AXES)):
        if unknown := [value for value in getattr(args, name) if value not in known]:
            print(f"scaling.py: error: --{name} takes {', '.join(known)}; got {' '.join(unknown)}", file=sys.stderr)
            sys.exit(2)
    lines = results.read(args.output, results.check_scaling) if args.output and args.output.exists() else []
    for point in points(args):
        line = measure(point, args.peers)
        same = {key: line[key] for key in ("script", "mode", "axis", "value")}
        lines = [*(old for old in lines if not old.items() >= same.items()), line]
        print(f"{point.script} {point.mode} {point.axis} {point.value}: {line['sps']:.0f} steps/s", flush=True)
        if args.output:
            results.replace(args.output, lines)
    print(scaling_table(lines))


if __name__ == "__main__":
    main()
