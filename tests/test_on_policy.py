"""PPO and PQN on environments and batches of which everything is known; Atari with NEXT_STEP autoreset."""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from unittest.mock import patch

import conftest
import numpy as np
import pytest
import torch
from conftest import ATARI, MEMORY, ON_POLICY, PPO, PQN, changed, instances, load, named, recalled
from envs import Row, game_rows, scripted_rows
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

ppo = pytest.mark.parametrize("name", PPO)
pqn = pytest.mark.parametrize("name", PQN)
atari = pytest.mark.parametrize("name", [name for name in PPO if name in ATARI])
CONTINUOUS = [name for name in ON_POLICY if conftest.algorithm(name).actions == "continuous"]
# Environments, steps of a rollout and steps in all: rollouts that begin and end everywhere in the scripts.
# Some of Atari's begin or end with a row that is not valid, or have such rows in several games at once.
CASES = [(1, 7, 42), (4, 1, 24), (2, 30, 120)]
FULLY = (*ON_POLICY[::2], *MEMORY)  # but for the recurrence twins have the same text
WHOLE = [(name, case) for name in ON_POLICY for case in (CASES if name in FULLY else CASES[-1:])]
# A twin with a memory draws by the same text; those of Atari have a test below.
DRAWS = [name for name in PPO if name not in (*ATARI, *MEMORY[1::2])]
GAMMA, LAMBDA = 0.9, 0.8
COLUMNS = ("reward", "values", "next_values", "terminated", "over")  # over: another episode, or life, follows
# Options of gradient steps.
CLIPPED = [("--max-grad-norm", 0.1), ("--no-norm-adv", "--no-clip-vloss", "--max-grad-norm", 1e3)]
RATES = [(name, options) for name in ON_POLICY[::2] for options in ((), ("--no-anneal-lr",))]


def fresh(name: str, case: tuple[int, int, int], *args) -> dict:
    """A run in the scripted world with one gradient step a rollout."""
    sizes = zip(("--num-envs", "--num-steps", "--total-timesteps"), case, strict=True)
    once = ("--num-minibatches", 1, "--update-epochs", 1, "--gamma", GAMMA)
    once += ("--q-lambda" if name in PQN else "--gae-lambda", LAMBDA)
    return conftest.play(name, *(part for size in sizes for part in size), *once, *args)


def worlds_of(name: str, result: dict) -> list[tuple[list[Row], list[int]]]:
    """What each environment showed in a run, the last obs, too, and the places of its steps in that.

    Of games each row is a step. Else one that is not valid shows what ended an episode, and is none.
    """
    args, envs, found = result["args"], instances(result), []
    if name in ATARI:
        world, steps, real = zip(*map(game_rows, envs[0].seeds), strict=True), [], 0
        while real + args.num_envs * args.num_steps <= args.total_timesteps:
            steps += islice(world, args.num_steps)
            real = sum(row.valid for step in steps for row in step)
        return [([*rows], [*range(len(steps))]) for rows in zip(*steps, next(world), strict=True)]
    count = args.total_timesteps // (args.num_envs * args.num_steps) * args.num_steps
    for env in envs:
        rows, at, world = [], [], scripted_rows(env.seeds[0])
        while len(at) <= count:
            rows.append(next(world))
            at += [len(rows) - 1] if rows[-1].valid else []
        found.append((rows, at[:-1]))
    return found


def steps_of(worlds: list) -> list[tuple[Row, ...]]:
    """All steps of a run: a row for each environment."""
    return [*zip(*([rows[place] for place in at] for rows, at in worlds), strict=True)]


def standardised(rows: np.ndarray, by: np.ndarray, shift: bool = True) -> np.ndarray:
    """Rows in units of the deviation of others, at most ten, with their mean as zero or without a shift."""
    return np.clip((rows - shift * by.mean(axis=0)) / np.sqrt(by.var(axis=0) + 1e-8), -10, 10)


