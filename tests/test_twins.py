"""A script and its twin: the same text where they should be, the same numbers everywhere."""

import ast
import difflib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch._inductor.config
from conftest import ACTOR_CRITIC, DISCRETE, EACH_STEP, OFF_POLICY, ROOT, SCRIPTS, SEEDS, assert_same_numbers, play, run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

SECTIONS = ["Arguments", "Environment", "Networks", "Algorithm", "Logging", "Checkpoint"]
FILES = [f"{script}{suffix}" for script in SCRIPTS for suffix in ("", "_torchcompile")]
# A file with what it is a sibling of, and the tag of what it changes.
SIBLINGS = {f"{script}_torchcompile": (script, "[fast ") for script in SCRIPTS}
SIBLINGS |= {name: (name.replace("_seeds", "_torchcompile"), "[seeds ") for name in SEEDS}
# What differs between algorithms by its nature; any other function or class of one name has one text.
PER_ALGORITHM = {"check_args", "Actor", "Agent", "Critic", "sample_actions"}
# What differs between environments by its nature: SAC and TD3 have the same, and what MuJoCo takes, EnvPool does not. A
# transition is another row where its action is a number.
PER_ENVIRONMENT = {"make_env": lambda name: name if name not in ACTOR_CRITIC else "actor and critic"}
PER_ENVIRONMENT |= {"sample_batch": lambda name: name in DISCRETE}
PER_ENVIRONMENT |= dict.fromkeys(("evaluate", "Flat"), lambda name: "atari" in name)

# Lines of a script, of its twin, and of the training loop of each, at most; the diff of the two has at most so many, too.
CEILINGS = {
    "sac_continuous_action": (600, 660, 40),
    "td3_continuous_action": (600, 660, 40),
    "ppo_continuous_action": (665, 730, 55),
    "ppo_atari_envpool": (660, 725, 55),
    "dqn": (520, 590, 40),
}
CHANGED_LINES = {"_torchcompile": 140, "_seeds": 290}
# Modules of the standard library that an operating system lacks.
NOT_EVERYWHERE = set("_winapi crypt curses fcntl grp msvcrt nis nt ossaudiodev posix pty pwd readline resource spwd".split())
NOT_EVERYWHERE |= set("syslog termios tty winreg winsound".split())

# Adam's first steps divide by gradients near zero, where rounding decides: a parameter may differ by one step of the learning
# rate; it has made twenty.
ONE_STEP = 1e-3
# Reacher has no contacts, which blow rounding up, and cuts its first episodes before learning starts.
TWENTY_UPDATES = ("--env-id", "Reacher-v4", "--learning-starts", 64, "--total-timesteps", 85)
CARTPOLE = ("--env-id", "CartPole-v1", *TWENTY_UPDATES[2:])
ONE_STEP_OF_PPO = 3e-4
TWO_ROLLOUTS = ("--num-minibatches", 2, "--update-epochs", 2)
# Both rollouts of each have a row that is not valid: Reacher cuts an episode after 50 steps.
REACHER = ("--env-id", "Reacher-v4", "--num-steps", 64)
PPO_CASES = {
    "continuous-1": (run, "ppo_continuous_action", *REACHER, "--total-timesteps", 128),
    "continuous-4": (run, "ppo_continuous_action", *REACHER, "--num-envs", 4, "--total-timesteps", 512),
    "continuous-device": (run, "ppo_continuous_action", *REACHER, "--act-device", "device", "--total-timesteps", 128),
    "atari-2": (play, "ppo_atari_envpool", "--num-steps", 16, "--num-envs", 2, "--total-timesteps", 64),
}


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


@pytest.mark.parametrize("name", [*FILES, *SEEDS])
def test_every_script_has_the_same_sections(name):
    assert list(sections(name)) == SECTIONS


@pytest.mark.parametrize("script", SCRIPTS)
def test_twin_sections_are_identical(script):
    eager, twin = sections(script), sections(f"{script}_torchcompile")
    checkpoint, twin_checkpoint = (part["Checkpoint"].split('\nif __name__ == "__main__":')[0] for part in (eager, twin))
    assert twin_checkpoint == checkpoint
    for title in ("Environment", "Networks", "Logging"):
        assert twin[title] == eager[title]
    flags = re.compile(r"    compile: bool = False  # .+\n    cudagraphs: bool = False  # .+\n")
    arguments, removed = flags.subn("", twin["Arguments"])
    assert removed == 1
    assert arguments == eager["Arguments"]


