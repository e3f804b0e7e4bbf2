"""Where a node keeps what belongs to a cluster."""

from __future__ import annotations

import os
import tempfile

import pytest

from rlinf_core.node import node_facts

# What Ray adds to its folder: a session, and the longest name among its sockets.
RAYS_PART = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
LIMIT = 107


@pytest.mark.parametrize("length", [6, 17, 18, 21, 40, 100])
def test_sockets_fit_below_whatever_tmpdir_is(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/".ljust(length, "x"))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    base = node_facts.private_base()
    assert os.path.basename(base) == "rlinf-1000"
    assert os.path.dirname(base) == (tempfile.tempdir if length <= 17 else "/tmp")
    for folder in (node_facts.folder_of("12345678"), os.path.join(base, "abcdefgh")):
        assert len(folder + RAYS_PART) <= LIMIT


def test_tmpdir_with_blanks_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/a b")
    assert node_facts.private_base() == f"/tmp/a b/rlinf-{os.getuid()}"


def test_where_no_temporary_folder_can_be_written_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_usable() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_usable)
    assert node_facts.private_base() == f"/tmp/rlinf-{os.getuid()}"
