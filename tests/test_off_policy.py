"""Off-policy scripts on environments and batches that are known: what is stored, counted and learnt.

tests/test_replay.py has Atari's.
"""

import copy
import math
from itertools import pairwise
from unittest.mock import patch

import conftest
import numpy as np
import pytest
import torch
from conftest import ACTOR_CRITIC, ATOMS, DQN, EACH_STEP, TWINS, Turns, instances, load, rates, run, takes
from envs import scripted_rows
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

# Taken alone where twins have the same text, or tests/test_twins.py compares them.
EAGER = [*ACTOR_CRITIC, *DQN][::2]
discrete = pytest.mark.parametrize("name", DQN)
FAST = [name for name in ACTOR_CRITIC if takes(name, "num_atoms")]
SAC = [name for name in ACTOR_CRITIC if takes(name, "autotune")]
fast = pytest.mark.parametrize("name", FAST)

OBS_DIM, ACTION_DIM = 4, 2
# Environments, gradient steps per agent step, of FAST per step of all, and how many those are. Actions are
# last chosen at step 41, with four environments at 40: 31 or 30 steps after learning starts.
OFTEN = [(name, *case) for name in EAGER if name not in (*FAST, *DQN) for case in [(1, 0.25, 8), (4, 2, 60)]]
OFTEN += [(name, *case) for name in FAST[::2] for case in [(1, 2, 62), (4, 3, 24)]]
# Environments and rows of the replay buffer.
STORED = [(name, 3, 10) for name in (*ACTOR_CRITIC, *DQN)] + [(name, 1, 1000) for name in EAGER]
# Environments, agent steps per gradient step and per step of the target network.
FREQUENCIES = [(1, 4, 8), (1, 3, 7), (4, 1, 3)]


def fresh(name: str, num_envs: int = 1, *args, **options) -> dict:
    """A run of 42 steps in a scripted world; learning starts after ten."""
    fixed = ("--batch-size", 4, "--learning-starts", 10, "--total-timesteps", 42)
    each_step = EACH_STEP if name in DQN else ()
    fixed += (*conftest.scripted_world(name), "--num-envs", num_envs)
    return run(name, *fixed, *each_step, *args, **options)


# ---- Storage and counts ------------------------------------------------------------------------------------
def history(result: dict) -> list:
    """All steps of a run: a row, the observation that follows and the action of each environment."""
    of_envs = []
    for env in instances(result):
        pairs = ((row, after.obs) for row, after in pairwise(scripted_rows(env.seeds[0])) if row.valid)
        of_envs.append(((*pair, action) for pair, action in zip(pairs, env.actions, strict=False)))
    return [*zip(*of_envs, strict=True)]


def transition(name: str, row, next_obs: np.ndarray, action) -> np.ndarray:
    """The row of the replay buffer for a transition."""
    low, high = np.array([-1, -0.3]), np.array([0.7, 5])  # for the script from -1 to 1
    stored = [action - 5] if name in DQN else 2 * (action - low) / (high - low) - 1
    outcome = [row.reward, row.terminated, *([row.over] if name in FAST else [])]
    return np.concatenate([row.obs.ravel(), stored, outcome, next_obs.ravel()]).astype(np.float32)


@pytest.mark.parametrize(("name", "num_envs", "buffer_size"), STORED)
def test_transitions_are_stored_and_whole_episodes_counted(name, num_envs, buffer_size):
    result = fresh(name, num_envs, "--buffer-size", buffer_size)
    steps = history(result)
    conftest.assert_episodes_are_counted(result, ([row for row, *_ in step] for step in steps))
    assert len(result["returns"]) > 10
    expected = [transition(name, *of_env) for step in steps for of_env in step]
    capacity, buffer = buffer_size // num_envs * num_envs, result["buffer"].numpy()
    buffer = buffer[:, : len(expected[0])]  # behind that is what a user has added
    rows = np.zeros((capacity, len(expected[0])), expected[0].dtype)
    for index, row in enumerate(expected):
        rows[index % capacity] = row
    actions = slice(OBS_DIM, OBS_DIM + (1 if name in DQN else ACTION_DIM))
    np.testing.assert_allclose(buffer[:, actions], rows[:, actions], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.delete(buffer, actions, axis=1), np.delete(rows, actions, axis=1))
    assert (buffer.dtype, int(result["size"])) == (rows.dtype, min(42, capacity))
    assert all(loss.isfinite().all() for loss in result["losses"].values())


