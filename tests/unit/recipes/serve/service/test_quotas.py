"""Quotas of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.language.listening.request_error import RequestError
from recipes.serve.service.service_state import Quotas
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import config_of, pass_body, sample_fields, shifted, step_fields


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


def test_stored_bytes_are_counted_by_tenant(tmp_path: Path) -> None:
    made = quotas([0.0], "server.max_stored_mib=1")
    made.check_stored(tmp_path / "ann")
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann/weights").write_bytes(bytes(1 << 20))
    made.check_stored(tmp_path / "ben")
    with pytest.raises(RequestError, match="max_stored_mib"):
        made.check_stored(tmp_path / "ann")


async def test_requests_beyond_a_quota_are_asked_to_wait(start: Start) -> None:
    async with start("server.max_tokens_per_minute=24", "server.max_requests_per_minute=3") as service:
        ann = service.ann
        session = await ann.session()
        model, sampler = await ann.model(session), await ann.sampler(session)
        assert (await ann.send(pass_body(model, 1, shifted()))).status == 200
        late = await ann.post("asample", sample_fields(sampler, 0, [3], max_tokens=20))
        assert late.status == 429
        assert "max_tokens_per_minute" in late.content["detail"]
        steps = [await ann.post("optim_step", step_fields(model, seq)) for seq in (2, 3, 4)]
        assert [step.status for step in steps] == [200, 200, 429]
        # The same request again, as clients send it, is not counted again.
        assert (await ann.post("optim_step", step_fields(model, 3))).content == steps[1].content
        assert await service.ben.model()


async def test_saving_beyond_the_quota_fails(start: Start) -> None:
    async with start("server.max_stored_mib=1", "server.max_rank=128") as service:
        ann = service.ann
        model = await ann.model(rank=128)
        saves = [
            await ann.result(await ann.post("save_weights", {"model_id": model, "seq_id": seq, "path": f"n{seq}"}))
            for seq in range(1, 12)
        ]
        assert saves[0]["path"].endswith("/n1")
        assert "max_stored_mib" in saves[-1]["error"]
