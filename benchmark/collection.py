"""The algorithms of the collection: the one table that the benchmark and the tests read.

To add an algorithm, add its two files to leanrl/ and its entry below. Tables and plots keep this order.
"""

from dataclasses import dataclass
from typing import Literal

# Environments of the long profiles by kind of actions; the first is that of the short ones and of the README.
ENV_IDS = {
    "continuous": ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"),
    "discrete": ("CartPole-v1", "Acrobot-v1", "MountainCar-v0"),
    "atari": ("Breakout-v5", "Pong-v5"),
}
OF_TWO_CRITICS = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss")
OF_PPO = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
OF_PPO += ("explained_variance",)
OF_Q = ("td_loss", "q_values")


@dataclass(frozen=True)
class Check:
    """A short run of the profile check, and bounds for the mean return of its last 100 training episodes.

    The least is below all returns of seeds 1, 2, 11 and 12 on two processors (FastTD3: 1 to 4 on one, FastSAC
    1; with an LSTM: 1 to 3). The most is what the task gives, or more than so short a run can reach.
    """

    env_id: str
    steps: int
    least: float
    most: float
    options: tuple[tuple[str, str], ...] = ()
    """further arguments of the script"""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What is known of an eager script and its twin."""

    title: str
    """what a reader calls it"""
    actions: Literal["continuous", "discrete", "atari", "on device"]
    """the kind of its actions, and with it of its environments; those on the device are the scripts' own"""
    quick: int
    """agent steps of a run in the profile quick"""
    speed: int
    """in the profile speed"""
    losses: tuple[str, ...]
    """what it logs as losses/..."""
    full: int = 1_000_000
    """agent steps in the profiles full and learning"""
    learning_starts: int | None = None
    """agent steps before the first gradient step, in the long profiles; None where it is on-policy"""
    num_envs: int = 1
    """environments by default"""
    own_env_ids: tuple[str, ...] = ()
    """environments in place of those of its kind"""
    more_env_ids: tuple[str, ...] = ()
    """environments of the profile learning besides those of its kind"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the profile learning"""
    short: tuple[tuple[str, str], ...] = ()
    """further arguments of the profiles quick and speed, CleanRL's as well"""
    checks: tuple[Check, ...] = ()
    """runs of the profile check"""
    cleanrl: str | None = None
    """CleanRL's script; None where it has none"""
    in_cleanrl_package: bool = True
    """whether its package has that, and not its repository alone"""
    leanrl: str | None = None
    """the original LeanRL's script; None where it has none, or one that needs gym"""
    published_sps: int | None = None
    """steps/s of the original's `--compile --cudagraphs` on an H100, by its README of 2024"""
    sb3: str | None = None
    """Stable-Baselines3's class"""
    sbx: str | None = None
    """SBX's class"""
    rltools: str | None = None
    """RLtools' function"""

    @property
    def on_policy(self) -> bool:
        return self.learning_starts is None

    @property
    def one_thread(self) -> bool:
        """Whether its scripts take one thread of PyTorch: on more, networks so small are no faster."""
        return self.actions == "discrete" or (self.actions != "atari" and self.on_policy)

    @property
    def env_ids(self) -> tuple[str, ...]:
        """The environments of the profile learning."""
        return *(self.own_env_ids or ENV_IDS[self.actions]), *self.more_env_ids

    @property
    def env_id(self) -> str:
        """The environment of the other profiles."""
        return self.env_ids[0]


POOL = "pool:EnvPool/"  # what leanrl/pool.py takes from EnvPool
# What several entries have in common.
ATARI = {"actions": "atari", "quick": 8 * 1024, "speed": 12 * 1024, "full": 10_000_000}
ATARI |= {"num_envs": 8, "seeds": (1, 2)}
CART_POLE = {"actions": "discrete", "quick": 100 * 512, "speed": 200 * 512, "full": 500_000}
CART_POLE |= {"num_envs": 4, "seeds": tuple(range(1, 11))}

