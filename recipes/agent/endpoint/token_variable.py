"""A token of a run for libraries that read tokens only from the environment of their process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def token_variable(prefix: str, value: str) -> Generator[str]:
    """Set an environment variable of this process temporarily, whose name no other run has."""
    name = f"{prefix}{secrets.token_hex(8)}"
    os.environ[name] = value
    try:
        yield name
    finally:
        del os.environ[name]
