"""What was learnt over seeds: tables and plots beside the literature, and how sweeps get there.

    ./run.sh python -m benchmark.report.learning sweeps/NAME ...      takes their runs into learning.jsonl
    ./run.sh python -m benchmark.report.learning --variant V ...      into ablation.jsonl, as a variant's
    ./run.sh python -m benchmark.report.learning --variant V --file many_envs ...      or into another one

Runs that have not ended are taken as far as they are, from their logs; started again, their sweep goes on
with them. A line replaces an earlier one of the same run that was not further. ./run.sh report makes
docs/learning.md of it.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from benchmark import RESULTS
from benchmark.collection import COLLECTION
from benchmark.machine import script_in
from benchmark.modes import LIBRARIES
from benchmark.report import results
from benchmark.report.curve import in_groups, logged
from benchmark.report.plots import at_each_step, draw_evaluations, on_one_grid, panels
from benchmark.report.tables import by, markdown, name_of, packages_and_commits
from benchmark.terminal import refuse

LAST = 100  # training episodes, whose mean return is what a run has reached
THROUGH = 0.95  # of the steps of the longest run: what is less far is not part of a mean, nor in the README
SOURCES = ("CleanRL", "Stable-Baselines3 zoo", "authors", "others")  # columns of the literature's figures
# modes, which compute the same: the twin as people run it, without a GPU and with one
TAKEN = ("compile", "both")
THIN = {"color": "#777777", "linewidth": 0.6, "alpha": 0.8}
COLOUR, LITERATURE = "#0072B2", "#D55E00"


def interval(values: Iterable[float] | np.ndarray) -> np.ndarray | None:
    """The 95 % bootstrap interval of the mean over seeds, (2, ...) of (seeds, ...); None of a single seed."""
    from scipy.stats import bootstrap

    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of points at which all seeds have the same return
        rng = np.random.default_rng(0)
        found = bootstrap((values,), np.mean, axis=0, n_resamples=9999, method="percentile", rng=rng)
    return np.stack([found.confidence_interval.low, found.confidence_interval.high])


def millions(steps: int) -> str:
    """A number of steps as one says it: 998,426 are 1.00M."""
    return f"{steps / 1e6:.2f}M"


def counted(steps: str) -> int:
    """A number of steps as the literature's lines have it: 1M and 500k are 1,000,000 and 500,000."""
    return int(steps[:-1]) * {"k": 1000, "M": 1_000_000}[steps[-1]]


def told(value: float) -> str:
    """A return; a small one, such as Pong's, with a decimal."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def is_through(steps: int, asked: int) -> bool:
    """Whether a run of so many steps has come to the end of those asked for, or nearly."""
    return steps >= THROUGH * asked


def reached(runs: list[dict]) -> str:
    """The mean over seeds of what runs have reached, and its interval."""
    values = [run["episodic_return"] for run in runs]
    mean, bounds = told(statistics.mean(values)), interval(values)
    return mean if bounds is None else f"{mean} [{told(bounds[0])}, {told(bounds[1])}]"


def literature() -> dict[tuple, list[dict]]:
    """The literature's figures, by script, environment and column of the table."""
    lines = results.read(RESULTS / "literature.jsonl", results.check_literature)
    return by(lines, "algorithm", "env_id", "source")


def reached_by_others(lines: list[dict], asked: int) -> str:
    """The literature's figures of one cell, with their steps where those are not the ones asked for."""
    cells = []
    for line in lines:
        name = line["about"].split(",")[0].split("'")[0] if line["source"] == "others" else ""
        figures = f"{name} {line['mean']:g} ± {line['spread']:g}".strip()
        steps = line["steps"] if counted(line["steps"]) != asked else ""
        cells.append(", ".join(filter(None, [figures, steps, line["note"]])))
    return "; ".join(cells)


def is_headline(line: dict) -> bool:
    """Whether a run is in the environment that the README shows of its algorithm."""
    return line["env_id"] == COLLECTION[line["algorithm"]].env_id


