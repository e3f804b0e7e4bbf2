"""The size of the rooms: no folder has many loose files, and few files share a name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("rlinf_core", "rlinf_cli", "recipes", "benchmarks", "docs", "examples", "tests")
MOST_FILES, MOST_OF_A_NAME = 14, 3
# Names that say what a file is by its folder.
MANY = {"__init__.py", "config.py", "registry.py", "conftest.py"}


def python_files() -> list[Path]:
    return [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if "data" not in file.parts]


def test_no_folder_has_many_loose_files() -> None:
    counts = Counter(file.parent for file in python_files() if file.name != "__init__.py")
    assert len(counts) > 150
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_few_files_of_the_product_share_a_name() -> None:
    counts = Counter(file.name for file in python_files() if "tests" not in file.relative_to(ROOT).parts)
    assert {name: count for name, count in counts.items() if count > MOST_OF_A_NAME and name not in MANY} == {}