@pytest.mark.parametrize(("num_envs", "buffer_size"), [(1, 1000), (3, 25)])
@fast
def test_returns_end_with_their_episode_and_with_the_newest_row(name, num_envs, buffer_size):
    """Of every row of the replay buffer, by what the environments went through; one batch has them all."""
    result = fresh(name, num_envs, "--buffer-size", buffer_size, "--num-steps", 4, "--gamma", 0.9)
    rows, size = [of_env for step in history(result) for of_env in step], int(result["size"])
    with patch("torch.randint", lambda *_, **__: torch.arange(size)):
        obs, _, returns, discounts, next_obs = result["sample"]()
    lengths, standardised = set(), result["state"]["obs_normalizer"]
    for age in range(size):
        window = rows[len(rows) - 1 - age :: num_envs][:4]
        ends = [place for place, (row, *_) in enumerate(window) if row.over]
        window = window[: ends[0] + 1] if ends else window
        expected = sum(0.9**place * row.reward for place, (row, *_) in enumerate(window))
        (first, *_), (last, after, _) = window[0], window[-1]
        assert returns[age].item() == pytest.approx(expected, rel=1e-5)
        assert discounts[age].item() == pytest.approx(0 if last.terminated else 0.9 ** len(window), rel=1e-5)
        for actual, seen in ((obs, first.obs), (next_obs, after)):
            torch.testing.assert_close(actual[age], standardised(torch.tensor(seen.ravel()).float()))
        lengths.add((len(window), bool(ends), last.terminated))
    assert len(lengths) > 5  # windows of all kinds
    seen = np.array([row.obs.ravel() for row, *_ in rows])  # once each, however often they are drawn
    np.testing.assert_allclose(standardised.mean, seen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(standardised.var, seen.var(0), rtol=1e-4, atol=1e-5)


@fast
def test_returns_do_not_go_on_in_the_episodes_after_a_checkpoint(name, tmp_path):
    before = fresh(name, 3, *conftest.SAVED, directory=tmp_path)
    folder = conftest.checkpoint(tmp_path).parent
    after = run(name, "--resume", folder, "--total-timesteps", 60, directory=tmp_path)
    if "deviations" in before:
        assert not (before["deviations"] == after["deviations"]).any()
    over = [result["buffer"][39:42, 8] for result in (before, after)]
    assert not over[0].all() and over[1].all()
    torch.testing.assert_close(after["buffer"][:39], before["buffer"][:39], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in FAST[::2] if takes(name, "std_max")])
def test_an_episode_explores_with_a_deviation_of_its_own(name):
    """Drawn between the bounds where it begins, for its environment and no other."""
    steps = [fresh(name, 3, "--learning-starts", 100, "--total-timesteps", 3 * n) for n in range(1, 9)]
    drawn, ended = torch.cat([result["deviations"].T for result in steps]), history(steps[-1])
    assert ((drawn >= 0.1) & (drawn <= 0.4)).all()
    assert len({*drawn.flatten().tolist()}) == 3 + sum(row.over for step in ended[1:] for row, *_ in step)
    for before, after, step in zip(drawn, drawn[1:], ended[1:], strict=False):
        assert (before != after).tolist() == [row.over for row, *_ in step]
    again = fresh(name, 3, "--std-min", 0.4)
    assert (again["deviations"] == torch.full((3, 1), 0.4)).all()
    again["deviations"].copy_(torch.tensor([[0.0], [0.1], [0.3]]))  # each is its environment's own
    noise = torch.stack([again["act"](torch.zeros(3, OBS_DIM)) for _ in range(2000)]).std(0)
    torch.testing.assert_close(noise, torch.tensor([[0.0], [0.1], [0.3]]).expand(3, 2), rtol=0.1, atol=1e-3)


