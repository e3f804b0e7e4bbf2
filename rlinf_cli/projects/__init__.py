"""The files of a new project: an environment, a model, a reward, a recipe, or a lab of all of them.

`templates/KIND/` holds working files, whose module is called `my_KIND`. A project replaces that name by its own. A lab
gets the files of all kinds, as modules of one package.

A template is copied into the user's folder, so it must be self-contained: `my_reward` repeats `examples/own_reward.py`.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Mapping
from enum import StrEnum
from importlib.machinery import PathFinder
from keyword import iskeyword
from pathlib import Path, PurePosixPath
from typing import Final

from rlinf_core.errors import ConfigError
from rlinf_core.process.import_path import OWN_PACKAGES, holds_data, named_path
from rlinf_core.process.requirements import missing_modules

README: Final = "README.md"
_TEMPLATES: Final = Path(__file__).parent / "templates"
_COMMANDS: Final = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


class ProjectKind(StrEnum):
    """The kinds of projects."""

    ENV = "env"
    MODEL = "model"
    REWARD = "reward"
    RECIPE = "recipe"
    LAB = "lab"

    @property
    def word(self) -> str:
        """The name of the module in the kind's templates."""
        return f"my_{self}"


def project_files(kind: ProjectKind, name: str | None = None, *, gymnasium: bool = False) -> dict[PurePosixPath, str]:
    """Return the text of each file of a new project by its path.

    Args:
        kind: the kind of the project.
        name: the name of the module, or of a lab's package; None for `my_KIND`.
        gymnasium: whether an environment uses Gymnasium instead of a `VectorEnv`.

    Raises:
        ConfigError: `name` cannot be the name of a user's module, or `gymnasium` is set and `kind` is not `env`.
    """
    name = kind.word if name is None else name
    _check_name(name)
    if gymnasium and kind is not ProjectKind.ENV:
        raise ConfigError("`--gymnasium` is for environments", help="write `rlinf init env --gymnasium`")
    if kind is not ProjectKind.LAB:
        return _renamed("gymnasium" if gymnasium else kind, {kind: name})
    modules = {part: f"{name}.{part}" for part in ProjectKind if part is not ProjectKind.LAB} | {kind: name}
    package = PurePosixPath(name)
    files: dict[PurePosixPath, str] = {}
    for part in ProjectKind:
        for path, text in _renamed(part, modules).items():
            if path.name != README:
                files[package / path] = text
            elif part is ProjectKind.LAB:
                files[path] = text
    return files


def next_commands(files: Mapping[PurePosixPath, str]) -> list[str]:
    """Return the commands that the project's README shows first, after the installation of a missing pytest."""
    shown = _COMMANDS.search(files[PurePosixPath(README)])
    commands = shown[1].splitlines() if shown else []
    return [*(["pip install pytest"] if missing_modules(["pytest"]) else []), *commands]


def write_project(folder: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Write a new project into `folder`, which may hold other files.

    Raises:
        ConfigError: a file exists already, the folder holds data, or a file cannot be written. Nothing was written.
    """
    if holds_data(str(folder)):
        raise ConfigError(
            "a project cannot be here: `rlinf` imports nothing from a run, a checkpoint, a model or a data set",
            where=str(folder),
            help="name another folder",
        )
    taken = [str(path) for path in files if os.path.lexists(folder / path)]
    if taken:
        raise ConfigError(
            f"nothing was written: {', '.join(f'`{path}`' for path in taken)} would be overwritten",
            where=str(folder),
            help="name a new folder, or another module with `--name`",
        )
    written: list[Path] = []
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x", encoding="utf-8") as file:
                written.append(target)
                file.write(text)
    except OSError as error:
        from rlinf_core.foreign.files import write_fault

        for target in written:
            target.unlink(missing_ok=True)
        why = write_fault(folder, error)
        raise ConfigError("the project cannot be written", where=str(error.filename or folder), why=why) from error


def _renamed(template: str, modules: Mapping[ProjectKind, str]) -> dict[PurePosixPath, str]:
    """Return the files of a template, with its modules renamed as in `modules`."""
    names = {part.word: module for part, module in modules.items()}

    def rename(match: re.Match[str]) -> str:
        module = names[match["word"]]
        if match["test"] or match["suffix"]:
            # A file has the last part of its module's name, as in `env.yaml` for `my_lab.env`.
            module = module.rpartition(".")[2]
        return f"{match['test'] or ''}{module}{match['suffix'] or ''}"

    words = re.compile(rf"\b(?P<test>test_)?(?P<word>{'|'.join(names)})(?P<suffix>\.(?:py|yaml))?\b")
    return {
        PurePosixPath(words.sub(rename, file.name)): words.sub(rename, file.read_text(encoding="utf-8"))
        for file in sorted((_TEMPLATES / template).iterdir())
        if file.is_file()
    }


def _check_name(name: str) -> None:
    """Raise a ConfigError unless `name` can be the name of a user's module."""
    if not name.isidentifier() or iskeyword(name) or unicodedata.normalize("NFKC", name) != name:
        raise ConfigError(
            f"`{name}` cannot be the name of a Python module",
            help="use letters, digits and `_`, no digit first and no word of Python, as in `--name cart`",
        )
    # Ignore the current folder: it may hold an earlier project of this name.
    elsewhere = [entry for entry in named_path() if os.path.realpath(entry) != os.getcwd()]
    if name in sys.stdlib_module_names or name in OWN_PACKAGES or PathFinder.find_spec(name, elsewhere) is not None:
        raise ConfigError(
            f"there is a Python module `{name}` already, which would be imported instead",
            help=f"use another name, as in `--name my_{name}`",
        )
