"""Tiny environments of which all is known: envs:Scripted-v0 and so on, or in place of EnvPool's games."""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

# The episodes of Scripted-v0 as (length, terminated, truncated), repeated for ever: every kind of end, also
# in a first step, in consecutive steps, and both ends at once.
LENGTHS, TERMINATED, TRUNCATED = (3, 1, 1, 4, 2, 1, 1, 5), (1, 1, 0, 0, 1, 1, 0, 0), (0, 0, 1, 1, 1, 1, 1, 1)
EPISODES = [*zip(LENGTHS, map(bool, TERMINATED), map(bool, TRUNCATED), strict=True)]


def episode_end(seed: int, episode: int) -> tuple[int, bool, bool]:
    """Length, terminated and truncated of an episode; environments start at different places of the list."""
    return EPISODES[(seed + episode) % len(EPISODES)]


def observation(seed: int, episode: int, step: int) -> np.ndarray:
    """What is seen after `step` steps of an episode, never the same twice, nor exact in float32."""
    return np.array([[seed / 2**32, episode], [step, 0.1 * step]])


def reward(episode: int, step: int) -> float:
    """The reward of the step that leaves observation `step`; not exact in float32."""
    return 0.1 * step - episode


class Scripted(gym.Env):
    """Goes through EPISODES whatever the actions are, which must be valid; keeps actions and seeds."""

    observation_space = Box(-np.inf, np.inf, (2, 2), np.float64)

    def __init__(self):
        # Per instance, for action_space.seed() is.
        self.action_space = Box(np.array([-1, -0.3], np.float32), np.array([0.7, 5], np.float32))
        self.actions: list[np.ndarray] = []
        self.seeds: list[int | None] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.step_index, self.episode = 0, len(self.seeds) - 1
        return observation(self.seeds[0], self.episode, 0), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(np.copy(action))
        length, terminated, truncated = episode_end(self.seeds[0], self.episode)
        assert self.step_index < length, "a step after the end of an episode"
        earned = reward(self.episode, self.step_index)
        self.step_index += 1
        last = self.step_index == length
        return (
            observation(self.seeds[0], self.episode, self.step_index),
            earned,
            last and terminated,
            last and truncated,
            {},
        )


class Row(NamedTuple):
    """A step of one environment under NEXT_STEP autoreset: an observation, and what comes of acting at it.

    Where it is not valid, the step only goes on after an end, and the observation is the final one.
    """

    obs: np.ndarray
    valid: bool = False
    reward: float = 0.0  # what the learner gets
    score: float = 0.0  # what counts in the return of the episode
    terminated: bool = False
    truncated: bool = False
    over: bool = False  # the end of an episode


def scripted_rows(seed: int) -> Iterator[Row]:
    """Yield, for ever, what Scripted-v0 goes through."""
    for episode in count():
        length, terminated, truncated = episode_end(seed, episode)
        for step in range(length):
            last, earned = step == length - 1, reward(episode, step)
            end = (last and terminated, last and truncated, last)
            yield Row(observation(seed, episode, step), True, earned, earned, *end)
        yield Row(observation(seed, episode, length))


# The games of ScriptedGames, repeated for ever, as (steps of each life, whether the end is a cut): lives of
# one step, also in a row, and games cut in their first step, in consecutive games, and after a lost life.
GAMES = [((3, 1, 2), False), ((1,), False), ((1, 1, 1), False)]
GAMES += [((2, 3), True), ((1,), True), ((1,), True), ((5,), True)]
SCORES = [0, 4, -1, 0, 7, 1]


def frames(seed: int, game: int, step: int) -> np.ndarray:
    """What is seen in a game; no two are alike, also across environments."""
    return np.random.default_rng([seed, game, step]).integers(256, size=(4, 84, 84), dtype=np.uint8)


def game_rows(seed: int) -> Iterator[Row]:
    """Yield, for ever, what one of ScriptedGames goes through; each starts at another place of the list."""
    for game in count():
        lives, cut = GAMES[(seed + game) % len(GAMES)]
        step = count()
        for life, length in enumerate(lives, start=1):
            for left in reversed(range(length)):
                index = next(step)
                lost, over = left == 0, left == 0 and life == len(lives)
                score, truncated = SCORES[(seed + game + index) % len(SCORES)], over and cut
                end = (lost and not truncated, truncated, over)
                yield Row(frames(seed, game, index), True, float(np.sign(score)), score, *end)
            yield Row(frames(seed, game, next(step)))


class ScriptedGames(gym.Env):
    """In place of `envpool.make`: goes through GAMES whatever the actions are, if valid, and keeps those.

    As with EnvPool, a lost life looks like an end, but for info["terminated"].
    """

    observation_space, action_space = Box(0, 255, (4, 84, 84), np.uint8), Discrete(3)

    def __init__(self, task_id, *, env_type, num_envs, seed, episodic_life, reward_clip, **_):
        assert (env_type, len(seed), episodic_life) == ("gymnasium", num_envs, True)
        self.reward_clip = reward_clip
        self.seeds: list[int] = seed
        self.actions: list[np.ndarray] = []
        self.steps = zip(*map(game_rows, seed), strict=True)

    def _observe(self):
        self.step_ahead = next(self.steps)
        return np.stack([row.obs for row in self.step_ahead])

    def reset(self):
        return self._observe(), {}

    def step(self, actions):
        assert (actions.dtype, actions.shape) == (np.int32, (len(self.seeds),))
        assert all(map(self.action_space.contains, actions)), actions
        self.actions.append(actions.copy())
        columns = dict(zip(Row._fields, map(np.array, zip(*self.step_ahead, strict=True)), strict=True))
        game_over = (columns["over"] & ~columns["truncated"]).astype(np.int32)
        info = {"reward": columns["score"].astype(np.float32), "terminated": game_over}
        rewards = columns["reward"].astype(np.float32) if self.reward_clip else info["reward"]
        return self._observe(), rewards, columns["terminated"], columns["truncated"], info