def seen_in(name: str, worlds: list) -> list[Tensor]:
    """All observations of each environment, as networks get them."""
    if name in ATARI:  # frames come last; an agent with a memory sees the newest alone
        newest = slice(-1, None) if name in MEMORY else slice(None)
        frames = [np.stack([row.obs[newest] for row in rows]) for rows, _ in worlds]
        return [torch.from_numpy(of_env).movedim(1, -1) for of_env in frames]
    shown = [np.stack([row.obs.ravel() for row in rows]) for rows, _ in worlds]
    if name in CONTINUOUS:  # by all that was shown by then: first, final and other observations
        made = [np.searchsorted(at, range(len(rows))) for rows, at in worlds]  # steps before each
        everything, when = np.concatenate(shown), np.concatenate(made)
        for obs, steps in zip(shown, made, strict=True):
            obs[:] = [standardised(row, everything[when <= end]) for row, end in zip(obs, steps, strict=True)]
    return [torch.from_numpy(np.asarray(obs, np.float32)) for obs in shown]


def rewards_in(name: str, worlds: list) -> np.ndarray:
    """All rewards of a run, (T, n), in units of the deviation of returns if a script takes them so."""
    steps = steps_of(worlds)
    rewards = np.array([[row.reward for row in step] for step in steps])
    if name in CONTINUOUS:
        returns, running = [], 0  # discounted, since the start of the episode
        for earned, step in zip(rewards, steps, strict=True):
            returns.append(earned + GAMMA * running)
            running = returns[-1] * np.array([not row.over for row in step])
        rewards = standardised(rewards, np.concatenate(returns), shift=False)
    return rewards


def by_hand(name: str, result: dict, worlds: list) -> dict[str, np.ndarray]:
    """The last rollout, by column, (T, n, ...), and what the networks say of it.

    Those with a memory have seen all that each environment showed since the run began.
    """
    state, num_steps, found = result["state"], result["args"].num_steps, defaultdict(list)
    for env, ((rows, at), obs) in enumerate(zip(worlds, seen_in(name, worlds), strict=True)):
        here, valid = np.array(at[-num_steps:]), np.array([row.valid for row in rows])
        if name in PQN:
            values = state["q_network"](obs).amax(dim=1)
        else:
            if name in MEMORY:
                said = flat(recalled(state["agent"], obs[:, None], torch.from_numpy(valid[:, None])))
            else:
                said = state["agent"](obs)
            of_here = [part[here] if len(part) > 1 else part for part in said]  # a log_std is one for all
            found["log_prob"].append(evaluate(of_here, of_rollout(result)["actions"][:, env])[0])
            values = said[-1][:, 0]
        columns = {
            "valid": valid[here],
            "over": ~valid[here + 1],
            "obs": obs[here],
            "next_obs": obs[here + 1],
        }
        columns |= {"values": values[here], "next_values": values[here + 1]}
        columns["terminated"] = np.array([rows[place].terminated for place in here])
        for key, column in columns.items():
            found[key].append(column)
    columns = {key: np.stack(of_envs, axis=1) for key, of_envs in found.items()}
    return columns | {"reward": rewards_in(name, worlds)[-num_steps:]}


def plain_gae(steps: dict[str, np.ndarray]) -> np.ndarray:
    """Advantages, (T, n), by recursion over the steps of an episode."""
    advantages = np.zeros(steps["values"].shape)
    for step, env in reversed([*np.ndindex(advantages.shape)]):
        reward, value, after, terminated, over = (steps[key][step, env] for key in COLUMNS)
        later = 0 if over or step == len(advantages) - 1 else advantages[step + 1, env]
        advantages[step, env] = reward + GAMMA * after * (not terminated) - value + GAMMA * LAMBDA * later
    return advantages


def plain_returns(steps: dict[str, np.ndarray]) -> np.ndarray:
    """Returns Q(lambda), (T, n), by the recursion of the paper."""
    returns = np.zeros(steps["values"].shape)
    for step, env in reversed([*np.ndindex(returns.shape)]):
        reward, _, after, terminated, over = (steps[key][step, env] for key in COLUMNS)
        if not over and step < len(returns) - 1:
            after = (1 - LAMBDA) * after + LAMBDA * returns[step + 1, env]
        returns[step, env] = reward + GAMMA * after * (not terminated)
    return returns


def flat(outputs: list[Tensor]) -> list[Tensor]:
    """What an agent says of steps (T, n, ...), as of (T * n, ...); a log_std, (1, action_dim), stays."""
    return [part.flatten(0, 1) if part.dim() == 3 else part for part in outputs]


def evaluate(said: Sequence[Tensor], actions: Tensor) -> tuple[Tensor, Tensor, Distribution]:
    """Log-probabilities of actions and values, (batch,), by what an agent said of a batch, and its policy."""
    outputs, *log_std, values = said
    policy = Normal(outputs, log_std[0].exp()) if log_std else Categorical(logits=outputs)
    actions = actions if log_std else actions.flatten()
    return policy.log_prob(actions).view(len(values), -1).sum(1), values[:, 0], policy


