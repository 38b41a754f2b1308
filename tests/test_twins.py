"""A script and its twin: the same text where it should be, the same numbers everywhere, nothing too long."""

import ast
import difflib
import re
import subprocess
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
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

SECTIONS = ["Arguments", "Run", "Environment", "Networks", "Setup", "Algorithm", "Training", "End"]
# A file with what it is a sibling of.
SIBLINGS = dict(zip(TWINS, SCRIPTS, strict=True))
SIBLINGS |= {name: name.replace("_seeds", "_torchcompile") for name in SEEDS}
# The most lines of an eager script; a twin may have 90 more, DQN's ten more for its policy in NumPy, and its
# sibling for many seeds 120 more.
CEILINGS = {"sac": 505, "td3": 485, "dqn": 465, "ppo_continuous": 595, "ppo_atari": 520, "ppo": 565}
every = pytest.mark.parametrize("name", sorted([*SCRIPTS, *TWINS, *SEEDS]))


# ---- Texts -------------------------------------------------------------------------------------------------
def hunks(first: str, second: str) -> list[tuple[int, str]]:
    """Where two texts differ: the line in the second, and its lines."""
    a, b = first.splitlines(), second.splitlines()
    opcodes = difflib.SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes()
    return [(c, "\n".join(b[c:d])) for kind, _, _, c, d in opcodes if kind != "equal"]


@every
def test_a_script_has_its_sections_and_what_it_shares_is_what_the_program_copies(name):
    """That is: Run, a twin's Arguments but for its flags, Environment and Networks, and Flat and Adam."""
    assert re.findall(r"(?m)^ *# ---- (\w+).* -+$", text(name)) == SECTIONS
    assert copy_shared.shared(name, text(name)) == text(name)


@pytest.mark.parametrize("title", ["def refuse", "class EnsembleLinear", "def layer_init", "def make_env"])
def test_definitions_of_eager_scripts_are_identical_to_the_letter(title):
    """But for make_env, which differs between algorithms: SAC and TD3 have the same."""
    names = [name for name in SCRIPTS if "env" not in title or name.startswith(("sac", "td3"))]
    found = [copy_shared.definition(text(name), title) for name in names if f"{title}(" in text(name)]
    assert len(found) >= 2 and len({*found}) == 1


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_diff_is_short_and_every_hunk_is_tagged(name):
    files = [ROOT / "leanrl" / f"{file}.py" for file in (SIBLINGS[name], name)]
    diff = subprocess.run(["diff", *files], capture_output=True, text=True).stdout
    most = 157 if name == "dqn_torchcompile" else 146 if name in TWINS else 276
    assert 0 < len(re.findall("^[<>]", diff, flags=re.MULTILINE)) <= most
    body = text(name)[: text(name).index("# ---- Run")].count("\n")
    for line, lines in hunks(text(SIBLINGS[name]), text(name)):
        assert line <= body or ("# [fast " if name in TWINS else "# [seeds ") in lines, lines


@every
def test_a_script_is_read_in_one_sitting_and_its_loop_on_one_screen(name):
    ceiling = next(lines for script, lines in CEILINGS.items() if name.startswith(script))
    ceiling += 90 * (name not in SCRIPTS) + 120 * (name in SEEDS) + 10 * (name == "dqn_torchcompile")
    lines = text(name).splitlines()
    assert len(lines) <= ceiling and max(map(len, lines)) <= 110
    assert len(copy_shared.section(text(name), "Run").strip().splitlines()) <= 110
    loops = [node for node in ast.walk(ast.parse(text(name))) if isinstance(node, ast.While)]
    [loop] = [node for node in loops if ast.unparse(node.test) == "not last"]
    longest = 75 if name in SEEDS else 58 if name.startswith("ppo") else 51 if name in SCRIPTS else 54
    assert loop.end_lineno - loop.lineno + 1 <= longest


@every
def test_imports_exist_on_every_operating_system_and_metadata_equal_the_requirements(name):
    imported = re.findall(r"(?m)^ *(?:import|from) (\w+)", text(name))  # also within functions
    assert "signal" in imported and not {"fcntl", "msvcrt", "pty", "pwd", "resource", "termios"} & {*imported}

    def by_name(lines: list[str]) -> dict[str, Requirement]:
        return {Requirement(line).name: Requirement(line) for line in lines if line and line[0] != "#"}

    block = re.match(r"# /// script\n(.*?)# ///\n", text(name), flags=re.DOTALL)[1]
    allowed = by_name(tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))["dependencies"])
    classic = name.removesuffix("_torchcompile") in ("dqn", "ppo")
    worlds = ["atari"] if name.startswith("ppo") else []  # EnvPool
    worlds += [] if "atari" in name else ["classic_control" if classic else "mujoco"]
    files = [ROOT / "requirements" / f"{file}.txt" for file in ("requirements", *worlds)]
    # gymnasium with an extra takes the place of gymnasium.
    required = by_name([line for file in files for line in file.read_text().splitlines()])
    if name in SCRIPTS:
        del required["tensordict"]
    for package in {"torch", "envpool"} & required.keys():  # more versions run than the tables are made with
        lowest = next(bound.version for bound in required[package].specifier if "=" in bound.operator)
        assert lowest in allowed[package].specifier
        required[package] = allowed[package]
    assert allowed == required