@pytest.mark.parametrize("name", SEEDS)
def test_agents_at_once_have_all_that_the_twin_has(name):
    own, twin = definitions(name), definitions(SIBLINGS[name][0])
    assert sections(name)["Environment"] == sections(SIBLINGS[name][0])["Environment"]
    assert own.keys() - twin.keys() == {
        "Linear",
        "stack",
        "uniform",
        "normal",
        "Loggers",
        "of_each",
        "of_agent",
        "save_checkpoints",
        "make_own",
    }
    changed = {definition for definition in twin if own[definition] != twin[definition]}
    noise = "sample_actions" if name.startswith("sac") else "smooth"
    assert changed == {"Args", "check_args", "EnsembleLinear", "Critic", "Actor", "sample_batch", noise, "Logger"}


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_hunk_of_the_diff_is_tagged(name):
    sibling, tag = SIBLINGS[name]
    first, second = text(sibling).splitlines(), text(name).splitlines()
    opcodes = difflib.SequenceMatcher(a=first, b=second, autojunk=False).get_opcodes()
    changed = [(a, b, c, d) for kind, a, b, c, d in opcodes if kind != "equal"]
    body = next(index for index, line in enumerate(second) if line.startswith("# ---- Environment"))
    for _, _, start, end in changed:
        if start > body and end > start:
            # A hunk may be one statement of a passage whose tag stands a few lines above.
            assert any(tag in line for line in second[start - 12 : end]), "\n".join(second[start:end])


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_diff_is_short(name):
    files = [ROOT / "leanrl" / f"{file}.py" for file in (SIBLINGS[name][0], name)]
    diff = subprocess.run(["diff", *files], capture_output=True, text=True).stdout
    ceiling = next(lines for suffix, lines in CHANGED_LINES.items() if name.endswith(suffix))
    assert 0 < len(re.findall("^[<>]", diff, flags=re.MULTILINE)) <= ceiling


@pytest.mark.parametrize("name", FILES)
def test_a_script_is_read_in_one_sitting_and_its_loop_on_one_screen(name):
    script = name.removesuffix("_torchcompile")
    eager, twin, screen = CEILINGS[script]
    assert len(text(name).splitlines()) <= (eager if name == script else twin)
    loops = [node for node in ast.walk(ast.parse(text(name))) if isinstance(node, ast.While)]
    [loop] = [node for node in loops if ast.unparse(node.test) == "not last"]
    assert loop.end_lineno - loop.lineno + 1 <= screen


@pytest.mark.parametrize("name", [*FILES, *SEEDS])
def test_imports_exist_on_every_operating_system(name):
    imported = set()
    for node in ast.walk(ast.parse(text(name))):  # also within functions
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert {"signal", "torch"} <= imported
    assert imported.isdisjoint(NOT_EVERYWHERE)


@pytest.mark.parametrize("files", [FILES, SEEDS], ids=["twins", "seeds"])
def test_repeated_definitions_are_identical_to_the_letter(files):
    seen: dict[tuple[str, str | bool | None], tuple[str, str]] = {}
    for name in files:
        algorithm = re.sub("_(torchcompile|seeds)$", "", name)
        scopes = PER_ENVIRONMENT | dict.fromkeys(PER_ALGORITHM, str)
        for definition, source in definitions(name).items():
            # `Args` has another test: a twin has two flags more.
            if definition != "Args":
                scope = scopes[definition](algorithm) if definition in scopes else None
                first, expected = seen.setdefault((definition, scope), (name, source))
                assert source == expected, f"{definition} differs between {first} and {name}"


@pytest.mark.parametrize("name", [*FILES, *SEEDS])
def test_inline_metadata_equals_the_requirements(name):
    block = re.match(r"# /// script\n(.*?)# ///\n", text(name), flags=re.DOTALL)[1]
    inline = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    required: dict[str, str] = {}
    world = "atari" if "atari" in name else "classic_control" if "dqn" in name else "mujoco"
    for file in ("requirements.txt", f"{world}.txt"):
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        # gymnasium with an extra takes the place of gymnasium.
        required |= {re.match(r"[\w-]+", line)[0]: line for line in lines if line and not line.startswith("#")}
    assert sorted(inline["dependencies"]) == sorted(required.values())


@pytest.mark.slow
def test_the_instruction_set_is_the_one_that_inductor_finds_by_trying():
    found = []
    for trusted in (None, True):
        code = f"import torch._inductor.config as config; config.cpp.vec_isa_ok = {trusted}; "
        code += "from torch._inductor.cpu_vec_isa import pick_vec_isa; print(isa := pick_vec_isa(), isa.build_arch_flags())"
        found.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1] != ""


