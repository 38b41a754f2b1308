"""Tables and plots of results: of a sweep's folder, or those that the README and docs/ publish.

    ./run.sh report                  writes the tables of README.md and docs/ and the plots docs/plots/ anew
    ./run.sh report sweeps/NAME      prints the table of a sweep and writes its plots

A table stands between `<!-- table: KIND FILE -->` and `<!-- end -->`; KIND is a key of TABLES, FILE a file in
benchmark/results/. Nothing between the two is written by hand, and nothing stands there as long as there is no such file.
"""

import itertools
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import results

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmark" / "results"
MODES = {
    "sb3": "Stable-Baselines3",
    "sbx": "SBX (JAX)",
    "eager": "LeanRL eager",
    "twin": "LeanRL twin, no flag",
    "compile": "LeanRL `--compile`",
    "cudagraphs": "LeanRL `--cudagraphs`",
    "both": "LeanRL `--compile --cudagraphs`",
}
# The colours of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = dict(zip(MODES, ("#999999", "#555555", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00"), strict=True))
SHOWN = re.compile(r"\(plots/((\w+)-(speed|return-by-step|return-by-time|gpu)\.png)\)")
MARKED = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def by(lines: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """The lines by their values of these keys, in the order in which these first occur."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(key) for key in keys), []).append(line)
    return groups


def in_order(modes: Iterable[str]) -> list[str]:
    """Modes in the order of tables and plots."""
    return [mode for mode in MODES if mode in modes]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def spread(values: list[float]) -> str:
    """The median and, of several values, their range."""
    median = f"{statistics.median(values):.0f}"
    return median if len(values) == 1 else f"{median} ({min(values):.0f}-{max(values):.0f})"


def median_of(lines: list[dict], key: str) -> str:
    """The median of a figure over the lines that have it, or nothing."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{statistics.median(values):.1f}" if values else ""


def busy_per_million(line: dict) -> float:
    """The seconds that the GPU is busy in a million agent steps of a run."""
    return line["gpu_busy_seconds"] / line["total_timesteps"] * 1e6


def machine_of(line: dict) -> tuple:
    """What tells machines apart, and runs that had a GPU to themselves from those that shared it."""
    return (*(line["hardware"].get(key) for key in ("cpu", "cores", "gpu")), line.get("runs_per_gpu", 1))


def machines(lines: list[dict]) -> list[list[dict]]:
    """The lines of runs that were not in vain, by machine."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        if line["status"] == "ok":
            groups.setdefault(machine_of(line), []).append(line)
    return list(groups.values())


def machine(lines: list[dict]) -> str:
    """What the runs of one machine were made with: one line, with all versions where runs differ."""
    cpu, cores, gpu, sharing = machine_of(lines[0])
    versions: dict[str, set[str]] = {}
    for line in lines:
        for package, version in line["versions"].items():
            versions.setdefault(package, set()).update([version] if version else [])
    packages = [f"{package} {'/'.join(sorted(found))}" for package, found in versions.items() if found]
    commits = sorted({line["git_commit"][:7] for line in lines if line.get("git_commit")})
    shared = f", {sharing} runs at a time on it, each with its share of the cores" if sharing > 1 else ""
    made_with = [f"{cpu}, {cores} cores", f"{gpu}{shared}" if gpu else "no GPU", ", ".join(packages)]
    return "; ".join([*made_with, *([f"commit {', '.join(commits)}"] if commits else [])])


def by_machine(table: Callable[[list[dict]], str]) -> Callable[[list[dict]], str]:
    """A table that is made for each machine of its own, with the machine below it."""

    def tables(lines: list[dict]) -> str:
        return "\n\n".join(f"{table(group)}\n\n{machine(group)}" for group in machines(lines))

    tables.__doc__ = table.__doc__
    return tables


@by_machine
def speed_table(lines: list[dict]) -> str:
    """Agent steps per second of each algorithm and mode: median and range, ratios, start-up cold and warm, GPU seconds.

    Without runs that were taken up, whose figures are those of their last part.
    """
    timed = [line for line in lines if line.get("sps") and line.get("resumed") is None]
    on_gpu = any(line.get("gpu_busy_seconds") for line in timed)
    groups = by(timed, "algorithm", "env_id", "steps")
    several = len(groups) > len(by(timed, "algorithm"))
    rows = []
    for (algorithm, env_id, steps), group in groups.items():
        modes = {mode: lines for (mode,), lines in by(group, "mode").items()}
        medians = {mode: statistics.median(line["sps"] for line in lines) for mode, lines in modes.items()}
        for mode in in_order(modes):
            runs = modes[mode]
            ratios = [f"{medians[mode] / medians[base]:.2f}" if base in medians else "" for base in ("eager", "sbx")]
            startup = [[line for line in runs if line.get("cold_start") is cold] for cold in (True, False)]
            startup = [median_of(part, "startup_seconds") for part in startup]
            busy = [busy_per_million(line) for line in runs if line.get("gpu_busy_seconds") is not None]
            name = f"{algorithm}{f', {env_id}, {steps:,} steps' if several else ''}: {MODES[mode]}"
            gpu = [f"{statistics.median(busy):.0f}" if busy else ""] if on_gpu else []
            rows.append([name, spread([line["sps"] for line in runs]), *ratios, *startup, *gpu])
    header = ["", "steps/s, median (range)", "x eager", "x SBX", "start-up cold, s", "warm, s"]
    return markdown([*header, *(["GPU-busy s per 1M steps"] if on_gpu else [])], rows)


@by_machine
def learning_table(lines: list[dict]) -> str:
    """Returns of training: the last 10 episodes of each seed, and the mean of the last 100 over the seeds."""
    rows = []
    trained = [line for line in lines if "episodic_return" in line]
    for (script, env_id, steps), runs in by(trained, "script", "env_id", "total_timesteps").items():
        last = ", ".join(f"{line['episodic_return_10']:.0f}" for line in runs if line["episodic_return_10"] is not None)
        rows.append([f"{script}, {env_id}", f"{steps:,}", last, mean_return(runs)])
    return markdown(["", "steps", "return, last 10 episodes, by seed", "last 100, mean of seeds"], rows)


def mean_return(runs: list[dict]) -> str:
    """The mean over runs of their episodic return, or nothing."""
    values = [line["episodic_return"] for line in runs if line["episodic_return"] is not None]
    return f"{statistics.mean(values):.0f}" if values else ""


def curve_table(curves: list[dict]) -> str:
    """Learning curves in ten rows: the mean return of the episodes that ended between one row's step and the one before.

    Where there is more than one, columns are named by the last part of their job.
    """
    names = [curve["job"].rsplit("-", 1)[1] for curve in curves] if len(curves) > 1 else ["mean return"]
    rows = []
    for low, high in itertools.pairwise(np.linspace(0, max(curve["step"][-1] for curve in curves), 11)):
        ended = [zip(curve["step"], curve["episodic_return"], strict=True) for curve in curves]
        inside = [[value for step, value in episodes if low < step <= high] for episodes in ended]
        rows.append([f"{high:,.0f}", *(f"{np.mean(values):.1f}" if values else "" for values in inside)])
    return markdown(["agent steps", *names], rows)


def tricks_table(lines: list[dict]) -> str:
    """Microseconds a call of each variant, and the ratio to the first one of its title."""
    rows, first = [], {}
    for line in lines:
        base = first.setdefault(line["title"], line["microseconds"])
        figure, ratio = f"{line['microseconds']:.2f}", f"{line['microseconds'] / base:.2f}" if base > 0.1 else ""
        rows.append([f"{line['title']}: {line['variant']}", figure, ratio])
    made_with = ", ".join(f"{key} {lines[0][key]}" for key in ("device", "threads", "torch"))
    return f"{markdown(['', 'microseconds a call', 'x first'], rows)}\n\n{made_with}"


def cuda_code_table(lines: list[dict]) -> str:
    """Triton launches of each graph by version of torch, and what else was counted with the newest of these."""
    made_with = by(sorted(lines, key=lambda line: [int(part) for part in line["torch"].split(".")]), "torch", "triton")
    versions = list(dict.fromkeys(torch for torch, _ in made_with))
    rows = []
    for (script, env_id, graph), group in by(lines, "script", "env_id", "graph").items():
        of = {line["torch"]: line for line in group}
        launches = [str(of[version].get("triton_launches", "fails")) if version in of else "" for version in versions]
        newest = of.get(versions[-1], {"generated": False})
        counted = ["", "", ""]
        if newest["generated"]:
            extern = ", ".join(f"{operation} {calls}" for operation, calls in newest["extern_calls"].items())
            counted = [extern, f"{newest['compiled']} of {newest['kernels']}", str(newest["spilling"])]
        rows.append([f"{script}, {env_id}: {graph}", *launches, *counted])
    counted = ["other calls", "kernels that compile for sm_90", "that spill registers"]
    header = ["", *(f"Triton launches, torch {version}" for version in versions), *counted]
    errors = {f"torch {line['torch']} fails: `{line['error']}`": None for line in lines if not line["generated"]}
    below = ", ".join(f"torch {torch} with Triton {triton}" for torch, triton in made_with)
    commits = sorted({line["git_commit"][:7] for line in lines if line["git_commit"]})
    below += f"; commit {', '.join(commits)}" if commits else ""
    return "\n\n".join([markdown(header, rows), *errors, below])


def roofline_table(lines: list[dict]) -> str:
    """What the matrix products alone would allow beside what a compiled run reaches."""
    rows = []
    for line in lines:
        bound = line["gflops"] * 1000 / line["mflop_per_step"]
        figures = [f"{line['mflop_per_step']:.1f}", str(line["threads"]), f"{line['gflops']:.0f}", f"{bound:.0f}"]
        rows.append([line["script"], *figures, f"{line['sps']:.0f}", f"{line['sps'] / bound:.0%}"])
    header = ["", "MFLOP a step", "threads", "GFLOP/s", "the products alone, steps/s", "compiled, steps/s", "share"]
    return f"{markdown(header, rows)}\n\n{machine(lines)}"


# Kind of table: what makes it, and what the lines of its file are.
TABLES = {
    "speed": (speed_table, results.read),
    "learning": (learning_table, results.read),
    "curve": (curve_table, lambda path: results.read(path, results.check_curve)),
    "cuda_code": (cuda_code_table, lambda path: results.read(path, results.check_code)),
    "roofline": (roofline_table, lambda path: results.read(path, results.check_roofline)),
    "tricks": (tricks_table, lambda path: results.read(path, results.check_figure)),
}


def render(text: str) -> str:
    """`text` with the tables between its markers made anew."""

    def table(match: re.Match) -> str:
        make, read = TABLES[match[2]]
        path = PUBLISHED / match[3]
        content = f"\n{make(read(path))}\n\n" if path.exists() else ""
        return f"{match[1]}{content}{match[4]}"

    return MARKED.sub(table, text)


def panels(count: int, title: str):
    """A figure of panels, two in a row, and its axes, of which those left over are hidden."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    import matplotlib.pyplot as plt

    columns = min(count, 2)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.2 * rows + 0.6), squeeze=False, layout="constrained")
    for axis in axes.ravel()[count:]:
        axis.set_visible(False)
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure, axes.ravel()


