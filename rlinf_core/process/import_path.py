"""The order of imports: the standard library, rlinf's own packages, the folders of `PYTHONPATH`, installed packages,
then the working folder.

So `recipes/`, `random.py` or `typer.py` in the working folder hides no module of a driver that `rlinf` starts, or of
its workers. Nothing is imported from folders of runs, checkpoints, models and data sets: other people may have written
their files.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

# The top-level packages that rlinf is installed as, side by side.
OWN_PACKAGES: Final = ("rlinf_core", "rlinf_cli", "recipes", "configs")
OWN_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

# The files by which a folder of data is recognized: all the files of one line.
_OF_DATA: Final = (
    ("run.json",),
    ("manifest.json", "actor"),
    ("policy.json",),
    (".metadata",),
    ("config.json", "tokenizer.json"),
    ("config.json", "model.safetensors"),
    ("config.json", "model.safetensors.index.json"),
    ("meta/info.json",),
)
# The levels of a run's folder: RUN/checkpoints/CHECKPOINT/actor.
_DEPTH: Final = 4

_managed = False
# The working folder if it is on `sys.path` only as the working folder of a command, see `is_unnamed`; else None.
_unnamed_folder: str | None = None


class OwnPackages:
    """A finder of rlinf's packages beside `rlinf_core`; folders of the same name elsewhere on `sys.path` come after."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in OWN_PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, [OWN_ROOT])
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations.extend(_namesakes(fullname, sys.path))
        return spec


def pin_own_packages() -> None:
    """Make this process find rlinf's packages beside `rlinf_core`. Idempotent."""
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def manage(folder: str | None) -> None:
    """Set the import order of this process and of the workers that it starts; `folder`: the working folder, if any."""
    global _managed, _unnamed_folder
    _managed = True
    # The first entry is Python's own addition: the folder of the script, or the working folder of `python -m`.
    named = {os.path.realpath(entry) for entry in sys.path[0 if sys.flags.safe_path else 1 :]}
    is_named = folder is not None and os.path.realpath(folder) in named
    _unnamed_folder = None if folder is None or is_named else os.path.realpath(folder)
    # `python -m` puts the working folder before the standard library.
    sys.path[:] = [entry for entry in sys.path if entry and entry != folder]
    if folder is None:
        return
    if holds_data(folder):
        # Processes started by libraries, such as `multiprocessing` and Ray, must not import from there either.
        os.environ["PYTHONSAFEPATH"] = "1"
    elif is_named:
        add_user_folders([folder])
    else:
        add_working_folder(folder)


def is_unnamed(folder: str | os.PathLike[str]) -> bool:
    """Return whether `folder` is on the path only as the working folder of a command.

    Its modules may have come with the file that the command reads. A folder counts as named if it is in `PYTHONPATH`,
    or an installed package added it, or it holds the user's own program.
    """
    return _unnamed_folder is not None and os.path.realpath(folder) == _unnamed_folder


def named_path() -> list[str]:
    """Return the entries of `sys.path` except an unnamed working folder, see `is_unnamed`."""
    return [entry for entry in sys.path if not is_unnamed(entry)]


def holds_data(folder: str) -> bool:
    """Return whether a folder is, or lies in, a run, a checkpoint, a model or a data set."""
    path = os.path.realpath(folder)
    for _ in range(_DEPTH):
        if any(all(os.path.lexists(os.path.join(path, name)) for name in names) for names in _OF_DATA):
            return True
        path = os.path.dirname(path)
    return False


def module_command(program: str) -> list[str]:
    """Return the command that runs a module in a new process of this interpreter, with this process's import order.

    `python -m` would search the working folder before the standard library.
    """
    start = (
        f"import sys; sys.path.append({OWN_ROOT!r}); import runpy; "
        "from rlinf_core.process.import_path import add_user_folders, add_working_folder; "
        f"add_user_folders({user_folders()!r}); add_working_folder({working_folder()!r}); "
        f"runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", start]


def is_managed() -> bool:
    """Return whether the imports of this process are in the order of this module, not in Python's default order."""
    return _managed


def add_user_folders(folders: Iterable[str]) -> None:
    """Insert the folders missing from `sys.path`, after the standard library and before installed packages."""
    new = [folder for folder in folders if folder not in sys.path]
    standard = _standard_library()
    last = max((i for i, entry in enumerate(sys.path) if entry and os.path.realpath(entry) in standard), default=-1)
    sys.path[last + 1 : last + 1] = new
    _extend_own_packages(new)


def add_working_folder(folder: str | None) -> None:
    """Append the working folder of a command, if any, to `sys.path`, unless it is on it."""
    global _unnamed_folder
    if folder is not None and folder not in sys.path:
        _unnamed_folder = os.path.realpath(folder)
        sys.path.append(folder)
        _extend_own_packages([folder])


def working_folder() -> str | None:
    """Return the unnamed working folder if it is on `sys.path`, else None; see `is_unnamed`."""
    return next(filter(is_unnamed, sys.path), None)


def _extend_own_packages(new: Iterable[str]) -> None:
    for name in OWN_PACKAGES:
        loaded = sys.modules.get(name)
        if loaded is not None and name != "rlinf_core":
            loaded.__path__.extend(namesake for namesake in _namesakes(name, new) if namesake not in loaded.__path__)