# ---- Numbers -----------------------------------------------------------------------------------------------
# Reacher has no contacts, which blow rounding up, and cuts its first episodes before learning starts.
REACHER, TWENTY = ("--env-id", "Reacher-v4"), ("--learning-starts", 64, "--total-timesteps", 85)
# Two rollouts, in both of which a row is not valid: Reacher cuts an episode after 50 steps.
EPOCHS = ("--num-minibatches", 2, "--update-epochs", 2, "--num-steps")
PPO = ("ppo_continuous_action", *REACHER, *EPOCHS, 64, "--num-envs", 4, "--total-timesteps", 512)
DQN = ("dqn", *EACH_STEP, *TWENTY)
OFTEN = ("--no-autotune", "--policy-frequency", 3, "--target-network-frequency", 2)
CASES = {
    "sac-4": ("sac_continuous_action", *REACHER, *TWENTY, "--num-envs", 4),
    "sac-often": ("sac_continuous_action", *REACHER, *TWENTY, *OFTEN),  # two kinds of steps of the critics
    "td3": ("td3_continuous_action", *REACHER, *TWENTY),
    "dqn-double-4": (*DQN, "--env-id", "CartPole-v1", "--double", "--num-envs", 4),
    "dqn-bytes": (*DQN, "--env-id", "envs:BytesChoices-v0"),
    "ppo-4": PPO,
    "ppo-relu-4": PPO,
    "ppo-codes": ("ppo", "--env-id", "envs:Codes-v0", *EPOCHS, 64, "--total-timesteps", 384),
    "atari": ("ppo_atari_envpool", *EPOCHS, 16, "--num-envs", 2, "--total-timesteps", 64),
}


def train(case: str, twin: str = "", *flags) -> dict:
    """Train in a case; with ReLU the policy of PPO is not NumPy's."""
    name, *args = CASES[case]
    with changed(name + twin, "nn.Tanh(),", "nn.ReLU(),") if "relu" in case else nullcontext():
        return (play if case == "atari" else run)(name + twin, *args, *flags)


def train_compiled(case: str) -> dict:
    """Train the compiled twin; nothing may be compiled once training has begun."""
    owner, compiled = ScriptedGames if case == "atari" else SyncVectorEnv, []
    reset = owner.reset

    def reset_and_note(*args, **options):
        compiled.append(counters["stats"]["unique_graphs"])
        return reset(*args, **options)

    torch._dynamo.reset()
    counters.clear()
    # Compiled code draws its own random numbers unless told to draw those of eager code.
    eager_draws = torch._inductor.config.patch(fallback_random=True)
    with eager_draws, patch.object(owner, "reset", reset_and_note):
        result = train(case, "_torchcompile", "--compile")
    assert compiled == [counters["stats"]["unique_graphs"]] != [0]
    # A graph that autograd would have to go back through is not kept by the cache before it has.
    kept = counters["aot_autograd"]["autograd_cache_saved"] + counters["aot_autograd"]["autograd_cache_hit"]
    assert [kept] == compiled
    return result


@pytest.mark.parametrize("case", CASES)
def test_eager_twin_and_compiled_twin_compute_the_same(case):
    results = [train(case), train(case, "_torchcompile"), train_compiled(case)]
    on_policy = "rollout_valid" in results[0]
    assert results[0]["updates"] == (8 if on_policy else 20)
    assert not on_policy or not results[0]["rollout_valid"][:-1].all()
    for result in results:
        # Adam's first steps divide by gradients near zero, where rounding decides: a parameter may differ by
        # one step of the learning rate, of 20 or 8.
        assert_same_numbers(results[0], result, atol=3e-4 if on_policy else 1e-3)
        # No tensor holds more than what it was computed from: else memory would grow without end.
        modules = [value for value in result.values() if isinstance(value, nn.Module)]
        leaves = tree_leaves([*result.values(), [module.state_dict(keep_vars=True) for module in modules]])
        nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn]
        before = {earlier.name() for node in nodes for earlier, _ in node.next_functions if earlier}
        assert before <= {"torch::autograd::AccumulateGrad"}
