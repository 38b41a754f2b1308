"""PPO with environments on the device: its tasks, ends of episodes, twin, capture, resume."""

import io
import json
import math
from contextlib import redirect_stdout
from unittest.mock import patch

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from capture import captured_on_cpu, without_inductor
from conftest import SAVED, assert_same_numbers, checkpoint, in_double, load, named, numbers, run
from test_on_policy import CLIPPED, assert_steps_of_the_paper, near_predictions
from torch import Tensor, nn
from torch._dynamo.utils import counters
from traffic import counted_traffic

from docs.examples.cart_pole import CartPole
from docs.examples.cartpole_swingup import CartpoleSwingup

PAIR = conftest.ON_DEVICE
CPU = torch.device("cpu")
# Two or four rollouts, of eight steps in three environments.
SIZES = ("--num-envs", 3, "--num-steps", 8, "--num-minibatches", 2, "--update-epochs", 2, "--no-anneal-lr")
SIZES += ("--log-every", 24)  # each rollout
TWO, FOUR = (*SIZES, "--total-timesteps", 48), (*SIZES, "--total-timesteps", 96)
SCRIPTED = ("--env-id", "test_on_device:Scripted")


class Scripted(nn.Module):
    """Each environment counts its steps, and episodes end by a script: at 2, at 3, or both at once at 4."""

    obs_dim, action_dim = 2, 1

    def __init__(self, num_envs: int, device: torch.device):
        super().__init__()
        self.num_envs = num_envs
        self.which = nn.Buffer(torch.arange(num_envs, device=device) % 3)
        self.steps = nn.Buffer(torch.zeros(num_envs, device=device))

    def seen(self, steps: Tensor) -> Tensor:
        return torch.stack([steps, self.which.float()], dim=1)

    def reset(self) -> Tensor:
        self.steps.zero_()
        return self.seen(self.steps)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        steps = self.steps + 1
        terminated = steps >= torch.where(self.which == 0, 2, torch.where(self.which == 2, 4, 99))
        truncated = steps >= torch.where(self.which == 1, 3, torch.where(self.which == 2, 4, 99))
        self.steps.copy_(steps * ~(terminated | truncated))
        return self.seen(self.steps), steps * 10 + actions[:, 0], terminated, truncated, self.seen(steps)


class Broken(Scripted):
    """The same, but an episode that begins in step 8, the last of a rollout, begins with NaN."""

    def __init__(self, num_envs: int, device: torch.device):
        super().__init__(num_envs, device)
        self.taken = nn.Buffer(torch.zeros(1, device=device))

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        obs, rewards, terminated, truncated, final_obs = super().step(actions)
        begins = (self.taken.add_(1) == 8) & (terminated | truncated)
        return obs.masked_fill(begins[:, None], math.nan), rewards, terminated, truncated, final_obs


class Simulator:
    """The same, as one that cannot be compiled and whose state is in no checkpoint."""

    def __init__(self, num_envs: int, device: torch.device):
        self.task = Scripted(num_envs, device)
        self.obs_dim, self.action_dim, self.reset = 2, 1, self.task.reset

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        *before, truncated, final_obs = self.task.step(actions)
        return *before, truncated if truncated.any().item() else torch.zeros_like(truncated), final_obs


# ---- Tasks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_pendulum_is_gymnasiums(dtype, tolerance):
    ours, theirs = load(PAIR[0])["Pendulum"](1, CPU).to(dtype), gym.make("Pendulum-v1").unwrapped
    ours.reset()
    theirs.reset(seed=0)
    torques, truncations = np.random.default_rng(0).uniform(-3, 3, 500), []
    for torque in torques:
        theirs.state = ours.state[0].double().numpy()
        _, reward, *_ = theirs.step(np.array([torque]))
        _, rewards, terminated, truncated, final_obs = ours.step(torch.tensor([[torque]], dtype=dtype))
        angle, speed = theirs.state
        expected = torch.tensor([[math.cos(angle), math.sin(angle), speed]], dtype=dtype)
        torch.testing.assert_close(final_obs, expected, rtol=0, atol=tolerance)
        assert abs(rewards.item() - reward) <= tolerance * 20 and not terminated
        truncations.append(truncated.item())
    assert [step for step, truncated in enumerate(truncations, start=1) if truncated] == [200, 400]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_cart_pole_of_the_examples_is_gymnasiums(dtype, tolerance):
    ours, theirs = CartPole(1, CPU).to(dtype), gym.make("CartPole-v1").unwrapped
    ours.reset()
    theirs.reset(seed=0)
    ends = []
    for push in np.random.default_rng(0).integers(2, size=500):
        theirs.state, theirs.steps_beyond_terminated = ours.state[0].double().numpy(), None
        _, reward, fallen, *_ = theirs.step(push)
        _, rewards, terminated, _, final_obs = ours.step(torch.tensor([[push]], dtype=dtype))
        expected = torch.tensor(theirs.state, dtype=dtype)[None]
        torch.testing.assert_close(final_obs, expected, rtol=0, atol=tolerance)
        assert rewards == reward and terminated == fallen
        ends.append(fallen)
    assert 10 < sum(ends) < 50
    ours.steps.fill_(499)
    assert ours.step(torch.zeros(1, 1))[3]


