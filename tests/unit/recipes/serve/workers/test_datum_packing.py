"""Data in packed rows, whose common beginnings are computed once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.serve.values import Datum
from recipes.serve.workers.datum_packing import data_logprobs, shares


def datum(tokens: list[int], targets: Any = None) -> Datum:
    wanted = np.asarray([*tokens[1:], 4] if targets is None else targets, np.int64)
    return Datum(np.asarray(tokens, np.int64), {"target_tokens": wanted})


def rows_of(seed: int) -> list[list[int]]:
    """Return groups that continue prompts, which continue examples; prefixes, repetitions, and others among them."""
    draw = random.Random(seed)

    def pieces(most: int) -> list[int]:
        return [draw.randrange(3, 8) for _ in range(draw.randint(1, most))]

    examples = pieces(20)
    prompts = [examples + pieces(9) for _ in range(4)]
    rows = [prompt + pieces(5) for prompt in prompts for _ in range(4)]
    rows += [list(draw.choice(rows)), examples, pieces(30), examples + pieces(3), [3]]
    draw.shuffle(rows)
    return rows


def nested(levels: int) -> list[list[int]]:
    return [[3 + place % 5 for place in range(7 * level + 1)] + [9] for level in range(levels)]


@pytest.mark.parametrize("rows", [*map(rows_of, range(6)), nested(9), [[5]], [[5], [5]]])
def test_shared_beginnings_change_no_result(rows: list[list[int]]) -> None:
    policy = LanguagePolicy(built_model(built_tokenizer(), hidden_dim=32, layers=2, seed=1))
    with torch.no_grad():
        together = data_logprobs(policy, [datum(row) for row in rows])
        apart = torch.cat([data_logprobs(policy, [datum(row)]) for row in rows])
    torch.testing.assert_close(together, apart, atol=2e-6, rtol=1e-5)


def test_shared_beginnings_change_no_gradient() -> None:
    rows = rows_of(0)
    gradients = list[torch.Tensor]()
    for batches in ([rows], [[row] for row in rows]):
        model = built_model(built_tokenizer(), hidden_dim=32, layers=2, seed=1)
        for batch in batches:
            data_logprobs(LanguagePolicy(model), [datum(row) for row in batch]).square().sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


def test_several_targets_share_a_position() -> None:
    policy = LanguagePolicy(built_model(built_tokenizer(), hidden_dim=32, layers=1, seed=1))
    with torch.no_grad():
        pairs = data_logprobs(policy, [datum([3, 4, 5], [[4, 6], [5, 5], [7, 3]])])
        ones = [data_logprobs(policy, [datum([3, 4, 5], targets)]) for targets in ([4, 5, 7], [6, 5, 3])]
    torch.testing.assert_close(pairs.reshape(3, 2), torch.stack(ones, 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_datum_is_in_one_micro_batch(seed: int, world_size: int) -> None:
    data = [datum(row) for row in [*rows_of(seed), *[[3, 4, 5]] * 9]]
    parts = [part for rank in range(world_size) for part in shares(data, world_size, rank, 40)]
    assert sorted(number for part in parts for number in part) == list(range(len(data)))


def test_micro_batches_keep_common_beginnings_together() -> None:
    draw = np.random.default_rng(0)
    prompts = [[*range(3, 20), *draw.integers(3, 90, 12).tolist()] for _ in range(16)]
    data = [datum(prompt + draw.integers(3, 90, 4).tolist()) for prompt in prompts for _ in range(8)]
    draw.shuffle(data)
    parts = shares(data, 1, 0, 200)
    beginnings = [{tuple(data[number].tokens[:29]) for number in part} for part in parts]
    # Besides its own, a micro-batch repeats one beginning.
    assert sum(map(len, beginnings)) <= 16 + len(parts)
    assert max(map(len, parts)) > 8
