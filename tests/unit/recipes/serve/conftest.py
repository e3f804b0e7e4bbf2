"""The service of tests: its workers are made once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.unit.recipes.serve.served import Served, served

Start: TypeAlias = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the workers' files."""
    return str(tmp_path_factory.mktemp("workers"))


@pytest.fixture
def start(tmp_path: Path, shared: str) -> Start:
    """Starts a service, with overrides of its configuration."""
    return lambda *overrides: served(tmp_path, shared, *overrides)
