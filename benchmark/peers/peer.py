"""What the programs that run other libraries share: arguments, and a summary like those of our scripts."""

import argparse
import json
import sys
import time
from pathlib import Path

START_TIME = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # they run in environments of their own


def parse(parser: argparse.ArgumentParser, more: bool = False) -> tuple[argparse.Namespace, list[str]]:
    """The arguments that all have besides the parser's own, and what is left, where `more` may be given.

    --threads are PyTorch's.
    """
    parser.add_argument("--env-id", required=True)
    for name in ("--seed", "--total-timesteps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--threads", type=int)
    args, left = parser.parse_known_args()
    if left and not more:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if args.threads:
        import torch  # which RLtools does without

        torch.set_num_threads(args.threads)
    return args, left


def command_line(path: Path, args: argparse.Namespace, more: list[str], **changed) -> list[str]:
    """The command line of a script that takes these arguments by CleanRL's names."""
    given = {"env_id": args.env_id, "seed": args.seed, "total_timesteps": args.total_timesteps} | changed
    return [str(path), *(f"--{name.replace('_', '-')}={value}" for name, value in given.items()), *more]


def speed(times: list[tuple[int, float]]) -> float | None:
    """Steps/s between the first and the last of the steps whose times, in seconds, these are."""
    (first, start), (last, end) = (times[0], times[-1]) if times else ((0, 0.0), (0, 0.0))
    return (last - first) / (end - start) if last > first else None


def tell(script: str, args: argparse.Namespace, sps: float | None, device: str, **more) -> None:
    """Print the summary."""
    summary = {"script": script, "env_id": args.env_id, "seed": args.seed, **more}
    summary |= {"total_timesteps": args.total_timesteps, "sps": sps, "startup_seconds": None}
    print(json.dumps(summary | {"wall_seconds": time.perf_counter() - START_TIME, "device": device}))
