"""Off-policy scripts on environments and batches that are known: what is stored, counted and learnt."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from conftest import (
    ACTOR_CRITIC,
    DISCRETE,
    EACH_STEP,
    OFF_POLICY,
    adam_state,
    assert_same_numbers,
    assert_steps_by_hand,
    changed,
    forget,
    run,
    world,
)
from envs import Bytes, episode_end, observation, reward
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

off_policy = pytest.mark.parametrize("name", OFF_POLICY)
actor_critic = pytest.mark.parametrize("name", ACTOR_CRITIC)
discrete = pytest.mark.parametrize("name", DISCRETE)
NUMPY = DISCRETE[1]  # it acts in NumPy
both_counts_of_envs = pytest.mark.parametrize("num_envs", [1, 3])

OBS_DIM, ACTION_DIM = 4, 2


def fresh(name: str, num_envs: int = 1, *args, kind: str = "Scripted") -> dict:
    """A run of 42 steps in a scripted world; learning starts after ten."""
    fixed = ("--batch-size", 4, "--learning-starts", 10, "--total-timesteps", 42)
    each_step = EACH_STEP if name in DISCRETE else ()
    return run(name, *world(name, kind), *fixed, *each_step, "--num-envs", num_envs, *args)


scripted = cache(fresh)  # tests share its results, and leave them as they are


def sub_environments(result: dict) -> list:
    """The instances of envs.Scripted, which outlive the run."""
    return [env.unwrapped for env in result["envs"].envs]


def transitions(seed: int, see=observation):
    """Yield, for ever, what Scripted-v0 goes through: obs, reward, terminated, next_obs, done."""
    episode = 0
    while True:
        length, terminated, _ = episode_end(seed, episode)
        for step in range(length):
            last = step == length - 1
            seen, next_seen = see(seed, episode, step).ravel(), see(seed, episode, step + 1).ravel()
            yield seen, reward(episode, step), last and terminated, next_seen, last
        episode += 1


def histories(result: dict, **options):
    """Yield, step by step, the transition and the action of each environment."""
    envs = sub_environments(result)
    pairs = [zip(transitions(env.seeds[0], **options), env.actions, strict=False) for env in envs]
    return zip(*pairs, strict=True)


# ---- Storage -----------------------------------------------------------------------------------------------
def transition_row(name: str, transition: tuple, action) -> np.ndarray:
    """The row of the replay buffer for a transition: where observations are bytes, it is bytes."""
    obs, earned, terminated, next_obs, _ = transition
    if name in DISCRETE:
        scalars = np.array([action - 5, earned, terminated], np.float32)
        kind = np.uint8 if obs.dtype == np.uint8 else np.float32
        return np.concatenate([scalars.view(kind), obs.astype(kind), next_obs.astype(kind)])
    low, high = np.array([-1, -0.3]), np.array([0.7, 5])  # for the script from -1 to 1
    scaled = 2 * (action - low) / (high - low) - 1
    return np.concatenate([obs, scaled, [earned, terminated], next_obs]).astype(np.float32)


WORLDS = [(name, "Scripted") for name in OFF_POLICY] + [(name, "Bytes") for name in DISCRETE]


@pytest.mark.parametrize(("name", "kind"), WORLDS)
@both_counts_of_envs
@pytest.mark.parametrize("buffer_size", [1000, 10])
def test_replay_buffer_holds_the_transitions(name, kind, num_envs, buffer_size):
    result = scripted(name, num_envs, "--buffer-size", buffer_size, kind=kind)
    steps = histories(result, see=Bytes.image if kind == "Bytes" else observation)
    rows = [transition_row(name, transition, action) for step in steps for transition, action in step]
    assert len(rows) == result["global_step"] == 42
    capacity, buffer = buffer_size // num_envs * num_envs, result["buffer"].numpy()
    expected = np.zeros((capacity, len(rows[0])), rows[0].dtype)
    for index, row in enumerate(rows):
        expected[index % capacity] = row
    actions = slice(0, 0) if name in DISCRETE else slice(OBS_DIM, OBS_DIM + ACTION_DIM)
    np.testing.assert_allclose(buffer[:, actions], expected[:, actions], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.delete(buffer, actions, axis=1), np.delete(expected, actions, axis=1))
    assert (buffer.dtype, result["size"].item()) == (expected.dtype, min(len(rows), capacity))
    assert all(loss.isfinite().all() for loss in result["losses"].values())


@off_policy
@both_counts_of_envs
def test_episodes_are_counted_whole(name, num_envs):
    result = scripted(name, num_envs)
    running, returns, lengths = [[] for _ in range(num_envs)], [], []
    for index, step in enumerate(histories(result), start=1):
        for rewards, ((_, earned, _, _, done), _) in zip(running, step, strict=True):
            rewards.append(earned)
            if done:
                returns.append((index * num_envs, pytest.approx(sum(rewards), rel=1e-5)))
                lengths.append((index * num_envs, len(rewards)))
                rewards.clear()
    assert len(returns) > 10
    assert result["logged"]["charts/episodic_return"] == returns
    assert result["logged"]["charts/episodic_length"] == lengths
    assert result["returns"] == [value for _, value in returns]


@off_policy
def test_seeds_of_environments(name):
    results = [scripted(name, 8, "--seed", seed) for seed in (1, 2)]
    seeds = [env.seeds for result in results for env in sub_environments(result)]
    assert len({first for first, *_ in seeds}) == 16
    # A seed at a later reset would repeat an episode.
    assert all(seed is None for _, *later in seeds for seed in later)


@off_policy
def test_a_seed_repeats_a_run(name):
    first = fresh(name)
    assert_same_numbers(first, fresh(name), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_same_numbers(first, fresh(name, 1, "--seed", 2))


# ---- Actions -----------------------------------------------------------------------------------------------
def constant(name: str, value: float) -> dict:
    """A run whose actor's output layer now gives `value` for every observation."""
    result = fresh(name)
    *_, layer = result["actor"].children()
    layer.weight.data.fill_(0)
    layer.bias.data.fill_(value)
    return result