def label(mode: str) -> str:
    """A mode's name in a plot."""
    return MODES[mode].replace("`", "").removeprefix("LeanRL ")


def below(lines: list[dict]) -> str:
    """The machine, short enough to stand below a plot."""
    cpu, cores, gpu, _ = machine_of(lines[0])
    torch = "/".join(sorted({line["versions"].get("torch") or "" for line in lines} - {""}))
    return f"{cpu}, {cores} cores; {gpu or 'no GPU'}; torch {torch}"


def plot_speed(lines: list[dict]):
    """Bars of agent steps per second by mode, the range over runs as whiskers; a panel an algorithm and environment."""
    timed = [line for line in lines if line.get("sps") and line.get("resumed") is None]
    groups = by(timed, "algorithm", "env_id", "steps")
    if not groups:
        return None
    figure, axes = panels(len(groups), "Agent steps per second: median, range, ratio to eager")
    for axis, ((algorithm, env_id, _), group) in zip(axes, groups.items(), strict=False):
        modes = {mode: [line["sps"] for line in runs] for (mode,), runs in by(group, "mode").items()}
        names = in_order(modes)[::-1]
        medians = np.array([statistics.median(modes[mode]) for mode in names])
        whiskers = [medians - [min(modes[mode]) for mode in names], [max(modes[mode]) for mode in names] - medians]
        colours = [COLOURS[mode] for mode in names]
        axis.barh([label(mode) for mode in names], medians, xerr=whiskers, color=colours, ecolor="black", capsize=3)
        base = statistics.median(modes["eager"]) if "eager" in modes else None
        for row, (mode, median) in enumerate(zip(names, medians, strict=True)):
            ratio = f"  ({median / base:.2f}x)" if base else ""
            axis.text(max(modes[mode]), row, f"  {median:,.0f}{ratio}", va="center", fontsize=9)
        axis.set_xlim(0, max(map(max, modes.values())) * 1.4)
        axis.set_title(f"{algorithm}, {env_id}", fontsize=10)
    figure.supxlabel(below(lines), fontsize=8, color="#555555")
    return figure


