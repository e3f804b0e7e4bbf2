"""A run that is ended at any moment ends truthfully: its exit status, its state, what it kept, and nothing is left."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from tests.integration.cli.interruptions import Case, How, cases, interrupt, measure

KINDS = list(itertools.product(How, (False, True)))
# Of each kind; a hundred take about three hours on two cores.
MOMENTS = int(os.environ.get("RLINF_TEST_MOMENTS", "12"))
# Each moment is a run of its own, which is ended by force long before.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Somewhat more than a run takes to its second step."""
    return 1.5 * measure(tmp_path_factory.mktemp("measured"))


def check(case: Case, folder: Path) -> None:
    outcome = interrupt(case, folder)
    assert not outcome.faults, f"{case} in {outcome.phase}: {outcome.faults}\n{outcome.text}"


@pytest.mark.parametrize(
    ("how", "detached", "share"),
    [
        (How.SIGTERM, False, 0.25),
        pytest.param(How.STOP, True, 0.4, marks=pytest.mark.nightly),
        pytest.param(How.WARNING, False, 0.9, marks=pytest.mark.nightly),
        pytest.param(How.CTRL_C, False, 0.5, marks=pytest.mark.nightly),
        pytest.param(How.SIGTERM, False, 0.95, marks=pytest.mark.nightly),
    ],
)
def test_at_a_few_moments(how: How, detached: bool, share: float, span: float, tmp_path: Path) -> None:
    check(Case(how, detached, share * span), tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("how", "detached"), KINDS)
def test_at_many_moments(how: How, detached: bool, span: float, tmp_path: Path) -> None:
    # Others every day; a failure names its moment.
    today = int(time.time()) // 86400
    for number, case in enumerate(cases(how, detached, MOMENTS, span, seed=today)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(case, folder)
