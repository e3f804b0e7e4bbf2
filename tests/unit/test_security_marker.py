"""Whether a skipped security test fails where CI runs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
MODULE = """
import pytest
@pytest.mark.security
@pytest.mark.skipif(True, reason="no bubblewrap")
def test_by_mark(): pass
@pytest.mark.security
def test_inside(): pytest.skip("no kernel")
@pytest.mark.security
@pytest.mark.xfail
def test_known(): raise AssertionError
def test_other(): pytest.skip("no GPU")
"""


@pytest.mark.parametrize(("ci", "failed", "skipped"), [("true", 1, 1), ("", 0, 3)])
def test_skipped_security_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, failed: int, skipped: int
) -> None:
    monkeypatch.setenv("CI", ci)
    hook = Path(__file__).parents[1] / "conftest.py"
    pytester.makeconftest(hook.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = security")
    pytester.makepyfile(MODULE)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    # A skip by a mark happens before the test: that is an error.
    result.assert_outcomes(failed=failed, errors=failed, skipped=skipped, xfailed=1)
    if failed:
        for why in ("no bubblewrap", "no kernel"):
            result.stdout.fnmatch_lines([f"*must not be skipped in CI: *{why}*"])