def plot_returns(lines: list[dict], curves: list[dict], key: str):
    """Return of training episodes against `key`, step or seconds: mean and range over seeds; a panel a task."""
    curve_of = {(curve["sweep"], curve["job"]): curve for curve in curves if len(curve["step"]) > 1}
    drawn = [line for line in lines if (line["sweep"], line["job"]) in curve_of]
    groups = by(drawn, "algorithm", "env_id", "steps")
    if not groups:
        return None
    axis_name = {"step": "agent steps", "seconds": "seconds, start-up included"}[key]
    figure, axes = panels(len(groups), f"Return of training episodes against {axis_name}: mean and range over seeds")
    for axis, ((algorithm, env_id, _), group) in zip(axes, groups.items(), strict=False):
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        for mode in in_order(modes):
            runs = [curve_of[line["sweep"], line["job"]] for line in modes[mode]]
            # Only where each seed has episodes, for a mean over fewer would jump; and by steps also against time, of which
            # the mean is taken: a seed that had to compile is through its first episodes when others are at their end.
            low, high = max(run["step"][0] for run in runs), min(run["step"][-1] for run in runs)
            if low >= high:
                continue
            grid = np.linspace(low, high, 100)
            values = np.stack([np.interp(grid, run["step"], run["episodic_return"]) for run in runs])
            seconds = np.stack([np.interp(grid, run["step"], run["seconds"]) for run in runs])
            x = grid if key == "step" else seconds.mean(axis=0)
            axis.plot(x, values.mean(axis=0), color=COLOURS[mode], label=label(mode))
            axis.fill_between(x, values.min(axis=0), values.max(axis=0), color=COLOURS[mode], alpha=0.2, linewidth=0)
        axis.set_title(f"{algorithm}, {env_id}", fontsize=10)
        axis.set_xlabel(axis_name)
        axis.set_ylabel("return")
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    figure.supxlabel(below(lines), fontsize=8, color="#555555")
    return figure


