"""A script and its twin: the same text where they should be, the same numbers everywhere."""

import ast
import difflib
import re
import tomllib

import pytest
import torch
import torch._inductor.config
from conftest import ROOT, SCRIPTS, assert_same_numbers, run

SECTIONS = ["Arguments", "Environment", "Networks", "Algorithm", "Logging"]
FILES = [f"{script}{suffix}" for script in SCRIPTS for suffix in ("", "_torchcompile")]
# What differs between algorithms by its nature; any other function or class of one name has one text.
PER_ALGORITHM = {"Args", "check_args", "Actor", "act", "update"}

# Adam's first steps divide by gradients near zero, where rounding decides: a parameter may differ by one step of the learning
# rate; it has made twenty.
ONE_STEP = 1e-3
# Reacher has no contacts, which blow rounding up, and cuts its first episodes before learning starts.
TWENTY_UPDATES = ("--env-id", "Reacher-v4", "--learning-starts", 64, "--total-timesteps", 85)


def text(name: str) -> str:
    return (ROOT / "leanrl" / f"{name}.py").read_text()


def sections(name: str) -> dict[str, str]:
    """The ruled sections of a script by title."""
    parts = re.split(r"^# ---- (\w+) -+\n", text(name), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def definitions(name: str) -> dict[str, str]:
    """The text of each top-level function and class of a script."""
    source = text(name)
    nodes = ast.parse(source).body
    return {
        node.name: ast.get_source_segment(source, node) for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize("name", FILES)
def test_every_script_has_the_same_sections(name):
    assert list(sections(name)) == SECTIONS


@pytest.mark.parametrize("script", SCRIPTS)
def test_twin_sections_are_identical(script):
    eager, twin = sections(script), sections(f"{script}_torchcompile")
    logging, twin_logging = (part["Logging"].split('\nif __name__ == "__main__":')[0] for part in (eager, twin))
    assert twin_logging == logging
    for title in ("Environment", "Networks"):
        assert twin[title] == eager[title]
    flags = re.compile(r'    compile: bool = False\n    """.*"""\n    cudagraphs: bool = False\n    """.*"""\n\n')
    arguments, removed = flags.subn("", twin["Arguments"])
    assert removed == 1
    assert arguments == eager["Arguments"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_twin_diff_is_short_and_every_hunk_is_tagged(script):
    eager, twin = text(script).splitlines(), text(f"{script}_torchcompile").splitlines()
    opcodes = difflib.SequenceMatcher(a=eager, b=twin, autojunk=False).get_opcodes()
    changed = [(a, b, c, d) for tag, a, b, c, d in opcodes if tag != "equal"]
    assert sum(b - a + d - c for a, b, c, d in changed) <= 150
    body = next(index for index, line in enumerate(twin) if line.startswith("# ---- Algorithm"))
    for _, _, start, end in changed:
        if start > body and end > start:
            # A hunk may be one statement of a passage whose tag stands a few lines above.
            assert any("[fast " in line for line in twin[start - 12 : end]), "\n".join(twin[start:end])


def test_repeated_definitions_are_identical_to_the_letter():
    seen: dict[str, tuple[str, str]] = {}
    for name in FILES:
        for definition, source in definitions(name).items():
            if definition not in PER_ALGORITHM:
                first, expected = seen.setdefault(definition, (name, source))
                assert source == expected, f"{definition} differs between {first} and {name}"


@pytest.mark.parametrize("name", FILES)
def test_inline_metadata_equals_the_requirements(name):
    block = re.match(r"# /// script\n(.*?)# ///\n", text(name), flags=re.DOTALL)[1]
    inline = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    required: dict[str, str] = {}
    for file in ("requirements.txt", "mujoco.txt"):
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        # gymnasium[mujoco] takes the place of gymnasium.
        required |= {re.match(r"[\w-]+", line)[0]: line for line in lines if line and not line.startswith("#")}
    assert sorted(inline["dependencies"]) == sorted(required.values())


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_eager_twin_and_compiled_twin_compute_the_same(script, num_envs):
    args = (*TWENTY_UPDATES, "--num-envs", num_envs)
    eager = run(script, *args)
    assert eager["updates"] == 20
    assert_same_numbers(eager, run(f"{script}_torchcompile", *args), atol=ONE_STEP)
    # Compiled code draws its own random numbers unless told to draw those of eager code.
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(fallback_random=True):
        compiled = run(f"{script}_torchcompile", *args, "--compile")
    assert_same_numbers(eager, compiled, atol=ONE_STEP)

    kinds = compiled["kinds"]
    # The policy and each kind of gradient step, and nothing compiled again in the run or after it.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + len(kinds)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(20):
            compiled["size"].fill_(20 + step)
            compiled["act"](compiled["row"][:, : compiled["obs_dim"]])
            compiled["update"](*kinds[step % len(kinds)])


@pytest.mark.parametrize(("policy_frequency", "target_network_frequency"), [(1, 1), (3, 2)])
def test_other_frequencies_compute_the_same(policy_frequency, target_network_frequency):
    frequencies = ("--policy-frequency", policy_frequency, "--target-network-frequency", target_network_frequency)
    args = (*TWENTY_UPDATES, "--no-autotune", *frequencies)
    eager, twin = run("sac_continuous_action", *args), run("sac_continuous_action_torchcompile", *args)
    assert eager["updates"] == 20
    assert_same_numbers(eager, twin, atol=ONE_STEP)
