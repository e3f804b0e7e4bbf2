"""Checks of HuggingFace model folders that load no weights."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_core import ConfigError
from rlinf_core.config.sections.values import ensure_here
from rlinf_core.foreign.files import BadFileError, open_regular, read_bounded
from rlinf_core.foreign.strict_json import BadJsonError, load_json, load_json_object
from rlinf_core.suggest import excerpt

SETTINGS = "config.json"
# The names of files of a component's weights in a checkpoint, as torch.distributed.checkpoint writes them.
SHARDS: Final = "shard-*.safetensors"
CONVERT: Final = "convert its run once: `rlinf runs convert RUN`"
GENERATION = "generation_config.json"
ADAPTED: Final = "adapter_config.json"
# The largest header that safetensors itself accepts, in bytes.
_MOST_HEADER: Final = 100_000_000
# Bytes of an element by type. Types that are not listed pack several elements into a byte.
_ITEMS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


class FolderFault(NamedTuple):
    """A fault of a folder.

    Attributes:
        message, help: the fault and its remedy.
    """

    message: str
    help: str


def is_earlier(name: str) -> bool:
    """Return whether a file of a checkpoint holds weights that an earlier rlinf pickled."""
    return name.endswith(".distcp")


def fault_of_adapter(folder: Path) -> FolderFault | None:
    """Return a fault if a model folder has an adapter of peft.

    transformers would load the adapter and the model that it names, whatever weights the folder itself has.
    """
    if not os.path.lexists(folder / ADAPTED):
        return None
    return FolderFault(
        f"`{folder}` has an adapter of peft, `{ADAPTED}`, which is not read as a model",
        "merge it by peft's `merge_and_unload()` and `save_pretrained` into another folder; if the folder has a"
        f" complete model besides, remove `{ADAPTED}`",
    )


def fault_of_model(folder: Path) -> FolderFault | None:
    """Return the reason why a model folder is incomplete, with missing settings or weights, or ambiguous."""
    adapter = fault_of_adapter(folder)
    if adapter is not None:
        return adapter
    if not read_object(folder / SETTINGS):
        return FolderFault(f"`{folder}` has no {SETTINGS} that can be read", "copy the complete model folder")
    index = folder / "model.safetensors.index.json"
    # transformers prefers the single file, beside which its `save_pretrained` leaves the index of earlier shards.
    has_shards = os.path.lexists(index) and not os.path.lexists(folder / "model.safetensors")
    shards = weight_files(read_object(index)) if has_shards else set[str]()
    if shards is None:
        return FolderFault(f"`{index}` has no `weight_map` of tensors to files beside it", "copy the file again")
    missing = sorted(shard for shard in shards if not os.path.isfile(folder / shard))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return FolderFault(f"`{folder}` lacks `{missing[0]}`{others}", "copy all files of the weights there")
    files = sorted(folder / shard for shard in shards) or sorted(folder.glob("*.safetensors"))
    if not files:
        return FolderFault(
            f"the model folder `{folder}` has no weights: there is no *.safetensors file in it",
            "copy the weights there; pickled files (*.bin) are not read",
        )
    return next((fault for fault in map(fault_of_weights, files) if fault is not None), None)


def weight_files(index: Mapping[str, Any]) -> set[str] | None:
    """Return the file names in an index of weights; None if it has none, or one that leads out of the folder."""
    named = index.get("weight_map")
    names = list(cast("dict[str, Any]", named).values()) if isinstance(named, dict) else []
    if not names or not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        return None
    return set(names)


def fault_of_weights(file: Path) -> FolderFault | None:
    """Return the reason why a file is not a complete safetensors file, judged by its header; no tensor is read."""
    copy = "copy the file again"
    try:
        header = weights_header(file)
        last = 0
        for name, tensor in header.tensors.items():
            first, end = (int(offset) for offset in tensor["data_offsets"])
            item, shape = _ITEMS.get(tensor["dtype"]), tensor["shape"]
            if item is not None and math.prod(map(int, shape)) * item != end - first:
                message = f"`{file}` claims that `{excerpt(name, 60)}` of shape {excerpt(str(shape), 60)} has"
                return FolderFault(f"{message} {end - first} bytes", copy)
            last = max(last, end)
    except OSError as error:
        return FolderFault(f"the weights `{file}` cannot be read: {error.strerror}", copy)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return FolderFault(f"`{file}` is not a safetensors file, or is truncated", copy)
    whole = header.begin + last
    if whole != header.size:
        return FolderFault(f"the weights `{file}` are {header.size} bytes long; their header says {whole}", copy)
    return None


def weight_names(folder: Path) -> set[str]:
    """Return the names of all tensors in the safetensors files of a folder that `fault_of_model` accepts."""
    return {name for file in sorted(folder.glob("*.safetensors")) for name in weights_header(file).tensors}


class WeightsHeader(NamedTuple):
    """The header of a safetensors file.

    Attributes:
        tensors: the entry of each tensor, by name.
        about: the metadata.
        begin: the offset of the first tensor, in bytes.
        size: the size of the file, in bytes.
    """

    tensors: dict[str, Any]
    about: Any
    begin: int
    size: int


def weights_header(file: Path) -> WeightsHeader:
    """Return the header of a safetensors file.

    Raises:
        OSError: the file cannot be read, or is empty.
        ValueError: it is not a safetensors file, or is truncated.
    """
    with open_regular(file) as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        if not size:
            raise BadFileError(file, "it is empty")
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size - 8, _MOST_HEADER):
            raise ValueError("its header is longer than the file")
        header = load_json_object(opened.read(length))
    about = header.pop("__metadata__", {})
    return WeightsHeader(header, about, 8 + length, size)


def read_object(file: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty if the file has none."""
    try:
        content = load_json(read_bounded(file), non_finite=True)
    except (OSError, ValueError):
        return {}
    return cast("Mapping[str, Any]", content) if isinstance(content, dict) else {}


