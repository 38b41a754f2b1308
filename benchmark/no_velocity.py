"""Tasks of Gymnasium whose velocities are hidden, for agents with a memory.

    ./run.sh train ppo_lstm --env-id benchmark.no_velocity:CartPoleNoVel-v1

Names are as in the Stable-Baselines3 zoo, which shows zeros in place of velocities. Here they are left out.
"""

import gymnasium as gym

# Which parts of their observations are positions: the first ones, in CartPole's every other one.
POSITIONS = {"CartPole-v1": slice(0, 4, 2), "Pendulum-v1": slice(2), "MountainCarContinuous-v0": slice(1)}
POSITIONS |= {"HalfCheetah-v4": slice(8), "Hopper-v4": slice(5), "Walker2d-v4": slice(8)}


def make(env_id: str, **options) -> gym.Env:
    """An environment that shows its positions alone."""
    env, positions = gym.make(env_id, **options), POSITIONS[env_id]
    seen = env.observation_space
    seen = gym.spaces.Box(seen.low[positions], seen.high[positions], dtype=seen.dtype)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[positions], seen)


for env_id in POSITIONS:
    name, version = env_id.split("-")
    gym.register(f"{name}NoVel-{version}", entry_point=make, kwargs={"env_id": env_id})
