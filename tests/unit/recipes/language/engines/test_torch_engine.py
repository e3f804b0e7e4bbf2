"""The engine of this project: the contract of engines, and what it promises beyond."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any

import pytest
import torch

from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.engines.engine import ArrivingTensors, Engine
from recipes.language.engines.torch_engine import TorchEngine
from tests.unit.recipes.language.engines import contract
from tests.unit.recipes.language.engines.contract import (
    EngineContract,
    answer_to,
    contract_model,
    decode,
    drawn,
    greedy,
    request,
    requests_of,
    run,
)
from tests.unit.recipes.language.tiny import END, VOCABULARY, tiny_model

prompts_of = partial(contract.prompts_of, vocabulary=VOCABULARY)


class TestTorchEngine(EngineContract):
    draws_go_on = True
    tolerance = 1e-4

    def make(self, **options: Any) -> Engine:
        return TorchEngine(contract_model(), **options)


def tokens_of(results: dict[tuple[str, int], Sequence]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {name: result.tokens for name, result in results.items()}


def submit(engine: TorchEngine, requests: SequenceABC[Request]) -> None:
    for item in requests:
        engine.submit(item)


def test_sample_depends_on_seed_prompt_and_number_alone() -> None:
    model = tiny_model()
    requests = requests_of(prompts_of(12), drawn(12, seed=3), group_size=3)
    together = tokens_of(run(TorchEngine(model, stop_token_ids=(END,)), requests))
    apart = tokens_of(run(TorchEngine(model, stop_token_ids=(END,), max_running_tokens=150), requests[::-1]))
    part = request(requests[0].prompt, drawn(12, seed=3), "0", group_size=2, sample_offset=1)
    other = request(requests[0].prompt, drawn(12, seed=4), "0", group_size=3)
    assert together == apart
    assert len({together["0", sample] for sample in range(3)}) > 1
    part_of_group = tokens_of(run(TorchEngine(model, stop_token_ids=(END,)), [part]))
    assert part_of_group == {("0", sample): together["0", sample] for sample in (1, 2)}
    assert run(TorchEngine(model, stop_token_ids=(END,)), [other])["0", 0].tokens != together["0", 0]


def test_prompts_that_begin_alike_compute_that_once() -> None:
    engine = TorchEngine(tiny_model())
    prompts = prompts_of(6, common=30, longest=4)
    run(engine, requests_of(prompts, drawn(2), group_size=5))
    stats = engine.stats()
    assert stats.prefilled_tokens == 30 + sum(len(item) - 30 for item in set(prompts))
    assert stats.prompt_tokens == 5 * sum(len(prompt) for prompt in prompts)


def test_shared_prefix_is_computed_once_in_all_waves() -> None:
    model, prompts = tiny_model(), prompts_of(12, common=40, longest=6)
    requests = requests_of(prompts, drawn(4))
    slow = TorchEngine(model, max_running_tokens=120)
    assert tokens_of(run(slow, requests)) == tokens_of(run(TorchEngine(model), requests))
    own = sum(len(prompt) - 40 for prompt in prompts)
    assert slow.stats().prefilled_tokens == 40 + own
    slow.load_weights(tiny_model(seed=1).state_dict().items(), version=1)
    run(slow, requests[:2])
    assert slow.stats().prefilled_tokens == 2 * 40 + own + len(prompts[0]) + len(prompts[1]) - 80


def test_aborted_answers_come_back_with_what_they_have() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=30)
    submit(engine, requests_of([(5, 6)] * 3, drawn(10)))
    engine.step()
    engine.step()
    results = engine.pause("abort")
    assert sorted(result.request_id for result in results) == ["0", "1", "2"]
    assert {result.finish_reason for result in results} == {"aborted"}
    assert sorted(len(result.tokens) for result in results) == [0, 3, 3]
    assert engine.unfinished == 0


def test_draining_ends_what_runs_and_leaves_what_waits() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=12)
    submit(engine, requests_of([(5, 6)] * 2, drawn(10)))
    engine.step()
    assert [item.request_id for item in engine.pause("drain")] == ["0"]
    assert engine.unfinished == 1
    engine.resume()
    assert [result.request_id for result in engine.results()] == ["1"]


def test_what_cannot_be_answered_is_refused() -> None:
    engine = TorchEngine(tiny_model())
    for params, words in ((drawn(300), "model's limit of 256"), (drawn(1, stop=("x",)), "without a tokenizer")):
        with pytest.raises(ValueError, match=words):
            engine.submit(request((5,), params))
    assert engine.unfinished == 0


def test_merged_adapter_answers_like_peft_and_leaves_no_trace() -> None:
    import peft

    plain: Any = tiny_model()
    base = {name: value.clone() for name, value in plain.state_dict().items()}
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    wrapped: Any = peft.get_peft_model(plain, settings)
    model = tiny_model()
    engine = TorchEngine(model, adapter_scale=2.0)
    adapter: list[tuple[str, torch.Tensor]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        for name, value in wrapped.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(value, std=0.3)
        adapter = [(name, value) for name, value in wrapped.state_dict().items() if ".lora_" in name]
        engine.load_weights(adapter, version=seed + 1, adapter_only=True)
        answer = answer_to(engine, (5, 6, 7, 8), greedy(1))
        logits = wrapped(torch.tensor([[5, 6, 7, 8]])).logits[0, -1].log_softmax(-1).detach()
        assert answer.tokens[0] == int(logits.argmax())
        assert answer.logprobs[0] == pytest.approx(float(logits.max()), abs=1e-4)
    zero = [(name, torch.zeros_like(value)) for name, value in adapter]
    engine.load_weights(zero, version=3, adapter_only=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in base.items())


def left_padded(model: Any, prompts: list[tuple[int, ...]], length: int) -> list[tuple[int, ...]]:
    """Return the likeliest answers by `generate` of transformers: one batch, padded on the left."""
    width = max(map(len, prompts))
    rows = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    result = model.generate(rows, attention_mask=mask, do_sample=False, max_new_tokens=length)[:, width:]
    answers = [tuple(row.tolist()) for row in result]
    return [answer[: answer.index(END) + 1] if END in answer else answer for answer in answers]


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.nightly)])
def test_uneven_prompts_are_answered_like_generate(count: int) -> None:
    model, plain = tiny_model(seed=3), tiny_model(seed=3)
    # Likely ends, and logits far enough apart for other orders of addition not to matter.
    for item in (model, plain):
        with torch.no_grad():
            item.lm_head.weight.mul_(6)
            item.lm_head.weight[END] *= 2
    prompts = prompts_of(count, seed=9, longest=60)
    lengths = [random.Random(index).choice((1, 7, 20, 48)) for index in range(count)]
    texts = [(chr(64 + 2 + index % (VOCABULARY - 2)),) if index % 3 == 0 else () for index in range(count)]
    engine = TorchEngine(model, stop_token_ids=(END,), decode=decode, max_running_tokens=4000)
    settings = [greedy(length, stop=stop) for length, stop in zip(lengths, texts, strict=True)]
    asked = [request(*item, str(number)) for number, item in enumerate(zip(prompts, settings, strict=True))]
    result = run(engine, asked)
    reasons: dict[str, int] = {}
    expected: list[tuple[int, ...]] = []
    for start in range(0, count, 20):
        expected += left_padded(plain, prompts[start : start + 20], 48)
    for index, whole in enumerate(expected):
        cut = whole[: lengths[index]]
        for text in texts[index]:
            place = decode(cut).find(text)
            cut = cut if place < 0 else cut[: place + 1]
        answer = result[str(index), 0]
        assert answer.tokens == cut, index
        reasons[answer.finish_reason] = reasons.get(answer.finish_reason, 0) + 1
    assert min(reasons["stop"], reasons["length"]) > count // 8


def test_answers_with_a_minimum_length_leave_others_alone() -> None:
    model = tiny_model()
    alone = answer_to(TorchEngine(model), (7,), drawn(20))
    late = request((8,), drawn(20, min_new_tokens=20, stop_token_ids=alone.tokens), "b")
    beside = request((7,), drawn(20, min_new_tokens=1))
    assert run(TorchEngine(model), [beside, late])["a", 0].tokens == alone.tokens


def test_answers_begin_in_the_order_of_priority_and_request() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=12)
    submit(engine, [request((5, 6), drawn(10), str(n), priority=priority) for n, priority in enumerate((1, 1, 0, 1))])
    assert [result.request_id for result in engine.results()] == ["2", "0", "1", "3"]


def test_wrong_weights_change_nothing() -> None:
    model, new = tiny_model(), dict(tiny_model(seed=1).state_dict())
    engine = TorchEngine(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for wrong, words in (
        ({name: new[name] for name in new if name != "lm_head.weight"}, r"weight `lm_head\.weight` .* has no value"),
        ({**new, "nothing": torch.zeros(1)}, "no weight `nothing`"),
        ({**new, "model.norm.weight": torch.zeros(1)}, r"weight `model\.norm\.weight` is"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.load_weights(wrong.items(), 1)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_weights_of_other_precision_keep_the_fingerprint() -> None:
    trained = tiny_model(seed=1).to(torch.bfloat16).state_dict()
    engines = TorchEngine(tiny_model()), TorchEngine(tiny_model(seed=2).to(torch.bfloat16))
    assert len({engine.load_weights(trained.items(), 1) for engine in engines}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": value} for value in (-1.0, float("nan"), 1e-45, 9e-7, 5e-324)),
        *({"top_k": 0}, {"top_p": 0.0}, {"max_new_tokens": 0}, {"max_new_tokens": 4, "min_new_tokens": 5}),
        {"stop": ("",)},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{list(wrong)[-1]}`"):
        SamplingParams(**wrong)


def arriving(tensors: dict[str, torch.Tensor], *, may_keep: bool) -> ArrivingTensors:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return ArrivingTensors(shapes, iter(tensors.items()), may_keep=may_keep)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("may_keep", [True, False])
def test_memory_of_weights_is_kept_where_it_fits(may_keep: bool, kind: torch.dtype) -> None:
    model, new = tiny_model(seed=1), {name: weight.to(kind) for name, weight in tiny_model(seed=2).state_dict().items()}
    engine, twin = TorchEngine(model), TorchEngine(tiny_model(seed=3))
    came = {name: value.clone() for name, value in new.items()}
    digest = engine.load_weights(arriving(came, may_keep=may_keep), 1)
    assert digest == twin.load_weights(new.items(), 1)
    own = model.state_dict()
    kept = {name for name, value in came.items() if own[name].data_ptr() == value.data_ptr()}
    assert bool(kept) == (may_keep and kind == torch.float32)
    assert all(torch.equal(own[name], value.float()) for name, value in new.items())
    assert len({answer_to(item, (5, 6, 7), greedy(6)).tokens for item in (engine, twin)}) == 1


def test_weights_that_share_memory_do_not_part() -> None:
    model = tiny_model(seed=1)
    layers = model.model.layers
    layers[1].input_layernorm.weight = torch.nn.Parameter(layers[0].input_layernorm.weight.data)
    came = {name: torch.full_like(weight, 0.5) for name, weight in model.state_dict().items()}
    del came["model.layers.1.input_layernorm.weight"]
    TorchEngine(model).load_weights(arriving(came, may_keep=True), 1)
    assert torch.equal(layers[1].input_layernorm.weight, layers[0].input_layernorm.weight)


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.9}, {"min_new_tokens": 3}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_prompt_without_probabilities_fails_alone(params: dict[str, Any], bad: float) -> None:
    model = tiny_model()
    poison = VOCABULARY - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = bad
    engine = TorchEngine(model, min_saved=1)
    settings = drawn(6, **params)
    prompts = [prompt for prompt in prompts_of(8, common=4) if poison not in prompt]
    good = requests_of(prompts, settings, group_size=2)
    alone = run(engine, good)
    hostile = request((*prompts[0], poison), settings, "bad", group_size=2)
    together = run(engine, [good[0], hostile, *good[1:]])
    for sample in range(2):
        failed = together.pop(("bad", sample))
        assert failed.failed
        assert (failed.tokens, failed.finish_reason) == ((), "aborted")
    # Some of the others draw that token themselves: they fail alone as well.
    assert tokens_of(together) == tokens_of(alone)
    assert {name for name, answer in together.items() if answer.failed} == {n for n, a in alone.items() if a.failed}
    assert not all(answer.failed for answer in together.values())
    assert engine.unfinished == 0


@pytest.mark.parametrize(("kind", "longest"), [("default", 256), ("yarn", 1024), ("linear", 1024), ("dynamic", 256)])
def test_stretched_positions_make_room_for_longer_sequences(kind: str, longest: int) -> None:
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    assert TorchEngine(model).longest == longest
    assert TorchEngine(model, max_sequence_tokens=300, max_running_tokens=90).longest == 90
