"""Rainbow's replay buffer, draws, targets and gradient steps against slow references, and its file."""

import copy
import math
import shutil
import subprocess
import sys
from itertools import islice
from unittest.mock import patch

import conftest
import envpool
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ATOMS, RAINBOW, checkpoint, load, play, run
from envs import Row, game_rows
from torch import Tensor, nn
from torch.testing import assert_close

each = pytest.mark.parametrize("name", RAINBOW)
CPU, GAMMA, NEVER = torch.device("cpu"), 0.9, ("--learning-starts", 10**6)
SCRIPT = load(RAINBOW[0])  # a twin has its classes to the letter


# ---- What is stored ----------------------------------------------------------------------------------------
def by_hand(rows: list[Row], step: int, n_step: int) -> tuple[float, float, np.ndarray]:
    """Return, discount and what is seen then, of a row of a game."""
    total, factor = 0.0, 1.0
    for place in range(step, step + n_step):
        row = rows[place]
        total, factor = total + factor * row.reward, factor * GAMMA
        if row.terminated or row.truncated:
            break
    return total, 0.0 if row.terminated else factor, rows[place + 1].obs


def assert_holds(replay, games: list[list[Row]], actions: list[np.ndarray], kept: int) -> int:
    """Check all rows that may be drawn, and which those are, against what the games went through.

    kept: the steps that are learnt from. Gives how many kinds of windows there were.
    """
    steps, num_envs, kinds = len(games[0]), len(games), set()
    oldest, drawn = max(0, steps - kept + 3), torch.zeros(replay.capacity)
    for game, rows in enumerate(games):
        for step in range(oldest, steps - replay.n_step):
            if not rows[step].valid:
                continue
            index = torch.tensor([step % replay.num_steps * num_envs + game])
            drawn[index] = 1
            obs, action, returns, discounts, next_obs = replay.transitions(index)
            total, discount, after = by_hand(rows, step, replay.n_step)
            assert (returns.item(), discounts.item()) == pytest.approx((total, discount), rel=1e-5)
            assert action.item() == actions[step][game] and np.array_equal(obs[0].numpy(), rows[step].obs)
            assert discount == 0 or np.array_equal(next_obs[0].numpy(), after)
            kinds.add((discount == 0, round(math.log(discount or 1, GAMMA))))
    priorities = replay.priorities.flatten()
    assert_close((priorities[: replay.capacity] > 0).float(), drawn)
    assert not priorities[replay.capacity :].any()  # of no row: they fill the last group
    assert_close(replay.group_sums, replay.priorities.double().sum(1))
    return len(kinds)


@pytest.mark.parametrize("case", [(1, 3, 1000), (1, 1, 40), (3, 3, 101), (3, 5, 60)])
# `Replay` is the same text in both files, so each has one place for its frames.
@pytest.mark.parametrize(("name", "in_file"), zip(RAINBOW, (False, True), strict=True))
def test_rows_that_may_be_drawn_are_what_the_games_went_through(name, case, in_file, tmp_path):
    """Ends, lost lives, cut games, the place that is written next, a run that goes on from a checkpoint."""
    num_envs, n_step, buffer_size = case
    args = ("--num-envs", num_envs, "--buffer-size", buffer_size, "--n-step", n_step, "--batch-size", 4)
    args += (*NEVER, "--gamma", GAMMA, "--checkpoint-every", 30 * num_envs)
    args += ("--buffer-file", "frames") if in_file else ()
    kept, games, actions = buffer_size // num_envs, [[] for _ in range(num_envs)], []
    for steps in (100 * num_envs, 130 * num_envs):
        goes_on = ("--resume", checkpoint(tmp_path).parent) if actions else args
        result = play(name, *goes_on, "--total-timesteps", steps, directory=tmp_path)
        [played] = conftest.instances(result)
        for rows, seed in zip(games, played.seeds, strict=True):
            if rows:  # the last step of the run before is none, as if it had only reset the game
                rows[-2], rows[-1] = rows[-2]._replace(truncated=True), rows[-1]._replace(valid=False)
            rows += islice(game_rows(seed), len(played.actions))
        if not actions:
            conftest.assert_episodes_are_counted(result, zip(*games, strict=True))
            assert len(result["returns"]) > 3 and result["global_step"] < len(played.actions) * num_envs
        actions += played.actions
        kinds = assert_holds(result["replay"], games, actions, kept)
        assert kinds >= min(n_step + 1, 3)
    assert result["replay"].num_steps == kept + in_file * 64


