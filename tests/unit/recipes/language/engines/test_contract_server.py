"""The engine that asks a server keeps the contract, and says clearly what is wrong with a server."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.language.answers.sequences import Request, SamplingParams, Sequence
from recipes.language.config.rollout_config import ServerSettings
from recipes.language.engines import http_json
from recipes.language.engines.engine import Engine
from recipes.language.engines.http_json import JsonServer, ServerError
from recipes.language.engines.server_engine import ServerEngine
from rlinf_core.errors import ConfigError, RLinfError
from tests.mistakes import mutated
from tests.unit.recipes.language.engines.contract import (
    END,
    LONGEST,
    VOCABULARY,
    EngineContract,
    contract_model,
    decode,
    greedy,
    run,
)
from tests.unit.recipes.language.engines.fake_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    contract_model().save_pretrained(folder)
    return str(folder)


def settings(server: FakeServer, **fields: Any) -> ServerSettings:
    return ServerSettings.model_validate({"url": server.url, "timeout": 30, "retries": 0, **fields})


class TestServerEngine(EngineContract):
    keeps_partial = False

    @pytest.fixture(autouse=True)
    def its_server(self, server: FakeServer, folder: str, tmp_path: Any) -> None:
        self._server, self._folder, self._weights = server, folder, str(tmp_path)

    def make(self, **options: Any) -> Engine:
        inputs = settings(self._server, weights_dir=self._weights)
        return ServerEngine(inputs, self._folder, **options)


@pytest.fixture
def engine(server: FakeServer, folder: str) -> Iterator[ServerEngine]:
    engine = ServerEngine(settings(server), folder, stop_token_ids=(END,), decode=decode, max_sequence_tokens=LONGEST)
    yield engine
    engine.stop()


def ask(engine: Engine, length: int = 6) -> Sequence:
    (answer,) = run(engine, [Request(request_id="a", prompt=(9, 17, 4), params=greedy(length))]).values()
    return answer


def changed(**new: Any) -> Any:
    """Return a change of the first answer of a server; None removes what it names."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        choice |= {name: value(choice) if callable(value) else value for name, value in new.items()}
        answer["choices"][0] = {name: value for name, value in choice.items() if value is not None}
        return answer

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(token_ids=lambda choice: choice["token_ids"][:2]), "2 tokens have 6 log-probabilities"),
        (
            changed(
                token_ids=lambda choice: choice["token_ids"][:2],
                logprobs={"token_logprobs": [-1.0, -1.0]},
            ),
            r"after 2 tokens; at least 6 were requested",
        ),
        (changed(token_ids=["a"]), "not a list of integers"),
        (changed(token_ids=[-1]), "not a list of integers"),
        (changed(logprobs={"token_logprobs": [None] * 6}), "missing, above 0"),
        (changed(logprobs={"token_logprobs": [float("nan")] * 6}), "missing, above 0"),
        (changed(logprobs=None), "no log-probabilities"),
        (changed(finish_reason="content_filter"), "content_filter"),
        (changed(finish_reason=["stop"]), "finish reason"),
        (changed(token_ids=lambda choice: [*choice["token_ids"][:5], 10**9]), "the model's tokens are 0 to"),
        (changed(logprobs={"token_logprobs": [False] * 6}), "missing, above 0"),
        (changed(logprobs=[-1.0]), "no log-probabilities"),
        (changed(index="0"), "`index` is not an integer"),
        (changed(prompt_token_ids=[1, 9, 17, 4]), "a different prompt"),
        (changed(prompt_token_ids=7), "it reports no tokens"),
        (changed(token_ids=None, logprobs={"tokens": ["token_id:x"]}), "returns texts without token ids"),
        (changed(token_ids=None, logprobs={"tokens": 3}), "returns texts without token ids"),
        (changed(token_ids=None, logprobs={"tokens": ["a", "b"]}), "returns texts without token ids"),
        (lambda answer: {**answer, "choices": []}, "returned 0 answers; 1 were requested"),
        (lambda _: {"object": "error"}, "no answers"),
        (lambda _: b"<html>", "not JSON"),
    ],
)
def test_unlearnable_answer_is_one_clear_error(server: FakeServer, engine: Engine, change: Any, words: str) -> None:
    server.change = change
    with pytest.raises(RLinfError, match=words):
        ask(engine)