# ---- Rollouts ----------------------------------------------------------------------------------------------
def of_rollout(result: dict) -> dict[str, Tensor]:
    """The last rollout, by column: (T, n, its width), or of observations their shape."""
    columns = named(torch.as_tensor(result["rollout"]), result["columns"])
    columns = columns if "obs" in columns else columns | {"obs": result["rollout_obs"]}
    return {key: column[: result["args"].num_steps] for key, column in columns.items()}


@pytest.mark.parametrize(("name", "case"), WHOLE, ids=str)
def test_the_batch_is_what_happened_with_every_kind_of_end(name, case):
    result, (_, num_steps, total) = fresh(name, case, "--learning-rate", 0), case
    assert result["global_step"] <= total
    rollout, worlds = of_rollout(result), worlds_of(name, result)
    with torch.no_grad():
        steps = by_hand(name, result, worlds)
    conftest.assert_episodes_are_counted(result, steps_of(worlds))
    if name in ATARI and case == CASES[-1]:
        # Whole games, some with lost lives, some cut short, some of a return beyond their clipped rewards.
        assert {1, 3, 5, 6} <= {length for _, length in result["logged"]["charts/episodic_length"]}
    torch.testing.assert_close(rollout["obs"], torch.from_numpy(steps["obs"]), rtol=1e-4, atol=1e-4)
    for key in {"next_obs"} & rollout.keys():
        np.testing.assert_allclose(rollout[key], steps[key], rtol=1e-4, atol=1e-4)
    for index, env in enumerate([] if name in ATARI else instances(result)):
        sent, space = rollout["actions"][:, index].numpy(), env.action_space
        taken = sent.clip(space.low, space.high) if name in CONTINUOUS else sent[:, 0] + space.start
        np.testing.assert_array_equal(taken, env.actions[-num_steps:])
    if name in ATARI:
        np.testing.assert_array_equal(rollout["actions"][..., 0], instances(result)[0].actions[-num_steps:])

    batch, valid = named(result["batch"], result["batch_columns"]), steps["valid"]
    advantages = plain_gae(steps)
    targets = steps["values"] + advantages if name in PPO else plain_returns(steps)
    expected = {"targets": targets}
    if name in PPO:
        expected |= {"log_prob": steps["log_prob"], "advantages": advantages, "values": steps["values"]}
    if name in ATARI:
        np.testing.assert_array_equal(batch["valid"].view(valid.shape), valid)
    for key, column in expected.items():
        np.testing.assert_allclose(batch[key].view(valid.shape)[valid], column[valid], rtol=1e-4, atol=1e-4)
    for key in {"obs", "actions"} & batch.keys():
        assert torch.equal(batch[key].flatten(), rollout[key].flatten())
    if name in PQN:
        return
    # What acts and what learns see the same, with the same memory: the parameters are those that acted.
    assert abs(result["losses"]["old_approx_kl"]) < 1e-5 and result["losses"]["clipfrac"] == 0
    explained = 1 - np.var(advantages[valid]) / max(np.var(targets[valid]), 1e-8)
    np.testing.assert_allclose(result["losses"]["explained_variance"], explained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CONTINUOUS[::2])
def test_no_reward_is_beyond_ten_deviations(name):
    """Without the limit, each of two among two hundred would be fourteen from zero."""
    far = {(50, 0): -1e6, (51, 0): 1e6}
    with patch("envs.reward", lambda episode, step: far.get((episode, step), 1.0)):
        rewards = of_rollout(fresh(name, (1, 200, 200)))["rewards"]
    assert (rewards.min(), rewards.max()) == (-10, 10)


