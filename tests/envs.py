"""Tiny environments of which all is known: envs:Scripted-v0 and so on, or in place of EnvPool's games."""

import signal
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

# The episodes of Scripted-v0, repeated for ever: every kind of end, also in a first step, in consecutive
# steps, and both ends at once.
LENGTHS, TERMINATED, TRUNCATED = (3, 1, 1, 4, 2, 1, 1, 5), (1, 1, 0, 0, 1, 1, 0, 0), (0, 0, 1, 1, 1, 1, 1, 1)


def episode_end(seed: int, episode: int) -> tuple[int, bool, bool]:
    """Length, terminated and truncated of an episode; environments start at different places of the lists."""
    index = (seed + episode) % len(LENGTHS)
    return LENGTHS[index], bool(TERMINATED[index]), bool(TRUNCATED[index])


def observation(seed: int, episode: int, step: int) -> np.ndarray:
    """What is seen after `step` steps of an episode, never the same twice, nor exact in float32."""
    return np.array([[seed / 2**32, episode], [step, 0.1 * step]])


def reward(episode: int, step: int) -> float:
    """The reward of the step that leaves observation `step`; not exact in float32."""
    return 0.1 * step - episode


class Row(NamedTuple):
    """A step of an environment under NEXT_STEP autoreset. One that is not valid only goes on after an end."""

    obs: np.ndarray  # the final one where it is not valid
    valid: bool = False
    reward: float = 0.0  # what the learner gets
    score: float = 0.0  # what counts in the return of the episode
    terminated: bool = False
    truncated: bool = False
    over: bool = False  # the end of an episode


def scripted_rows(seed: int, begin: int = 0) -> Iterator[Row]:
    """Yield, from an episode on, what Scripted-v0 goes through."""
    for episode in count(begin):
        length, terminated, truncated = episode_end(seed, episode)
        for step in range(length):
            last, earned = step == length - 1, reward(episode, step)
            end = (last and terminated, last and truncated, last)
            yield Row(observation(seed, episode, step), True, earned, earned, *end)
        yield Row(observation(seed, episode, length))


class Scripted(gym.Env):
    """Goes through its episodes whatever the actions are, which must be valid; keeps actions and seeds."""

    observation_space = Box(-np.inf, np.inf, (2, 2), np.float64)
    raises: ClassVar[dict[int, int]] = {}  # signals, by the number of the step that raises them

    def __init__(self):
        # Per instance, for action_space.seed() is.
        self.action_space = Box(np.array([-1, -0.3], np.float32), np.array([0.7, 5], np.float32))
        self.actions, self.seeds = [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.rows = scripted_rows(self.seeds[0], len(self.seeds) - 1)
        self.row = next(self.rows)
        return self.row.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        assert self.row.valid, "a step after the end of an episode"
        if number := self.raises.pop(len(self.actions), None):
            signal.raise_signal(number)
        self.actions.append(np.copy(action))
        row, self.row = self.row, next(self.rows)
        return self.row.obs, row.reward, row.terminated, row.truncated, {}


class Interrupted(Scripted):
    raises: ClassVar = {10: signal.SIGINT, 20: signal.SIGTERM, 30: signal.SIGINT}


# The steps of each life in the games of ScriptedGames, repeated for ever. All from the fourth on are cut.
# There are lives of one step, also in a row, and games cut in their first step, and after a lost life.
LIVES = [(3, 1, 2), (1,), (1, 1, 1), (2, 3), (1,), (1,), (5,)]
SCORES = [0, 4, -1, 0, 7, 1]


@lru_cache(256)
def frame(seed: int, game: int, step: int) -> np.ndarray:
    """A frame of a game; no two are alike, also across environments."""
    return np.random.default_rng([seed, game, step]).integers(256, size=(84, 84), dtype=np.uint8)


def frames(seed: int, game: int, step: int) -> np.ndarray:
    """What is seen in a game: its last four frames, or, as by EnvPool, the first of it in place of others."""
    return np.stack([frame(seed, game, max(step - back, 0)) for back in (3, 2, 1, 0)])


def game_rows(seed: int) -> Iterator[Row]:
    """Yield, for ever, what one of ScriptedGames goes through; each starts at another place of the list."""
    for game in count():
        place, step = (seed + game) % len(LIVES), count()
        lives, cut = LIVES[place], place > 2
        for life, length in enumerate(lives, start=1):
            for left in reversed(range(length)):
                index = next(step)
                lost, over = left == 0, left == 0 and life == len(lives)
                score, truncated = SCORES[(seed + game + index) % len(SCORES)], over and cut
                end = (lost and not truncated, truncated, over)
                yield Row(frames(seed, game, index), True, float(np.sign(score)), score, *end)
            yield Row(frames(seed, game, next(step)))


class ScriptedGames(gym.Env):
    """In place of `envpool.make`: goes through LIVES whatever the actions are, if valid, and keeps those."""

    action_space = Discrete(3)

    def __init__(self, task_id, *, env_type, num_envs, seed, episodic_life, reward_clip, stack_num=4, **_):
        assert (env_type, len(seed), episodic_life) == ("gymnasium", num_envs, True)
        self.reward_clip, self.seeds, self.actions, self.frames = reward_clip, seed, [], stack_num
        self.observation_space = Box(0, 255, (stack_num, 84, 84), np.uint8)
        self.steps = zip(*map(game_rows, seed), strict=True)

    def _observe(self):
        self.step_ahead = next(self.steps)
        return np.stack([row.obs[-self.frames :] for row in self.step_ahead])

    def reset(self):
        return self._observe(), {}

    def step(self, actions):
        assert (actions.dtype, actions.shape) == (np.int32, (len(self.seeds),))
        assert all(map(self.action_space.contains, actions)), actions
        self.actions.append(actions.copy())
        _, _, signs, scores, terminated, truncated, over = map(np.array, zip(*self.step_ahead, strict=True))
        # As with EnvPool, a lost life looks like an end, but for info["terminated"].
        info = {"reward": scores.astype(np.float32), "terminated": (over & ~truncated).astype(np.int32)}
        rewards = signs.astype(np.float32) if self.reward_clip else info["reward"]
        return self._observe(), rewards, terminated, truncated, info


class LitGames(gym.Env):
    """In place of `envpool.make`: a third of each frame is lit, whose action earns 1; games of ten steps."""

    action_space, observation_space = Discrete(3), Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self, task_id, *, num_envs, seed, **_):
        self.rng, self.num_envs, self.at = np.random.default_rng(seed), num_envs, 10

    def _observe(self, anew: bool) -> np.ndarray:
        self.lit = self.rng.integers(3, size=self.num_envs)
        frames = np.zeros((self.num_envs, 1, 84, 84), np.uint8)
        for frame, lit in zip(frames, self.lit, strict=True):
            frame[0, :, 28 * lit : 28 * lit + 28] = 255
        self.stack = np.concatenate([frames] * 4 if anew else [self.stack[:, 1:], frames], axis=1)
        return self.stack

    def reset(self):
        self.at = 0
        return self._observe(anew=True), {}

    def step(self, actions):
        anew = self.at == 10  # this step only goes on
        rewards = np.zeros(self.num_envs, np.float32) if anew else (actions == self.lit).astype(np.float32)
        self.at = 0 if anew else self.at + 1
        over = np.full(self.num_envs, self.at == 10)
        info = {"reward": rewards, "terminated": over.astype(np.int32)}
        return self._observe(anew), rewards, over, np.zeros_like(over), info


