"""The examples of docs/changing.md: each diff fits both files, and the changed files compute the same."""

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from unittest.mock import patch

import numpy as np
import pytest
import torch
from capture import captured_on_cpu, without_inductor
from conftest import (
    EACH_STEP,
    ON_DEVICE,
    ROOT,
    SAVED,
    assert_same_numbers,
    changed,
    checkpoint,
    draws_of_a_twin,
    evaluation,
    in_double,
    named,
    play,
    run,
    scripted_world,
)
from envs import scripted_rows

SECTIONS = re.split(r"(?m)^## ", (ROOT / "docs" / "changing.md").read_text())
TWENTY = ("--learning-starts", 64, "--total-timesteps", 85)
REACHER = ("--env-id", "Reacher-v4", *TWENTY)
EXAMPLES = {
    "A layer": ("td3_continuous_action", *REACHER),
    "A loss": ("dqn", *EACH_STEP, *TWENTY),
    "The data": ("td3_continuous_action", *REACHER, "--num-envs", 3),
    "A schedule": ("sac_continuous_action", "--env-id", "Reacher-v4", *TWENTY),
}


def example(title: str, name: str, old: str = "", new: str = "") -> AbstractContextManager:
    """Have `run` take a script with the change of an example, in which a text is replaced."""
    section = next(text for text in SECTIONS if text.startswith(title)).replace(old, new)
    passages = []  # before and after
    for block in re.findall(r"```diff\n(.*?)```", section, flags=re.DOTALL):
        for hunk in block.split("\n\n"):
            where, lines = hunk.splitlines()[0], [line for line in hunk.splitlines() if line[:3] != " # "]
            if ".py" not in where or f"{name}.py" in where:
                for kinds in (" -", " +"):
                    passages += ["\n".join(line[1:] for line in lines if line[0] in kinds)]
    return changed(name, *passages)


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_same_diff_in_both_files_computes_the_same(title):
    name, *args = EXAMPLES[title]
    twin = f"{name}_torchcompile"
    with example(title, name), in_double(), draws_of_a_twin(name):
        eager = run(name, *args)
    with example(title, twin), in_double():
        assert_same_numbers(eager, run(twin, *args))
    with example(title, twin), without_inductor():
        torch._dynamo.reset()
        results = [run(twin, *args, *flags) for flags in ((), ("--compile",))]
    assert_same_numbers(*results, rtol=1e-6, atol=1e-6)
    assert eager["updates"] >= 20
    with in_double(), draws_of_a_twin(name):
        without = run(name, *args)["losses"]
    assert any(abs(loss - eager["losses"][key]) > 1e-6 for key, loss in without.items())


def test_an_eager_copy_that_draws_as_its_twin_has_its_numbers():
    name, *args = EXAMPLES["The data"]
    with example("Comparing", name), in_double():
        eager = run(name, *args)
    with in_double():
        assert_same_numbers(eager, run(f"{name}_torchcompile", *args))


