"""The recipe of docs/using.md: a trained policy as an ONNX model, and as a library of its own."""

import re
from contextlib import chdir

import conftest
import numpy as np
import onnxruntime
import pytest
import torch
from conftest import LEANRL, ROOT, SHORT, run

PAGE = (ROOT / "docs" / "using.md").read_text()
[EXPORT, OF_PPO] = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index("## Deploying") :], re.DOTALL)[:2]
OF_TD3 = ("torch.tanh(self.actor(obs)[0])", "self.actor(obs)")


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action", "ppo_continuous_action"])
def test_an_exported_policy_takes_the_best_actions(name, tmp_path):
    """As the environment gets them in evaluation, of which Reacher-v4 has bounds of one."""
    run(name, "--env-id", "Reacher-v4", *SHORT[name], "--save-model", directory=tmp_path)
    [path] = conftest.checkpoints(tmp_path)
    checkpoint = torch.load(path)
    for key in ("actor_mean.4.weight", "actor_mean.4.bias") if name.startswith("ppo") else ():
        checkpoint["agent"][key] *= 300  # so that some actions are clipped
    torch.save(checkpoint, path)
    recipe = EXPORT.replace("runs/HalfCheetah-v4__sac_...", str(path)).replace("leanrl/sac", f"{LEANRL}/sac")
    recipe = recipe.replace("sac_continuous_action", name)
    if not name.startswith("sac"):  # a library takes long to build: SAC's stands for them
        recipe = recipe[: recipe.index("exported =")]
    if name.startswith("td3"):
        recipe = recipe.replace(*OF_TD3)
    if name.startswith("ppo"):
        begin, end = recipe.index("class Policy"), recipe.index("obs = torch.randn")
        recipe = f"{recipe[:begin]}{OF_PPO}\n{recipe[end:]}"
    with chdir(tmp_path):
        exec(recipe, made := {})
        script, env = made["script"], made["script"]["make_env"](made["script"]["args"])
        seen, given = np.random.default_rng(1).normal(size=(100, made["obs"].shape[1])), []
        env.reset(seed=1)
        step = env.unwrapped.step
        env.unwrapped.step = lambda action: given.append(np.copy(action)) or step(action)
        for obs in seen:
            env.step(script["best_action"](obs))
        seen = seen.astype(np.float32)
        exported = onnxruntime.InferenceSession("policy.onnx").run(None, {"obs": seen})
        if "exported =" in recipe:
            exported.append(torch._inductor.aoti_load_package("policy.pt2")(torch.from_numpy(seen)))
    for actions in exported:
        np.testing.assert_allclose(actions, given, rtol=0, atol=1e-5)
    assert np.std(given, axis=0).min() > 1e-4
    assert not name.startswith("ppo") or (np.abs(given) == 1).any()
