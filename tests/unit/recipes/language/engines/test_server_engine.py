"""The engine that asks a server: the contract of engines, what is wrong with a server, and what is asked again."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from recipes.language.answers.sequences import Sequence
from recipes.language.config.rollout_config import ServerSettings
from recipes.language.engines import server_answers
from recipes.language.engines.engine import Engine
from recipes.language.engines.server_answers import JsonServer, ServerError
from recipes.language.engines.server_engine import ServerEngine
from rlinf_core.errors import ConfigError, RLinfError
from tests.mistakes import mutated
from tests.unit.recipes.language.engines.contract import (
    END,
    LONGEST,
    VOCABULARY,
    EngineContract,
    answer_to,
    contract_model,
    decode,
    drawn,
    greedy,
    request,
    run,
)
from tests.unit.recipes.language.engines.fake_server import FakeServer, fake_server

EngineOf = Callable[..., ServerEngine]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    contract_model().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def made(server: FakeServer, folder: str) -> Iterator[EngineOf]:
    """Makes engines of the server by settings."""
    engines: list[ServerEngine] = []

    def make(**fields: Any) -> ServerEngine:
        inputs = ServerSettings.model_validate({"url": server.url, "timeout": 30, "retries": 0, **fields})
        options: Any = {"stop_token_ids": (END,), "decode": decode, "max_sequence_tokens": LONGEST}
        engines.append(ServerEngine(inputs, folder, **options))
        return engines[-1]

    yield make
    server.hold.set()
    for engine in engines:
        engine.stop()


@pytest.fixture
def engine(made: EngineOf) -> ServerEngine:
    return made()


class TestServerEngine(EngineContract):
    keeps_partial = False

    @pytest.fixture(autouse=True)
    def its_server(self, server: FakeServer, folder: str, tmp_path: Any) -> None:
        self._settings = ServerSettings(url=server.url, timeout=30, retries=0, weights_dir=str(tmp_path))
        self._folder = folder

    def make(self, **options: Any) -> Engine:
        return ServerEngine(self._settings, self._folder, **options)


def ask(engine: Engine) -> Sequence:
    return answer_to(engine, (9, 17, 4), greedy(6))


def changed(**new: Any) -> Any:
    """Return a change of the first answer of a server; None removes what it names."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        choice |= {name: value(choice) if callable(value) else value for name, value in new.items()}
        answer["choices"][0] = {name: value for name, value in choice.items() if value is not None}
        return answer

    return change


def first(tokens: int) -> Any:
    return lambda choice: choice["token_ids"][:tokens]


def logprobs(*values: Any) -> dict[str, Any]:
    return {"token_logprobs": [*values]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(token_ids=first(2)), "2 tokens have 6 log-probabilities"),
        (changed(token_ids=first(2), logprobs=logprobs(-1.0, -1.0)), "after 2 tokens; at least 6 were requested"),
        *((changed(token_ids=[token]), "not a list of integers") for token in ("a", -1)),
        *((changed(logprobs=logprobs(*[value] * 6)), "missing, above 0") for value in (None, float("nan"), False)),
        *((changed(logprobs=value), "no log-probabilities") for value in (None, [-1.0])),
        (changed(finish_reason="content_filter"), "content_filter"),
        (changed(finish_reason=["stop"]), "finish reason"),
        (changed(token_ids=lambda choice: [*choice["token_ids"][:5], 10**9]), "the model's tokens are 0 to"),
        (changed(index="0"), "`index` is not an integer"),
        (changed(prompt_token_ids=[1, 9, 17, 4]), "a different prompt"),
        (changed(prompt_token_ids=7), "it reports no tokens"),
        *(
            (changed(token_ids=None, logprobs={"tokens": tokens}), "returns texts without token ids")
            for tokens in (["token_id:x"], 3, ["a", "b"])
        ),
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
        *(changed(logprobs=logprobs(*[value] * 6)) for value in (float("nan"), float("-inf"), 3.0)),
        changed(finish_reason="content_filter"),
    ],
)
def test_an_unlearnable_answer_fails_without_those_beside_it(server: FakeServer, engine: Engine, change: Any) -> None:
    server.change = change
    answers = run(engine, [request((9, 17, 4), drawn(6), group_size=3)])
    assert [answers["a", sample].failed for sample in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *((changed(finish_reason=reason), f"for the reason {reason!r}") for reason in ("abort", "error")),
        (changed(finish_reason=None), "its finish reason is None"),
        (changed(logprobs={"token_logprobs": [None] * 6}), "log-probability is missing"),
        (lambda answer: {**answer, "choices": []}, "returned 0 answers; 1 were requested"),
    ],
)
def test_an_answer_that_a_working_server_gives_up_is_none(
    server: FakeServer, engine: ServerEngine, change: Any, why: str
) -> None:
    assert not ask(engine).failed
    server.change = change
    answer = ask(engine)
    assert answer.finish_reason == "aborted"
    assert why in answer.failure


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        *(((status, {"error": "overloaded"}), f"status {status}") for status in (500, 503, 504, 429)),
        ((200, b'{"choices": ['), "not JSON"),
    ],
)
def test_a_request_that_a_working_server_fails_is_no_answer(
    server: FakeServer, engine: ServerEngine, fault: Any, why: str
) -> None:
    assert not ask(engine).failed
    server.faults = [fault]
    answer = ask(engine)
    assert (answer.finish_reason, answer.tokens) == ("aborted", ())
    assert why in answer.failure
    assert not ask(engine).failed


