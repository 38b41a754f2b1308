"""Write the tables of README.md and docs/ from the lines of benchmark/results/.

    python benchmark/report.py

A table stands between `<!-- table: KIND FILE -->` and `<!-- end -->`; KIND is `speed`, `learning`, `curve` or `tricks`, FILE
a file in benchmark/results/. Nothing between the two is written by hand.
"""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "sb3": "Stable-Baselines3",
    "sbx": "SBX (JAX)",
    "eager": "LeanRL eager",
    "twin": "LeanRL twin, no flag",
    "compile": "LeanRL `--compile`",
    "cudagraphs": "LeanRL `--cudagraphs`",
    "both": "LeanRL `--compile --cudagraphs`",
}
MARKED = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read_results(path: Path) -> list[dict]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def spread(values: list[float]) -> str:
    """The median and, of several values, their range."""
    median = f"{statistics.median(values):.0f}"
    return median if len(values) == 1 else f"{median} ({min(values):.0f}-{max(values):.0f})"


def machine(results: list[dict]) -> str:
    """What the runs were made with: one line, told apart where runs differ."""
    cpus = sorted({f"{line['hardware']['cpu']}, {line['hardware'].get('cores', '?')} cores" for line in results})
    gpus = sorted({line["hardware"]["gpu"] or "no GPU" for line in results})
    versions: dict[str, set[str]] = {}
    for line in results:
        for package, version in line["versions"].items():
            versions.setdefault(package, set()).update([version] if version else [])
    packages = [f"{package} {'/'.join(sorted(found))}" for package, found in versions.items() if found]
    commits = sorted({line["git_commit"][:7] for line in results if line.get("git_commit")})
    made_with = [*cpus, *gpus, ", ".join(packages), *([f"commit {', '.join(commits)}"] if commits else [])]
    return "; ".join(made_with)


def speed_table(results: list[dict]) -> str:
    """Agent steps per second of each algorithm and mode: median and range, ratios, start-up cold and warm."""
    rows = []
    for algorithm in dict.fromkeys(line["algorithm"] for line in results):
        modes = {}
        for line in results:
            if line["algorithm"] == algorithm and line["sps"]:
                modes.setdefault(line["mode"], []).append(line)
        medians = {mode: statistics.median(line["sps"] for line in lines) for mode, lines in modes.items()}
        for mode in (mode for mode in MODES if mode in modes):
            lines = modes[mode]
            ratios = [f"{medians[mode] / medians[base]:.2f}" if base in medians else "" for base in ("eager", "sbx")]
            startup: dict[bool, list[float]] = {False: [], True: []}  # cold and warm
            for line in lines:
                startup[line["round"] > 0] += [] if line["startup_seconds"] is None else [line["startup_seconds"]]
            seconds = [f"{statistics.median(found):.1f}" if found else "" for found in startup.values()]
            rows.append([f"{algorithm}: {MODES[mode]}", spread([line["sps"] for line in lines]), *ratios, *seconds])
    header = ["", "steps/s, median (range)", "x eager", "x SBX", "start-up cold, s", "warm, s"]
    return f"{markdown(header, rows)}\n\n{machine(results)}"


def learning_table(results: list[dict]) -> str:
    """Returns of training: the last 10 episodes of each seed, and the mean of the last 100 over the seeds."""
    rows = []
    for key in dict.fromkeys((line["script"], line["env_id"], line["total_timesteps"]) for line in results):
        lines = [line for line in results if (line["script"], line["env_id"], line["total_timesteps"]) == key]
        last = ", ".join(f"{line['episodic_return_10']:.0f}" for line in lines)
        mean = statistics.mean(line["episodic_return"] for line in lines)
        rows.append([f"{key[0]}, {key[1]}", f"{key[2]:,}", last, f"{mean:.0f}"])
    header = ["", "steps", "return, last 10 episodes, by seed", "last 100, mean of seeds"]
    return f"{markdown(header, rows)}\n\n{machine(results)}"


def curve_table(results: list[dict]) -> str:
    """A learning curve: the mean return of the episodes between one row's step and the one before."""
    rows = [[f"{line['step']:,}", f"{line['episodic_return']:.1f}", str(line["episodes"])] for line in results]
    return markdown(["agent steps", "mean return", "episodes"], rows)


def tricks_table(results: list[dict]) -> str:
    """Microseconds a call of each variant, and the ratio to the first one of its title."""
    rows, first = [], {}
    for line in results:
        base = first.setdefault(line["title"], line["microseconds"])
        figure, ratio = f"{line['microseconds']:.2f}", f"{line['microseconds'] / base:.2f}" if base > 0.1 else ""
        rows.append([f"{line['title']}: {line['variant']}", figure, ratio])
    made_with = ", ".join(f"{key} {results[0][key]}" for key in ("device", "threads", "torch"))
    return f"{markdown(['', 'microseconds a call', 'x first'], rows)}\n\n{made_with}"


TABLES = {"speed": speed_table, "learning": learning_table, "curve": curve_table, "tricks": tricks_table}


def render(text: str) -> str:
    """`text` with the tables between its markers made anew."""

    def table(match: re.Match) -> str:
        results = read_results(ROOT / "benchmark" / "results" / match[3])
        return f"{match[1]}\n{TABLES[match[2]](results)}\n\n{match[4]}"

    return MARKED.sub(table, text)


if __name__ == "__main__":
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        path.write_text(render(path.read_text()))
