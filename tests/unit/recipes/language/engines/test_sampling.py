"""Draws from logits, and texts at which answers end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from recipes.language.answers.sequences import SamplingParams
from recipes.language.engines.engine import StopTexts
from recipes.language.engines.sampling import draw, prompt_key, stream_key, uniforms


def test_draws_differ_by_everything_they_depend_on() -> None:
    keys = {
        stream_key(prompt_key(seed, prompt), sample)
        for seed in (0, 1, 1 << 63)
        for prompt in ((1, 2), (2, 1), (1,))
        for sample in (0, 1)
    }
    assert len(keys) == 18
    first = uniforms(torch.tensor(sorted(keys)), torch.zeros(18, dtype=torch.int64))
    second = uniforms(torch.tensor(sorted(keys)), torch.ones(18, dtype=torch.int64))
    assert len({*first.tolist(), *second.tolist()}) == 36


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


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 50_000])
def test_token_is_drawn_where_the_cumulative_probability_passes(size: int) -> None:
    rows = 40
    logits = 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    numbers = uniforms(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    numbers[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.ones(rows), numbers)
    exact = logits.double().softmax(-1)
    upper = exact.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    lower = upper - exact.gather(1, tokens[:, None])[:, 0]
    assert bool(((lower - 1e-6 <= numbers) & (numbers <= upper + 1e-6)).all())
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)


def test_no_token_of_probability_zero_is_drawn() -> None:
    logits = torch.full((200, 1000), -torch.inf)
    logits[:, [3, 255, 600]] = torch.tensor([0.0, -20.0, 1.0])
    numbers = torch.linspace(0, 1 - 2.0**-53, 200, dtype=torch.float64)
    tokens, _ = draw(logits, torch.ones(200), numbers)
    assert set(tokens.tolist()) <= {3, 255, 600}
    assert tokens[0] == 3
    assert tokens[-1] == 600


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, {1, 2}),
        (-1, 0.5, {2}),
        (-1, 0.8, {1, 2}),
        (-1, 1.0, {0, 1, 2, 3}),
        # As in transformers and vLLM: 0.64 of all, but 0.73 of the two likeliest.
        (2, 0.7, {2}),
    ],
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


def test_temperature_zero_is_greedy_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 3.0], [0.0, 3.0]])
    tokens, logprobs = draw(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def bad_rows(size: int) -> torch.Tensor:
    """Return logits of which the rows 1 to 4 have no probabilities."""
    logits = torch.linspace(-2, 2, 6 * size).view(6, size).clone()
    logits[1] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    logits[4, 7] = torch.nan
    return logits


@pytest.mark.parametrize("size", [24, 256, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.5, None])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_a_row_without_probabilities_leaves_the_others_alone(
    size: int, temperature: float | None, top_p: float | None
) -> None:
    logits, numbers = bad_rows(size), torch.linspace(0, 0.9, 6, dtype=torch.float64)
    whole = [0, 5]

    def drawn(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(rows)
        tempered = None if temperature is None else torch.full((count,), temperature)
        shares = None if top_p is None else torch.full((count,), top_p)
        return draw(logits[rows], tempered, numbers[rows], top_p=shares)

    tokens, logprobs = drawn(list(range(6)))
    assert logprobs.isfinite().tolist() == [True, False, False, False, False, True]
    assert bool(((tokens >= 0) & (tokens < size)).all())
    alone = drawn(whole)
    assert tokens[whole].equal(alone[0])
    assert logprobs[whole].equal(alone[1])


@pytest.mark.parametrize("size", [24, 1000])
@pytest.mark.parametrize("top_p", [1e-46, 1e-300, 5e-324])
def test_the_smallest_share_keeps_the_likeliest_token(size: int, top_p: float) -> None:
    logits = torch.zeros(1, size)
    logits[0, 3] = 1.0
    tokens, logprobs = draw(
        logits, None, torch.tensor([0.5], dtype=torch.float64), top_p=torch.tensor([top_p], dtype=torch.float32)
    )
    assert tokens.tolist() == [3]
    assert bool(logprobs.isfinite().all())


@pytest.mark.parametrize("size", [24, 1000])
def test_a_banned_token_may_be_the_only_likely_one(size: int) -> None:
    logits = torch.full((2, size), -200.0)
    logits[:, 1], logits[:, 4] = 0.0, -190.0
    banned = torch.zeros(2, size, dtype=torch.bool)
    banned[0, 1] = banned[1] = True
    tokens, logprobs = draw(logits, None, torch.tensor([0.5, 0.5], dtype=torch.float64), banned=banned)
    assert tokens[0] == 4
    assert logprobs.tolist()[0] == pytest.approx(-190.0)
    assert not bool(logprobs[1].isfinite())


# Tokens of several characters, a half of a character, and one that loses its space when it stands alone.
PIECES = [b"ab", b"c", b"\n", b" end", b"\xc3", b"\xa9", b"x\ny"]


def decode(tokens: Sequence[int]) -> str:
    text = b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")
    return text.removeprefix(" ") if len(tokens) == 1 else text


@pytest.mark.parametrize(
    ("tokens", "stop", "ends"),
    [
        ([0, 2], ["\n"], True),
        ([2, 0], ["\n"], False),
        ([2, 0, 2], ["\n"], True),
        ([0, 1], ["bc"], True),
        ([0, 1], ["cb"], False),
        ([0, 3], [" end"], True),
        ([0, 3], ["b e"], True),
        ([0, 4, 5], ["é"], True),
        ([0, 4], ["é"], False),
        ([0, 6], ["\n"], True),
        ([1, 1], ["never", "cc"], True),
        ([1], ["c"], True),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_text(tokens: list[int], stop: list[str], ends: bool) -> None:
    assert StopTexts(decode).ended(tokens, stop) is ends


def test_one_text_is_no_tuple_of_stop_texts() -> None:
    with pytest.raises(ValueError, match="`stop` is the text '###'"):
        SamplingParams(stop="###")  # type: ignore[arg-type]