@actor_critic
@pytest.mark.parametrize("sign", [-1, 1])
def test_saturated_actions_are_the_bounds_of_the_environment(name, sign):
    result = constant(name, 100 * sign)
    [env], given = result["envs"].envs, []
    for action in result["act"](torch.zeros(100, OBS_DIM)).numpy():
        env.reset()
        env.step(action)  # which checks that it is within its bounds
        given.append(env.unwrapped.actions[-1])
    bound = env.unwrapped.action_space.high if sign > 0 else env.unwrapped.action_space.low
    assert np.isclose(given, bound).any(axis=0).all()
    assert (result["best_action"](np.zeros(OBS_DIM)) == sign).all()


@actor_critic
def test_exploration_has_the_right_deviation(name):
    noise, expected = constant(name, 0)["act"](torch.zeros(20_000, OBS_DIM)), 0.1
    if name.startswith("sac"):
        noise, expected = noise.atanh(), float(np.exp(-1.5))  # halfway of the range of log(std)
    torch.testing.assert_close(noise.mean(0), torch.zeros(ACTION_DIM), rtol=0, atol=0.01)
    torch.testing.assert_close(noise.std(0), torch.full((ACTION_DIM,), expected), rtol=0.03, atol=0)


def in_pytorch(result: dict, obs: Tensor) -> Tensor:
    """Actions of DQN, drawn by the device."""
    return result["act"](obs)


def in_numpy(result: dict, obs: Tensor) -> Tensor:
    """Actions of DQN's twin, drawn by the host."""
    return torch.from_numpy(result["numpy_policy"](obs.numpy()))


@pytest.mark.parametrize("epsilon", [0, 0.3, 1])
@pytest.mark.parametrize(("name", "act"), [*zip(DISCRETE, [in_pytorch] * 2, strict=True), (NUMPY, in_numpy)])
def test_so_many_actions_are_random(name, act, epsilon):
    result, obs = fresh(name), torch.randn(1, OBS_DIM)
    result["epsilon"].fill_(epsilon)
    best = result["best_action"](obs[0].numpy()) - 5
    assert best == result["q_network"](obs).argmax()
    actions, expected = act(result, obs.expand(20_000, -1)), torch.full((3,), epsilon / 3)
    expected[best] += 1 - epsilon
    frequencies, close = actions.bincount(minlength=3) / 20_000, 0.02 if epsilon else 0
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=close)
    # Each environment explores by itself: of two, both are at their best as often as by independent draws.
    both = (actions[:-1:2] == best) & (actions[1::2] == best)
    torch.testing.assert_close(both.float().mean(), expected[best] ** 2, rtol=0, atol=close)


