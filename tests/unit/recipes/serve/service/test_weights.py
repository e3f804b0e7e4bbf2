"""Weights that are a tenant's own (`server.full_weights`), and weights that are not finite numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.language.models.load_model import load_model
from recipes.serve.adapters import WEIGHTS
from recipes.training.tensor_files import read_tensors, write_tensors
from rlinf_core import WorkerDiedError
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import (
    ROWS,
    Client,
    logprobs_of,
    model_fields,
    parsed,
    pass_body,
    shifted,
    step_fields,
    workers,
)

FULL = "server.full_weights=ann"


async def scores(ann: Client, model: str, seq: int) -> list[Any]:
    return [array.tolist() for array in logprobs_of(await ann.learn(model, seq, shifted(), forward_only=True))]


async def trained(ann: Client, session: str = "", steps: int = 2) -> str:
    """Return a model after some steps; its next request has the number 2 * steps + 1."""
    model = await ann.model(session)
    for step in range(steps):
        await ann.train(model, 2 * step + 1)
    return model


async def test_clients_are_told_that_it_is_no_adapter(start: Start) -> None:
    async with start(FULL) as service:
        fields = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        created = (await service.ann.post("create_session", fields)).content
        assert "all weights" in created["info_message"]
        assert (await service.ben.post("create_session", fields)).content["info_message"] is None
        for client, is_lora, rank in ((service.ann, False, None), (service.ben, True, 4)):
            model = await client.model()
            info = (await client.post("get_info", {"model_id": model})).content
            assert (info["is_lora"], info["lora_rank"]) == (is_lora, rank)
            path = (await client.save(model, 1, path="one"))["path"]
            weights = (await client.post("weights_info", {"tinker_path": path})).content
            assert (weights["is_lora"], weights["lora_rank"]) == (is_lora, rank)


async def test_others_models_stay_as_they_are(start: Start) -> None:
    async with start(FULL) as service:
        bens, anns = await service.ben.model(), await service.ann.model()
        before = await scores(service.ben, bens, 1)
        np.testing.assert_allclose(await scores(service.ann, anns, 1), before, atol=1e-6)
        for seq in (2, 4):
            await service.ann.train(anns, seq)
        assert await scores(service.ben, bens, 2) == before
        assert await scores(service.ann, anns, 6) != before


async def test_saved_weights_are_read_by_us_and_transformers(start: Start, tmp_path: Path) -> None:
    async with start(FULL) as service:
        ann = service.ann
        session = await ann.session()
        model = await trained(ann, session)
        path = (await ann.save(model, 5, path="one"))["path"]
        right = await scores(ann, model, 6)
        # With the optimizer, both take the same step from there.
        await ann.train(model, 7)
        loading = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        loaded = (await ann.ask("load_weights", **loading))["model_id"]
        assert await scores(ann, loaded, 1) == right
        await ann.train(loaded, 2)
        assert await scores(ann, loaded, 4) == await scores(ann, model, 9)
    (folder,) = (tmp_path / "weights").glob("ann/*/weights/one")
    theirs = load_model(str(folder)).eval()
    with torch.no_grad():
        for row, wanted in zip(ROWS, right, strict=True):
            logits: Any = theirs(input_ids=torch.tensor([row[:-1]])).logits[0].log_softmax(-1)
            result = logits.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            np.testing.assert_allclose(result.numpy(), wanted, atol=1e-5)


async def test_snapshots_keep_their_weights(start: Start) -> None:
    # One more snapshot than a sampler keeps in memory.
    async with start(FULL, "server.max_pending=20") as service:
        ann = service.ann
        model, samplers, right = await ann.model(), list[str](), list[float]()
        for number in range(3):
            await ann.train(model, 4 * number + 1)
            samplers.append(await ann.snapshot(model, 4 * number + 3, number))
            right.append((await scores(ann, model, 4 * number + 4))[0])
        for _ in range(2):
            asked = [ann.sample(name, seq, ROWS[0], prompt_logprobs=True, seed=1) for seq, name in enumerate(samplers)]
            for result, wanted in zip(await asyncio.gather(*asked), right, strict=True):
                results = np.frombuffer(result.prompt_logprobs, np.float32)[1:]
                np.testing.assert_allclose(results, wanted, atol=1e-5)


def test_later_start_goes_on_with_all_weights(start: Start) -> None:
    async def work(stops: bool) -> list[Any]:
        overrides = (FULL, "server.save_interval=2")
        async with start(*overrides) as service:
            ann = service.ann
            model = await trained(ann, steps=3)
            sent = await ann.send(pass_body(model, 7, shifted()))
            if not stops:
                stepped = await ann.post("optim_step", step_fields(model, 8))
                return [parsed(await ann.result(sent)).metrics, await ann.result(stepped), await scores(ann, model, 9)]
        async with start(*overrides) as service:
            assert service.resumed == 1
            stepped = await service.ann.post("optim_step", step_fields(model, 8))
            results = [parsed(await service.ann.result(sent)).metrics, await service.ann.result(stepped)]
            return [*results, await scores(service.ann, model, 9)]

    assert asyncio.run(work(stops=True)) == asyncio.run(work(stops=False))


@pytest.mark.parametrize(
    ("lora", "message"),
    [({"train_unembed": False}, "leave `train_...` out"), ({"train_mlp": 1}, "must be true or false")],
)
async def test_parts_of_the_weights_are_refused(start: Start, lora: dict[str, Any], message: str) -> None:
    async with start(FULL) as service:
        assert message in await service.ann.refusal("create_model", model_fields(await service.ann.session(), **lora))


async def test_models_with_all_weights_are_few(start: Start) -> None:
    async with start(FULL, "server.max_full_models=1") as service:
        session = await service.ann.session()
        await service.ann.model(session)
        fields = model_fields(await service.ann.session())
        assert "max_full_models" in await service.ann.refusal("create_model", fields)
        assert await service.ben.model()
        await service.ann.post(f"sessions/{session}/finish", {"reason": "done"})
        assert await service.ann.model()


async def test_without_a_rank_all_weights_are_trained(start: Start) -> None:
    async with start(FULL) as service:
        fields = {**model_fields(await service.ann.session()), "lora_config": None}
        assert "model_id" in await service.ann.ask("create_model", **fields)
        fields = {**model_fields(await service.ben.session()), "lora_config": None}
        assert "only adapters" in await service.ben.refusal("create_model", fields)


SAVES: list[tuple[str, dict[str, Any]]] = [
    ("save_weights", {"path": "whole"}),
    ("save_weights_for_sampler", {"path": "named"}),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 0}),
]


@pytest.mark.parametrize("rate", [1e38, 3e38, 1e300])
@pytest.mark.parametrize("interval", [1, 8])
async def test_weights_that_a_step_made_infinite_are_not_saved(
    start: Start, tmp_path: Path, rate: float, interval: int
) -> None:
    async with start(f"server.save_interval={interval}") as service:
        ann = service.ann
        model = await ann.model()
        good = await ann.save(model, 1, path="before")
        await ann.learn(model, 2, shifted())
        await ann.step(model, 3, rate)
        for seq, (route, fields) in enumerate(SAVES, 4):
            failure = await ann.save(model, seq, route, **fields)
            assert "step 3 made weights of the model NaN or infinite" in failure["error"]
        kept = {path.name for path in tmp_path.rglob("*") if path.is_dir() and path.parent.name != "keys"}
        assert not [name for name in kept if name.startswith(("snapshot-", ".")) or name in ("named", "whole")]
        # The same model goes on from what was saved before.
        loading = {"model_id": model, "seq_id": 7, "path": good["path"], "optimizer": True}
        await ann.ask("load_weights", **loading)
        for seq, (route, fields) in enumerate(SAVES, 8):
            assert "error" not in await ann.save(model, seq, route, **fields)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
async def test_files_with_values_that_are_not_finite_are_refused(start: Start, tmp_path: Path, bad: float) -> None:
    async with start() as service:
        ann, session = service.ann, await service.ann.session()
        model = await ann.model(session)
        paths = [
            (await ann.save(model, seq, route, **fields))["path"] for seq, (route, fields) in enumerate(SAVES[:2], 1)
        ]
        for file in tmp_path.rglob(WEIGHTS):
            tensors = read_tensors(file)
            tensors[sorted(tensors)[0]][0, 0] = bad
            file.unlink()
            write_tensors(file, tensors)
        await ann.learn(model, 3, shifted(), "unknown")
        loading = {"model_id": model, "seq_id": 4, "path": paths[0], "optimizer": False}
        assert "NaN or infinite" in (await ann.ask("load_weights", **loading))["error"]
        # The pass before still counts as failed.
        assert "no step was taken" in (await ann.step(model, 5))["error"]
        sampler = await ann.sampler(session, path=paths[1])
        assert "NaN or infinite" in (await ann.sample(sampler, 0, [3]))["error"]
        theirs = await service.ben.sampler(await service.ben.session())
        assert len((await service.ben.sample(theirs, 0, [3])).sequences) == 1


def test_an_actor_whose_device_is_lost_ends(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    actor = workers(shared)[1].worker
    monkeypatch.setattr(actor._variants, "using", failing)
    with pytest.raises(WorkerDiedError, match="device-side assert"):
        actor.learn("m", [], "cross_entropy", {}, True)
