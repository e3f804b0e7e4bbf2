from __future__ import annotations

import random
from collections.abc import Sequence as SequenceABC
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.engines.engine import ArrivingTensors
from recipes.language.engines.own.torch_engine import TorchEngine
from tests.unit.recipes.language.tiny import END, VOCABULARY, tiny_model


def prompts_of(count: int, seed: int = 0, common: int = 0, longest: int = 30) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    first = tuple(rng.randrange(2, VOCABULARY) for _ in range(common))
    return [first + tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, longest))) for _ in range(count)]


def run(engine: TorchEngine, requests: SequenceABC[Request]) -> dict[tuple[str, int], Sequence]:
    for request in requests:
        engine.submit(request)
    results = list(engine.results())
    by_name = {(result.request_id, result.sample): result for result in results}
    assert len(by_name) == len(results), "an answer came twice"
    return by_name


def test_sample_depends_on_seed_prompt_and_number_alone() -> None:
    model = tiny_model()
    prompts = prompts_of(12)
    params = SamplingParams(max_new_tokens=12, seed=3)
    requests = [Request(request_id=str(i), prompt=p, params=params, group_size=3) for i, p in enumerate(prompts)]

    together = run(TorchEngine(model, stop_token_ids=(END,)), requests)
    apart = run(TorchEngine(model, stop_token_ids=(END,), max_running_tokens=150), requests[::-1])
    other = run(
        TorchEngine(model, stop_token_ids=(END,)),
        [Request(request_id="0", prompt=prompts[0], params=SamplingParams(max_new_tokens=12, seed=4), group_size=3)],
    )

    assert {name: value.tokens for name, value in together.items()} == {
        name: value.tokens for name, value in apart.items()
    }
    assert len({together["0", sample].tokens for sample in range(3)}) > 1
    assert other["0", 0].tokens != together["0", 0].tokens


def test_a_part_of_a_group_is_drawn_as_in_the_whole() -> None:
    model = tiny_model()
    params = SamplingParams(max_new_tokens=8)
    whole = run(TorchEngine(model), [Request(request_id="0", prompt=(5, 6), params=params, group_size=4)])

    part = run(
        TorchEngine(model), [Request(request_id="0", prompt=(5, 6), params=params, group_size=2, sample_offset=2)]
    )

    assert {name: value.tokens for name, value in part.items()} == {
        name: value.tokens for name, value in whole.items() if name[1] >= 2
    }


def test_prompts_that_begin_alike_compute_that_once() -> None:
    engine = TorchEngine(tiny_model())
    prompts = prompts_of(6, common=30, longest=4)
    distinct = set(prompts)

    run(
        engine,
        [
            Request(request_id=str(i), prompt=p, params=SamplingParams(max_new_tokens=2), group_size=5)
            for i, p in enumerate(prompts)
        ],
    )

    stats = engine.stats()
    assert stats.prefilled_tokens == 30 + sum(len(item) - 30 for item in distinct)
    assert stats.prompt_tokens == 5 * sum(len(prompt) for prompt in prompts)


def test_aborted_answers_come_back_with_what_they_have() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=30)
    for index in range(3):
        engine.submit(Request(request_id=str(index), prompt=(5, 6), params=SamplingParams(max_new_tokens=10)))
    engine.step()
    engine.step()

    results = engine.pause("abort")

    assert sorted(result.request_id for result in results) == ["0", "1", "2"]
    assert {result.finish_reason for result in results} == {"aborted"}
    assert sorted(len(result.tokens) for result in results) == [0, 3, 3]
    assert engine.unfinished == 0


def test_draining_ends_what_runs_and_leaves_what_waits() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=12)
    for index in range(2):
        engine.submit(Request(request_id=str(index), prompt=(5, 6), params=SamplingParams(max_new_tokens=10)))
    engine.step()

    drained = engine.pause("drain")
    assert [item.request_id for item in drained] == ["0"]
    assert engine.unfinished == 1

    engine.resume()
    assert [result.request_id for result in engine.results()] == ["1"]


