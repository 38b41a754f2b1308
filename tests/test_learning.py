"""Every script really learns. Floors: the returns of the literature at these steps, less what seeds differ by."""

import json

import pytest
from conftest import cli

RUNS = {
    "sac_continuous_action": ("--total-timesteps", "20000"),
    "td3_continuous_action": ("--total-timesteps", "25000"),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--compile",)], ids=["eager", "compile"])
@pytest.mark.parametrize("script", RUNS)
def test_learns_inverted_pendulum(script, flags):
    name = f"{script}_torchcompile" if flags else script
    process = cli(name, "--env-id", "InvertedPendulum-v4", "--learning-starts", "1000", "--no-cuda", *RUNS[script], *flags)
    assert process.returncode == 0, process.stderr
    summary = json.loads(process.stdout.splitlines()[-1])
    assert summary["updates"] > 0
    assert summary["compile"] == bool(flags)
    assert summary["episodic_return_10"] >= 900
