"""How much of each script is plumbing, and how much may be: tests/budget.json, whose numbers only fall.

python tests/budget.py        lowers them to what there is
"""

import json
import re
import tokenize
from pathlib import Path

LEANRL, BUDGET = Path(__file__).parent.parent / "leanrl", Path(__file__).with_suffix(".json")
FREE = "Arguments", "Networks", "Algorithm"  # sections that a researcher changes
LAYOUT = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING}


def plumbing(file: Path) -> list[int]:
    """Tokens, and lines with any, of all sections that are not FREE, without comments and docstrings."""
    with tokenize.open(file) as source:
        tokens = [token for token in tokenize.generate_tokens(source.readline) if token.type not in LAYOUT]
    lines, section, found = file.read_text().splitlines(), "", []
    rules = {number: re.match(r" *# ---- (\w+)", line) for number, line in enumerate(lines, 1)}
    sections = [section := rule[1] if rule else section for rule in rules.values()]
    for before, token in zip([tokens[-1], *tokens], tokens, strict=False):
        starts = before.type in (tokenize.NEWLINE, tokenize.ENDMARKER)
        docstring = starts and token.type == tokenize.STRING
        counts = token.type not in (tokenize.NEWLINE, tokenize.ENDMARKER) and not docstring
        if counts and sections[token.start[0] - 1] not in FREE:
            found.append(token)
    return [len(found), len({token.start[0] for token in found})]


if __name__ == "__main__":
    allowed, files = json.loads(BUDGET.read_text()), sorted(LEANRL.glob("*.py"))
    numbers = {file.stem: plumbing(file) for file in files if "# ---- Algorithm" in file.read_text()}
    lowest = {name: [*map(min, now, allowed.get(name, now))] for name, now in numbers.items()}
    rows = [f'    "{name}": {json.dumps(pair)}' for name, pair in lowest.items()]
    BUDGET.write_text("{\n" + ",\n".join(rows) + "\n}\n")
