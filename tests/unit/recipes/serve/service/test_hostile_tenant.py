"""Requests with mistakes by seed, errors in an engine that tenants share, and a hostile tenant: others go on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.language.engines.torch_engine import TorchEngine
from recipes.serve.service import routes, training
from recipes.serve.service.requests_and_results import SAMPLE_RESULT
from recipes.serve.snapshot_engines import TorchSnapshots
from recipes.serve.snapshot_sampler import SnapshotSampler
from rlinf_core import WorkerDiedError
from tests.mistakes import HOSTILE, garbled, mutated
from tests.peak_memory import take_peak
from tests.unit.recipes.language.in_threads import Hub, in_thread
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import (
    ROWS,
    Answer,
    Client,
    Served,
    _answer,
    config_of,
    empty_tensors,
    model_fields,
    pass_body,
    sample_fields,
    served,
    shifted,
    step_fields,
    workers,
)
from tests.unit.recipes.serve.snapshot_contract import drawing


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


# In the prompts of requests that are to fail.
POISON = 13
PROMPTS = [[3, 4], [5], [6, 7, 8]]


def raise_in_step(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Raise an error in steps of engines that draw an answer to a prompt with `POISON`, after its first token."""
    step = TorchEngine.step

    def failing(self: TorchEngine) -> Any:
        ended = step(self)
        if any(POISON in answer.prompt for answer in self.unfinished_answers()):
            raise error
        return ended

    monkeypatch.setattr(TorchEngine, "step", failing)


async def drawn(client: Client, sampler: str, first: int) -> list[Any]:
    """Return the tokens of some requests that are drawn together."""
    results = await asyncio.gather(
        *(client.sample(sampler, first + place, prompt, seed=7, stop=[]) for place, prompt in enumerate(PROMPTS))
    )
    return [list(one.tokens) for result in results for one in result.sequences]


async def samplers(service: Served) -> tuple[str, str]:
    return await service.ann.sampler(await service.ann.session()), await service.ben.sampler(
        await service.ben.session()
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("not enough memory"),
        torch.OutOfMemoryError("out of memory"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        IndexError("index 24 is out of bounds"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_in_a_step_fails_the_request_that_brings_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with start("server.max_pending=20") as service:
        ours, theirs = await samplers(service)
        right = await drawn(service.ben, theirs, 0)
        with monkeypatch.context() as patched:
            raise_in_step(patched, error)
            results = await asyncio.gather(
                drawn(service.ben, theirs, 10),
                *(service.ann.sample(ours, seq, [POISON], stop=[]) for seq in range(3)),
                drawn(service.ann, ours, 10),
            )
        assert [results[0], results[-1]] == [right, right]
        for failure in results[1:-1]:
            assert type(error).__name__ in failure["error"]
        assert len((await service.ann.sample(ours, 20, [POISON])).sequences) == 1
        assert await drawn(service.ben, theirs, 20) == right


@pytest.mark.parametrize("method", ["prompt_logprobs", "answer_top"])
async def test_an_error_in_further_results_fails_one_request(
    start: Start, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with start() as service:
        ours, theirs = await samplers(service)

        def failing(*_: Any) -> Any:
            raise RuntimeError("not enough memory")

        monkeypatch.setattr(TorchSnapshots, method, failing)
        changes = {"prompt_logprobs": True} if method == "prompt_logprobs" else {"topk_sample_logprobs": 2}
        fields = {**sample_fields(ours, 0, [3, 4], stop=[]), **changes}
        failure, others = await asyncio.gather(
            service.ann.ask("asample", **fields),
            drawn(service.ben, theirs, 0),
        )
        assert "not enough memory" in failure["error"]
        assert len(others) == len(PROMPTS)


@pytest.mark.parametrize(
    "error", [ValueError("too large"), MemoryError(), KeyError(0)], ids=lambda one: type(one).__name__
)
async def test_an_answer_that_cannot_be_written_fails_one_request(start: Start, error: Exception) -> None:
    async with start() as service:
        ours, theirs = await samplers(service)
        encode = service.state.sampler_turns._encode

        def failing(outcome: Any) -> bytes:
            if len(outcome.answers) == 2:
                raise error
            return encode(outcome)

        service.state.sampler_turns._encode = failing
        failure, others = await asyncio.gather(
            service.ann.sample(ours, 0, [3], num_samples=2), drawn(service.ben, theirs, 0)
        )
        assert failure["error"].startswith(f"the server failed: {type(error).__name__}")
        assert failure["category"] == "server"
        assert len(others) == len(PROMPTS)


@pytest.mark.parametrize("name", ["pass_bytes", "read_data", "check_data"])
async def test_a_mistake_in_a_pass_fails_it_and_the_step_after_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError("not enough")

    async with start() as service:
        model, other = await service.ann.model(), await service.ben.model()
        with monkeypatch.context() as patched:
            patched.setattr(training, name, failing)
            failure = await service.ann.learn(model, 1, shifted())
        assert failure == {"error": "the server failed: MemoryError: not enough", "category": "server"}
        assert "no step was taken" in (await service.ann.step(model, 2))["error"]
        for client, trained, seq in ((service.ann, model, 3), (service.ben, other, 1)):
            assert (await client.learn(trained, seq, shifted())).outputs
            assert "metrics" in await client.step(trained, seq + 1)


@pytest.mark.parametrize("place", ["step", "submit"])
def test_a_worker_whose_device_is_lost_ends(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def failing(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    sampler = in_thread(SnapshotSampler, "rollout", Hub(), 0, 1)(config_of())
    sampler.init_worker()
    monkeypatch.setattr(TorchEngine, place, failing)
    with pytest.raises(WorkerDiedError, match="illegal memory access"):
        sampler.advance([drawing("a", None, (3, 4))], [], 0.1)


EVE, *OTHERS = NAMES = ("eve", "ann", "ben", "cid", "dan")
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
        snapshot = await client.snapshot(model, 3 * number + 3, number + 1)
        asked = [
            client.post("asample", sample_fields(sampler, number, ROWS[0][:3], seed=number, stop=[]))
            for sampler in (base, snapshot)
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
        hostile = Hostile(clients[EVE], random.Random(0))
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
