from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.models.packing import RowLayout, pack
from recipes.language.models.policy import LanguagePolicy, ValueModel, checkpoint_decoder, chunked_logprobs
from tests.unit.recipes.language.tiny import answers, plain_logprobs, random_batch, tiny_model


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(("seed", "size", "common"), [(0, 1, 0), (1, 4, 0), (2, 1, 20), (3, 4, 20), (4, 3, 8)])
def test_packed_sequences_equal_single_ones_with_gradients(seed: int, size: int, common: int, masks: bool) -> None:
    model, plain = tiny_model(), tiny_model()
    policy = LanguagePolicy(model)
    batch = random_batch(seed, size=size, common=common)
    weights = torch.randn(len(batch.trained), generator=torch.Generator().manual_seed(seed))
    logprobs = policy(pack(batch, masks=masks)).logprobs
    (logprobs * weights).sum().backward()
    expected = plain_logprobs(plain, batch)
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-5, rtol=1e-4)


def random_rows(seed: int) -> list[list[int]]:
    """Return sequences that begin alike to different degrees, some of them equal, one the beginning of others."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(2, 9) for _ in range(draw.randrange(1, 30))] for _ in range(4)]
    rows = [prompt + [draw.randrange(2, 9) for _ in range(draw.randrange(1, 12))] for prompt in prompts * 4]
    return draw.sample([*rows, rows[0], rows[0], *prompts, [3]], k=len(rows) + len(prompts) + 3)


@pytest.mark.parametrize("seed", range(6))
def test_a_row_holds_each_sequence_and_shows_its_tokens_no_other(seed: int) -> None:
    rows = random_rows(seed)
    layout = RowLayout(rows, masks=True)
    packed = layout.rows(torch.tensor([0]), torch.tensor([0]))
    assert packed.mask is not None
    assert packed.positions is not None
    width = packed.tokens.shape[1]
    assert packed.tokens.numel() < sum(map(len, rows))
    for number, row in enumerate(rows):
        places = layout.places(number)
        assert packed.tokens.flatten()[places].tolist() == row
        assert packed.positions.flatten()[places].tolist() == list(range(len(row)))
        for position, place in enumerate(places.tolist()):
            seen = packed.mask[place // width, 0, place % width].nonzero()[:, 0] + place // width * width
            assert seen.tolist() == places[: position + 1].tolist()
    # What fills rows up sees itself, so that no softmax is of nothing.
    assert bool(packed.mask.any(dim=-1).all())


def test_a_prompt_stands_once_before_answers_of_some_tokens() -> None:
    prompt, other = list(range(2, 42)), list(range(40, 20, -1))
    answers = [[50 + number] * 20 for number in range(8)]
    together = RowLayout([prompt + answer for answer in answers], masks=True).rows(torch.tensor([0]), torch.tensor([0]))
    assert together.tokens.shape == (1, 40 + 8 * 20)
    divided = RowLayout([prompt + answer for answer in [*answers, [60] * 20]], masks=True)
    assert divided.rows(torch.tensor([0]), torch.tensor([0])).tokens.shape == (2, 200)
    # What is short beside others shares a row, and a mask is left out where there is nothing to hide.
    mixed = RowLayout([prompt, other, other[::-1]], masks=True).rows(torch.tensor([0]), torch.tensor([0]))
    assert mixed.tokens.shape == (2, 40)
    plain = RowLayout([prompt, other, other[::-1]], masks=False).rows(torch.tensor([0]), torch.tensor([0]))
    assert plain.tokens.shape == (3, 40)
    assert plain.mask is None
    assert plain.positions is None


def test_rows_of_long_sequences_have_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.language.models.packing.WIDEST", 30)
    rows = RowLayout([[5] * 31, [5] * 30, [5] * 10, [5] * 10], masks=True).rows(torch.tensor([0]), torch.tensor([0]))
    assert rows.mask is None
    assert rows.tokens.shape == (4, 31)


def test_log_probabilities_in_chunks_equal_those_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False)
    targets = torch.randint(0, 30, (17,))

    def run(limit: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        monkeypatch.setattr("recipes.language.models.policy.CHUNK_NUMBERS", limit)
        hidden = torch.randn(17, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        logprobs, entropy = chunked_logprobs(hidden, head, targets, 0.7, entropy=True)
        assert entropy is not None
        (logprobs.sum() + entropy.square().sum()).backward()
        assert hidden.grad is not None
        return logprobs.detach(), entropy.detach(), hidden.grad

    for chunked, whole in zip(run(4 * 30), run(1 << 20), strict=True):
        torch.testing.assert_close(chunked, whole)
    logits = head(torch.randn(17, 8, generator=torch.Generator().manual_seed(1))) / 0.7
    torch.testing.assert_close(run(1 << 20)[1], torch.distributions.Categorical(logits=logits).entropy())


class Largest(TorchDispatchMode):
    """Notes the most numbers of any tensor that has the vocabulary as a dimension; the output matrix itself aside."""

    def __init__(self, vocabulary: int, head: int) -> None:
        super().__init__()
        self.vocabulary, self.head, self.numbers = vocabulary, head, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and self.vocabulary in item.shape and item.numel() != self.head:
                self.numbers = max(self.numbers, item.numel())
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_no_tensor_of_tokens_by_vocabulary_is_ever_whole(monkeypatch: pytest.MonkeyPatch, entropy: bool) -> None:
    tokens, width, vocabulary, limit = 120, 8, 1000, 10 * 1000
    monkeypatch.setattr("recipes.language.models.policy.CHUNK_NUMBERS", limit)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with Largest(vocabulary, vocabulary * width) as seen:
        logprobs, entropies = chunked_logprobs(hidden, head, targets, entropy=entropy)
        (logprobs.sum() + (0 if entropies is None else entropies.sum())).backward()
    assert 0 < seen.numbers <= limit
    assert head.weight.grad is not None


def test_backward_memory_does_not_grow_with_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocabulary = 1000
    monkeypatch.setattr("recipes.language.models.policy.CHUNK_NUMBERS", 10 * vocabulary)
    head, kept = torch.nn.Linear(8, vocabulary, bias=False), list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    hidden = torch.randn(120, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_logprobs(hidden, head, torch.randint(0, vocabulary, (120,)))
    assert sum(item.numel() for item in kept if vocabulary in item.shape[-1:]) == 0


def test_checkpointed_layers_recompute_and_drop_nothing() -> None:
    gradients: list[list[torch.Tensor]] = []
    calls: list[int] = []
    for again in (False, True):
        policy = LanguagePolicy(tiny_model(layers=3))
        checkpoint_decoder(policy) if again else None
        count = 0

        def counted(*_: Any) -> None:
            nonlocal count
            count += 1

        for block in policy.blocks:
            cast("Any", block).mlp.register_forward_pre_hook(counted)
        assert not cast("Any", policy.blocks[0]).mlp.training
        policy(pack(random_batch(7))).logprobs.sum().backward()
        gradients.append([weight.grad.clone() for weight in policy.parameters() if weight.grad is not None])
        calls.append(count)
    assert calls == [3, 6]
    for plain, computed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, computed)


def test_values_start_at_zero_without_the_output_matrix() -> None:
    model = ValueModel(tiny_model())
    batch = random_batch(8)
    assert torch.equal(model(pack(batch)), torch.zeros(len(batch.trained)))
    torch.nn.init.normal_(model.value_head.weight)
    values = model(pack(batch))
    values.square().sum().backward()
    assert model.causal.get_output_embeddings().weight.grad is None
    # The value before an answer's token does not know that token.
    start = int(batch.answer_lengths[0]) - 1
    changed = batch.tokens.clone()
    changed[int(batch.lengths[0]) - 1] = (changed[int(batch.lengths[0]) - 1] + 1) % 40
    torch.testing.assert_close(model(pack(replace(batch, tokens=changed)))[: start + 1], values[: start + 1])


def test_half_the_bits_give_nearly_the_same() -> None:
    batch = random_batch(9)
    expected = LanguagePolicy(tiny_model())(pack(batch)).logprobs
    policy = LanguagePolicy(tiny_model().to(torch.bfloat16))
    logprobs = policy(pack(batch)).logprobs
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=0.1, rtol=0)
    logprobs.sum().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in policy.parameters() if weight.grad is not None)
    values = ValueModel(tiny_model().to(torch.bfloat16))(pack(batch))
    assert values.dtype == torch.float32


def test_a_temperature_divides_the_logits() -> None:
    model, plain = tiny_model(), tiny_model()
    batch = random_batch(6, groups=1, size=1)
    logprobs = LanguagePolicy(model)(pack(batch), 0.5).logprobs
    row, prompt = batch.tokens[None], int(batch.prompt_lengths[0])
    logits = plain(row).logits[0, prompt - 1 : -1] / 0.5
    expected = logits.log_softmax(-1).gather(1, row[0, prompt:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_segments_of_a_group_pack_with_their_own_prompts() -> None:
    """Those of a branch begin with what was said before it."""
    plain = random_batch(0, groups=1, size=3, longest=20)
    prompt = plain.tokens[: int(plain.prompt_lengths[0])].tolist()
    first, second, third = answers(random.Random(0), tuple(prompt), [6, 4, 5])
    branch = replace(second, prompt=(*prompt, *first.tokens[:2]), sample=0)
    batch = RolloutBatch.of([first, branch, replace(third, sample=1)], 0, [1.0, 1.0, 0.0])
    model = tiny_model()
    expected = plain_logprobs(model, batch)
    policy = LanguagePolicy(tiny_model())
    for masks in (True, False):
        torch.testing.assert_close(policy(pack(batch, masks=masks)).logprobs, expected, atol=1e-5, rtol=1e-4)
