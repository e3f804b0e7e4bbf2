"""Settings of Python under which Ray does not start."""

from __future__ import annotations

import pytest

from rlinf_core.errors import ClusterError
from rlinf_core.node.python_flags import refuse_stripped_docstrings


@pytest.mark.parametrize("level", ["2", "3", "9" * 5000])
def test_stripped_docstrings_are_refused_by_their_variable(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", level)
    with pytest.raises(ClusterError, match="PYTHONOPTIMIZE") as caught:
        refuse_stripped_docstrings()
    assert caught.value.help == "unset PYTHONOPTIMIZE"


@pytest.mark.parametrize("level", ["", "0", "1", "yes"])
def test_other_levels_are_left_alone(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", level)
    refuse_stripped_docstrings()
