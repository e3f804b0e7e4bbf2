"""The JSON Schema and `rlinf validate` on files with mistakes: what one of them alone refuses may only become less."""

from __future__ import annotations

import pytest

from tests.conformance.mutants import judged, stored


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_schema_and_validate_agree_on_mutants_as_ever() -> None:
    counts, alone = judged()
    expected = stored()
    assert counts["schema"] <= expected["schema"], alone
    assert counts["validate"] <= expected["validate"]
    assert counts["both"] >= expected["both"]
