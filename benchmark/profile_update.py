"""Print where the time of acting and learning goes, by operator or kernel.

    python benchmark/profile_update.py sac_continuous_action_torchcompile --compile

Runs the script for a few steps on its default environment, then profiles calls of its functions as they were run: `act` and
`update` of SAC and TD3 in turn; of PPO, one gradient step for as many calls of `act` as training makes.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
CALLS = 50


def off_policy(run: dict) -> Callable[[int], None]:
    """A function that acts once and makes the gradient step of an index."""
    obs = run["row"][:, : run["obs_dim"]].to(run["device"])
    # SAC's update takes one more flag.
    more = (True,) if "target_network_frequency" in run else ()

    def step(index: int) -> None:
        run["act"](obs).cpu()
        run["update"](index % run["policy_frequency"] == 0, *more)

    return step


def on_policy(run: dict) -> Callable[[int], None]:
    """A function that makes a gradient step, and acts as often as training does for one."""
    args, indices = run["args"], torch.arange(run["minibatch_size"], device=run["device"])
    acts = max(1, run["num_steps"] // (args.update_epochs * args.num_minibatches))

    def step(_: int) -> None:
        for index in range(acts):
            if "act_on_cpu" not in run:  # Atari
                run["act"](run["rollout_obs"][index]).cpu()
            elif run["act_on_cpu"]:
                run["numpy_policy"](run["weights"], run["rollout_obs"][index])
            else:
                run["act"](run["buffer"][index, :, : run["obs_dim"]], run["noise"][index]).cpu()
        run["update"](indices)

    return step


def main() -> None:
    name = sys.argv[1]
    ppo = name.startswith("ppo")
    steps = ["--total-timesteps=4096"] if ppo else ["--total-timesteps=1500", "--learning-starts=1000"]
    sys.argv[:] = [*sys.argv[1:], *steps]
    run = runpy.run_path(str(ROOT / "leanrl" / f"{name}.py"), run_name="__main__")
    step = (on_policy if ppo else off_policy)(run)
    on_cuda = run["device"].type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]) as profiler:
        for index in range(CALLS):
            step(index)
        if on_cuda:
            torch.cuda.synchronize()
    order = f"self_{'cuda' if on_cuda else 'cpu'}_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=80))


if __name__ == "__main__":
    main()