def trained(lines: list[dict]) -> list[dict]:
    """The lines of runs with episodes, by algorithm, and first those that the README shows."""
    order = list(COLLECTION)
    kept = [line for line in lines if line["status"] == "ok" and line.get("episodic_return") is not None]
    return sorted(kept, key=lambda line: (order.index(line["algorithm"]), not is_headline(line)))


def returns_table(lines: list[dict], short: bool = False) -> str:
    """Mean return of the last training episodes over seeds, with its interval, beside the literature's."""
    others, sources = literature(), SOURCES[:1] if short else SOURCES
    rows, behind = [], []
    for (algorithm, env_id, asked), runs in by(trained(lines), "algorithm", "env_id", "steps").items():
        most = max(run["total_timesteps"] for run in runs)
        if short and not (is_headline(runs[0]) and is_through(most, asked)):
            continue
        behind += [run for run in runs if not is_through(run["total_timesteps"], most)]
        runs = [run for run in runs if is_through(run["total_timesteps"], most)]
        steps = millions(most) + ("" if is_through(most, asked) else f" of {millions(asked)}")
        cells = [f"{algorithm}, {env_id}", steps, str(len(runs)), reached(runs)]
        cells += [] if short else [", ".join(told(run["episodic_return"]) for run in runs)]
        cells += [reached_by_others(others.get((algorithm, env_id, name), []), asked) for name in sources]
        rows.append(cells)
    header = ["", "steps", "seeds", "mean return [95 % interval]", *([] if short else ["by seed"]), *sources]
    if short:
        return markdown(header, rows)
    going = []
    for run in behind:
        name = f"{run['algorithm']} {run['env_id']} seed {run['seed']}"
        going.append(f"{name} at {millions(run['total_timesteps'])}: {told(run['episodic_return'])}")
    below = [f"On their way: {'; '.join(going)}."] if going else []
    return "\n\n".join([markdown(header, rows), *below, made_with(lines)])


def sweep_table(lines: list[dict]) -> str:
    """Mean return of the last training episodes over seeds, with its interval, in each mode of a sweep."""
    rows, groups = [], by(trained(lines), "algorithm", "env_id", "steps", "mode")
    for (name, env_id, asked, mode), runs in groups.items():
        runs.sort(key=lambda run: run["seed"])
        values = [run["episodic_return"] for run in runs]
        # Scripts do not tell it by themselves: a copy may, and those of 0.2 did.
        rates = [run["success_rate"] for run in runs if run.get("success_rate") is not None]
        rate = f"{statistics.mean(rates):.2f}" if rates else ""
        returns = [str(len(values)), reached(runs), ", ".join(map(told, values)), rate]
        rows.append([f"{name}, {env_id}: {name_of(mode, runs)}", f"{asked:,}", *returns])
    header = ["", "steps", "seeds", "return, last 100 episodes [95 % interval]", "by seed", "success rate"]
    has_rates = any(row[-1] for row in rows)
    return markdown(header, rows) if has_rates else markdown(header[:-1], [row[:-1] for row in rows])


def ablation_table(lines: list[dict]) -> str:
    """Mean return of the last training episodes of each variant, below that of defaults of as many steps."""
    path = RESULTS / "learning.jsonl"
    whole = [line | {"variant": "default"} for line in (results.read(path) if path.exists() else [])]
    compared = set(by(lines, "algorithm", "env_id", "steps"))
    whole = [line for line in whole if {*by([line], "algorithm", "env_id", "steps")} <= compared]
    lines, rows = [*whole, *lines], []
    for (env_id, asked), of_steps in by(trained(lines), "env_id", "steps").items():
        # Rows of an environment are named alike, whatever their steps.
        of_env = [line for line in trained(lines) if line["env_id"] == env_id]
        ambiguous = len(by(of_env, "variant")) < len(by(of_env, "variant", "algorithm"))
        for (variant, algorithm), runs in by(of_steps, "variant", "algorithm").items():
            name = f"{algorithm}, {variant}" if ambiguous else variant
            most = max(run["total_timesteps"] for run in runs)
            runs = [run for run in runs if is_through(run["total_timesteps"], most)]
            values = [told(run["episodic_return"]) for run in runs]
            steps = millions(most) + ("" if is_through(most, asked) else f" of {millions(asked)}")
            cells = [steps, str(len(runs)), reached(runs), ", ".join(values)]
            rows.append([f"{env_id}: {name}", *cells])
    table = markdown(["", "steps", "seeds", "mean return [95 % interval]", "by seed"], rows)
    return f"{table}\n\n{made_with(lines)}"


