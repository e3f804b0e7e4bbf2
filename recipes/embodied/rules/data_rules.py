"""Rules of `data`: checks of demonstrations that read no rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final, cast

from recipes.demonstrations.columns import DatasetError, DatasetShape, check_alike
from recipes.demonstrations.lerobot.episode_list import read_episodes
from recipes.demonstrations.lerobot.set_files import check_files, check_hdf5
from recipes.demonstrations.lerobot.set_info import HDF5_ENDINGS, STATISTICS, DatasetInfo, read_info
from recipes.embodied.config import EmbodiedConfig, PolicyJob
from recipes.embodied.config.algorithm_config import is_off_policy
from recipes.embodied.config.data_config import DataSource
from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.learning.data_fit import check_fits
from recipes.embodied.models.folder_facts import DESCRIPTION, SHARDS, fault_of_fit, fault_of_statistics
from recipes.embodied.rules.env_rules import sizes_of
from recipes.sections.checks import Report
from recipes.sections.model_folders import CONVERT, FolderFault, is_earlier, read_object
from recipes.sections.model_folders import SHARDS as WEIGHTS
from rlinf_core import CheckpointError
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.runners.storage.checkpoint import MANIFEST

if TYPE_CHECKING:
    from recipes.demonstrations.demonstrations import Demonstrations

_PATHS: Path = ("data", "train_data_paths")
# Rows of larger data sets are checked only when the run starts.
_LOOKED_INTO_NUMBERS: Final = 50_000_000
# Data sets use 29.97 and 30 interchangeably.
_RATE_ROUNDING: Final = 0.002


def check_data(config: PolicyJob, environments: EnvironmentConfig | None, report: Report) -> None:
    """Report data sets that do not exist or are damaged, that differ from each other or do not fit the environments.

    Args:
        config: the configuration of the job.
        environments: the environments that a policy of the data acts in; None: no environments.
        report: takes findings.
    """
    paths = config.data.paths
    shapes: list[tuple[Path, DatasetShape]] = []
    whole: dict[Path, Demonstrations] = {}
    for index, source in enumerate(config.data.sources):
        at = (*_PATHS, index) if len(paths) > 1 else _PATHS
        try:
            shape = _hdf5(source, config, at, report) if source.path.endswith(HDF5_ENDINGS) else None
            if not source.path.endswith(HDF5_ENDINGS):
                info = _lerobot(source, at, report)
                shape = info.shape(source.path, config.data.state_columns, config.data.role_columns)
            if shape is None:
                continue
            shapes.append((at, shape))
            data = _rows(source, config, shape, report, at)
            if data is not None:
                whole[at] = data
        except DatasetError as error:
            report(at, "unusable-path", _message(error), error.help or "")
    if not shapes:
        return
    try:
        _reading().check_sources(config.data)
    except DatasetError as error:
        report(_PATHS, "conflicting-settings", error.message, error.help or "")
    for at, shape in shapes[1:]:
        try:
            check_alike(shapes[0][1], shape)
        except DatasetError as error:
            report(at, "dataset-mismatch", _message(error), error.help or "")
    if shapes and environments is not None:
        _check_environment(config, environments, *shapes[0], whole, report)
    if whole:
        _check_content(config, next(iter(whole)), list(whole.values()), report)


def _reading() -> Any:
    """Import the module that reads rows only here: it needs numpy, which files without data sets do not."""
    from recipes.embodied.learning import data_reading

    return data_reading


def _hdf5(source: DataSource, config: PolicyJob, at: Path, report: Report) -> DatasetShape | None:
    """Return the sizes of an HDF5 file; None if it does not exist, or cannot be read by this Python."""
    if not os.path.isfile(source.path):
        report(at, "unusable-path", f"the file `{source.path}` does not exist", "name an HDF5 file of demonstrations")
        return None
    check_hdf5(FilePath(source.path))
    if not _check_packages(source.path, ["h5py"], at, report):
        return None
    return _reading().read_source(config.data, source, pictures=False).shape


def _rows(
    source: DataSource, config: PolicyJob, shape: DatasetShape, report: Report, at: Path
) -> Demonstrations | None:
    """Return the numbers of all rows, checked against their description; None if there are too many."""
    if not source.path.endswith(HDF5_ENDINGS):
        info = read_info(FilePath(source.path))
        numbers = info.total_frames * (shape.action_size + shape.state_size)
        if missing_modules(["pyarrow"]):
            return None
        if numbers > _LOOKED_INTO_NUMBERS:
            message = f"`{source.path}` has {info.total_frames} rows: they are checked when the run starts"
            report(at, "unusable-path", message, severity=Severity.NOTE)
            return None
    data = _reading().read_source(config.data, source, pictures=False)
    for note in data.notes:
        report(at, "dataset-mismatch", f"{note}: `{source.path}`", severity=Severity.NOTE)
    return data


def _check_content(config: PolicyJob, at: Path, parts: list[Demonstrations], report: Report) -> None:
    """Report columns that the learning target needs and no data set has."""
    if config.data.only_interventions and all(part.interventions is None for part in parts):
        error = _reading().without_interventions(parts[0])
        about = [("data", "only_interventions")]
        report(at, "dataset-mismatch", _message(error), error.help or "", about=about)
    if not isinstance(config, EmbodiedConfig) or not is_off_policy(config.algorithm.loss_type):
        return
    if any(source.weight is not None for source in config.data.sources):
        error = _reading().weights_of_replay(parts[0])
        report(_PATHS, "conflicting-settings", error.message, error.help or "", about=[("algorithm", "loss_type")])
    for part in parts:
        if part.rewards is None or part.ends is None:
            error = _reading().without_rewards(part)
            report(at, "dataset-mismatch", _message(error), error.help or "", about=[("algorithm", "loss_type")])
            return
        for assumed in _reading().assumed_ends(part):
            about = [("algorithm", "loss_type")]
            report(at, "dataset-mismatch", f"{assumed}: `{part.where}`", about=about, severity=Severity.WARNING)


def _lerobot(source: DataSource, at: Path, report: Report) -> DatasetInfo:
    """Return the description of a data set's folder, after a check of its files."""
    path, folder = source.path, FilePath(source.path)
    info = read_info(folder)
    check_files(folder, info)
    if not os.path.isfile(folder / STATISTICS) and not info.is_listed:
        message = f"the data set has no `{STATISTICS}`: statistics are computed from its rows"
        report(at, "unusable-path", message, severity=Severity.NOTE)
    dtypes = {feature.dtype for feature in info.features.values()}
    needs = ["pyarrow", *(["av"] if "video" in dtypes else []), *(["PIL"] if "image" in dtypes else [])]
    if _check_packages(path, needs, at, report) and "video" in dtypes:
        from recipes.demonstrations.lerobot.lerobot_set import check_videos  # it needs numpy

        try:
            check_videos(folder, info, read_episodes(folder, info))
        except DatasetError as error:
            # The damaged episodes may be excluded ones.
            severity = Severity.WARNING if source.episodes else Severity.ERROR
            report(at, "unusable-path", _message(error), error.help or "", severity=severity)
    return info


