"""The recipe of docs/using.md: a trained policy as an ONNX model, and as a library of its own."""

import re
import sys
from contextlib import chdir
from unittest.mock import patch

import conftest
import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch
from conftest import LEANRL, ROOT, SAVED, SHORT, run
from gymnasium.spaces import Box

PAGE = (ROOT / "docs" / "using.md").read_text()
[EXPORT, OF_PPO] = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index("## Deploying") :], re.DOTALL)[:2]
OF_TD3 = ("torch.tanh(self.actor(obs)[0])", "self.actor(obs)")


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action", "ppo_continuous_action"])
def test_an_exported_policy_takes_the_best_actions(name, tmp_path):
    """As the environment gets them in evaluation, of which Reacher-v4 has bounds of one."""
    options = (*SHORT[name], *SAVED, "--env-id", "Reacher-v4")
    result = run(name, *options, directory=tmp_path)
    file = conftest.checkpoint(tmp_path)
    checkpoint = torch.load(file)
    for key in ("actor_mean.4.weight", "actor_mean.4.bias") if name.startswith("ppo") else ():
        checkpoint["agent"][key] *= 300  # so that some actions are clipped
        result["state"]["agent"].get_parameter(key).data.mul_(300)
    torch.save(checkpoint, tmp_path / "best.pt")
    recipe = EXPORT.replace("HalfCheetah-v4", "Reacher-v4").replace("sac_continuous_action", name)
    if not name.startswith("sac"):  # a library takes long to build: SAC's stands for them
        recipe = recipe[: recipe.index("exported =")]
    if name.startswith("td3"):
        recipe = recipe.replace(*OF_TD3)
    if name.startswith("ppo"):
        begin, end = recipe.index("class Policy"), recipe.index("obs = torch.randn")
        recipe = f"{recipe[:begin]}{OF_PPO}\n{recipe[end:]}".replace(
            "import Actor, in_bounds", "import Agent"
        )
    with chdir(tmp_path), patch.object(sys, "path", [*sys.path, str(LEANRL)]):
        exec(recipe, made := {})
        seen = np.random.default_rng(1).normal(size=(100, made["obs"].shape[1])).astype(np.float32)
        exported = onnxruntime.InferenceSession("policy.onnx").run(None, {"obs": seen})
        if "exported =" in recipe:
            exported.append(torch._inductor.aoti_load_package("policy.pt2")(torch.from_numpy(seen)))
    space, expected = gym.make("Reacher-v4").action_space, result["best_actions"](seen)
    for actions in exported:
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-5)
    assert all(map(space.contains, expected)) and np.std(expected, axis=0).min() > 1e-4
    assert not name.startswith("ppo") or (np.abs(expected) == 1).any()


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action", "ppo_continuous_action"])
def test_a_module_in_place_of_a_space_gives_the_same_actions(name):
    """Of bounds that are not those of the policy, and of one that is beyond them."""
    script, space = conftest.load(name), Box(np.array([0, -3], np.float32), np.array([5, -1], np.float32))
    bound = script["clipped" if name.startswith("ppo") else "in_bounds"]
    module, outputs = torch.nn.Module(), np.array([[-1, 0.5], [1, -4], [7, 0]], np.float32)
    module.low, module.high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    actions = bound(outputs, space)
    assert actions.min(axis=0).tolist() == [0, -3] and actions.max() == 5
    np.testing.assert_array_equal(bound(torch.from_numpy(outputs), module), actions)