def test_frames_that_are_kept_once_are_what_envpool_shows(tmp_path):
    """With lost lives, to the end of a game."""
    seen, make = [], envpool.make

    def note(env):
        def noted(method):
            def call(*args):
                result = method(*args)
                seen.append(result[0].copy())
                return result

            return call

        env.reset, env.step = noted(env.reset), noted(env.step)
        return env

    options = ("--num-envs", 2, "--total-timesteps", 700, "--buffer-size", 1000, "--env-threads", 1, *NEVER)
    with patch("envpool.make", lambda *args, **kw: note(make(*args, **kw))):
        result = run(RAINBOW[0], "--env-id", "Breakout-v5", *options, "--no-noisy")
    expected, replay = torch.from_numpy(np.concatenate(seen[:-1])), result["replay"]
    lives = replay.buffer[:, SCRIPT["TERMINATED"]].sum()  # lost
    assert result["returns"] and lives > 2 * len(result["returns"])
    rows = torch.arange(len(expected))
    assert torch.equal(replay.observations(rows), expected)


@pytest.mark.parametrize(("num_envs", "rate", "every"), [(1, 4, 8), (1, 3, 7), (3, 1, 3)])
def test_gradient_steps_and_targets_have_their_turns(num_envs, rate, every):
    """Agent steps count, over all games, and not those that only go on after an end."""
    options = ("--num-envs", num_envs, "--total-timesteps", 60, "--buffer-size", 100, "--batch-size", 4)
    options += ("--train-frequency", rate, "--target-network-frequency", every, "--tau", conftest.Turns.tau)
    with conftest.Turns(Tensor.maximum) as turns:  # which new priorities take
        result = play(RAINBOW[0], *options, "--learning-starts", 20)
    [played] = conftest.instances(result)
    rows = zip(*(islice(game_rows(seed), len(played.actions) - 1) for seed in played.seeds), strict=True)
    learnt = sum(row.valid for of_games in rows for row in of_games) - 20  # without the last step of all
    steps = range(rate, learnt + 1, rate)
    assert turns.noted == [step // every > (step - rate) // every for step in steps]
    assert result["updates"] == conftest.gradient_steps(result, "q_network") == len(steps) > 5
    assert result["updates_due"] == result["global_step"] - 20 - len(steps) * rate


# ---- Draws -------------------------------------------------------------------------------------------------
def with_priorities(capacity: int) -> tuple:
    """A replay buffer with random priorities of any size, of which some are 0, and its priorities."""
    torch.manual_seed(0)
    replay = SCRIPT["Replay"](SCRIPT["Args"](buffer_size=capacity, batch_size=4), CPU)
    new = torch.randn(capacity).mul(2).exp() * (torch.rand(capacity) < 0.8)
    new[-30:] = 0  # a draw that is a little too far would be of these
    replay.set_priorities(torch.arange(capacity), new)
    return replay, new


def test_one_row_is_drawn_of_each_part_of_the_sum():
    """By the first row whose prefix sum is above a place, in a plain loop."""
    replay, priorities = with_priorities(300)
    torch.manual_seed(3)
    rows, chosen, _ = replay.draw(64, 1.0)
    torch.manual_seed(3)
    parts = (torch.arange(64) + torch.rand(64, dtype=torch.float64)) / 64
    for part, row in zip(parts.tolist(), rows.tolist(), strict=True):
        place, total = part * priorities.double().sum().item(), 0.0
        for priority in priorities.double().tolist()[: row + 1]:
            before, total = total, total + priority
        assert before <= place < total
    assert_close(chosen, priorities[rows])


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, torch.tensor(0.7)])
def test_weights_undo_priorities(beta):
    replay, priorities = with_priorities(500)
    rows, _, weights = replay.draw(32, beta)
    chances, power = priorities.double() / priorities.double().sum(), float(beta)
    expected = torch.tensor([(500 * chances[row].item()) ** -power for row in rows])  # section 3.4
    assert_close(weights, expected / max(expected), rtol=1e-5, atol=0)


def test_sums_do_not_drift_and_rows_that_must_not_be_drawn_stay_so():
    replay, priorities = with_priorities(3000)
    for step in range(3000):
        rows = torch.randint(3000, (7,))
        new = 10 ** (torch.rand(7) * 8 - 4)
        replay.reprioritise(rows, replay.priorities.view(-1)[rows], new)
        kept = torch.where(priorities[rows] > 0, new, 0)
        if step == 0:
            assert replay.max_priority == max(1, kept.max())
        priorities[rows] = kept  # of a row twice the last one, as there
    flat = replay.priorities.view(-1)[:3000]
    assert torch.equal(flat > 0, priorities > 0) and (flat == 0).any()
    assert_close(replay.group_sums, replay.priorities.double().sum(1), rtol=1e-15, atol=0)
    assert replay.max_priority > 1e3


