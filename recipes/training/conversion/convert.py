"""Conversion of checkpoints of an earlier rlinf: `rlinf runs convert` calls `convert_checkpoint`."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

import torch
from torch import Tensor

from recipes.training.conversion.archives import load_archive
from recipes.training.conversion.earlier import INDEX, EarlierWeights
from recipes.training.state.shard_files import about_shards, shard_name
from recipes.training.state.state_checkpoint import VERSION
from recipes.training.tensor_files import Described, TensorFile, write_tensors
from rlinf_core import CheckpointError
from rlinf_core.foreign.files import check_regular, write_fault
from rlinf_core.runners.storage.checkpoint import load_manifest

# Files of tensors in containers, by name: the state of off-policy learning, and answers.
_ARCHIVES: Final = frozenset({"off_policy.pt", "buffered.pt", "unfinished.pt"})
_OPTIMIZER_SETTINGS: Final = "param_groups"


def convert_checkpoint(checkpoint: Path, into: Path) -> bool:
    """Write the files of a checkpoint into an empty folder: those of an earlier rlinf converted, others as they are.

    Args:
        checkpoint: a folder `global_step_N`, undamaged.
        into: the folder to write, on the same disk: large files are not copied there.

    Returns:
        Whether any was of an earlier rlinf; if not, nothing was written.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    names = [PurePosixPath(name) for name in load_manifest(checkpoint).files]
    targets = _targets(names)
    if all(name == target for name, target in targets.items()):
        return False
    name = PurePosixPath()
    try:
        _check_single(targets.values())
        for name, target in targets.items():
            (into / target.parent).mkdir(parents=True, exist_ok=True)
            if name == target:
                _link(checkpoint, name, into)
            elif name.name == INDEX:
                _convert_weights(checkpoint / name.parent, into / target)
            else:
                write_tensors(into / target, _tensors_of(checkpoint / name))
    except (OSError, ValueError) as error:
        why = write_fault(into, error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            "the checkpoint cannot be converted",
            where=str(checkpoint / name),
            why=why,
            help="free disk space, or copy the checkpoint again from its source; it is as it was",
        ) from error
    return True


def _targets(names: Iterable[PurePosixPath]) -> dict[PurePosixPath, PurePosixPath]:
    """Return which file each file becomes; that of an index becomes all of its folder."""
    components = {name.parent for name in names if name.name == INDEX}
    targets: dict[PurePosixPath, PurePosixPath] = {}
    for name in names:
        if name.name == INDEX:
            targets[name] = name.with_name(shard_name(1))
        elif name.name in _ARCHIVES:
            targets[name] = name.with_suffix(".safetensors")
        elif name.parent not in components:
            targets[name] = name
    return targets


def _check_single(targets: Iterable[PurePosixPath]) -> None:
    twice = [str(target) for target, count in Counter(targets).items() if count > 1]
    if twice:
        raise ValueError(f"two of its files would become `{twice[0]}`")


def _convert_weights(folder: Path, file: Path) -> None:
    """Write weights and what the optimizer keeps of each as one shard. Settings of the optimizer are the file's."""
    weights = EarlierWeights(folder)
    described = {**weights.tensors, VERSION: Described(torch.int64, ())}
    about = about_shards({name: (0,) * len(tensor.shape) for name, tensor in described.items()}, files=1)
    with TensorFile(file, described, about) as opened:
        for name in weights.tensors:
            opened.write(name, weights.tensor(name))
        opened.write(VERSION, torch.tensor(weights.number(VERSION)))


def _tensors_of(archive: Path) -> dict[str, Tensor]:
    """Return the tensors and whole numbers in a file of `torch.save`, by their path."""
    tensors: dict[str, Tensor] = {}
    left = archive.stat().st_size
    for path, tensor in _tensors(load_archive(archive)):
        if path in tensors:
            raise ValueError(f"it has two values `{path}`")
        # A few bytes refer to a tensor once more. Numbers have no storage there.
        left -= tensor.nbytes if tensor.dim() else 0
        if left < 0:
            raise ValueError(f"its tensors up to `{path}` are larger than the file")
        tensors[path] = tensor
    return tensors


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and whole numbers in mappings, by their path."""
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if key != _OPTIMIZER_SETTINGS:
                yield from _tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Tensor):
        yield path, value
    elif type(value) is int:
        yield path, torch.tensor(value)
    else:
        raise ValueError(f"`{path}` is neither a tensor nor a whole number")


def _link(checkpoint: Path, name: PurePosixPath, into: Path) -> None:
    """Give a file of a checkpoint another name in `into`.

    Raises:
        OSError: it is not a regular file.
        ValueError: it is a link to a file outside of the checkpoint.
    """
    file = Path(os.path.realpath(checkpoint / name))
    if not file.is_relative_to(os.path.realpath(checkpoint)):
        raise ValueError("it is a link to a file outside of the checkpoint: put a copy of that file in its place")
    check_regular(file)
    try:
        os.link(file, into / name)
    except OSError:
        # Some file systems have no links.
        shutil.copy2(file, into / name)
