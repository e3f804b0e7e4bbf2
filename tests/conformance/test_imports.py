"""Counts of `rlinf import` over checkouts of RLinf and verl, which may only rise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.imports import FALLING, FOLDERS, RISING, counts, stored, verdicts

# The folder that holds the checkouts; `make conformance DIR=...` sets it.
CHECKOUTS = "RLINF_CONFORMANCE"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("project", FOLDERS)
def test_imports_of_a_checkout_are_as_good_as_ever(project: str) -> None:
    folder = os.environ.get(CHECKOUTS)
    if not folder:
        pytest.skip(f"needs checkouts of other projects: `make conformance DIR=FOLDER` sets {CHECKOUTS}")
    checkout = Path(folder).expanduser() / project
    if not checkout.is_dir():
        pytest.skip(f"needs a checkout of {project}: there is no `{checkout}`")
    measured, expected = counts(list(verdicts(project, checkout))), stored()[project]
    assert measured["files"] >= expected["files"]
    assert {name: measured[name] for name in RISING if measured[name] < expected[name]} == {}
    assert {name: measured[name] for name in FALLING if measured[name] > expected[name]} == {}


def test_stored_counts_cover_every_project() -> None:
    assert {project: {*RISING, *FALLING} - set(numbers) for project, numbers in stored().items()} == {
        project: set() for project in FOLDERS
    }
