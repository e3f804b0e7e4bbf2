"""Tests that every engine passes. A test class inherits `EngineContract` and says how its engine is made."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.language.answers.sequences import Begun, Request, SamplingParams, Sequence
from recipes.language.engines.engine import Engine

END, VOCABULARY, LONGEST = 1, 64, 96


def contract_model(seed: int = 0) -> Any:
    """Return a Qwen2 that real engines can run: heads of 32 numbers, likely ends, logits far enough apart."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes: Any = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = Qwen2Config(**sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=END, pad_token_id=0)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


def decode(tokens: SequenceABC[int]) -> str:
    """Return a text with one character for each token."""
    return "".join(chr(64 + token) for token in tokens)


def prompts_of(
    count: int, seed: int = 0, common: int = 0, longest: int = 30, vocabulary: int = VOCABULARY
) -> list[tuple[int, ...]]:
    """Return random prompts of fewer than `longest` tokens after `common` equal ones."""
    rng = random.Random(seed)
    first = tuple(rng.randrange(2, vocabulary) for _ in range(common))
    return [first + tuple(rng.randrange(2, vocabulary) for _ in range(rng.randrange(1, longest))) for _ in range(count)]


def greedy(length: int, **params: Any) -> SamplingParams:
    """Return the settings of the likeliest answer."""
    return SamplingParams(temperature=0, max_new_tokens=length, **params)


def drawn(length: int, **params: Any) -> SamplingParams:
    """Return the settings of a random answer."""
    return SamplingParams(max_new_tokens=length, **params)


def request(prompt: tuple[int, ...], params: SamplingParams, name: str = "a", **options: Any) -> Request:
    """Return a request for one answer, or `group_size`."""
    return Request(request_id=name, prompt=prompt, params=params, **options)


def requests_of(prompts: Iterable[tuple[int, ...]], params: SamplingParams, **options: Any) -> list[Request]:
    """Return a request for each prompt, called by its number."""
    return [request(prompt, params, str(number), **options) for number, prompt in enumerate(prompts)]


def run(engine: Engine, requests: SequenceABC[Request]) -> dict[tuple[str, int], Sequence]:
    """Return the answers by request and number; each came once."""
    for request in requests:
        engine.submit(request)
    results = list(engine.results())
    by_name = {(result.request_id, result.sample): result for result in results}
    assert len(by_name) == len(results), "an answer came twice"
    assert len(results) == sum(request.group_size for request in requests), "an answer was lost"
    return by_name


