"""The folder from which a later start of the server goes on: one server at a time, and of one model."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rlinf_core import ConfigError, RunError
from rlinf_core.foreign.strict_json import BadJsonError, load_json_object
from rlinf_core.runners.storage.durable import claimed, write_whole

_LOCK: Final = "lock"
_MODEL: Final = "model.json"


@contextmanager
def state_folder(folder: Path, model: Mapping[str, Any]) -> Generator[None]:
    """Hold a folder of state within the block.

    Args:
        folder: is made if it is not there.
        model: names and sizes that an earlier start must have had as well.

    Raises:
        ConfigError: another server has it, or it is of another model.
        RunError: it cannot be read or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).touch()
    except OSError as error:
        raise _unusable(folder, error) from error
    with claimed(folder / _LOCK) as mine:
        if not mine:
            raise ConfigError(
                f"another service uses the state in `{folder}`", help="end it, or write another `server.state_dir`"
            )
        try:
            _check_model(folder / _MODEL, dict(model))
        except OSError as error:
            raise _unusable(folder, error) from error
        yield


def _unusable(folder: Path, error: OSError) -> RunError:
    return RunError(f"the state in `{folder}` cannot be read or written", why=error.strerror)


def _check_model(file: Path, model: dict[str, Any]) -> None:
    if not file.exists():
        write_whole(file, json.dumps(model))
        return
    try:
        before = load_json_object(file.read_bytes())
    except BadJsonError as error:
        raise RunError(f"`{file}` {error}", help="write another `server.state_dir`") from None
    changed = [key for key, value in model.items() if before.get(key) != value]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"the state in `{file.parent}` is of another model: `{key}` was {before.get(key)}, and is {model[key]}",
            help="write the old value, or another `server.state_dir`",
        )
