"""What every unit test begins with."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test before this one has set: an engine of vLLM forbids its process to fetch models."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
