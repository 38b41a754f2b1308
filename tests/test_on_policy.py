"""PPO on environments and batches of which everything is known, with NEXT_STEP autoreset, and on Breakout."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from unittest.mock import patch

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    ON_POLICY,
    adam_state,
    assert_same_numbers,
    assert_steps_by_hand,
    changed,
    forget,
    having,
    load,
    numbers,
    plain_gae,
    play,
    run,
)
from envs import Row, game_rows, scripted_rows
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

each_script = pytest.mark.parametrize("name", ON_POLICY)
normalising = pytest.mark.parametrize("name", having("class RunningMoments"))
# Environments, steps of a rollout and steps in all: rollouts that begin and end everywhere in the scripts.
# Some begin or end with a row that is not valid, or have such rows in several environments at once.
CASES = [
    (1, 6, 6),
    (1, 6, 12),
    (1, 6, 18),
    (1, 6, 36),
    (3, 7, 21),
    (3, 7, 42),
    (3, 7, 84),
    (4, 1, 24),
    (2, 30, 120),
]
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


# ---- What should happen ------------------------------------------------------------------------------------
def seeds(result: dict) -> list[int]:
    """The seeds that the environments were given."""
    envs = result["envs"]
    return [env.unwrapped.seeds[0] for env in envs.envs] if "obs_moments" in result else envs.unwrapped.seeds


def history(result: dict) -> list[tuple[Row, ...]]:
    """All steps of a run as a row of each environment, and one more: what the last rollout ended with."""
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


def seen(result: dict) -> Tensor:
    """What the agent sees in the last rollout and after it, (num_steps + 1, num_envs, ...)."""
    steps, expected = history(result), []
    window = range(len(steps) - result["args"].num_steps - 1, len(steps))
    if "obs_moments" not in result:
        return torch.from_numpy(column([steps[index] for index in window], "obs")).movedim(2, -1)
    for index in window:
        rows = acted_at(steps[: index + 1])
        mean, std = np.mean(rows, axis=0), np.sqrt(np.var(rows, axis=0) + 1e-8)
        expected.append([(row.obs.ravel() - mean) / std for row in steps[index]])
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


def actions_of(result: dict) -> Tensor:
    """The actions of the last rollout and a row more, (num_steps + 1, num_envs, ...)."""
    return torch.as_tensor(result.get("rollout_actions", result["rollout"][:, :, 0]))


def policy_and_values(agent: Callable, obs: Tensor) -> tuple[Distribution, Tensor]:
    """What an agent gives for observations (batch, ...)."""
    outputs, *log_std, values = agent(obs)
    return Normal(outputs, log_std[0].exp()) if log_std else Categorical(logits=outputs), values


def of_agent(result: dict) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the actions and values, (num_steps + 1, num_envs), in the last rollout."""
    obs, actions = seen(result), actions_of(result)
    with torch.no_grad():
        policy, values = policy_and_values(result["agent"], obs.flatten(0, 1))
        log_prob = policy.log_prob(actions.flatten(0, 1)).view(*obs.shape[:2], -1).sum(2)
    return log_prob.numpy(), values.view(obs.shape[:2]).numpy()


def learnt_from(result: dict) -> dict[str, np.ndarray]:
    """The last columns of the batch by name, (num_steps, num_envs)."""
    columns = result["batch"][:, -5:].view(result["args"].num_steps, -1, 5).unbind(2)
    names = ("log_prob", "advantages", "returns", "values", "valid")
    return {name: column.numpy() for name, column in zip(names, columns, strict=True)}


# ---- Rollouts ----------------------------------------------------------------------------------------------
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
    if "obs_moments" in result:  # the batch has them, too
        obs_of_batch = result["batch"][:, : obs.shape[2]].view(num_steps, -1, obs.shape[2])
        torch.testing.assert_close(obs_of_batch, obs[:-1], rtol=0, atol=0)


