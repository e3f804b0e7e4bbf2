"""Rules about the checkpoint in `actor.checkpoint_load_path`: what can be told of it without loading weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Final, cast

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.env_config import EnvironmentConfig
from recipes.embodied.env_rules import sizes_of
from recipes.embodied.model_folders import DESCRIPTION, SHARDS, fault_of_statistics
from recipes.sections.checks import Report
from recipes.sections.model_folders import FolderFault, read_object
from rlinf_core.config.tree import Path
from rlinf_core.runners.checkpoint import MANIFEST

# Of torch.distributed.checkpoint: which tensor is in which file.
_INDEX: Final = ".metadata"


def check_load_path(config: EmbodiedConfig, environments: EnvironmentConfig | None, report: Report) -> None:
    """Report a checkpoint to start from that is not there, is not whole, or is of another policy.

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
    saved = read_object(folder / DESCRIPTION)
    _check_settings(config, _part(saved, "model"), at, report)
    if environments is not None and saved:
        _check_sizes(config, environments, _part(saved, "observations_and_actions"), at, report)


def _fault_of_checkpoint(folder: FilePath) -> FolderFault | None:
    """Return what a checkpoint lacks of its actor's weights."""
    if not os.path.isdir(folder / SHARDS):
        return FolderFault(
            f"`{folder}` is no checkpoint of this recipe: it has no folder `{SHARDS}`",
            "name a `global_step_N` folder in the `checkpoints` of a run",
        )
    copy = "copy the whole folder of the checkpoint, or name another one"
    sizes = cast("Mapping[str, int]", read_object(folder / MANIFEST).get("files", {}))
    kept = {name: size for name, size in sizes.items() if name.startswith(f"{SHARDS}/")}
    for name in kept or (f"{SHARDS}/{_INDEX}",):
        found = os.path.getsize(folder / name) if os.path.isfile(folder / name) else None
        if found is None:
            return FolderFault(f"the checkpoint `{folder}` is not whole: it lacks `{name}`", copy)
        if found != kept.get(name, found) or not found:
            written = f", and {kept[name]} were written" if name in kept else ""
            return FolderFault(f"the checkpoint `{folder}` is not whole: `{name}` has {found} bytes{written}", copy)
    return None


def _part(saved: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = saved.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _check_settings(config: EmbodiedConfig, theirs: Mapping[str, Any], at: Path, report: Report) -> None:
    """Report settings of `actor.model` that the checkpoint's weights have others of."""
    model = config.actor.model
    # The width of a model that is loaded is its folder's.
    names = ("model_type", "num_action_chunks", *(("hidden_dim",) if model.model_path is None else ()))
    for name in names:
        mine = getattr(model, name)
        if name in theirs and theirs[name] != mine:
            report(
                at,
                "conflicting-settings",
                f"the checkpoint's policy has `{name}: {theirs[name]}`, and `actor.model.{name}` is {mine}:"
                f" `{config.actor.checkpoint_load_path}`",
                f"write `actor.model.{name}: {theirs[name]}`, or name another checkpoint",
                about=[("actor", "model", name)],
            )
            return


def _check_sizes(
    config: EmbodiedConfig, environments: EnvironmentConfig, theirs: Mapping[str, Any], at: Path, report: Report
) -> None:
    """Report sizes of observations and actions that the checkpoint's policy was trained with others of."""
    spec = sizes_of(config, environments).spec
    for name, what in (("action_size", "numbers in an action"), ("state_size", "numbers in a state")):
        found, needed = theirs.get(name), getattr(spec, name, 0)
        if needed and found is not None and found != needed:
            report(
                at,
                "conflicting-settings",
                f"the checkpoint's policy has {found} {what}, and `env_type: {environments.env_type}` has {needed}:"
                f" `{config.actor.checkpoint_load_path}`",
                "name a checkpoint of this environment, or the environment of the checkpoint",
                about=[("env", section, key) for section in ("train", "eval") for key in ("env_type", "task")],
            )
            return
