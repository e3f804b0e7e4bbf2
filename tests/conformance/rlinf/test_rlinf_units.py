"""RLinf's own unit tests, which may only pass more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.rlinf.rlinf_units import run, stored
from tests.conformance.test_imports import CHECKOUTS


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", stored())
def test_unit_tests_of_rlinf_hold_as_ever(name: str) -> None:
    folder = os.environ.get(CHECKOUTS)
    if not folder or not (checkout := Path(folder).expanduser().absolute() / "RLinf").is_dir():
        pytest.skip(f"needs a checkout of RLinf: `make conformance DIR=FOLDER` sets {CHECKOUTS}")
    pytest.importorskip("omegaconf", reason="needs omegaconf, which the extra `import` brings")
    counts, printed = run(checkout, name)
    expected = stored()[name]
    assert counts["passed"] >= expected["passed"], printed
    assert counts["passed"] + counts["skipped"] >= expected["passed"] + expected["skipped"], printed
    assert counts["failed"] <= expected["failed"], printed