def test_the_swing_up_moves_as_lagranges_equations_say_and_has_its_rewards():
    task = CartpoleSwingup(100, CPU).double()
    torch.manual_seed(0)
    states = torch.randn(100, 4, dtype=torch.float64)
    force = 2 * torch.rand(100, dtype=torch.float64) - 1
    task.state.copy_(states)
    moved, _ = task.move(force[:, None])
    _, angle, speed, turning = states.unbind(1)
    # (M + m) x'' + m l cos(a) a'' = F + m l a'^2 sin(a);  m l cos(a) x'' + 4/3 m l^2 a'' = m g l sin(a)
    coupling = 0.05 * angle.cos()
    masses = torch.stack(
        [torch.full_like(angle, 1.1), coupling, coupling, torch.full_like(angle, 0.1 / 3)], 1
    )
    forces = torch.stack([10 * force + 0.05 * turning**2 * angle.sin(), 0.05 * 9.81 * angle.sin()], 1)
    by_hand = torch.linalg.solve(masses.view(-1, 2, 2), forces)
    inside = moved[:, 0].abs() < 1.8
    accelerations = (moved[:, 2:] - torch.stack([speed, turning], 1)) / 0.01
    torch.testing.assert_close(accelerations[inside], by_hand[inside], rtol=1e-9, atol=1e-9)
    assert not moved[~inside, 2].any() and not inside.all()  # stopped at the ends of the rail

    task.state.zero_()
    assert task.move(torch.zeros(100, 1))[1][0] == 1  # upright, at rest, in the middle
    task.state.copy_(torch.tensor([0, math.pi, 0, 0]))
    assert task.move(torch.zeros(100, 1))[1][0] < 1e-12  # hanging


def test_episodes_of_a_task_begin_in_the_step_that_ends_one():
    task = CartpoleSwingup(2, CPU)
    obs, steps = task.reset(), 0
    truncated = torch.zeros(2)
    while not truncated.any():
        obs, _, _, truncated, final_obs = task.step(torch.ones(2, 1))
        steps += 1
    assert steps == 1000 and (obs[:, 1] < -0.99).all() and not task.steps.any()
    assert not torch.equal(obs, final_obs) and not torch.equal(obs[0], obs[1])


# ---- Algorithm ---------------------------------------------------------------------------------------------
def test_moments_are_those_of_all_rows():
    moments, rows = load(PAIR[0])["Moments"](3, CPU), torch.randn(70, 3) * 5 + 100
    for part in rows.split([1, 9, 60]):
        moments.update(part)
    torch.testing.assert_close((moments.mean, moments.var), (rows.mean(0), rows.var(0, correction=0)))
    assert moments.count == 70
    torch.testing.assert_close(moments.standardise(rows + 1000), torch.full((70, 3), 10.0))