def test_an_answer_that_breaks_off_or_is_late_is_none(server: FakeServer, made: EngineOf) -> None:
    engine = made()
    ask(engine)
    server.cut = [9]
    assert "cannot be reached" in ask(engine).failure
    engine._server._timeout = 0.05
    server.hold.clear()
    assert "did not respond within 0.05 s" in ask(engine).failure


def test_a_server_that_fails_on_and_on_ends_the_run(server: FakeServer, made: EngineOf) -> None:
    engine = made(max_concurrent=2)
    ask(engine)
    server.faults = [(503, None)] * 5
    assert [ask(engine).failed for _ in range(4)] == [True] * 4
    with pytest.raises(RLinfError, match="status 503"):
        ask(engine)


def test_what_a_setting_mends_ends_the_run(server: FakeServer, engine: ServerEngine) -> None:
    ask(engine)
    server.change = changed(token_ids=None, logprobs={"tokens": ["a"]})
    with pytest.raises(RLinfError, match="returns texts without token ids"):
        ask(engine)


@pytest.mark.parametrize(("seed", "replies"), [(0, 40), pytest.param(1, 1000, marks=pytest.mark.nightly)])
def test_replies_with_mistakes_are_answers_or_errors(
    server: FakeServer, made: EngineOf, seed: int, replies: int
) -> None:
    draw, refused = random.Random(seed), 0
    server.change = lambda answer: mutated(draw, answer)
    for _ in range(replies):
        engine = made()
        try:
            assert all(0 <= token < VOCABULARY for token in ask(engine).tokens)
        except RLinfError:
            refused += 1
        engine.stop()
    assert 0 < refused < replies


@pytest.mark.parametrize("models", [None, [], 7, {"data": 3}, {"data": [[]]}, {"data": [{"id": ["tiny"]}]}])
def test_strange_lists_of_models_are_refused(server: FakeServer, made: EngineOf, models: Any) -> None:
    server.models = models
    with pytest.raises(ConfigError, match="the server serves"):
        made(model="tiny")


@pytest.mark.parametrize("limit", [-5, 0, True, "96", 10**30])
def test_strange_limits_of_a_server_are_passed_over(server: FakeServer, made: EngineOf, limit: Any) -> None:
    server.models = {"data": [{"id": "tiny", "max_model_len": limit}]}
    assert len(ask(made()).tokens) == 6


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


def test_a_request_leaves_nothing_out(server: FakeServer, engine: Engine) -> None:
    ask(engine)
    wanted: dict[str, Any] = {"min_tokens": 0, "stop": [], "ignore_eos": False, "bad_words": [], "top_k": -1}
    wanted |= {"allowed_token_ids": None, "truncate_prompt_tokens": None}
    _, body = server.seen[-1]
    assert {name: body[name] for name in wanted} == wanted


def test_tokens_may_come_as_texts_of_their_numbers(server: FakeServer, engine: Engine) -> None:
    by_numbers = ask(engine)
    server.change = changed(token_ids=None, prompt_token_ids=None)
    by_texts = ask(engine)
    assert len(by_texts.tokens) == 6
    assert by_texts.tokens == by_numbers.tokens
    assert by_texts.logprobs == by_numbers.logprobs


