"""Folders of models as HuggingFace writes them: what can be told of them without loading anything."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from rlinf_core import ConfigError

SETTINGS = "config.json"


class FolderFault(NamedTuple):
    """A fault of a folder.

    Attributes:
        message, help: what is wrong, and what to do.
    """

    message: str
    help: str


def fault_of_model(folder: Path) -> FolderFault | None:
    """Return what the folder of a model lacks: its settings, or weights, some or all of them."""
    if not read_object(folder / SETTINGS):
        return FolderFault(f"`{folder}` has no {SETTINGS} that can be read", "copy the whole folder of the model")
    named = read_object(folder / "model.safetensors.index.json").get("weight_map", {})
    shards = set(cast("Mapping[str, str]", named).values())
    missing = sorted(each for each in shards if not os.path.isfile(folder / each))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return FolderFault(f"`{folder}` lacks `{missing[0]}`{others}", "copy all files of the weights there")
    if not any(folder.glob("*.safetensors")):
        return FolderFault(
            f"the model folder `{folder}` has no weights: there is no *.safetensors file in it",
            "copy the weights there; files that have to be unpickled (*.bin) are not read",
        )
    return None


def read_object(file: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; an empty one where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def require_folder(folder: Path | str, kind: str) -> None:
    """Check that `model_path` of the actor is there.

    Args:
        folder: what it names.
        kind: what should be there, as in `the folder of a model`.

    Raises:
        ConfigError: it is not.
    """
    if not os.path.isdir(folder):
        raise ConfigError(
            f"the model folder `{folder}` is not there",
            help=f"`actor.model.model_path` names {kind}; nothing is downloaded",
        )
