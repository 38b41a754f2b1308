"""The benchmark: sweeps of runs, reports of their results, studies of single questions, other libraries."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEANRL = ROOT / "leanrl"
RESULTS = ROOT / "benchmark" / "results"