def plot_gpu(lines: list[dict], curves: list[dict]):
    """GPU utilisation over the first run of each mode; a panel an algorithm and environment. None without a GPU."""
    curve_of = {(curve["sweep"], curve["job"]): curve for curve in curves if curve["gpu_seconds"]}
    whole = [line for line in lines if line.get("gpu_busy_seconds") is not None and line.get("resumed") is None]
    drawn = [line for line in whole if (line["sweep"], line["job"]) in curve_of]
    groups = by(drawn, "algorithm", "env_id", "steps")
    if not groups:
        return None
    figure, axes = panels(len(groups), "GPU utilisation in a run, and the median of GPU-busy seconds per million steps")
    for axis, ((algorithm, env_id, _), group) in zip(axes, groups.items(), strict=False):
        modes = {mode: runs for (mode,), runs in by(group, "mode").items()}
        for mode in in_order(modes):
            curve = curve_of[modes[mode][-1]["sweep"], modes[mode][-1]["job"]]  # the last: the first has compiled
            busy = statistics.median(map(busy_per_million, modes[mode]))
            percent = 100 * np.array(curve["gpu_utilization"])
            axis.plot(curve["gpu_seconds"], percent, color=COLOURS[mode], label=f"{label(mode)}: {busy:,.0f} s")
        axis.set_title(f"{algorithm}, {env_id}", fontsize=10)
        axis.set_xlabel("seconds, start-up included")
        axis.set_ylabel("utilisation, %")
        axis.set_ylim(0, 140)  # room for the legend
        axis.set_yticks(range(0, 101, 20))
        axis.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    figure.supxlabel(below(lines), fontsize=8, color="#555555")
    return figure


