"""The error about a device library that is not installed."""

from __future__ import annotations

import sys

from rlinf_core import ConfigError


def missing_package(source: str, package: str) -> ConfigError:
    """Return the error about a missing device package in this interpreter."""
    return ConfigError(
        f"`source: {source}` needs the package `{package}`, which `{sys.executable}` does not have",
        help=f"run `{sys.executable} -m pip install {package}` on the node that the device is attached to",
    )
