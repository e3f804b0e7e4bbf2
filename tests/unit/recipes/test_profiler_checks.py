"""What `rlinf validate` says of `runner.profiler`."""

from __future__ import annotations

import pytest

from recipes.sections import checks
from rlinf_cli.job.job_file import load_with_lint


def findings(monkeypatch: pytest.MonkeyPatch, *profiler: str, spy: str | None = None) -> list[tuple[str, str]]:
    """Return code and message of each error of a job with these overrides."""
    monkeypatch.setattr(checks, "py_spy", lambda: spy)
    overrides = (*(f"runner.profiler.{setting}" for setting in profiler), "runner.max_steps=4")
    job = load_with_lint("laptop", overrides)
    return [(one.code, one.message) for one in job.diagnostics if one.code != "no-effect"]


def test_sound_profile_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(monkeypatch, "components=[actor,env]", "last_step=4") == []
    assert findings(monkeypatch, "kind=py-spy", spy="/usr/bin/py-spy") == []


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("kind=py-spy", "missing-extra", "needs py-spy"),
        ("components=[critic]", "missing-component", "names `critic`, which is not placed"),
        ("first_step=5 last_step=5", "conflicting-settings", "after the last step of the run, 4"),
        ("last_step=1", "bad-value", "`last_step: 1` is before `first_step: 2`"),
        ("kind=nsys", "bad-value", "kind"),
    ],
)
def test_faulty_profile_is_told(monkeypatch: pytest.MonkeyPatch, setting: str, code: str, words: str) -> None:
    ((result, message),) = findings(monkeypatch, *setting.split())
    assert result == code
    assert words in message
