"""The environment of a process on a node: the node's own environment, merged with variables of a file.

Travels to nodes: standard library only, and no syntax or function later than Python 3.8. Run as a script with a file
written by `write`, it becomes the interpreter that the file names.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def merged(own: Mapping[str, str], variables: Mapping[str, str], prepended: Iterable[str]) -> dict[str, str]:
    """Return the environment `own` with `variables`, whose values are not expanded.

    Args:
        own: the environment of the starting process.
        variables: the variables of the file.
        prepended: the names of variables that hold lists of directories: their value is prepended to the existing one.
    """
    lists = set(prepended)
    env = dict(own)
    for name, value in variables.items():
        before = own.get(name) if name in lists else None
        if before:
            # An empty value would add an empty entry, which means the working directory.
            is_first = not value or before == value or before.startswith(f"{value}:")
            env[name] = before if is_first else f"{value}:{before}"
        else:
            env[name] = value
    return env


def write(folder: str, request: dict[str, Any]) -> str:
    """Write a private file in `folder` that holds `env`, `prepended` and `interpreter`; return its path.

    Equal requests share one file.
    """
    text = json.dumps(request, sort_keys=True)
    path = os.path.join(folder, f"rlinf-env-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")
    part = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)
    return path


def command(python: str, path: str) -> list[str]:
    """Return the command that becomes the interpreter named in the file at `path`; arguments for it can be appended."""
    return [python, "-I", "-S", os.path.abspath(__file__), path]


def main() -> None:
    """Become the interpreter that the file names."""
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    interpreter = request["interpreter"]
    env = merged(os.environ, request["env"], request["prepended"])
    os.execve(interpreter, [interpreter, *sys.argv[2:]], env)


if __name__ == "__main__":
    main()
