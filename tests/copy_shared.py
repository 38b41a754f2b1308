"""Copy what the scripts share from one file to the others, so that a change is made once.

    python tests/copy_shared.py            copies, and names the files that it has changed

From leanrl/sac_continuous_action.py the section Run goes to all scripts, of Backends what they have, and
PASSAGES of its body to all but those of many agents, which also have a `parse_args` of their own.
Arguments, Environment and Networks go from each eager script to its twin, which keeps its flags and, below
its first `# [fast`, what it adds, and functions that it has in place of those of the eager script. Of
Environment and Networks a script for several processes has what its twin has, and more. Adam and
Compiled go from SAC's twin to those twins and scripts of many agents that have them, RAdam from PQN's twin
to that for Atari; Flat goes to the twins that hold several networks, from DQN's twin to those that hold
one, and from that of PPO for Atari to those for Atari. The LSTM and its recurrence go from PPO with an LSTM
for Atari to that for continuous actions. The version in CITATION.cff goes to the first line of each file.
tests/test_twins.py checks that all of this is equal.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEANRL = ROOT / "leanrl"
# What a passage that is the same in all scripts begins and ends with.
PASSAGES = {
    "    device = torch.device(": "    torch.set_flush_denormal(",
    "    torch.set_float32_matmul_precision(": "    torch.set_autocast_cache_enabled(",
    "    name = re.sub(": "    folder = checkpoint",
    "    folder.mkdir(": '        refuse(f"--resume: a run is',
    "    def log_losses(": "                sys.exit(",
    "    if args.track:\n        import": "    writer.add_text(",
    "    if args.resume and not last:": "        take_up(",
    "    bar = tqdm(total=args": "    stopping = ",
    "    if args.track:\n        for": '    summary = {"script":',
    "    best = progress": '    summary |= {"eval_returns":',
    '    summary |= {"folder":': "        sys.exit(128",
}
# What a script has of the section Backends.
BACKENDS = ("def make(", "def film(", "class Envs(", "class Pool(", "class SameStep(")

# What Adam has in addition where several processes share a gradient.
AFTER_GRADIENT = "(grad,) = torch.autograd.grad(loss, self.params[0])\n        with torch.no_grad():\n"
OVER_RANKS = """            dist.all_reduce(grad)  # [ranks: one gradient]
            grad = grad / dist.get_world_size()
