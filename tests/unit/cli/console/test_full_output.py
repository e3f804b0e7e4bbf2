"""Output that cannot be written."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from rlinf_cli.console import console


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_message_without_room_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full()
    monkeypatch.setattr(sys, "stderr", full)
    console.error("the disk is full")
    assert full.getvalue() == ""


def test_result_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        console.result("42")