def answer_to(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> Sequence:
    """Return the one answer to a prompt."""
    return run(engine, [request(prompt, params)])["a", 0]


def plain_greedy(model: Any, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return the likeliest answer by transformers alone."""
    row = torch.tensor([prompt])
    result = model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=length)
    return tuple(result[0, len(prompt) :].tolist())


def plain_logprobs(model: Any, prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float = 1.0) -> Any:
    """Return the log-probability of each token of an answer by transformers alone, float [n]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


class EngineContract:
    """Tests of an engine with the weights of `contract_model(0)`.

    Attributes:
        loads_weights: whether the engine takes new weights.
        keeps_partial: whether an aborted answer keeps its tokens, and a frozen one goes on.
        draws_go_on: whether an answer that is begun elsewhere is drawn as if it had not been interrupted.
        tolerance: of log-probabilities.
    """

    loads_weights = True
    keeps_partial = True
    draws_go_on = False
    tolerance = 1e-3

    def make(self, **options: Any) -> Engine:
        """Return an engine: `stop_token_ids`, `decode`, `max_running_tokens`, `max_sequence_tokens`."""
        raise NotImplementedError

    @pytest.fixture
    def plain(self) -> Any:
        return contract_model()

    @pytest.fixture
    def engine(self) -> Any:
        engine = self.make(stop_token_ids=(END,), decode=decode, max_sequence_tokens=LONGEST)
        yield engine
        engine.stop()
        engine.stop()

    @pytest.mark.parametrize("common", [0, 20])
    def test_greedy_answers_and_logprobs_equal_transformers(self, engine: Engine, plain: Any, common: int) -> None:
        prompts = prompts_of(12, seed=common, common=common)
        lengths = [random.Random(index).randrange(1, 30) for index in range(len(prompts))]
        asked = [request(*item, str(n)) for n, item in enumerate(zip(prompts, map(greedy, lengths), strict=True))]
        result = run(engine, asked)
        reasons: set[str] = set()
        for index, prompt in enumerate(prompts):
            answer = result[str(index), 0]
            assert answer.prompt == prompt
            assert answer.tokens == plain_greedy(plain, prompt, lengths[index])
            assert answer.finish_reason == ("stop" if answer.tokens[-1] == END else "length")
            exact = plain_logprobs(plain, prompt, answer.tokens)
            torch.testing.assert_close(torch.tensor(answer.logprobs), exact, atol=self.tolerance, rtol=0)
            reasons.add(answer.finish_reason)
        assert engine.unfinished == 0
        assert "length" in reasons

    def test_samples_have_the_logprobs_of_the_policy_that_drew_them(self, engine: Engine, plain: Any) -> None:
        params = drawn(12, temperature=1.0, seed=5)
        results = run(engine, [request((7, 8, 9), params, group_size=4, sample_offset=2)])
        assert [sample for _, sample in sorted(results)] == [2, 3, 4, 5]
        assert len({result.tokens for result in results.values()}) > 1
        for item in results.values():
            exact = plain_logprobs(plain, (7, 8, 9), item.tokens)
            torch.testing.assert_close(torch.tensor(item.logprobs), exact, atol=self.tolerance, rtol=0)

    def test_a_seed_gives_the_same_samples_again(self, engine: Engine) -> None:
        def tokens(seed: int) -> list[tuple[int, ...]]:
            result = run(engine, [request((7, 8, 9), drawn(12, seed=seed), group_size=3)])
            return [result[name].tokens for name in sorted(result)]

        assert tokens(1) == tokens(1)
        assert tokens(1) != tokens(2)

    def test_the_likeliest_token_alone_is_the_greedy_one(self, engine: Engine) -> None:
        settings = greedy(8), drawn(8, top_k=1), drawn(8, top_p=1e-4)
        assert len({answer_to(engine, (5, 6, 7), params).tokens for params in settings}) == 1

    def test_answers_end_at_tokens_and_texts_and_not_too_early(self, engine: Engine) -> None:
        prompt = (9, 17, 4)
        free = answer_to(engine, prompt, greedy(16)).tokens
        assert len(free) > 6
        stop, text = free[3], decode(free[4:6])
        settings = {
            "token": greedy(16, stop_token_ids=(stop,)),
            "text": greedy(16, stop=("never", text)),
            "late": greedy(16, stop_token_ids=(stop,), min_new_tokens=10),
        }
        result = run(engine, [request(prompt, params, name) for name, params in settings.items()])
        by_token, by_text, late = (result[name, 0] for name in settings)
        assert by_token.tokens == free[: free.index(stop) + 1]
        assert decode(by_text.tokens) == decode(free)[: decode(free).index(text) + len(text)]
        assert by_token.finish_reason == by_text.finish_reason == "stop"
        assert len(by_text.logprobs) == len(by_text.versions) == len(by_text.tokens)
        assert len(late.tokens) >= 10
        assert not {stop, END} & set(late.tokens[:9])

    def test_what_belongs_to_a_request_comes_back_with_it(self, engine: Engine) -> None:
        results = run(engine, [request((5, 6), greedy(3), group_size=2, metadata={"row": 7})])
        assert [dict(result.metadata) for result in results.values()] == [{"row": 7}] * 2
        assert all(result.seconds >= 0 for result in results.values())

    def test_what_cannot_be_answered_is_refused(self, engine: Engine) -> None:
        for prompt, length, count, words in (
            *(((), 1, 1, "empty prompt"), ((5,), 1, 0, "asks for no answers")),
            ((5,) * 50, 60, 1, f"limit of {LONGEST}"),
        ):
            with pytest.raises(ValueError, match=words):
                engine.submit(request(prompt, greedy(length), group_size=count))
        assert engine.unfinished == 0

    def test_new_weights_answer_and_every_token_says_so(self, engine: Engine) -> None:
        if not self.loads_weights:
            pytest.skip("this engine takes no weights")
        new = contract_model(seed=1)
        answer_to(engine, (5, 6, 7), greedy(6))
        fingerprint = engine.load_weights(new.state_dict().items(), version=7)
        result = answer_to(engine, (5, 6, 7), greedy(10))
        assert result.tokens == plain_greedy(new, (5, 6, 7), 10)
        assert result.versions == (7,) * len(result.tokens)
        assert engine.stats().version == 7
        assert fingerprint == engine.load_weights(new.state_dict().items(), version=8)
        with pytest.raises(ValueError, match="nothing"):
            engine.load_weights([("nothing", torch.zeros(1))], 9)

    def test_frozen_answers_go_on_under_new_weights(self, engine: Engine) -> None:
        if not (self.loads_weights and self.keeps_partial):
            pytest.skip("this engine's answers cannot be frozen")
        engine.submit(request((5, 6, 7), greedy(12, min_new_tokens=12), group_size=2))
        for _ in range(4):
            engine.step()
        assert engine.pause("freeze") == []
        assert engine.step() == []
        engine.load_weights(contract_model(seed=1).state_dict().items(), version=7)
        engine.resume()
        results = list(engine.results())
        assert sorted(result.sample for result in results) == [0, 1]
        for item in results:
            assert len(item.tokens) == 12
            assert list(item.versions) == sorted(item.versions)
            assert set(item.versions) == {0, 7}

    def test_aborted_answers_come_back_once(self, engine: Engine) -> None:
        for item in requests_of([(5, 6)] * 3, greedy(40, min_new_tokens=40)):
            engine.submit(item)
        early = [*engine.step(), *engine.step()]
        results = engine.pause("abort")
        assert sorted(item.request_id for item in [*early, *results]) == ["0", "1", "2"]
        unfinished = [result for result in results if result.finish_reason == "aborted"]
        assert all(len(result.tokens) == len(result.logprobs) == len(result.versions) for result in results)
        if self.keeps_partial:
            assert len(unfinished) == 3
            assert all(0 < len(item.tokens) < 40 for item in unfinished)
        assert engine.unfinished == 0
        engine.resume()
        assert answer_to(engine, (5, 6), greedy(3)).tokens

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_answers_go_on_in_another_engine_where_they_were(self, engine: Engine, temperature: float) -> None:
        if not engine.continues:
            assert engine.unfinished_answers() == []
            return
        params = drawn(24, temperature=temperature, seed=3)
        requests = requests_of(prompts_of(5, seed=6, common=20), params, group_size=2)
        for item in requests:
            engine.submit(item)
        results = [answer for _ in range(4) for answer in engine.step()]
        kept = engine.unfinished_answers()
        assert engine.unfinished == len(kept)
        assert len(results) + len(kept) == 10
        assert {item.finish_reason for item in kept} == {"aborted"}
        # To be asked changes nothing.
        expected = {(result.request_id, result.sample): result for result in engine.results()}
        for entry in kept:
            begun = Begun(tokens=entry.tokens, logprobs=entry.logprobs, versions=tuple(-9 for _ in entry.tokens))
            asked = requests[int(entry.request_id)]
            engine.submit(replace(asked, group_size=1, sample_offset=entry.sample, begun=begun))
        under_way = {(item.request_id, item.sample): item.tokens for item in engine.unfinished_answers()}
        assert under_way == {(item.request_id, item.sample): item.tokens for item in kept}
        again = {(result.request_id, result.sample): result for result in engine.results()}
        assert set(again) == set(expected)
        for entry in kept:
            name, count = (entry.request_id, entry.sample), len(entry.tokens)
            answer = again[name]
            assert answer.tokens[:count] == entry.tokens
            assert answer.logprobs[:count] == pytest.approx(entry.logprobs, abs=self.tolerance)
            assert answer.versions[:count] == (-9,) * count
            assert -9 not in answer.versions[count:]
            assert len(answer.tokens) <= 24
            if not temperature or self.draws_go_on:
                assert answer.tokens == expected[name].tokens
                assert answer.logprobs == pytest.approx(expected[name].logprobs, abs=self.tolerance)
                assert answer.finish_reason == expected[name].finish_reason

    def test_draining_ends_what_runs(self, engine: Engine) -> None:
        engine.submit(request((5, 6), greedy(8)))
        early = engine.step()
        drained = engine.pause("drain")
        assert engine.stats().running == 0
        engine.resume()
        assert [item.request_id for item in [*early, *drained, *engine.results()]] == ["a"]

    def test_an_engine_that_slept_answers_as_before(self, engine: Engine, plain: Any) -> None:
        answer_to(engine, (5, 6, 7), greedy(6))
        for level in (1, 2) if self.loads_weights else (1,):
            engine.sleep(level)
            engine.wake()
            if level > 1:
                engine.load_weights(plain.state_dict().items(), version=3)
            assert answer_to(engine, (5, 6, 7), greedy(6)).tokens == plain_greedy(plain, (5, 6, 7), 6)

    def test_figures_count(self, engine: Engine) -> None:
        before = engine.stats()
        results = run(engine, [request((5, 6, 7), greedy(6), group_size=2)])
        after, count = engine.stats(), sum(len(result.tokens) for result in results.values())
        assert after.generated_tokens - before.generated_tokens == count
        assert after.prompt_tokens - before.prompt_tokens == 6
        assert (after.running, after.waiting, after.reserved_tokens) == (0, 0, 0)

    # The last one: it starts an engine of its own, and a process can have had one alone of some engines.
    def test_answers_wait_for_room(self) -> None:
        engine = self.make(stop_token_ids=(END,), max_sequence_tokens=LONGEST, max_running_tokens=60)
        try:
            for item in requests_of([(3, 4 + index) for index in range(10)], greedy(10)):
                engine.submit(item)
            most, result = 0, set[str]()
            while engine.unfinished:
                result |= {item.request_id for item in engine.step()}
                most = max(most, engine.stats().reserved_tokens)
            assert len(result) == 10
            assert 0 < most <= 60
            with pytest.raises(ValueError, match="max_running_tokens"):
                engine.submit(request((5,), greedy(70)))
        finally:
            engine.stop()
