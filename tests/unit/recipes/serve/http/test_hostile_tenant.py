"""Tenants that train beside one whose requests are all meant to break the service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.serve.wire.requests_and_results import SAMPLE_RESULT
from tests.peak_memory import take_peak
from tests.unit.recipes.serve.http.test_shared_engine import POISON, raise_in_step
from tests.unit.recipes.serve.served import (
    ROWS,
    Client,
    Served,
    pass_body,
    sample_fields,
    served,
    shifted,
    step_fields,
    workers,
)
from tests.unit.recipes.serve.wire.test_requests_and_results import empty_tensors

HOSTILE, *OTHERS = NAMES = ("eve", "ann", "ben", "cid", "dan")
# Requests of the hostile tenant in the time of a round of the others.
A_ROUND = 20


async def work_of(client: Client, rounds: int) -> list[Any]:
    """Return all results of a tenant that trains and samples, of the base model and of snapshots."""
    session = await client.session()
    model, base = await client.model(session), await client.sampler(session)
    seen = list[Any]()
    for number in range(rounds):
        seen.append(await client.result(await client.send(pass_body(model, 3 * number + 1, shifted()))))
        seen.append(await client.result(await client.post("optim_step", step_fields(model, 3 * number + 2))))
        saving = {"model_id": model, "seq_id": 3 * number + 3, "sampling_session_seq_id": number + 1}
        saved = await client.result(await client.post("save_weights_for_sampler", saving))
        asked = [
            client.post("asample", sample_fields(sampler, number, ROWS[0][:3], seed=number, stop=[]))
            for sampler in (base, saved["sampling_session_id"])
        ]
        for answer in await asyncio.gather(*asked):
            # Log-probabilities of answers that are drawn beside others may differ in the last bit.
            drawn = SAMPLE_RESULT.FromString(await client.result(answer))
            seen.append([list(one.tokens) for one in drawn.sequences])
    return seen


class Hostile:
    """Sends requests that bring errors, by seed; each kind knows whether it is to fail."""

    def __init__(self, client: Client, draw: random.Random) -> None:
        self._client = client
        self._draw = draw
        self._samplers = 0
        self.kinds: list[Callable[[], Awaitable[Any]]] = [
            self._tiny_temperature,
            self._tiny_share,
            self._error_in_a_step,
            self._huge_step,
            self._snapshot,
            self._endless_loss,
            self._other_tokens,
            self._empty_tensors,
            self._many_data,
        ]

    async def begin(self) -> None:
        """Create what requests are sent to."""
        self._base = await self._client.sampler(await self._client.session())
        self._snapshots, self._kept = [self._base], ""
        await self._go_on()

    async def _go_on(self) -> None:
        self._session = await self._client.session()
        self._model, self._sequence = await self._client.model(self._session), 0

    async def send(self) -> None:
        """Send a request and wait for what becomes of it."""
        answer = await self._draw.choice(self.kinds)()
        if answer.status == 200:
            await self._client.result(answer)

    def _sample(self, prompt: list[int], **params: Any) -> Awaitable[Any]:
        self._samplers += 1
        return self._client.post(
            "asample", sample_fields(self._draw.choice(self._snapshots), self._samplers, prompt, **params)
        )

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _tiny_temperature(self) -> Awaitable[Any]:
        return self._sample([3], temperature=self._draw.choice([1e-45, 5e-324, 1e-38, 1e-7]))

    def _tiny_share(self) -> Awaitable[Any]:
        return self._sample([3], top_p=self._draw.choice([1e-46, 1e-300, 5e-324]))

    def _error_in_a_step(self) -> Awaitable[Any]:
        return self._sample([POISON, 3], stop=[])

    def _empty_tensors(self) -> Awaitable[Any]:
        name, width = self._draw.choice(["weights", "target_tokens"]), self._draw.choice([1 << 20, 1 << 40])
        return self._client.send(empty_tensors(name, 100, 1, width, self._model, self._next()))

    def _many_data(self) -> Awaitable[Any]:
        return self._client.send(b"\x1a\x00" * self._draw.choice([1000, 600_000]))

    def _other_tokens(self) -> Awaitable[Any]:
        return self._sample([10**6])

    async def _huge_step(self) -> Any:
        await self._client.send(pass_body(self._model, self._next(), shifted()))
        rate = self._draw.choice([1e10, 1e18, 1e30, 1e38, 1e300])
        return await self._client.post("optim_step", step_fields(self._model, self._next(), rate))

    async def _snapshot(self) -> Any:
        fields = {"model_id": self._model, "seq_id": self._next(), "sampling_session_seq_id": 10**6 + self._sequence}
        answer = await self._client.post("save_weights_for_sampler", fields)
        saved = await self._client.result(answer)
        ended = self._session
        if "sampling_session_id" in saved:
            self._snapshots = [self._base, saved["sampling_session_id"]]
            ended, self._kept = self._kept, ended
        if ended:
            await self._client.post(f"sessions/{ended}/finish", {"reason": "done"})
        # Its losses may be NaN for good.
        await self._go_on()
        return answer

    def _endless_loss(self) -> Awaitable[Any]:
        rows = shifted()
        for _, values in rows:
            values["weights"] = values["weights"] * 3e38
        return self._client.send(pass_body(self._model, self._next(), rows))


async def losses_beside(folder: Path, shared: str, count: int) -> tuple[list[Any], list[Any], float]:
    """Return what four tenants see alone, and beside one that sends that many hostile requests; and by which factor the
    second part took more memory."""
    rounds = max(2, count // A_ROUND)
    limits = ("server.max_pending=40", "server.session_timeout=100000", "server.max_models=100000")
    async with served(folder, shared, f"server.tenants=[{', '.join(NAMES)}]", *limits) as service:
        clients = {name: client_of(service, folder, name) for name in NAMES}
        alone = await asyncio.gather(*(work_of(clients[name], rounds) for name in OTHERS))
        before = take_peak()
        hostile = Hostile(clients[HOSTILE], random.Random(0))
        await hostile.begin()

        async def attack() -> None:
            for _ in range(count):
                await hostile.send()

        *beside, _ = await asyncio.gather(*(work_of(clients[name], rounds) for name in OTHERS), attack())
        return alone, beside, take_peak() / before


def client_of(service: Served, folder: Path, name: str) -> Client:
    return Client(service.http, (folder / "keys" / name).read_text().strip())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [pytest.param(2000, marks=pytest.mark.nightly)])
def test_a_hostile_tenant_changes_nothing_for_others(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    # They compare their engine with transformers at the start.
    workers(shared)
    raise_in_step(monkeypatch, RuntimeError("not enough memory"))
    alone, beside, growth = asyncio.run(losses_beside(tmp_path, shared, count))
    assert beside == alone
    assert growth <= 1.2
