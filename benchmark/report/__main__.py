"""Tables and plots of results: of a sweep's folder, or those that the README and docs/ publish.

    ./run.sh report                  writes the tables of README.md and docs/ and the plots docs/plots/ anew
    ./run.sh report sweeps/NAME      prints the tables of a sweep and writes its plots

A table stands between `<!-- table: KIND FILE -->` and `<!-- end -->`; KIND is a key of TABLES or the name of
a study, FILE a file in benchmark/results/. Nothing between the two is written by hand, and nothing stands
there as long as there is no such file. A study is a file of benchmark/studies/ with a function `check(line)`
and, for its table, `table(lines)` or, for plots/FILE-STUDY.png, `plot(lines, curves)`.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmark import RESULTS, ROOT, records
from benchmark.collection import COLLECTION
from benchmark.report import learning, plots, speed
from benchmark.tables import machines, packages, timed
from benchmark.terminal import refuse

SHOWN = re.compile(r"\((?:docs/)?plots/((\w+)-([\w-]+)\.png)\)")
MARKED = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Tables of runs and of the literature, by kind.
TABLES = {
    # Without twins that have no flag, which are for debugging.
    "speed": lambda lines: speed.speed_table([line for line in lines if line["mode"] != "twin"]),
    "libraries": speed.algorithms_table,
    "beside_original": speed.beside_original_table,
    "returns": learning.returns_table,
    "headline": partial(learning.returns_table, short=True),
    "ablation": learning.ablation_table,
    "literature": learning.literature_table,
    "versions": packages,
}
# Plots of a sweep's runs on one machine, and of returns, which are the same on all.
PLOTS = {
    "speed": lambda lines, curves: plots.plot_speed(lines),
    "return-by-step": partial(plots.plot_returns, key="step"),
    "return-by-time": partial(plots.plot_returns, key="seconds"),
}
LEARNING_PLOTS = {f"returns-{name}": partial(learning.plot_returns_of, name) for name in COLLECTION}
LEARNING_PLOTS |= {"overview": learning.plot_overview, "variants": learning.plot_variants}


def of_study(name: str, what: str) -> tuple[Callable, Callable] | None:
    """The `table` or `plot` of a study and its `check`, or None where there is no such thing."""
    if not (ROOT / "benchmark" / "studies" / f"{name}.py").exists():
        return None
    study = import_module(f"benchmark.studies.{name}")
    return (getattr(study, what), study.check) if hasattr(study, what) else None


def render(text: str) -> str:
    """`text` with its tables made anew. Raises ResultsError where a file is not what it should be."""

    def table(match: re.Match) -> str:
        kind, path = match[2], RESULTS / match[3]
        check = records.check_literature if kind == "literature" else records.check_run
        found = (TABLES[kind], check) if kind in TABLES else of_study(kind, "table")
        if not found:
            kinds = ", ".join(TABLES)
            raise records.ResultsError(f"there is no table of kind {kind}; kinds are {kinds}, and studies")
        make, check = found
        made = make(records.read(path, check)) if path.exists() else ""
        return f"{match[1]}\n{made}\n\n{match[4]}" if made else f"{match[1]}{match[4]}"

    return MARKED.sub(table, text)


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


def report_folder(folder: Path) -> bool:
    """Print a sweep's tables and write its plots; returns whether a run of the profile check missed.

    Raises ResultsError where a file is not as it should be.
    """
    if not (folder / "results.jsonl").exists():
        raise records.ResultsError(f"{folder} is not the folder of a sweep: it has no results.jsonl")
    lines = records.read(folder / "results.jsonl", growing=True)
    print(speed.speed_table(lines) if timed(lines) else "no run has a speed of its own yet")
    sweep = folder / "sweep.json"
    described = records.read(sweep, records.check_description) if sweep.exists() else []
    checks = [line for line in lines if any(one["profile"] == "check" for one in described)]
    if checks:
        print(f"\n{speed.check_table(checks)}")
    elif any(line.get("episodic_return") is not None for line in lines):
        print(f"\n{learning.sweep_table(lines)}")
    for options in (one["options"] for one in described if one.get("options")):
        print(f"\n--options {' '.join(f'{name} {value}' for name, value in options.items())}")
    for line in lines:
        if line["status"] == "failed":
            print(f"\nfailed: {line['job']}: {line['reason']}")
    drawn = folder / "curves.jsonl"
    curves = records.read(drawn, records.check_curve, growing=True) if drawn.exists() else []
    paths = write_plots(lines, curves, folder / "plots")
    print(f"\nresults: {folder / 'results.jsonl'}\nplots: {', '.join(str(path) for path in paths)}")
    return any(row[-1] == speed.MISSED for row in speed.check_rows(checks))


def published_plot(name: str, kind: str):
    """The figure of NAME.jsonl and NAME.curves.jsonl in results/. Raises ResultsError where there is none."""
    path, curves = RESULTS / f"{name}.jsonl", RESULTS / f"{name}.curves.jsonl"
    own = (LEARNING_PLOTS | PLOTS).get(kind)
    plot, check = (own, records.check_run) if own else of_study(kind, "plot") or (None, records.check_run)
    lines = records.read(path, check)
    if kind not in LEARNING_PLOTS and (found := len(machines(lines))) != 1:
        raise records.ResultsError(f"{path}: a plot needs the runs of one machine, not of {found}")
    drawn = records.read(curves, records.check_curve) if curves.exists() else []
    figure = plot(lines, drawn) if plot else None
    if figure is None:
        raise records.ResultsError(f"{path}: has nothing for a plot of kind {kind}")
    return figure


def report_published() -> None:
    """Write the tables of README.md and docs/, and the plots docs/plots/NAME-KIND.png that they show."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        path.write_text(render(path.read_text()))
        for image, name, kind in sorted({match.groups() for match in SHOWN.finditer(path.read_text())}):
            save(published_plot(name, kind), ROOT / "docs" / "plots" / image)


if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit(0)
    if len(sys.argv) > 2:
        refuse(f"takes the folder of one sweep, got {len(sys.argv) - 1} arguments")
    try:
        report_folder(Path(sys.argv[1]).absolute()) if sys.argv[1:] else report_published()
    except (records.ResultsError, OSError) as error:
        refuse(str(error))
