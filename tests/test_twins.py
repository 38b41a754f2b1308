"""A script and its twin: the same text where it should be, the same numbers everywhere, nothing too long."""

import ast
import json
import os
import re
import subprocess
import tomllib
from contextlib import nullcontext
from unittest.mock import patch

import budget
import conftest
import copy_shared
import pytest
import torch
from capture import without_inductor
from conftest import (
    ATARI,
    EACH_STEP,
    MULTIGPU,
    ON_DEVICE,
    ON_POLICY,
    ROOT,
    SCRIPTS,
    TWINS,
    algorithm,
    changed,
    text,
)
from envs import ScriptedGames
from gymnasium.vector import SyncVectorEnv
from packaging.requirements import Requirement
from torch import nn
from torch._dynamo.utils import counters

from benchmark.collection import POOL

SECTIONS = ["Arguments", "Environment", "Networks", "Run", "Setup", "Algorithm", "Training", "End"]
# A file with what it is a sibling of.
SIBLINGS = dict(zip(TWINS, SCRIPTS, strict=True))
SIBLINGS[ON_DEVICE[1]] = ON_DEVICE[0]
SIBLINGS |= {name: re.sub("_multigpu$", "_torchcompile", name) for name in MULTIGPU}
every = pytest.mark.parametrize("name", [*SCRIPTS, *TWINS, *ON_DEVICE, *MULTIGPU])


# ---- Texts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", copy_shared.FILES, ids=lambda file: file.stem)
def test_what_scripts_share_is_the_same_text(file):
    known = (*SCRIPTS, *TWINS, *ON_DEVICE, *MULTIGPU)
    assert file.stem in known, "give it an entry in benchmark/collection.py: the tests read that"
    others = [other for other in copy_shared.FILES if copy_shared.shared(file, other) != other.read_text()]
    differ = [other.name for other in others]
    assert not differ, f"if {file.name} is right, run python tests/copy_shared.py leanrl/{file.name}"


@every
def test_a_script_has_its_sections_and_a_loop_that_fits_on_a_screen(name):
    sections = re.findall(r"(?m)^ *# ---- (\w+).* -+$", text(name))
    told = f"give it the ruled sections {SECTIONS}, in this order"
    assert sections == SECTIONS, told
    nodes = ast.walk(ast.parse(text(name)))
    [loop] = [n for n in nodes if isinstance(n, ast.While) and ast.unparse(n.test) == "not last"]
    length = loop.end_lineno - loop.lineno
    most = 90 if name in MULTIGPU else 66
    assert length < most, f"the loop has {length} lines: have it fit on a screen, a part may be a function"