@pytest.mark.parametrize("name", PAIR)
def test_advantages_of_each_kind_of_end_are_those_by_hand(name):
    """Of a policy that does not learn, in the second rollout, which begins within episodes."""
    still = (*SCRIPTED, "--learning-rate", 0, "--update-epochs", 1)
    first, result = run(name, *SIZES, "--total-timesteps", 24, *still), run(name, *TWO, *still)
    args, agent = result["args"], result["state"]["agent"]
    rows = named(result["rollout"], result["columns"])
    counts = rows["obs"][..., 0]
    assert counts[:, 0].tolist() == [0, 1] * 4 and counts[:, 2].tolist() == [0, 1, 2, 3] * 2
    assert counts[:, 1].tolist() == [2, 0, 1, 2, 0, 1, 2, 0]
    ends, terminated = rows["done"][..., 0].bool(), rows["terminated"][..., 0].bool()
    torch.testing.assert_close(rows["next_obs"][..., 0], counts + 1)  # final observations, too
    assert torch.equal(ends[:, 0], terminated[:, 0]) and torch.equal(ends[:, 2], terminated[:, 2])
    assert ends[:, 1].any() and not terminated[:, 1].any()

    returns, running = [], torch.zeros(3)  # discounted, since the start of the episode
    for step in torch.cat([first["rollout"], result["rollout"]]):
        of_step = named(step, result["columns"])
        returns.append(of_step["rewards"][:, 0] + args.gamma * running)
        running = returns[-1] * (1 - of_step["done"][:, 0])
    deviation = torch.stack(returns).std(correction=0)

    batch = named(result["batch"].view(8, 3, -1), result["batch_columns"])
    acted_on = named(first["rollout"], first["columns"])["obs"].view(24, 2)

    def scale(obs: Tensor) -> Tensor:
        """Standardised by what the first rollout acted on."""
        return (obs - acted_on.mean(0)) / (acted_on.var(0, correction=0) + 1e-8).sqrt()

    torch.testing.assert_close(batch["obs"], scale(rows["obs"]), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        values, after = agent.critic(scale(rows["obs"])), agent.critic(scale(rows["next_obs"]))
    advantage = torch.zeros(3)
    for t in reversed(range(8)):
        reward = (rows["rewards"][t, :, 0] / deviation).clamp(-10, 10)
        delta = reward + args.gamma * torch.where(terminated[t], 0, after[t, :, 0]) - values[t, :, 0]
        advantage = delta + args.gamma * args.gae_lambda * torch.where(ends[t], 0, advantage)
        torch.testing.assert_close(batch["advantages"][t, :, 0], advantage, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch["targets"][t], batch["advantages"][t] + values[t])


@pytest.mark.parametrize("options", CLIPPED)
@pytest.mark.parametrize("name", PAIR)
def test_gradient_steps_are_those_of_the_paper(name, options):
    sizes = ("--num-envs", 3, "--num-steps", 20, "--total-timesteps", 60, "--num-minibatches", 1)
    weights = ("--ent-coef", 0.2, "--vf-coef", 0.7, "--learning-rate", 1e-4, "--no-anneal-lr", *options)
    result = run(name, *SCRIPTED, *sizes, *weights, "--update-epochs", 1)
    conftest.begin_anew(result, noise=0.02)
    rows = named(result["batch"].normal_(), result["batch_columns"])
    result |= {"known": near_predictions(result, rows)}
    assert_steps_of_the_paper(result, torch.randperm(60).chunk(3))


@pytest.mark.parametrize("name", PAIR)
def test_gradient_steps_are_so_many_at_a_falling_rate_and_a_loss_has_to_be_finite(name, refusal):
    args = (*FOUR, "--anneal-lr", "--learning-rate", 0.01)
    with patch("torch.randperm", wraps=torch.randperm) as shuffle:
        result = run(name, *args)
    assert (shuffle.call_count, result["updates"]) == (4 * 2, 4 * 2 * 2)
    assert conftest.gradient_steps(result, "agent") == 16
    steps, rates = zip(*result["logged"]["charts/learning_rate"], strict=True)
    assert steps == (24, 48, 72, 96) and rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert conftest.rate_of(result["state"]["optimizer"]) == pytest.approx(0.0025)
    assert " at step " in refusal(name, run, *args, "--learning-rate", 1e38)


def test_an_observation_that_no_loss_has_seen_has_to_be_finite_before_it_is_saved(refusal, tmp_path):
    args = (*SIZES, "--env-id", "test_on_device:Broken", *SAVED, "--total-timesteps", 24)
    assert "observation is not finite at step 24" in refusal(PAIR[0], run, *args, directory=tmp_path)
    assert not [*tmp_path.glob("runs/*/checkpoint.pt")]


def test_episodes_are_counted():
    result = run(PAIR[0], *FOUR, *SCRIPTED)
    # Episodes of 2, 3 and 4 steps; after 8, 16, 24, 32 steps of each as many have ended.
    ended = [[steps // length for length in (2, 3, 4)] for steps in (0, 8, 16, 24, 32)]
    number = np.diff(np.sum(ended, axis=1)).tolist()
    assert [count for count, _ in result["returns"]] == number
    totals = np.diff(np.array(ended) @ [30, 60, 100])  # and what actions add
    np.testing.assert_allclose([total for _, total in result["returns"]], totals, atol=25)
    for what, each in (("return", totals), ("length", np.diff(np.array(ended) @ [2, 3, 4]))):
        means = [value for _, value in result["logged"][f"charts/episodic_{what}"]]
        np.testing.assert_allclose(means, each / number, atol=25 / 8 if what == "return" else 1e-5)
    assert result["summary"]["episodes"] == sum(number)


def test_twin_compiled_or_captured_computes_what_the_eager_script_does():
    with in_double():
        assert_same_numbers(*(run(name, *FOUR, *SCRIPTED) for name in PAIR))
    plain, compiled = (run(PAIR[1], *FOUR, *SCRIPTED, *flags) for flags in ((), ("--compile",)))
    assert_same_numbers(plain, compiled, rtol=1e-3, atol=1e-4)
    with captured_on_cpu() as capture_times:
        captured = run(PAIR[1], *FOUR, *SCRIPTED, "--cudagraphs", cuda=True)
    assert len(capture_times) == 1 and captured["summary"]["cudagraphs"]  # one graph an iteration
    assert_same_numbers(plain, captured, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "task"), [(PAIR[0], ()), (PAIR[0], SCRIPTED), (PAIR[1], SCRIPTED)])
def test_a_run_that_goes_on_is_one_without_a_pause(name, task, tmp_path):
    whole = run(name, *FOUR, *task)
    first = run(name, *TWO, *task, *SAVED, "--eval-every", 24, "--eval-episodes", 2, directory=tmp_path)
    second = run(name, "--resume", checkpoint(tmp_path).parent, "--total-timesteps", 96, directory=tmp_path)
    assert (first["global_step"], second["global_step"]) == (48, 96)
    torch.testing.assert_close(numbers(second), numbers(whole), rtol=0, atol=0)


def test_checkpoints_of_either_are_evaluated_and_what_is_unknown_is_refused(tmp_path, refusal):
    run(PAIR[1], *TWO, *SCRIPTED, *SAVED, directory=tmp_path)
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        run(PAIR[0], "--evaluate", checkpoint(tmp_path), "--eval-episodes", 3)
    returns = json.loads(printed.getvalue())["eval_returns"]
    assert len(returns) == 3 and np.allclose(returns, [30, 60, 100], atol=5)  # 10 + 20 + ... and actions
    assert "Pendulum-v1" in refusal(PAIR[0], run, "--env-id", "Nothing-v0")
    assert "smaller divisor" in refusal(PAIR[0], run, "--num-envs", 3, "--num-steps", 5)


@pytest.mark.parametrize("name", PAIR)
def test_nothing_leaves_the_device_but_for_the_log(name):
    waits = []
    for rollouts in (2, 4):
        with counted_traffic() as traffic:
            run(name, *SIZES, "--log-every", 1000, "--total-timesteps", 24 * rollouts, cuda=True)
        waits.append([traffic.counts[event] for event in ("to the device", "to the host", "wait")])
    assert waits[0] == waits[1]


def test_a_run_of_a_class_of_ones_own_goes_on_compiled(tmp_path):
    args = ("--env-id", "docs.examples.cartpole_swingup:CartpoleSwingup", *SIZES, *SAVED)
    whole = run(PAIR[1], *args, "--total-timesteps", 96)
    run(PAIR[1], *args, "--total-timesteps", 48, directory=tmp_path)
    counters.clear()
    with without_inductor():
        goes_on = ("--resume", checkpoint(tmp_path).parent, "--total-timesteps", 96, "--compile")
        second = run(PAIR[1], *goes_on, directory=tmp_path)
    assert counters["stats"]["unique_graphs"]
    torch.testing.assert_close(numbers(second), numbers(whole), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_pendulum_is_swung_up():
    """By the eager script; the twin computes the same (see above)."""
    args = ("--num-envs", 256, "--total-timesteps", 600_000, "--eval-every", 10**6)
    result = run(PAIR[0], *args)
    assert np.mean(result["summary"]["eval_returns"]) > -400
