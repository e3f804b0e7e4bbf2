"""The files with rows in a data set of the HuggingFace Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rlinf_core.config.sections.hub_names import HubPath
from rlinf_core.scalars import problem

# Parts by the words in names of files, in the order of preference.
TRAINING: Final = ("train",)
EVALUATION: Final = ("test", "valid", "val", "dev", "eval")
# Forms of files with rows, of which a data set is read in the first that it has.
_FORMS: Final = ("**/*.parquet", "**/*.jsonl*", "**/*.json")
_DESCRIPTIONS: Final = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_NAMED_FOLDERS: Final = 4


def files_of_part(paths: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """Return paths with each folder of a data set of the hub replaced by its files of one part.

    Args:
        paths: what a key names.
        words: `TRAINING` or `EVALUATION`.

    Raises:
        PydanticCustomError: `bad-value`: it has no such files, or has them in several folders.
    """
    return tuple(file for path in paths for file in _files(path, words))


def _files(path: str, words: tuple[str, ...]) -> list[str]:
    if not isinstance(path, HubPath) or not os.path.isdir(path):
        return [path]
    root = Path(path)
    listed: list[str] = []
    for form in _FORMS:
        rows = [file for file in sorted(root.glob(form)) if file.name not in _DESCRIPTIONS]
        listed = listed or [file.relative_to(root).as_posix() for file in rows]
    first = next((word for word in words if any(word in name.lower() for name in listed)), None)
    chosen = [name for name in listed if first is not None and first in name.lower()]
    parts = any(word in name.lower() for name in listed for word in (*TRAINING, *EVALUATION))
    if not chosen and not parts and words == TRAINING:
        chosen = listed
    if not chosen:
        raise problem(
            "bad-value",
            f"`{path.written}` has no files of rows for {words[0]}: no Parquet or JSON file with one of the words"
            f" {', '.join(words)} in its name",
            help="name a file of it, as in `hf://datasets/ORG/NAME/FILE`",
        )
    folders = sorted({name.rpartition("/")[0] for name in chosen})
    if len(folders) > 1:
        shown = ", ".join(f"`{folder or '.'}`" for folder in folders[:_NAMED_FOLDERS])
        raise problem(
            "bad-value",
            f"`{path.written}` has rows for {words[0]} in {len(folders)} folders: {shown}",
            help=f"name one, as in `hf://datasets/{path.name}/{folders[0] or folders[1]}`",
        )
    inner = f"{path.inner}/" if path.inner else ""
    revision = path.commit or path.revision
    return [HubPath(path.written, path.kind, path.name, revision, inner + name) for name in chosen]
