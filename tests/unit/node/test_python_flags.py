"""Settings of Python under which Ray does not start."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from rlinf_core.errors import ClusterError
from rlinf_core.node.python_flags import refuse_stripped_docstrings

LEVELS = {"2": True, "3": True, "9" * 5000: True, "": False, "0": False, "1": False, "yes": False}


@pytest.mark.parametrize(("level", "stripped"), LEVELS.items())
def test_stripped_docstrings_alone_are_refused(level: str, stripped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", level)
    refusal = pytest.raises(ClusterError, match="PYTHONOPTIMIZE") if stripped else nullcontext()
    with refusal as caught:
        refuse_stripped_docstrings()
    assert caught is None or caught.value.help == "unset PYTHONOPTIMIZE"
