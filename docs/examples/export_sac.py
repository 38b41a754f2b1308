"""Export the policy of SAC to ONNX, and to a library that C++ loads without Python.

    python docs/examples/export_sac.py runs/.../best.pt

It writes policy.onnx (pip install onnx onnxscript) and policy.pt2. Both take observations (n, obs_dim), flat
and in float32, and give actions (n, action_dim) as the environment takes them. For TD3 change
the import and `forward`: `return in_bounds(self.actor(obs), self)`.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "leanrl"))  # where the script is: of a copy, its own folder
from sac_continuous_action import Actor, Args, in_bounds, make_envs

checkpoint = torch.load(sys.argv[1], map_location="cpu")
args = Args(**{name: checkpoint["args"][name] for name in ("env_id", "env_kwargs")})
envs = make_envs(args, 1)
obs_dim, space = envs.single_observation_space.shape[0], envs.single_action_space


class Policy(torch.nn.Module):
    """The mean actions, in the bounds of the space, whose names `in_bounds` looks for."""

    def __init__(self):
        super().__init__()
        self.actor = Actor(obs_dim, space.shape[0], torch.device("cpu"))
        self.actor.load_state_dict(checkpoint["actor"])
        self.register_buffer("low", torch.from_numpy(space.low))
        self.register_buffer("high", torch.from_numpy(space.high))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        mean, _ = self.actor(obs)
        return in_bounds(torch.tanh(mean), self)


policy, obs = Policy().eval(), torch.randn(2, obs_dim)
any_batch = ({0: torch.export.Dim("batch")},)
torch.onnx.export(policy, (obs,), "policy.onnx", dynamo=True, dynamic_shapes=any_batch)
exported = torch.export.export(policy, (obs,), dynamic_shapes=any_batch)
torch._inductor.aoti_compile_and_package(exported, package_path="policy.pt2")
