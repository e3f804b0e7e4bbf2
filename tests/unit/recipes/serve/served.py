"""A service in this process: real workers of one rank each behind the routes of the SDK, and a client of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import numpy as np

from recipes.serve.adapter_actor import AdapterActor
from recipes.serve.config import ServeConfig
from recipes.serve.service.requests_and_results import PASS_MESSAGE, PASS_RESULT, SAMPLE_RESULT
from recipes.serve.service.routes import SdkRoutes
from recipes.serve.service.service_state import ServiceState
from recipes.serve.service.tenants import Keys
from recipes.serve.snapshot_sampler import SnapshotSampler
from recipes.serve.values import ServedFacts
from rlinf_core import WorkerGroupError
from rlinf_core.job.load import load_job
from tests.unit.recipes.language.in_threads import Hub, in_thread

ROWS = [[3 + (7 * row + 2 * place) % 12 for place in range(7)] for row in range(4)]
SMALL = (
    "actor.model.hidden_dim=32",
    "actor.model.num_layers=1",
    "server.context_length=64",
    "server.tenants=[ann, ben]",
    "server.max_models=3",
    "server.max_pending=4",
)


def config_of(*overrides: str) -> ServeConfig:
    """Return the shipped configuration with a smaller model, and changes."""
    job = load_job("serve/sums-laptop", (*SMALL, *overrides), environ={})
    job.raise_if_bad()
    return cast("ServeConfig", job.config)


class Group:
    """A worker as a group of one: a call returns a list with its result, or raises as that of a group does."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.worker, name)

        async def call(*args: Any) -> list[Any]:
            try:
                return [await asyncio.to_thread(method, *args)]
            except Exception as error:
                raise WorkerGroupError("group", name, {0: error}, 1) from None

        return call


class Dying:
    """A group whose calls raise."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> list[Any]:
            raise self._error

        return call


@cache
def workers(folder: str) -> tuple[ServedFacts, Group, Group]:
    """Return the facts of the model, and the workers, which tests share: all that they hold has names of its own."""
    config = config_of()
    actor = in_thread(AdapterActor, "actor", Hub(), 0, 1)(config)
    facts = actor.init_worker(f"{folder}/tokenizer")
    sampler = in_thread(SnapshotSampler, "rollout", Hub(), 0, 1)(config)
    sampler.init_worker()
    return facts, Group(actor), Group(sampler)


class Answer(NamedTuple):
    """An answer: status, and the JSON object or the bytes of the body."""

    status: int
    content: Any


class Client:
    """Speaks the wire, as one tenant."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self._headers = {"X-API-Key": key}

    async def post(self, path: str, fields: Mapping[str, Any]) -> Answer:
        """Send a JSON object."""
        response = await self._http.post(f"/api/v1/{path}", json=dict(fields), headers=self._headers)
        return _answer(response)

    async def get(self, path: str) -> Answer:
        """Ask for something."""
        return _answer(await self._http.get(f"/api/v1/{path}", headers=self._headers))

    async def send(self, body: bytes, **headers: str) -> Answer:
        """Send the bytes of a pass."""
        all_headers = {**self._headers, "Content-Type": "application/x-protobuf", **headers}
        return _answer(await self._http.post("/api/v1/forward_backward", content=body, headers=all_headers))

    async def result(self, answer: Answer) -> Any:
        """Return the result that an answer promises: an object, or bytes."""
        assert answer.status == 200, answer.content
        return (await self.post("retrieve_future", {"request_id": answer.content["request_id"]})).content

    async def ask(self, path: str, /, **fields: Any) -> Any:
        """Return the result of a request for an object."""
        return await self.result(await self.post(path, fields))

    async def refusal(self, path: str, fields: Mapping[str, Any], status: int = 422) -> str:
        """Return why a request is refused, which it is with a status."""
        answer = await self.post(path, fields)
        assert answer.status == status, answer
        return answer.content["detail"]

    async def session(self) -> str:
        """Return a new session."""
        fields = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        return (await self.post("create_session", fields)).content["session_id"]

    async def model(self, session: str = "", number: int = 0, **lora: Any) -> str:
        """Return a new model."""
        answer = await self.post("create_model", model_fields(session or await self.session(), number, **lora))
        return (await self.result(answer))["model_id"]

    async def learn(self, model: str, seq: int, data: Sequence[Any], loss: str = "cross_entropy", **extra: Any) -> Any:
        """Return the result of a pass: the parsed message, or the object of a failure."""
        return parsed(await self.result(await self.send(pass_body(model, seq, data, loss, **extra))))

    async def step(self, model: str, seq: int, rate: float = 1e-2) -> Any:
        """Return the result of an optimizer step."""
        return await self.result(await self.post("optim_step", step_fields(model, seq, rate)))

    async def train(self, model: str, seq: int, rate: float = 1e-2) -> None:
        """Have a model learn from the rows, and take a step: two numbers."""
        await self.learn(model, seq, shifted())
        await self.step(model, seq + 1, rate)

    async def save(self, model: str, seq: int, route: str = "save_weights", /, **fields: Any) -> Any:
        """Return the result of saving weights."""
        return await self.ask(route, model_id=model, seq_id=seq, **fields)

    async def snapshot(self, model: str, seq: int, number: int = 0) -> str:
        """Return a sampler of a model's weights as they are."""
        saved = await self.save(model, seq, "save_weights_for_sampler", sampling_session_seq_id=number)
        return saved["sampling_session_id"]

    async def sampler(self, session: str, number: int = 0, path: str | None = None) -> str:
        """Return a new sampler."""
        fields = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
        fields |= {} if path else {"base_model": "rlinf/base"}
        return (await self.post("create_sampling_session", fields)).content["sampling_session_id"]

    async def sample(self, sampler: str, seq: int, prompt: Sequence[int], **params: Any) -> Any:
        """Return the result of a request to sample: the parsed message, or the object of a failure."""
        content = await self.result(await self.post("asample", sample_fields(sampler, seq, prompt, **params)))
        return SAMPLE_RESULT.FromString(content) if isinstance(content, bytes) else content