@each_case
@each_script
def test_the_batch_never_sees_a_dummy_step(name, case):
    result = scripted(name, case)
    steps = history(result)[-result["args"].num_steps - 1 :]
    valid, terminated = column(steps, "valid"), column(steps[:-1], "terminated")
    log_prob, values = of_agent(result)
    advantages = plain_gae(rewards_of(result), values, terminated, valid, GAMMA, GAE_LAMBDA)
    batch, rows = learnt_from(result), valid[:-1]
    np.testing.assert_array_equal(batch["valid"], rows)
    expected = {"log_prob": log_prob[:-1], "values": values[:-1], "advantages": advantages}
    expected["returns"] = values[:-1] + advantages
    for part, whole in expected.items():
        np.testing.assert_allclose(batch[part][rows], whole[rows], rtol=1e-4, atol=1e-4, err_msg=part)
    explained = 1 - np.var(advantages[rows]) / max(np.var(expected["returns"][rows]), 1e-8)
    np.testing.assert_allclose(result["losses"]["explained_variance"], explained, rtol=1e-3, atol=1e-3)


@each_case
@each_script
def test_actions_are_those_that_the_environments_got(name, case):
    result = scripted(name, case)
    actions = actions_of(result)[:-1].numpy()
    if "obs_moments" not in result:
        np.testing.assert_array_equal(actions, result["envs"].unwrapped.actions[-case[1] :])
        return
    for index, env in enumerate(result["envs"].envs):
        # Only real steps reach an environment of Gymnasium.
        sent, space = actions[:, index][result["rollout_valid"][:-1, index] == 1], env.unwrapped.action_space
        given = env.unwrapped.actions[len(env.unwrapped.actions) - len(sent) :]
        np.testing.assert_array_equal(sent.clip(space.low, space.high), given)


@normalising
def test_policy_acts_at_what_it_sees(name):
    # The means of a new agent hardly differ between observations, and its deviation is 1.
    deviation = changed(name, "torch.zeros(1, action_dim,", "torch.full((1, action_dim), -1.0,")
    with changed(name, "std=0.01)", "std=2.0)"), deviation:
        result = fresh(name, (3, 500, 1500), "--learning-rate", 0)
    with torch.no_grad():
        means = result["agent"].actor_mean(torch.from_numpy(result["rollout_obs"][:-1])).numpy()
    noise = (result["rollout_actions"][:-1] - means) * np.e
    assert means.std() > 0.5
    assert abs(noise.mean()) < 4 / noise.size**0.5
    assert abs(noise.std() - 1) < 4 / (2 * noise.size) ** 0.5


@pytest.mark.parametrize("name", having("class Games"))
def test_actions_have_the_frequencies_of_the_softmax(name):
    logits, draws = torch.tensor([0.0, 1, -2, 0.5]), 40_000
    act = fresh(name, (1, 4, 4))["act"]
    act.__globals__["agent"] = lambda obs: (logits.expand(draws, 4), torch.arange(float(draws)))
    actions, log_prob, values = act(None).unbind(1)
    probabilities = logits.softmax(0)
    error = actions.long().bincount(minlength=4) / draws - probabilities
    assert (error.abs() < 4 * (probabilities * (1 - probabilities) / draws).sqrt()).all()
    torch.testing.assert_close(log_prob, probabilities.log()[actions.long()])
    assert torch.equal(values, torch.arange(float(draws)))


