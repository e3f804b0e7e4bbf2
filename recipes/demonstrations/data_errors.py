"""Errors of data sets, and the optional packages for reading them."""

from __future__ import annotations

import importlib
from typing import Any

from rlinf_core import RLinfError
from rlinf_core.process.requirements import absence, install_command, missing_modules


class DatasetError(RLinfError):
    """A data set cannot be read or written, or does not fit; `where` is its file or folder."""


def needed(module: str, purpose: str) -> Any:
    """Import a package that only some data sets need.

    Args:
        module: the name of the module.
        purpose: what needs the package, as the subject of a sentence.

    Raises:
        DatasetError: the package is not installed.
    """
    package = module.partition(".")[0]
    cause: ImportError | None = None
    if not missing_modules([package]):
        try:
            return importlib.import_module(module)
        except ImportError as error:
            cause = error
    raise DatasetError(
        f"{purpose} needs the package `{package}`, {absence(package)}", help=f"run `{install_command(package)}`"
    ) from cause
