"""The table of benchmark/results/roofline.jsonl: what a script would reach, were its matrix products all.

The program that counted and timed them is this file at commit a45c7b7.
"""

from benchmark import records
from benchmark.tables import by_machine, markdown


class Line(records.Timing):
    """A script's products, and such a machine's speed."""

    script: str
    torch_threads: int
    sps: float
    mflop_per_step: float
    gflops: float


check = records.check_of(Line)


@by_machine
def table(lines: list[dict]) -> str:
    """What the matrix products alone would allow beside what a compiled run reaches."""
    rows = []
    for line in lines:
        bound = line["gflops"] * 1000 / line["mflop_per_step"]
        figures = [f"{line['mflop_per_step']:.1f}", str(line["torch_threads"]), f"{line['gflops']:.0f}"]
        figures += [f"{bound:.0f}", f"{line['sps']:.0f}", f"{line['sps'] / bound:.0%}"]
        rows.append([line["script"], *figures])
    header = ["", "MFLOP a step", "threads", "GFLOP/s", "the products alone, steps/s"]
    return markdown([*header, "compiled, steps/s", "share"], rows)