def test_what_passes_is_tried_again_and_no_answer_comes_twice(server: FakeServer, made: EngineOf) -> None:
    engine = made(retries=3)
    server.faults = [(503, {"error": "starting"}), (429, None)]
    ask(engine)
    assert [path for path, _ in server.seen].count("/v1/completions") == 3
    server.faults = [(400, {"error": {"message": "no such field"}})]
    with pytest.raises(RLinfError, match="status 400") as raised:
        ask(engine)
    assert "no such field" in str(raised.value)
    assert [path for path, _ in server.seen].count("/v1/completions") == 4


def test_the_token_is_sent_and_never_shown(server: FakeServer, made: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "open-sesame"
    monkeypatch.setenv("SERVER_TOKEN", "open-sesame")
    engine = made(token_env="SERVER_TOKEN")
    ask(engine)
    server.faults = [(400, {"error": "what is open-sesame?"})]
    with pytest.raises(RLinfError) as raised:
        ask(engine)
    assert "***" in str(raised.value)
    assert "open-sesame" not in str(raised.value)
    monkeypatch.setenv("SERVER_TOKEN", "wrong")
    with pytest.raises(RLinfError, match="rejects the token") as refused:
        made(token_env="SERVER_TOKEN")
    assert "SERVER_TOKEN" in str(refused.value)
    monkeypatch.delenv("SERVER_TOKEN")
    with pytest.raises(ConfigError, match="not set"):
        made(token_env="SERVER_TOKEN")
    with pytest.raises(RLinfError, match="none was sent"):
        made()


def test_silent_server_is_waited_for_no_longer_than_configured(server: FakeServer, made: EngineOf) -> None:
    engine = made(timeout=0.3, retries=5)
    server.hold.clear()
    with pytest.raises(RLinfError, match=r"within 0\.3 s"):
        ask(engine)
    with pytest.raises(RLinfError, match="cannot be reached, after 2 attempts"):
        made(url="http://127.0.0.1:9", timeout=5, retries=1)


def test_aborting_does_not_wait_for_the_server(server: FakeServer, engine: Engine) -> None:
    server.hold.clear()
    engine.submit(request((5, 6), drawn(30), group_size=3))
    engine.step()
    assert [result.finish_reason for result in engine.pause("abort")] == ["aborted"] * 3
    assert engine.unfinished == 0


@pytest.fixture
def client(server: FakeServer) -> Iterator[JsonServer]:
    client = JsonServer(server.url, timeout=30, retries=0, most=1)
    yield client
    client.close()


def test_a_cancelled_request_is_told_to_the_server(server: FakeServer, client: JsonServer) -> None:
    server.hold.clear()
    future = client.submit("/v1/completions", {})
    assert future.cancel()
    server.hold.set()
    assert client.get("/v1/models")["data"]
    with pytest.raises(CancelledError):
        future.result()


def test_requests_beyond_the_limit_wait(server: FakeServer, client: JsonServer) -> None:
    server.hold.clear()
    first, second = (client.submit(path, {}) for path in ("/v1/completions", "/v1/other"))
    server.faults = [(200, 1)]
    assert not second.done()
    server.hold.set()
    assert (first.result(), second.result()) == (1, None)
    assert [path for path, _ in server.seen] == ["/v1/completions", "/v1/other"]


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
    server: FakeServer, client: JsonServer, monkeypatch: pytest.MonkeyPatch, encoding: str, content: bytes, words: str
) -> None:
    monkeypatch.setattr(server_answers, "_MOST_BYTES", 16 << 20)
    server.encoding, server.models = encoding, content
    with pytest.raises(ServerError, match=words):
        client.get("/v1/models")


def test_an_answer_that_breaks_off_is_asked_for_again(server: FakeServer, made: EngineOf) -> None:
    engine = made(retries=1)
    whole, asked = ask(engine), len(server.seen)
    server.cut = [5]
    assert ask(engine).tokens == whole.tokens
    assert len(server.seen) == asked + 2


def test_what_a_server_cannot_do_is_said(server: FakeServer, engine: Engine, made: EngineOf) -> None:
    with pytest.raises(ValueError, match="takes no weights"):
        engine.load_weights(contract_model().state_dict().items(), 1)
    with pytest.raises(ValueError, match="temperature other than 1"):
        engine.submit(request((5,), drawn(1, temperature=0.5)))
    server.hold.clear()
    engine.submit(request((5, 6), greedy(4)))
    engine.step()
    with pytest.raises(ValueError, match="cannot be frozen"):
        engine.pause("freeze")
    server.hold.set()
    with pytest.raises(ConfigError, match="serves `tiny`"):
        made(model="large")