def made_with(lines: list[dict]) -> str:
    """Processors, versions and commits of runs; on how many cores does not change what is learnt."""
    lines = trained(lines)
    mkl = {line["hardware"].get("mkl") for line in lines}
    preloaded = f", MKL {'partly ' if None in mkl else ''}as on Intel" if mkl != {None} else ""
    processors = "/".join(sorted({line["hardware"]["cpu"] for line in lines}))
    return f"{processors + preloaded}; {packages_and_commits(lines)}"


def literature_table(lines: list[dict]) -> str:
    """Where the literature's figures come from."""
    rows = []
    for (source, about, url, *_), group in by(lines, "source", "about", "url", "version", "returns").items():
        rows.append([f"{source}: [{about}]({url})", ", ".join(sorted({line["algorithm"] for line in group}))])
        rows[-1] += [str(group[0][key] or "") for key in ("version", "seeds", "spread_of", "returns")]
    return markdown(["", "scripts", "environments", "seeds", "±", "returns"], rows)


def drawn_curves(runs: list[dict], curves: list[dict]) -> list[dict]:
    """The curves of runs, of those that have more than a point."""
    of = {(curve["sweep"], curve["job"]): curve for curve in curves}
    found = [of.get((run["sweep"], run["job"])) for run in runs]
    return [curve for curve in found if curve and len(curve["step"]) > 1]


def at_work(curve: dict) -> np.ndarray:
    """The seconds of a curve without stops: a step that took five times the usual counts as usual."""
    taken, steps = np.diff(curve["seconds"]), np.diff(curve["step"])
    if not steps.any():  # all episodes ended at once
        return np.array(curve["seconds"])
    usual = np.median(taken[steps > 0] / steps[steps > 0]) * steps
    return curve["seconds"][0] + np.cumsum([0, *np.where(taken > 5 * usual, usual, taken)])


def title_of(env_id: str, asked: int, curves: list[dict]) -> str:
    """The title of a panel, which tells of runs that are under way how far they are."""
    most = max(curve["step"][-1] for curve in curves)
    return env_id if is_through(most, asked) else f"{env_id}, {millions(most)} of {millions(asked)}"


def draw(axis, curves: list[dict], key: str) -> None:
    """Return against steps: single seeds thin, and the mean, with its interval, of those that are through.

    By time: each seed. One seed took up to five times as long as another, by what else the machine had to do:
    at the same minute one is at its end and another has yet to begin: a mean would tell of the machine.
    """
    scale = {"step": 1e6, "seconds": 60}[key]
    curves = [curve | {"seconds": at_work(curve)} for curve in curves]
    most = max(curve["step"][-1] for curve in curves)
    through = [curve for curve in curves if is_through(curve["step"][-1], most)]
    seeds = f"LeanRL, {len(through)} seed{'s' * (len(through) > 1)}"
    each = len(through) == 1 or key == "seconds"
    labels = {True: seeds if each else None, False: "LeanRL, under way"}
    for curve in curves:
        style = THIN | {"linestyle": "--"}
        if curve in through:
            style = {"color": COLOUR, "linewidth": 1.5 if len(through) == 1 else 0.9} if each else THIN
        label = labels.pop(curve in through, None)
        x, y = (at_each_step(curve, "step", value)[1] for value in (key, "episodic_return"))
        axis.plot(x / scale, y, label=label, **style)
    if not each and (found := on_one_grid(through, "step", "episodic_return")):
        grid, values = found
        axis.plot(grid / scale, values.mean(axis=0), color=COLOUR, linewidth=2, label=seeds)
        axis.fill_between(grid / scale, *interval(values), color=COLOUR, alpha=0.25, linewidth=0)
    if key == "step":
        draw_evaluations(axis, through, COLOUR, "evaluation", scale)


