"""Keys and values in buckets, shared prompts once: the answers stay those of each sequence by itself."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.engines.own.decoder import DecodeLayout, DecodePlan
from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.language.models.attention_rule import AttentionRule, attention, attention_and_normalizers
from tests.unit.recipes.language.models.architectures import architectures, tiny
from tests.unit.recipes.language.tiny import VOCABULARY, tiny_model

Work = list[tuple[tuple[int, ...], int, int]]


def tokens_of(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, VOCABULARY) for _ in range(count))


def requests_of(work: Work) -> list[Request]:
    return [
        Request(
            request_id=str(number),
            prompt=prompt,
            params=SamplingParams(max_new_tokens=longest, temperature=0.0 if count == 1 else 1.0, seed=number),
            group_size=count,
        )
        for number, (prompt, count, longest) in enumerate(work)
    ]


def answered(engine: TorchEngine, requests: list[Request]) -> dict[tuple[str, int], Sequence]:
    for request in requests:
        engine.submit(request)
    return {(answer.request_id, answer.sample): answer for answer in engine.results()}


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
    made = tiny(architectures()[name])
    plain = TorchEngine(made, share_prefixes=False)
    shared = TorchEngine(made, min_saved=1, max_running_tokens=limit)
    check_same(answered(shared, requests_of(GROUPS)), answered(plain, requests_of(GROUPS)))


def test_a_common_beginning_is_stored_once() -> None:
    common = tokens_of(100, 9)
    work: Work = [(common + tokens_of(3 + number, number), 1, 6 + number) for number in range(8)]
    engine, plain = TorchEngine(tiny_model()), TorchEngine(tiny_model(), share_prefixes=False)
    check_same(answered(engine, requests_of(work)), answered(plain, requests_of(work)))
    for request in requests_of(work):
        engine.submit(request)
    engine.step()
    assert [bucket.prompts.count for bucket in engine._cache.buckets] == [1]
    assert engine.stats().reserved_tokens < 300


def test_begun_answers_of_a_group_share_its_prompt() -> None:
    [request] = requests_of([(tokens_of(80, 1), 4, 20)])
    engine = TorchEngine(tiny_model(), min_saved=1)
    whole = answered(engine, [request])
    parts: list[Request] = []
    for (_, sample), answer in whole.items():
        cut = 5 + sample
        begun = replace(request.begun, tokens=answer.tokens[:cut], logprobs=answer.logprobs[:cut], versions=(0,) * cut)
        parts.append(replace(request, group_size=1, sample_offset=sample, begun=begun))
    for part in parts:
        engine.submit(part)
    engine.step()
    assert [bucket.prompts.count for bucket in engine._cache.buckets] == [1]
    check_same({(answer.request_id, answer.sample): answer for answer in engine.results()}, whole)


def test_new_weights_share_no_prompt_of_earlier_ones() -> None:
    prompt = tokens_of(40, 1)
    begun, later = (
        Request(request_id=name, prompt=prompt, params=SamplingParams(max_new_tokens=12, seed=seed), group_size=4)
        for name, seed in (("begun", 1), ("later", 2))
    )
    torch.manual_seed(5)
    other = {name: torch.randn_like(weight) * 0.2 for name, weight in tiny_model().named_parameters()}
    engine, fresh = (TorchEngine(tiny_model(), min_saved=1) for _ in range(2))
    engine.submit(begun)
    engine.step()
    assert engine._cache.prompts() == {prompt}
    engine.pause("freeze")
    for item in (engine, fresh):
        item.load_weights(other.items(), version=1)
    engine.resume()
    mine = {key: answer for key, answer in answered(engine, [later]).items() if key[0] == "later"}
    check_same(mine, answered(fresh, [later]))


def test_memory_is_close_to_what_the_tokens_need() -> None:
    made = tiny(architectures()["qwen2"], max_position_embeddings=8192)
    alone = [(tokens_of(20, seed), 1, 20) for seed in range(64)]
    for work in ([(tokens_of(2000, 0), 64, 20)], [(tokens_of(2000, 0), 1, 20), *alone]):
        engine = TorchEngine(made)
        for request in requests_of(work):
            engine.submit(request)
        needed = sum(len(prompt) + count * longest for prompt, count, longest in work)
        most = 0
        while engine.unfinished:
            engine.step()
            most = max(most, engine.stats().cache_bytes)
        assert most <= 1.5 * needed * engine._cache.shape.bytes_per_token


def test_what_ends_is_freed_and_the_last_frees_the_prompt() -> None:
    engine = TorchEngine(tiny_model(), min_saved=1)
    prompt = tokens_of(50, 1)
    for number, longest in enumerate((2, 2, 4, 8)):
        params = SamplingParams(max_new_tokens=longest, temperature=0.0)
        engine.submit(Request(request_id=str(number), prompt=prompt, params=params))
    taken: list[int] = []
    while engine.unfinished:
        engine.step()
        taken.append(engine.stats().cache_bytes)
    engine.step()
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) > 2
    assert engine.stats().cache_bytes == 0
    assert not engine._cache.buckets


def test_reserved_tokens_count_a_shared_prompt_once() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=300)
    for request in requests_of([(tokens_of(200, 1), 8, 20)]):
        engine.submit(request)
    engine.step()
    stats = engine.stats()
    # 200 of the prompt and 20 for each of five; a sixth would need more than the limit.
    assert (stats.running, stats.reserved_tokens, stats.waiting) == (5, 300, 3)


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gpt_oss"])
def test_recorded_steps_equal_those_of_the_moment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny(architectures()[name])
    moment = answered(TorchEngine(made, min_saved=1), requests_of(GROUPS))
    engine = TorchEngine(made, min_saved=1)
    pass_over: Callable[..., Any] = engine._decoder._pass
    ends: dict[str, Any] = {}

    def static(tokens: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        # As `Decoder` keeps them for a graph: written once for a layout, and counted up after each step.
        layout = engine._decoder._layout
        if ends.get("layout") is not layout:
            buckets = engine._cache.buckets
            ends.update(layout=layout, ends=torch.tensor([bucket.rows.end for bucket in buckets]))
            for bucket in buckets:
                # What a graph reads behind the newest column is zeros on a GPU.
                for layer in range(engine._cache.shape.layers):
                    for kept in bucket.rows.layer(layer):
                        kept[:, :, bucket.rows.end :] = 0
        logits = pass_over(tokens, DecodePlan(layout, ends["ends"]))
        ends["ends"] += 1
        return logits

    monkeypatch.setattr(engine._decoder, "_pass", static)
    check_same(answered(engine, requests_of(GROUPS)), moment)
    assert isinstance(ends["layout"], DecodeLayout)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_parts_of_attention_add_up_to_the_whole(softcap: float | None, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(3, 2, n, 8, generator=generator).to(kind) for n in (4, 30, 30))
    mask = torch.rand(3, 1, 1, 30, generator=generator) < 0.7
    mask[0, ..., :12] = False
    rule = AttentionRule(0.3, softcap=softcap)
    first = attention_and_normalizers(queries, keys[:, :, :12], values[:, :, :12], mask[..., :12], rule)
    second = attention_and_normalizers(queries, keys[:, :, 12:], values[:, :, 12:], mask[..., 12:], rule)
    merged = torch.lerp(second[0], first[0], torch.sigmoid(first[1] - second[1])[..., None].to(kind))
    tolerance = 1e-5 if kind is torch.float32 else 0.03
    torch.testing.assert_close(merged, attention(queries, keys, values, mask, rule), atol=tolerance, rtol=0)
