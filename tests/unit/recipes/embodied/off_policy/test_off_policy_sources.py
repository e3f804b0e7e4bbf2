"""Sources of replay buffers: rollouts in order, demonstrations with their ends, recordings of earlier runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.demonstrations import Demonstrations, Ends
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.trajectory import RolloutChunks
from recipes.embodied.loop.protocols import INTERVENTIONS
from recipes.embodied.off_policy import sources
from recipes.embodied.off_policy.off_policy_actor import split_passes
from recipes.embodied.off_policy.sources import (
    add_recording,
    add_steps,
    demonstrations_buffer,
    intervened,
    transition_steps,
)
from recipes.embodied.replay.buffer import ReplayBuffer
from recipes.embodied.replay.segments import SegmentWriter
from recipes.embodied.replay.storage import ReplayBatch

SPEC = EnvSpec(state_size=1, action_size=1, has_instructions=True)
SET = DemonstrationsConfig.model_validate({"train_data_paths": "set"})


def chunks(first: int, environments: int, start: float = 0.0, steps: int = 3, version: int = 0) -> RolloutChunks:
    """Return steps of environments whose state is start + 10 x environment + step; the action is the reward."""
    here = start + 10 * torch.arange(environments) + torch.arange(steps)[:, None]
    flags = torch.zeros(steps, environments, 1, dtype=torch.bool)
    return RolloutChunks(
        first,
        version,
        {"states": here[:, :, None].float()},
        {
            "next/states": here[:, :, None].float() + 1,
            "actions": here[:, :, None, None].float(),
            "logprobs": torch.zeros(steps, environments, 1, 1),
            "rewards": here[:, :, None].float(),
            "terminations": flags,
            "truncations": flags.clone(),
            "valid": ~flags,
        },
        None,
    )


def buffer(lanes: int, capacity: int = 100) -> ReplayBuffer:
    return ReplayBuffer(sources.transition_spec(SPEC), lanes, capacity)


def everything(of: ReplayBuffer, steps: int = 1) -> ReplayBatch:
    return of.gather(of.rows, steps, 0.5)


def test_pieces_become_passes_in_their_order_of_events() -> None:
    pieces = [chunks(first, 2, start=100.0 * first) for first in (6, 0, 4, 2)]
    results = split_passes(pieces, passes=2, lanes=4)
    assert [result.batch for result in results] == [4, 4]
    assert results[0].inputs["states"][0, :, 0].tolist() == [0, 10, 200, 210]
    assert results[1].inputs["states"][0, :, 0].tolist() == [400, 410, 600, 610]
    with pytest.raises(ValueError, match="2 passes arrived; expected 3"):
        split_passes(pieces, passes=3, lanes=4)


def test_passes_follow_each_other_without_uncounted_steps() -> None:
    filled = buffer(2)
    assert add_steps(filled, transition_steps(chunks(0, 2))) == 6
    following = transition_steps(chunks(0, 2, start=3.0))
    following["valid"][1, 1] = False
    assert add_steps(filled, following) == 5
    contents = everything(filled, steps=2)
    by_state = dict(
        zip(contents.observations["states"][:, 0], zip(contents.rewards, contents.discounts, strict=True), strict=True)
    )
    # From one pass into the next; before the step that is missing the episode counts as cut off.
    assert by_state[2.0] == (2 + 0.5 * 3, 0.25)
    assert by_state[13.0] == (13, 0.5)
    with pytest.raises(ValueError, match="steps of 2 environments, but the buffer has 3"):
        add_steps(buffer(3), following)


def shown(ended: bool, rewards: bool = True, assumed: bool = False) -> Demonstrations:
    """Return two unsolved episodes, of three steps and of one; what ends the first one is given, the second one is
    ended by the task."""
    states = np.array([1, 2, 3, 11], np.float32)[:, None]
    last = np.array([False, False, True, False])
    final = np.array([False, False, False, True])
    return Demonstrations(
        "set",
        20,
        np.array([0, 3, 4]),
        states / 12,
        states,
        {},
        ("do it",),
        np.zeros(4, np.int64),
        rewards=states[:, 0] if rewards else None,
        successes=np.zeros(4, np.bool_),
        ends=Ends((last & ended) | final, last & (not ended), (last | final) & assumed),
    )


@pytest.mark.parametrize("ended", [True, False])
def test_demonstrations_end_as_their_columns_say(
    ended: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "read_data", lambda config: shown(ended))
    contents = everything(demonstrations_buffer(SET, SPEC))
    rows = {
        float(state[0]): (float(reward), float(discount), float(following[0]))
        for state, reward, discount, following in zip(
            contents.observations["states"],
            contents.rewards,
            contents.discounts,
            contents.next_observations["states"],
            strict=True,
        )
    }
    # The only step of the second episode is not lost.
    wanted = {1.0: (1.0, 0.5, 2.0), 2.0: (2.0, 0.5, 3.0), 11.0: (11.0, 0.0, 11.0)}
    assert rows == ({**wanted, 3.0: (3.0, 0.0, 3.0)} if ended else wanted)
    np.testing.assert_allclose(contents.actions, contents.observations["states"] / 12)
    assert ("left out the last steps of 1 of 2 episodes" in caplog.text) == (not ended)


@pytest.mark.parametrize(
    ("kind", "rewards"),
    [("terminations", {1.0: 2.0, 2.0: 2.0, 3.0: 8.5, 11.0: 11.0}), ("truncations", {1.0: 1.0, 3.0: 3.0})],
)
def test_nothing_is_chained_over_an_end_within_a_demonstration(
    kind: str, rewards: dict[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    no = np.zeros(4, np.bool_)
    ends = Ends(no, no, no)._replace(**{kind: np.array([False, True, False, True])})
    data = replace(shown(True), bounds=np.array([0, 4]), ends=ends)
    monkeypatch.setattr(sources, "read_data", lambda config: data)
    contents = everything(demonstrations_buffer(SET, SPEC), steps=2)
    states = contents.observations["states"][:, 0].tolist()
    assert dict(zip(states, contents.rewards.tolist(), strict=True)) == rewards
    assert set(contents.discounts.tolist()) == {0.0 if kind == "terminations" else 0.5}


def test_what_is_assumed_of_ends_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sources, "read_data", lambda config: shown(False, assumed=True))
    demonstrations_buffer(SET, SPEC)
    assert "1 of 2 episodes are done and not solved, and no `next.truncated` says" in caplog.text
    assert "1 of 2 episodes are not solved at their end, and no column says" in caplog.text


@pytest.mark.parametrize(
    ("valid", "cut", "counts", "reward"),
    [
        ([1, 1, 1, 1], None, True, 10),
        ([1, 1, 0, 0], None, True, 3),  # a success at the second step, what follows it is masked
        ([1, 1, 0, 0], 1, True, 3),  # an end there
        ([1, 0, 0, 0], 3, True, 1),  # the limit ends a masked episode
        ([1, 1, 1, 0], 3, False, 6),  # the end's own step is dropped
        ([1, 0, 1, 1], None, False, 8),
        ([0, 0, 0, 0], None, False, 0),
    ],
)
def test_chunk_of_a_masked_success_counts(valid: list[int], cut: int | None, counts: bool, reward: float) -> None:
    cuts = torch.zeros(1, 1, 4, dtype=torch.bool)
    if cut is not None:
        cuts[..., cut] = True
    flags = {
        "terminations": torch.zeros_like(cuts),
        "truncations": cuts,
        "valid": torch.tensor(valid).bool()[None, None],
    }
    rewards = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    steps = transition_steps(
        RolloutChunks(0, 0, {}, {"actions": rewards[..., None], "rewards": rewards, **flags}, None)
    )
    assert (bool(steps["valid"][0, 0]), float(steps["rewards"][0, 0])) == (counts, reward)
    assert bool(steps["truncations"][0, 0]) is (cut is not None)


def test_what_somebody_does_in_two_episodes_is_no_chain() -> None:
    """The second takeover begins in the state in which the first one ended, of another episode."""
    steps = transition_steps(chunks(0, 1, steps=3))
    steps["observations/states"][:, 0, 0] = [4, 7, 5]
    steps["next_observations/states"][:, 0, 0] = [5, 8, 6]
    steps[INTERVENTIONS] = np.array([[True], [False], [True]])
    helped = buffer(1)
    assert add_steps(helped, intervened(steps)) == 2
    contents = everything(helped, steps=2)
    assert contents.discounts.tolist() == [0.5, 0.5]
    assert contents.rewards.tolist() == [0, 2]


def test_demonstrations_without_rewards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: object) -> Demonstrations:
        return shown(True, rewards=False)

    monkeypatch.setattr(sources, "read_data", load)
    with pytest.raises(DatasetError, match=r"`next\.reward`"):
        demonstrations_buffer(SET, SPEC)


@pytest.mark.parametrize("missing", ["ends", "rewards"])
def test_only_the_column_that_lacks_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "read_data", lambda config: replace(shown(True), **{missing: None}))
    with pytest.raises(DatasetError) as caught:
        demonstrations_buffer(SET, SPEC)
    named, other = ("`next.success`", "`next.reward`") if missing == "ends" else ("`next.reward`", "`next.success`")
    assert named in caught.value.message
    assert other not in caught.value.message


def test_weights_of_data_sets_are_refused_for_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "read_data", lambda config: replace(shown(True), draws=np.ones(5)))
    with pytest.raises(DatasetError, match="a replay buffer draws all steps alike"):
        demonstrations_buffer(SET, SPEC)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_recordings_fit_any_number_of_environments(lanes: int, tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(transition_steps(chunks(0, 2)))
    writer.append(transition_steps(chunks(0, 2, start=3.0)))
    filled = buffer(lanes)
    assert add_recording(filled, tmp_path, lambda damage: None) == 12
    contents = everything(filled)
    states = contents.observations["states"][:, 0]
    assert sorted(states) == [*range(6), *range(10, 16)]
    np.testing.assert_array_equal(contents.next_observations["states"][:, 0], states + 1)
