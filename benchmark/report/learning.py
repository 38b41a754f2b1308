"""What was learnt over seeds: tables and plots beside the literature, and how sweeps get there.

    ./run.sh python -m benchmark.report.learning sweeps/NAME ...      takes their runs into learning.jsonl
    ./run.sh python -m benchmark.report.learning --variant V ...      into ablation.jsonl, as a variant's
    ./run.sh python -m benchmark.report.learning --variant V --file many_envs ...      or into another one

A line replaces an earlier one of the same run. ./run.sh report makes docs/learning.md of it.
"""

import argparse
import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmark import RESULTS, records
from benchmark.collection import COLLECTION
from benchmark.modes import LIBRARIES, MODES
from benchmark.report.plots import at_each_step, draw_evaluations, on_one_grid
from benchmark.tables import by, by_task, markdown, packages_and_commits, panels
from benchmark.terminal import refuse

# Columns of the literature's figures, and the sources in each.
SOURCES = {name: (name,) for name in ("CleanRL", "Stable-Baselines3 zoo")} | {"others": ("authors", "others")}
OF_A_SOURCE = ("source", "about", "url", "spread_of", "returns")
# modes, which compute the same: the twin as people run it, without a GPU and with one
TAKEN = ("compile", "both")
THIN = {"color": "#777777", "linewidth": 0.6, "alpha": 0.8}
COLOUR, LITERATURE = "#0072B2", "#D55E00"
MILLION = 1_000_000
ENOUGH = 5  # seeds for an interval
RETURN = f"mean return [95 % interval], under {ENOUGH} seeds (range)"