def test_a_window_ends_with_its_episode_at_the_newest_row_and_where_a_run_was_resumed(tmp_path):
    """By hand: the target is that of a critic whose value is 0, or 1, everywhere."""
    name, num_envs, n_step, gamma, buffer_size = "td3_continuous_action", 3, 3, 0.9, 60
    args = ("--num-envs", num_envs, "--n-step", n_step, "--gamma", gamma, "--buffer-size", buffer_size)
    args += ("--batch-size", 2, "--learning-starts", 30, "--policy-noise", 0, "--checkpoint-every", 30)
    parts = []  # of the run, as it is begun and as it goes on after 45 steps
    with example("The data", name):
        parts.append(play(name, *args, "--total-timesteps", 45, directory=tmp_path))
        folder = next(tmp_path.glob("runs/*"))
        parts.append(play(name, "--resume", folder, "--total-timesteps", 75, directory=tmp_path))
    steps = []  # of each environment: reward, terminated, goes on
    for env in range(num_envs):
        rows = []
        for part, count in zip(parts, (45 // num_envs, 30 // num_envs), strict=True):
            real = (row for row in scripted_rows(part["envs"].envs[env].unwrapped.seeds[0]) if row.valid)
            rows += [[row.reward, row.terminated, not row.over] for row in islice(real, count)]
            rows[-1][2] = False  # the seam, or the newest row
        steps.append(rows)
    result, networks = parts[1], parts[1]["state"]

    def zero(*names: str) -> None:
        for param in (param for name in names for param in networks[name].fc3.parameters()):
            torch.nn.init.zeros_(param)

    zero("qf1", "qf1_target", "qf2_target")
    for step in range(75 // num_envs - buffer_size // num_envs, 75 // num_envs):
        for env in range(num_envs):
            reward, discount = 0.0, 1.0
            for later in islice(steps[env][step:], n_step):
                reward, discount, terminated = reward + discount * later[0], discount * gamma, later[1]
                if not later[2]:
                    break
            for value in (0.0, 1.0):
                for target in ("qf1_target", "qf2_target"):
                    torch.nn.init.constant_(networks[target].fc3.bias, value)
                zero("qf1")
                index = (step * num_envs + env) % buffer_size
                with patch("torch.randint", lambda *_, index=index, **__: torch.tensor([index, index])):
                    result["update"](False)
                expected = reward + value * discount * (not terminated)
                assert np.isclose(result["losses"]["qf1_loss"].item(), expected**2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["td3_continuous_action", "td3_continuous_action_torchcompile"])
def test_successes_are_logged(name):
    with example("A metric", name):
        result = run(name, "--env-id", "envs:Careless-v0", "--batch-size", 32, "--total-timesteps", 36)
    # Every second episode of three steps reaches its goal.
    expected = [(3 * count, pytest.approx(count // 2 / count)) for count in range(1, 13)]
    assert result["logged"]["charts/success_rate"] == expected


def test_an_agent_sees_some_parts_of_an_observation():
    keys = ('["observation", "desired_goal"]', '["seen"]')
    with example("Parts of", "dqn", *keys):
        result = run("dqn", "--env-id", "envs:PartsChoices-v0", "--total-timesteps", 40)
    assert result["envs"].single_observation_space.shape == (4,)


@pytest.mark.parametrize("name", ["sac_continuous_action_torchcompile", "td3_continuous_action", "dqn"])
def test_a_run_whose_buffer_is_a_file_goes_on_as_if_it_were_not(name, tmp_path):
    args = ("--buffer-size", 100, "--batch-size", 8, "--learning-starts", 20, *SAVED)
    results = []
    for each, change in (("memory", nullcontext), ("file", partial(example, "A large", name))):
        (folder := tmp_path / each).mkdir()
        with change():
            play(name, *args, "--total-timesteps", 40, directory=folder)
            run_folder = checkpoint(folder).parent
            results.append(play(name, "--resume", run_folder, "--total-timesteps", 80, directory=folder))
            copied = shutil.copy(checkpoint(folder), tmp_path / f"{each}.pt")
            assert evaluation(name, copied, *scripted_world(name), "--eval-episodes", 2)["eval_returns"]
        assert ("buffer" in torch.load(copied)) == (each == "memory")
    assert_same_numbers(*results, rtol=0, atol=0)
    assert torch.equal(results[0]["buffer"], results[1]["buffer"])


def test_masked_actions_are_never_taken():
    """By an environment that does not take them, in training and evaluation; entropy stays a number."""
    args = ("--env-id", "envs:Masked-v0", "--num-steps", 64, "--total-timesteps", 512)
    args += ("--eval-every", 512, "--eval-episodes", 2)
    results = []
    for name in ("ppo", "ppo_torchcompile"):
        with example("Invalid actions", name), in_double():
            results.append(run(name, *args))
        entropy = results[-1]["losses"]["entropy"].item()
        assert 0.3 < entropy < np.log(2) + 1e-3  # of two actions
        assert len(results[-1]["logged"]["charts/eval_return"]) == 1
    assert_same_numbers(*results)


def test_discrete_actions_on_the_device():
    """The eager file, its twin and the compiled twin compute the same; the first balances it for longer."""
    eager, twin = ON_DEVICE
    results = []
    args = ("--env-id", "docs.examples.cart_pole:CartPole", "--num-envs", 4, "--num-steps", 128)
    args += ("--gamma", 0.99, "--num-minibatches", 4, "--log-every", 512, "--no-anneal-lr")
    for name, *flags in ((eager,), (twin,), (twin, "--compile")):
        with example("Discrete", name), without_inductor():
            results.append(run(name, *args, "--total-timesteps", 2048, *flags))
    for result in results[1:]:
        assert_same_numbers(results[0], result, rtol=1e-3, atol=1e-4)
    with example("Discrete", eager):
        results.append(run(eager, *args, "--total-timesteps", 40_000))
    before, after = (results[index]["summary"]["episodic_return_10"] for index in (0, -1))
    assert after > 150 > 100 > before
    assert 0 < results[-1]["losses"]["entropy"] < np.log(2)


def test_a_simulator_that_cannot_be_compiled_is_trained_by_the_twin_and_begins_anew(tmp_path):
    name, args = "ppo_on_device", ("--env-id", "test_on_device:Simulator", "--num-envs", 3, "--num-steps", 8)
    args += ("--num-minibatches", 2, "--log-every", 24, "--total-timesteps", 96)
    with in_double():
        double = run(name, *args)
    with example("A simulator", f"{name}_torchcompile"), in_double():
        assert_same_numbers(double, run(f"{name}_torchcompile", *args))
    eager = run(name, *args, "--checkpoint-every", 96, directory=tmp_path)
    with example("A simulator", f"{name}_torchcompile"):
        with without_inductor():
            compiled = run(f"{name}_torchcompile", *args, "--compile")
        with captured_on_cpu() as capture_times:
            captured = run(f"{name}_torchcompile", *args, "--cudagraphs", cuda=True)
        assert len(capture_times) == 2 and captured["summary"]["cudagraphs"]
        # The warm-up has taken steps, so that episodes end at other times, but none of its own are counted.
        for result in (compiled, captured):
            assert abs(result["summary"]["episodes"] - eager["summary"]["episodes"]) <= 3
    resumed = run(
        name, "--resume", next(tmp_path.glob("runs/*")), "--total-timesteps", 120, directory=tmp_path
    )
    assert not named(resumed["rollout"], resumed["columns"])["obs"][0, :, 0].any()  # episodes' first steps


def many_agents() -> AbstractContextManager:
    """Have `run` take the twin with docs/examples/many_agents.diff."""
    hunks = re.split(r"(?m)^@@.*\n", (ROOT / "docs" / "examples" / "many_agents.diff").read_text())[1:]
    passages = [
        "\n".join(line[1:] for line in hunk.splitlines() if line[:1] in kinds)
        for hunk in hunks
        for kinds in (" -", " +")
    ]
    return changed("ppo_on_device_torchcompile", *passages)


def draws_of(*seeds: int) -> AbstractContextManager:
    """Let each agent draw noise and resets by a generator of its own; another draws the order of rows."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for_order, shuffle = torch.Generator().manual_seed(0), torch.randperm

    def drawn(draw: Callable, like: torch.Tensor) -> torch.Tensor:
        size = (like.numel() // like.shape[-1] // len(seeds), like.shape[-1])
        return torch.stack([draw(*size, generator=each) for each in generators], dim=1).view_as(like)

    functions = {"rand_like": partial(drawn, torch.rand), "randn_like": partial(drawn, torch.randn)}
    functions["randperm"] = lambda n, device: shuffle(n, generator=for_order)
    return patch.multiple(torch, **functions)


def test_many_agents_each_compute_what_one_alone_would():
    """The gradient of each is clipped by its own norm. What one alone is compared with crosses episodes."""
    twin, seeds = "ppo_on_device_torchcompile", (5, 6, 7)
    sizes = ("--num-steps", 128, "--num-minibatches", 2, "--max-grad-norm", 0.1, "--ent-coef", 0.1)

    def of_agents(number: int) -> tuple:
        of_all = ("--num-envs", 4 * number, "--total-timesteps", 1024 * number, "--log-every", 512 * number)
        return *sizes, *of_all

    together = (*of_agents(3), "--seed", 5, "--num-agents", 3)
    with many_agents():
        with draws_of(*seeds):
            result = run(twin, *together)
        short = (*together, "--num-steps", 16, "--total-timesteps", 384, "--log-every", 192)
        plain = run(twin, *short, "--eval-every", 384, "--eval-episodes", 6)
        with captured_on_cpu():
            captured = run(twin, *short, "--cudagraphs", cuda=True)
        assert_same_numbers(plain, captured, rtol=0, atol=0)
        with without_inductor():
            compiled = run(twin, *short, "--compile")
        assert_same_numbers(plain, compiled, rtol=1e-6, atol=1e-6)
    assert len(plain["eval_returns"]) == 6
    for place, seed in enumerate(seeds):
        with draws_of(seed):
            alone = run(twin, *of_agents(1), "--seed", seed)
        states = [each["state"]["agent"] for each in (result, alone)]
        weights = [state.state_dict() for state in (states[0][place], states[1])]
        torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)
        means = [each["state"]["obs_moments"].mean for each in (result, alone)]
        torch.testing.assert_close(means[0][place], means[1])
        returns = alone["logged"]["charts/episodic_return"]
        expected = [(3 * step, pytest.approx(value)) for step, value in returns]
        assert result["logged"][f"charts/episodic_return_{seed}"] == expected
    first = states[0][0].state_dict()
    assert not any(torch.equal(first[name], weights[0][name]) for name in first if name != "actor_logstd")
