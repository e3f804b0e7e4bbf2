"""Sessions that go on in a later start of the server, from what was on disk at any moment of an earlier one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlinf_core.errors import WorkerDiedError
from tests.unit.recipes.serve.served import (
    ROWS,
    Answer,
    Client,
    Served,
    model_fields,
    pass_body,
    sample_fields,
    served,
    shifted,
    step_fields,
)

Send = Callable[[Client], Awaitable[Answer]]


class Story(NamedTuple):
    """A session as a client saw it: its requests, ids and outcomes, and the states on disk on the way."""

    requests: list[Send]
    answers: list[Any]
    outcomes: list[Any]
    steps: int


def requests_of(session: str) -> list[Send]:
    """Return the requests of a client: passes, steps, a save, a load into the model, a failure, and a sampler."""
    model = f"{session}:train:0"
    path = f"tinker://{model}/weights/one"

    def learn(seq: int, loss: str = "cross_entropy", **extra: Any) -> Send:
        body = pass_body(model, seq, shifted(ROWS[: 1 + seq % 3]), loss, **extra)
        return lambda ann: ann.send(body)

    def post(route: str, fields: dict[str, Any]) -> Send:
        return lambda ann: ann.post(route, fields)

    def step(seq: int) -> Send:
        return post("optim_step", step_fields(model, seq))

    def numbered(seq: int, **extra: Any) -> dict[str, Any]:
        return {"model_id": model, "seq_id": seq, **extra}

    return [
        post("create_model", model_fields(session)),
        *(learn(1), learn(2), step(3), learn(4), step(5)),
        *(learn(6, forward_only=True), post("save_weights", numbered(7, path="one"))),
        *(learn(8), step(9), learn(10, "nothing"), step(11)),
        *(learn(12), post("save_weights_for_sampler", numbered(13, sampling_session_seq_id=0)), step(14)),
        post("asample", sample_fields(f"{session}:sample:0", 0, ROWS[0][:3], num_samples=2, max_tokens=6, seed=3)),
        *(post("load_weights", numbered(15, path=path, optimizer=True)), learn(16), step(17)),
        learn(18, forward_only=True),
    ]


async def story_of(folder: Path, shared: str, copy: Callable[[], None], *overrides: str) -> Story:
    """Live through a session, with a copy of the disk after each answer and each outcome."""
    async with served(folder, shared, "server.max_pending=40", *overrides) as service:
        ann = service.ann
        requests = requests_of(await ann.session())
        answers, outcomes = list[Any](), list[Any]()
        for number, send in enumerate(requests):
            answers.append((await send(ann)).content)
            copy()
            # Clients are two requests ahead of the outcomes that they wait for.
            if number >= 2 or number == 0:
                outcomes.append(await result(ann, answers[len(outcomes)]))
                copy()
        while len(outcomes) < len(answers):
            outcomes.append(await result(ann, answers[len(outcomes)]))
        return Story(requests, answers, outcomes, len(service.steps))


async def result(ann: Client, answer: Any) -> Any:
    assert "request_id" in answer, answer
    return (await ann.post("retrieve_future", {"request_id": answer["request_id"]})).content


async def check_goes_on(service: Served, story: Story) -> None:
    """Check that a client that sends everything again sees the ids that it knew, and the same outcomes."""
    assert service.resumed == 1
    for send, answer, outcome in zip(story.requests, story.answers, story.outcomes, strict=True):
        again = (await send(service.ann)).content
        assert set(again) == set(answer)
        assert await result(service.ann, again) == outcome
    # Those that were reported before are not reported again.
    assert len(service.steps) <= story.steps


def files_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size and the time of each file."""
    known: dict[Path, tuple[int, int]] = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            known[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return known


def copies_of(folder: Path, kept: Path) -> tuple[list[Path], Callable[[], None]]:
    copies: list[Path] = []

    def copy() -> None:
        copies.append(kept / str(len(copies)))
        # A thread of the service may write meanwhile: a copy of two moments is the disk of none.
        while True:
            before = files_of(folder)
            with contextlib.suppress(FileNotFoundError, shutil.Error):
                shutil.copytree(folder, copies[-1])
                if files_of(folder) == before:
                    return
            shutil.rmtree(copies[-1], ignore_errors=True)

    return copies, copy


def check_moments(folder: Path, shared: str, interval: int, first: int, stride: int) -> None:
    """Live through a session, and go on from every so many of its moments."""
    overrides = ("server.max_pending=40", f"server.save_interval={interval}")
    copies, copy = copies_of(folder / "first", folder / "copies")
    (folder / "first").mkdir()

    async def go_on(moment: Path, story: Story) -> None:
        async with served(moment, shared, *overrides) as service:
            await check_goes_on(service, story)

    story = asyncio.run(story_of(folder / "first", shared, copy, *overrides))
    assert len(copies) > 35
    assert story.steps == 5
    for moment in copies[first::stride]:
        asyncio.run(go_on(moment, story))


def test_session_goes_on_from_some_moments(tmp_path: Path, shared: str) -> None:
    check_moments(tmp_path, shared, 2, 9, 14)


@pytest.mark.nightly
@pytest.mark.parametrize("interval", [1, 2, 50])
def test_session_goes_on_from_every_moment(tmp_path: Path, shared: str, interval: int) -> None:
    check_moments(tmp_path, shared, interval, 1, 1)


@pytest.mark.parametrize("resumed", [False, True])
async def test_requests_wait_for_a_model_after_a_manager_died(tmp_path: Path, shared: str, resumed: bool) -> None:
    died = WorkerDiedError("manager")
    # Asks for a model, and for a pass that waits for the one before it.
    async with served(tmp_path, shared, dying=None if resumed else died) as service:
        created = await service.ann.post("create_model", model_fields(await service.ann.session()))
        if resumed:
            await service.ann.result(created)
        model = created.content["model_id"]
        second = await service.ann.send(pass_body(model, 2, shifted(ROWS)))
    if resumed:
        async with served(tmp_path, shared, dying=died) as service:
            assert service.resumed == 1
    async with served(tmp_path, shared) as service:
        assert (await result(service.ann, created.content))["model_id"] == model
        first = await service.ann.send(pass_body(model, 1, shifted(ROWS)))
        for answer in (first, second):
            assert isinstance(await result(service.ann, answer.content), bytes)