# ---- Actions -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ACTOR_CRITIC[::2])
def test_actions_reach_the_bounds_of_the_environment_and_explore_with_the_right_deviation(name):
    """By an actor whose output layer gives the same for every observation."""
    result, obs = fresh(name), torch.zeros(20_000, OBS_DIM)
    [env], layers = result["envs"].envs, result["state"]["actor"].modules()
    [*_, layer] = (layer for layer in layers if isinstance(layer, nn.Linear))
    layer.weight.data.fill_(0)
    for sign, bound in ((-1, env.unwrapped.action_space.low), (1, env.unwrapped.action_space.high)):
        layer.bias.data.fill_(100 * sign)
        for action in load(name)["in_bounds"](result["act"](obs[:100]).numpy(), env.action_space):
            env.reset()
            env.step(action)  # which checks that it is within its bounds
        assert np.isclose(env.unwrapped.actions[-100:], bound).any(axis=0).all()
        assert np.isclose(result["best_actions"](np.zeros((2, OBS_DIM))), bound).all()
    layer.bias.data.fill_(0)
    expected = getattr(result["args"], "exploration_noise", None) or float(result.get("deviations", 0))
    noise = result["act"](obs)
    if name in SAC:
        noise, expected = noise.atanh(), math.exp(-2.5 if name in FAST else -1.5)  # halfway of log(std)
    torch.testing.assert_close(noise.mean(0), torch.zeros(ACTION_DIM), rtol=0, atol=0.01)
    torch.testing.assert_close(noise.std(0), torch.full((ACTION_DIM,), expected), rtol=0.03, atol=0)


@pytest.mark.parametrize("epsilon", [0, 0.3, 1])
@discrete
def test_so_many_actions_are_random(name, epsilon):
    """Those of the policy in NumPy, too."""
    fixed = ("--start-e", epsilon, "--end-e", epsilon, "--learning-rate", 0)
    result, obs = fresh(name, 1, *fixed), torch.randn(1, OBS_DIM)
    many, best = obs.expand(20_000, -1), result["best_actions"](obs.numpy())[0] - 5
    assert best == result["state"]["q_network"](obs).argmax()
    expected, close = torch.full((3,), epsilon / 3), 0.02 if epsilon else 0
    expected[best] += 1 - epsilon
    policies = [result["act"]]
    policies += [lambda obs: torch.from_numpy(result["policy"](obs.numpy()))] if name in TWINS else []
    for actions in (policy(many) for policy in policies):
        torch.testing.assert_close(actions.bincount(minlength=3) / 20_000, expected, rtol=0, atol=close)
        # Each environment explores by itself: two are at their best as often as by independent draws.
        both = (actions[:-1:2] == best) & (actions[1::2] == best)
        torch.testing.assert_close(both.float().mean(), expected[best] ** 2, rtol=0, atol=close)


@pytest.mark.parametrize("name", EAGER)
def test_targets_begin_as_their_networks_and_alpha_where_it_should(name):
    """Seen where nothing moves: with a learning rate and a tau of 0."""
    fixed = ("--batch-size", 4, "--learning-starts", 10, "--total-timesteps", 20, "--tau", 0, *rates(name, 0))
    result = run(name, *conftest.world(name, "Scripted"), *fixed, *(EACH_STEP if name in DQN else ()))
    state = result["state"]
    targets = [key for key in state if "target" in key]
    assert targets and result["updates"]
    for key in targets:
        network = "q_network" if key == "target_network" else key.removesuffix("_target")
        torch.testing.assert_close(state[key].state_dict(), state[network].state_dict(), rtol=0, atol=0)
    if "log_alpha" in state:
        [log_alpha] = state["log_alpha"].parameters()
        assert log_alpha.item() == pytest.approx(math.log(0.001) if name in FAST else 0)


