from __future__ import annotations

import pytest
import torch

from recipes.language.engines.sampling import _mix, _mixed, draw, stream_key, uniforms


def test_tensors_are_mixed_as_integers_are() -> None:
    numbers = [0, 1, 2**63 - 1, 123456789]

    found = _mixed(torch.tensor(numbers)).tolist()

    assert [value % 2**64 for value in found] == [_mix(number) for number in numbers]


def test_draws_differ_by_everything_they_depend_on() -> None:
    keys = {
        stream_key(seed, prompt, sample) for seed in (0, 1) for prompt in ((1, 2), (2, 1), (1,)) for sample in (0, 1)
    }
    assert len(keys) == 12

    first = uniforms(torch.tensor(sorted(keys)), torch.zeros(12, dtype=torch.int64))
    second = uniforms(torch.tensor(sorted(keys)), torch.ones(12, dtype=torch.int64))
    assert len({*first.tolist(), *second.tolist()}) == 24


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniforms(torch.arange(20_000), torch.arange(20_000) % 7)

    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers.float(), 10, 0, 1)
    # Six standard deviations of a bin's count.
    assert float((counts - 2000).abs().max()) < 6 * (20_000 * 0.1 * 0.9) ** 0.5


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, -1)
    numbers = uniforms(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64))

    tokens, logprobs = draw(logits, torch.full((20_000,), 0.5), numbers)

    expected = (logits[0] / 0.5).softmax(-1)
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert float((shares - expected).abs().max()) < 0.02
    torch.testing.assert_close(logprobs, expected.log()[tokens])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 1.0, {1, 2}), (-1, 0.5, {2}), (-1, 0.8, {1, 2}), (-1, 1.0, {0, 1, 2, 3})]
)
def test_unlikely_tokens_are_left_out(top_k: int, top_p: float, kept: set[int]) -> None:
    count = 4000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(count, -1)
    numbers = uniforms(torch.arange(count), torch.zeros(count, dtype=torch.int64))

    tokens, logprobs = draw(
        logits, torch.ones(count), numbers, torch.full((count,), top_k), torch.full((count,), top_p)
    )

    assert set(tokens.tolist()) == kept
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[tokens])


def test_temperature_zero_takes_the_likeliest_beside_rows_that_are_drawn() -> None:
    logits = torch.tensor([[0.0, 3.0], [0.0, 3.0]])

    tokens, logprobs = draw(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0], dtype=torch.float64))

    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])
