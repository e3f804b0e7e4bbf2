"""From where a driver imports what is not installed: a script's own folder, a test runner's, PYTHONPATH."""

from __future__ import annotations

import os
import sys
import sysconfig


def own_import_path() -> tuple[str, ...]:
    """Return the entries of `sys.path` that belong neither to the interpreter nor to installed packages."""
    installed = tuple(
        os.path.realpath(path) for path in {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()} if path
    )
    found: dict[str, None] = {}
    for entry in sys.path:
        folder = os.path.realpath(entry or os.getcwd())
        if not any(folder == each or folder.startswith(each + os.sep) for each in installed):
            found.setdefault(folder)
    return tuple(found)
