"""Print where the time of the policy and of the gradient step goes, by operator or kernel.

    python benchmark/profile_update.py sac_continuous_action_torchcompile --compile

Runs the script for 1500 steps on its default environment, then profiles 50 calls of `act` and `update` as they were run.
"""

import runpy
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
CALLS = 50


def main() -> None:
    sys.argv[:] = [*sys.argv[1:], "--total-timesteps=1500", "--learning-starts=1000"]
    run = runpy.run_path(str(ROOT / "leanrl" / f"{sys.argv[0]}.py"), run_name="__main__")
    obs = run["row"][:, : run["obs_dim"]].to(run["device"])
    # One call in `policy_frequency` updates the actor, as in training; SAC's update takes one more flag.
    more = (True,) if "target_network_frequency" in run else ()
    on_cuda = run["device"].type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]) as profiler:
        for call in range(CALLS):
            run["act"](obs).cpu()
            run["update"](call % run["policy_frequency"] == 0, *more)
        if on_cuda:
            torch.cuda.synchronize()
    order = f"self_{'cuda' if on_cuda else 'cpu'}_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=80))


if __name__ == "__main__":
    main()