class Probe(gym.Env):
    """Episodes of three steps with known values, of two kinds in turn.

    Late, it counts its steps and rewards the third, which terminates: gamma^2, gamma and 1 at 0, 1 and 2.
    Else it is always -1 and rewards each step: 1 / (1 - gamma), however soon it is cut: its state goes on.
    """

    observation_space = Box(-10, 10, (1,), np.float32)

    def __init__(self):
        self.action_space, self.late = Box(-1, 1, (1,), np.float32), False

    def _observe(self):
        return np.array([self.step_index if self.late else -1], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_index, self.late = 0, not self.late
        return self._observe(), {}

    def step(self, action):
        self.step_index += 1
        last = self.step_index == 3
        earned = float(last or not self.late)
        return self._observe(), earned, last and self.late, last and not self.late, {}


class Balance(gym.Env):
    """A pole that falls within 15 steps or so unless balanced, for 100 at most: 1 a step, less the effort."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self):
        self.action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.left = self.np_random.uniform(-0.1, 0.1, 2), 100
        return self.state.astype(np.float32), {}

    def step(self, action):
        force = action - 6 if isinstance(self.action_space, Discrete) else action.item()
        self.state[1] += 0.1 * (2 * self.state[0] + 3 * force)
        self.state[0] += 0.1 * self.state[1]
        self.left -= 1
        fallen = bool(abs(self.state[0]) > 0.5)
        return self.state.astype(np.float32), 1 - 0.5 * force**2, fallen, self.left == 0, {}


class Cue(gym.Env):
    """Episodes of 11 steps; what an action earns is itself, with the sign that the first observation has.

    The last observation has the other one, which misleads whoever takes it into the next episode.
    """

    observation_space = Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.step_index = self.np_random.choice((-1.0, 1.0)), 0
        return np.array([self.cue], np.float32), {}

    def step(self, action):
        self.step_index += 1
        action = action - 6 if isinstance(self.action_space, Discrete) else action.item()
        over = self.step_index == 11
        return np.array([-self.cue * over], np.float32), self.cue * action, over, False, {}


class Codes(gym.Env):
    """Shows a number, and rewards each of the two parts of an action that fits it: 2 at best, 0.6 by luck."""

    observation_space = Box(0, 2, (1,), np.float32)

    def __init__(self):
        self.action_space = MultiDiscrete([3, 4], start=[5, -1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = self.np_random.integers(3)
        return np.array([self.shown], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        fits = np.count_nonzero(action == (7 - self.shown, self.shown))
        return np.array([self.shown], np.float32), float(fits), True, False, {}


class Masked(gym.Env):
    """Rewards the higher of two allowed actions of three, which infos name, and refuses the third."""

    observation_space = Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.action_space = Discrete(3)

    def _mask(self) -> dict:
        self.refused = int(self.np_random.integers(3))
        return {"action_mask": np.array([action != self.refused for action in range(3)], np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return np.zeros(1, np.float32), self._mask()

    def step(self, action):
        assert action != self.refused
        higher = float(action > 3 - self.refused - action)
        self.left -= 1
        return np.zeros(1, np.float32), higher, self.left == 0, False, self._mask()


class Careless(gym.Env):
    """Changes its actions in place and returns its own state: (episode, step), in episodes of three steps.

    Its infos tell whether the episode reaches a goal, as every second one does.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, low: float = -0.5, high: float = 1, size: int = 2):
        self.action_space = Box(low, high, (size,), np.float32)
        self.given, self.state = [], np.array([-1, 0], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state[:] = self.state[0] + 1, 0
        return self.state, {}

    def step(self, action):
        self.given.append(action.copy())
        action *= 100
        self.state[1] += 1
        return self.state, 1.0, False, bool(self.state[1] == 3), {"is_success": self.state[0] % 2 == 1}


class Faulty(Careless):
    """The second that is made may have a `fault` in its sixth step, with which its second episode ends."""

    fault, made = None, count()

    def __init__(self):
        super().__init__(size=1)
        self.number = next(self.made)

    def _or(self, fault: str, value, wrong: float = np.nan):  # "reset": in what is seen next
        return wrong + value if (self.number, len(self.given), self.fault) == (1, 6, fault) else value

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self._or("reset", obs), info

    def step(self, action):
        obs, earned, *ends = super().step(action)
        return self._or("observation", obs), self._or("reward", earned, np.inf), *ends


class Parts(Scripted):
    """Scripted-v0 with observations of named parts, the last of which are no vectors, and odd infos."""

    at = Tuple((Discrete(3), MultiBinary(2)))
    observation_space = Dict(seen=Box(-np.inf, np.inf, (2, 2), np.float64), at=at, of=Discrete(2))

    def _parts(self, obs: np.ndarray) -> dict:
        step = int(obs[1, 0])
        return {"seen": obs, "at": (step % 3, np.array([step % 2, 1], np.int8)), "of": step % 2}

    def reset(self, *, seed=None, options=None):
        return self._parts(super().reset(seed=seed)[0]), {"episode": 1, 0: "zero"}

    def step(self, action):
        obs, *rest, _ = super().step(action)
        return self._parts(obs), *rest, {"episode": {"r": "none"}, 0: {"final_obs": None}}


class Walks(VectorEnv):
    """A vector environment in NumPy: walkers on a line, who fall at a distance of 1, and stop after 20 steps.

    A reward is the last step, so that walking in one direction is worth 1 or so.
    """

    def __init__(self, num_envs: int, mode: AutoresetMode = AutoresetMode.SAME_STEP):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode}
        self.single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = Box(-1, 1, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.place, self.left = self.rng.uniform(-0.1, 0.1, self.num_envs), np.full(self.num_envs, 20)
        return self._seen(), {}

    def _seen(self) -> np.ndarray:
        return np.stack([self.place, self.left / 20], axis=1).astype(np.float32)

    def step(self, actions):
        assert len(actions) == self.num_envs and self.single_action_space.contains(actions[0])
        moves = 0.3 * actions[:, 0]
        self.place, self.left = self.place + moves, self.left - 1
        fallen, late, final_obs = np.abs(self.place) > 1, self.left == 0, self._seen()
        over = fallen | late
        self.place[over], self.left[over] = self.rng.uniform(-0.1, 0.1, over.sum()), 20
        return self._seen(), moves, fallen, late & ~fallen, {"final_obs": final_obs}


def choosing(kind: type[gym.Env]) -> type[gym.Env]:
    """A kind of environment that takes one of three actions, which it counts from 5."""

    class Choosing(kind):
        def __init__(self, **options):
            super().__init__(**options)
            self.action_space = Discrete(3, start=5)

    return Choosing


def register(kind: type[gym.Env], name: str = "", **options) -> None:
    """Let gym.make find a kind of environment, with actions of either sort."""
    for suffix, either in {"": kind, "Choices": choosing(kind)}.items():
        gym.register(f"{name or kind.__name__}{suffix}-v0", entry_point=either, kwargs=options)


for kind in (Scripted, Interrupted, Balance, Careless, Faulty, Parts, Cue, Probe):
    register(kind)
gym.register("Codes-v0", entry_point=Codes)
gym.register("Masked-v0", entry_point=Masked)
gym.register("Walks-v0", vector_entry_point=Walks)
gym.register("WalksNext-v0", vector_entry_point=Walks, kwargs={"mode": AutoresetMode.NEXT_STEP})
register(Careless, "Unbounded", low=-np.inf, high=np.inf)