def test_what_cannot_be_answered_is_refused() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=20)
    for request, words in (
        (Request(request_id="a", prompt=()), "empty prompt"),
        (Request(request_id="b", prompt=(5,), params=SamplingParams(max_new_tokens=300)), "model's limit of 256"),
        (Request(request_id="c", prompt=(5,), params=SamplingParams(max_new_tokens=50)), "max_running_tokens"),
        (Request(request_id="d", prompt=(5,), params=SamplingParams(stop=("x",))), "without a tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.submit(request)
    with pytest.raises(ValueError, match="no weight `nothing`"):
        engine.load_weights([("nothing", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match=r"weight `model\.norm\.weight` is"):
        engine.load_weights([("model.norm.weight", torch.zeros(1))], 1)
    assert engine.unfinished == 0


def test_merged_adapter_answers_like_peft_and_leaves_no_trace() -> None:
    peft = pytest.importorskip("peft")
    plain: Any = tiny_model()
    base = {name: value.clone() for name, value in plain.state_dict().items()}
    wrapped = peft.get_peft_model(
        plain, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    engine = TorchEngine(tiny_model(), adapter_scale=2.0)
    row = torch.tensor([[5, 6, 7, 8]])
    for seed in range(2):
        torch.manual_seed(seed)
        for name, value in wrapped.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(value, std=0.3)
        adapter = [(name, value) for name, value in wrapped.state_dict().items() if ".lora_" in name]
        engine.load_weights(adapter, version=seed + 1, adapter_only=True)
        greedy = SamplingParams(temperature=0, max_new_tokens=1)
        answer = run(engine, [Request(request_id="0", prompt=(5, 6, 7, 8), params=greedy)])["0", 0]
        logits = wrapped(row).logits[0, -1].log_softmax(-1).detach()
        assert answer.tokens[0] == int(logits.argmax())
        assert answer.logprobs[0] == pytest.approx(float(logits.max()), abs=1e-4)

    zero = [(name, torch.zeros_like(value)) for name, value in adapter]
    engine.load_weights(zero, version=3, adapter_only=True)
    merged = engine._model.state_dict()
    for name, value in base.items():
        torch.testing.assert_close(merged[name], value, atol=0, rtol=0)


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

    def decode(tokens: SequenceABC[int]) -> str:
        return "".join(chr(64 + token) for token in tokens)

    engine = TorchEngine(model, stop_token_ids=(END,), decode=decode, max_running_tokens=4000)
    result = run(
        engine,
        [
            Request(
                request_id=str(index),
                prompt=prompt,
                params=SamplingParams(temperature=0, max_new_tokens=lengths[index], stop=texts[index]),
            )
            for index, prompt in enumerate(prompts)
        ],
    )

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


def test_shared_prefix_is_computed_once_in_all_waves() -> None:
    model = tiny_model()
    prompts = prompts_of(12, common=40, longest=6)
    requests = [
        Request(request_id=str(i), prompt=p, params=SamplingParams(max_new_tokens=4)) for i, p in enumerate(prompts)
    ]
    slow = TorchEngine(model, max_running_tokens=120)
    whole = run(TorchEngine(model), requests)
    diagnostics = run(slow, requests)

    assert {name: diagnostic.tokens for name, diagnostic in diagnostics.items()} == {
        name: value.tokens for name, value in whole.items()
    }
    own = sum(len(prompt) - 40 for prompt in prompts)
    assert slow.stats().prefilled_tokens == 40 + own
    slow.load_weights(tiny_model(seed=1).state_dict().items(), version=1)
    run(slow, requests[:2])
    assert slow.stats().prefilled_tokens == 2 * 40 + own + len(prompts[0]) + len(prompts[1]) - 80


def test_answers_with_a_minimum_length_leave_others_alone() -> None:
    model = tiny_model()
    plain = Request(request_id="a", prompt=(7,), params=SamplingParams(max_new_tokens=20))
    drawn = run(TorchEngine(model), [plain])["a", 0]
    late = Request(
        request_id="b",
        prompt=(8,),
        params=SamplingParams(max_new_tokens=20, min_new_tokens=20, stop_token_ids=drawn.tokens),
    )
    beside = Request(request_id="a", prompt=(7,), params=SamplingParams(max_new_tokens=20, min_new_tokens=1))

    assert run(TorchEngine(model), [beside, late])["a", 0].tokens == drawn.tokens


def test_answers_begin_in_the_order_of_priority_and_request() -> None:
    engine = TorchEngine(tiny_model(), max_running_tokens=12)
    for index, priority in enumerate((1, 1, 0, 1)):
        params = SamplingParams(max_new_tokens=10)
        engine.submit(Request(request_id=str(index), prompt=(5, 6), params=params, priority=priority))

    assert [result.request_id for result in engine.results()] == ["2", "0", "1", "3"]


def test_wrong_weights_change_nothing() -> None:
    model = tiny_model()
    engine = TorchEngine(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    new = dict(tiny_model(seed=1).state_dict())
    partial = {name: value for name, value in new.items() if name != "lm_head.weight"}

    with pytest.raises(ValueError, match=r"weight `lm_head\.weight` of the engine's model has no value"):
        engine.load_weights(partial.items(), 1)
    with pytest.raises(ValueError, match="nothing"):
        engine.load_weights({**new, "nothing": torch.zeros(1)}.items(), 1)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)


def test_weights_of_other_precision_keep_the_fingerprint() -> None:
    engine = TorchEngine(tiny_model())
    trained = tiny_model(seed=1).to(torch.bfloat16).state_dict()
    twin = TorchEngine(tiny_model(seed=2).to(torch.bfloat16))

    assert engine.load_weights(trained.items(), 1) == twin.load_weights(trained.items(), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e-45},
        {"temperature": 9e-7},
        {"temperature": 5e-324},
        {"top_k": 0},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
        {"max_new_tokens": 4, "min_new_tokens": 5},
        {"stop": ("",)},
    ],
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
    prompts = [Request(request_id="a", prompt=(5, 6, 7), params=SamplingParams(temperature=0, max_new_tokens=6))]
    answers = [[item.tokens for item in run(one, prompts).values()] for one in (engine, twin)]
    assert answers[0] == answers[1]


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
    settings = SamplingParams(max_new_tokens=6, **params)
    prompts = [prompt for prompt in prompts_of(8, common=4) if poison not in prompt]
    good = [
        Request(request_id=str(i), prompt=prompt, params=settings, group_size=2) for i, prompt in enumerate(prompts)
    ]
    alone = run(engine, good)
    hostile = Request(request_id="bad", prompt=(*prompts[0], poison), params=settings, group_size=2)

    together = run(engine, [good[0], hostile, *good[1:]])

    for sample in range(2):
        failed = together.pop(("bad", sample))
        assert failed.failed
        assert (failed.tokens, failed.finish_reason) == ((), "aborted")
    # Some of the others draw that token themselves: they fail alone as well.
    assert {name: answer.tokens for name, answer in together.items()} == {n: a.tokens for n, a in alone.items()}
    assert {name for name, answer in together.items() if answer.failed} == {n for n, a in alone.items() if a.failed}
    assert not all(answer.failed for answer in together.values())
    assert engine.unfinished == 0
