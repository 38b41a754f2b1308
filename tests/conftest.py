"""What the tests share: the names of the scripts, ways to load and to run one, and what a run computed."""

import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.backends.registry
import torch._inductor.config
from envs import ScriptedGames
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.tensorboard import SummaryWriter

from benchmark.collection import COLLECTION, Algorithm

# Now: a test that puts sys.modules back would have backends registered twice, which fails.
torch._dynamo.backends.registry._lazy_import()
# Two threads that meet after each tiny operation are slow, fifty times so beside a busy process.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the scripts that run as commands
# A shell has its background jobs ignore Ctrl+C: the runs of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
ROOT = TESTS.parent
LEANRL = ROOT / "leanrl"
SCRIPTS = [name for name, entry in COLLECTION.items() if entry.actions != "on device"]
TWINS = [f"{name}_torchcompile" for name in SCRIPTS]
ON_DEVICE = ["ppo_on_device", "ppo_on_device_torchcompile"]  # whose environments are no Gymnasium's
HAS_GPU = torch.cuda.is_available()  # a test may pretend that there is one
MULTIGPU = sorted(path.stem for path in LEANRL.glob("*_multigpu.py"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, else one worker would be idle at the end."""
    items.sort(key=lambda item: "test_twins" not in item.nodeid)


def algorithm(name: str) -> Algorithm:
    """What the collection says of the algorithm of a script or a sibling."""
    return COLLECTION[re.sub("_(torchcompile|multigpu)$", "", name)]


@cache
def load(name: str) -> dict:
    """The functions and classes of a script, without running it."""
    return runpy.run_path(str(LEANRL / f"{name}.py"), run_name="script")


def text(name: str) -> str:
    """The text of a script."""
    return (LEANRL / f"{name}.py").read_text()


def takes(name: str, argument: str) -> bool:
    """Whether a script has an argument on its command line."""
    return argument in load(name)["Args"].__annotations__


def those(belongs: Callable[[str], bool]) -> list[str]:
    """The eager scripts of which something is true, each followed by its twin."""
    return [name for pair in zip(SCRIPTS, TWINS, strict=True) if belongs(pair[0]) for name in pair]


ON_POLICY = those(lambda name: algorithm(name).on_policy)
OFF_POLICY = those(lambda name: not algorithm(name).on_policy)
DISCRETE = those(lambda name: algorithm(name).actions == "discrete")
ATARI = those(lambda name: algorithm(name).actions == "atari")
MEMORY = those(lambda name: "\nclass LSTM(" in text(name))  # what went before is part of what they act on
NOT_ATARI = [name for name in SCRIPTS if name not in ATARI]
Q_LEARNING = those(lambda name: "td_loss" in algorithm(name).losses)
DQN = [name for name in OFF_POLICY if name in Q_LEARNING and name not in ATARI]
RAINBOW = [name for name in OFF_POLICY if name in ATARI]
PQN = [name for name in ON_POLICY if name in Q_LEARNING]
PPO = [name for name in ON_POLICY if name not in PQN]
ACTOR_CRITIC = [name for name in OFF_POLICY if name not in Q_LEARNING]
MANY = [name for name in OFF_POLICY if algorithm(name).num_envs > 1]  # environments, of EnvPool by default
# Arguments for a run of some 300 steps that performs updates, one a step if it is off-policy.
EACH_STEP = ("--train-frequency", "1", "--target-network-frequency", "3")
FEW = ("--learning-starts", "100", "--total-timesteps", "300", "--batch-size", "32")
SHORT = dict.fromkeys(OFF_POLICY, FEW)
SHORT |= {name: (*EACH_STEP, *SHORT[name]) for name in DQN}
ROLLOUTS = ("--num-envs", "2", "--num-steps", "50", "--num-minibatches", "5", "--update-epochs", "2")
SHORT |= dict.fromkeys(ON_POLICY, (*ROLLOUTS, "--total-timesteps", "300"))
SHORT |= {name: (*SHORT[name], "--num-minibatches", "2") for name in MEMORY}
# Atari's are slow.
SHORT |= {name: (*SHORT[name], "--update-epochs", "1") for name in ATARI if name in ON_POLICY}
SMALL = ("--batch-size", "8", "--buffer-size", "1000", "--train-frequency", "4")
SHORT |= {name: (*FEW, *SMALL, "--target-network-frequency", "12") for name in RAINBOW}
# Scripts set these options of the compiler. Each run begins with the defaults: with options that another
# script has set, it would compile again what is in the cache.
SETTINGS = "cpp_wrapper cpp.vec_isa_ok cpp.use_decompose_tanh fallback_random max_pointwise_cat_inputs"
SETTINGS = [*SETTINGS.split(), "split_reductions"]
INDUCTOR = {name: torch._inductor.config.get_config_copy()[name] for name in SETTINGS}
# All that a test may see of the inside of a run: names in the body of a script. Whoever renames one there
# renames it here, and in the tests that ask for it. Else tests ask for files, printed lines and the summary.
INNER = """args summary device folder START_TIME global_step updates returns updates_due eval_returns
    envs obs_moments return_moments act policy best_actions sample prepare update kinds
    state losses deviations replay priorities beta buffer size columns rollout rollout_obs batch batch_columns
    memory first_memory"""
# And of Rainbow tests/test_replay.py sees what `Replay` has, NoisyLinear.sigma, and the layers of QNetwork.


def alone(name: str, args: tuple) -> tuple:
    """Arguments for a run; where a script has many environments, a new run has one, and one gradient step."""
    new = name in MANY and not {"--resume", "--evaluate"} & {*args}
    return ("--num-envs", "1", "--num-updates", "1", "--log-every", "100", *args) if new else args


def run(name: str, *args, cuda: bool = False, directory: Path | None = None) -> dict:
    """Train in this process, in a temporary directory unless told another; returns what INNER names.

    "logged" has what it wrote to TensorBoard, by name: steps and values. Afterwards signals mean what they
    did before, and autocast is off. Of Atari's networks on a CPU the wide layer has 64 units: with its 512
    these runs would take twice as long.
    """
    path, logged = LEANRL / f"{name}.py", {}
    options = [*map(str, alone(name, args)), "--cuda" if cuda else "--no-cuda"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        TemporaryDirectory() as temporary,
        chdir(directory or temporary),
        patch.object(sys, "argv", [str(path), *options]),
        torch._inductor.config.patch(INDUCTOR),
        patch.object(SummaryWriter, "add_scalar", autospec=True, side_effect=SummaryWriter.add_scalar) as add,
    ):
        torch.set_autocast_cache_enabled(True)  # PyTorch's default, which an earlier run has changed
        if algorithm(name).actions == "atari" and not HAS_GPU:
            path = Path(temporary, path.name)
            path.write_text(text(name).replace("512", "64"))
        try:
            result = runpy.run_path(str(path), run_name="__main__")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_enabled("cuda", False)
    for _, tag, value, step in (call.args for call in add.call_args_list):
        logged.setdefault(tag, []).append((step, float(value)))
    missing = left_out(result) if "state" in result else []
    if "replay" in result:
        result |= {name: getattr(result["replay"], name) for name in ("buffer", "priorities")}
    found = {name: value for name, value in result.items() if name in INNER.split()}
    return found | {"logged": logged, "left_out": missing}


def left_out(result: dict) -> list[str]:
    """The modules and optimizers of a run that its `state`, and so its checkpoints, lack."""
    saved = [*result["state"].values()]
    tensors = [
        tensor for item in saved if isinstance(item, nn.Module) for tensor in item.state_dict().values()
    ]
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}  # a twin's Flat has its networks'

    def is_saved(item: object) -> bool:
        if isinstance(item, nn.Module):
            own = item.state_dict().values()
            return all(tensor.untyped_storage().data_ptr() in memory for tensor in own)
        return not isinstance(item, torch.optim.Optimizer) or any(item is other for other in saved)

    return [name for name, item in result.items() if not is_saved(item)]


@contextmanager
def draws_of_a_twin(name: str) -> Iterator[None]:
    """Let an eager script draw the batches of its twin, where a graph would freeze a number for the bound."""
    if name in ON_POLICY:  # nothing is drawn in its graphs that is drawn otherwise
        yield
        return
    draw = torch.randint
    with patch("torch.randint", lambda bound, *args, **options: draw(2**62, *args, **options) % bound):
        yield


def world(name: str, kind: str) -> tuple[str, str]:
    """The argument for an environment of tests/envs.py, with the actions that a script gives."""
    return "--env-id", f"envs:{kind}{'Choices' if name in DISCRETE else ''}-v0"


def scripted_world(name: str) -> tuple[str, str]:
    """The argument for a script's scripted world; Atari's needs ScriptedGames in place of EnvPool, too."""
    return ("--env-id", "Breakout-v5") if algorithm(name).actions == "atari" else world(name, "Scripted")


def play(name: str, *args, **options) -> dict:
    """Train like `run` in the scripted world: envs.ScriptedGames for EnvPool, or else envs.Scripted."""
    with patch("envpool.make", ScriptedGames):
        return run(name, *scripted_world(name), *args, **options)


def evaluation(name: str, file: Path, *args, games: Callable = ScriptedGames, **options) -> dict:
    """What a script prints that evaluates a checkpoint: arguments and returns. EnvPool's are scripted."""
    with (
        redirect_stdout(io.StringIO()) as printed,
        patch("envpool.make", games),
        pytest.raises(SystemExit) as ended,
    ):
        run(name, "--evaluate", file, *args, **options)
    assert ended.value.code is None
    return json.loads(printed.getvalue())


def instances(result: dict) -> list:
    """The environments of tests/envs.py in a run, or the one ScriptedGames."""
    return [env.unwrapped for env in getattr(result["envs"], "envs", [result["envs"]])]


@contextmanager
def changed(name: str, *passages: str) -> Iterator[None]:
    """Have `run` take a script with another text in place of each passage, which stands before it here."""
    content = text(name)
    for passage, other in zip(passages[::2], passages[1::2], strict=True):
        assert passage in content
        content = content.replace(passage, other)
    with TemporaryDirectory() as folder, patch.dict(globals(), LEANRL=Path(folder)):
        (Path(folder) / f"{name}.py").write_text(content)
        yield


@contextmanager
def in_double() -> Iterator[None]:
    """Have scripts compute in double precision, where rounding hides no error; enter it after `changed`."""
    singles = {"np.float32": "np.float64", "torch.float32": "torch.float64", ".float()": ".double()"}
    with TemporaryDirectory() as folder:
        for path in LEANRL.glob("*.py"):
            content = path.read_text()
            for single, double in singles.items():
                content = content.replace(single, double)
            (Path(folder) / path.name).write_text(content)
        with patch.dict(globals(), LEANRL=Path(folder)):
            torch.set_default_dtype(torch.float64)
            try:
                yield
            finally:
                torch.set_default_dtype(torch.float32)


def named(rows: Tensor, columns: dict[str, int]) -> dict[str, Tensor]:
    """The columns of rows, (..., its width), by the names that a script gives them."""
    return dict(zip(columns, rows.split([*columns.values()], dim=-1), strict=True))


def rates(name: str, rate: float) -> list[str]:
    """Arguments that set all learning rates of a script."""
    found = [field for field in load(name)["Args"].__annotations__ if re.search("_lr$|learning_rate$", field)]
    found = [f"--{field.replace('_', '-')}" for field in found if field != "anneal_lr"]
    return [word for flag in found for word in (flag, str(rate))]


def make_commit(folder: Path) -> str:
    """Make a folder a git checkout with one commit of the files in it, and return that."""
    git = ["git", "-C", folder, "-c", "user.name=A", "-c", "user.email=a@example.org"]
    commit = ["commit", "--quiet", "--allow-empty", "--message", "first"]
    for command in (["init", "--quiet"], ["add", "--all"], commit, ["rev-parse", "HEAD"]):
        output = subprocess.check_output([*git, *command], text=True)
    return output.strip()


def environment(**variables: str) -> dict[str, str]:
    """Variables for a command, which then finds these modules and the environments of tests/envs.py."""
    return os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"} | variables


def cli(name: str, *args) -> subprocess.CompletedProcess:
    """Run a script as a command with these arguments."""
    command = [sys.executable, str(LEANRL / f"{name}.py"), *map(str, alone(name, args))]
    with TemporaryDirectory() as directory:
        return subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True)


@pytest.fixture
def refusal(capfd) -> Callable[..., str]:
    """Gives the words with which a script refuses to run in this process.

    Of arguments tyro tells in a box, with status 2, all else is a line, with status 1.
    """

    def told(name: str, start: Callable, *args, **options) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as raised:
            start(name, *args, **options)
        printed, code = capfd.readouterr(), raised.value.code
        assert printed.out == "" and (code == 2 or "\n" not in code)
        return " ".join(re.sub("[╭╮╰╯│─]", " ", printed.err).split()) if code == 2 else code

    return told


# Write a checkpoint, at the end.
SAVED = ("--checkpoint-every", 10**6)


def checkpoint(directory: Path) -> Path:
    """The checkpoint of the one run in a folder."""
    [file] = directory.glob("runs/*/checkpoint.pt")
    return file


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of all that a run logged, by name."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = log.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in log.Scalars(name)] for name in names}


def adam_state(globals_: dict, name: str) -> dict[str, Tensor]:
    """Moments and steps of an optimizer, for each parameter, like "step.qf1.fc1.weight", in either file."""
    optimizer, found = globals_["state"][name], {}
    flat = optimizer.params[0] if isinstance(optimizer, nn.Module) else None  # of a twin
    modules = [(name, item) for name, item in globals_["state"].items() if isinstance(item, nn.Module)]
    for key, param in (named for name, module in modules for named in module.named_parameters(prefix=name)):
        moments = {}
        if flat is None:
            moments = optimizer.state.get(param, {})
        elif optimizer.step and param.untyped_storage()._cdata == flat.untyped_storage()._cdata:
            # PyTorch's optimizer has nothing before its first step either.
            view = (param.shape, param.stride(), param.storage_offset())
            moments = {"step": optimizer.step, "exp_avg": optimizer.exp_avg.as_strided(*view)}
            moments["exp_avg_sq"] = optimizer.exp_avg_sq.as_strided(*view)
        # Steps of PyTorch's optimizer are in single precision always.
        found |= {f"{kind}.{key}": x.float() if kind == "step" else x for kind, x in moments.items()}
    return found


def gradient_steps(result: dict, network: str) -> int:
    """The steps that a network has made, by whatever optimizer."""
    found = {}
    for optimizer in (key for key in result["state"] if "optimizer" in key):
        found |= adam_state(result, optimizer)
    return int(next(step for key, step in found.items() if key.startswith(f"step.{network}.")))


def critics(result: dict) -> list[str]:
    """The names of the critics of an actor in a checkpoint: one, two or more."""
    networks = {key: type(item).__name__ for key, item in result["state"].items()}
    return [key for key, kind in networks.items() if kind == "QNetwork" and "target" not in key]


def rate_of(optimizer) -> float:
    """The learning rate of the next step of an optimizer, of either file."""
    return float(optimizer.lr if isinstance(optimizer, nn.Module) else optimizer.param_groups[0]["lr"])


def numbers(globals_: dict) -> dict[str, Tensor]:
    """What a run computed: buffer, latest losses, returns, and what checkpoints have, by parameter."""
    found = {f"losses.{name}": value for name, value in globals_["losses"].items()}
    found |= {name: globals_[name] for name in ("buffer", "batch", "priorities") if name in globals_}
    found["returns"] = torch.tensor(globals_["returns"], dtype=torch.float64)
    for name, item in globals_["state"].items():
        values = adam_state(globals_, name) if "optimizer" in name else item.state_dict()
        found |= {f"{name}.{key}": value for key, value in values.items()}
    return {name: value.detach().cpu() for name, value in found.items()}


def assert_same_numbers(
    first: dict, second: dict, rtol: float = 1e-11, atol: float = 1e-11, share: float = 0
) -> None:
    """Check that two runs computed the same `numbers`, up to rounding; the defaults are for `in_double`.

    share: of the elements of a tensor, how many may be ten times `atol` apart. Where a gradient is little
    more than rounding, Adam makes a step of either sign.
    """
    for name in ("global_step", "updates"):
        assert second[name] == first[name]
    for name in ("charts/episodic_return", "charts/episodic_length"):
        steps, others = ([step for step, _ in result["logged"].get(name, [])] for result in (first, second))
        assert steps == others
    actual, expected = numbers(second), numbers(first)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=10 * atol if share else atol)
    for name, values in expected.items() if share else ():
        apart = ~torch.isclose(actual[name], values, rtol=rtol, atol=atol)
        assert apart.sum() <= share * apart.numel(), (name, actual[name][apart], values[apart])


