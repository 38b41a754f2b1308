"""Copy what a script shares with others to them, so that a change is made once.

    python tests/copy_shared.py FILE        names the files that it changes

A function or class of one name has one text in all files, but for OWN, and a twin has the sections of its
eager script: Environment and Run to the letter, Arguments with its own two flags, and Networks before all
that it adds there, without functions that it does not call or has another of.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

LEANRL = Path(__file__).parent.parent / "leanrl"
FILES = [file for file in sorted(LEANRL.glob("*.py")) if "# ---- Algorithm" in file.read_text()]
OWN = {"Args", "Agent", "Actor", "QNetwork"}  # what makes an algorithm; a twin has it from its eager script
OF_TWINS = {"recurrence"}  # what eager scripts have in another form
SUFFIXES = "_torchcompile", "_multigpu"
FLAGS = r"    (?:compile|cudagraphs): .*\n"


def section(text: str, name: str) -> str:
    """A section above the body of a script, from below its rule to the next one or to the body."""
    return re.search(rf"(?ms)^# ---- {name} -+\n(.*?)(?=^# ---- |^if __name__)", text)[1]


@cache
def definitions(text: str) -> dict[str, str]:
    """The functions and classes of a script, by name, with their decorators."""
    lines, nodes = text.splitlines(keepends=True), ast.parse(text).body
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    first = {node.name: min(part.lineno for part in (node, *node.decorator_list)) - 1 for node in found}
    return {node.name: "".join(lines[first[node.name] : node.end_lineno]) for node in found}


def networks(eager: str, old: str, text: str) -> str:
    """The section Networks of a twin, made of the eager script's and of what its old one adds."""
    own = re.search(r"(?ms)^# \[fast: .*|\Z", old)[0]
    for name, definition in reversed(definitions(eager).items()):
        without = eager.replace(f"{definition}\n\n", "")
        called = re.search(rf"\b{name}\b", text.replace(old, without + own))
        if definition.startswith("def ") and (not called or name in definitions(own)):
            eager = without
    return eager + own


def shared(file: Path, other: Path) -> str:
    """The text of another script, with what it shares with `file` as it stands there."""
    source, text = file.read_text(), other.read_text()
    if other.stem == f"{file.stem}_torchcompile":
        flags = "".join(re.findall(FLAGS, section(text, "Arguments")))
        for name in ("Arguments", "Environment", "Networks", "Run"):
            new, old = section(source, name), section(text, name)
            if name == "Arguments":
                new = new.replace("\n    env_id:", f"{flags}\n    env_id:", 1)
            if name == "Networks":
                new = networks(new, old, text)
            text = text.replace(old, new)
    same_kind = file.stem.endswith(SUFFIXES) == other.stem.endswith(SUFFIXES)
    both = definitions(source).keys() & definitions(text).keys() - OWN
    for name in both if same_kind else both - OF_TWINS:
        text = text.replace(definitions(text)[name], definitions(source)[name])
    return text


if __name__ == "__main__":
    file = Path(sys.argv[1]).resolve()
    for other in FILES:
        if (text := shared(file, other)) != other.read_text():
            other.write_text(text)
            print(other.name)
