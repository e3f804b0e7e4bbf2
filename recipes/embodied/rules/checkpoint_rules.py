"""Checks of the checkpoint in `actor.checkpoint_load_path`, without loading weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Final, cast

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.models.folder_facts import DESCRIPTION, SHARDS, fault_of_fit, fault_of_statistics
from recipes.embodied.rules.env_rules import sizes_of
from recipes.sections.checks import Report
from recipes.sections.model_folders import FolderFault, read_object
from rlinf_core import CheckpointError
from rlinf_core.runners.storage.checkpoint import MANIFEST

# Of torch.distributed.checkpoint: which tensor is in which file.
_INDEX: Final = ".metadata"


def check_load_path(config: EmbodiedConfig, environments: EnvironmentConfig | None, report: Report) -> None:
    """Report an initial checkpoint that is missing, incomplete, or of another policy.

    Args:
        config: the whole file.
        environments: those that the policy acts in; None: none.
        report: where findings go.
    """
    name = config.actor.checkpoint_load_path
    if name is None:
        return
    folder, at = FilePath(name), ("actor", "checkpoint_load_path")
    fault = _fault_of_checkpoint(folder) or fault_of_statistics(folder)
    if fault is not None:
        report(at, "unusable-path", *fault)
        return
    about = [("actor", "model", key) for key in ("model_type", "num_action_chunks", "hidden_dim")]
    about += [("env", section, key) for section in ("train", "eval") for key in ("env_type", "task")]
    known = environments if os.path.isfile(folder / DESCRIPTION) else None
    spec = None if known is None else sizes_of(config, known).spec
    fault = fault_of_fit(folder, config.actor.model, spec)
    if fault is not None:
        report(at, "conflicting-settings", f"{fault.message}: `{folder}`", fault.help, about=about)


def check_given(config: EmbodiedConfig, environments: EnvironmentConfig, folder: FilePath) -> None:
    """Check that the policy of a checkpoint is that of the file, before anything starts.

    Args:
        config: the whole file.
        environments: those that the policy acts in.
        folder: a `global_step_N` folder.

    Raises:
        CheckpointError: its statistics are missing, or it is of another policy, or of other observations or actions.
    """
    fault = fault_of_statistics(folder)
    fault = fault or fault_of_fit(folder, config.actor.model, sizes_of(config, environments).spec)
    if fault is not None:
        raise CheckpointError(fault.message, where=str(folder), help=fault.help)


def _fault_of_checkpoint(folder: FilePath) -> FolderFault | None:
    """Return what a checkpoint lacks of its actor's weights."""
    if not os.path.isdir(folder / SHARDS):
        return FolderFault(
            f"`{folder}` is not a checkpoint of this recipe: it has no folder `{SHARDS}`",
            "name a `global_step_N` folder in the `checkpoints` of a run",
        )
    copy = "copy the complete checkpoint folder, or name another one"
    sizes = cast("Mapping[str, int]", read_object(folder / MANIFEST).get("files", {}))
    kept = {name: size for name, size in sizes.items() if name.startswith(f"{SHARDS}/")}
    for name in kept or (f"{SHARDS}/{_INDEX}",):
        num_bytes = os.path.getsize(folder / name) if os.path.isfile(folder / name) else None
        if num_bytes is None:
            return FolderFault(f"the checkpoint `{folder}` is incomplete: it lacks `{name}`", copy)
        if num_bytes != kept.get(name, num_bytes) or not num_bytes:
            written = f", of {kept[name]} written" if name in kept else ""
            return FolderFault(
                f"the checkpoint `{folder}` is incomplete: `{name}` has {num_bytes} bytes{written}", copy
            )
    return None
