"""Answers that are lost, requests that come twice, and hundreds of clients that say nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from recipes.language.listening import limits
from recipes.language.listening.limits import MOST_CONNECTIONS
from recipes.language.listening.listener import listening
from recipes.serve.wire.requests_and_results import SAMPLE_RESULT
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import Answer, Client, Served, pass_body, sample_fields, shifted, step_fields

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
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 4)

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