def read_settings(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model's folder.

    Raises:
        ConfigError: the file cannot be read as a JSON object.
    """
    try:
        return load_json_object(read_bounded(file), non_finite=True)
    except OSError as error:
        why = error.strerror or str(error)
    except BadJsonError as error:
        why = f"it {error}"
    raise ConfigError(f"`{file}` cannot be read", why=why, help="copy the file again from its source")


def whole_number(settings: Mapping[str, Any], name: str, most: int) -> int:
    """Return the setting `name`, which must be an integer from 1 to `most`.

    Raises:
        KeyError: the setting does not exist.
        ValueError: it is not such an integer.
    """
    number = settings[name]
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise ValueError(f"`{name}` is `{excerpt(repr(number), 40)}`, expected a whole number from 1 to {most}")
    return number


def named_stops(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a completion, according to `generation_config.json` in a model's folder.

    Raises:
        ConfigError: an entry is not a token, so that no text would ever end by it.
    """
    file = folder / GENERATION
    named = read_settings(file).get("eos_token_id") if file.is_file() else None
    listed = cast("list[object]", named) if isinstance(named, list) else [] if named is None else [named]
    for stop in listed:
        if isinstance(stop, bool) or not isinstance(stop, int) or stop < 0:
            raise ConfigError(
                f"`eos_token_id` of `{file}` is `{excerpt(repr(stop), 40)}`",
                why="it should be the number of a token, or a list of them",
                help="copy the file again from its source",
            )
    return tuple(cast("list[int]", listed))


def require_folder(folder: Path | str, kind: str) -> None:
    """Check that `model_path` of the actor exists.

    Args:
        folder: the value of `model_path`.
        kind: the expected content, as in `the folder of a model`.

    Raises:
        ConfigError: the folder does not exist.
    """
    ensure_here(folder)
    if not os.path.isdir(folder):
        raise ConfigError(
            f"the model folder `{folder}` does not exist",
            help=f"`actor.model.model_path` names {kind}, or a model of the HuggingFace Hub, `ORG/NAME`",
        )
