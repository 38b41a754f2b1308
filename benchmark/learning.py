"""What was learnt, over seeds: tables and plots of learning curves beside the literature, and how sweeps get there.

    python benchmark/learning.py sweeps/NAME ...     takes the runs of these sweeps over into benchmark/results/learning.jsonl

Runs that have not ended are taken as far as they are, from their logs; started again, their sweep goes on with them. A line
there replaces an earlier one of the same script, environment and seed. ./run.sh report makes docs/learning.md of it.
"""

import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import results
from job import episode_curve, provenance
from plots import panels
from tables import PUBLISHED, ROOT, by, machine, markdown

LAST = 100  # training episodes, whose mean return is what a run has reached
SOURCES = ("CleanRL", "Stable-Baselines3 zoo", "authors", "others")  # columns of the literature's figures
COLOUR, LITERATURE = "#0072B2", "#D55E00"
HEADLINE = {  # what the README shows of each algorithm
    "sac_continuous_action": "HalfCheetah-v4",
    "td3_continuous_action": "HalfCheetah-v4",
    "ppo_continuous_action": "HalfCheetah-v4",
    "ppo_atari_envpool": "Pong-v5",
}


def interval(values: Iterable[float] | np.ndarray) -> np.ndarray | None:
    """The 95 % bootstrap interval of the mean over seeds, (2, ...) of values (seeds, ...); None of a single seed."""
    from scipy.stats import bootstrap

    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of points at which all seeds have the same return
        found = bootstrap((values,), np.mean, axis=0, n_resamples=9999, method="percentile", rng=np.random.default_rng(0))
    return np.stack([found.confidence_interval.low, found.confidence_interval.high])


def millions(steps: int) -> str:
    """A number of steps as one says it: 998,426 are 1.00M."""
    return f"{steps / 1e6:.2f}M"


def reached(runs: list[dict]) -> str:
    """The mean over seeds of what runs have reached, and its interval."""
    values = [run["episodic_return"] for run in runs]
    mean, bounds = f"{statistics.mean(values):.0f}", interval(values)
    return mean if bounds is None else f"{mean} [{bounds[0]:.0f}, {bounds[1]:.0f}]"


def published(literature: list[dict], algorithm: str, env_id: str, source: str) -> str:
    """The literature's figures of one column."""
    fit = [line for line in literature if (line["algorithm"], line["env_id"], line["source"]) == (algorithm, env_id, source)]
    told = []
    for line in fit:
        more = [line["steps"] if line["steps"] != "1M" else "", line["note"]]
        told.append(f"{line['mean']:g} ± {line['spread']:g}" + "".join(f", {text}" for text in more if text))
    return "; ".join(told)


def trained(lines: list[dict]) -> list[dict]:
    """The lines of runs with episodes, by algorithm and environment in the order of HEADLINE."""
    order = list(HEADLINE)
    kept = [line for line in lines if line["status"] == "ok" and line.get("episodic_return") is not None]
    return sorted(kept, key=lambda line: (order.index(line["algorithm"]), line["env_id"] != HEADLINE[line["algorithm"]]))


def returns_table(lines: list[dict], short: bool = False) -> str:
    """Mean return of the last training episodes over seeds, with its interval, beside the literature's figures."""
    literature = results.read(PUBLISHED / "literature.jsonl", results.check_literature)
    sources = SOURCES[:1] if short else SOURCES
    rows, behind = [], []
    for (algorithm, env_id), runs in by(trained(lines), "algorithm", "env_id").items():
        if short and env_id != HEADLINE[algorithm]:
            continue
        most = max(run["total_timesteps"] for run in runs)
        behind += [run for run in runs if run["total_timesteps"] < 0.95 * most]
        runs = [run for run in runs if run not in behind]
        cells = [millions(most), str(len(runs)), reached(runs)]
        cells += [] if short else [", ".join(f"{run['episodic_return']:.0f}" for run in runs)]
        rows.append([f"{algorithm}, {env_id}", *cells, *(published(literature, algorithm, env_id, name) for name in sources)])
    header = ["", "steps", "seeds", "mean return [95 % interval]", *([] if short else ["by seed"]), *sources]
    if short:
        return markdown(header, rows)
    # On whatever cores: these do not change what is learnt.
    made_on = "/".join(sorted({line["hardware"]["cpu"] for line in lines}))
    made_with = "; ".join([made_on, *machine(lines).split("; ")[2:]])
    going = [f"{run['algorithm']} {run['env_id']} seed {run['seed']} at {millions(run['total_timesteps'])}" for run in behind]
    return "\n\n".join([markdown(header, rows), *([f"On their way: {', '.join(going)}."] if going else []), made_with])


