"""What a name means where the working folder has a module of that name, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.process import import_path

TAKEN = ("random", "types", "json", "logging", "rlinf_core", "rlinf_cli")
MANAGED = "import sys; sys.path.pop(0); from rlinf_core.process import import_path; import_path.manage({folder!r})\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with modules and packages of names that are taken."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the user\\'s {name}')")
    for name in ("recipes", "configs", "tests", "docs", "benchmarks", "yaml_of_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"WHOSE = 'the user\\'s {name}'")
        (tmp_path / name / "mine.py").write_text("WHOSE = 'mine'")
    # Installed, too.
    (tmp_path / "pydantic.py").write_text("WHOSE = __file__ = 'mine'")
    return tmp_path


def run(code: str, folder: Path) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = MANAGED.format(folder=str(folder)) + code
    root = Path(import_path.OWN_ROOT)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**env, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("name", ["random", "types", "json", "logging"])
def test_the_standard_library_is_not_hidden(folder: Path, name: str) -> None:
    [file] = run(f"import {name}; print({name}.__file__)", folder)
    assert Path(file).parent != folder


@pytest.mark.parametrize("name", ["rlinf_cli.main", "recipes.embodied", "configs"])
def test_our_packages_are_not_hidden(folder: Path, name: str) -> None:
    [file] = run(f"from importlib.util import find_spec; print(find_spec({name!r}).origin)", folder)
    assert file.startswith(import_path.OWN_ROOT + os.sep)


def test_modules_of_the_working_folder_are_found(folder: Path) -> None:
    code = "import yaml_of_mine.mine as a, recipes.mine as b, recipes.embodied\n"
    assert run(f"{code}print(a.WHOSE, b.WHOSE)", folder) == ["mine mine"]


def test_installed_packages_are_hidden_by_a_named_folder_alone(folder: Path) -> None:
    code = "import pydantic; print(pydantic.__file__ == 'mine')"
    assert run(code, folder) == ["False"]
    named = f"sys.path.insert(1, {str(folder)!r}); import_path.manage({str(folder)!r});{code}"
    assert run(named, folder) == ["True"]


def test_a_folder_that_is_added_late_is_searched_too(folder: Path) -> None:
    code = f"import recipes; import_path.add_user_folders([{str(folder)!r}]); import recipes.mine as a; print(a.WHOSE)"
    assert run(f"import_path.manage(None); sys.path.remove({str(folder)!r})\n{code}", folder) == ["mine"]


def test_interpreter_and_packages_are_no_user_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [os.path.dirname(os.__file__), os.path.dirname(pytest.__file__), "", "/srv/mine"])
    assert import_path.user_folders()[-2:] == (os.path.realpath(os.getcwd()), "/srv/mine")
    assert os.path.dirname(os.__file__) not in import_path.user_folders()


@pytest.mark.parametrize(
    ("inside", "files"),
    [
        (".", ["run.json"]),
        ("checkpoints/global_step_1/actor", ["run.json"]),
        ("actor", [".metadata"]),
        (".", ["config.json", "tokenizer.json"]),
        (".", ["config.json", "model.safetensors"]),
        ("data", ["meta/info.json"]),
    ],
)
def test_modules_in_received_folders_are_not_found(tmp_path: Path, inside: str, files: list[str]) -> None:
    place = tmp_path / inside
    place.mkdir(parents=True, exist_ok=True)
    (place / "numpy.py").write_text("raise SystemExit('this ran')")
    assert not import_path.holds_data(str(place))
    for name in files:
        file = (place if files == [".metadata"] else tmp_path) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    assert import_path.holds_data(str(place))
    code = f"import_path.manage({str(place)!r}); import numpy; print(numpy.__name__)"
    assert run(code, place) == ["numpy"]


def test_processes_of_libraries_import_nothing_received(folder: Path) -> None:
    code = (
        "from multiprocessing import get_context\n"
        "if __name__ == '__main__':\n"
        "    pool = get_context('forkserver').Pool(1)\n"
        "    print(pool.apply(abs, (-3,)))\n"
    )
    (folder / "run.json").touch()
    (folder / "weakref.py").write_text("raise RuntimeError('the received weakref')")
    assert run(code, folder) == ["3"]


def test_module_in_another_process_has_the_same_imports(folder: Path) -> None:
    (folder / "shown.py").write_text("import random, sys, yaml_of_mine; print(random.__file__, sys.argv[1:], __name__)")
    code = (
        "import subprocess; command = import_path.module_command('shown'); "
        "print(subprocess.run([*command, 'x'], capture_output=True, text=True, check=True).stdout, end='')"
    )
    [shown] = run(code, folder)
    assert shown.endswith("random.py ['x'] __main__")
    assert str(folder) not in shown