"""


def section(text: str, name: str) -> str:
    """A section of a script above its body, from its rule to the next one or to the body."""
    return re.search(rf"^# ---- {name}.*?(?=^# ---- |^if __name__)", text, re.MULTILINE | re.DOTALL).group()


def definition(text: str, title: str) -> str:
    """A class or function of a script by its title, like "class Flat(", with the blank lines below it."""
    return re.search(rf"^{re.escape(title)}.*?\n\n\n", text, re.MULTILINE | re.DOTALL).group()


def operation(text: str) -> str:
    """The recurrence of a twin as one operation."""
    return re.search(r"(?ms)^# \[fast: recurrence.*?(?=^# \[fast: (flat|side))", text).group()


def passage(text: str, first: str) -> str:
    """One of PASSAGES in a script, by what it begins with."""
    begin = text.index(f"\n{first}") + 1
    last = text.index(f"\n{PASSAGES[first]}", begin) + 1
    return text[begin : text.find("\n", last) + 1]


def shared(name: str, text: str) -> str:
    """The text of the script `name`, with what it shares as in the script where that is written."""
    source, twin, one_network, atari, pqn, lstm, lstm_twin = (
        (LEANRL / f"{file}.py").read_text()
        for file in (
            "sac_continuous_action",
            "sac_continuous_action_torchcompile",
            "dqn_torchcompile",
            "ppo_atari_envpool_torchcompile",
            "pqn_torchcompile",
            "ppo_atari_lstm_envpool",
            "ppo_atari_lstm_envpool_torchcompile",
        )
    )
    version = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE).group(1)
    text = re.sub("^# LeanRL .*", f"# LeanRL {version}", text)
    run = section(source, "Run")
    if name.endswith("_seeds"):
        run = run.replace(definition(run, "def parse_args("), definition(text, "def parse_args("))
    text = text.replace(section(text, "Run"), run)
    if "\n# ---- Backends" in text:
        own = {"class Workers("} if name.endswith("_seeds") else set()
        for title in {*re.findall(r"(?m)^(?:class|def) \w+[(:]", section(text, "Backends"))} - own:
            assert title in BACKENDS, f"{name}.py: {title} is not shared"
            text = text.replace(definition(text, title), definition(source, title))
    if "\nclass LSTM(" in text:
        text = text.replace(definition(text, "class LSTM("), definition(lstm, "class LSTM("))
        if name.endswith("_torchcompile"):
            text = text.replace(operation(text), operation(lstm_twin))
        else:
            for title in ("def with_resets(", "def recurrence("):
                text = text.replace(definition(text, title), definition(lstm, title))
    if name.endswith(("_torchcompile", "_seeds", "_multigpu")):
        assert AFTER_GRADIENT in twin
        over_ranks = OVER_RANKS if name.endswith("_multigpu") else ""
        adam = twin.replace(AFTER_GRADIENT, AFTER_GRADIENT + over_ranks)
        sources = {"class Adam(": adam, "class Compiled:": twin, "class RAdam(": pqn}
        for title, other in sources.items():
            if f"\n{title}" in text:
                text = text.replace(definition(text, title), definition(other, title))
    if name.endswith("_multigpu"):
        twin = (LEANRL / f"{name.removesuffix('_multigpu')}_torchcompile.py").read_text()
        own = ("class Adam(", "def make_envs(")
        for part in ("Environment", "Networks"):
            for title in re.findall(r"(?m)^(?:class|def) \w+[(:]", section(twin, part)):
                if title not in own:
                    text = text.replace(definition(text, title), definition(twin, title))
    if name.endswith(("_seeds", "_multigpu")):
        return text
    for first in PASSAGES:
        text = text.replace(passage(text, first), passage(source, first))
    if name.endswith("_torchcompile"):
        eager = (LEANRL / f"{name.removesuffix('_torchcompile')}.py").read_text()
        flags = "".join(re.findall(r"(?m)^    (?:compile|cudagraphs): .*\n", text))
        arguments = section(eager, "Arguments").replace("\n    env_id", f"{flags}\n    env_id", 1)
        text = text.replace(section(text, "Arguments"), arguments)
        text = text.replace(section(text, "Environment"), section(eager, "Environment"))
        networks = section(text, "Networks")
        own, same = networks[networks.index("# [fast") :], section(eager, "Networks")
        for title in re.findall(r"(?m)^def \w+\(", own):
            same = same.replace(definition(same, title), "") if f"\n{title}" in same else same
        for function in re.findall(r"(?m)^def (\w+)\(", same):  # without what only those have called
            everywhere = text.replace(networks, same + own)
            if len(re.findall(rf"\b{function}\b", everywhere)) == 1:
                same = same.replace(definition(same, f"def {function}("), "")
        text = text.replace(networks, same + own)
        flat = definition(text, "class Flat(")
        if "(self, *networks" in flat:
            text = text.replace(flat, definition(twin, "class Flat("))
        elif "as_shape(" in flat:  # in which the channels of images come last
            for title in ("def as_shape(", "class Flat("):
                text = text.replace(definition(text, title), definition(atari, title))
        else:
            text = text.replace(flat, definition(one_network, "class Flat("))
    return text


if __name__ == "__main__":
    for path in sorted(LEANRL.glob("*.py")):
        before = path.read_text()
        if (after := shared(path.stem, before)) != before:
            path.write_text(after)
            print(path.name)
