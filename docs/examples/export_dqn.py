"""Export the policy of DQN to ONNX, and to a library that C++ loads without Python.

    python docs/examples/export_dqn.py runs/.../best.pt

It writes policy.onnx (pip install onnx onnxscript) and policy.pt2. Both take observations (n, obs_dim), flat
and in float32, and give actions (n,) as the environment takes them. For PQN change the import,
for PPO with discrete actions the network, too: `Agent(...)`, whose logits are `self.agent.actor(obs)`.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "leanrl"))  # where the script is: of a copy, its own folder
from dqn import Args, QNetwork, make_envs

checkpoint = torch.load(sys.argv[1], map_location="cpu")
args = Args(**{name: checkpoint["args"][name] for name in ("env_id", "env_kwargs")})
envs = make_envs(args, 1)
obs_dim, space = envs.single_observation_space.shape[0], envs.single_action_space


class Policy(torch.nn.Module):
    """The actions of the highest values."""

    def __init__(self):
        super().__init__()
        self.q_network = QNetwork(obs_dim, int(space.n), torch.device("cpu"))
        self.q_network.load_state_dict(checkpoint["q_network"])

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.q_network(obs).argmax(dim=1) + int(space.start)


policy, obs = Policy().eval(), torch.randn(2, obs_dim)
any_batch = ({0: torch.export.Dim("batch")},)
torch.onnx.export(policy, (obs,), "policy.onnx", dynamo=True, dynamic_shapes=any_batch)
exported = torch.export.export(policy, (obs,), dynamic_shapes=any_batch)
torch._inductor.aoti_compile_and_package(exported, package_path="policy.pt2")
