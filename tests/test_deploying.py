"""docs/examples/export_*.py: a trained policy as an ONNX model, and as a library of its own."""

import sys
from contextlib import chdir
from unittest.mock import patch

import conftest
import numpy as np
import onnxruntime
import pytest
import torch
from conftest import ROOT, SAVED, SHORT, run

EXAMPLES = {"sac_continuous_action": "export_sac", "dqn": "export_dqn"}
EXAMPLES |= {"ppo_continuous_action": "export_ppo_continuous"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_exported_policy_takes_the_best_actions(name, tmp_path):
    """As the environment gets them in evaluation, of which Reacher-v4 has bounds of one."""
    world = ("--env-id", "CartPole-v1" if name in conftest.DISCRETE else "Reacher-v4")
    result = run(name, *SHORT[name], *SAVED, *world, directory=tmp_path)
    checkpoint = torch.load(conftest.checkpoint(tmp_path))
    for key in ("actor_mean.4.weight", "actor_mean.4.bias") if name.startswith("ppo") else ():
        checkpoint["agent"][key] *= 300  # so that some actions are clipped
        result["state"]["agent"].get_parameter(key).data.mul_(300)
    if name == "dqn":  # whose few gradient steps leave it with one action
        for parameter in checkpoint["q_network"].values():
            parameter.normal_()
        result["state"]["q_network"].load_state_dict(checkpoint["q_network"])
    torch.save(checkpoint, tmp_path / "best.pt")
    recipe = (ROOT / "docs" / "examples" / f"{EXAMPLES[name]}.py").read_text()
    if not name.startswith("sac"):  # a library takes long to build: SAC's stands for them
        recipe = recipe[: recipe.index("exported =")]
    file = ROOT / "docs" / "examples" / "a_copy.py"
    with (
        chdir(tmp_path),
        patch.object(sys, "path", [*sys.path]),
        patch.object(sys, "argv", ["", "best.pt"]),
        torch._inductor.config.patch("aot_inductor.precompile_headers", False),  # which pays for several
    ):
        exec(recipe, made := {"__file__": str(file)})
        seen = np.random.default_rng(1).normal(size=(100, made["obs"].shape[1])).astype(np.float32)
        exported = onnxruntime.InferenceSession("policy.onnx").run(None, {"obs": seen})
        if "exported =" in recipe:
            exported.append(torch._inductor.aoti_load_package("policy.pt2")(torch.from_numpy(seen)))
    space, expected = made["space"], result["best_actions"](seen)
    for actions in exported:
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-5)
    assert all(map(space.contains, expected)) and np.std(expected, axis=0).min() > 1e-4
    assert not name.startswith("ppo") or (np.abs(expected) == 1).any()