def assert_keeps_no_history(result: dict) -> None:
    """No tensor of a run holds more than what it was computed from: with what came before, memory would grow without end."""
    kept = [[*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else value for value in result.values()]
    nodes = [leaf.grad_fn for leaf in tree_leaves(kept) if isinstance(leaf, Tensor) and leaf.grad_fn]
    assert {before.name() for node in nodes for before, _ in node.next_functions if before} <= {
        "torch::autograd::AccumulateGrad"
    }


def run_all(train: Callable[..., dict], script: str, *args, atol: float) -> tuple[dict, dict, int]:
    """Run a script, its twin and its compiled twin, and check that they compute the same.

    Returns the globals of the first and of the last, and how many graphs were compiled.
    """
    eager = train(script, *args)
    assert_same_numbers(eager, train(f"{script}_torchcompile", *args), atol=atol)
    # Compiled code draws its own random numbers unless told to draw those of eager code.
    (counters := torch._dynamo.utils.counters).clear()
    with torch._inductor.config.patch(fallback_random=True):
        compiled = train(f"{script}_torchcompile", *args, "--compile")
    assert_same_numbers(eager, compiled, atol=atol)
    # A graph that autograd would have to go back through is not kept by the cache before it has, which no gradient step does.
    kept = counters["aot_autograd"]["autograd_cache_saved"] + counters["aot_autograd"]["autograd_cache_hit"]
    assert kept == counters["stats"]["unique_graphs"]
    for result in (eager, compiled):
        assert_keeps_no_history(result)
    return eager, compiled, kept


@pytest.mark.parametrize(
    ("script", "option"),
    [
        *product([name for name in SCRIPTS if name in OFF_POLICY], ["--num-envs=1", "--num-envs=4"]),
        ("dqn", "--double"),
        ("dqn", "--env-id=envs:BytesChoices-v0"),
    ],
)
def test_eager_twin_and_compiled_twin_compute_the_same(script, option):
    args = (*CARTPOLE, *EACH_STEP) if script in DISCRETE else TWENTY_UPDATES
    eager, compiled, graphs = run_all(run, script, *args, option, atol=ONE_STEP)
    assert eager["updates"] == 20
    kinds = compiled["kinds"]
    # The policy and the two halves of a gradient step, of which the second of DQN is one operation, and nothing compiled
    # again in the run or after it.
    assert graphs == (2 if script in DISCRETE else 3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(20):
            compiled["size"].fill_(20 + step)
            compiled["act"](torch.from_numpy(compiled["obs"]))
            compiled["update"](*kinds[step % len(kinds)])
        # A number that has changed is seen: compiled code is never run with the old one.
        compiled["args"].gamma = 0.0
        with pytest.raises(torch._dynamo.exc.RecompileError):
            compiled["update"](*kinds[0])


@pytest.mark.parametrize("case", PPO_CASES)
def test_eager_twin_and_compiled_twin_of_ppo_compute_the_same(case):
    train, script, *args = PPO_CASES[case]
    eager, compiled, graphs = run_all(train, script, *args, *TWO_ROLLOUTS, atol=ONE_STEP_OF_PPO)
    assert eager["updates"] == 8
    assert not eager["rollout_valid"][:-1].all()

    # The policy, unless it is NumPy's, the preparation of the batch and the gradient step.
    on_cpu = compiled.get("act_on_cpu", False)
    assert graphs == (2 if on_cpu else 3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(10):
            if script == "ppo_atari_envpool":
                compiled["act"](compiled["rollout_obs"][step])
            elif not on_cpu:
                compiled["act"](compiled["rollout"][step, :, : compiled["obs_dim"]], compiled["noise"][step])
            compiled["prepare"]()
            compiled["update"](torch.randperm(compiled["batch_size"])[: compiled["minibatch_size"]])


@pytest.mark.parametrize(("policy_frequency", "target_network_frequency"), [(1, 1), (3, 2)])
def test_other_frequencies_compute_the_same(policy_frequency, target_network_frequency):
    frequencies = ("--policy-frequency", policy_frequency, "--target-network-frequency", target_network_frequency)
    args = (*TWENTY_UPDATES, "--no-autotune", *frequencies)
    eager, twin = run("sac_continuous_action", *args), run("sac_continuous_action_torchcompile", *args)
    assert eager["updates"] == 20
    assert_same_numbers(eager, twin, atol=ONE_STEP)
