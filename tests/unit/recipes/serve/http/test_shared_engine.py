"""An engine that tenants share goes on for all others, whatever one request brings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.serve.service import training
from recipes.serve.workers.snapshot_engines import TorchSnapshots
from recipes.serve.workers.snapshot_sampler import SnapshotSampler
from rlinf_core import WorkerDiedError
from tests.unit.recipes.language.in_threads import Hub, in_thread
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import Client, Served, config_of, shifted
from tests.unit.recipes.serve.workers.snapshot_contract import drawing

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
        fields = {"prompt_logprobs": True} if method == "prompt_logprobs" else {"topk_sample_logprobs": 2}
        failure, others = await asyncio.gather(
            asked(service.ann, ours, fields),
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


async def asked(client: Client, sampler: str, fields: dict[str, Any]) -> Any:
    """Return the result of a request with further fields."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    common = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": prompt}
    params = {"max_tokens": 4, "stop": []}
    return await client.result(await client.post("asample", {**common, "sampling_params": params, **fields}))


@pytest.mark.parametrize("place", ["step", "submit"])
def test_a_worker_whose_device_is_lost_ends(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def failing(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    sampler = in_thread(SnapshotSampler, "rollout", Hub(), 0, 1)(config_of())
    sampler.init_worker()
    monkeypatch.setattr(TorchEngine, place, failing)
    with pytest.raises(WorkerDiedError, match="illegal memory access"):
        sampler.advance([drawing("a", None, (3, 4))], [], 0.1)
