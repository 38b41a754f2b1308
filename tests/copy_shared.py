"""Copy what the scripts share from one file to the others, so that a change is made once.

    python tests/copy_shared.py            copies, and names the files that it has changed

The section Run goes from leanrl/sac_continuous_action.py to all scripts. Arguments, Environment and Networks
go from each eager script to its twin, which keeps its flags and what it adds below its first `# [fast k]`.
Flat and Adam go from SAC's twin to the other twins and the scripts of many agents, Flat not to Atari's twin.
tests/test_twins.py checks that all of this is equal.
"""

import re
from pathlib import Path

LEANRL = Path(__file__).parent.parent / "leanrl"
SOURCE = "sac_continuous_action"


def section(text: str, name: str) -> str:
    """A section of a script, from its rule to the next one or to the body of the module."""
    return re.search(rf"^# ---- {name}.*?(?=^# ---- |^if __name__)", text, re.MULTILINE | re.DOTALL).group()


def definition(text: str, title: str) -> str:
    """A class or function of a script by its title, like "class Flat", with the blank lines below it."""
    return re.search(rf"^{title}\(.*?\n\n\n", text, re.MULTILINE | re.DOTALL).group()


def shared(name: str, text: str) -> str:
    """The text of the script `name`, with what it shares as in the script where that is written."""
    source, twin = ((LEANRL / f"{SOURCE}{kind}.py").read_text() for kind in ("", "_torchcompile"))
    text = text.replace(section(text, "Run"), section(source, "Run"))
    if name.endswith("_torchcompile"):
        eager = (LEANRL / f"{name.removesuffix('_torchcompile')}.py").read_text()
        flags = "".join(re.findall(r"(?m)^    (?:compile|cudagraphs): .*\n", text))
        arguments = section(eager, "Arguments").replace("\n    env_id", f"{flags}\n    env_id", 1)
        text = text.replace(section(text, "Arguments"), arguments)
        text = text.replace(section(text, "Environment"), section(eager, "Environment"))
        networks = section(text, "Networks")
        text = text.replace(networks, section(eager, "Networks") + networks[networks.index("# [fast") :])
    if name.endswith(("_torchcompile", "_seeds")):
        for copied in ["class Adam"] if "atari" in name else ["class Flat", "class Adam"]:
            text = text.replace(definition(text, copied), definition(twin, copied))
    return text


if __name__ == "__main__":
    for path in sorted(LEANRL.glob("*.py")):
        before = path.read_text()
        if (after := shared(path.stem, before)) != before:
            path.write_text(after)
            print(path.name)