@pytest.mark.parametrize(
    "change",
    [
        changed(logprobs={"token_logprobs": [float("nan")] * 6}),
        changed(logprobs={"token_logprobs": [float("-inf")] * 6}),
        changed(logprobs={"token_logprobs": [3.0] * 6}),
        changed(finish_reason="content_filter"),
    ],
)
def test_an_unlearnable_answer_fails_without_those_beside_it(server: FakeServer, engine: Engine, change: Any) -> None:
    server.change = change
    params = SamplingParams(max_new_tokens=6)
    answers = run(engine, [Request(request_id="a", prompt=(9, 17, 4), params=params, group_size=3)])
    assert [answers["a", sample].failed for sample in range(3)] == [True, False, False]


@pytest.mark.parametrize(("seed", "replies"), [(0, 40), pytest.param(1, 1000, marks=pytest.mark.nightly)])
def test_replies_with_mistakes_are_answers_or_errors(server: FakeServer, folder: str, seed: int, replies: int) -> None:
    draw, refused = random.Random(seed), 0
    server.change = lambda answer: mutated(draw, answer)
    for _ in range(replies):
        engine = ServerEngine(settings(server), folder, stop_token_ids=(END,), max_sequence_tokens=LONGEST)
        try:
            answer = ask(engine)
            assert all(0 <= token < VOCABULARY for token in answer.tokens)
        except RLinfError:
            refused += 1
        engine.stop()
    assert 0 < refused < replies


@pytest.mark.parametrize("models", [None, [], 7, {"data": 3}, {"data": [[]]}, {"data": [{"id": ["tiny"]}]}])
def test_strange_lists_of_models_are_refused(server: FakeServer, folder: str, models: Any) -> None:
    server.models = models
    with pytest.raises(ConfigError, match="the server serves"):
        ServerEngine(settings(server, model="tiny"), folder)


@pytest.mark.parametrize("limit", [-5, 0, True, "96", 10**30])
def test_strange_limits_of_a_server_are_passed_over(server: FakeServer, folder: str, limit: Any) -> None:
    server.models = {"data": [{"id": "tiny", "max_model_len": limit}]}
    engine = ServerEngine(settings(server), folder, stop_token_ids=(END,), max_sequence_tokens=LONGEST)
    assert len(ask(engine).tokens) == 6
    engine.stop()


@pytest.mark.parametrize(
    "default",
    [
        {"repetition_penalty": 1.3},
        {"min_p": 0.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {"5": -100}},
    ],
)
def test_defaults_of_a_server_never_draw(server: FakeServer, engine: Engine, default: dict[str, Any]) -> None:
    server.defaults = default
    assert not ask(engine).failed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 0),
        ("stop", []),
        ("ignore_eos", False),
        ("bad_words", []),
        ("allowed_token_ids", None),
        ("truncate_prompt_tokens", None),
        ("top_k", -1),
    ],
)
def test_a_request_leaves_nothing_out(server: FakeServer, engine: Engine, name: str, value: Any) -> None:
    ask(engine)
    _, body = server.seen[-1]
    assert body[name] == value


def test_tokens_may_come_as_texts_of_their_numbers(server: FakeServer, engine: Engine) -> None:
    by_numbers = ask(engine)
    server.change = changed(token_ids=None, prompt_token_ids=None)
    by_texts = ask(engine)
    assert len(by_texts.tokens) == 6
    assert by_texts.tokens == by_numbers.tokens
    assert by_texts.logprobs == by_numbers.logprobs


def test_what_passes_is_tried_again_and_no_answer_comes_twice(server: FakeServer, folder: str) -> None:
    engine = ServerEngine(settings(server, retries=3), folder, stop_token_ids=(END,))
    server.faults = [(503, {"error": "starting"}), (429, None)]
    ask(engine)
    assert [path for path, _ in server.seen].count("/v1/completions") == 3

    server.faults = [(400, {"error": {"message": "no such field"}})]
    with pytest.raises(RLinfError, match="status 400") as raised:
        ask(engine)
    assert "no such field" in str(raised.value)
    assert [path for path, _ in server.seen].count("/v1/completions") == 4
    engine.stop()