@pytest.mark.skipif(not os.getenv("CI"), reason="a limit on the project's own scripts: set CI=1")
@every
def test_plumbing_only_gets_less(name):
    now = budget.plumbing(conftest.LEANRL / f"{name}.py")
    noted = json.loads(budget.BUDGET.read_text())
    allowed = noted.get(name) or [*map(max, *noted.values())]  # of a new script: as the longest
    told = f"take something else out, or, if it is worth that to you, write {now} into tests/budget.json"
    for what, number, most in zip(("tokens", "lines"), now, allowed, strict=True):
        assert number <= most, f"{name}.py has {number} {what} of plumbing, {most} are allowed: {told}"


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_diff_is_short_and_every_hunk_has_a_tag_that_is_explained(name):
    kind = "ranks" if name in MULTIGPU else "fast"
    most = 300 if name in conftest.MEMORY else 220  # 270 are aimed at: the recurrence is another one
    files = [ROOT / "leanrl" / f"{file}.py" for file in (SIBLINGS[name], name)]
    diff = subprocess.run(["diff", *files], capture_output=True, text=True).stdout
    changed = len(re.findall("(?m)^[<>]", diff))
    assert 0 < changed <= most, f"{changed} lines differ: write what is no trick the same way in both files"
    lines = text(name).splitlines()
    below = next(number for number, line in enumerate(lines) if line.startswith("# ---- Environment"))
    titled = [node for node in ast.parse(text(name)).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    tagged = [node for node in titled if f"[{kind}: " in lines[node.lineno - 2]]  # in the line above it
    for hunk in re.split(r"(?m)^(?=\d)", diff)[1:]:
        line = int(re.search(r"[acd](\d+)", hunk)[1])
        within = any(node.lineno <= line <= node.end_lineno for node in tagged)
        has_tag = line <= below or within or re.search(rf"(?m)^>.*\[{kind}: ", hunk)
        assert has_tag, f"name the trick in a comment, # [{kind}: ...], or undo what differs:\n{hunk}"
    docstring, code = text(name).split('\n"""\n', 1)
    code = code.replace(copy_shared.definitions(text(name)).get("Flat", ""), "")  # made for two critics, too
    tags = {tag for tags in re.findall(rf"\[{kind}: (.*?)\]", code) for tag in tags.split(", ")}
    explained = re.findall(rf"(?m)^- \[{kind}: (.*?)\] \S", docstring)
    assert sorted(explained) == sorted(tags), "the docstring has a line for each tag below, and no other"
    chapters = {*re.findall(r"(?m)^### (.*)$", (ROOT / "docs" / "tricks.md").read_text())}
    assert tags <= chapters, f"docs/tricks.md lacks a chapter on {tags - chapters}"


@every
def test_metadata_equal_the_requirements(name):
    def by_name(lines: list[str]) -> dict[str, Requirement]:
        return {Requirement(line).name: Requirement(line) for line in lines if line and line[0] not in "#-"}

    block = re.search(r"^# /// script\n(.*?)# ///\n", text(name), flags=re.DOTALL | re.MULTILINE)[1]
    allowed = by_name(tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))["dependencies"])
    in_pool = algorithm(name).env_id.startswith(POOL)
    worlds = ["envpool"] if in_pool or "\nimport envpool\n" in text(name) else []
    worlds += {"continuous": ["mujoco"], "discrete": ["classic_control"]}.get(algorithm(name).actions, [])
    files = [ROOT / "requirements" / f"{file}.txt" for file in ("requirements", *worlds)]
    # gymnasium with an extra takes the place of gymnasium.
    required = by_name([line for file in files for line in file.read_text().splitlines()])
    without = ["gymnasium", "moviepy"] if name in ON_DEVICE else []
    for package in without if name in SIBLINGS else [*without, "tensordict"]:
        del required[package]
    for package in {"torch", "envpool"} & required.keys():  # more versions run than the tables are made with
        lowest = next(bound.version for bound in required[package].specifier if "=" in bound.operator)
        assert lowest in allowed[package].specifier
        required[package] = allowed[package]
    assert allowed == required


# ---- Numbers -----------------------------------------------------------------------------------------------
# Reacher has no contacts, which blow rounding up, and cuts its first episodes before learning starts.
REACHER, TWENTY = ("--env-id", "Reacher-v4"), ("--learning-starts", 64, "--total-timesteps", 85)
# Two rollouts, in both of which an episode ends: Reacher cuts them after 13 steps. But for games, their steps
# are no power of two.
EPOCHS = ("--num-minibatches", 2, "--update-epochs", 2, "--num-steps")
CUT = ("--env-kwargs", '{"max_episode_steps": 13}')
# The replay buffer is written over.
GAMES = ("--batch-size", 4, "--buffer-size", 64, "--learning-starts", 64, "--total-timesteps", 85)
# What every script is run with, by whether it is on-policy and its actions.
ARGS = {
    (False, "continuous"): (*REACHER, *TWENTY, "--num-envs", 4),
    (False, "discrete"): (*EACH_STEP, "--env-id", "CartPole-v1", *TWENTY, "--num-envs", 4),
    (False, "atari"): (*EACH_STEP, *GAMES, "--num-envs", 2),
    (True, "continuous"): (*REACHER, *EPOCHS, 20, *CUT, "--num-envs", 4, "--total-timesteps", 160),
    (True, "discrete"): ("--env-id", "CartPole-v1", *EPOCHS, 36, "--num-envs", 4, "--total-timesteps", 288),
    (True, "atari"): (*EPOCHS, 16, "--num-envs", 2, "--total-timesteps", 64),
}
# Of four environments: as often as the others; the replay buffer is full in the end.
EACH_VECTOR_STEP = ("--num-updates", 4, "--batch-size", 32, "--buffer-size", 72)
CASES = [(name, EACH_VECTOR_STEP if conftest.takes(name, "num_updates") else ()) for name in SCRIPTS]
# Compiled, but not by Inductor: there are two kinds of steps of the critics; and what a user changes, by the
# same text in both files (tests/test_changing.py has more). With ReLU the policy of PPO is not NumPy's.
OFTEN = ("--no-autotune", "--policy-frequency", 3, "--target-network-frequency", 2, "--num-envs", 1)
TRACED = [("sac_continuous_action", OFTEN), ("dqn", ("--double", "--num-envs", 1))]
TRACED += [("ppo", ("--env-id", "envs:Codes-v0"))]
TRACED += [("ppo_continuous_action", (), "nn.Tanh(),", "nn.ReLU(),")]
# Inductor takes up to a minute with empty caches, so it compiles one of what is alike. tests/test_capture.py
# compiles the others without it, tests/test_gpu.py with it on a GPU; benchmark's profiles run all with it.
LIKE_ANOTHER = ("td3_continuous_action", "fast_sac", "ppo", "ppo_lstm", "ppo_atari_lstm_envpool")
LIKE_ANOTHER += ("pqn_atari_envpool",)
# How many functions of each are compiled: not the policies that act in NumPy.
GRAPHS = dict.fromkeys(SCRIPTS, 3) | {"dqn": 1, "ppo": 2, "ppo_continuous_action": 2, "pqn": 2}