def literature_table(lines: list[dict]) -> str:
    """Where the literature's figures come from."""
    rows = []
    for (source, about, url), group in by(lines, "source", "about", "url").items():
        rows.append([f"{source}: [{about}]({url})", ", ".join(sorted({line["algorithm"] for line in group}))])
        rows[-1] += [str(group[0][key]) for key in ("version", "seeds", "spread_of", "returns")]
    return markdown(["", "scripts", "environments", "seeds", "±", "returns"], rows)


def drawn_curves(runs: list[dict], curves: list[dict]) -> list[dict]:
    """The curves of runs, of those that have more than a point."""
    of = {(curve["sweep"], curve["job"]): curve for curve in curves}
    found = [of.get((run["sweep"], run["job"])) for run in runs]
    return [curve for curve in found if curve and len(curve["step"]) > 1]


def draw(axis, curves: list[dict], key: str) -> None:
    """Return against millions of steps or hours: single seeds thin, and their mean as far as all go, with its interval."""
    scale = {"step": 1e6, "seconds": 3600}[key]
    for curve in curves:
        axis.plot(np.array(curve[key]) / scale, curve["episodic_return"], color="#999999", linewidth=0.6, alpha=0.7)
    low, high = max(curve["step"][0] for curve in curves), min(curve["step"][-1] for curve in curves)
    if low >= high:
        return
    grid = np.linspace(low, high, 60)
    values = np.stack([np.interp(grid, curve["step"], curve["episodic_return"]) for curve in curves])
    seconds = np.stack([np.interp(grid, curve["step"], curve["seconds"]) for curve in curves])
    x = (grid if key == "step" else seconds.mean(axis=0)) / scale
    axis.plot(x, values.mean(axis=0), color=COLOUR, linewidth=2, label=f"LeanRL, {len(curves)} seed{'s' * (len(curves) > 1)}")
    if (bounds := interval(values)) is not None:
        axis.fill_between(x, *bounds, color=COLOUR, alpha=0.25, linewidth=0)


def mark(axis, algorithm: str, env_id: str, key: str) -> None:
    """CleanRL's figure at the end of its runs: by steps a point with its spread, by time, which it does not tell, a level."""
    literature = results.read(PUBLISHED / "literature.jsonl", results.check_literature)
    for line in literature:
        if (line["algorithm"], line["env_id"], line["source"]) == (algorithm, env_id, "CleanRL"):
            label = f"CleanRL, {line['seeds']} seeds, {line['steps']} steps"
            if key == "step" and line["steps"] == "1M":
                axis.errorbar(1.0, line["mean"], line["spread"], fmt="D", color=LITERATURE, capsize=4, label=label)
            else:
                axis.axhline(line["mean"], color=LITERATURE, linestyle="--", linewidth=1.2, label=label)


def finish(axis, title: str, key: str) -> None:
    """Words of a panel."""
    axis.set_title(title, fontsize=11)
    axis.set_xlabel({"step": "million agent steps", "seconds": "hours, start-up included"}[key])
    axis.set_ylabel("return of training episodes")
    axis.legend(frameon=False, fontsize=9)


def plot_returns_of(algorithm: str, lines: list[dict], curves: list[dict]):
    """The learning curves of an algorithm: a row an environment, by steps and by time."""
    groups = by([line for line in trained(lines) if line["algorithm"] == algorithm], "env_id")
    kept = {env_id: drawn for (env_id,), runs in groups.items() if (drawn := drawn_curves(runs, curves))}
    if not kept:
        return None
    figure, axes = panels(2 * len(kept), f"{algorithm}: mean over seeds, 95 % bootstrap interval, single seeds")
    for row, (env_id, drawn) in enumerate(kept.items()):
        for axis, key in zip(axes[2 * row : 2 * row + 2], ("step", "seconds"), strict=True):
            draw(axis, drawn, key)
            mark(axis, algorithm, env_id, key)
            finish(axis, env_id, key)
    return figure