def interval(values: Iterable[float] | np.ndarray) -> np.ndarray:
    """The 95 % bootstrap interval of the mean over seeds, (2, ...) of (seeds, ...); of few seeds their range.

    Of two or three seeds, a bootstrap's percentiles are the lowest and the highest anyway.
    """
    from scipy.stats import bootstrap

    values = np.asarray(values, dtype=float)
    if len(values) < ENOUGH:
        return np.stack([values.min(axis=0), values.max(axis=0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of points at which all seeds have the same return
        rng = np.random.default_rng(0)
        found = bootstrap((values,), np.mean, axis=0, n_resamples=9999, method="percentile", rng=rng)
    return np.stack([found.confidence_interval.low, found.confidence_interval.high])


def counted(steps: str) -> int:
    """A number of steps as the literature's lines have it: 1.5M and 500k are 1,500,000 and 500,000."""
    return round(float(steps[:-1]) * {"k": 1000, "M": MILLION}[steps[-1]])


def told(value: float) -> str:
    """A return; a small one, such as Pong's, with a decimal."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def how_far(runs: list[dict]) -> str:
    """The agent steps that runs have made, in millions: 998,426 are 1.00M."""
    return f"{max(run['total_timesteps'] for run in runs) / MILLION:.2f}M"


def reached(runs: list[dict]) -> str:
    """The mean over seeds of what runs have reached: with its [interval], of few seeds with their (range)."""
    values = [run["episodic_return"] for run in runs]
    low, high = map(told, interval(values))
    around = f" [{low}, {high}]" if len(values) >= ENOUGH else f" ({low} to {high})"
    return told(statistics.mean(values)) + (around if len(values) > 1 else "")


def by_seed(runs: list[dict]) -> str:
    """What each of these runs has reached; of several equal ones it once."""
    values = [told(run["episodic_return"]) for run in runs]
    return f"all {values[0]}" if len(values) > 1 and len({*values}) == 1 else ", ".join(values)


def literature() -> dict[tuple, list[dict]]:
    """The literature's figures, by script, environment and column of the table."""
    lines = records.read(RESULTS / "literature.jsonl", records.check_literature)
    return by(lines, "algorithm", "env_id", "source")


def reached_by_others(lines: list[dict], asked: int) -> str:
    """The literature's figures of one cell, with their steps where those are not the ones asked for."""
    cells = []
    for line in lines:
        names = {"others": line["about"].split(",")[0].split("'")[0], "authors": "authors"}
        name = names.get(line["source"], "")
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
    """Mean return of the last training episodes over seeds, with interval or range, and the literature's."""
    others, columns = literature(), ["CleanRL"] if short else list(SOURCES)
    rows = []
    for (algorithm, env_id, asked), runs in by_task(trained(lines)).items():
        if short and not is_headline(runs[0]):
            continue
        cells = [f"{algorithm}, {env_id}", how_far(runs), str(len(runs)), reached(runs)]
        cells.append("" if short else by_seed(runs))
        for column in columns:
            figures = [one for name in SOURCES[column] for one in others.get((algorithm, env_id, name), [])]
            cells.append(reached_by_others(figures, asked))
        rows.append(cells)
    header = ["", "steps", "seeds", RETURN, "by seed", *columns]
    table = markdown(header, rows)
    return table if short else f"{table}\n\n{made_with(lines)}"


def sweep_table(lines: list[dict]) -> str:
    """Mean return of the last training episodes over seeds, interval or range, in each mode of a sweep."""
    rows, groups = [], by(trained(lines), "algorithm", "env_id", "steps", "mode")
    for (name, env_id, asked, mode), runs in groups.items():
        runs.sort(key=lambda run: run["seed"])
        cells = [f"{asked:,}", str(len(runs)), reached(runs), by_seed(runs)]
        rows.append([f"{name}, {env_id}: {MODES[mode].label}", *cells])
    header = ["", "steps", "seeds", RETURN, "by seed"]
    return markdown(header, rows)


def ablation_table(lines: list[dict]) -> str:
    """Mean return of the last training episodes of each variant, below that of defaults of as many steps."""
    path = RESULTS / "learning.jsonl"
    whole = [line | {"variant": "default"} for line in (records.read(path) if path.exists() else [])]
    compared = by_task(lines)
    lines = [*(line for line in whole if {*by_task([line])} <= compared.keys()), *lines]
    rows, envs = [], by(trained(lines), "env_id")
    for (env_id, _), of_steps in by(trained(lines), "env_id", "steps").items():
        # Rows of an environment are named alike, whatever their steps.
        ambiguous = len(by(envs[env_id,], "variant")) < len(by(envs[env_id,], "variant", "algorithm"))
        for (variant, algorithm), runs in by(of_steps, "variant", "algorithm").items():
            name = f"{env_id}: {f'{algorithm}, {variant}' if ambiguous else variant}"
            rows.append([name, how_far(runs), str(len(runs)), reached(runs), by_seed(runs)])
    table = markdown(["", "steps", "seeds", RETURN, "by seed"], rows)
    return f"{table}\n\n{made_with(lines)}"


def made_with(lines: list[dict]) -> str:
    """Processors, versions and commits of runs; on how many cores does not change what is learnt."""
    lines = trained(lines)
    mkl = {line["hardware"].get("mkl") for line in lines}
    preloaded = f", MKL {'partly ' if None in mkl else ''}as on Intel" if mkl != {None} else ""
    processors = "/".join(sorted({line["hardware"]["cpu"] for line in lines}))
    return f"{processors + preloaded}; {packages_and_commits(lines)}"


def literature_table(lines: list[dict]) -> str:
    """Where the literature's figures come from: a row a source, with its environments by script."""
    rows = []
    for (source, about, url, spread_of, returns), group in by(lines, *OF_A_SOURCE).items():
        versions = {name: by(of, "version") for (name,), of in sorted(by(group, "algorithm").items())}
        scripts = [f"{name} ({', '.join(version for (version,) in of)})" for name, of in versions.items()]
        seeds = "/".join(str(count) for count in sorted({line["seeds"] or 0 for line in group}) if count)
        over = spread_of.removeprefix("deviation of ")
        rows.append([f"{source}: [{about}]({url})", ", ".join(scripts), seeds, over, returns])
    return markdown(["", "scripts and environments", "seeds", "± over", "returns"], rows)


def draw(axis, curves: list[dict]) -> None:
    """Return against steps: single seeds thin, and their mean, with interval or range."""
    seeds = f"LeanRL, {len(curves)} seed{'s' * (len(curves) > 1)}"
    alone = {"color": COLOUR, "linewidth": 1.5, "label": seeds}
    for curve in curves:
        steps, values = at_each_step(curve, "step", "episodic_return")
        axis.plot(steps / MILLION, values, **(alone if len(curves) == 1 else THIN))
    if len(curves) > 1 and (found := on_one_grid(curves, "step", "episodic_return")):
        steps, values = found
        axis.plot(steps / MILLION, values.mean(axis=0), color=COLOUR, linewidth=2, label=seeds)
        axis.fill_between(steps / MILLION, *interval(values), color=COLOUR, alpha=0.25, linewidth=0)
    draw_evaluations(axis, curves, COLOUR, "evaluation", MILLION)


def mark(axis, algorithm: str, env_id: str) -> None:
    """CleanRL's figures: points where its runs ended, side by side, or equal ones would hide each other."""
    for place, line in enumerate(literature().get((algorithm, env_id, "CleanRL"), [])):
        end = counted(line["steps"]) / MILLION * (1 + 0.025 * place)
        label = f"CleanRL, {line['note'] or line['steps'] + ' steps'}"
        style = {"fmt": "Ds^"[place], "color": LITERATURE, "capsize": 4, "label": label}
        axis.errorbar(end, line["mean"], line["spread"], **style)


def plot_curves(lines: list[dict], curves: list[dict], title: str, titled: str):
    """The learning curves of these runs, a panel a task, each with a title made of its names."""
    of = {(curve["sweep"], curve["job"]): curve for curve in curves if len(curve["step"]) > 1}
    kept = {}
    for task, runs in by_task(lines).items():
        kept[task] = [of[run["sweep"], run["job"]] for run in runs if (run["sweep"], run["job"]) in of]
    kept = {task: drawn for task, drawn in kept.items() if drawn}
    if not kept:
        return None
    shown = f"mean over seeds, 95 % interval (under {ENOUGH} seeds: range), single seeds"
    figure, axes = panels(len(kept), f"{title}: {shown}")
    for axis, ((algorithm, env_id, _), drawn) in zip(axes, kept.items(), strict=True):
        draw(axis, drawn)
        mark(axis, algorithm, env_id)
        axis.set_title(titled.format(algorithm=algorithm, env_id=env_id), fontsize=11)
        axis.set(xlabel="million agent steps", ylabel="return of training episodes")
        axis.legend(framealpha=0.4, edgecolor="none", fontsize=9, loc="best")
        if np.ptp(axis.dataLim.intervaly) == 0:  # nothing is learnt: no ticks that none can reach
            axis.set_yticks([axis.dataLim.y0])
    return figure


def plot_returns_of(algorithm: str, lines: list[dict], curves: list[dict]):
    """The learning curves of an algorithm: a panel an environment and number of steps."""
    runs = [line for line in trained(lines) if line["algorithm"] == algorithm]
    return plot_curves(runs, curves, algorithm, "{env_id}")


def plot_variants(lines: list[dict], curves: list[dict]):
    """Return against steps, a line a seed and a colour a variant; a panel an environment."""
    of = {(curve["sweep"], curve["job"]): curve for curve in curves}
    envs = by(trained(lines), "env_id")
    figure, axes = panels(len(envs), "Return of training episodes: single seeds")
    for axis, ((env_id,), runs) in zip(axes, envs.items(), strict=True):
        for number, ((variant,), group) in enumerate(by(runs, "variant").items()):
            for run in group:
                steps, values = at_each_step(of[run["sweep"], run["job"]], "step", "episodic_return")
                style = {"color": f"C{number}", "label": variant if run is group[0] else None}
                axis.plot(steps / MILLION, values, **style)
        axis.set_title(env_id, fontsize=11)
        axis.set(xlabel="million agent steps", ylabel="return")
        axis.legend(frameon=False, fontsize=9)
    return figure


def plot_overview(lines: list[dict], curves: list[dict]):
    """One environment of each algorithm."""
    runs = [line for line in trained(lines) if is_headline(line)]
    return plot_curves(runs, curves, "Learning curves", "{algorithm}, {env_id}")


def take_over(folders: list[Path], variant: str | None = None, name: str = "ablation") -> None:
    """Put the runs of sweeps among the published ones.

    A run takes the place of one with the same seed and steps. Only runs of the compiled twin are taken, as a
    variant any of ours. Runs of a variant go into the file `name`, others into learning.jsonl. Raises
    ResultsError where one is wrong, where those of a variant are of several modes, which its row would mix,
    and where the file has others.
    """
    name = name if variant else "learning"
    files = {RESULTS / f"{name}.jsonl": records.check_run}
    files[RESULTS / f"{name}.curves.jsonl"] = records.check_curve
    old, curves = (records.read(path, check) if path.exists() else [] for path, check in files.items())
    if variant and any("variant" not in line for line in old):
        raise records.ResultsError(f"--file takes one with variants only, not {name}")
    found = {identity(line): line for line in old}
    drawn = {(curve["sweep"], curve["job"]): curve for curve in curves}
    modes = {line["mode"] for line in old if line.get("variant") == variant}
    for folder in folders:
        for curve in records.read(folder / "curves.jsonl", records.check_curve, growing=True):
            drawn[curve["sweep"], curve["job"]] = curve
        for line in records.read(folder / "results.jsonl", growing=True):
            taken = line["mode"] not in LIBRARIES if variant else line["mode"] in TAKEN
            if line["status"] == "failed" or not taken:
                continue
            line |= {"variant": variant} if variant else {}
            line |= {"resume": Path(line["resume"]).name} if line.get("resume") else {}
            modes.add(line["mode"])
            found[identity(line)] = line
    if variant and len(modes) > 1:
        raise records.ResultsError(f"--variant takes runs of one mode, not {', '.join(sorted(modes))}")
    kept = sorted(found.values(), key=natural)
    contents = (kept, [drawn[line["sweep"], line["job"]] for line in kept])
    for (path, check), content in zip(files.items(), contents, strict=True):
        records.replace(path, content, check)


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