def assert_episodes_are_counted(result: dict, steps: Iterable[Iterable]) -> None:
    """Check what a run counts and logs against the envs.Row of each environment, step by step."""
    global_step, episodes, scores = 0, [], defaultdict(list)
    for rows in steps:
        global_step += sum(row.valid for row in rows)
        for env, row in enumerate(rows):
            scores[env] += [row.score] if row.valid else []
            if row.over:
                over = scores.pop(env)
                episodes.append((global_step, pytest.approx(sum(over), rel=1e-5), len(over)))
    assert result["global_step"] == global_step
    assert result["returns"] == [value for _, value, _ in episodes]
    logged = [result["logged"].get(f"charts/episodic_{name}", []) for name in ("return", "length")]
    assert logged == [[(step, value) for step, value, _ in episodes], [(step, n) for step, _, n in episodes]]


def empty_memory(agent: nn.Module, num_envs: int) -> Tensor:
    """The empty memory of an agent: of an LSTM, (num_envs, width), or of two, (2, num_envs, width)."""
    widths = [module.memory_dim for module in agent.modules() if hasattr(module, "memory_dim")]
    return torch.zeros(len(widths), num_envs, widths[0]).squeeze(0)


def recalled(agent: nn.Module, obs: Tensor, valid: Tensor) -> list[Tensor]:
    """What an agent with a memory says that has seen all of obs, (T, n, ...): the policy, values (T, n, 1).

    valid: (T, n), False where a step only resets; with the next one an episode begins.
    """
    keep = torch.cat([torch.zeros(1, valid.shape[1]), valid[:-1].float()])[..., None]
    *outputs, _ = agent(obs, keep, empty_memory(agent, valid.shape[1]))
    return outputs