def _check_packages(path: str, modules: list[str], at: Path, report: Report) -> bool:
    """Report a package that reading a data set needs and that is missing; return whether all are installed."""
    missing = missing_modules(modules)
    if missing:
        needs = f"`{path}` needs the package `{missing[0]}`, {absence(missing[0])}"
        report(at, "missing-extra", needs, f"run `{install_command(*missing)}`")
    return not missing


def _check_environment(
    config: PolicyJob,
    environments: EnvironmentConfig,
    at: Path,
    shape: DatasetShape,
    whole: Mapping[Path, Demonstrations],
    report: Report,
) -> None:
    """Report rows that do not fit the environment, or a rate other than that of its actions."""
    facts = sizes_of(config, environments)
    about = [("env", name, key) for name in ("train", "eval") for key in ("env_type", "task", "options")]
    if facts.spec is not None:
        try:
            check_fits(shape, facts.spec, config.data.cameras)
            for data in whole.values():
                if data.actions.shape[1] != facts.spec.action_size:
                    continue  # reported as a difference between the data sets
                _reading().check_range(data, facts.spec)
        except DatasetError as error:
            kind = f"`env_type: {environments.env_type}`"
            report(at, "dataset-mismatch", f"{_message(error)}; {kind}", error.help or "", about=about)
    if facts.control_hz and shape.fps and abs(facts.control_hz - shape.fps) > _RATE_ROUNDING * shape.fps:
        report(
            at,
            "dataset-mismatch",
            f"the data set has {shape.fps:g} rows per second (fps), but `env_type: {environments.env_type}` takes"
            f" {facts.control_hz:g} actions per second: `{shape.where}`",
            "an action would last longer or shorter than when recorded; use data of that rate, or correct `fps` in"
            " `meta/info.json` if it is wrong",
            about=about,
            severity=Severity.WARNING,
        )


