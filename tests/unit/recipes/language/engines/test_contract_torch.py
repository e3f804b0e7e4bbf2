"""The engine of this project keeps the contract of engines."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.language.engines.engine import Engine
from recipes.language.engines.own.torch_engine import TorchEngine
from tests.unit.recipes.language.engines.contract import EngineContract, contract_model


class TestTorchEngine(EngineContract):
    draws_go_on = True

    tolerance = 1e-4

    def make(self, **options: Any) -> Engine:
        return TorchEngine(contract_model(), **options)
