"""Batches of answers: parts, selections, segments, and their evaluation by another group."""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recipes.language.answers.answer_batch import (
    RolloutBatch,
    ScoredAnswers,
    answer_sums,
    balanced,
    per_token,
    token_budget_parts,
    whole_groups,
)
from recipes.language.answers.sequences import EXIT_OF_SCORING, Cause, Exit
from recipes.language.workers.training_worker import EvaluationClient, EvaluationServer, shares
from tests.unit.recipes.language.tiny import answers, random_batch, sequence


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6))
def test_items_are_dealt_once_and_no_part_is_much_heavier(weights: list[int], parts: int) -> None:
    dealt = balanced(weights, parts)
    assert len(dealt) == parts
    assert sorted(item for part in dealt for item in part) == list(range(len(weights)))
    sums = [sum(weights[item] for item in part) for part in dealt]
    # Whoever is heaviest got its last item when it was the lightest.
    assert max(sums) - min(sums) <= max(weights, default=0)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 8)), max_size=40),
    st.integers(1, 200),
    st.none() | st.integers(8, 20),
    st.none() | st.integers(0, 100),
)
def test_parts_stay_within_their_bounds_but_for_items_above(
    items: list[tuple[int, int]], budget: int, most: int | None, shares_row: int | None
) -> None:
    costs, counts = [cost for cost, _ in items], [count for _, count in items]
    parts = token_budget_parts(costs, budget, counts, most, shares_row=shares_row)
    assert sorted(item for part in parts for item in part) == list(range(len(items)))
    for part in parts:
        sizes = [costs[item] for item in part]
        # Beside an item that shares no row, each takes as much as that one.
        fills_up = shares_row is not None and max(sizes) > shares_row
        assert len(part) == 1 or (max(sizes) * len(sizes) if fills_up else sum(sizes)) <= budget
        assert most is None or sum(counts[item] for item in part) <= most


def test_a_selection_has_the_tokens_of_its_answers() -> None:
    batch = random_batch(0, groups=3, size=2)
    chosen = torch.tensor([4, 0])
    result = batch.select(chosen)
    starts = batch.lengths.cumsum(0) - batch.lengths
    expected = torch.cat([batch.tokens[starts[i] : starts[i] + batch.lengths[i]] for i in chosen])
    assert torch.equal(result.tokens, expected)
    split = batch.logprobs.split(batch.answer_lengths.tolist())
    assert torch.equal(result.logprobs, torch.cat([split[4], split[0]]))
    assert result.groups.tolist() == [2, 0]
    assert len(batch.select(torch.empty(0, dtype=torch.int64))) == 0


def test_batches_join_in_order_and_nothing_joins_to_nothing() -> None:
    first, second = random_batch(1, groups=2), random_batch(2, groups=1)
    both = RolloutBatch.joined([first, second])
    assert torch.equal(both.tokens, torch.cat((first.tokens, second.tokens)))
    assert len(both) == len(first) + len(second)
    assert len(RolloutBatch.joined([])) == 0


def test_sums_over_answers_undo_what_is_spread_over_tokens() -> None:
    batch = random_batch(3)
    values = torch.arange(len(batch)).float()
    spread = per_token(values, batch.answer_lengths)
    assert spread.shape == batch.logprobs.shape
    torch.testing.assert_close(answer_sums(spread, batch.answer_lengths), values * batch.answer_lengths)


def test_groups_keep_the_order_of_their_first_answers() -> None:
    rng = random.Random(0)
    made = [RolloutBatch.of(answers(rng, (5,), [2]), group, [0.0]) for group in (7, 3, 7)]
    assert whole_groups(RolloutBatch.joined(made)) == [[0, 2], [1]]


def test_groups_at_once_equal_groups_joined() -> None:
    rng = random.Random(0)
    groups = [
        ScoredAnswers(answers(rng, (5, 6), [3, 1]), 7, [1.0, 0.5]),
        ScoredAnswers(answers(rng, (4,), [2]), 3, [0.0]),
    ]
    at_once = RolloutBatch.of_groups(groups)
    joined = RolloutBatch.joined([RolloutBatch.of(*group) for group in groups])
    for field in fields(RolloutBatch):
        torch.testing.assert_close(getattr(at_once, field.name), getattr(joined, field.name), rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, 5])
def test_a_batch_keeps_what_the_engine_said_of_each_token(length: int) -> None:
    made = answers(random.Random(0), (5, 6), [length])
    batch = RolloutBatch.of(made, 0, [1.0])
    assert batch.tokens.tolist() == [5, 6, *made[0].tokens]
    assert batch.logprobs.tolist() == pytest.approx(list(made[0].logprobs))
    assert batch.answer_lengths.tolist() == [length]


