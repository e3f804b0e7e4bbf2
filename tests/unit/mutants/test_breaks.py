"""`make mutants` breaks behaviour, and leaves texts and types alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.breaks import draw

_HEAD = '"""A module."""\n' * 15


def _changes(folder: Path, code: str) -> set[tuple[str, str]]:
    (folder / "module.py").write_text(_HEAD + code)
    return {(mutant.before, mutant.after) for mutant in draw(folder, "module.py", 20, seed=1)}


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        ("return a < b", "a < b", "(a <= b)"),
        ("return a is None", "a is None", "(a is not None)"),
        ("return a + b", "a + b", "(a - b)"),
        ("return a and b", "a and b", "(a or b)"),
        ("return not a", "not a", "(a)"),
        ("return a[1]", "1", "(2)"),
        ("return min(a, b)", "min(a, b)", "max(a, b)"),
        ("return put(a, b)", "put(a, b)", "put(b, a)"),
        ("return a if b else 'é'", "a if b else 'é'", "('é' if b else a)"),
        ("put(a)", "put(a)", "pass"),
        ("raise a", "raise a", "pass"),
    ],
)
def test_an_expression_gets_its_opposite(line: str, before: str, after: str, tmp_path: Path) -> None:
    assert _changes(tmp_path, f"def function(a, b):\n    {line}\n") == {(before, after)}


@pytest.mark.parametrize("default", ["def function(a=2): ...\n", "class Record:\n    a: int = 2\n"])
def test_a_default_gets_another_value(default: str, tmp_path: Path) -> None:
    assert _changes(tmp_path, default) == {("2", "3")}


@pytest.mark.parametrize("line", ['logger.info("a", 1)', 'return f"{a + 1}"', "assert a > 1", 'return a + "text"'])
def test_texts_and_checks_stay(line: str, tmp_path: Path) -> None:
    assert _changes(tmp_path, f"def function(a):\n    {line}\n") == set()


def test_what_follows_a_change_is_the_whole_module(tmp_path: Path) -> None:
    code = "def function(a, b):\n    text = 'ä'; return a < b  # more\n"
    (tmp_path / "module.py").write_text(_HEAD + code)
    sources = [mutant.source for mutant in draw(tmp_path, "module.py", 20, seed=1)]
    assert sources == [_HEAD + code.replace("a < b", "(a <= b)")]


def test_a_seed_draws_the_same_mutants_again(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(_HEAD + "def function(a):\n" + "    a += 1\n    put(a)\n" * 20)
    first, again, other = (draw(tmp_path, "module.py", 8, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
