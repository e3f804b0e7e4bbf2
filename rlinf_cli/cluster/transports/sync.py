"""Packing of code for `--sync`: rlinf itself, and a folder of the user."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rlinf_core.errors import ConfigError

_PACKAGES: Final = ("rlinf_core", "rlinf_cli", "recipes", "configs")
_SKIPPED: Final = frozenset(("__pycache__", ".git", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache"))
# It is sent to every node from memory: code, not data.
_MOST_BYTES: Final = 64 * 2**20
_MOST_FILES: Final = 20_000


def archive(folder: Path) -> str:
    """Return the archive of `--sync FOLDER` as text: rlinf's packages, overlaid with the content of `folder`.

    Both are at the archive's root, which the nodes put first on PYTHONPATH. Links are followed, caches skipped.

    Raises:
        ConfigError: there is no such folder, or it is too large to be code.
    """
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` is not a folder", help="`--sync` takes a folder to import Python code from")
    files: dict[str, Path] = {}
    for package in _PACKAGES:
        for root in (find_spec(package) or _nowhere()).submodule_search_locations or ():
            files.update((f"{package}/{name}", path) for name, path in _files(Path(root)))
    files.update(_files(folder))
    size = sum(path.stat().st_size for path in files.values())
    if size > _MOST_BYTES or len(files) > _MOST_FILES:
        raise ConfigError(
            f"`{folder}` is too large to be copied: {len(files)} files, {size >> 20} MiB",
            why=f"`--sync` is for code: at most {_MOST_FILES} files and {_MOST_BYTES >> 20} MiB",
            help="name a folder with code only, and put data on shared storage",
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as packed:
        for name, path in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            entry.mode = 0o700 if os.access(path, os.X_OK) else 0o600
            with path.open("rb") as file:
                packed.addfile(entry, file)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _nowhere() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(submodule_search_locations=())


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Return the files below a folder, by their names in it."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in names:
            path = Path(folder) / name
            if not name.endswith(".pyc") and path.is_file():
                yield path.relative_to(root).as_posix(), path
