"""The first lines of docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.docstrings import all_faults, faults_of


def test_none_opens_with_a_relative_clause() -> None:
    assert [f"{file}:{line}: {text}" for file, line, text in all_faults()] == []


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ('"""What it is."""', True),
        ('"""The thing."""', False),
        ('class A:\n    """Who asks."""', True),
        ('def f():\n    """Whether it is."""', True),
        ('def f():\n    """Return whether it is."""', False),
        ('class A:\n    @property\n    def f(self):\n        """Whether it is."""', False),
        ('class A:\n    @property\n    def f(self):\n        """Where it is."""', True),
        ('async def f():\n    """How it goes."""', True),
        ("def f():\n    return 1", False),
        ('def f():\n    """Whatever it takes, take it."""', False),
    ],
)
def test_what_counts(code: str, bad: bool, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)
    assert bool(list(faults_of(file))) is bad