def test_a_row_that_is_complete_has_the_highest_priority_so_far():
    replay = SCRIPT["Replay"](SCRIPT["Args"](buffer_size=40, batch_size=4, n_step=2), CPU)
    obs, outcomes = torch.zeros(1, 4, 84, 84, dtype=torch.uint8), torch.tensor([[0.0, 0, 0, 0, 1, 3]])
    for step in range(5):
        replay.move_to(step, obs.numpy())
        replay.store(obs, outcomes)
        if step == 3:
            replay.reprioritise(torch.tensor([0]), torch.ones(1), torch.tensor([7.0]))
    assert replay.priorities.flatten()[:5].tolist() == [7, 1, 7, 0, 0]


def test_a_place_beyond_all_rows_has_no_weight():
    """As by rounding; and a replay buffer without a row has no weights at all."""
    replay, _ = with_priorities(1000)
    with patch("torch.rand_like", lambda like, dtype: torch.ones(like.shape, dtype=dtype)):
        rows, chosen, weights = replay.draw(8, 0.5)
    assert chosen[-1] == weights[-1] == 0 and (weights[:-1] > 0).all()
    before = replay.priorities.clone()
    replay.reprioritise(rows[-1:], chosen[-1:], torch.tensor([5.0]))
    assert torch.equal(replay.priorities, before) and replay.max_priority == 1
    replay.set_priorities(torch.arange(1000), torch.zeros(1000))
    rows, _, weights = replay.draw(8, 0.5)
    assert not weights.any() and replay.transitions(rows)[2].isfinite().all()


