from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from recipes.language.packing import pack
from recipes.language.policy import LanguagePolicy, chunked_logprobs
from tests.unit.recipes.language.tiny import plain_logprobs, random_batch, tiny_model


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("seed", "size", "common"), [(0, 1, 0), (1, 4, 0), (2, 1, 20), (3, 4, 20), (4, 3, 8)])
def test_packed_sequences_have_the_log_probabilities_and_gradients_of_each_by_itself(
    seed: int, size: int, common: int, share: bool
) -> None:
    model, plain = tiny_model(), tiny_model()
    policy = LanguagePolicy(model)
    batch = random_batch(seed, size=size, common=common)
    weights = torch.randn(len(batch.trained), generator=torch.Generator().manual_seed(seed))

    found = policy(pack(batch, share_prompts=share)).logprobs
    (found * weights).sum().backward()
    expected = plain_logprobs(plain, batch)
    (expected * weights).sum().backward()

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-5, rtol=1e-4)


def test_a_shared_prompt_stands_once() -> None:
    batch = random_batch(5, groups=3, size=4, common=10)
    prompts = sum(set(zip(batch.groups.tolist(), batch.prompt_lengths.tolist(), strict=True)), ())[1::2]
    answers = int(batch.answer_lengths.sum())

    shared, plain = pack(batch), pack(batch, share_prompts=False)

    # The last token of an answer predicts nothing and is left out.
    assert plain.tokens.shape[1] == int(batch.lengths.sum()) - len(batch)
    assert shared.tokens.shape[1] == 10 + sum(prompts) - 3 * 10 + answers - len(batch)


def test_log_probabilities_in_chunks_equal_those_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False)
    targets = torch.randint(0, 30, (17,))

    def run(limit: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        monkeypatch.setattr("recipes.language.policy._CHUNK_NUMBERS", limit)
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


def test_a_temperature_divides_the_logits() -> None:
    model, plain = tiny_model(), tiny_model()
    batch = random_batch(6, groups=1, size=1)

    found = LanguagePolicy(model)(pack(batch), 0.5).logprobs

    row, prompt = batch.tokens[None], int(batch.prompt_lengths[0])
    logits = plain(row).logits[0, prompt - 1 : -1] / 0.5
    expected = logits.log_softmax(-1).gather(1, row[0, prompt:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
