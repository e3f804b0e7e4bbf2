"""The JSON files beside saved weights."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from recipes.serve.values import AdapterSettings
from rlinf_core import ConfigError
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import BadFileError, FileModel, Moment, Name, read_json_object, read_model
from rlinf_core.runners.storage.durable import claimed, write_whole

RECORD: Final = "rlinf_saved.json"
ADAPTER: Final = "rlinf_adapter.json"


class SavedRecord(FileModel):
    """The record of saved weights.

    Attributes:
        base_model: the name of the base model.
        expires: the time of removal; None: never.
        seq_id: the number of the saving request among those of its model.
        user_metadata: the client's metadata of the run.
    """

    base_model: Name
    expires: Moment | None = None
    seq_id: int | None = None
    user_metadata: dict[str, Any] = Field(default_factory=dict)


class _SavedAdapter(FileModel):
    rank: Annotated[int, Field(ge=0, lt=2**31)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


def read_record(folder: Path) -> SavedRecord:
    """Return the record of saved weights.

    Raises:
        OSError: the record does not exist or is damaged.
    """
    return read_model(folder / RECORD, SavedRecord)


def read_adapter(folder: Path) -> AdapterSettings:
    """Return the settings of a saved adapter.

    Raises:
        OSError: the settings do not exist or are damaged.
    """
    return AdapterSettings(**read_model(folder / ADAPTER, _SavedAdapter).model_dump())


_LOCK: Final = "lock"
_MODEL: Final = "model.json"


@contextmanager
def state_folder(folder: Path, model: Mapping[str, Any]) -> Generator[None]:
    """Lock a folder of state within the block.

    Args:
        folder: the folder, created if it does not exist.
        model: settings that must equal those of earlier starts.

    Raises:
        ConfigError: another server uses the folder, or it belongs to another model or an earlier version.
        RunError: the folder cannot be read or written.
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
            _check_version(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
        yield


def _check_version(folder: Path) -> None:
    earlier = next(folder.glob("sessions/*/journal"), None)
    if earlier is not None:
        raise ConfigError(
            f"`{earlier}` is of a session that an earlier version of this service has not ended",
            help=f"start that version and close its clients, or remove `{folder / 'sessions'}`: keys, and weights saved"
            " under a name, stay",
        )


def _unusable(folder: Path, error: OSError) -> RunError:
    return RunError(f"the state in `{folder}` cannot be read or written", why=error.strerror)


def _check_model(file: Path, model: dict[str, Any]) -> None:
    if not file.exists():
        write_whole(file, json.dumps(model))
        return
    try:
        before = read_json_object(file)
    except BadFileError as error:
        raise RunError(f"`{file}` {error.strerror}", help="write another `server.state_dir`") from None
    changed = [key for key, value in model.items() if before.get(key) != value]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"the state in `{file.parent}` is of another model: `{key}` was {before.get(key)}, and is {model[key]}",
            help="write the old value, or another `server.state_dir`",
        )
