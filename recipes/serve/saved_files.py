"""The JSON files beside saved weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from recipes.serve.values import AdapterSettings
from rlinf_core.foreign.file_models import FileModel, Moment, Name, read_model

RECORD: Final = "rlinf_saved.json"
ADAPTER: Final = "rlinf_adapter.json"


class SavedRecord(FileModel):
    """The record of saved weights.

    Attributes:
        base_model: name of the model that they belong to.
        expires: when they are removed; None: never.
        seq_id: number of the request that saved them among those of its model.
        user_metadata: what the client wrote down about the run.
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
        OSError: there is none, or it is damaged.
    """
    return read_model(folder / RECORD, SavedRecord)


def read_adapter(folder: Path) -> AdapterSettings:
    """Return the settings of a saved adapter.

    Raises:
        OSError: there are none, or they are damaged.
    """
    return AdapterSettings(**read_model(folder / ADAPTER, _SavedAdapter).model_dump())