def model_fields(session: str, number: int = 0, **lora: Any) -> dict[str, Any]:
    settings = {"rank": 4, "seed": 1, **lora}
    return {"session_id": session, "model_seq_id": number, "base_model": "rlinf/base", "lora_config": settings}


def step_fields(model: str, seq: int, rate: float = 1e-2) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}}


def sample_fields(sampler: str, seq: int, prompt: Sequence[int], **params: Any) -> dict[str, Any]:
    samples, logprobs = params.pop("num_samples", 1), params.pop("prompt_logprobs", False)
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
        "sampling_params": {"max_tokens": 4, **params},
        "prompt_logprobs": logprobs,
    }


def parsed(content: Any) -> Any:
    return PASS_RESULT.FromString(content) if isinstance(content, bytes) else content


def datum(tokens: Sequence[int], **values: Any) -> tuple[Sequence[int], dict[str, Any]]:
    return tokens, {name: np.asarray(value) for name, value in values.items()}


def shifted(rows: Sequence[Sequence[int]] = ROWS) -> list[Any]:
    """Return data of cross-entropy: each token of a row predicts the next."""
    return [datum(row[:-1], target_tokens=row[1:], weights=[1.0] * (len(row) - 1)) for row in rows]


def pass_body(model: str, seq: int, data: Sequence[Any], loss: str = "cross_entropy", **extra: Any) -> bytes:
    """Return the bytes of a request for a pass."""
    message = PASS_MESSAGE(model_id=model, seq_id=seq, loss=loss, forward_only=extra.pop("forward_only", False))
    for name, value in extra.items():
        message.numbers[name] = value
    for tokens, values in data:
        item = message.data.add()
        item.input.add().text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, array in values.items():
            whole = array.dtype.kind == "i"
            tensor = item.values[name]
            tensor.dense = array.astype(np.int64 if whole else np.float32).tobytes()
            tensor.dtype = 2 if whole else 1
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


def empty_tensors(name: str, count: int, rows: int, width: int, model: str = "m", seq: int = 1) -> bytes:
    """Return a body of sparse tensors without an entry, a few bytes each."""
    message = PASS_MESSAGE(model_id=model, seq_id=seq, loss="cross_entropy")
    for _ in range(count):
        item = message.data.add()
        item.input.add().text.tokens = np.asarray([3], np.int32).tobytes()
        tensor = item.values[name]
        tensor.dtype = 1
        tensor.shape.extend([rows, width])
        tensor.sparse.rows = bytes(8 * (rows + 1))
    return message.SerializeToString()


def logprobs_of(result: Any) -> list[np.ndarray[Any, Any]]:
    """Return the log-probabilities in the result of a pass, by datum."""
    arrays: list[np.ndarray[Any, Any]] = []
    for record in result.outputs:
        field = record.fields["logprobs"]
        ends = np.frombuffer(field.offsets, np.int64)[1:-1] // 4
        arrays += [
            part.reshape(-1, *field.trailing_shape) for part in np.split(np.frombuffer(field.data, np.float32), ends)
        ]
    return arrays


class Served(NamedTuple):
    """A running service with clients of two tenants."""

    state: ServiceState
    ann: Client
    ben: Client
    http: httpx.AsyncClient
    steps: list[dict[str, float]]
    resumed: int
    application: Any


@asynccontextmanager
async def served(folder: Path, shared: str, *overrides: str, dying: Exception | None = None) -> AsyncGenerator[Served]:
    """Serve from a folder as long as the context lasts.

    Args:
        folder: of keys and weights.
        shared: of the workers' files.
        overrides: of the configuration.
        dying: raised by every call of the actor, which ends its turns; None: the actor works.
    """
    facts, actor, sampler = workers(shared)
    server, boot = config_of(*overrides).server, "b007"
    steps: list[dict[str, float]] = []
    called = actor if dying is None else Dying(dying)
    state = ServiceState(server, facts, called, [sampler], folder, boot, steps.append, "tokenizer")
    keys = Keys(folder / "keys", server.tenants)
    routes = SdkRoutes(state, keys)
    resumed = routes.resume()
    work = [asyncio.create_task(part.run()) for part in (state.actor_turns, state.sampler_turns)]
    application = routes.application()
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        clients = [Client(http, (folder / "keys" / name).read_text().strip()) for name in ("ann", "ben")]
        yield Served(state, *clients, http, steps, resumed, application)
        if dying is not None:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        ended = [task.exception() for task in work if task.done()]
        assert ended == ([] if dying is None else [dying])
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for model in list(actor.worker._trained):
        actor.worker.remove(model)
    state.file.close()


def _answer(response: httpx.Response) -> Answer:
    is_json = "json" in response.headers.get("content-type", "")
    return Answer(response.status_code, response.json() if is_json else response.content)