@pytest.mark.parametrize("name", DRAWS)
def test_actions_are_draws_from_the_policy_of_each_environment_its_own(name):
    """By means that differ between observations, or choices of four: of two, the noise has no sign."""
    num_steps = 100 if name in MEMORY else 400  # what is cut costs those with a memory many passes
    sizes = ("--num-envs", 3, "--num-steps", num_steps, "--num-minibatches", 1, "--update-epochs", 1)
    args = ("--env-id", "envs:Scripted-v0" if name in CONTINUOUS else "envs:Codes-v0", *sizes)

    def errors_of_the_last_rollout(rollouts: int) -> tuple[Tensor, Tensor]:
        """How far actions are from their means, (T, n, width); second, of choices the likeliest's alone."""
        steps = rollouts * 3 * num_steps
        result = conftest.run(name, *args, "--learning-rate", 0, "--total-timesteps", steps)
        rollout = of_rollout(result)
        with torch.no_grad():
            recall = (rollout["keep"], result["first_memory"]) if name in MEMORY else ()
            outputs, log_std, *_ = result["state"]["agent"](rollout["obs"], *recall)
        if name in CONTINUOUS:  # in units of their deviation, which is not 1
            assert outputs.std() > 0.5 and log_std.mean() == -1
            noise = (rollout["actions"] - outputs) / log_std.exp()
            assert abs(noise.std() - 1) < 4 / (2 * noise.numel()) ** 0.5
            return noise, noise
        probabilities = outputs[..., 3:].softmax(2)  # of the second part
        errors = nn.functional.one_hot(rollout["actions"][:, :, 1].long(), 4) - probabilities
        return errors, errors.gather(2, probabilities.argmax(2, keepdim=True))

    gain = 5.0 if name not in CONTINUOUS else 10.0 if name in MEMORY else 2.0  # an LSTM says little at first
    passages = (
        ("torch.zeros(1, action_dim,", "torch.full((1, action_dim), -1.0,") if name in CONTINUOUS else ()
    )
    with changed(name, "std=0.01)", f"std={gain})", *passages):  # of a run of one rollout, and of two
        (first, _), (errors, centred) = errors_of_the_last_rollout(1), errors_of_the_last_rollout(2)
    # Around the mean, and not the same for two environments, nor in two rollouts.
    for sample in (centred, (errors[:, 0] * errors[:, 1]).sum(-1), (first * errors).sum(-1)):
        assert sample.mean().abs() < 4 * sample.std() / sample.numel() ** 0.5


@atari
def test_actions_have_the_frequencies_of_the_softmax(name):
    logits, draws = torch.tensor([0.0, 1, -2, 0.5]), 40_000
    act = fresh(name, (1, 4, 4))["act"]
    outputs = logits.expand(draws, 4), torch.arange(float(draws))[:, None]
    if name in MEMORY:
        act.__globals__["agent"] = lambda obs, keep, memory: (outputs[0][None], outputs[1][None], memory)
        columns = act(torch.zeros(1), torch.zeros(1))
    else:
        act.__globals__["agent"] = lambda obs: outputs
        columns = act(None)
    actions, log_prob, values = columns.unbind(1)
    probabilities = logits.softmax(0)
    error = actions.long().bincount(minlength=4) / draws - probabilities
    assert (error.abs() < 4 * (probabilities * (1 - probabilities) / draws).sqrt()).all()
    torch.testing.assert_close(log_prob, probabilities.log()[actions.long()])
    assert torch.equal(values, torch.arange(float(draws)))


# ---- Gradient steps ----------------------------------------------------------------------------------------
def known(name: str, *args) -> dict:
    """A run on the eve of gradient steps on random rows, of games some not valid."""
    weights = () if name in PQN else ("--ent-coef", 0.2, "--vf-coef", 0.7, "--clip-coef", 0.2)
    result = fresh(name, (3, 20, 60), *weights, *args)
    conftest.begin_anew(result, noise=0.02)
    batch, space = result["batch"].normal_(), instances(result)[0].action_space
    rows = named(batch, result["batch_columns"])
    if name in ATARI:
        rows["valid"].copy_(torch.rand(rows["valid"].shape) < 0.7)
    if name not in CONTINUOUS:
        rows["actions"].random_(int(space.n))
    if "obs" not in rows:
        frames = result["rollout_obs"].random_(256)[:-1]
        rows["obs"] = frames if name in MEMORY else frames.flatten(0, 1)
    if name in MEMORY:
        rows["keep"].copy_(torch.rand(rows["keep"].shape) < 0.7)
        rows["first_memory"] = result["first_memory"].normal_()
    return result | {"known": rows if name in PQN else near_predictions(result, rows)}


