"""Tiny environments of which everything is known, for `--env-id envs:Scripted-v0` and so on with tests/ on sys.path."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

# The episodes of Scripted-v0 as (length, terminated, truncated), repeated for ever: every kind of end, also in a first
# step, in consecutive steps, and both ends at once.
EPISODES = [
    (3, True, False),
    (1, True, False),
    (1, False, True),
    (4, False, True),
    (2, True, True),
    (1, True, True),
    (1, False, True),
    (5, False, True),
]


def episode_end(seed: int, episode: int) -> tuple[int, bool, bool]:
    """Length, terminated and truncated of an episode; environments start at different places of the list."""
    return EPISODES[(seed + episode) % len(EPISODES)]


def observation(seed: int, episode: int, step: int) -> np.ndarray:
    """What is seen after `step` steps of an episode: no two are alike, also across environments; not exact in float32."""
    return np.array([[seed / 2**32, episode], [step, 0.1 * step]])


def reward(episode: int, step: int) -> float:
    """The reward of the step that leaves observation `step`; not exact in float32."""
    return 0.1 * step - episode


class Scripted(gym.Env):
    """Goes through EPISODES whatever the actions are, which must be valid; keeps the actions and the seeds it was given."""

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
        self.actions.append(action.copy())
        length, terminated, truncated = episode_end(self.seeds[0], self.episode)
        assert self.step_index < length, "a step after the end of an episode"
        earned = reward(self.episode, self.step_index)
        self.step_index += 1
        last = self.step_index == length
        return observation(self.seeds[0], self.episode, self.step_index), earned, last and terminated, last and truncated, {}


class Probe(gym.Env):
    """Episodes of `length` steps with the value known; they end as `terminated` says, or else as truncated."""

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


class Refused(gym.Env):
    """An environment with spaces that a script cannot use; nothing else works."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


def always(value):
    """A function of two arguments that ignores them."""
    return lambda *_: value


# None takes a `render_mode`: an environment that draws nothing need not.
unit = Box(-1, 1, (1,), np.float32)
for name, entry_point, options in [
    ("Scripted", Scripted, {}),
    # Value 1.
    ("ConstantReward", Probe, {"length": 1, "terminated": True, "observe": always(0), "reward": always(1)}),
    # The value is the observation.
    (
        "ObservationReward",
        Probe,
        {"length": 1, "terminated": True, "observe": lambda _, rng: rng.uniform(-1, 1), "reward": lambda _, seen: seen},
    ),
    # At observations 0, 1 and 2 the value is gamma^2, gamma and 1.
    (
        "LateReward",
        Probe,
        {"length": 3, "terminated": True, "observe": lambda step, _: step, "reward": lambda step, _: float(step == 2)},
    ),
    # Value 1 / (1 - gamma), however soon episodes are cut: their state goes on.
    ("Truncated", Probe, {"length": 3, "terminated": False, "observe": always(0), "reward": always(1)}),
    ("Discrete", Refused, {"observation_space": unit, "action_space": Discrete(2)}),
    ("Unbounded", Refused, {"observation_space": unit, "action_space": Box(-np.inf, np.inf, (1,), np.float32)}),
    ("DictObs", Refused, {"observation_space": Dict(position=unit), "action_space": unit}),
]:
    gym.register(f"{name}-v0", entry_point=entry_point, kwargs=options)