@each_case
@each_script
def test_episodes_and_steps_are_counted(name, case):
    result = scripted(name, case)
    running, real, returns, lengths = [[] for _ in range(case[0])], 0, [], []
    for step in history(result)[:-1]:
        real += sum(row.valid for row in step)
        for scores, row in zip(running, step, strict=True):
            scores += [row.score] if row.valid else []
            if row.over:
                returns.append((real, pytest.approx(sum(scores), rel=1e-5)))
                lengths.append((real, len(scores)))
                scores.clear()
    assert result["global_step"] == real <= case[2]
    assert result["logged"].get("charts/episodic_return", []) == returns
    assert result["logged"].get("charts/episodic_length", []) == lengths
    assert result["returns"] == [value for _, value in returns]
    if name.startswith("ppo_atari") and case == CASES[-1]:
        # Whole games, some with lost lives, some cut short, some of a return beyond their clipped rewards.
        assert {1, 3, 5, 6} <= {length for _, length in lengths}


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
def test_a_seed_repeats_a_run_and_no_other_seed_shares_an_environment(name):
    first, again, other = (fresh(name, (8, 7, 112), "--seed", seed) for seed in (1, 1, 2))
    assert_same_numbers(first, again, rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_same_numbers(first, other)
    assert len({*seeds(first), *seeds(other)}) == 16
    assert not any(after == before + 1 for before, after in pairwise(seeds(first)))


# ---- The twin's policy in NumPy ----------------------------------------------------------------------------
NUMPY = "ppo_continuous_action_torchcompile"
OTHER_LAYERS = {
    "another activation": ("nn.Tanh(),", "nn.ReLU(),"),
    "a layer without bias": ("self.actor_logstd = ", "self.actor_mean[2].bias = None; self.actor_logstd = "),
    "a module of one's own": (
        "self.actor_mean = nn.Sequential(",
        'own = type("Own", (nn.Sequential,), {"forward": lambda s, x: 2 * nn.Sequential.forward(s, x)})\n'
        "        self.actor_mean = own(",
    ),
}


def test_policy_in_numpy_is_the_actor(capfd):
    result = fresh(NUMPY, (3, 7, 42))
    assert result["policy"] is result["numpy_policy"]
    assert "acting in PyTorch" not in capfd.readouterr().err
    for param in result["agent"].actor_mean.parameters():  # biases that matter, and outputs of some size
        param.data.normal_()
    obs = torch.randn(7, 4)
    actions = torch.from_numpy(result["numpy_policy"](obs.numpy()))
    torch.testing.assert_close(actions, result["agent"].actor_mean(obs))
    assert np.array_equal(result["torch_policy"](obs.numpy()), result["agent"].actor_mean(obs).detach())


@pytest.mark.parametrize("layers", OTHER_LAYERS)
def test_a_policy_that_numpy_does_not_know_acts_in_pytorch(layers, capfd):
    results = []
    for name in (NUMPY.removesuffix("_torchcompile"), NUMPY):
        with changed(name, *OTHER_LAYERS[layers]):
            results.append(fresh(name, (3, 16, 200)))
    assert capfd.readouterr().err.count("acting in PyTorch") == 1
    assert results[1]["policy"] is results[1]["torch_policy"]
    assert_same_numbers(*results, atol=3e-4)  # a step of the learning rate, as in test_twins.py


def test_many_environments_act_in_pytorch(capfd):
    assert fresh(NUMPY, (257, 2, 514))["policy"].__name__ == "torch_policy"
    assert capfd.readouterr().err.count("acting in PyTorch") == 1


# ---- Advantages and gradient steps -------------------------------------------------------------------------
@each_script
def test_gae(name):
    """In rollouts with ends of both kinds, each followed by a row that is not valid and does not count."""
    result = fresh(name, (3, 7, 21))
    for steps in (1, 2, 7, 128, 300):
        torch.manual_seed(steps)
        valid, terminated = torch.ones(steps + 1, 3).double(), torch.ones(steps, 3).double()
        rewards, values = torch.randn(steps, 3).double(), torch.randn(steps + 1, 3).double()
        valid[0, 0] = 0
        for step in range(steps):
            ends = valid[step] * (torch.rand(3) < 0.3)
            valid[step + 1] = 1 - ends
            real = valid[step] == 1
            terminated[step][real] = (ends * (torch.rand(3) < 0.5))[real]
            values[step + 1][real & (terminated[step] == 1)] = 1e6
        rewards[valid[:-1] == 0] = 1e6
        result["args"].num_steps = steps
        expected = plain_gae(rewards, values, terminated, valid, GAMMA, GAE_LAMBDA)
        actual = result["gae"](rewards, values, terminated, valid)
        torch.testing.assert_close(actual, torch.from_numpy(expected))


def known(name: str, *args) -> dict:
    """A run on the eve of gradient steps on random rows, some not valid, whose optimizer has no past."""
    result = fresh(name, (3, 20, 60), "--ent-coef", 0.2, "--vf-coef", 0.7, "--clip-coef", 0.2, *args)
    agent, batch = result["agent"], result["batch"]
    forget(result["optimizer"])
    torch.manual_seed(3)
    for param in agent.parameters():
        param.data.add_(0.02 * torch.randn_like(param))
    batch.normal_()
    batch[:, -1] = (torch.rand(60) < 0.7).float()
    if "obs_moments" not in result:
        result["rollout_obs"].random_(256)
        batch[:, 0] = torch.randint(3, (60,)).float()
    # So that some of the ratios and values, not all of them, are beyond the clip.
    with torch.no_grad():
        obs, actions = known_batch(result)
        policy, values = policy_and_values(agent, obs)
        log_prob = policy.log_prob(actions).view(60, -1).sum(1)
    batch[:, -5] = log_prob + 0.4 * torch.randn(60)
    batch[:, -2] = values + 0.2 * torch.randn(60)
    return result


def known_batch(result: dict) -> tuple[Tensor, Tensor]:
    """The observations and the actions of the batch."""
    batch = result["batch"]
    if "obs_moments" in result:
        return batch[:, :4], batch[:, 4:6]
    return result["rollout_obs"][:-1].flatten(0, 1), batch[:, 0]


def losses_by_hand(agent: Callable, result: dict, indices: Tensor) -> dict[str, Tensor]:
    """The losses on some rows of the batch, from the valid ones alone."""
    args, rows = result["args"], indices[result["batch"][indices, -1] == 1]
    old_log_prob, advantages, returns, old_values, _ = result["batch"][rows, -5:].unbind(1)
    obs, actions = known_batch(result)
    policy, values = policy_and_values(agent, obs[rows])
    log_ratio = policy.log_prob(actions[rows]).view(len(rows), -1).sum(1) - old_log_prob
    ratio, low, high = log_ratio.exp(), 1 - args.clip_coef, 1 + args.clip_coef
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    errors = (values - returns) ** 2
    if args.clip_vloss:
        clipped = torch.max(torch.min(values, old_values + args.clip_coef), old_values - args.clip_coef)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    beyond = [not low <= number <= high for number in ratio.tolist()]
    return {
        "policy_loss": -torch.minimum(ratio * advantages, ratio.clip(low, high) * advantages).mean(),
        "value_loss": errors.mean() / 2,
        "entropy": policy.entropy().view(len(policy.entropy()), -1).sum(1).mean(),
        "old_approx_kl": -log_ratio.mean(),
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clipfrac": torch.tensor(sum(beyond) / len(beyond)),
    }


PLAIN = ("--no-norm-adv", "--no-clip-vloss", "--max-grad-norm", 1e3)


@pytest.mark.parametrize("options", [("--max-grad-norm", 0.1), PLAIN])
@each_script
def test_gradient_steps_are_those_of_the_paper(name, options):
    rate = 1e-4
    result = known(name, "--learning-rate", rate, *options)
    args, agent = result["args"], copy.deepcopy(result["agent"]).requires_grad_(True)
    optimizer = torch.optim.Adam(agent.parameters(), lr=rate, eps=1e-5)
    minibatches = torch.randperm(60).chunk(3)
    for indices in minibatches:
        losses = losses_by_hand(agent, result, indices)
        optimizer.zero_grad()
        loss = losses["policy_loss"] - args.ent_coef * losses["entropy"] + args.vf_coef * losses["value_loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        assert (norm > args.max_grad_norm) == (args.max_grad_norm == 0.1)
        optimizer.step()
        assert 0.1 < losses["clipfrac"] < 0.9
    for indices in minibatches:
        result["update"](indices)
    losses["explained_variance"] = result["losses"]["explained_variance"]
    by_hand = result | {"state": result["state"] | {"agent": agent, "optimizer": optimizer}, "losses": losses}
    assert_steps_by_hand(result, by_hand, rate)


@pytest.mark.parametrize("valid_rows", [0, 1])
@each_script
def test_a_minibatch_with_next_to_no_valid_row_does_no_harm(name, valid_rows):
    result = known(name, "--ent-coef", 0)
    before = copy.deepcopy(result["agent"].state_dict())
    result["batch"][:, -1] = (torch.arange(60) < valid_rows).float()
    result["update"](torch.arange(60))
    assert all(value.isfinite().all() for value in numbers(result).values())
    assert result["losses"]["policy_loss"] == 0
    if not valid_rows:
        torch.testing.assert_close(result["agent"].state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target_kl", "epochs"), [((), 3), (("--target-kl", 0), 1), (("--target-kl", 1e9), 3)]
)
@each_script
def test_number_of_gradient_steps(name, target_kl, epochs):
    with patch("torch.randperm", wraps=torch.randperm) as shuffle:
        result = fresh(name, (3, 8, 100), "--num-minibatches", 4, "--update-epochs", 3, *target_kl)
    rollouts = (len(history(result)) - 1) // 8
    assert rollouts > 3
    [made, *_] = [value for key, value in adam_state(result, "optimizer").items() if key.startswith("step.")]
    assert result["updates"] == made == rollouts * epochs * 4
    assert shuffle.call_count == rollouts * epochs


@pytest.mark.parametrize("anneal", [True, False])
@each_script
def test_learning_rate_falls_to_zero(name, anneal):
    result = fresh(name, (1, 4, 200), "--learning-rate", 0.001, *([] if anneal else ["--no-anneal-lr"]))
    ends, rates = zip(*result["logged"]["charts/learning_rate"], strict=True)
    # That of a rollout is the one at its first step.
    expected = [0.001 * (1 - start / 200 if anneal else 1) for start in (0, *ends[:-1])]
    assert rates == pytest.approx(expected)
    assert not anneal or min(expected) < 0.00005
    assert any(90 < start < 110 for start in ends)
    optimizer = result["optimizer"]
    applied = optimizer.lr if isinstance(optimizer, nn.Module) else optimizer.param_groups[0]["lr"]
    assert float(applied) == pytest.approx(expected[-1])


# ---- Values ------------------------------------------------------------------------------------------------
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


# ---- Breakout ----------------------------------------------------------------------------------------------
class Recorded(gym.Wrapper):
    """EnvPool's games, which keeps what they answer."""

    def __init__(self, games: gym.Env):
        super().__init__(games)
        self.steps = []

    def reset(self, **_):
        return self.env.reset()

    def step(self, actions):
        answer = self.env.step(actions)
        self.steps.append(answer[1:])
        return answer


def test_episodes_of_breakout_are_whole_unclipped_games():
    args = ("--total-timesteps", 6000, "--num-steps", 249, "--update-epochs", 1, "--num-minibatches", 1)
    make = envpool.make
    with patch("envpool.make", lambda *given, **options: Recorded(make(*given, **options))):
        result = run("ppo_atari_envpool", *args, "--learning-rate", 0)
    returns, real, lost, scores, ended = [], 0, 0, np.zeros(8), np.zeros(8, bool)
    for rewards, terminated, truncated, info in result["envs"].env.steps:
        assert not rewards[ended].any() and not info["reward"][ended].any()
        real += 8 - np.count_nonzero(ended)
        scores += info["reward"]
        over, ended = (info["terminated"] > 0) | truncated, terminated | truncated
        lost += np.count_nonzero(ended & ~over)
        returns += [(real, score) for score in scores[over]]
        scores[over] = 0
    assert real > 5000
    assert lost > len(returns) > 10
    assert result["logged"]["charts/episodic_return"] == returns


def test_a_game_is_evaluated_to_its_end_by_a_policy_that_never_serves():
    script, actions = load("ppo_atari_envpool"), []
    args = script["Args"](env_id="Breakout-v5", seed=11, eval_episodes=2)

    def idle(obs: np.ndarray) -> np.ndarray:
        actions.append(np.zeros(1, np.int32))
        return actions[-1]

    env = script["make_envs"](replace(args, num_envs=1), 0, learning=False)
    assert len(script["evaluate"](args, env, idle, [])) == 2
    # Without a ball nothing happens until the limit of 27,000 steps; each of five lives takes some 25.
    assert 2 * 5 * 10 < len(actions) < 2 * 5 * 100
