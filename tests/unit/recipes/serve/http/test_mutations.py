"""Requests with mistakes by seed: none ends in a server's error, and none changes what another tenant computes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from recipes.serve.http import routes
from tests.mistakes import HOSTILE, garbled, mutated
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import (
    ROWS,
    Answer,
    Client,
    Served,
    _answer,
    model_fields,
    pass_body,
    sample_fields,
    shifted,
    step_fields,
)

pytestmark = pytest.mark.security


def requests_of(session: str, model: str, sampler: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a right request to each route that takes an object."""
    numbered = {"model_id": model, "seq_id": 1}
    return [
        ("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}),
        ("session_heartbeat", {"session_id": session}),
        ("create_model", model_fields(session, 1)),
        ("optim_step", step_fields(model, 1)),
        ("save_weights", {**numbered, "path": "a", "ttl_seconds": 60}),
        ("save_weights_for_sampler", {**numbered, "path": "b"}),
        ("load_weights", {**numbered, "path": f"tinker://{model}/weights/a", "optimizer": False}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "base_model": "rlinf/base"}),
        ("asample", sample_fields(sampler, 0, [3, 4], temperature=1.0, top_p=1.0, seed=1, stop=["a"])),
        ("get_info", {"model_id": model}),
        ("weights_info", {"tinker_path": f"tinker://{model}/weights/a"}),
        ("retrieve_future", {"request_id": "b007-1"}),
        ("cancel_future", {"request_id": "b007-1"}),
        ("client/config", {"sdk_version": "0.38.0"}),
        ("telemetry", {"events": []}),
    ]


async def send_mistake(draw: random.Random, client: Client) -> Answer:
    """Send one request with mistakes from a session of its own; return its answer, or its result where it has one."""
    session = await client.session()
    try:
        model, sampler = await client.model(session), await client.sampler(session)
        route, fields = draw.choice(requests_of(session, model, sampler))
        send: dict[str, Callable[[], Any]] = {
            "object": lambda: raw(client, route, json.dumps(mutated(draw, fields)).encode()),
            "bytes": lambda: raw(client, route, draw.choice(HOSTILE)),
            "pass": lambda: client.send(garbled(draw, pass_body(model, 1, shifted(ROWS[:1])))),
        }
        answer = await send[draw.choice(["object", "object", "object", "bytes", "pass"])]()
        if answer.status == 200 and "request_id" in answer.content:
            request_id = {"request_id": answer.content["request_id"]}
            return await client.post("retrieve_future", request_id)
        return answer
    finally:
        await client._http.post(f"/api/v1/sessions/{session}/finish", headers=client._headers)


async def raw(client: Client, route: str, body: bytes) -> Answer:
    headers = {**client._headers, "Content-Type": "application/json"}
    return _answer(await client._http.post(f"/api/v1/{route}", content=body, headers=headers))


async def losses_of(service: Served, between: Callable[[], Any] | None = None) -> list[float]:
    """Return the losses of four steps of a tenant, with something in between."""
    model = await service.ben.model(seed=7)
    losses: list[float] = []
    for seq in range(1, 9, 2):
        losses.append((await service.ben.learn(model, seq, shifted())).metrics["loss:sum"])
        if between is not None:
            await between()
        await service.ben.step(model, seq + 1)
    return losses


@pytest.mark.parametrize(
    ("seed", "mistakes"), [(0, 60), *(pytest.param(seed, 250, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
async def test_mistakes_by_seed_cost_nobody_else(
    start: Start, monkeypatch: pytest.MonkeyPatch, seed: int, mistakes: int
) -> None:
    monkeypatch.setattr(routes, "HOLD_SECONDS", 5.0)
    draw = random.Random(seed)
    statuses: list[int] = []

    async with start() as service:

        async def pieces() -> None:
            for _ in range(mistakes // 4):
                answer = await send_mistake(draw, service.ann)
                statuses.append(answer.status)
                assert answer.status < 500, answer
                failure = answer.content if isinstance(answer.content, dict) else {}
                assert failure.get("category") != "server", answer

        alone = await losses_of(service)
        assert await losses_of(service, pieces) == alone
        assert len(service.state.tenants.models("ann")) == 0
    assert {200, 422} <= set(statuses)
