"""What a training step learns from: levels, masks, groups, and what the single-process loop makes of the same steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.embodied.config.algorithm_config import ActorCriticConfig
from recipes.embodied.learning.batch import Samples, build_samples
from recipes.embodied.learning.trajectory import RolloutChunks, flatten_chunks
from rlinf_core.algorithms.advantages import gae_advantages, group_advantages

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
    return ActorCriticConfig.model_validate({"normalize_advantages": False, **keys})


def make(value: RolloutChunks, group_size: int = 1, **keys: Any) -> dict[str, Tensor]:
    return build_samples(value, algorithm(**keys), group_size)[0].tensors


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


def test_group_advantage_counts_once_per_chunk_ratio() -> None:
    inputs = trajectories(values=None)
    tensors = make(inputs, 2, adv_type="grpo", loss_type="actor", logprob_type="chunk_level")
    expected = group_advantages(inputs.steps["rewards"].sum(dim=(0, 2)), 2)
    torch.testing.assert_close(tensors["advantages"], expected.repeat(STEPS))


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


def figures(inputs: RolloutChunks, group_size: int = 1, **keys: Any) -> dict[str, float]:
    return build_samples(inputs, algorithm(**keys), group_size)[1]


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


def test_figures_leave_out_groups_that_are_filtered() -> None:
    rewards = torch.ones(STEPS, BATCH, CHUNK)
    rewards[0, 3, 0] = 2
    inputs = trajectories(values=None, rewards=rewards)
    metrics = figures(inputs, 2, adv_type="grpo", loss_type="actor", filter_rewards=True)
    # Two of two members: 1 and -1, each over the square root of 2.
    assert metrics["rollout/advantages_std"] == pytest.approx(0.5**0.5, abs=1e-3)


def test_figures_are_of_all_actors() -> None:
    """Each of two actors reports the same, although they have unequally many steps that count."""
    whole = trajectories(values=None, valid=ending(1, 1, 3, 2))
    keys: dict[str, Any] = {"adv_type": "grpo", "loss_type": "actor"}
    values, met = [torch.zeros(())] * 2, Barrier(2, timeout=60)

    def report(actor: int) -> dict[str, float]:
        def summed(value: Tensor) -> Tensor:
            values[actor] = value
            met.wait()
            total = values[0] + values[1]
            met.wait()
            return total

        return build_samples(whole.rows(2 * actor, 2 * actor + 2, 0), algorithm(**keys), 2, summed)[1]

    with ThreadPoolExecutor(2) as actors:
        reports = list(actors.map(report, range(2)))
    wanted = figures(whole, 2, **keys)
    for name in ("rollout/advantages_mean", "rollout/advantages_std"):
        assert [metrics[name] for metrics in reports] == pytest.approx([wanted[name]] * 2, abs=1e-6)


def test_groups_are_compared_by_their_total_rewards() -> None:
    inputs = trajectories(values=None)
    tensors = make(inputs, 2, adv_type="grpo", loss_type="actor")
    expected = group_advantages(inputs.steps["rewards"].sum(dim=(0, 2)), 2)
    torch.testing.assert_close(tensors["advantages"][:BATCH, 0], expected)
    torch.testing.assert_close(tensors["advantages"][-BATCH:, 1], expected)
    assert "returns" not in tensors


def test_groups_whose_rewards_are_equal_are_filtered() -> None:
    rewards = torch.ones(STEPS, BATCH, CHUNK)
    rewards[0, 3, 0] = 2
    tensors = make(
        trajectories(values=None, rewards=rewards), 2, adv_type="grpo", loss_type="actor", filter_rewards=True
    )
    counted = tensors["mask"].reshape(STEPS, BATCH, CHUNK)
    assert not counted[:, :2].any()
    assert counted[:, 2:].all()


def test_groups_whose_rewards_are_equal_count_unless_filtered() -> None:
    valid = ending(1, 1, 3, 2)
    inputs = trajectories(values=None, rewards=torch.ones(STEPS, BATCH, CHUNK), valid=valid)
    assert make(inputs, 2, adv_type="grpo", loss_type="actor")["mask"].sum() == valid.sum()


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
