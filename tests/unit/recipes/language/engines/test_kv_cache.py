"""Keys and values in batches, shared prompts once: the answers stay those of each sequence by itself."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.language.answers.sequences import Request, Sequence
from recipes.language.engines import kv_batch
from recipes.language.engines.torch_engine import TorchEngine
from tests.unit.recipes.language.engines.contract import drawn, greedy, request, run
from tests.unit.recipes.language.models.architectures import architectures, tiny
from tests.unit.recipes.language.tiny import VOCABULARY, tiny_model

# Bytes of a token of `tiny_model`: keys and values of two layers, of two heads of 8 numbers.
TOKEN = 2 * 2 * 2 * 8 * 4
Work = list[tuple[tuple[int, ...], int, int]]


def tokens_of(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, VOCABULARY) for _ in range(count))


def requests_of(work: Work) -> list[Request]:
    """Return requests for prompts, numbers of answers, and their lengths."""
    return [
        request(prompt, drawn(longest, temperature=float(count > 1), seed=number), str(number), group_size=count)
        for number, (prompt, count, longest) in enumerate(work)
    ]


def check_same(mine: dict[tuple[str, int], Sequence], other: dict[tuple[str, int], Sequence]) -> None:
    assert mine.keys() == other.keys()
    for name, answer in mine.items():
        assert answer.tokens == other[name].tokens
        torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(other[name].logprobs), atol=2e-5, rtol=0)


# Groups of unlike sizes on prompts of unlike lengths, single ones between them, two requests for one prompt.
GROUPS: Work = [
    (tokens_of(60, 1), 5, 9),
    (tokens_of(41, 2), 3, 25),
    (tokens_of(7, 3), 1, 12),
    (tokens_of(33, 4), 4, 3),
    (tokens_of(60, 1), 2, 14),
    (tokens_of(90, 5), 1, 8),
]


@pytest.mark.parametrize("limit", [0, 300])
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_shared_prompts_change_no_answer(name: str, limit: int) -> None:
    check_shared(name, max_running_tokens=limit)


def check_shared(name: str, **options: Any) -> None:
    """Check that an engine that shares prompts draws what one that does not draws."""
    made = tiny(architectures()[name])
    shared, plain = TorchEngine(made, min_saved=1, **options), TorchEngine(made, share_prefixes=False)
    check_same(run(shared, requests_of(GROUPS)), run(plain, requests_of(GROUPS)))


@pytest.mark.parametrize("name", ["gpt2", "stablelm"])
@pytest.mark.parametrize("most", [0, 2, 1000])
def test_rows_of_a_prompt_are_read_together_or_one_by_one(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_batch, "_MOST_OTHERS", most)
    check_shared(name)


def test_a_common_beginning_is_stored_once() -> None:
    common = tokens_of(100, 9)
    work: Work = [(common + tokens_of(3 + number, number), 1, 6 + number) for number in range(8)]
    engine, plain = TorchEngine(tiny_model(), min_saved=500), TorchEngine(tiny_model(), share_prefixes=False)
    check_same(run(engine, requests_of(work)), run(plain, requests_of(work)))
    for item in requests_of(work):
        engine.submit(item)
    engine.step()
    assert engine.stats().reserved_tokens < 300
    assert engine.stats().cache_bytes < 300 * TOKEN


def test_answers_begun_elsewhere_go_on_beside_new_ones() -> None:
    [asked] = requests_of([(tokens_of(80, 1), 4, 20)])
    engine = TorchEngine(tiny_model(), min_saved=1)
    whole = run(engine, [asked])
    parts: list[Request] = []
    for (_, sample), answer in whole.items():
        cut = 5 * sample
        begun = replace(asked.begun, tokens=answer.tokens[:cut], logprobs=answer.logprobs[:cut], versions=(0,) * cut)
        parts.append(replace(asked, group_size=1, sample_offset=sample, begun=begun))
    check_same(run(engine, parts), whole)


def test_new_weights_share_no_prompt_of_earlier_ones() -> None:
    prompt = tokens_of(40, 1)
    begun, later = (request(prompt, drawn(12, seed=seed), str(seed), group_size=4) for seed in (1, 2))
    torch.manual_seed(5)
    other = {name: torch.randn_like(weight) * 0.2 for name, weight in tiny_model().named_parameters()}
    engine, fresh = (TorchEngine(tiny_model(), min_saved=1) for _ in range(2))
    engine.submit(begun)
    engine.step()
    assert engine.stats().reserved_tokens == 40 + 4 * 12
    engine.pause("freeze")
    for item in (engine, fresh):
        item.load_weights(other.items(), version=1)
    engine.resume()
    engine.submit(later)
    mine = {(answer.request_id, answer.sample): answer for answer in engine.results() if answer.request_id == "2"}
    check_same(mine, run(fresh, [later]))


def test_memory_is_close_to_what_the_tokens_need() -> None:
    made = tiny(architectures()["qwen2"], max_position_embeddings=8192)
    alone = [(tokens_of(20, seed), 1, 20) for seed in range(64)]
    for work in ([(tokens_of(2000, 0), 64, 20)], [(tokens_of(2000, 0), 1, 20), *alone]):
        engine = TorchEngine(made)
        for item in requests_of(work):
            engine.submit(item)
        needed = sum(len(prompt) + count * longest for prompt, count, longest in work)
        most = 0
        while engine.unfinished:
            engine.step()
            most = max(most, engine.stats().cache_bytes)
        assert most <= 1.5 * needed * 2 * 2 * 2 * 16 * 4


def test_what_ends_is_freed_and_the_last_frees_the_prompt() -> None:
    engine = TorchEngine(tiny_model(), min_saved=1)
    for number, longest in enumerate((2, 2, 4, 8)):
        engine.submit(request(tokens_of(50, 1), greedy(longest), str(number)))
    taken: list[int] = []
    while engine.unfinished:
        engine.step()
        taken.append(engine.stats().cache_bytes)
    engine.step()
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) > 2
    assert engine.stats().cache_bytes == 0


def test_reserved_tokens_count_a_shared_prompt_once() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=300, min_saved=1)
    for item in requests_of([(tokens_of(200, 1), 8, 20)]):
        engine.submit(item)
    engine.step()
    stats = engine.stats()
    # 200 of the prompt and 20 for each of five; a sixth would need more than the limit.
    assert (stats.running, stats.reserved_tokens, stats.waiting) == (5, 300, 3)