# ---- Networks ----------------------------------------------------------------------------------------------
def test_a_noisy_layer_is_a_linear_one_with_factorised_noise_on_its_weights():
    torch.manual_seed(0)
    layer, x = SCRIPT["NoisyLinear"](64, 48, CPU), torch.randn(3, 64)
    assert_close(layer.weight.std().item(), 1 / 8 / math.sqrt(3), rtol=0.03, atol=0)  # section 3.2
    assert (layer.sigma.weight == 0.5 / 8).all() and (layer.sigma.bias == 0.5 / 8).all()
    nn.init.normal_(layer.sigma.weight)
    nn.init.normal_(layer.sigma.bias)
    noises = [torch.randn(64), torch.randn(48)]
    with patch("torch.randn_like", side_effect=noises):
        actual = layer(x)
    noise_in, noise_out = (torch.where(e > 0, 1, -1) * e.abs() ** 0.5 for e in noises)
    weight = layer.weight + layer.sigma.weight * noise_out[:, None] * noise_in[None]
    bias = layer.bias + layer.sigma.bias * noise_out
    assert_close(actual, x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    assert_close(layer.eval()(x), x @ layer.weight.T + layer.bias)
    # Of many draws: the mean is that of the weights, and the variance that of factors with E f(e)^2 = E |e|.
    outputs, size = torch.stack([layer.train()(x[:1])[0] for _ in range(20_000)]), math.sqrt(2 / math.pi)
    variance = size * (size * (layer.sigma.weight**2 @ x[0] ** 2) + layer.sigma.bias**2)
    assert ((outputs.mean(0) - layer.eval()(x[0])).abs() < 5 * (variance / 20_000).sqrt()).all()
    assert_close(outputs.var(0), variance, rtol=0.15, atol=0)


@pytest.mark.parametrize(("dueling", "noisy"), [(True, True), (False, True), (True, False), (False, False)])
def test_a_network_has_the_parts_that_are_asked_for(dueling, noisy):
    network = SCRIPT["QNetwork"](3, 5, dueling, noisy, CPU)
    obs = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(network(obs), network(obs)) != noisy
        network.eval()
        x = network.network(obs.double().div(255).float())
        expected = network.advantage2(network.advantage1(x).relu()).view(2, 3, 5)
        if dueling:
            value = network.value2(network.value1(x).relu())
            expected = torch.stack([value + row - expected.mean(1) for row in expected.unbind(1)], dim=1)
        assert_close(network(obs), expected)


# ---- Gradient steps ----------------------------------------------------------------------------------------
RATE = 3e-4
KNOWN = ("--n-atoms", 15, "--v-min", -4, "--v-max", 3, "--learning-rate", RATE, "--tau", 0.1)
OPTIONS = [(), ("--no-double",), ("--no-dueling",), ("--no-noisy",), ("--no-distributional",)]
OPTIONS += [("--prioritized-replay-alpha", 0), ("--n-step", 1, *sum(OPTIONS, ()))]
STEPS = [(RAINBOW[0], options) for options in OPTIONS] + [(RAINBOW[1], OPTIONS[place]) for place in (0, -1)]


@pytest.mark.parametrize(("name", "options"), STEPS, ids=str)
def test_gradient_steps_are_those_of_the_papers(name, options):
    small = ("--num-envs", 2, "--batch-size", 16, "--buffer-size", 200, "--total-timesteps", 150, *NEVER)
    result = play(name, *small, *KNOWN, "--gamma", GAMMA, *map(str, options))
    args, replay, losses = result["args"], result["replay"], {}
    conftest.begin_anew(result, noise=0.02)
    for action, key in enumerate(("q_network", "target_network")):  # no two prefer the same one
        result["state"][key].advantage2.bias.data.view(3, -1)[action, -1] += 2
    old = replay.priorities.view(-1)[: replay.capacity]
    replay.reprioritise(torch.arange(replay.capacity), old, torch.rand(replay.capacity) + 0.1)
    plain = copy.deepcopy(replay)
    network, target = (copy.deepcopy(result["state"][key]) for key in ("q_network", "target_network"))
    optimizer = torch.optim.Adam(network.requires_grad_(True).parameters(), lr=RATE, eps=1.5e-4)

    def mean(logits: Tensor) -> Tensor:
        return logits.softmax(-1) @ ATOMS if args.distributional else logits[..., 0]

    def step(with_target: bool) -> None:
        rows, _, weights = plain.draw(16, result["beta"])
        obs, actions, returns, discounts, next_obs = plain.transitions(rows)
        assert 0 < (discounts == 0).sum() < 16
        with torch.no_grad():
            next_logits = target(next_obs)
            preferred = network(next_obs) if args.double else next_logits
            best = mean(preferred).argmax(1)
            assert not args.double or not torch.equal(best, mean(next_logits).argmax(1))
            next_logits = next_logits[range(16), best]
        logits = network(obs)[range(16), actions]
        if args.distributional:
            aims = conftest.shared_out(next_logits.softmax(1), returns + discounts * ATOMS)
            errors = surprises = F.cross_entropy(logits, aims, reduction="none")
        else:
            surprises = (logits - returns - discounts * next_logits)[:, 0].abs()
            errors = torch.where(surprises < 1, surprises**2 / 2, surprises - 0.5)
        losses.update(td_loss=(weights * errors).mean(), q_values=mean(logits).mean())
        optimizer.zero_grad()
        losses["td_loss"].backward()
        optimizer.step()
        new = (surprises.detach() + 1e-6) ** args.prioritized_replay_alpha
        for row, value in zip(rows.tolist(), new.tolist(), strict=True):
            plain.priorities.view(-1)[row] = value
        plain.max_priority.clamp_(min=new.max().item())
        plain.group_sums.copy_(plain.priorities.double().sum(1))
        if with_target:
            for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                slow.data = 0.9 * slow.data + 0.1 * fast.data

    for function in (step, result["update"]):
        torch.manual_seed(1)
        for with_target in (False, True, False):
            function(with_target)
    state = {"q_network": network, "target_network": target, "optimizer": optimizer}
    conftest.assert_steps_by_hand(result, result | {"state": state, "losses": losses}, RATE)
    assert_close(replay.priorities, plain.priorities, rtol=1e-3, atol=1e-4)
    assert_close(replay.max_priority, plain.max_priority, rtol=1e-3, atol=1e-4)
    # A copy would have the mode of what it copies.
    assert result["state"]["q_network"].training and result["state"]["target_network"].training
    with patch("torch.randn_like", wraps=torch.randn_like) as noise:
        result["act"](torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    assert noise.called == args.noisy


@each
def test_beta_rises_to_1_and_epsilon_falls_unless_the_network_is_noisy(name):
    args = ("--num-envs", 2, "--batch-size", 4, "--buffer-size", 200, "--log-every", 10, *NEVER)
    for options, last in (((), 0), (("--no-noisy", "--exploration-fraction", 0.5), 0.01)):
        logged = play(name, *args, *options, "--total-timesteps", 200)["logged"]
        steps, betas = np.transpose(logged["charts/beta"])
        assert len(steps) > 15 and betas == pytest.approx((0.4 + 0.6 * steps / 200).clip(max=1))
        _, epsilons = np.transpose(logged["charts/epsilon"])
        expected = 1 - 0.99 * (steps / 100).clip(max=1) if options else 0 * steps
        assert epsilons == pytest.approx(expected) and epsilons[-1] == pytest.approx(last)


# ---- The file ----------------------------------------------------------------------------------------------
KILLED = """
import os, signal
from unittest.mock import patch
from conftest import play
from envs import ScriptedGames

step = ScriptedGames.step

def step_or_die(self, actions):
    if len(self.actions) == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, actions)

with patch.object(ScriptedGames, "step", step_or_die):
    play(*{args}, directory=".")
"""


@pytest.mark.parametrize("name", RAINBOW[1:])  # the twin also has a warm-up
def test_after_kill_9_a_run_goes_on_with_the_same_numbers_wherever_it_was(name, tmp_path):
    """Killed soon after a checkpoint, and when it has written over many of the frames before it."""
    args = ("--buffer-file", "frames", "--buffer-size", 80, "--checkpoint-every", 120, "--num-envs", 2)
    args += ("--learning-starts", 20, "--batch-size", 4, "--train-frequency", 16, "--seed", 4)
    results, steps = [], set()
    for folder, at in (("early", 94), ("late", 170)):
        (tmp_path / folder).mkdir()
        options = {"cwd": tmp_path / folder, "env": conftest.environment(), "capture_output": True}
        process = subprocess.run([sys.executable, "-c", KILLED.format(at=at, args=(name, *args))], **options)
        assert process.returncode == -9, process.stderr
        saved = torch.load(checkpoint(tmp_path / folder), weights_only=True)
        steps.add(saved["progress"][3])
        assert "frames" not in saved
    assert len(steps) == 1 and steps.pop() > 80 / 2
    frames = [(tmp_path / folder / "frames").read_bytes() for folder in ("early", "late")]
    assert frames[0] != frames[1]
    for folder in ("early", "late"):
        path = tmp_path / folder
        goes_on = ("--resume", checkpoint(path).parent, "--total-timesteps", 400)
        results.append(play(name, *goes_on, directory=path))
    conftest.assert_same_numbers(*results, rtol=0, atol=0)


def test_a_file_that_cannot_be_is_told_at_the_start(refusal, tmp_path):
    """A disk that is too small for it, a file that is there, and none for a run that goes on."""
    name, args = RAINBOW[0], ("--buffer-file", "frames", "--batch-size", 4, *NEVER, "--checkpoint-every", 20)
    told = refusal(name, play, *args, "--buffer-size", 10**12, directory=tmp_path)
    assert told.startswith(f"--buffer-file {tmp_path / 'frames'} of 7056000.0 GB: ")
    assert not [*tmp_path.iterdir()]
    small = ("--buffer-size", 40, "--total-timesteps", 30)
    play(name, *args, *small, directory=tmp_path)
    content = (tmp_path / "frames").read_bytes()
    assert len(content) == (40 + 2 * 20 + 4) * 84 * 84
    assert "File exists" in refusal(name, play, *args, *small, directory=tmp_path)
    assert "Not a directory" in refusal(
        name, play, *args, *small, "--buffer-file", "frames/2", directory=tmp_path
    )
    assert (tmp_path / "frames").read_bytes() == content
    folder = checkpoint(tmp_path).parent
    goes_on = (name, play, "--resume", folder, "--total-timesteps", 40)
    told = refusal(*goes_on, "--checkpoint-every", 30)  # in another directory
    assert told.endswith(f"it has {84 * 7056} bytes, not {104 * 7056}; --checkpoint-every has to stay")
    assert "--buffer-file has to stay" in refusal(*goes_on, "--buffer-file", "None")
    shutil.move(tmp_path / "frames", tmp_path / "moved")
    told = refusal(*goes_on)
    assert told.startswith(f"--buffer-file {tmp_path / 'frames'} of 0.0 GB: ") and "No such file" in told
    evaluated = conftest.evaluation(name, folder / "checkpoint.pt", directory=tmp_path)
    assert len(evaluated["eval_returns"]) == 10
    result = play(*goes_on[:1], *goes_on[2:], "--buffer-file", tmp_path / "moved")
    assert result["global_step"] == 40 and (tmp_path / "moved").read_bytes() != content


def test_what_is_saved_and_restored_is_not_in_memory_twice():
    replay, _ = with_priorities(100)
    saved = replay.saved(50)
    assert saved["frames"].data_ptr() == replay.frames.data_ptr()
    assert saved["frames"].untyped_storage().nbytes() == 50 * 84 * 84  # all of it would be written
    replay.restore(50, saved)
    assert {*saved} == {"max_priority"}
