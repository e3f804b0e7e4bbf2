"""Tenants, keys and sessions."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from recipes.language.listening.request_error import RequestError
from recipes.serve.service.tenants import Keys, Tenants


def test_keys_are_readable_by_their_owner_alone_and_stay(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", ["ann", "ben"])
    texts = {name: (tmp_path / "keys" / name).read_text().strip() for name in ("ann", "ben")}
    assert all(text.startswith("tml-") for text in texts.values())
    assert {stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) for name in texts} == {0o600}
    assert [keys.tenant(texts[name]) for name in texts] == ["ann", "ben"]
    assert Keys(tmp_path / "keys", ["ann"]).tenant(texts["ann"]) == "ann"
    with pytest.raises(RequestError) as refused:
        keys.tenant("tml-other")
    assert refused.value.status == 401


def test_silent_sessions_are_those_not_heard_of() -> None:
    now = [0.0]
    tenants = Tenants("b", 120.0, lambda: now[0])
    one, other = tenants.begin("ann"), tenants.begin("ann")
    now[0] = 100.0
    tenants.session("ann", other.session_id)
    now[0] = 130.0
    assert tenants.silent() == [one]
    tenants.end(one)
    with pytest.raises(RequestError) as refused:
        tenants.session("ann", one.session_id)
    assert refused.value.status == 410
