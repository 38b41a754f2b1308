"""Whole runs of the PPO scripts under NEXT_STEP autoreset, on environments of which everything is known, and on Breakout."""

from collections.abc import Callable
from functools import cache
from itertools import islice, pairwise
from unittest.mock import patch

import envpool
import numpy as np
import pytest
import torch
from conftest import ON_POLICY, assert_same_numbers, having, load, plain_gae, play, run
from envs import Row, game_rows, scripted_rows
from torch.distributions import Categorical, Distribution, Normal
from torch.utils.tensorboard import SummaryWriter

each_script = pytest.mark.parametrize("name", ON_POLICY)
normalising = pytest.mark.parametrize("name", having("gae", "RunningMoments"))
# Environments, steps of a rollout and steps in all: rollouts that begin and end everywhere in the scripts.
CASES = [(1, 6, 6), (1, 6, 12), (1, 6, 18), (1, 6, 36), (3, 7, 21), (3, 7, 42), (3, 7, 84), (4, 1, 24), (2, 30, 120)]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
GAMMA, GAE_LAMBDA = 0.9, 0.8


def fresh(name: str, case: tuple[int, int, int], *args) -> dict:
    """A run in the scripted world with one gradient step a rollout."""
    sizes = zip(("--num-envs", "--num-steps", "--total-timesteps"), case, strict=True)
    once = ("--num-minibatches", 1, "--update-epochs", 1, "--gamma", GAMMA, "--gae-lambda", GAE_LAMBDA)
    return play(name, *(part for size in sizes for part in size), *once, *args)


@cache
def scripted(name: str, case: tuple[int, int, int]) -> dict:
    """A run whose agent does not change; tests share it, and leave it as it is."""
    return fresh(name, case, "--learning-rate", 0)


# ---- What should happen ----------------------------------------------------------------------------------------------
def seeds(result: dict) -> list[int]:
    """The seeds that the environments were given."""
    envs = result["envs"]
    return [env.unwrapped.seeds[0] for env in envs.envs] if "obs_moments" in result else envs.seeds


def history(result: dict) -> list[tuple[Row, ...]]:
    """All steps of a run as a row of each environment, and one more, which gives what the last rollout ended with."""
    args, rows = result["args"], scripted_rows if "obs_moments" in result else game_rows
    world = zip(*map(rows, seeds(result)), strict=True)
    steps, real = [], 0
    while real + args.num_envs * args.num_steps <= args.total_timesteps:
        rollout = list(islice(world, args.num_steps))
        real += sum(row.valid for step in rollout for row in step)
        steps += rollout
    return [*steps, next(world)]


def column(steps: list[tuple[Row, ...]], field: str) -> np.ndarray:
    """A field of all rows, (steps, environments, ...)."""
    return np.array([[getattr(row, field) for row in step] for step in steps])


def acted_at(steps: list[tuple[Row, ...]]) -> list[np.ndarray]:
    """The observations at which the policy acted, or would have next."""
    return [row.obs.ravel() for step in steps for row in step if row.valid]


def seen(result: dict) -> torch.Tensor:
    """The observations of the last rollout and after it as the agent sees them, (num_steps + 1, num_envs, ...)."""
    steps = history(result)
    window = range(len(steps) - result["args"].num_steps - 1, len(steps))
    if "obs_moments" not in result:
        return torch.from_numpy(column([steps[index] for index in window], "obs")).movedim(2, -1)
    moments = [(np.mean(rows, axis=0), np.var(rows, axis=0)) for rows in (acted_at(steps[: index + 1]) for index in window)]
    expected = [
        [(row.obs.ravel() - mean) / np.sqrt(variance + 1e-8) for row in steps[index]]
        for index, (mean, variance) in zip(window, moments, strict=True)
    ]
    return torch.tensor(np.clip(expected, -10, 10), dtype=torch.float32)


def discounted_returns(steps: list[tuple[Row, ...]]) -> list[float]:
    """The sum of discounted rewards since the start of its episode, after each real step."""
    sums = []
    for rows in zip(*steps, strict=True):
        running = 0.0
        for row in rows:
            running = row.reward + GAMMA * running if row.valid else 0.0
            sums += [running] if row.valid else []
    return sums


