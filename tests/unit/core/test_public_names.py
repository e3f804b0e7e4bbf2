"""Public names, and the rooms that hold them."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import rlinf_core

_STUB = ast.parse(Path(rlinf_core.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    str(alias.asname): str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
_NAMES = [name for name in rlinf_core.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", _NAMES)
def test_each_name_is_what_its_module_defines(name: str) -> None:
    value = getattr(rlinf_core, name)
    assert value is _defined(_MODULES[name], name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (value.__name__, value.__module__) == (name, _MODULES[name])
        assert value.__doc__


def _defined(module: str, name: str) -> object:
    """Return what a module defines under a name, or its submodule."""
    defined = importlib.import_module(module)
    return getattr(defined, name) if hasattr(defined, name) else importlib.import_module(f"{module}.{name}")


def test_type_checkers_see_the_same_names() -> None:
    assert _MODULES["__version__"] == "rlinf_core.version"
    assert set(_MODULES) == {*_NAMES, "__version__"}


def test_the_list_is_what_dir_and_the_star_give() -> None:
    assert dir(rlinf_core) == sorted(rlinf_core.__all__)
    assert len(set(rlinf_core.__all__)) == len(rlinf_core.__all__)
    namespace: dict[str, object] = {}
    exec("from rlinf_core import *", namespace)  # noqa: S102 - the star import is what is tested
    assert set(rlinf_core.__all__) <= set(namespace)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="Wroker"):
        _ = rlinf_core.Wroker


def test_defining_a_worker_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from rlinf_core import Worker, Cluster, NodePlacementStrategy, WorkerAddress;"
        "print([name for name in ('ray', 'torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recipes_take_from_the_front_door_what_it_offers() -> None:
    """Names of one module are one name: whoever reads a recipe sees what a recipe of their own can rely on."""
    results = [
        f"{file}:{node.lineno} {alias.name}"
        for file in sorted((Path(rlinf_core.__file__).parents[1] / "recipes").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlinf_core.")
        for alias in node.names
        if _MODULES.get(alias.name) == node.module
    ]
    assert not results, "import these from `rlinf_core` itself"


def test_name_of_a_related_project_is_refused_with_ours() -> None:
    with pytest.raises(ImportError, match=r"has no `ModelParallelComponentPlacement`: use `ComponentPlacement`"):
        rlinf_core.ModelParallelComponentPlacement  # pyright: ignore  # noqa: B018


def test_former_names_work_and_say_where_they_are_now() -> None:
    with pytest.warns(DeprecationWarning, match=r"`open_run` of `rlinf_core` is now `load_run`"):
        assert rlinf_core.open_run is rlinf_core.load_run  # pyright: ignore
    where = r"is now `RunFolder` of `rlinf_core.runners.storage.run_folder`"
    with pytest.warns(DeprecationWarning, match=where) as warned:
        folder = rlinf_core.RunFolder  # pyright: ignore
    assert folder is _defined("rlinf_core.runners.storage.run_folder", "RunFolder")
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="`events`"):
        from rlinf_core import events  # pyright: ignore
    assert events is importlib.import_module("rlinf_core.runners.events")


@pytest.mark.parametrize("name", sorted(rlinf_core._FORMER))
def test_former_name_is_there_and_not_listed(name: str) -> None:
    assert name not in rlinf_core.__all__
    with pytest.warns(DeprecationWarning, match=f"`{name}`"):
        assert getattr(rlinf_core, name) is not None


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