def train(case: tuple, twin: str = "", *flags) -> dict:
    """Train in a case, on the batches of a twin."""
    name, options, *passages = case
    run = conftest.play if name in ATARI else conftest.run
    args = ARGS[name in ON_POLICY, algorithm(name).actions]
    with changed(name + twin, *passages), nullcontext() if twin else conftest.draws_of_a_twin(name):
        return run(name + twin, *args, *options, *flags)


def train_compiled(case: tuple) -> dict:
    """Train the compiled twin, and evaluate; nothing may be compiled once training has begun."""
    owner, compiled = ScriptedGames if case[0] in ATARI else SyncVectorEnv, []
    reset = owner.reset

    def reset_and_note(*args, **options):
        compiled.append(counters["stats"]["unique_graphs"])
        return reset(*args, **options)

    torch._dynamo.reset()
    counters.clear()
    often = () if case[0] in ON_POLICY else ("--log-every", 10)
    with patch.object(owner, "reset", reset_and_note):
        result = train(case, "_torchcompile", "--compile", *often, "--eval-every", 10, "--eval-episodes", 1)
    assert len(result["logged"]["charts/eval_return"]) >= 2
    graphs = counters["stats"]["unique_graphs"]
    assert {*compiled} == {graphs} != {0}
    assert graphs == GRAPHS[case[0]] or case not in CASES
    # A graph that autograd would have to go back through is not kept by the cache before it has.
    kept = counters["aot_autograd"]["autograd_cache_saved"] + counters["aot_autograd"]["autograd_cache_hit"]
    assert kept == graphs or case in TRACED
    return result


def title(case: tuple) -> str:
    return " ".join(map(str, (case[0], *case[1], *case[2:3])))


@pytest.mark.parametrize("case", [*CASES, *TRACED], ids=title)
def test_eager_twin_and_compiled_twin_compute_the_same(case):
    """In double precision to eleven decimals; the compiled twin, as it is, up to rounding."""
    with conftest.in_double():
        eager, twin = train(case), train(case, "_torchcompile")
    conftest.assert_same_numbers(eager, twin)
    on_policy, results = case[0] in ON_POLICY, [eager, twin]
    if case in TRACED or case[0] not in LIKE_ANOTHER:
        single = train(case)
        with without_inductor() if case in TRACED else nullcontext():
            compiled = train_compiled(case)
        results += [single, compiled]
        if on_policy:  # RAdam's first steps are too small to show another rate
            rates = [conftest.rate_of(each["state"]["optimizer"]) for each in (single, compiled)]
            assert rates[0] == pytest.approx(rates[1])
        # Adam's first steps divide by gradients near zero, where rounding decides: a parameter may differ by
        # one step of the learning rate, of 20 or 8.
        atol = 3e-4 if on_policy else 1e-3
        conftest.assert_same_numbers(single, compiled, rtol=1e-3, atol=atol, share=5e-3)
    assert eager["updates"] == (8 if on_policy else 20)
    assert not on_policy or eager["returns"]
    for result in results:
        # No tensor holds more than what it was computed from: else memory would grow without end.
        modules = [item for item in result["state"].values() if isinstance(item, nn.Module)]
        tensors = [tensor for module in modules for tensor in module.state_dict(keep_vars=True).values()]
        tensors += result["losses"].values()
        tensors += [result[name] for name in ("buffer", "batch") if name in result]
        histories = [tensor.grad_fn.next_functions for tensor in tensors if tensor.grad_fn]
        before = {earlier.name() for history in histories for earlier, _ in history if earlier}
        assert before <= {"torch::autograd::AccumulateGrad"}