PLOTS = {
    "speed": lambda lines, curves: plot_speed(lines),
    "return-by-step": lambda lines, curves: plot_returns(lines, curves, "step"),
    "return-by-time": lambda lines, curves: plot_returns(lines, curves, "seconds"),
    "gpu": plot_gpu,
}


def save(figure, path: Path) -> None:
    """Write a figure as a PNG file, and let go of it."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_plots(lines: list[dict], curves: list[dict], folder: Path) -> list[Path]:
    """Write the plots that these results allow, for each machine its own; returns where they are."""
    paths = []
    for number, group in enumerate(machines(lines)):
        for kind, plot in PLOTS.items():
            if figure := plot(group, curves):
                paths.append(folder / (f"machine{number + 1}-{kind}.png" if number else f"{kind}.png"))
                save(figure, paths[-1])
    return paths


def unfinished(folder: Path, ended: set[str]) -> dict[str, int]:
    """The runs of a sweep that have a checkpoint and have not ended well: their names, and the newest step."""
    steps: dict[str, int] = {}
    for path in sorted((folder / "jobs").glob("*/*/runs/*/[0-9]*.pt")):
        name = path.relative_to(folder / "jobs").parts[0]
        if name not in ended:
            steps[name] = max(steps.get(name, 0), int(path.stem))
    return steps


def report_folder(folder: Path) -> None:
    """Print the tables of a sweep's results and write its plots. Raises ResultsError where a file is not what it should be."""
    lines = results.read(folder / "results.jsonl")
    print(speed_table(lines))
    for name, step in unfinished(folder, {line["job"] for line in lines if line["status"] == "ok"}).items():
        print(f"\nnot at its end: {name}: checkpoint at step {step:,}")
    failed = [line for line in lines if line["status"] == "failed"]
    for line in failed:
        print(f"\nfailed: {line['job']}: {line['reason']}")
    curves = results.read(folder / "curves.jsonl", results.check_curve)
    paths = write_plots(lines, curves, folder / "plots")
    print(f"\nresults: {folder / 'results.jsonl'}\nplots: {', '.join(str(path) for path in paths)}")


def report_published() -> None:
    """Write the tables of README.md and docs/, and the plots that these show, from benchmark/results/.

    The plot docs/plots/NAME-KIND.png is made from NAME.jsonl and NAME.curves.jsonl; KIND is a key of PLOTS.
    """
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        path.write_text(render(path.read_text()))
        for image, name, kind in sorted({match.groups() for match in SHOWN.finditer(path.read_text())}):
            groups = machines(results.read(PUBLISHED / f"{name}.jsonl"))
            if len(groups) != 1:
                raise results.ResultsError(
                    f"{PUBLISHED / name}.jsonl: a plot needs the runs of one machine, not of {len(groups)}"
                )
            curves = PUBLISHED / f"{name}.curves.jsonl"
            figure = PLOTS[kind](groups[0], results.read(curves, results.check_curve) if curves.exists() else [])
            if figure is None:
                raise results.ResultsError(f"{PUBLISHED / name}.jsonl: has nothing for a plot of kind {kind}")
            save(figure, ROOT / "docs" / "plots" / image)


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit(2 if len(sys.argv) > 2 else 0)
    try:
        report_folder(Path(sys.argv[1]).absolute()) if sys.argv[1:] else report_published()
    except (results.ResultsError, OSError) as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        sys.exit(2)
