"""Quotas, and bounds of what the service keeps; answers that are lost, requests that come twice, and idle clients."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.language import loopback_server
from recipes.language.loopback_server import MOST_CONNECTIONS, RequestError, listening
from recipes.serve.service import ledger as ledgers
from recipes.serve.service import sampling, service_state, training
from recipes.serve.service.requests_and_results import SAMPLE_RESULT
from recipes.serve.service.service_state import Quotas
from recipes.serve.service.state_file import REQUESTS, StateFile
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import (
    ROWS,
    Answer,
    Client,
    Served,
    config_of,
    model_fields,
    pass_body,
    sample_fields,
    shifted,
    step_fields,
)


def quotas(now: list[float], *overrides: str) -> Quotas:
    return Quotas(config_of(*overrides).server, lambda: now[0])


def test_quota_fills_up_within_a_minute() -> None:
    now = [0.0]
    made = quotas(now, "server.max_tokens_per_minute=60")
    made.take("ann", 40)
    with pytest.raises(RequestError, match="try again in 20 s") as refused:
        made.take("ann", 40)
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "20")
    # Another tenant has a quota of its own, and what was refused took nothing.
    made.take("ben", 60)
    now[0] = 20.0
    made.take("ann", 40)


def test_request_beyond_the_quota_waits_for_all_of_it() -> None:
    now = [0.0]
    made = quotas(now, "server.max_tokens_per_minute=60")
    made.take("ann", 90)
    with pytest.raises(RequestError, match="try again in 31 s"):
        made.take("ann", 1)
    now[0] = 31.0
    made.take("ann", 1)


def test_refused_tokens_take_no_request() -> None:
    now = [0.0]
    made = quotas(now, "server.max_tokens_per_minute=60", "server.max_requests_per_minute=2")
    made.take("ann", 60)
    for _ in range(3):
        with pytest.raises(RequestError, match="max_tokens_per_minute"):
            made.take("ann", 60)
    made.take("ann", 0)
    with pytest.raises(RequestError, match="quota of 2 is used up"):
        made.take("ann", 0)


async def test_requests_beyond_a_quota_are_asked_to_wait(start: Start) -> None:
    async with start("server.max_tokens_per_minute=24", "server.max_requests_per_minute=3") as service:
        ann = service.ann
        session = await ann.session()
        model, sampler = await ann.model(session), await ann.sampler(session)
        assert (await ann.send(pass_body(model, 1, shifted()))).status == 200
        late = await ann.refusal("asample", sample_fields(sampler, 0, [3], max_tokens=20), 429)
        assert "max_tokens_per_minute" in late
        steps = [await ann.post("optim_step", step_fields(model, seq)) for seq in (2, 3, 4)]
        assert [step.status for step in steps] == [200, 200, 429]
        # The same request again, as clients send it, is not counted again.
        assert (await ann.post("optim_step", step_fields(model, 3))).content == steps[1].content
        assert await service.ben.model()


async def test_saving_beyond_the_quota_fails(start: Start) -> None:
    async with start("server.max_stored_mib=1", "server.max_rank=128") as service:
        ann = service.ann
        model = await ann.model(rank=128)
        saves = [await ann.save(model, seq, path=f"n{seq}") for seq in range(1, 12)]
        assert saves[0]["path"].endswith("/n1")
        assert "max_stored_mib" in saves[-1]["error"]
        assert "path" in await service.ben.save(await service.ben.model(), 1, path="n1")


async def test_results_that_nobody_fetches_make_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_KEPT", 4)

    async with start("server.max_pending=100") as service:
        model = await service.ben.model()
        kept = await service.ben.post("optim_step", step_fields(model, 1))
        await service.ben.result(kept)
        sampler = await service.ann.sampler(await service.ann.session())
        sent = [await service.ann.post("asample", sample_fields(sampler, seq, [3])) for seq in range(40)]
        await service.ann.result(sent[-1])
        asked = [{"request_id": answer.content["request_id"]} for answer in sent]
        statuses = [(await service.ann.post("retrieve_future", fields)).status for fields in asked]
        # The oldest of who has the most went; a client is told so, and asks for a sample anew.
        assert set(statuses) == {200, 410}
        assert statuses[0] == 410
        assert statuses.count(200) <= 4 * 4 + 1
        assert "error" not in await service.ben.result(kept)


async def test_bytes_of_unfinished_requests_are_bounded(start: Start) -> None:
    async with start("server.max_pending=100", "server.max_pending_mib=1") as service:
        ann, data = service.ann, shifted() * 400
        model = await ann.model()
        # They wait for request 1, which does not come.
        answers = [await ann.send(pass_body(model, seq, data)) for seq in range(2, 8)]
        statuses = [answer.status for answer in answers]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert "max_pending_mib" in answers[-1].content["detail"]
        assert (await service.ben.post("create_model", model_fields(await service.ben.session()))).status == 200
        # The one that is awaited is taken all the same, and all others after it.
        assert (await ann.send(pass_body(model, 1, data))).status == 200
        for answer in answers[: statuses.index(429)]:
            await ann.result(answer)
        assert (await ann.send(pass_body(model, 1 + statuses.index(429) + 1, data))).status == 200


async def test_sessions_and_samplers_of_a_tenant_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_state, "_MOST_SESSIONS", 3)
    monkeypatch.setattr(sampling, "_MOST_SAMPLERS", 2)

    async with start() as service:
        sessions = [await service.ann.session() for _ in range(3)]
        fields = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        assert (await service.ann.post("create_session", fields)).status == 429
        assert await service.ben.session()
        await service.ann.post(f"sessions/{sessions[0]}/finish", {"reason": "done"})
        session = await service.ann.session()
        for number in range(2):
            assert await service.ann.sampler(session, number)
        extra = {"session_id": session, "sampling_session_seq_id": 2, "base_model": "rlinf/base"}
        await service.ann.refusal("create_sampling_session", extra)
        # One that is there is found again.
        assert await service.ann.sampler(session, 1)


async def test_unnamed_snapshots_are_few(start: Start, tmp_path: Path) -> None:
    async with start("server.max_snapshots=2") as service:
        ann = service.ann
        session = await ann.session()
        model = await ann.model(session)
        first, second = await ann.snapshot(model, 1, 1), await ann.snapshot(model, 2, 2)
        await ann.sample(first, 0, ROWS[0])
        third = await ann.snapshot(model, 3, 3)
        # The second was unused for the longest.
        assert "save under a name" in await ann.refusal("asample", sample_fields(second, 0, ROWS[0]), 404)
        assert len(list((tmp_path / "sessions" / session).glob("snapshot-*"))) == 2
    async with start("server.max_snapshots=2") as service:
        assert service.resumed == 1
        for sampler in (first, third):
            assert (await service.ann.sample(sampler, 7, ROWS[0])).sequences


async def test_passes_without_a_step_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_MOST_UNSTEPPED", 1000)

    async with start() as service:
        ann, model = service.ann, await service.ann.model()
        assert len(pass_body(model, 1, shifted())) < 1000 < 2 * len(pass_body(model, 1, shifted()))
        await ann.learn(model, 1, shifted())
        await ann.learn(model, 2, shifted())
        refused = await ann.learn(model, 3, shifted())
        assert "take a step first" in refused["error"]
        # A pass that fails also fails the step after it, and drops the gradients.
        assert "no step was taken" in (await ann.step(model, 4))["error"]
        assert (await ann.learn(model, 5, shifted())).outputs


async def test_results_have_few_numbers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_MOST_NUMBERS", 100)

    async with start() as service:
        sampler = await service.ann.sampler(await service.ann.session())
        fields = sample_fields(sampler, 0, [3], num_samples=4, max_tokens=10)
        assert "ask for fewer" in await service.ann.refusal("asample", {**fields, "topk_sample_logprobs": 3})
        assert (await service.ann.post("asample", {**fields, "topk_sample_logprobs": 2})).status == 200


async def test_requests_without_steps_stay_small(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_state, "_MOST_BODIES", 4000)
    monkeypatch.setattr(ledgers, "_KEPT", 2)
    monkeypatch.setattr(ledgers, "_FOR_NOW", 1)

    async with start() as service:
        ann, ledger = service.ann, service.state.ledger
        session = await ann.session()
        model, sampler = await ann.model(session), await ann.sampler(session)
        largest = 0
        for seq in range(1, 41):
            await ann.learn(model, seq, shifted(), forward_only=True)
            await ann.sample(sampler, seq, ROWS[0])
            # As the server does now and then.
            service.state.tidy(service.state.tenants.session("ann", session))
            await asyncio.sleep(0)
            largest = max(largest, ledger.file.body_bytes(model))
        kept = len(list(ledger.requests(session)))
        right = await ann.learn(model, 41, shifted(), forward_only=True)
        ledger.file.shrink()
    assert largest < 6000
    assert kept < 12
    StateFile(tmp_path / "fresh").close()
    assert (tmp_path / REQUESTS).stat().st_size < (tmp_path / "fresh" / REQUESTS).stat().st_size + 100_000
    async with start() as service:
        assert await service.ann.learn(model, 42, shifted(), forward_only=True) == right


@pytest.mark.security
async def test_answer_that_is_not_read_closes_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(32 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # waits until all is taken, or the client is gone
        ended.set()

    async with listening(large) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            assert len((await http.get("/")).content) == 32 << 20
        ended.clear()
        for name in ("BODY_SECONDS", "HEAD_SECONDS"):
            monkeypatch.setattr(loopback_server, name, 0.2)
        # It reads no more than the buffers of both sides hold.
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 60)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(32 << 20), 60)


STEPS = 4


class FaultyClient(Client):
    """Loses answers and sends requests twice, by seed; it sends again, as the SDK does, until it has an answer."""

    def __init__(self, http: httpx.AsyncClient, key: str, draw: random.Random) -> None:
        super().__init__(http, key)
        self._draw = draw

    async def post(self, path: str, fields: Any) -> Answer:
        return await self._faulty(lambda: super(FaultyClient, self).post(path, fields))

    async def send(self, body: bytes, **headers: str) -> Answer:
        return await self._faulty(lambda: super(FaultyClient, self).send(body, **headers))

    async def _faulty(self, send: Any) -> Answer:
        fault = self._draw.choice(["none", "lost", "doubled", "left"])
        if fault == "lost":
            await send()
        if fault == "left":
            leaving = asyncio.ensure_future(send())
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        if fault == "doubled":
            first, second = await asyncio.gather(send(), send())
            assert (first.status, second.status) == (200, 200)
            return second
        return await send()


async def losses_of(ann: Client, session: str) -> list[Any]:
    """Return what a client sees that trains for some steps, two requests at a time, and samples."""
    model, sampler = await ann.model(session), await ann.sampler(session)
    seen = list[Any]()
    for step in range(STEPS):
        learned = await ann.send(pass_body(model, 2 * step + 1, shifted()))
        stepped = await ann.post("optim_step", step_fields(model, 2 * step + 2))
        seen += [await ann.result(learned), await ann.result(stepped)]
    drawn = await ann.post("asample", sample_fields(sampler, 0, [3, 4], num_samples=2, seed=1, stop=[]))
    return [*seen, await ann.result(drawn)]


def faulty(service: Served, http: httpx.AsyncClient, seed: int) -> FaultyClient:
    return FaultyClient(http, service.ann._headers["X-API-Key"], random.Random(seed))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 30))])
async def test_lost_answers_and_doubled_requests_change_nothing(start: Start, seed: int) -> None:
    async with start("server.max_pending=20") as service:
        right = await losses_of(service.ann, await service.ann.session())
        assert len(service.steps) == STEPS
        client = faulty(service, service.http, seed)
        assert await losses_of(client, await service.ann.session()) == right
        assert len(service.steps) == 2 * STEPS


class PatientClient(Client):
    """Sends a request again after a moment where it was asked to wait, as the SDK does."""

    waited = 0

    async def post(self, path: str, fields: Any) -> Answer:
        return await self._patient(lambda: super(PatientClient, self).post(path, fields))

    async def send(self, body: bytes, **headers: str) -> Answer:
        return await self._patient(lambda: super(PatientClient, self).send(body, **headers))

    async def _patient(self, send: Any) -> Answer:
        while (answer := await send()).status == 429:
            assert answer.content["detail"].endswith("try again")
            self.waited += 1
            await asyncio.sleep(0.01)
        return answer


async def all_at_once(ann: Client) -> list[Any]:
    """Return what a client sees that sends twenty requests to train and to sample without waiting for results."""
    session = await ann.session()
    model, sampler = await ann.model(session), await ann.sampler(session)
    sent = await asyncio.gather(
        *(ann.send(pass_body(model, seq, shifted())) for seq in range(1, 11)),
        *(ann.post("asample", sample_fields(sampler, seq, [3, 4], seed=seq)) for seq in range(10)),
    )
    results = [await ann.result(answer) for answer in sent]
    # Answers that are drawn together may differ in the last bit of their log-probabilities.
    drawn = [SAMPLE_RESULT.FromString(result).sequences[0].tokens for result in results[10:]]
    return [*results[:10], *drawn]


async def test_clients_that_are_asked_to_wait_get_all_results(start: Start) -> None:
    async with start("server.max_pending=40") as service:
        right = await all_at_once(service.ann)
    async with start("server.max_pending=2") as service:
        patient = PatientClient(service.http, service.ann._headers["X-API-Key"])
        assert await all_at_once(patient) == right
        assert patient.waited > 0


@pytest.mark.security
async def test_idle_connections_keep_nobody_out(start: Start) -> None:
    idle = list[asyncio.StreamWriter]()
    async with start() as service, listening(service.application) as port:
        for _ in range(MOST_CONNECTIONS + 100):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            idle.append(writer)
        # Half of a request, of which the rest never comes.
        for writer in idle[::2]:
            writer.write(b"POST /api/v1/asample HTTP/1.1\r\nContent-Length: 100000\r\n")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            seen = await losses_of(faulty(service, http, 3), await service.ann.session())
        assert len(seen) == 2 * STEPS + 1
        assert len(service.steps) == STEPS
        for writer in idle:
            writer.close()


@pytest.mark.security
async def test_connections_of_a_tenant_keep_no_other_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_server, "MOST_CONNECTIONS", 4)

    async with start() as service, listening(service.application) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url) as many, httpx.AsyncClient(base_url=url) as one:
            ann, ben = (
                Client(http, client._headers["X-API-Key"]) for http, client in ((many, service.ann), (one, service.ben))
            )
            assert await ben.session()
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
            sampler = await ann.sampler(await ann.session())
            held = [
                asyncio.create_task(ann.sample(sampler, number, [3], stop=[], max_tokens=50)) for number in range(6)
            ]
            assert await ben.session()
            # Connections of its own that are closed for each other are a matter of this tenant.
            await asyncio.gather(*held, return_exceptions=True)
            assert await ben.session()
            for _, writer in strangers:
                writer.close()