class Probe(gym.Env):
    """Episodes of `length` steps with known values; they end as `terminated` says, or else as truncated."""

    observation_space = Box(-10, 10, (1,), np.float32)

    def __init__(self, length, terminated, observe, reward):
        self.action_space = Box(-1, 1, (1,), np.float32)
        self.length, self.terminated, self.observe, self.reward = length, terminated, observe, reward

    def _observe(self):
        self.seen = self.observe(self.step_index, self.np_random)
        return np.array([self.seen], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_index = 0
        return self._observe(), {}

    def step(self, action):
        earned = self.reward(self.step_index, self.seen)
        self.step_index += 1
        last = self.step_index == self.length
        return self._observe(), earned, last and self.terminated, last and not self.terminated, {}


class Careless(gym.Env):
    """Changes its actions in place and returns its own state: (episode, step), in episodes of three steps."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self):
        self.action_space = Box(-0.5, 1, (2,), np.float32)
        self.given: list[np.ndarray] = []
        self.state = np.array([-1, 0], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state[:] = self.state[0] + 1, 0
        return self.state, {}

    def step(self, action):
        self.given.append(action.copy())
        action *= 100
        self.state[1] += 1
        return self.state, 1.0, False, bool(self.state[1] == 3), {}


class Faulty(gym.Env):
    """The second that is made may have a `fault` in its sixth step: a reward or observation is not finite.

    Episodes have three steps, so the sixth ends the second; "reset" is a fault in what is seen next.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    fault = None
    made = count()

    def __init__(self):
        self.action_space = Box(-1, 1, (1,), np.float32)
        self.number, self.steps = next(self.made), 0

    def _has(self, fault: str) -> bool:
        return (self.number, self.steps, self.fault) == (1, 6, fault)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([0, np.nan if self._has("reset") else 0], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        obs = np.array([self.steps % 3, np.nan if self._has("observation") else 0], np.float32)
        return obs, np.inf if self._has("reward") else 1.0, False, self.steps % 3 == 0, {}


class Bytes(Scripted):
    """Shows images of bytes, of which no two are alike."""

    observation_space = Box(0, 255, (1, 5), np.uint8)

    @staticmethod
    def image(seed: int, episode: int, step: int) -> np.ndarray:
        """What is seen after `step` steps of an episode."""
        return np.random.default_rng([seed, episode, step]).integers(256, size=(1, 5), dtype=np.uint8)

    def reset(self, **options):
        _, info = super().reset(**options)
        return self.image(self.seeds[0], self.episode, 0), info

    def step(self, action):
        _, *rest = super().step(action)
        return self.image(self.seeds[0], self.episode, self.step_index), *rest


class Unbounded(Careless):
    """Takes actions without bounds."""

    def __init__(self):
        super().__init__()
        self.action_space = Box(-np.inf, np.inf, (2,), np.float32)


class DictObs(Careless):
    """Shows a dict."""

    observation_space = Dict(position=Box(-1, 1, (1,), np.float32))


class Talkative(Careless):
    """Cannot be made, and says so in two lines."""

    def __init__(self):
        raise RuntimeError("one line\n  and another")


def choosing(kind: type[gym.Env]) -> type[gym.Env]:
    """A kind of environment that takes one of three actions, which it counts from 5."""

    class Choosing(kind):
        def __init__(self, **options):
            super().__init__(**options)
            self.action_space = Discrete(3, start=5)

    return Choosing


def register(kind: type[gym.Env], name: str = "", **options) -> None:
    """Let gym.make find a kind of environment, with actions of either sort.

    None takes a `render_mode`: one that draws nothing need not.
    """
    for suffix, either in {"": kind, "Choices": choosing(kind)}.items():
        gym.register(f"{name or kind.__name__}{suffix}-v0", entry_point=either, kwargs=options)


for kind in (Scripted, Careless, Faulty, Bytes, Unbounded, DictObs, Talkative):
    register(kind)
# Value 1.
register(Probe, "ConstantReward", length=1, terminated=True, observe=lambda *_: 0, reward=lambda *_: 1)
# The value is the observation.
SEEN = {"observe": lambda _, rng: rng.uniform(-1, 1), "reward": lambda _, seen: seen}
register(Probe, "ObservationReward", length=1, terminated=True, **SEEN)
# At observations 0, 1 and 2 the value is gamma^2, gamma and 1.
LATE = {"observe": lambda step, _: step, "reward": lambda step, _: float(step == 2)}
register(Probe, "LateReward", length=3, terminated=True, **LATE)
# Value 1 / (1 - gamma), however soon episodes are cut: their state goes on.
register(Probe, "Truncated", length=3, terminated=False, observe=lambda *_: 0, reward=lambda *_: 1)
