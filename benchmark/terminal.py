"""What the programs of the benchmark say on a terminal, and how they refuse arguments."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

_path = Path(sys.argv[0])
PROGRAM = _path.parent.name if _path.stem == "__main__" else _path.stem  # as it was called


def refuse(message: str) -> NoReturn:
    """Tell a bad argument in one line on standard error and leave with exit status 2."""
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def say(message: str, passing: bool = False) -> None:
    """A line on standard error: on a terminal in place of the last one, if that was `passing`."""
    terminal = sys.stderr.isatty()
    if terminal:
        message = f"\r\033[K{message[: shutil.get_terminal_size().columns - 1] if passing else message}"
    try:
        print(message, end="" if passing and terminal else "\n", file=sys.stderr, flush=True)
    except OSError:  # who read it has ended, as `tee` does at Ctrl+C: no reason to leave runs alone
        sys.stderr = open(os.devnull, "w")


def check_interpreter(option: str, path: Path | None) -> None:
    """Refuse an option that names what is no interpreter."""
    if path and not (path.is_file() and os.access(path, os.X_OK)):
        refuse(f"--{option} takes a Python interpreter, got {path}")


def check_output(path: Path | None) -> None:
    """Refuse a file of --output that cannot be written, before anything is measured."""
    if path and not os.access(path.absolute().parent, os.W_OK):
        refuse(f"--output takes a file in a folder that can be written to, got {path}")