class Turns(TorchFunctionMode):
    """Notes, for each batch that is fetched, whether a target moves before the next one.

    mark: a method that is called once for each. Also what random numbers are compared with, to act at random.
    """

    tau = 0.123

    def __init__(self, mark: Callable = Tensor.index_select):
        super().__init__()
        self.mark = mark
        self.noted: list[bool] = []
        self.shares: list[Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is self.mark:
            self.noted.append(False)
        elif function is Tensor.lerp_ and args[2] == self.tau:
            self.noted[-1] = True
        elif function in (Tensor.lt, Tensor.__lt__):
            self.shares.append(torch.as_tensor(args[1]).clone())
        return function(*args, **kwargs or {})


ATOMS = torch.arange(15) / 2 - 4


def shared_out(probs: Tensor, landed: Tensor) -> Tensor:
    """Probabilities of ATOMS, of what landed between or beyond them: Bellemare et al., equation 7."""
    targets = torch.zeros_like(probs)
    for row, (row_probs, places) in enumerate(zip(probs, landed.clip(-4, 3), strict=True)):
        for prob, place in zip(row_probs, places, strict=True):
            targets[row] += prob * (1 - (place - ATOMS).abs() / 0.5).clip(0, 1)
    return targets


def begin_anew(result: dict, noise: float) -> None:
    """Leave the optimizers of a run without a past, and its networks with noise on them: no two agree."""
    torch.manual_seed(7)
    for key, item in result["state"].items():
        if "optimizer" not in key:
            for param in item.parameters():
                param.data += noise * torch.randn_like(param)
        elif isinstance(item, nn.Module):
            item.load_state_dict({name: 0 * moment for name, moment in item.state_dict().items()})
        else:
            item.state.clear()


def assert_steps_by_hand(result: dict, by_hand: dict, rate: float) -> None:
    """Check the numbers of a run after a few gradient steps against those of a reference.

    Adam's first steps divide by gradients of which some are little more than rounding: a parameter may differ
    by a part of a step, hardly any does. Moments tell whether gradients are right.
    """
    actual, told = numbers(result), "is not the paper's; if you changed the loss, change the reference, too"
    for key, expected in numbers(by_hand).items():
        if key.startswith("losses.") or "optimizer." in key:
            options = {"rtol": 1e-3, "atol": 1e-4 if key.startswith("losses.") else 1e-5}
            torch.testing.assert_close(actual[key], expected, **options, msg=f"{key} {told}: {{}}".format)
        else:
            assert (actual[key] - expected).abs().double().mean() < 0.02 * rate, f"{key} {told}"
