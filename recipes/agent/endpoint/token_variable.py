"""A run's token for libraries that read tokens only from environment variables."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def token_variable(prefix: str, value: str) -> Generator[str]:
    """Set an environment variable of a unique name in this process temporarily."""
    name = f"{prefix}{secrets.token_hex(8)}"
    os.environ[name] = value
    try:
        yield name
    finally:
        del os.environ[name]