def plot_overview(lines: list[dict], curves: list[dict]):
    """One environment of each algorithm, by steps."""
    kept = {}
    for (algorithm, env_id), runs in by(trained(lines), "algorithm", "env_id").items():
        if env_id == HEADLINE[algorithm] and (drawn := drawn_curves(runs, curves)):
            kept[algorithm, env_id] = drawn
    if not kept:
        return None
    figure, axes = panels(len(kept), "Learning curves: mean over seeds, 95 % bootstrap interval, single seeds")
    for axis, ((algorithm, env_id), drawn) in zip(axes, kept.items(), strict=False):
        draw(axis, drawn, "step")
        mark(axis, algorithm, env_id, "step")
        finish(axis, f"{algorithm}, {env_id}", "step")
    return figure


def unfinished_runs(folder: Path, ended: set[str]) -> Iterator[tuple[dict, dict]]:
    """The lines of results and curves of runs of a sweep that have not ended, as far as their logs go."""
    identity = results.parse((folder / "sweep.json").read_bytes())["id"]
    for starts in sorted((folder / "jobs").glob("*/*/runs/starts.txt")):
        job = starts.parts[-4]
        begun = [float(line) for line in starts.read_text().split()]
        episodes = episode_curve(starts.parent, begun, groups=sys.maxsize)
        if job in ended or not episodes["step"]:
            continue
        algorithm, mode, rest = job.split("-", 2)
        env_id, steps, seed = rest.rsplit("-", 2)
        script = ROOT / "leanrl" / f"{algorithm}_torchcompile.py"
        line = {"format": results.FORMAT, "sweep": identity, "job": job, "attempts": int(starts.parts[-3]), "status": "ok"}
        line |= {"algorithm": algorithm, "mode": mode, "env_id": env_id, "seed": int(seed.removeprefix("seed"))}
        line |= {"script": script.stem, "steps": int(steps), "total_timesteps": episodes["step"][-1], "sps": None}
        line |= {"startup_seconds": None, "episodic_return": statistics.mean(episodes["episodic_return"][-LAST:])}
        curve = {key: line[key] for key in ("format", "sweep", "job")} | episode_curve(starts.parent, begun)
        yield line | provenance((sys.executable, str(script)), {}, None), curve | {"gpu_seconds": [], "gpu_utilization": []}


def take_over(folders: list[Path]) -> None:
    """Put the runs of sweeps among the published ones. Raises ResultsError where a file is not what it should be."""
    files = {PUBLISHED / "learning.jsonl": results.check_run, PUBLISHED / "learning.curves.jsonl": results.check_curve}
    lines, curves = (results.read(path, check) if path.exists() else [] for path, check in files.items())
    for folder in folders:
        new = [line for line in results.read(folder / "results.jsonl") if line["status"] == "ok"]
        new_curves = results.read(folder / "curves.jsonl", results.check_curve)
        for line, curve in unfinished_runs(folder, {line["job"] for line in new}):
            new.append(line)
            new_curves.append(curve)
        names = {line["job"] for line in new}
        lines = [line for line in lines if line["job"] not in names] + new
        curves = [curve for curve in curves if curve["job"] not in names] + [c for c in new_curves if c["job"] in names]
    for path, content in zip(files, (lines, curves), strict=True):
        results.replace(path, sorted(content, key=lambda line: natural(line["job"])))


def natural(name: str) -> tuple[str, int]:
    """A key that sorts seed10 behind seed9."""
    run, seed = name.rsplit("-seed", 1)
    return run, int(seed)


if __name__ == "__main__":
    try:
        take_over([Path(name) for name in sys.argv[1:]])
    except (results.ResultsError, OSError) as error:
        print(f"learning.py: error: {error}", file=sys.stderr)
        sys.exit(2)