def user_folders() -> tuple[str, ...]:
    """Return the named folders of `sys.path` that belong neither to the interpreter nor to installed packages."""
    import sysconfig  # too slow to import in every command

    installed = tuple(
        os.path.realpath(path) for path in {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()} if path
    )
    folders: dict[str, None] = {}
    for entry in named_path():
        folder = os.path.realpath(entry or os.getcwd())
        if not any(folder == root or folder.startswith(root + os.sep) for root in installed):
            folders.setdefault(folder)
    return tuple(folders)


def _standard_library() -> tuple[str, str]:
    folder = os.path.dirname(os.path.realpath(os.__file__))
    return folder, os.path.join(folder, "lib-dynload")


def _namesakes(name: str, folders: Iterable[str]) -> list[str]:
    """Return the folders called `name` in `folders`, without rlinf's own."""
    paths = [os.path.join(os.path.realpath(folder or os.getcwd()), name) for folder in folders]
    own = os.path.join(OWN_ROOT, name)
    return [path for path in paths if path != own and os.path.isdir(path)]


_MOST_BYTES = 4 << 20


def locate(module: str, *, named: bool = False) -> ModuleSpec | None:
    """Return the spec of a module, or None; `importlib.util.find_spec` would import its parent packages.

    Args:
        named: whether to leave out an unnamed working folder, see `is_unnamed`.
    """
    package, _, _ = module.rpartition(".")
    folders: Sequence[str] | None = None
    if package:
        around = locate(package, named=named)
        folders = list(around.submodule_search_locations or ()) if around is not None else []
        # A package of rlinf may also have a folder in the working folder.
        folders = [folder for folder in folders if not (named and is_unnamed(Path(folder).parent))]
    spec = _spec(module, folders, named) if folders or not package else None
    # Some modules have no file of their own but are made by their package, such as `os.path`.
    return spec if spec is not None or named else getattr(sys.modules.get(module), "__spec__", None)


def _spec(module: str, folders: Sequence[str] | None, named: bool) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is PathFinder:
            # For the full name of a folder without `__init__.py`, PathFinder would look up its parent in `sys.modules`.
            path = folders if folders is not None else named_path() if named else None
            spec = PathFinder.find_spec(module.rpartition(".")[2], path)
        else:
            try:
                spec = finder.find_spec(module, folders)
            except KeyError:  # another finder looked up a parent in `sys.modules`
                continue
        if spec is not None:
            return spec
    return None


def syntax_tree(spec: ModuleSpec) -> ast.Module | None:
    """Return the syntax tree of a module; None if it has no Python source.

    Raises:
        ValueError: the source cannot be read or is not Python; the message says why.
    """
    from rlinf_core.foreign.files import read_bounded

    origin = spec.origin
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        return ast.parse(read_bounded(origin, _MOST_BYTES), origin)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno} of {origin} is not Python: {error.msg}") from None
    except OSError as error:
        raise ValueError(f"{origin} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{origin} cannot be read: {error or type(error).__name__}") from None


# Entry points: named objects that installed packages offer to rlinf.
#
# `importlib.metadata` finds them, too, but importing it takes a tenth of the time of `rlinf --help`.


_FILE: Final = "entry_points.txt"
_METADATA: Final = (".dist-info", ".egg-info")
# The separators in a package's name, which differ from file to file.
_BETWEEN: Final = re.compile(r"[-_.]+")


class EntryPoint(NamedTuple):
    """An object that a package offers: `value` is `module:object`."""

    name: str
    value: str

    @property
    def module(self) -> str:
        """The module of the object."""
        return self.value.partition(":")[0].strip()

    def load(self) -> Any:
        """Import the module, and return the object in it."""
        result = import_module(self.module)
        for name in filter(None, self.value.partition("[")[0].partition(":")[2].strip().split(".")):
            result = getattr(result, name)
        return result


def offered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without importing them. Of equal names the first counts.

    An unnamed working folder is skipped (see `is_unnamed`): its `NAME.dist-info` is not trusted.
    """
    points: dict[str, EntryPoint] = {}
    packages: set[str] = set()
    for folder in sys.path:
        if is_unnamed(folder):
            continue
        try:
            changed = os.stat(folder or ".").st_mtime_ns
        except OSError:
            continue
        for package, lines in _packages(folder or ".", changed):
            # A package that is installed twice is imported from the first folder.
            if package not in packages:
                packages.add(package)
                for point in _points(lines, group):
                    points.setdefault(point.name, point)
    return points


@lru_cache(maxsize=256)
def _packages(folder: str, changed: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the installed packages of a folder, changed last at `changed`, each with the lines of its entry points."""
    packages: list[tuple[str, tuple[str, ...]]] = []
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    for name in names:
        if not name.endswith(_METADATA):
            continue
        try:
            with open(os.path.join(folder, name, _FILE), encoding="utf-8") as file:
                lines = tuple(file)
        except (OSError, UnicodeDecodeError):
            lines = ()
        package = name.rpartition(".")[0].partition("-")[0]
        packages.append((_BETWEEN.sub("_", package).lower(), lines))
    return tuple(packages)


def _points(lines: tuple[str, ...], group: str) -> Iterator[EntryPoint]:
    current = ""
    for line in map(str.strip, lines):
        if line.startswith("[") and line.endswith("]"):
            current = line[1:-1].strip()
        elif current == group and not line.startswith(("#", ";")):
            name, equals, value = line.partition("=")
            if equals:
                yield EntryPoint(name.strip(), value.strip())