def _message(error: DatasetError) -> str:
    """Return the error, its location and its reason in one line."""
    return f"{error.message}: `{error.where}`" + (f", {error.why}" if error.why else "")


def check_load_path(config: PolicyJob, environments: EnvironmentConfig | None, report: Report) -> None:
    """Report an initial checkpoint that is missing, incomplete, or of another policy.

    Args:
        config: the configuration of the job.
        environments: the environments that the policy acts in; None: no environments.
        report: takes findings.
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


def check_given(config: PolicyJob, environments: EnvironmentConfig, folder: FilePath) -> None:
    """Check, before anything starts, that the policy of a checkpoint is the file's.

    Args:
        config: the configuration of the job.
        environments: the environments that the policy acts in.
        folder: a `global_step_N` folder.

    Raises:
        CheckpointError: its statistics are missing, or its policy, observations or actions differ.
    """
    fault = fault_of_statistics(folder)
    fault = fault or fault_of_fit(folder, config.actor.model, sizes_of(config, environments).spec)
    if fault is not None:
        raise CheckpointError(fault.message, where=str(folder), help=fault.help)


def _fault_of_checkpoint(folder: FilePath) -> FolderFault | None:
    """Return the fault if a checkpoint lacks weights of its actor."""
    if not os.path.isdir(folder / SHARDS):
        why = f"it has no folder `{SHARDS}`" if os.path.isdir(folder) else "it is not a folder"
        return FolderFault(
            f"`{folder}` is not a checkpoint of this recipe: {why}",
            "name a `global_step_N` folder in the `checkpoints` of a run",
        )
    copy = "copy the complete checkpoint folder, or name another one"
    sizes = cast("Mapping[str, int]", read_object(folder / MANIFEST).get("files", {}))
    kept = {name: size for name, size in sizes.items() if name.startswith(f"{SHARDS}/")}
    if any(map(is_earlier, kept or os.listdir(folder / SHARDS))):
        return FolderFault(f"the checkpoint `{folder}` was written by an earlier rlinf", CONVERT)
    there = [f"{SHARDS}/{path.name}" for path in (folder / SHARDS).glob(WEIGHTS)]
    for name in kept or there or [f"{SHARDS}/{WEIGHTS}"]:
        num_bytes = os.path.getsize(folder / name) if os.path.isfile(folder / name) else None
        if num_bytes is None:
            return FolderFault(f"the checkpoint `{folder}` is incomplete: it lacks `{name}`", copy)
        if num_bytes != kept.get(name, num_bytes) or not num_bytes:
            written = f", of {kept[name]} written" if name in kept else ""
            return FolderFault(
                f"the checkpoint `{folder}` is incomplete: `{name}` has {num_bytes} bytes{written}", copy
            )
    return None
