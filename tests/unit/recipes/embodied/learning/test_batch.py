"""What a training step learns from: pieces of rollouts, levels, masks, groups, and ends of episodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.embodied.config.algorithm_config import ActorCriticConfig
from recipes.embodied.learning.batch import Samples, bootstrap_rewards, build_samples
from recipes.embodied.learning.trajectory import (
    RolloutBuffer,
    RolloutChunks,
    flatten_chunks,
    fold_chunks,
    joined,
    rewards_to_level,
    sum_to_level,
)
from recipes.embodied.models.base_policy import PolicyOutput
from rlinf_core import ConfigError
from rlinf_core.algorithms.advantages import gae_advantages, group_advantages
from tests.known import known

STEPS, BATCH, CHUNK, SIZE = 3, 4, 2, 5


def trajectories(*, values: int | None = CHUNK, chunk: int = CHUNK, **changes: Tensor) -> RolloutChunks:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    steps = {
        "actions": numbers(STEPS, BATCH, chunk, SIZE),
        "logprobs": numbers(STEPS, BATCH, chunk, SIZE),
        "rewards": numbers(STEPS, BATCH, chunk),
        "terminations": torch.zeros(STEPS, BATCH, chunk, dtype=torch.bool),
        "truncations": torch.zeros(STEPS, BATCH, chunk, dtype=torch.bool),
        "valid": torch.ones(STEPS, BATCH, chunk, dtype=torch.bool),
    }
    last = None
    if values:
        steps |= {"values": numbers(STEPS, BATCH, values), "finals": numbers(STEPS, BATCH, values)}
        last = numbers(BATCH, values)
    return RolloutChunks(0, 0, {"states": numbers(STEPS, BATCH, 7)}, {**steps, **changes}, last)


def algorithm(**keys: Any) -> ActorCriticConfig:
    options = {"normalize_advantages": False, **keys.pop("options", {})}
    return ActorCriticConfig.model_validate({"options": options, **keys})


def make(value: RolloutChunks, group_size: int = 1, **keys: Any) -> dict[str, Tensor]:
    return build_samples(value, algorithm(**keys), group_size)[0].tensors


def figures(inputs: RolloutChunks, group_size: int = 1, **keys: Any) -> dict[str, float]:
    return build_samples(inputs, algorithm(**keys), group_size)[1]


GROUPS: dict[str, Any] = {"adv_type": "grpo", "loss_type": "actor"}


def test_actions_of_a_chunk_are_steps_of_their_own() -> None:
    inputs = trajectories()
    tensors = make(inputs)
    values = torch.cat((flatten_chunks(inputs.steps["values"]), inputs.last[:, :1].T))  # pyright: ignore[reportOptionalSubscript]
    dones = torch.zeros(STEPS * CHUNK, BATCH, dtype=torch.bool)
    expected = gae_advantages(flatten_chunks(inputs.steps["rewards"]), values, dones, 0.99, 0.95)
    # Sample n is time step n // BATCH of environment n % BATCH; its actions are columns.
    for sample, action in [(0, 0), (5, 1), (11, 0)]:
        step, env = divmod(sample, BATCH)
        assert tensors["advantages"][sample, action] == expected[step * CHUNK + action, env]
        assert tensors["old_values"][sample, action] == inputs.steps["values"][step, env, action]
    torch.testing.assert_close(tensors["returns"], tensors["advantages"] + tensors["old_values"])
    assert tensors["old_logprobs"].shape == (STEPS * BATCH, CHUNK)
    assert "mask" not in tensors


@pytest.mark.parametrize("values", [1, CHUNK])
def test_a_chunk_is_one_step_where_ratios_are_of_chunks(values: int) -> None:
    inputs = trajectories(values=values)
    tensors = make(inputs, logprob_type="chunk_level")
    chained = torch.cat((inputs.steps["values"][..., 0], inputs.last[:, :1].T))  # pyright: ignore[reportOptionalSubscript]
    dones = torch.zeros(STEPS, BATCH, dtype=torch.bool)
    expected = gae_advantages(inputs.steps["rewards"].sum(dim=2), chained, dones, 0.99, 0.95)
    torch.testing.assert_close(tensors["advantages"], expected.flatten())
    assert tensors["returns"].shape == (STEPS * BATCH, 1)
    assert tensors["old_logprobs"].shape == (STEPS * BATCH,)


def test_one_value_for_a_chunk_makes_chunks_the_steps() -> None:
    tensors = make(trajectories(values=1))
    assert tensors["advantages"].shape == (STEPS * BATCH,)
    assert tensors["old_logprobs"].shape == (STEPS * BATCH, CHUNK)


def test_truncated_episode_is_worth_its_last_observation() -> None:
    cut = torch.zeros(STEPS, BATCH, 1, dtype=torch.bool)
    cut[1, 2] = True
    inputs = trajectories(values=1, chunk=1, truncations=cut)
    tensors = make(inputs)
    steps = inputs.steps
    promised = steps["rewards"][1, 2, 0] + 0.99 * steps["finals"][1, 2, 0] - steps["values"][1, 2, 0]
    torch.testing.assert_close(tensors["advantages"][1 * BATCH + 2, 0], promised)


def test_what_was_not_carried_out_does_not_count() -> None:
    valid = torch.ones(STEPS, BATCH, CHUNK, dtype=torch.bool)
    valid[1, 3, 1] = False
    tensors = make(trajectories(valid=valid))
    assert tensors["mask"].shape == tensors["value_mask"].shape == (STEPS * BATCH, CHUNK)
    assert tensors["mask"].sum() == STEPS * BATCH * CHUNK - 1
    assert not tensors["mask"][1 * BATCH + 3, 1]


def ending(*lengths: int) -> Tensor:
    """Return the steps that count where episodes end after so many chunks, and none begins anew."""
    return (torch.arange(STEPS)[:, None] < torch.tensor(lengths))[:, :, None].expand(-1, -1, CHUNK).contiguous()


@pytest.mark.parametrize("level", ["action_level", "chunk_level"])
@pytest.mark.parametrize("kind", [{"adv_type": "gae"}, {"adv_type": "grpo", "loss_type": "actor"}])
def test_figures_are_of_the_steps_that_count(level: str, kind: dict[str, str]) -> None:
    """What stands in the others, such as rewards that a task gives after it was solved, is in none of them."""
    valid, group_size = ending(1, 3, 0, 2), 1 if kind["adv_type"] == "gae" else 2
    values = CHUNK if kind["adv_type"] == "gae" else None
    inputs = trajectories(values=values, valid=valid)
    spoiled = replace(
        inputs,
        inputs={"states": torch.where(valid.any(dim=2)[..., None], inputs.inputs["states"], 1e6)},
        steps={**inputs.steps, "rewards": torch.where(valid, inputs.steps["rewards"], 1e6)},
    )
    keys: dict[str, Any] = {**kind, "logprob_type": level}
    samples, metrics = build_samples(spoiled, algorithm(**keys), group_size)
    counted = samples.tensors["advantages"][samples.tensors["mask"]].double()
    assert metrics["rollout/advantages_mean"] == pytest.approx(float(counted.mean()), abs=1e-6)
    assert metrics["rollout/advantages_std"] == pytest.approx(float(counted.std(correction=0)), abs=1e-6)
    assert metrics["rollout/observations_std"] < 10
    # Of the three environments of which a step counts.
    assert metrics["rollout/reward"] == pytest.approx(float(inputs.steps["rewards"][valid].sum()) / 3, abs=1e-5)
    assert metrics == pytest.approx(figures(inputs, group_size, **keys), abs=1e-5)


def test_figures_are_of_all_actors() -> None:
    """Each of two actors reports the same, although they have unequally many steps that count."""
    whole = trajectories(values=None, valid=ending(1, 1, 3, 2))
    values, met = [torch.zeros(())] * 2, Barrier(2, timeout=60)

    def report(actor: int) -> dict[str, float]:
        def summed(value: Tensor) -> Tensor:
            values[actor] = value
            met.wait()
            total = values[0] + values[1]
            met.wait()
            return total

        return build_samples(whole.rows(2 * actor, 2 * actor + 2, 0), algorithm(**GROUPS), 2, summed)[1]

    with ThreadPoolExecutor(2) as actors:
        reports = list(actors.map(report, range(2)))
    wanted = figures(whole, 2, **GROUPS)
    for name in ("rollout/advantages_mean", "rollout/advantages_std"):
        assert [metrics[name] for metrics in reports] == pytest.approx([wanted[name]] * 2, abs=1e-6)


@pytest.mark.parametrize("level", ["action_level", "chunk_level"])
def test_groups_are_compared_by_their_total_rewards(level: str) -> None:
    inputs = trajectories(values=None)
    tensors = make(inputs, 2, **GROUPS, logprob_type=level)
    expected = group_advantages(inputs.steps["rewards"].sum(dim=(0, 2)), 2)
    # A chunk's ratio counts it once.
    wanted = expected.repeat(STEPS) if level == "chunk_level" else expected.repeat(STEPS)[:, None].expand(-1, CHUNK)
    torch.testing.assert_close(tensors["advantages"], wanted)
    assert "returns" not in tensors


def test_members_without_a_step_are_not_compared() -> None:
    """A simulator failed: a total reward of 0 would be the best of a group with costs."""
    valid = torch.ones(STEPS, BATCH, CHUNK, dtype=torch.bool)
    valid[:, 1] = False
    rewards = -torch.rand(STEPS, BATCH, CHUNK)
    inputs = trajectories(values=None, valid=valid, rewards=rewards)
    kept = [0, 2, 3]
    wanted = torch.zeros(BATCH)
    wanted[kept] = group_advantages(rewards.sum(dim=(0, 2))[kept], 3)
    for group_size, expected in (
        (4, wanted),
        (2, torch.tensor([0, 0, *group_advantages(rewards.sum(dim=(0, 2))[2:], 2)])),
    ):
        advantages = make(inputs, group_size, **GROUPS)["advantages"].reshape(STEPS, BATCH, CHUNK)
        torch.testing.assert_close(advantages, expected[None, :, None].expand_as(advantages))


def test_groups_whose_rewards_are_equal_are_filtered_on_request() -> None:
    rewards = torch.ones(STEPS, BATCH, CHUNK)
    rewards[0, 3, 0] = 2
    inputs = trajectories(values=None, rewards=rewards)
    counted = make(inputs, 2, **GROUPS, options={"filter_rewards": True})["mask"].reshape(STEPS, BATCH, CHUNK)
    assert not counted[:, :2].any()
    assert counted[:, 2:].all()
    valid = torch.ones(STEPS, BATCH, CHUNK, dtype=torch.bool)
    valid[:, 1] = False  # its simulator failed
    for groups, dropped in ((2, [0, 1]), (4, [])):
        failed = make(
            trajectories(values=None, rewards=rewards, valid=valid), groups, **GROUPS, options={"filter_rewards": True}
        )
        counted = failed["mask"].reshape(STEPS, BATCH, CHUNK)
        assert counted.any(dim=2).any(dim=0).tolist() == [row not in (*dropped, 1) for row in range(BATCH)]
    # Two of two members: 1 and -1, each over the square root of 2.
    metrics = figures(inputs, 2, **GROUPS, options={"filter_rewards": True})
    assert metrics["rollout/advantages_std"] == pytest.approx(0.5**0.5, abs=1e-3)
    valid = ending(1, 1, 3, 2)
    inputs = trajectories(values=None, rewards=torch.ones(STEPS, BATCH, CHUNK), valid=valid)
    assert make(inputs, 2, **GROUPS)["mask"].sum() == valid.sum()


def test_values_are_judged_by_all_steps_unless_filtered() -> None:
    inputs = trajectories(rewards=torch.ones(STEPS, BATCH, CHUNK), valid=ending(1, 1, 3, 2))
    samples, metrics = build_samples(inputs, algorithm(), 2)
    returns, values, counted = (samples.tensors[name] for name in ("returns", "old_values", "mask"))
    explained = 1 - (returns - values)[counted].var() / returns[counted].var()
    assert metrics["train/critic/explained_variance"] == pytest.approx(explained.item(), abs=1e-5)


def test_batches_are_all_samples_once() -> None:
    samples = Samples({"states": torch.arange(10.0)}, {"actions": torch.arange(10)}, (1, 1))
    torch.manual_seed(0)
    batches = list(samples.batches(5))
    assert sorted(torch.cat([batch.tensors["actions"] for batch in batches]).tolist()) == list(range(10))
    assert all((batch.inputs["states"] == batch.tensors["actions"]).all() for batch in batches)
    assert [len(part) for part in batches[0].microbatches(2)] == [2, 2, 1]


@pytest.mark.parametrize(("members", "masked"), [(3, False), (5, False), (5, True), (20, False)])
def test_members_of_a_team_learn_from_every_sample_once(members: int, masked: bool) -> None:
    count = STEPS * BATCH
    tensors = {"actions": torch.arange(count)[:, None, None], "old_logprobs": torch.zeros(count, 1)}
    if masked:
        tensors["mask"] = torch.arange(count)[:, None] % 2 == 0
    whole = Samples({"states": torch.arange(count)[:, None]}, tensors, (1, 1))
    parts = [whole.part(member, members) for member in range(members)]
    assert len({len(part) for part in parts}) == 1
    learned: list[int] = []
    for part in parts:
        counted = part.masked().tensors["mask"][:, 0]
        assert torch.equal(part.inputs["states"], part.tensors["actions"][:, 0])
        learned += part.tensors["actions"][counted].flatten().tolist()
    assert sorted(learned) == [number for number in range(count) if not masked or number % 2 == 0]


def test_value_of_the_rest_is_added_where_an_episode_is_cut() -> None:
    """One step of four trajectories: goes on, terminated, cut off, both at once."""
    result = bootstrap_rewards(
        torch.ones(1, 4),
        terminations=torch.tensor([[0, 1, 0, 1]]).bool(),
        truncations=torch.tensor([[0, 0, 1, 1]]).bool(),
        final_values=torch.tensor([[float("nan"), 10.0, 10.0, 10.0]]),
        gamma=0.5,
    )
    assert result.tolist() == [[1.0, 1.0, 6.0, 1.0]]


def test_levels_sum_over_tokens_and_actions() -> None:
    values = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(sum_to_level(values, "token_level"), values)
    assert sum_to_level(values, "action_level").tolist() == [[6, 22, 38], [54, 70, 86]]
    assert sum_to_level(values, "chunk_level").tolist() == [66, 210]


def test_chunks_unfold_in_time() -> None:
    rewards = torch.arange(12.0).reshape(2, 2, 3)  # two chunks of three actions, two trajectories
    assert flatten_chunks(rewards)[:, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert torch.equal(fold_chunks(flatten_chunks(rewards), 3), rewards)
    dones = rewards == 7
    by_chunk, ends = rewards_to_level(rewards, dones, "chunk_level")
    assert by_chunk.tolist() == [[3, 12], [21, 30]]
    assert ends.tolist() == [[False, False], [True, False]]
    by_action, ends = rewards_to_level(rewards, dones, "action_level")
    assert by_action.shape == ends.shape == (6, 2)
    assert ends[:, 0].tolist() == [False, False, False, False, True, False]


def outcome(batch: int, value: float) -> dict[str, object]:
    flags = np.zeros((batch, 1), np.bool_)
    rewards = np.full((batch, 1), value, np.float32)
    return {"rewards": rewards, "terminations": flags, "truncations": flags, "valid": ~flags}


def record(steps: int, batch: int, *, version: int = 0, values: bool = True) -> RolloutChunks:
    buffer = RolloutBuffer(steps, version)
    for step in range(steps):
        value = torch.full((batch, 1), float(step)) if values else None
        output = PolicyOutput(torch.full((batch, 1, 2), float(step)), torch.zeros(batch, 1, 2), value)
        buffer.add_action(step, {"states": torch.arange(batch).float()[:, None] + 100 * step}, output)
        buffer.add_outcome(step, outcome(batch, float(step)), None)  # pyright: ignore[reportArgumentType]
    return buffer.finish(torch.zeros(batch, 1) if values else None)


def test_a_recorder_keeps_steps_in_time() -> None:
    recorded = record(3, 4)
    assert recorded.inputs["states"].shape == (3, 4, 1)
    assert recorded.inputs["states"][2, 1] == 201
    assert recorded.steps["rewards"][:, 0, 0].tolist() == [0, 1, 2]
    assert recorded.steps["finals"].shape == (3, 4, 1)
    assert recorded.batch == 4


def test_episode_that_failed_is_left_out_from_its_beginning() -> None:
    buffer = RolloutBuffer(4, 0)
    for step in range(4):
        result = outcome(2, 1)
        if step == 1:
            result["truncations"] = np.array([[True], [False]])
        buffer.add_outcome(step, result, None)  # pyright: ignore[reportArgumentType]
    buffer.leave_out(3, np.array([True, True]))
    valid = buffer.finish(None).steps["valid"][:, :, 0].tolist()
    # The first environment's episode before ended with step 1, and counts; step 3 is the environment's to judge.
    assert valid == [[True, False], [True, False], [False, False], [True, True]]


def test_what_is_recorded_is_copied() -> None:
    buffer = RolloutBuffer(1, 0)
    inputs = outcome(2, 1)
    states = torch.ones(2, 1)
    buffer.add_action(0, {"states": states}, PolicyOutput(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), None))
    buffer.add_outcome(0, inputs, None)  # pyright: ignore[reportArgumentType]
    states.zero_()
    inputs["rewards"][:] = 7  # pyright: ignore[reportIndexIssue]
    result = buffer.finish(None)
    assert result.inputs["states"].sum() == 2
    assert result.steps["rewards"].sum() == 2
    assert result.last is None


@pytest.mark.parametrize("width", [1, 5])
def test_shapes_that_change_within_a_pass_are_refused(width: int) -> None:
    buffer, output = RolloutBuffer(2, 0), PolicyOutput(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), None)
    buffer.add_action(0, {"tokens": torch.ones(2, 4)}, output)
    with pytest.raises(ConfigError, match=rf"`tokens` of step 2 of a pass is \[2, {width}\], and was \[2, 4\]"):
        buffer.add_action(1, {"tokens": torch.ones(2, width)}, output)


def test_pieces_are_ordered_and_have_the_oldest_version() -> None:
    whole = record(2, 6, version=3)
    result = joined([whole.rows(4, 6, 4), whole.rows(0, 1, 0), whole.rows(1, 4, 1)])
    torch.testing.assert_close(result.inputs["states"], whole.inputs["states"])
    assert (known(result.last).shape, result.version) == ((6, 1), 3)
    assert joined([record(1, 1, version=version).rows(0, 1, version) for version in (5, 4)]).version == 4