def test_answers_under_mixed_weights_are_distinguished() -> None:
    versions = ((3, 3), (2, 3, 3), (2,), (), (3,))
    drawn = [sequence(range(len(item)), (1, 2), number, versions=item) for number, item in enumerate(versions)]
    batch = RolloutBatch.of(drawn, 0, [0.0] * len(drawn))
    assert batch.drawn_by(3).tolist() == [True, True, False, False, False, False, True]


def with_segments() -> RolloutBatch:
    """Two trajectories of one group, the first of two segments, with words of tools in them."""
    about: Any = {"versions": (7, 0, 7), "trained": (True, False, True), "rewards": (0.25, 0.0, 0.0)}
    first, branch = sequence((4, 5, 6), (3,), **about), sequence((8,), (3, 4), versions=(6,))
    (second,) = answers(random.Random(0), (3,), [2])
    return RolloutBatch.of([first, branch, replace(second, sample=1, versions=(7, 7))], 5, [1.0, 1.0, 0.0])


def test_segments_of_a_trajectory_are_counted_as_one() -> None:
    batch = with_segments()
    first, counts = batch.trajectories
    assert first.tolist() == [0, 2]
    assert counts.tolist() == [2, 1]
    assert batch.trained.tolist() == [True, False, True, True, True, True]
    assert batch.select(torch.tensor([1, 2])).step_rewards.tolist() == [0, 0, 0]
    plain = random_batch(0, groups=3, size=2)
    assert plain.trajectories[1].tolist() == [1] * 6


def test_words_of_tools_are_drawn_by_no_weights() -> None:
    batch = with_segments()
    assert batch.drawn_by(7).tolist() == [True, False, True, False, True, True]
    assert batch.drawn_by(0).tolist() == [False] * 6
    assert [answer.drawn for answer in answers(random.Random(1), (3,), [4])] == [4]


Wires = defaultdict[tuple[str, int, str, int], deque[Any]]


class Peer:
    """Stands for a worker."""

    def __init__(self, group: str, rank: int, wires: Wires) -> None:
        self.group, self.rank, self.wires = group, rank, wires

    def send(self, value: Any, group: str, rank: int) -> None:
        self.wires[self.group, self.rank, group, rank].append(value)

    def recv(self, group: str, rank: int) -> Any:
        return self.wires[group, rank, self.group, self.rank].popleft()


def evaluated(tokens: Tensor) -> Tensor:
    return tokens.float() * 2 + 1


@pytest.mark.parametrize(("actors", "others"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_every_token_gets_its_own_value_back(actors: int, others: int) -> None:
    wires: Wires = defaultdict(deque)
    peers: Any = [Peer("actor", rank, wires) for rank in range(actors)]
    servers: Any = [Peer("critic", rank, wires) for rank in range(others)]
    clients = [EvaluationClient(peer, "critic", others) for peer in peers]
    batches = [random_batch(rank, groups=2 + 3 * rank) for rank in range(actors)]
    for client, batch in zip(clients, batches, strict=True):
        client.send(batch)
        client.send_tokens(batch.logprobs * 3)
    for item in servers:
        server = EvaluationServer(item, "actor", actors)
        mine = server.recv()
        assert torch.equal(server.recv_tokens(), mine.logprobs * 3)
        server.send_tokens(evaluated(mine.logprobs))
    for client, batch in zip(clients, batches, strict=True):
        assert torch.equal(client.recv_tokens(), evaluated(batch.logprobs))
    assert not any(wires.values())


def test_groups_stay_whole_and_workers_get_like_shares() -> None:
    batch = random_batch(5, groups=40)
    dealt = shares(batch, 4)
    assert sorted(row for part in dealt for row in part) == list(range(len(batch)))
    groups = [set(batch.groups[torch.tensor(part)].tolist()) for part in dealt]
    assert sum(map(len, groups)) == 40
    tokens = [int(batch.lengths[torch.tensor(part)].sum()) for part in dealt]
    assert max(tokens) < 1.1 * min(tokens)


PAGE = Path(__file__).parents[5] / "docs" / "rewards-and-data.md"


def test_the_page_has_one_row_for_every_end() -> None:
    rows = re.findall(r"^\| `((?:exit|failed)/\w+)` \| \S.*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [*(f"exit/{end}" for end in Exit), *(f"failed/{end}" for end in Cause)]
    assert set(EXIT_OF_SCORING) == {Cause.TIMEOUT, Cause.ERROR, Cause.CRASH}
