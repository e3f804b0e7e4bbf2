"""Code of this machine for the nodes: rlinf itself, and a folder of the user's."""

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
# It travels to every node, in memory: code, not data.
_MOST_BYTES: Final = 64 * 2**20
_MOST_FILES: Final = 20_000


def archive(folder: Path) -> str:
    """Return what `--sync FOLDER` ships, packed and as text: rlinf's packages, and over them what is in `folder`.

    Both lie at the archive's root, which the nodes put first on PYTHONPATH. Links are followed, caches left out.

    Raises:
        ConfigError: there is no such folder, or it holds more than code.
    """
    if not folder.is_dir():
        raise ConfigError(f"`{folder}` is not a folder", help="`--sync` takes the folder that Python would import from")
    files: dict[str, Path] = {}
    for package in _PACKAGES:
        for root in (find_spec(package) or _nowhere()).submodule_search_locations or ():
            files.update((f"{package}/{name}", path) for name, path in _files(Path(root)))
    files.update(_files(folder))
    size = sum(path.stat().st_size for path in files.values())
    if size > _MOST_BYTES or len(files) > _MOST_FILES:
        raise ConfigError(
            f"`{folder}` is too large to be shipped: {len(files)} files, {size >> 20} MiB",
            why=f"`--sync` is for code: at most {_MOST_FILES} files and {_MOST_BYTES >> 20} MiB",
            help="name the folder of the code alone, or put data where all nodes see it",
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