def test_the_token_is_sent_and_never_shown(server: FakeServer, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "open-sesame"
    monkeypatch.setenv("SERVER_TOKEN", "open-sesame")
    engine = ServerEngine(settings(server, token_env="SERVER_TOKEN"), folder, stop_token_ids=(END,))
    ask(engine)
    server.faults = [(400, {"error": "what is open-sesame?"})]
    with pytest.raises(RLinfError) as raised:
        ask(engine)
    assert "***" in str(raised.value)
    assert "open-sesame" not in str(raised.value)
    engine.stop()

    monkeypatch.setenv("SERVER_TOKEN", "wrong")
    with pytest.raises(RLinfError, match="rejects the token") as refused:
        ServerEngine(settings(server, token_env="SERVER_TOKEN"), folder)
    assert "SERVER_TOKEN" in str(refused.value)
    monkeypatch.delenv("SERVER_TOKEN")
    with pytest.raises(ConfigError, match="not set"):
        ServerEngine(settings(server, token_env="SERVER_TOKEN"), folder)
    with pytest.raises(RLinfError, match="none was sent"):
        ServerEngine(settings(server), folder)


def test_silent_server_is_waited_for_no_longer_than_configured(server: FakeServer, folder: str) -> None:
    engine = ServerEngine(settings(server, timeout=0.3, retries=5), folder, stop_token_ids=(END,))
    server.hold.clear()
    with pytest.raises(RLinfError, match=r"within 0\.3 s"):
        ask(engine)
    server.hold.set()
    engine.stop()
    nobody = ServerSettings.model_validate({"url": "http://127.0.0.1:9", "timeout": 5, "retries": 1})
    with pytest.raises(RLinfError, match="cannot be reached, after 2 attempts"):
        ServerEngine(nobody, folder)


def test_aborting_does_not_wait_for_the_server(server: FakeServer, engine: Engine) -> None:
    server.hold.clear()
    params = SamplingParams(max_new_tokens=30)
    engine.submit(Request(request_id="a", prompt=(5, 6), params=params, group_size=3))
    engine.step()
    results = engine.pause("abort")
    assert [result.finish_reason for result in results] == ["aborted"] * 3
    assert engine.unfinished == 0


def test_a_cancelled_request_is_told_to_the_server(server: FakeServer) -> None:
    client = JsonServer(server.url, timeout=30, retries=0)
    server.hold.clear()
    future = client.submit("/v1/completions", {})
    assert future.cancel()
    server.hold.set()
    assert client.get("/v1/models")["data"]
    client.close()
    with pytest.raises(CancelledError):
        future.result()


def test_requests_beyond_the_limit_wait(server: FakeServer) -> None:
    client = JsonServer(server.url, timeout=30, retries=0, most=1)
    server.hold.clear()
    first, second = (client.submit(path, {}) for path in ("/v1/completions", "/v1/other"))
    server.faults = [(200, 1)]
    assert not second.done()
    server.hold.set()
    assert (first.result(), second.result()) == (1, None)
    assert [path for path, _ in server.seen] == ["/v1/completions", "/v1/other"]
    client.close()


@pytest.mark.parametrize("answer", [(302, {}), (200, b"[" * 100_000)])
def test_redirects_and_deep_answers_are_errors(server: FakeServer, engine: Engine, answer: Any) -> None:
    server.faults = [answer]
    with pytest.raises(RLinfError, match=r"status 302|not JSON"):
        ask(engine)


@pytest.mark.security
@pytest.mark.parametrize(
    ("encoding", "content", "words"),
    [
        ("gzip", gzip.compress(gzip.compress(b"{}" * 1000)), "compressed"),
        ("gzip, gzip", b"", "compressed"),
        ("", b"[" + b"[]," * 3_000_000 + b"0]", "claims"),
    ],
    ids=["gzip", "gzip twice", "many lists"],
)
def test_an_answer_takes_no_more_than_its_bytes(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, encoding: str, content: bytes, words: str
) -> None:
    monkeypatch.setattr(http_json, "_MOST_BYTES", 16 << 20)
    server.encoding, server.models = encoding, content
    client = JsonServer(server.url, timeout=30, retries=0)
    try:
        with pytest.raises(ServerError, match=words):
            client.get("/v1/models")
    finally:
        client.close()


def test_an_answer_that_breaks_off_is_asked_for_again(server: FakeServer, folder: str) -> None:
    engine = ServerEngine(settings(server, retries=1), folder, stop_token_ids=(END,))
    whole, asked = ask(engine), len(server.seen)
    server.cut = [5]
    assert ask(engine).tokens == whole.tokens
    assert len(server.seen) == asked + 2
    engine.stop()


def test_what_a_server_cannot_do_is_said(server: FakeServer, engine: Engine, folder: str) -> None:
    with pytest.raises(ValueError, match="takes no weights"):
        engine.load_weights(contract_model().state_dict().items(), 1)
    with pytest.raises(ValueError, match="temperature other than 1"):
        engine.submit(Request(request_id="a", prompt=(5,), params=SamplingParams(temperature=0.5)))
    server.hold.clear()
    engine.submit(Request(request_id="a", prompt=(5, 6), params=greedy(4)))
    engine.step()
    with pytest.raises(ValueError, match="cannot be frozen"):
        engine.pause("freeze")
    server.hold.set()
    with pytest.raises(ConfigError, match="serves `tiny`"):
        ServerEngine(settings(server, model="large"), folder)