def near_predictions(result: dict, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows with predictions so that some of the ratios and values, not all, are beyond the clip."""
    with torch.no_grad():
        log_prob, values, _ = predictions(result["state"]["agent"], rows)
    for key, column, noise in (("log_prob", log_prob, 0.4), ("values", values, 0.2)):
        rows[key].copy_((column + noise * torch.randn(60)).view(rows[key].shape))
    return rows


def taken(known: dict[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
    """Some rows of the known batch, or of one with a memory all rows of some environments."""
    if "first_memory" not in known:
        return {key: rows[indices] for key, rows in known.items()}
    part = dict(known)
    memory = part.pop("first_memory")
    # Of two LSTMs environments are its second dimension.
    by_env = {"first_memory": memory[:, indices] if memory.dim() == 3 else memory[indices]}
    return {key: rows[:, indices] for key, rows in part.items()} | by_env


def predictions(agent: Callable, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Distribution]:
    """What `evaluate` gives, for all rows in turn."""
    actions = rows["actions"].flatten(0, -2)
    if "first_memory" not in rows:
        return evaluate(agent(rows["obs"]), actions)

    *outputs, _ = agent(rows["obs"], rows["keep"], rows["first_memory"])
    return evaluate(flat(outputs), actions)


def losses_by_hand(agent: Callable, result: dict, indices: Tensor) -> dict[str, Tensor]:
    """The losses on some rows of the batch, or of some environments, of games from the valid ones alone."""
    args, rows = result["args"], taken(result["known"], indices)
    valid = rows.get("valid", torch.ones_like(rows["values"])).flatten() == 1
    old_log_prob, advantages, returns, old_values = (
        rows[key].flatten()[valid] for key in ("log_prob", "advantages", "targets", "values")
    )
    log_prob, values, policy = predictions(agent, rows)
    entropy = policy.entropy().view(len(values), -1).sum(1)[valid]
    log_prob, values = log_prob[valid], values[valid]
    log_ratio = log_prob - old_log_prob
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
        "entropy": entropy.mean(),
        "old_approx_kl": -log_ratio.mean(),
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clipfrac": torch.tensor(sum(beyond) / len(beyond)),
    }


@pytest.mark.parametrize("options", CLIPPED)
@ppo
def test_gradient_steps_are_those_of_the_paper(name, options):
    result = known(name, "--learning-rate", 1e-4, *options)
    assert_steps_of_the_paper(result, torch.randperm(3 if name in MEMORY else 60).chunk(3))


def assert_steps_of_the_paper(result: dict, minibatches: Sequence[Tensor]) -> None:
    """Check gradient steps on minibatches of the rows `known`."""
    args, agent = result["args"], copy.deepcopy(result["state"]["agent"]).requires_grad_(True)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
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
    reference = result | {
        "state": result["state"] | {"agent": agent, "optimizer": optimizer},
        "losses": losses,
    }
    conftest.assert_steps_by_hand(result, reference, args.learning_rate)


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
@pqn
def test_gradient_steps_are_of_the_squared_error_by_radam(name, max_norm):
    """Twelve: from the sixth on RAdam divides by the deviation of gradients."""
    rate = 1e-4
    result = known(name, "--learning-rate", rate, "--max-grad-norm", max_norm)
    batch, network = result["known"], copy.deepcopy(result["state"]["q_network"]).requires_grad_(True)
    optimizer = torch.optim.RAdam(network.parameters(), lr=rate)
    minibatches = torch.randperm(60).chunk(3) * 4
    for indices in minibatches:
        valid = indices[batch["valid"][indices, 0] == 1] if name in ATARI else indices
        rows = {key: column[valid] for key, column in batch.items()}
        chosen = nn.functional.one_hot(rows["actions"][:, 0].long(), network(rows["obs"]).shape[1])
        q_values = (network(rows["obs"]) * chosen).sum(1)
        losses = {"td_loss": ((q_values - rows["targets"][:, 0]) ** 2).mean(), "q_values": q_values.mean()}
        optimizer.zero_grad()
        losses["td_loss"].backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), max_norm)
        assert (norm > max_norm) == (max_norm == 0.1)
        optimizer.step()
    for indices in minibatches:
        result["update"](indices)
    reference = {"state": result["state"] | {"q_network": network, "optimizer": optimizer}, "losses": losses}
    conftest.assert_steps_by_hand(result, result | reference, rate)


@pqn
def test_an_action_is_random_where_epsilon_is_above_a_chance_and_else_the_best(name):
    """Epsilon falls from 1 to 0.2 over the first half of the steps, at each of them. All chances are 0.6."""
    epsilon = ("--start-e", 1, "--end-e", 0.2, "--exploration-fraction", 0.5, "--learning-rate", 0)
    chances = patch("torch.rand", lambda *shape, **_: torch.full(shape, 0.6))
    with chances, patch("numpy.where", wraps=np.where) as where:
        result = fresh(name, (4, 30, 840), *epsilon)
    told = [call.args for call in where.call_args_list if len(call.args) == 3]
    explores, others, best = (np.stack(part) for part in zip(*told, strict=True))

    def expected(steps: np.ndarray) -> np.ndarray:
        return 1 - 0.8 * np.minimum(steps / 420, 1)

    steps = steps_of(worlds_of(name, result))
    before = np.cumsum([0, *(sum(row.valid for row in rows) for rows in steps[:-1])])
    random = 0.6 < expected(before)
    assert 0 < np.count_nonzero(random) % 30  # the change is within a rollout
    assert np.array_equal(explores, np.broadcast_to(random[:, None], explores.shape))
    steps, logged = zip(*result["logged"]["charts/epsilon"], strict=True)
    assert logged == pytest.approx(expected(np.array(steps)))
    network, rollout = result["state"]["q_network"], of_rollout(result)
    assert len(np.unique(others)) == network.network[-1].out_features
    assert np.array_equal(np.where(explores, others, best)[-30:], rollout["actions"][..., 0])
    with torch.no_grad():
        values = network(rollout["obs"].flatten(0, 1))
    assert np.array_equal(values.argmax(dim=1), best[-30:].flatten())


@pytest.mark.parametrize(("name", "options"), RATES)
def test_gradient_steps_are_so_many_at_a_falling_rate(name, options):
    steps = ("--num-minibatches", 4, "--update-epochs", 3, "--learning-rate", 0.01)
    length, total = (4, 66) if name in ATARI else (8, 130)
    with patch("torch.randperm", wraps=torch.randperm) as shuffle:
        result = fresh(name, (4, length, total), *steps, *options)
    network = "q_network" if name in PQN else "agent"
    rollouts = len(steps_of(worlds_of(name, result))) // length
    assert rollouts > 3
    assert result["updates"] == conftest.gradient_steps(result, network) == rollouts * 3 * 4
    assert shuffle.call_count == rollouts * 3
    ends, rates = zip(*result["logged"]["charts/learning_rate"], strict=True)
    if name in ATARI:  # that of a rollout is the one at its first step
        done = [step / total for step in (0, *ends[:-1])]
    else:  # by rollouts, of which the last has a step of the schedule left
        done = np.arange(rollouts) / rollouts
    expected = [0.01 * (1 - part * result["args"].anneal_lr) for part in done]
    assert rates == pytest.approx(expected)
    assert conftest.rate_of(result["state"]["optimizer"]) == pytest.approx(expected[-1])


@pytest.mark.parametrize("name", PPO[::2])
def test_learning_from_a_rollout_ends_after_the_epoch_whose_kl_passes_the_target(name):
    def learn(*options) -> dict:
        steps = ("--num-minibatches", 4, "--learning-rate", 0.01, "--update-epochs")
        return fresh(name, (4, 8, 32), *steps, *options)

    kl = learn(1)["losses"]["approx_kl"].item()
    assert learn(3, "--target-kl", 0.9 * kl)["updates"] == 4
    assert learn(3, "--target-kl", 1.1 * kl)["updates"] >= 8


# ---- Breakout ----------------------------------------------------------------------------------------------
def test_breakout_has_steps_and_ends_as_the_scripted_games_and_takes_arguments_of_its_own():
    script, draw = load("ppo_atari_envpool"), np.random.default_rng(0).integers
    args = script["Args"](env_id="Breakout-v5", env_kwargs={"repeat_action_probability": 0.25}, env_threads=3)
    games = script["make_games"](args, [*range(8)])
    config = games.env.config
    assert (config["repeat_action_probability"], config["num_threads"]) == (
        0.25,
        3,
    )  # the first: sticky actions
    games.reset()
    whole, lost, ended = 0, 0, np.zeros(8, bool)
    for _ in range(400):
        _, rewards, terminated, truncated, info = games.step(draw(4, size=8).astype(np.int32))
        assert not info["reward"][ended].any()  # a step that only goes on
        assert np.array_equal(rewards, np.sign(info["reward"]))
        over, ended = info["over"], terminated | truncated
        assert np.all(ended[over])
        whole, lost = whole + np.count_nonzero(over), lost + np.count_nonzero(ended & ~over)
    assert lost > whole > 5
