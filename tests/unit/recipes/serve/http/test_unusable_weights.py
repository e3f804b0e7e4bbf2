"""Weights that are not finite numbers: not saved, not loaded, and named by the step that made them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.serve.workers.adapters import WEIGHTS
from recipes.training.tensor_files import read_tensors, write_tensors
from rlinf_core import WorkerDiedError
from tests.unit.recipes.serve.conftest import Start
from tests.unit.recipes.serve.served import Client, shifted, workers

SAVES: list[tuple[str, dict[str, Any]]] = [
    ("save_weights", {"path": "whole"}),
    ("save_weights_for_sampler", {"path": "named"}),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 0}),
]


async def saved(client: Client, model: str, seq: int, route: str, fields: dict[str, Any]) -> Any:
    return await client.result(await client.post(route, {"model_id": model, "seq_id": seq, **fields}))


@pytest.mark.parametrize("rate", [1e38, 3e38, 1e300])
@pytest.mark.parametrize("interval", [1, 8])
async def test_weights_that_a_step_made_infinite_are_not_saved(
    start: Start, tmp_path: Path, rate: float, interval: int
) -> None:
    async with start(f"server.save_interval={interval}") as service:
        ann = service.ann
        model = await ann.model()
        good = await saved(ann, model, 1, "save_weights", {"path": "before"})
        await ann.learn(model, 2, shifted())
        await ann.step(model, 3, rate)
        for seq, (route, fields) in enumerate(SAVES, 4):
            failure = await saved(ann, model, seq, route, fields)
            assert "step 3 made weights of the model NaN or infinite" in failure["error"]
        kept = {path.name for path in tmp_path.rglob("*") if path.is_dir() and path.parent.name != "keys"}
        assert not [name for name in kept if name.startswith(("snapshot-", ".")) or name in ("named", "whole")]
        # The same model goes on from what was saved before.
        loading = {"model_id": model, "seq_id": 7, "path": good["path"], "optimizer": True}
        await ann.result(await ann.post("load_weights", loading))
        for seq, (route, fields) in enumerate(SAVES, 8):
            assert "error" not in await saved(ann, model, seq, route, fields)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
async def test_files_with_values_that_are_not_finite_are_refused(start: Start, tmp_path: Path, bad: float) -> None:
    async with start() as service:
        ann, session = service.ann, await service.ann.session()
        model = await ann.model(session)
        paths = [(await saved(ann, model, seq, *save))["path"] for seq, save in enumerate(SAVES[:2], 1)]
        for file in tmp_path.rglob(WEIGHTS):
            tensors = read_tensors(file)
            tensors[sorted(tensors)[0]][0, 0] = bad
            file.unlink()
            write_tensors(file, tensors)
        loading = {"model_id": model, "seq_id": 3, "path": paths[0], "optimizer": False}
        failure = await ann.result(await ann.post("load_weights", loading))
        assert "NaN or infinite" in failure["error"]
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