def mark(axis, algorithm: str, env_id: str, key: str) -> None:
    """CleanRL's figures: by steps, points where its runs ended, side by side; by time, levels."""
    styles = [("D", "--"), ("s", ":"), ("^", "-.")]
    for place, line in enumerate(literature().get((algorithm, env_id, "CleanRL"), [])):
        marker, dashes = styles[place]
        label = f"CleanRL, {line['note'] or line['steps'] + ' steps'}"
        if key == "step":
            end = counted(line["steps"]) / 1e6 * (1 + 0.025 * place)  # equal figures would hide each other
            style = {"fmt": marker, "color": LITERATURE, "capsize": 4}
            axis.errorbar(end, line["mean"], line["spread"], label=label, **style)
        else:
            style = {"color": LITERATURE, "linestyle": dashes, "linewidth": 1.2}
            minutes = np.linspace(0, axis.dataLim.xmax, 100)  # a legend makes room for points, not for lines
            axis.plot(minutes, np.full(100, line["mean"]), label=label, **style)


def finish(axis, title: str, key: str) -> None:
    """Words of a panel, and room for its legend."""
    axis.set_title(title, fontsize=11)
    axis.set_xlabel({"step": "million agent steps", "seconds": "minutes, start-up included"}[key])
    axis.set_ylabel("return of training episodes")
    axis.legend(framealpha=0.4, edgecolor="none", fontsize=9, loc="best")


def plot_returns_of(algorithm: str, lines: list[dict], curves: list[dict]):
    """The learning curves of an algorithm: a row an environment and number of steps, by steps and by time."""
    groups = by([line for line in trained(lines) if line["algorithm"] == algorithm], "env_id", "steps")
    kept = [(*key, drawn) for key, runs in groups.items() if (drawn := drawn_curves(runs, curves))]
    if not kept:
        return None
    title = f"{algorithm}: mean over seeds, 95 % bootstrap interval; by time each seed"
    figure, axes = panels(2 * len(kept), title)
    for row, (env_id, asked, drawn) in enumerate(kept):
        for axis, key in zip(axes[2 * row : 2 * row + 2], ("step", "seconds"), strict=True):
            draw(axis, drawn, key)
            mark(axis, algorithm, env_id, key)
            finish(axis, title_of(env_id, asked, drawn), key)
    return figure


def plot_overview(lines: list[dict], curves: list[dict]):
    """One environment of each algorithm, by steps."""
    kept = []
    for (algorithm, env_id, asked), runs in by(trained(lines), "algorithm", "env_id", "steps").items():
        ended = is_through(max(run["total_timesteps"] for run in runs), asked)
        if ended and is_headline(runs[0]) and (drawn := drawn_curves(runs, curves)):
            kept.append((algorithm, env_id, drawn))
    if not kept:
        return None
    title = "Learning curves: mean over seeds, 95 % bootstrap interval, single seeds"
    figure, axes = panels(len(kept), title)
    for axis, (algorithm, env_id, drawn) in zip(axes, kept, strict=False):
        draw(axis, drawn, "step")
        mark(axis, algorithm, env_id, "step")
        finish(axis, f"{algorithm}, {env_id}", "step")
    return figure


def unfinished_runs(folder: Path, ended: set[str]) -> Iterator[tuple[dict, dict]]:
    """The lines of results and curves of runs of a sweep that have not ended, as far as their logs go.

    Of the attempts at a run it is the last that counts. Runs that were started before they noted what they
    are made with are left out.
    """
    sweep = json.loads((folder / "sweep.json").read_bytes())
    files = sorted((folder / "jobs").glob("*/*/runs/about.json"), key=attempt)
    last = {about.parts[-4]: about for about in files}
    for job, about in last.items():
        if job in ended:
            continue
        runs = about.parent
        whole = logged(runs)
        if not whole["step"]:
            continue
        made_with = json.loads(about.read_bytes())
        command = made_with.pop("command")
        given = dict(part[2:].split("=", 1) for part in command if part.startswith("--") and "=" in part)
        algorithm, mode, _ = job.split("-", 2)
        line = {"format": results.FORMAT, "sweep": sweep["id"], "job": job, "attempts": attempt(about)}
        line |= {"status": "ok", "algorithm": algorithm, "mode": mode}
        line |= {"script": script_in(command).stem}
        line |= {"ranks": int(given["nproc-per-node"])} if "nproc-per-node" in given else {}
        line |= {"env_id": given["env-id"], "seed": int(given["seed"]), "sps": None, "startup_seconds": None}
        line |= {"steps": int(given["total-timesteps"]), "total_timesteps": whole["step"][-1]}
        line["episodic_return"] = statistics.mean(whole["episodic_return"][-LAST:])
        curve = {key: line[key] for key in ("format", "sweep", "job")}
        curve |= in_groups(whole) | {"gpu_seconds": [], "gpu_utilization": []}
        yield line | made_with, curve


