"""A service of two actor ranks and two rollout ranks gives the losses and samples of one with one rank each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from recipes.serve.wire.requests_and_results import SAMPLE_RESULT
from tests.integration.recipes.serve.service_command import Service, service
from tests.unit.recipes.serve.served import (
    ROWS,
    SMALL,
    Client,
    logprobs_of,
    parsed,
    pass_body,
    sample_fields,
    shifted,
    step_fields,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TWO = tuple(
    f"cluster.component_placement.{component}={{node_group: node, placement: '0:0-1'}}"
    for component in ("actor", "rollout")
)
STEPS, PROMPTS = 4, 6


class Seen(NamedTuple):
    """What a client saw: losses and norms of gradients by step, last log-probabilities, and answers."""

    losses: list[float]
    norms: list[float]
    logprobs: list[Any]
    answers: list[list[bytes]]


async def seen_of(running: Service, tenant: str) -> Seen:
    """Train for some steps, then sample from base model and snapshot, all requests at once."""
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        client = Client(http, (running.folder / "service/keys" / tenant).read_text().strip())
        session = await client.session()
        model = await client.model(session)
        losses, norms = list[float](), list[float]()
        for step in range(STEPS):
            # Two passes a step: their gradients add up on each rank. One of them has a datum for one rank only.
            sent = [
                await client.send(pass_body(model, 3 * step + 1, shifted())),
                await client.send(pass_body(model, 3 * step + 2, shifted(ROWS[:1]))),
            ]
            stepped = await client.post("optim_step", step_fields(model, 3 * step + 3))
            losses += [parsed(await client.result(answer)).metrics["loss:sum"] for answer in sent]
            norms.append((await client.result(stepped))["metrics"]["grad_norm"])
        last = await client.learn(model, 3 * STEPS + 1, shifted(), forward_only=True)
        fields = {"model_id": model, "seq_id": 3 * STEPS + 2, "sampling_session_seq_id": 1}
        snapshot = (await client.result(await client.post("save_weights_for_sampler", fields)))["sampling_session_id"]
        samplers = [await client.sampler(session), snapshot]
        asked = [
            await client.post(
                "asample", sample_fields(sampler, n, ROWS[n % 4][: 1 + n], num_samples=3, seed=n, stop=[])
            )
            for sampler in samplers
            for n in range(PROMPTS)
        ]
        results = [SAMPLE_RESULT.FromString(await client.result(answer)) for answer in asked]
        answers = [[part.tokens for part in result.sequences] for result in results]
        return Seen(losses, norms, logprobs_of(last), answers)


@pytest.mark.nightly
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    seen: dict[tuple[str, str], Seen] = {}
    tenants = ("server.tenants=[adapters, full]", "server.full_weights=full", "server.max_pending=40")
    for name, overrides in (("one", ()), ("two", TWO)):
        (tmp_path / name).mkdir()
        with service(tmp_path / name, *SMALL, *tenants, *overrides) as running:
            for tenant in ("adapters", "full"):
                seen[name, tenant] = asyncio.run(seen_of(running, tenant))
    for tenant in ("adapters", "full"):
        one, two = seen["one", tenant], seen["two", tenant]
        # Ranks add up in another order; steps carry that on.
        np.testing.assert_allclose(two.losses, one.losses, rtol=1e-5)
        np.testing.assert_allclose(two.norms, one.norms, rtol=1e-4)
        for mine, theirs in zip(two.logprobs, one.logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert one.losses[0] > one.losses[-2]
        # Of the base model to the bit; of the snapshot, whose weights differ by rounding, with these seeds.
        assert two.answers == one.answers
