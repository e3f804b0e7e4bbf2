"""The style of docstrings, names, test names and commit subjects."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from docs import style


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
        ("found = 1", True),
        ("for each in (): pass", True),
        ("def f(told): pass", True),
        ("rows = [row for row in ()]", False),
        ("if (given := 1): pass", True),
        ("print(given)", False),
        ("class A:\n    found: int", False),
        ('def f(seed):\n    """Return it.\n\n    Args:\n        seed: of the split.\n    """', True),
        ('def f(seed):\n    """Return it.\n\n    Args:\n        seed: the seed: of the split.\n    """', False),
        ('def f():\n    """Return it.\n\n    Raises:\n        E: of nothing.\n    """', False),
    ],
)
def test_product_faults_are_docstrings_and_names(code: str, bad: bool, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)
    assert bool(list(style.product_faults(file))) is bad


@pytest.mark.parametrize(("length", "bad"), [(60, False), (61, True)])
def test_long_test_names_are_faults(length: int, bad: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_code.py"
    file.write_text(f"def test_{'x' * (length - 5)}(): pass")
    assert bool(list(style.faults_of_tests(file))) is bad


@pytest.mark.parametrize(("length", "bad"), [(72, False), (73, True)])
def test_long_subjects_are_faults(length: int, bad: bool, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("x" * length + "\n\n" + "y" * 200)
    assert style.main(["--message", str(message)]) == int(bad)


def test_long_subjects_of_the_newest_commits_are_faults(tmp_path: Path) -> None:
    assert style.newest_subject_faults(tmp_path) == []
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for subject in ("x" * 72, "y" * 73):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", subject, "-m", "z" * 200], check=True)
    (fault,) = style.newest_subject_faults(tmp_path)
    assert "the subject has 73 characters of 72" in fault


def test_empty_names_in_tests_are_faults(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def test_a():\n    found = 1\n    assert found\n")
    assert [fault.text for fault in style.faults_of_tests(file)] == ["`found` does not say what the value is"]
