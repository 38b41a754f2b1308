"""A script and its twin: the same text where it should be, the same numbers everywhere, nothing too long."""

import ast
import difflib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from unittest.mock import patch

import copy_shared
import pytest
import torch
import torch._inductor.config
from conftest import EACH_STEP, ROOT, SCRIPTS, SEEDS, TWINS, assert_same_numbers, changed, play, run, text
from envs import ScriptedGames
from gymnasium.vector import SyncVectorEnv
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

FILES = sorted([*SCRIPTS, *TWINS, *SEEDS])
RUN = "Run: folder, logs, checkpoints, signals, evaluation"
SECTIONS = ["Arguments", RUN, "Environment", "Networks", "Setup", "Algorithm", "Training", "End"]
# A file with what it is a sibling of.
SIBLINGS = dict(zip(TWINS, SCRIPTS, strict=True))
SIBLINGS |= {name: name.replace("_seeds", "_torchcompile") for name in SEEDS}
# The most lines of an eager script; a twin may have 90 more, DQN's ten more for its policy in NumPy, and its
# sibling for many seeds 116 more.
CEILINGS = {"sac": 480, "td3": 460, "dqn": 440, "ppo_continuous": 540, "ppo_atari": 510}
# Modules of the standard library that an operating system lacks.
NOT_EVERYWHERE = {
    "_winapi",
    "crypt",
    "curses",
    "fcntl",
    "grp",
    "msvcrt",
    "nis",
    "posix",
    "pty",
    "pwd",
    "readline",
}
NOT_EVERYWHERE |= {"resource", "spwd", "syslog", "termios", "tty", "winreg", "winsound"}