COLLECTION = {
    "sac_continuous_action": Algorithm(
        title="SAC",
        actions="continuous",
        quick=3000,
        speed=6000,
        losses=(*OF_TWO_CRITICS, "alpha", "alpha_loss"),
        learning_starts=5_000,
        cleanrl="sac_continuous_action",
        leanrl="sac_continuous_action",
        published_sps=725,
        sb3="SAC",
        sbx="SAC",
        rltools="SAC",
        checks=(
            Check("InvertedPendulum-v4", 30_000, 150, 1000),
            Check(POOL + "CartpoleSwingup-v1", 20_000, 90, 1000),
        ),
    ),
    "td3_continuous_action": Algorithm(
        title="TD3",
        actions="continuous",
        quick=3000,
        speed=6000,
        losses=OF_TWO_CRITICS,
        learning_starts=25_000,
        cleanrl="td3_continuous_action",
        leanrl="td3_continuous_action",
        published_sps=936,
        sb3="TD3",
        sbx="TD3",
        rltools="TD3",
        checks=(
            Check("InvertedPendulum-v4", 30_000, 50, 1000),
            Check(POOL + "CartpoleSwingup-v1", 20_000, 45, 1000),
        ),
    ),
    "fast_td3": Algorithm(
        title="FastTD3",
        actions="continuous",
        quick=200 * 64,
        speed=400 * 64,
        losses=(*OF_TWO_CRITICS, "clipped_mass"),
        full=5_000_000,
        learning_starts=5_000,
        num_envs=64,
        own_env_ids=(POOL + "CheetahRun-v1", POOL + "CartpoleSwingup-v1", POOL + "WalkerRun-v1"),
        checks=(Check(POOL + "CartpoleSwingup-v1", 400_000, 150, 1000),),
    ),
    "fast_sac": Algorithm(
        title="FastSAC",
        actions="continuous",
        quick=200 * 64,
        speed=400 * 64,
        losses=(*OF_TWO_CRITICS, "clipped_mass", "alpha", "alpha_loss", "entropy"),
        full=5_000_000,
        learning_starts=5_000,
        num_envs=64,
        own_env_ids=(POOL + "CheetahRun-v1", POOL + "CartpoleSwingup-v1", POOL + "WalkerRun-v1"),
        checks=(Check(POOL + "CartpoleSwingup-v1", 400_000, 150, 1000),),
    ),
    "ppo_continuous_action": Algorithm(
        title="PPO for continuous actions",
        actions="continuous",
        quick=20 * 2048,
        speed=30 * 2048,
        losses=OF_PPO,
        more_env_ids=("Ant-v4", "InvertedPendulum-v4", "Reacher-v4", "Humanoid-v4"),
        seeds=tuple(range(1, 11)),
        cleanrl="ppo_continuous_action",
        leanrl="ppo_continuous_action",
        published_sps=1_774,
        sb3="PPO",
        sbx="PPO",
        checks=(
            Check("InvertedPendulum-v4", 200_000, 950, 1000),
            Check(POOL + "CartpoleSwingup-v1", 500_000, 600, 1000, (("num-envs", "4"),)),
        ),
    ),
    "ppo_on_device": Algorithm(
        title="PPO with environments on the device",
        actions="on device",
        quick=40 * 16 * 1024,
        speed=120 * 16 * 1024,
        losses=OF_PPO,
        full=5_000_000,
        num_envs=1024,
        own_env_ids=("Pendulum-v1", "docs.examples.cartpole_swingup:CartpoleSwingup"),
        checks=(Check("Pendulum-v1", 2_000_000, -400, -100),),
    ),
    "ppo_continuous_action_lstm": Algorithm(
        title="PPO with an LSTM for continuous actions",
        actions="continuous",
        quick=10 * 2048,
        speed=20 * 2048,
        losses=OF_PPO,
        num_envs=64,
        sb3="RecurrentPPO",
        checks=(Check("benchmark.no_velocity:PendulumNoVel-v1", 300_000, -500, -120, (("gamma", "0.9"),)),),
    ),
    "ppo": Algorithm(
        title="PPO for discrete actions",
        **CART_POLE,
        losses=OF_PPO,
        cleanrl="ppo",
        sb3="PPO",
        sbx="PPO",
        checks=(Check("CartPole-v1", 200_000, 150, 500), Check("Acrobot-v1", 200_000, -130, -60)),
    ),
    "ppo_lstm": Algorithm(
        title="PPO with an LSTM for discrete actions",
        actions="discrete",
        quick=20 * 1024,
        speed=40 * 1024,
        losses=OF_PPO,
        full=500_000,
        num_envs=8,
        sb3="RecurrentPPO",
    ),
    "ppo_atari_envpool": Algorithm(
        title="PPO for Atari",
        **ATARI,
        losses=OF_PPO,
        cleanrl="ppo_atari_envpool",
        published_sps=6_809,
        sb3="PPO",  # SBX has no policy for images
        checks=(Check("Breakout-v5", 200_000, 3.5, 20),),
    ),
    "ppo_atari_lstm_envpool": Algorithm(
        title="PPO with an LSTM for Atari",
        **ATARI,
        losses=OF_PPO,
        cleanrl="ppo_atari_lstm",
        in_cleanrl_package=False,  # the package's needs gym, that of the repository Gymnasium
    ),
    "pqn": Algorithm(
        title="PQN",
        **CART_POLE,
        losses=OF_Q,
        cleanrl="pqn",
        in_cleanrl_package=False,
        checks=(Check("CartPole-v1", 200_000, 80, 500),),
    ),
    "pqn_atari_envpool": Algorithm(
        title="PQN for Atari",
        **ATARI,
        losses=OF_Q,
        cleanrl="pqn_atari_envpool",
        in_cleanrl_package=False,
    ),
    "rainbow_atari_envpool": Algorithm(
        title="Rainbow for Atari",
        **ATARI | {"num_envs": 1, "quick": 3000, "speed": 6000},
        short=(("buffer-size", "100000"),),  # the default's million takes 7 GB, and CleanRL's 56
        losses=OF_Q,
        learning_starts=80_000,
        cleanrl="rainbow_atari",
        in_cleanrl_package=False,
    ),
    "dqn": Algorithm(
        title="DQN",
        actions="discrete",
        quick=30_000,
        speed=60_000,
        losses=OF_Q,
        full=500_000,
        learning_starts=10_000,
        seeds=tuple(range(1, 6)),
        cleanrl="dqn",
        leanrl="dqn",
        sb3="DQN",
        sbx="DQN",
        checks=(Check("CartPole-v1", 150_000, 250, 500), Check("Acrobot-v1", 100_000, -140, -60)),
    ),
}
