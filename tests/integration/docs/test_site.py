"""The site builds without a warning, and a page of it loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
# What a page loads by itself, unlike a link that somebody follows.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//"""
    r"""|<link[^>]+rel=["']?stylesheet[^>]+href=["']?(?:https?:)?//"""
)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning_and_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    assert [page.name for page in pages if LOADED.search(page.read_text(encoding="utf-8"))] == []
    assert "launch_together" in (tmp_path / "api.html").read_text(encoding="utf-8")