@discrete
def test_the_share_of_random_actions_falls_while_it_runs(name):
    """By what the policy finds in the tensor, before and after learning starts."""
    policy = "explores = torch.rand(" if name == NUMPY else "explores = torch.rand_like("
    with changed(name, policy, f'globals().setdefault("shares", []).append(epsilon.item()); {policy}'):
        result = fresh(name, 1, "--start-e", 0.9, "--end-e", 0.1, "--exploration-fraction", 0.5)
    assert result["shares"] == pytest.approx([max(0.9 - 0.8 * step / 21, 0.1) for step in range(42)])


def test_a_policy_in_numpy_is_the_network_after_each_gradient_step(capfd):
    compare = 'globals().setdefault("equal", []).append(torch.equal(host_params, flat_network.params))'
    with changed(NUMPY, "actions = policy(obs)", f"{compare}; actions = policy(obs)"):
        result = fresh(NUMPY, 3)
    assert result["policy"] is result["numpy_policy"]
    assert "acting in PyTorch" not in capfd.readouterr().err
    assert len(result["equal"]) == 14 and all(result["equal"])
    for param in result["host_network"].parameters():  # biases that matter, and outputs of some size
        param.normal_()
    result["epsilon"].fill_(0)
    obs = torch.randn(100, OBS_DIM)
    assert torch.equal(in_numpy(result, obs), result["host_network"](obs).argmax(dim=1))


OTHER_LAYERS = {
    "another activation": ("nn.ReLU(),", "nn.Tanh(),"),
    "a layer without bias": ("nn.Linear(120, 84, ", "nn.Linear(120, 84, bias=False, "),
    "a layer of one's own": ("nn.ReLU(),", "type('Own', (nn.ReLU,), {})(),"),
    "another head": (
        "\n    def forward(self, obs: Tensor) -> Tensor:\n"
        "        # The twin acts by `network` alone.\n        return ",
        "        self.value = nn.Linear(obs_dim, 1)\n\n"
        "    def forward(self, obs: Tensor) -> Tensor:\n        return self.value(obs) + ",
    ),
}


@pytest.mark.parametrize("layers", OTHER_LAYERS)
def test_a_network_that_numpy_does_not_know_acts_in_pytorch(layers, capfd):
    results = []
    for name in DISCRETE:
        with changed(name, *OTHER_LAYERS[layers]):
            results.append(fresh(name))
    assert capfd.readouterr().err.count("acting in PyTorch") == 1
    assert_same_numbers(*results, atol=1e-3)


@pytest.mark.parametrize(("num_envs", "kind"), [(65, "Scripted"), (1, "Bytes")])
def test_many_environments_and_bytes_act_in_pytorch(num_envs, kind, capfd):
    args = ("--buffer-size", 130, "--total-timesteps", 195)
    assert fresh(NUMPY, num_envs, *args, kind=kind)["policy"].__name__ == "torch_policy"
    assert capfd.readouterr().err.count("acting in PyTorch") == 1


# ---- How many gradient steps -------------------------------------------------------------------------------
def gradient_steps(result: dict, optimizer: str) -> int:
    """The steps that an optimizer has made."""
    return int(next(step for name, step in adam_state(result, optimizer).items() if name.startswith("step.")))


@actor_critic
@pytest.mark.parametrize(
    ("num_envs", "updates_per_step", "updates", "of_the_actor"),
    # Actions are last chosen at step 41, with four environments at 40: 31 or 30 steps after learning starts.
    [(1, 0.25, 8, 3), (1, 1, 31, 11), (1, 2, 62, 21), (4, 0.25, 8, 3), (4, 1, 30, 10), (4, 2, 60, 20)],
)
def test_number_of_gradient_steps(name, num_envs, updates_per_step, updates, of_the_actor):
    result = scripted(name, num_envs, "--updates-per-step", updates_per_step, "--policy-frequency", 3)
    assert result["updates"] == gradient_steps(result, "critic_optimizer") == updates
    # SAC makes up for the steps left out.
    assert gradient_steps(result, "actor_optimizer") == of_the_actor * (3 if name.startswith("sac") else 1)


