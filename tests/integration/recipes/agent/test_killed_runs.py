"""Whether nothing of boxes is left of runs that were killed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.language.killed_runs import killed

pytest.importorskip("transformers")


@pytest.mark.nightly
@pytest.mark.security
@pytest.mark.timeout(3600)
def test_nothing_is_left_of_runs_that_were_killed(tmp_path: Path) -> None:
    results = list(killed(tmp_path, 1, math.inf))
    assert len(results) == 8
    assert [result for result in results if not result.met] == []