# ---- Texts -------------------------------------------------------------------------------------------------
def sections(name: str) -> dict[str, str]:
    """The ruled sections of a script by title; networks end where the twin has more of its own."""
    parts = re.split(r"^ *# ---- (.+?) -+\n", text(name), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    found["Networks"] = re.split(r"# \[fast 2\] A network is|if __name__", found["Networks"])[0]
    return found


def definition(name: str, title: str) -> str | None:
    """The text of a top-level function or class of a script, if it has one of this name."""
    source = text(name)
    nodes = [node for node in ast.parse(source).body if getattr(node, "name", None) == title]
    return ast.get_source_segment(source, nodes[0]) if nodes else None


def hunks(first: str, second: str) -> list[tuple[int, str, str]]:
    """Where two texts differ: the line in the second, and the lines of each."""
    a, b = first.splitlines(), second.splitlines()
    opcodes = difflib.SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes()
    return [(c, "\n".join(a[i:j]), "\n".join(b[c:d])) for kind, i, j, c, d in opcodes if kind != "equal"]


@pytest.mark.parametrize("name", FILES)
def test_every_script_has_the_same_sections_and_the_same_run(name):
    assert list(sections(name)) == SECTIONS
    assert sections(name)[RUN] == sections(SCRIPTS[0])[RUN]


@pytest.mark.parametrize("twin", TWINS)
def test_twin_sections_are_identical(twin):
    eager, own = sections(SIBLINGS[twin]), sections(twin)
    for title in ("Environment", "Networks"):
        assert own[title] == eager[title]
    flags = re.compile(r"    compile: bool = False  # .+\n    cudagraphs: bool = False  # .+\n")
    arguments, removed = flags.subn("", own["Arguments"])
    assert removed == 1
    assert arguments == eager["Arguments"]


@pytest.mark.parametrize("title", ["refuse", "EnsembleLinear", "layer_init", "Adam", "Flat", "make_env"])
def test_repeated_definitions_are_identical_to_the_letter(title):
    """Flat of Atari's twin differs by the convolutions, make_env between algorithms but for SAC and TD3."""
    names = [name for name in (*SCRIPTS, *TWINS) if definition(name, title)]
    if title == "Flat":
        names.remove("ppo_atari_envpool_torchcompile")
    elif title == "make_env":
        names = [name for name in names if name.startswith(("sac", "td3"))]
    assert len(names) >= 4
    assert len({definition(name, title) for name in names}) == 1


@pytest.mark.parametrize("name", FILES)
def test_what_is_shared_is_what_the_program_copies(name):
    assert copy_shared.shared(name, text(name)) == text(name)


def test_flat_networks_of_atari_differ_by_convolutions():
    pair = [definition(name, "Flat") for name in ("dqn_torchcompile", "ppo_atari_envpool_torchcompile")]
    found = hunks(*pair)
    assert found and all(re.search("as_shape|movedim", lines) for _, _, lines in found)


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_hunk_of_the_diff_is_tagged(name):
    body = text(name)[: text(name).index(f"# ---- {RUN}")].count("\n")
    tag = "# [fast " if name in TWINS else "# [seeds "
    found = [lines for line, _, lines in hunks(text(SIBLINGS[name]), text(name)) if line > body]
    assert found
    for lines in found:
        assert tag in lines, lines


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_diff_is_short(name):
    files = [ROOT / "leanrl" / f"{file}.py" for file in (SIBLINGS[name], name)]
    diff = subprocess.run(["diff", *files], capture_output=True, text=True).stdout
    assert 0 < len(re.findall("^[<>]", diff, flags=re.MULTILINE)) <= (152 if name in TWINS else 260)


@pytest.mark.parametrize("name", FILES)
def test_a_script_is_read_in_one_sitting_and_its_loop_on_one_screen(name):
    [ceiling] = [lines for script, lines in CEILINGS.items() if name.startswith(script)]
    ceiling += 90 * (name not in SCRIPTS) + 116 * (name in SEEDS) + 10 * (name == "dqn_torchcompile")
    assert len(text(name).splitlines()) <= ceiling
    assert max(map(len, text(name).splitlines())) <= 110
    assert len(sections(name)[RUN].strip().splitlines()) < 100  # and its title
    loops = [node for node in ast.walk(ast.parse(text(name))) if isinstance(node, ast.While)]
    [loop] = [node for node in loops if ast.unparse(node.test) == "not last"]
    longest = 65 if name in SEEDS else 50 if name.startswith("ppo") else 45 if name in SCRIPTS else 48
    assert loop.end_lineno - loop.lineno + 1 <= longest


@pytest.mark.parametrize("name", FILES)
def test_imports_exist_on_every_operating_system(name):
    nodes = [*ast.walk(ast.parse(text(name)))]  # also within functions
    imported = {
        alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {"signal", "torch"} <= imported
    assert imported.isdisjoint(NOT_EVERYWHERE)


@pytest.mark.parametrize("name", FILES)
def test_inline_metadata_equals_the_requirements(name):
    block = re.match(r"# /// script\n(.*?)# ///\n", text(name), flags=re.DOTALL)[1]
    inline = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    required: dict[str, str] = {}
    world = "atari" if "atari" in name else "classic_control" if "dqn" in name else "mujoco"
    for file in ("requirements.txt", f"{world}.txt"):
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        # gymnasium with an extra takes the place of gymnasium.
        required |= {
            re.match(r"[\w-]+", line)[0]: line for line in lines if line and not line.startswith("#")
        }
    if name in SCRIPTS:
        del required["tensordict"]
    # Those of which the tables are made with one version run with more.
    allowed = {re.match(r"[\w-]+", line)[0]: line for line in inline["dependencies"]}
    assert allowed.keys() == required.keys()
    for package, line in required.items():
        if package in ("torch", "envpool"):
            version = Version(importlib.metadata.version(package).split("+")[0])
            assert (
                version in Requirement(line).specifier and version in Requirement(allowed[package]).specifier
            )
        else:
            assert allowed[package] == line


@pytest.mark.slow
def test_the_instruction_set_is_the_one_that_inductor_finds_by_trying():
    found = []
    for trusted in (None, True):
        code = f"import torch._inductor.config as config; config.cpp.vec_isa_ok = {trusted}; "
        code += "from torch._inductor.cpu_vec_isa import pick_vec_isa; isa = pick_vec_isa(); "
        command = [sys.executable, "-c", f"{code} print(isa, isa.build_arch_flags())"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1] != ""


# ---- Numbers -----------------------------------------------------------------------------------------------
# Reacher has no contacts, which blow rounding up, and cuts its first episodes before learning starts.
REACHER = ("--env-id", "Reacher-v4")
TWENTY = ("--learning-starts", 64, "--total-timesteps", 85)
TWO_ROLLOUTS = ("--num-minibatches", 2, "--update-epochs", 2)
# Both have a row that is not valid: Reacher cuts an episode after 50 steps.
PPO = ("ppo_continuous_action", *REACHER, *TWO_ROLLOUTS, "--num-steps", 64)
CARTPOLE = ("dqn", "--env-id", "CartPole-v1", *EACH_STEP, *TWENTY)
ATARI = ("--num-steps", 16, "--num-envs", 2, "--total-timesteps", 64)
# How many graphs there are, and the run. Off-policy: the policy and the two halves of a gradient step, of
# which the second of DQN is one operation. PPO: preparation and gradient step. The policies of DQN and PPO
# only where they are not NumPy's.
OFTEN = ("--no-autotune", "--policy-frequency", 3, "--target-network-frequency", 2)
CASES = {
    "sac-4": (3, "sac_continuous_action", *REACHER, *TWENTY, "--num-envs", 4),
    "sac-often": (4, "sac_continuous_action", *REACHER, *TWENTY, *OFTEN),  # two kinds of steps of the critics
    "td3": (3, "td3_continuous_action", *REACHER, *TWENTY),
    "dqn": (1, *CARTPOLE),
    "dqn-double-4": (1, *CARTPOLE, "--double", "--num-envs", 4),
    "dqn-bytes": (2, "dqn", "--env-id", "envs:BytesChoices-v0", *EACH_STEP, *TWENTY),
    "ppo-4": (2, *PPO, "--num-envs", 4, "--total-timesteps", 512),
    "ppo-relu": (3, *PPO, "--total-timesteps", 128),
    "ppo-relu-4": (3, *PPO, "--num-envs", 4, "--total-timesteps", 512),
    "atari": (3, "ppo_atari_envpool", *TWO_ROLLOUTS, *ATARI),
}


def train(case: str, twin: bool = False, *flags) -> dict:
    """Train in a case."""
    _, name, *args = CASES[case]
    name += "_torchcompile" if twin else ""
    with changed(name, "nn.Tanh(),", "nn.ReLU(),") if "relu" in case else nullcontext():
        return (play if case == "atari" else run)(name, *args, *flags)


def train_compiled(case: str) -> dict:
    """Train the compiled twin; nothing may be compiled once training has begun."""
    owner, (graphs, *_) = ScriptedGames if case == "atari" else SyncVectorEnv, CASES[case]
    reset, compiled = owner.reset, []

    def reset_and_note(*args, **options):
        compiled.append(counters["stats"]["unique_graphs"])
        torch._dynamo.config.error_on_recompile = True
        return reset(*args, **options)

    torch._dynamo.reset()
    counters.clear()
    # Compiled code draws its own random numbers unless told to draw those of eager code.
    with (
        torch._inductor.config.patch(fallback_random=True),
        torch._dynamo.config.patch(error_on_recompile=False),
        patch.object(owner, "reset", reset_and_note),
    ):
        result = train(case, True, "--compile")
    assert compiled == [graphs]
    assert counters["stats"]["unique_graphs"] == graphs
    # A graph that autograd would have to go back through is not kept by the cache before it has.
    kept = counters["aot_autograd"]["autograd_cache_saved"] + counters["aot_autograd"]["autograd_cache_hit"]
    assert kept == graphs
    return result


def assert_keeps_no_history(result: dict) -> None:
    """No tensor holds more than what it was computed from: else memory would grow without end."""
    modules = [value for value in result.values() if isinstance(value, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    leaves = [leaf for leaf in tree_leaves([*result.values()]) if isinstance(leaf, Tensor)]
    nodes = [tensor.grad_fn for tensor in tensors + leaves if tensor.grad_fn]
    before = {earlier.name() for node in nodes for earlier, _ in node.next_functions if earlier}
    assert before <= {"torch::autograd::AccumulateGrad"}


@pytest.mark.parametrize("case", CASES)
def test_eager_twin_and_compiled_twin_compute_the_same(case):
    results = [train(case), train(case, True), train_compiled(case)]
    on_policy = "rollout_valid" in results[0]
    assert results[0]["updates"] == (8 if on_policy else 20)
    assert not on_policy or not results[0]["rollout_valid"][:-1].all()
    for result in results:
        # Adam's first steps divide by gradients near zero, where rounding decides: a parameter may differ by
        # one step of the learning rate, of 20 or 8.
        assert_same_numbers(results[0], result, atol=3e-4 if on_policy else 1e-3)
        assert_keeps_no_history(result)