@discrete
@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "updates"),
    [(1, 1, 31), (1, 4, 7), (1, 16, 1), (1, 30, 1), (4, 1, 30), (4, 4, 7)],
)
def test_number_of_gradient_steps_of_discrete_actions(name, num_envs, train_frequency, updates):
    result = scripted(name, num_envs, "--train-frequency", train_frequency)
    assert result["updates"] == gradient_steps(result, "optimizer") == updates


@discrete
@pytest.mark.parametrize(("train_frequency", "every"), [(1, 7), (2, 6), (4, 8), (4, 3), (3, 7)])
def test_targets_follow_in_their_turn(name, train_frequency, every):
    """After each gradient step with which the steps that learn pass another multiple of the frequency."""
    options = ("--train-frequency", train_frequency, "--target-network-frequency", every)
    asked = '"""One gradient step and, if asked for, one of the target network."""'
    with changed(name, asked, 'globals().setdefault("asked", []).append(with_target)'):
        result = fresh(name, 1, *options)
    steps = [train_frequency * (index + 1) for index in range(31 // train_frequency)]
    assert result["asked"] == [step // every > (step - train_frequency) // every for step in steps]


# ---- Gradient steps ----------------------------------------------------------------------------------------
BATCH, GAMMA, TAU, RATE, ACTOR_RATE = 32, 0.9, 0.1, 3e-3, 1e-3
KNOWN = {
    "sac": ("--policy-lr", ACTOR_RATE, "--q-lr", RATE),
    "td3": ("--learning-rate", RATE, "--policy-noise", 0.4, "--noise-clip", 0.5),
    "dqn": ("--learning-rate", RATE),
}


def known(name: str, *options) -> dict:
    """A run on the eve of gradient steps on random rows, whose optimizers have no past; no networks agree."""
    result = fresh(name, 1, "--batch-size", BATCH, "--gamma", GAMMA, "--tau", TAU, *KNOWN[name[:3]], *options)
    torch.manual_seed(7)
    for key, item in result["state"].items():
        if "optimizer" in key:
            forget(item)
        else:
            for param in item.parameters():
                param.data.add_(0.1 * torch.randn_like(param))
    buffer = result["buffer"].normal_()
    buffer[:, 2 if name in DISCRETE else 7] = (torch.rand(len(buffer)) < 0.4).float()  # terminated
    if name in DISCRETE:
        buffer[:, 0] = torch.randint(3, (len(buffer),)).float()
    result["size"].fill_(50)
    return result


class ByHand:
    """Plain copies of the networks of a run, with optimizers of PyTorch, and gradient steps of the papers."""

    def __init__(self, result: dict):
        self.result, self.losses = result, {}
        self.nets = {
            key: copy.deepcopy(net) for key, net in result["state"].items() if "optimizer" not in key
        }
        self.optimizers = {}
        for key in result["state"].keys() - self.nets.keys():
            learns = {"optimizer": "q_network", "alpha_optimizer": "log_alpha"}.get(
                key, key[: -len("_optimizer")]
            )
            rate = ACTOR_RATE if key == "actor_optimizer" and "log_alpha" in self.nets else RATE
            params = self.nets[learns].requires_grad_(True).parameters()
            self.optimizers[key] = torch.optim.Adam(params, lr=rate)

    def globals(self) -> dict:
        """Those that the run should have."""
        return self.result | {"state": self.nets | self.optimizers, "losses": self.losses}

    def batch(self, *widths: int) -> tuple[Tensor, ...]:
        """Draw rows among those in use, and split them."""
        indices = torch.randint(2**62, (BATCH,)) % self.result["size"]
        return torch.stack([self.result["buffer"][index] for index in indices.tolist()]).split(widths, dim=1)

    def targets(self, rewards: Tensor, terminated: Tensor, next_values: Tensor) -> Tensor:
        """What a value should be, for each transition."""
        rows = zip(*(column.flatten().tolist() for column in (rewards, terminated, next_values)), strict=True)
        return torch.tensor([earned if end else earned + GAMMA * value for earned, end, value in rows])

    def learn(self, optimizer: str, loss: Tensor) -> None:
        """Take a step of an optimizer."""
        self.optimizers[optimizer].zero_grad()
        loss.backward()
        self.optimizers[optimizer].step()

    def follow(self, target: str, network: str) -> None:
        """Move a target network towards its network."""
        for slow, fast in zip(self.nets[target].parameters(), self.nets[network].parameters(), strict=True):
            slow.data = (1 - TAU) * slow.data + TAU * fast.data

    def critics(self, obs: Tensor, actions: Tensor, targets: Tensor) -> None:
        """The step of both critics."""
        first, second = self.nets["critic"](obs, actions)
        losses = [((values - targets) ** 2).mean() for values in (first, second)]
        self.learn("critic_optimizer", losses[0] + losses[1])
        self.losses |= {
            "qf1_values": first,
            "qf2_values": second,
            "qf1_loss": losses[0],
            "qf2_loss": losses[1],
        }
        self.losses["qf_loss"] = (losses[0] + losses[1]) / 2

    def squashed(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of SAC and their log-probabilities, in float64: the density gets back to u by atanh."""
        mean, log_std = self.nets["actor"](obs)
        u = (mean + log_std.exp() * torch.randn_like(mean)).double()
        policy = TransformedDistribution(Normal(mean.double(), log_std.double().exp()), [TanhTransform()])
        return u.tanh().float(), policy.log_prob(u.tanh()).sum(1).float()

    def sac(self, with_actor: bool, with_target: bool) -> None:
        """A gradient step of SAC."""
        obs, actions, rewards, terminated, next_obs = self.batch(OBS_DIM, ACTION_DIM, 1, 1, OBS_DIM)
        log_alpha = self.nets["log_alpha"][0]
        with torch.no_grad():
            next_actions, log_prob = self.squashed(next_obs)
            next_values = torch.minimum(*self.nets["critic_target"](next_obs, next_actions))
        self.critics(
            obs, actions, self.targets(rewards, terminated, next_values - log_alpha.exp() * log_prob)
        )
        if with_target:
            self.follow("critic_target", "critic")
        for _ in range(2 if with_actor else 0):
            actions, log_prob = self.squashed(obs)
            alpha = self.losses["alpha"] = log_alpha.exp().detach()
            values = torch.minimum(*self.nets["critic"](obs, actions))
            self.losses["actor_loss"] = (alpha * log_prob - values).mean()
            self.learn("actor_optimizer", self.losses["actor_loss"])
            if self.result["args"].autotune:
                self.losses["alpha_loss"] = -(log_alpha.exp() * (log_prob.detach() - ACTION_DIM)).mean()
                self.learn("alpha_optimizer", self.losses["alpha_loss"])

    def td3(self, with_actor: bool) -> None:
        """A gradient step of TD3."""
        obs, actions, rewards, terminated, next_obs = self.batch(OBS_DIM, ACTION_DIM, 1, 1, OBS_DIM)
        noise = (0.4 * torch.randn_like(actions)).flatten().tolist()
        means = self.nets["actor_target"](next_obs).flatten().tolist()
        clipped = [max(-0.5, min(0.5, number)) for number in noise]
        smooth = [max(-1.0, min(1.0, mean + number)) for mean, number in zip(means, clipped, strict=True)]
        assert clipped != noise and {-1.0, 1.0} & {*smooth}  # both limits are in play
        next_actions = torch.tensor(smooth).view_as(actions)
        next_values = torch.minimum(*self.nets["critic_target"](next_obs, next_actions))
        self.critics(obs, actions, self.targets(rewards, terminated, next_values))
        if with_actor:
            self.losses["actor_loss"] = -self.nets["critic"](obs, self.nets["actor"](obs))[0].mean()
            self.learn("actor_optimizer", self.losses["actor_loss"])
            self.follow("actor_target", "actor")
            self.follow("critic_target", "critic")

    def dqn(self, with_target: bool) -> None:
        """A gradient step of DQN."""
        scalars, obs, next_obs = self.batch(3, OBS_DIM, OBS_DIM)
        values, preferred = (self.nets[key](next_obs).tolist() for key in ("target_network", "q_network"))
        assert np.any(np.argmax(values, axis=1) != np.argmax(preferred, axis=1))
        chosen_by = preferred if self.result["args"].double else values
        next_values = [row[by.index(max(by))] for row, by in zip(values, chosen_by, strict=True)]
        targets = self.targets(scalars[:, 1], scalars[:, 2], torch.tensor(next_values))
        rows = zip(self.nets["q_network"](obs), scalars[:, 0].int().tolist(), strict=True)
        self.losses["q_values"] = torch.stack([row[action] for row, action in rows])
        self.losses["td_loss"] = ((self.losses["q_values"] - targets) ** 2).mean()
        self.learn("optimizer", self.losses["td_loss"])
        if with_target:
            self.follow("target_network", "q_network")


# The flags of `update`, in turn.
STEPS = {"sac": [(True, True), (False, False), (True, True)], "td3": [(True,), (False,), (True,)]}
STEPS["dqn"] = [(False,), (True,), (False,)]
OPTIONS = {"sac": [(), ("--no-autotune",)], "td3": [()], "dqn": [(), ("--double",)]}


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in OFF_POLICY for options in OPTIONS[name[:3]]]
)
def test_gradient_steps_are_those_of_the_papers(name, options):
    result, algorithm = known(name, *options), name[:3]
    by_hand = ByHand(result)
    for update in (getattr(by_hand, algorithm), result["update"]):
        torch.manual_seed(1)
        for flags in STEPS[algorithm]:
            update(*flags)
    assert_steps_by_hand(result, by_hand.globals(), ACTOR_RATE)


@off_policy
def test_sampling_is_uniform_among_the_rows_in_use(name):
    """By networks that give an observation's first number, which is here the number of its row."""
    draws, rows = 4000, 100
    result = fresh(name, 1, "--batch-size", draws, "--buffer-size", draws, "--learning-starts", 38)
    network = result["q_network" if name in DISCRETE else "critic"]
    for key, param in network.named_parameters():
        param.data.fill_(0)
        if key.endswith("weight"):
            param.data[..., 0, 0] = 1
    result["buffer"].fill_(0)[:, 3 if name in DISCRETE else 0] = torch.arange(draws)
    result["size"].fill_(rows)
    result["update"](*STEPS[name[:3]][0])
    drawn = result["losses"]["q_values" if name in DISCRETE else "qf1_values"].long().bincount(minlength=rows)
    assert len(drawn) == rows
    chi_square = ((drawn - draws / rows) ** 2 / (draws / rows)).sum().item()
    # Its mean is 99 and its variance 198: draws without replacement, or in turns, are below, a bias above.
    assert abs(chi_square - 99) < 4 * 198**0.5


# ---- Values ------------------------------------------------------------------------------------------------
@off_policy
@pytest.mark.parametrize(
    ("probe", "values"),
    [
        ("ConstantReward", {0: 1}),
        ("ObservationReward", {-0.8: -0.8, -0.3: -0.3, 0.2: 0.2, 0.7: 0.7}),
        ("LateReward", {0: 0.25, 1: 0.5, 2: 1}),
        ("Truncated", {0: 2}),
    ],
)
def test_learnt_values_are_the_known_ones(name, probe, values):
    args = ["--gamma", 0.5, "--total-timesteps", 500, "--learning-starts", 50, "--tau", 0.1]
    args += ["--batch-size", 32, "--buffer-size", 1000]
    # Without the entropy the values are the plain ones.
    args += ["--no-autotune", "--alpha", 0] if name.startswith("sac") else []
    if name in DISCRETE:
        args += ["--train-frequency", 1, "--target-network-frequency", 1, "--learning-rate", 1e-3]
        args += ["--total-timesteps", 1000]
    result, seen = run(name, *world(name, probe), *args), torch.tensor([*map(float, values)])
    with torch.no_grad():
        if name in DISCRETE:
            learnt = result["q_network"](seen[:, None])[None]
        else:
            obs, actions = torch.cartesian_prod(seen, torch.linspace(-1, 1, 5)).split(1, dim=1)
            learnt = result["critic"](obs, actions).view(2, len(values), -1)
    expected = torch.tensor([*map(float, values.values())])[:, None].expand_as(learnt)
    torch.testing.assert_close(learnt, expected, rtol=0, atol=0.1)
