"""What the service keeps in memory and on disk is bounded, whatever clients leave behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.language.listening import limits
from recipes.language.listening.listener import listening
from recipes.serve.service import ledger as ledgers
from recipes.serve.service import sampling, service_state, training
from recipes.serve.service.state_file import REQUESTS, StateFile
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import (
    ROWS,
    Client,
    model_fields,
    pass_body,
    sample_fields,
    shifted,
    step_fields,
)


async def snapshot(ann: Client, model: str, seq: int) -> str:
    fields = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
    return (await ann.result(await ann.post("save_weights_for_sampler", fields)))["sampling_session_id"]


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
        refused = await service.ann.post("create_sampling_session", extra)
        assert refused.status == 422
        # One that is there is found again.
        assert await service.ann.sampler(session, 1)


def test_unnamed_snapshots_are_few(start: Start, tmp_path: Path) -> None:
    async def work() -> list[str]:
        async with start("server.max_snapshots=2") as service:
            ann = service.ann
            session = await ann.session()
            model = await ann.model(session)
            first, second = await snapshot(ann, model, 1), await snapshot(ann, model, 2)
            await ann.sample(first, 0, ROWS[0])
            third = await snapshot(ann, model, 3)
            # The second was unused for the longest.
            lost = await ann.post("asample", sample_fields(second, 0, ROWS[0]))
            assert lost.status == 404
            assert "save under a name" in lost.content["detail"]
            assert len(list((tmp_path / "sessions" / session).glob("snapshot-*"))) == 2
            return [first, third]

    async def later(samplers: list[str]) -> None:
        async with start("server.max_snapshots=2") as service:
            assert service.resumed == 1
            for sampler in samplers:
                assert (await service.ann.sample(sampler, 7, ROWS[0])).sequences

    asyncio.run(later(asyncio.run(work())))


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
        refused = await service.ann.post("asample", {**fields, "topk_sample_logprobs": 3})
        assert refused.status == 422
        assert "ask for fewer" in refused.content["detail"]
        assert (await service.ann.post("asample", {**fields, "topk_sample_logprobs": 2})).status == 200


def test_requests_without_steps_stay_small(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_state, "_MOST_BODIES", 4000)
    monkeypatch.setattr(ledgers, "_KEPT", 2)
    monkeypatch.setattr(ledgers, "_FOR_NOW", 1)

    async def work() -> Any:
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
            return largest, kept, model, right

    async def later(model: str, right: Any) -> None:
        async with start() as service:
            assert await service.ann.learn(model, 42, shifted(), forward_only=True) == right

    largest, kept, model, right = asyncio.run(work())
    assert largest < 6000
    assert kept < 12
    StateFile(tmp_path / "fresh").close()
    assert (tmp_path / REQUESTS).stat().st_size < (tmp_path / "fresh" / REQUESTS).stat().st_size + 100_000
    asyncio.run(later(model, right))


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
            monkeypatch.setattr(limits, name, 0.2)
        # It reads no more than the buffers of both sides hold.
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 60)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(32 << 20), 60)
