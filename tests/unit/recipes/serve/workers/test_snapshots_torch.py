"""This project's own engine keeps the contract of snapshots, and bounds what it has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.serve.values import AdapterSettings, request_of
from recipes.serve.workers.adapters import ModelVariants
from recipes.serve.workers.snapshot_engines import SnapshotEngines, TorchSnapshots
from tests.unit.recipes.language.engines.contract import contract_model
from tests.unit.recipes.serve.workers.snapshot_contract import (
    ContractTokenizer,
    SnapshotContract,
    contract_config,
    drawing,
    run,
    write_adapters,
)


def make(folder: Path, **sections: dict[str, Any]) -> TorchSnapshots:
    return TorchSnapshots(contract_config(folder, **sections), contract_model(), ContractTokenizer())


@pytest.fixture
def snapshots(tmp_path: Path) -> dict[str, str]:
    return write_adapters(tmp_path)


class TestTorchSnapshots(SnapshotContract):
    @pytest.fixture
    def engines(self, tmp_path: Path) -> SnapshotEngines:
        return make(tmp_path)


def test_snapshots_in_memory_are_few(tmp_path: Path, snapshots: dict[str, str]) -> None:
    engines = make(tmp_path, rollout={"max_snapshots": 1})
    small, large = (drawing(name, folder, (3,), max_tokens=20) for name, folder in snapshots.items())
    engines.begin(small, request_of(small))
    # While one is drawn from, another waits; idle, it gives way.
    assert not engines.has_room(large.snapshot)
    assert engines.has_room(small.snapshot)
    while not engines.draw().answers:
        pass
    assert len(run(engines, [large])) == 1
    assert set(engines._engines) == {large.snapshot}


def test_snapshots_of_all_weights_count_apart(tmp_path: Path, snapshots: dict[str, str]) -> None:
    contract_model().save_pretrained(tmp_path / "model")
    variants = ModelVariants(contract_model(), 8.0, contract_model)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        variants.add(name, AdapterSettings(0, 0))
        variants.save(name, AdapterSettings(0, 0), tmp_path / name)
    engines = make(tmp_path / "model", server={"max_full_models": 1}, rollout={"max_snapshots": 2})
    one, two = (drawing(name, str(tmp_path / name), (3,), max_tokens=20) for name in ("one", "two"))
    engines.begin(one, request_of(one))
    assert not engines.has_room(two.snapshot)
    assert engines.has_room(snapshots["small"])
    run(engines, [drawing("s", snapshots["small"], (3,))])
    while not engines.draw().answers:
        pass
    run(engines, [two])
    assert set(engines._engines) == {snapshots["small"], two.snapshot}
