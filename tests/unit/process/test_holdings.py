"""What a process says that it holds, whatever becomes of who knows it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlinf_core.process import activity as module
from rlinf_core.process.activity import holdings, show_holdings


def _fails() -> Sequence[str]:
    raise OSError("the folder is gone")


def test_many_lines_are_counted_and_a_fault_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_holders", [])
    assert holdings() == ()
    show_holdings(_fails)
    show_holdings(lambda: ["x" * 1000, *map(str, range(20))])
    first, long, *rest = holdings()
    assert first == "what it holds is not known: OSError: the folder is gone"
    assert long == "x" * 120
    assert rest == [*map(str, range(7)), "and 13 more"]
