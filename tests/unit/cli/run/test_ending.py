"""The end of a run in its folder."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from rlinf_cli.run import run_documents
from rlinf_core.errors import RunError


class FullFolder:
    """A run folder that has no room for the first tries."""

    def __init__(self, full: int, number: int = errno.ENOSPC) -> None:
        self.full, self.number = full, number
        self.ended: list[tuple[str, str]] = []

    def update(self, *, step: int) -> None:
        assert step == 3

    def end(self, status: str, reason: str) -> None:
        if self.full:
            self.full -= 1
            raise RunError("the run folder cannot be written") from OSError(self.number, "")
        self.ended.append((status, reason))


def test_end_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_documents, "_ROOM_PAUSE", 0.0)
    folder: Any = FullFolder(2)
    assert run_documents.record_end(folder, 3, "failed", "why") is None
    assert folder.ended == [("failed", "why")]


@pytest.mark.parametrize(("number", "at_once"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_end_does_not_wait_in_vain(number: int, at_once: bool) -> None:
    folder: Any = FullFolder(2, number)
    assert isinstance(run_documents.record_end(folder, 3, "failed", at_once=at_once), RunError)
    assert (folder.full, folder.ended) == (1, [])