def rewards_of(result: dict) -> np.ndarray:
    """The rewards of the last rollout as the agent learns from them."""
    steps = history(result)[:-1]
    rewards = column(steps[-result["args"].num_steps :], "reward")
    if "return_moments" not in result:
        return rewards
    return np.clip(rewards / np.sqrt(np.var(discounted_returns(steps)) + 1e-8), -10, 10)


def actions_of(result: dict) -> torch.Tensor:
    """The actions of the last rollout and a row more, (num_steps + 1, num_envs, ...)."""
    return torch.from_numpy(result["rollout_actions"]) if "rollout_actions" in result else result["rollout"][:, :, 0]


def policy_and_values(agent: Callable, obs: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
    """What an agent gives for observations (batch, ...)."""
    outputs, *log_std, values = agent(obs)
    return Normal(outputs, log_std[0].exp()) if log_std else Categorical(logits=outputs), values


def of_agent(result: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the actions and values, (num_steps + 1, num_envs), at what is seen in the last rollout."""
    obs, actions = seen(result), actions_of(result)
    with torch.no_grad():
        policy, values = policy_and_values(result["agent"], obs.flatten(0, 1))
        log_prob = policy.log_prob(actions.flatten(0, 1)).view(*obs.shape[:2], -1).sum(2)
    return log_prob, values.view(obs.shape[:2])


def learnt_from(result: dict) -> dict[str, np.ndarray]:
    """The last columns of the batch by name, (num_steps, num_envs)."""
    columns = result["batch"][:, -5:].view(result["args"].num_steps, -1, 5).unbind(2)
    names = ("log_prob", "advantages", "returns", "values", "valid")
    return {name: column.numpy() for name, column in zip(names, columns, strict=True)}


# ---- Rollouts --------------------------------------------------------------------------------------------------------
@each_case
@each_script
def test_rollout_holds_what_happened(name, case):
    result = scripted(name, case)
    num_steps, steps = result["args"].num_steps, history(result)[-result["args"].num_steps - 1 :]
    np.testing.assert_array_equal(result["rollout_valid"], column(steps, "valid"))
    np.testing.assert_array_equal(result["rollout_terminated"][:-1], column(steps[:-1], "terminated"))
    np.testing.assert_allclose(result["rollout_rewards"][:-1], rewards_of(result), rtol=1e-5, atol=1e-6)
    obs = torch.as_tensor(result["rollout_obs"])
    torch.testing.assert_close(obs, seen(result), rtol=1e-4, atol=1e-4)
    # The observations belong to the rows of the batch.
    if "obs_moments" in result:
        obs_of_batch = result["batch"][:, : obs.shape[2]].view(num_steps, -1, obs.shape[2])
        torch.testing.assert_close(obs_of_batch, obs[:-1], rtol=0, atol=0)


@each_script
def test_cases_are_awkward(name):
    """Rollouts begin and end with rows that are not valid, and have some in several environments at once and in a row."""
    masked = [scripted(name, case)["rollout_valid"] == 0 for case in CASES]
    assert any(rows[0].any() for rows in masked)
    assert any(rows[-1].any() for rows in masked)
    assert any((rows.sum(axis=1) > 1).any() for rows in masked)
    assert any((first & second).any() for rows in masked for first, second in zip(rows, rows[2:], strict=False))


@each_case
@each_script
def test_advantages_and_returns_never_see_a_dummy_step(name, case):
    result = scripted(name, case)
    steps = history(result)[-result["args"].num_steps - 1 :]
    valid, terminated = column(steps, "valid"), column(steps[:-1], "terminated")
    values = of_agent(result)[1].numpy()
    advantages = plain_gae(rewards_of(result), values, terminated, valid, GAMMA, GAE_LAMBDA)
    batch, rows = learnt_from(result), valid[:-1]
    np.testing.assert_array_equal(batch["valid"], rows)
    expected = {"values": values[:-1], "advantages": advantages, "returns": values[:-1] + advantages}
    for part, expected_column in expected.items():
        np.testing.assert_allclose(batch[part][rows], expected_column[rows], rtol=1e-4, atol=1e-4, err_msg=part)


@each_case
@each_script
def test_actions_are_those_of_the_policy(name, case):
    result = scripted(name, case)
    num_envs, num_steps, _ = case
    valid, actions = result["rollout_valid"][:-1] == 1, actions_of(result)
    if "obs_moments" in result:
        space = result["envs"].single_action_space
        for env in range(num_envs):
            sent = actions[:-1, env][valid[:, env]].numpy().clip(space.low, space.high)
            # Only real steps reach an environment of Gymnasium.
            given = result["envs"].envs[env].unwrapped.actions
            np.testing.assert_array_equal(sent, given[len(given) - len(sent) :])
    else:
        np.testing.assert_array_equal(actions[:-1], result["envs"].actions[-num_steps:])
    np.testing.assert_allclose(learnt_from(result)["log_prob"], of_agent(result)[0][:-1], rtol=1e-4, atol=1e-4)
    # The agent has not changed: neither has a probability.
    assert abs(result["losses"]["old_approx_kl"].item()) < 1e-4


@normalising
def test_policy_acts_at_what_it_sees(name):
    orthogonal = torch.nn.init.orthogonal_
    # The means of a new agent hardly differ between observations.
    with patch("torch.nn.init.orthogonal_", lambda weight, _: orthogonal(weight, 2.0)):
        result = fresh(name, (3, 500, 1500), "--learning-rate", 0)
    with torch.no_grad():
        means = result["agent"].actor_mean(torch.from_numpy(result["rollout_obs"][:-1])).numpy()
    noise = result["rollout_actions"][:-1] - means
    assert means.std() > 0.5
    assert abs(noise.mean()) < 4 / noise.size**0.5
    assert abs(noise.std() - 1) < 4 / (2 * noise.size) ** 0.5


@each_case
@each_script
def test_episodes_and_steps_are_counted(name, case):
    result = scripted(name, case)
    running, real, expected = [[] for _ in range(case[0])], 0, []
    for step in history(result)[:-1]:
        real += sum(row.valid for row in step)
        for scores, row in zip(running, step, strict=True):
            scores += [row.score] if row.valid else []
            if row.over:
                expected.append((real, pytest.approx(sum(scores)), len(scores)))
                scores.clear()
    assert result["global_step"] == real <= case[2]
    assert result["episodes"] == expected


def test_whole_games_were_counted():
    """Some with lost lives, some cut short, and some of a return beyond their clipped rewards."""
    lengths = [length for _, _, length in scripted("ppo_atari_envpool", (2, 30, 120))["episodes"]]
    assert {1, 3, 5, 6} <= set(lengths)


@each_case
@normalising
def test_statistics_are_those_of_real_steps(name, case):
    result = scripted(name, case)
    steps = history(result)
    moments = result["obs_moments"], result["return_moments"]
    for moment, rows in zip(moments, (acted_at(steps), discounted_returns(steps[:-1])), strict=True):
        assert moment.count == len(rows)
        np.testing.assert_allclose(moment.mean, np.mean(rows, axis=0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(moment.std(), np.sqrt(np.var(rows, axis=0) + 1e-8), rtol=1e-9)


@each_script
def test_seeds_of_environments(name):
    given = [seeds(scripted(name, (8, 1, 8))), seeds(fresh(name, (8, 1, 8), "--seed", 2))]
    assert len({*given[0], *given[1]}) == 16
    assert not any(after == before + 1 for before, after in pairwise(given[0]))


@each_script
def test_a_seed_repeats_a_run(name):
    first = fresh(name, (3, 7, 42))
    assert_same_numbers(first, fresh(name, (3, 7, 42)), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_same_numbers(first, fresh(name, (3, 7, 42), "--seed", 2))


# ---- Gradient steps --------------------------------------------------------------------------------------------------
def optimizer_steps(result: dict) -> int:
    """The steps that the optimizer has made."""
    return int(next(tensor for name, tensor in result["tensors"].items() if ".step." in name))


@pytest.mark.parametrize("norm_adv", ["--norm-adv", "--no-norm-adv"])
@each_script
def test_masked_rows_weigh_nothing(name, norm_adv):
    """A gradient step is the same whatever they hold, and another if a valid row changes."""
    steps = []
    for spoil_valid in (None, 0.0, 1.0):
        result = fresh(name, (3, 7, 84), norm_adv)
        batch = result["batch"]
        rows = batch[:, -1] == spoil_valid
        assert spoil_valid is None or rows.any()
        # Neither the column `valid` nor the discrete actions, which have to be ones that there are.
        spoilt = slice(0 if "obs_moments" in result else 1, -1)
        batch[rows, spoilt] = 3 + torch.randn_like(batch[rows, spoilt])
        if "obs_moments" not in result:
            result["rollout_obs"][:-1].view(-1, 84, 84, 4)[rows] = 77
        result["update"](torch.arange(len(batch)))
        steps.append(result["agent"].state_dict() | result["losses"])
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-5, atol=1e-7)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(steps[2], steps[0], rtol=1e-5, atol=1e-7)


def loss_by_hand(agent: Callable, result: dict) -> torch.Tensor:
    """The loss of the last rollout, from its valid rows alone."""
    args, valid = result["args"], torch.from_numpy(result["rollout_valid"][:-1] == 1)
    old = {part: torch.from_numpy(rows)[valid] for part, rows in learnt_from(result).items()}
    policy, values = policy_and_values(agent, seen(result)[:-1][valid])
    log_prob = policy.log_prob(actions_of(result)[:-1][valid]).view(len(values), -1).sum(1)
    ratio, low, high = (log_prob - old["log_prob"]).exp(), 1 - args.clip_coef, 1 + args.clip_coef
    advantages = (old["advantages"] - old["advantages"].mean()) / (old["advantages"].std() + 1e-8)
    surrogate = torch.minimum(ratio * advantages, ratio.clip(low, high) * advantages).mean()
    clipped = old["values"] + (values - old["values"]).clip(-args.clip_coef, args.clip_coef)
    errors = torch.maximum((values - old["returns"]) ** 2, (clipped - old["returns"]) ** 2)
    entropy = policy.entropy().view(len(values), -1).sum(1).mean()
    return -surrogate - args.ent_coef * entropy + args.vf_coef * errors.mean() / 2


@each_script
def test_gradient_steps_are_those_of_the_paper(name):
    case, args = (3, 7, 21), ("--ent-coef", 0.2, "--vf-coef", 0.7, "--max-grad-norm", 0.3, "--clip-coef", 0.01)
    # So that some of the values and ratios, and not all of them, move beyond the clip.
    rate, epochs = 2e-3 if "obs_moments" in scripted(name, case) else 1e-4, 3
    actual = fresh(name, case, *args, "--learning-rate", rate, "--update-epochs", epochs)
    start = fresh(name, case, *args, "--learning-rate", 0)
    agent = start["agent"].requires_grad_(True)
    optimizer = torch.optim.Adam(agent.parameters(), lr=rate, eps=1e-5)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss_by_hand(agent, start).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), start["args"].max_grad_norm)
        optimizer.step()
    assert 0.1 < actual["losses"]["clipfrac"] < 1
    torch.testing.assert_close(actual["agent"].state_dict(), agent.state_dict(), rtol=1e-3, atol=0.05 * rate)


@pytest.mark.parametrize(("target_kl", "epochs"), [((), 3), (("--target-kl", 0), 1), (("--target-kl", 1e9), 3)])
@each_script
def test_number_of_gradient_steps(name, target_kl, epochs):
    with patch("torch.randperm", wraps=torch.randperm) as shuffle:
        result = fresh(name, (3, 8, 100), "--num-minibatches", 4, "--update-epochs", 3, *target_kl)
    rollouts = (len(history(result)) - 1) // 8
    assert rollouts > 3
    assert result["updates"] == optimizer_steps(result) == rollouts * epochs * 4
    assert shuffle.call_count == rollouts * epochs


@pytest.mark.parametrize("anneal", [True, False])
@each_script
def test_learning_rate_falls_to_zero(name, anneal):
    with patch.object(SummaryWriter, "add_scalar") as log:
        result = fresh(name, (1, 4, 200), "--learning-rate", 0.001, *([] if anneal else ["--no-anneal-lr"]))
    rates = [call.args[1] for call in log.call_args_list if call.args[0] == "charts/learning_rate"]
    ends = [call.args[2] for call in log.call_args_list if call.args[0] == "charts/learning_rate"]
    # That of a rollout is the one at its first step.
    expected = [0.001 * (1 - start / 200 if anneal else 1) for start in (0, *ends[:-1])]
    assert rates == pytest.approx(expected)
    assert not anneal or min(expected) < 0.00005
    assert any(90 < start < 110 for start in ends)
    applied = result["annealed_lr"].item() if "annealed_lr" in result else result["optimizer"].param_groups[0]["lr"]
    assert applied == pytest.approx(expected[-1])


@normalising
def test_policy_acts_alike_on_either_device(name):
    first, second = (fresh(name, (3, 16, 200), "--act-device", device) for device in ("cpu", "device"))
    assert (first["act_on_cpu"], second["act_on_cpu"]) == (True, False)
    assert_same_numbers(first, second, atol=3e-4)  # a step of the learning rate, as in test_twins.py


# ---- Values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("probe", "values"),
    [
        ("ObservationReward", {-0.8: -0.8, -0.3: -0.3, 0.2: 0.2, 0.7: 0.7}),
        ("LateReward", {0: 0.25, 1: 0.5, 2: 1}),
        ("Truncated", {0: 2}),
    ],
)
@normalising
def test_learnt_values_are_the_known_ones(name, probe, values):
    args = ["--env-id", f"envs:{probe}-v0", "--gamma", 0.5, "--total-timesteps", 4000, "--num-steps", 256]
    result = run(name, *args, "--num-minibatches", 8, "--update-epochs", 4, "--learning-rate", 3e-3)
    obs = (np.array([*values])[:, None] - result["obs_moments"].mean) / result["obs_moments"].std()
    with torch.no_grad():
        learnt = result["agent"].critic(torch.tensor(obs, dtype=torch.float32))[:, 0].numpy()
    # Rewards, and so values, are in units of the deviation of returns.
    np.testing.assert_allclose(learnt * result["return_moments"].std(), [*values.values()], rtol=0, atol=0.1)


# ---- Breakout --------------------------------------------------------------------------------------------------------
class Recorded:
    """Passes on to EnvPool's environments, and keeps what they answer."""

    def __init__(self, *args, make=envpool.make, **options):
        self.envs, self.steps = make(*args, **options), []

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def step(self, actions):
        answer = self.envs.step(actions)
        self.steps.append(answer[1:])
        return answer


@pytest.mark.parametrize("name", having("categorical_log_prob")[:1])
def test_episodes_of_breakout_are_whole_unclipped_games(name):
    args = ("--total-timesteps", 10_000, "--num-steps", 249, "--update-epochs", 1, "--num-minibatches", 1)
    with patch("envpool.make", Recorded):
        result = run(name, *args, "--learning-rate", 0)
    returns, lengths, ended, expected, lost = [0.0] * 8, [0] * 8, [False] * 8, [], 0
    real = 0
    for rewards, terminated, truncated, info in result["envs"].steps:
        real += 8 - sum(ended)
        for env in range(8):
            assert not ended[env] or rewards[env] == info["reward"][env] == 0
            returns[env] += float(info["reward"][env])
            lengths[env] += not ended[env]
            ended[env] = bool(terminated[env] or truncated[env])
            if info["terminated"][env] or truncated[env]:
                expected.append((real, returns[env], lengths[env]))
                returns[env], lengths[env] = 0.0, 0
            else:
                lost += ended[env]
    assert real > 9_000
    assert lost > len(expected) > 10
    assert result["episodes"] == expected


@pytest.mark.parametrize("name", ["ppo_atari_envpool", "ppo_atari_envpool_torchcompile"])
def test_a_game_is_evaluated_to_its_end_by_a_policy_that_never_serves(name, tmp_path):
    script = load(name)
    actions = []

    def idle(obs: np.ndarray) -> np.ndarray:
        actions.append(np.zeros(1, np.int32))
        return actions[-1]

    returns = list(script["evaluate"](script["Args"](env_id="Breakout-v5", seed=11, eval_episodes=2), tmp_path, idle))
    # Without a ball nothing happens until the limit of 27,000 steps; each of five lives takes some 25.
    assert len(returns) == 2
    assert 2 * 5 * 10 < len(actions) < 2 * 5 * 100