# ---- How many gradient steps -------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "num_envs", "often", "updates"), OFTEN)
def test_gradient_steps_of_actors_and_critics_have_their_turns(name, num_envs, often, updates):
    options = ("--num-updates" if name in FAST else "--updates-per-step", often)
    every = 3 if takes(name, "policy_frequency") else 1
    options += ("--policy-frequency", 3) if every == 3 else ()
    sac = name in SAC and name not in FAST
    options += ("--target-network-frequency", 3, "--tau", Turns.tau) if sac else ()
    with Turns() as turns:
        result = fresh(name, num_envs, *options)
    assert result["updates"] == updates
    for critic in conftest.critics(result):
        assert conftest.gradient_steps(result, critic) == updates
    times = every if sac else 1  # SAC makes up for the steps left out
    assert conftest.gradient_steps(result, "actor") == math.ceil(updates / every) * times
    assert not sac or turns.noted == [index % 3 == 0 for index in range(updates)]


@pytest.mark.parametrize(("num_envs", "train_frequency", "every"), FREQUENCIES)
@discrete
def test_gradient_steps_and_targets_of_dqn_have_their_turns(name, num_envs, train_frequency, every):
    """A target follows each gradient step with which the steps that learn pass a multiple of `every`."""
    options = ("--train-frequency", train_frequency, "--target-network-frequency", every, "--tau", Turns.tau)
    options += ("--exploration-fraction", 0.5, "--start-e", 0.9, "--end-e", 0.1)
    with Turns() as turns:
        result = fresh(name, num_envs, *options)
    steps = range(train_frequency, (31 if num_envs == 1 else 30) + 1, train_frequency)
    assert turns.noted == [step // every > (step - train_frequency) // every for step in steps]
    assert result["updates"] == conftest.gradient_steps(result, "q_network") == len(steps)
    expected = [0.9 - 0.8 * min(step / 21, 1) for step in range(0, 42, num_envs)]
    assert [*map(float, turns.shares)] == pytest.approx(expected)  # before learning starts, too


# ---- Gradient steps ----------------------------------------------------------------------------------------
NARROW = ("--critic-hidden-dim", 32, "--actor-hidden-dim", 32)  # the fewer units, the fewer close to 0
BATCH, GAMMA, TAU, RATE, ACTOR_RATE = 32, 0.9, 0.1, 3e-3, 1e-3
KNOWN = {
    "sac_continuous_action": ("--policy-lr", ACTOR_RATE),
    "td3_continuous_action": ("--policy-noise", 0.4, "--noise-clip", 0.5),
    "fast_td3": ("--policy-noise", 0.4, *("--v-min", -4, "--v-max", 3, "--num-atoms", 15), *NARROW),
    "fast_sac": (
        "--alpha",
        0.2,
        "--weight-decay",
        0.3,
        *("--v-min", -4, "--v-max", 3, "--num-atoms", 15),
        *NARROW,
    ),
    "dqn": (),
}


def known(name: str, *options) -> dict:
    """A run on the eve of gradient steps on random rows."""
    fixed = ("--batch-size", BATCH, "--gamma", GAMMA, "--tau", TAU, "--buffer-size", 1000)
    fixed += (*rates(name, RATE), *KNOWN[name.removesuffix("_torchcompile")])
    result = fresh(name, 1, *fixed, *options)
    conftest.begin_anew(result, noise=0.1)
    buffer = result["buffer"].normal_()
    buffer[:, (9 if name in FAST else 8) + (3 if name in DQN else 4) :] = 1  # columns that a user has added
    buffer[:, 6 if name in DQN else 7] = (torch.rand(len(buffer)) < 0.4).float()  # terminated
    if name in DQN:
        buffer[:, 4] = torch.randint(3, (len(buffer),)).float()
    if name in FAST:  # over, which truncated rows are, too
        buffer[:, 8] = torch.maximum(buffer[:, 7], (torch.rand(len(buffer)) < 0.2).float())
    critics = [] if name in FAST else [item for key, item in result["state"].items() if key.startswith("qf")]
    for critic in critics:  # values around 0, so that neither is always the lower one
        size = critic.fc1.in_features
        with torch.no_grad():
            critic.fc3.bias -= critic(buffer[:, : size - 1], buffer[:, size - 1 : size]).mean()
    return result


# What an optimizer moves.
LEARN = {"actor_optimizer": ["actor"], "q_optimizer": ["qf1", "qf2"], "alpha_optimizer": ["log_alpha"]}
LEARN |= {"optimizer": ["q_network"]}


class ByHand:
    """Plain copies of the networks of a run, with optimizers of PyTorch, and gradient steps of the papers."""

    def __init__(self, result: dict):
        self.result, self.losses, self.optimizers = result, {}, {}
        self.nets = {key: copy.deepcopy(item) for key, item in result["state"].items() if "optim" not in key}
        for key in result["state"].keys() - self.nets.keys():
            networks = [self.nets[name] for name in LEARN[key]]
            rate = conftest.rate_of(result["state"][key])
            params = [param for network in networks for param in network.requires_grad_(True).parameters()]
            decay, betas = getattr(result["args"], "weight_decay", 0), (0.9, 0.999)
            if hasattr(result["args"], "target_entropy_ratio"):  # FastSAC's
                decay, betas = 0.01 if key == "alpha_optimizer" else decay, (0.9, 0.95)
            self.optimizers[key] = torch.optim.AdamW(params, lr=rate, betas=betas, weight_decay=decay)

    def batch(self, *widths: int) -> tuple[Tensor, ...]:
        indices = torch.randint(int(self.result["size"]), (BATCH,))
        return self.result["buffer"][indices, : sum(widths)].split(widths, dim=1)

    def targets(self, rewards: Tensor, terminated: Tensor, next_values: Tensor) -> Tensor:
        return rewards[:, 0] + torch.where(terminated[:, 0] == 1, 0, GAMMA * next_values.detach())

    def learn(self, optimizer: str, loss: Tensor) -> None:
        self.optimizers[optimizer].zero_grad()
        loss.backward()
        self.optimizers[optimizer].step()

    def follow(self, target: str, network: str) -> None:
        for slow, fast in zip(self.nets[target].parameters(), self.nets[network].parameters(), strict=True):
            slow.data = (1 - TAU) * slow.data + TAU * fast.data

    def lower(self, obs: Tensor, actions: Tensor, of: str = "") -> Tensor:
        """The lower of the two values of actions, by the critics or `of` their targets: (batch,)."""
        first, second = (self.nets[f"{name}{of}"](obs, actions)[:, 0] for name in ("qf1", "qf2"))
        assert 0 < (first < second).sum() < len(first)  # else one of them would do
        return torch.minimum(first, second)

    def critics(self, obs, actions, rewards, terminated, next_obs, next_actions, bonus=0) -> None:
        """Learn values of actions; those of the next ones have a bonus."""
        targets = self.targets(rewards, terminated, self.lower(next_obs, next_actions, "_target") + bonus)
        for name in ("qf1", "qf2"):
            values = self.nets[name](obs, actions)[:, 0]
            self.losses |= {f"{name}_values": values.mean(), f"{name}_loss": ((values - targets) ** 2).mean()}
        loss = self.losses["qf1_loss"] + self.losses["qf2_loss"]
        self.losses["qf_loss"] = loss / 2
        self.learn("q_optimizer", loss)

    def squashed(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of SAC and their log-probabilities, in float64: the density gets back to u by atanh."""
        mean, log_std = self.nets["actor"](obs)
        u = (mean + log_std.exp() * torch.randn_like(mean)).double()
        policy = TransformedDistribution(Normal(mean.double(), log_std.double().exp()), [TanhTransform()])
        return u.tanh().float(), policy.log_prob(u.tanh()).sum(1).float()

    def sac_continuous_action(self, with_actor: bool, with_target: bool) -> None:
        obs, *_, next_obs = batch = self.batch(OBS_DIM, ACTION_DIM, 1, 1, OBS_DIM)
        log_alpha = self.nets["log_alpha"][0]
        next_actions, log_prob = self.squashed(next_obs)
        self.critics(*batch, next_actions, -log_alpha.exp() * log_prob)
        if with_target:
            self.follow("qf1_target", "qf1")
            self.follow("qf2_target", "qf2")
        for _ in range(2 if with_actor else 0):
            actions, log_prob = self.squashed(obs)
            alpha = self.losses["alpha"] = log_alpha.exp().detach()
            self.losses["actor_loss"] = (alpha * log_prob - self.lower(obs, actions)).mean()
            self.learn("actor_optimizer", self.losses["actor_loss"])
            if self.result["args"].autotune:
                self.losses["alpha_loss"] = -(log_alpha.exp() * (log_prob.detach() - ACTION_DIM)).mean()
                self.learn("alpha_optimizer", self.losses["alpha_loss"])

    def td3_continuous_action(self, with_actor: bool) -> None:
        obs, actions, *_, next_obs = batch = self.batch(OBS_DIM, ACTION_DIM, 1, 1, OBS_DIM)
        noise, means = 0.4 * torch.randn_like(actions), self.nets["actor_target"](next_obs)
        smooth = means + torch.where(noise.abs() > 0.5, 0.5 * noise.sign(), noise)
        assert (noise.abs() > 0.5).any() and (smooth.abs() > 1).any()  # both limits are in play
        self.critics(*batch, torch.where(smooth.abs() > 1, smooth.sign(), smooth))
        if with_actor:
            self.losses["actor_loss"] = -self.nets["qf1"](obs, self.nets["actor"](obs)).mean()
            self.learn("actor_optimizer", self.losses["actor_loss"])
            for network in ("actor", "qf1", "qf2"):
                self.follow(f"{network}_target", network)

    def distributions(self, obs, actions, targets: dict[str, Tensor]) -> None:
        """Learn distributions of returns, of each critic its own, and have the target critics follow."""
        for key, target in targets.items():
            log_probs = self.nets[key](obs, actions).log_softmax(1)
            self.losses[f"{key}_values"] = (log_probs.exp() @ ATOMS).mean()
            self.losses[f"{key}_loss"] = -(target * log_probs).sum(1).mean()
        loss = self.losses["qf1_loss"] + self.losses["qf2_loss"]
        self.losses["qf_loss"] = loss / 2
        self.learn("q_optimizer", loss)
        for network in targets:
            self.follow(f"{network}_target", network)

    def fast_td3(self, with_actor: bool) -> None:
        obs, actions, scores, factors, next_obs = self.result["sample"]()
        noise = (0.4 * torch.randn_like(actions)).clip(-0.5, 0.5)
        next_actions = (self.nets["actor"](next_obs) + noise).detach().clip(-1, 1)
        probs = [self.nets[f"{key}_target"](next_obs, next_actions).softmax(1) for key in ("qf1", "qf2")]
        landed = scores + factors * ATOMS
        pairs = zip(landed.clip(-4, 3), *probs, strict=True)
        lower = [min(one, other, key=places.dot) for places, one, other in pairs]
        targets = conftest.shared_out(torch.stack(lower), landed)
        self.distributions(obs, actions, {"qf1": targets, "qf2": targets})
        if with_actor:
            actions = self.nets["actor"](obs)
            values = [self.nets[key](obs, actions).softmax(1) @ ATOMS for key in ("qf1", "qf2")]
            self.losses["actor_loss"] = -torch.minimum(*values).mean()
            self.learn("actor_optimizer", self.losses["actor_loss"])

    def fast_sac(self, with_actor: bool) -> None:
        obs, actions, scores, factors, next_obs = self.result["sample"]()
        log_alpha, args = self.nets["log_alpha"][0], self.result["args"]
        next_actions, next_log_prob = (part.detach() for part in self.squashed(next_obs))
        alpha = self.losses["alpha"] = log_alpha.exp().detach()
        landed = scores + factors * (ATOMS - alpha * next_log_prob[:, None])
        probs = {key: self.nets[f"{key}_target"](next_obs, next_actions).softmax(1) for key in ("qf1", "qf2")}
        targets = {key: conftest.shared_out(each, landed) for key, each in probs.items()}
        self.distributions(obs, actions, targets)
        if args.autotune:
            entropy = -args.target_entropy_ratio * ACTION_DIM
            self.losses["alpha_loss"] = -(log_alpha.exp() * (next_log_prob + entropy)).mean()
            self.learn("alpha_optimizer", self.losses["alpha_loss"])
        if with_actor:
            actions, log_prob = self.squashed(obs)
            values = [self.nets[key](obs, actions).softmax(1) @ ATOMS for key in ("qf1", "qf2")]
            self.losses["actor_loss"] = (log_alpha.exp().detach() * log_prob - sum(values) / 2).mean()
            self.losses["entropy"] = -log_prob.mean()
            self.learn("actor_optimizer", self.losses["actor_loss"])

    def dqn(self, with_target: bool) -> None:
        obs, actions, rewards, terminated, next_obs = self.batch(OBS_DIM, 1, 1, 1, OBS_DIM)
        values, preferred = (self.nets[key](next_obs) for key in ("target_network", "q_network"))
        assert not torch.equal(values.argmax(dim=1), preferred.argmax(dim=1))
        best = (preferred if self.result["args"].double else values).argmax(dim=1)
        targets = self.targets(rewards, terminated, values[range(BATCH), best])
        q_values = self.nets["q_network"](obs)[range(BATCH), actions[:, 0].int()]
        self.losses = {"q_values": q_values.mean(), "td_loss": ((q_values - targets) ** 2).mean()}
        self.learn("optimizer", self.losses["td_loss"])
        if with_target:
            self.follow("target_network", "q_network")


# Options, and the flags of `update` in turn.
STEPS = {
    "sac_continuous_action": [(True, True), (False, False), (True, True)],
    "td3_continuous_action": [(True,), (False,), (True,)],
    "fast_td3": [(True,), (False,), (True,)],
    "fast_sac": [(True,), (False,), (True,)],
    "dqn": [(False,), (True,), (False,)],
}
OPTIONS = [(name, ()) for name in KNOWN] + [
    ("sac_continuous_action", ("--no-autotune",)),
    ("fast_sac", ("--no-autotune",)),
    ("fast_sac", ("--target-entropy-ratio", 0.5)),
    ("dqn", ("--double",)),
]
CASES = [(f"{name}{suffix}", options) for name, options in OPTIONS for suffix in ("", "_torchcompile")]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradient_steps_are_those_of_the_papers(name, options):
    result, algorithm = known(name, *options), name.removesuffix("_torchcompile")
    by_hand = ByHand(result)
    with conftest.draws_of_a_twin(name):
        for update in (getattr(by_hand, algorithm), result["update"]):
            torch.manual_seed(1)
            for flags in STEPS[algorithm]:
                update(*flags)
    expected = result | {"state": by_hand.nets | by_hand.optimizers, "losses": by_hand.losses}
    conftest.assert_steps_by_hand(result, expected, ACTOR_RATE)
