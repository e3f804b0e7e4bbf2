"""The surface of the installed Tinker SDK against the stored one, which this service was written for.

With a newer SDK it names what has changed; `sdk_surface.py` writes the file anew once that is served.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.recipes.serve.service_command import NO_SDK, PYTHON

HERE = Path(__file__).parent


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason=NO_SDK)
def test_sdk_has_the_stored_surface() -> None:
    command = [PYTHON, "-W", "ignore", str(HERE / "sdk_surface.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    installed, stored = json.loads(done.stdout), json.loads((HERE / "sdk_surface.json").read_text())
    assert changes(stored, installed) == []


def changes(stored: dict[str, Any], installed: dict[str, Any]) -> list[str]:
    """Return the paths, requests and messages that differ, each by a line."""
    lines = [f"path {path}" for path in sorted(set(stored["paths"]) ^ set(installed["paths"]))]
    for part in ("requests", "messages"):
        for name in sorted({*stored[part], *installed[part]}):
            before, now = stored[part].get(name), installed[part].get(name)
            if before != now:
                lines.append(f"{name}: {before} is now {now}")
    return lines


def test_changes_are_named() -> None:
    stored = {"paths": ["a", "b"], "requests": {"R": ["x"]}, "messages": {"M": {"f": "1 9"}}}
    installed = {"paths": ["a", "c"], "requests": {"R": ["x", "y"]}, "messages": {"M": {"f": "1 9"}}}
    assert changes(stored, stored) == []
    assert changes(stored, installed) == ["path b", "path c", "R: ['x'] is now ['x', 'y']"]