def attempt(about: Path) -> int:
    """Which attempt at a run this file is of."""
    return int(about.parts[-3])


def take_over(folders: list[Path], variant: str | None = None, name: str = "ablation") -> None:
    """Put the runs of sweeps among the published ones, unless those are further.

    Of a seed that has been run for as many steps more than once it is the run that is further. Only runs of
    the compiled twin are taken, as a variant any of ours. Runs of a variant go into the file `name`, others
    into learning.jsonl. Raises ResultsError where one is wrong, where those of a variant are of several
    modes, which its row would mix, and where the file has others.
    """
    name = name if variant else "learning"
    files = {RESULTS / f"{name}.jsonl": results.check_run}
    files[RESULTS / f"{name}.curves.jsonl"] = results.check_curve
    old, curves = (results.read(path, check) if path.exists() else [] for path, check in files.items())
    if variant and any("variant" not in line for line in old):
        raise results.ResultsError(f"--file takes one with variants only, not {name}")
    found = {identity(line): line for line in old}
    drawn = {(curve["sweep"], curve["job"]): curve for curve in curves}
    modes = {line["mode"] for line in old if line.get("variant") == variant}
    for folder in folders:
        lines = results.read(folder / "results.jsonl", growing=True)
        new = [(line, None) for line in lines if line["status"] == "ok"]
        new += unfinished_runs(folder, {line["job"] for line in lines})
        new_curves = results.read(folder / "curves.jsonl", results.check_curve, growing=True)
        drawn |= {(curve["sweep"], curve["job"]): curve for curve in new_curves}
        for line, curve in new:
            line |= {"variant": variant} if variant else {}
            known = found.get(identity(line), {"total_timesteps": 0})
            taken = line["mode"] not in LIBRARIES if variant else line["mode"] in TAKEN
            modes |= {line["mode"]} if taken else set()
            if taken and known["total_timesteps"] <= line["total_timesteps"]:
                line |= {"resume": Path(line["resume"]).name} if line.get("resume") else {}
                found[identity(line)] = line
                drawn |= {(line["sweep"], line["job"]): curve} if curve else {}
    if variant and len(modes) > 1:
        raise results.ResultsError(f"--variant takes runs of one mode, not {', '.join(sorted(modes))}")
    kept = sorted(found.values(), key=natural)
    contents = (kept, [drawn[line["sweep"], line["job"]] for line in kept])
    for (path, check), content in zip(files.items(), contents, strict=True):
        results.replace(path, content, check)


def identity(line: dict) -> tuple:
    """What makes a run one of a seed: two that agree in it are the same run made twice."""
    return tuple(line.get(key) for key in ("algorithm", "env_id", "steps", "seed", "variant"))


def natural(line: dict) -> tuple[str, int, str]:
    """A key that sorts seed 10 behind seed 9."""
    run, seed = line["job"].rsplit("-seed", 1)
    return run, int(seed), line["sweep"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of sweeps")
    parser.add_argument("--variant", help="a name for what the runs have changed: the script, or arguments")
    parser.add_argument("--file", help="the file of results/ for a variant's runs, by default ablation")
    args = parser.parse_args()
    if args.file and not args.variant:
        refuse("--file is for runs of a --variant")
    try:
        take_over(args.folders, args.variant, args.file or "ablation")
    except (OSError, ValueError) as error:
        refuse(str(error))


if __name__ == "__main__":
    main()
