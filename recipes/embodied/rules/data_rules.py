"""Rules of `data`: what can be told of demonstrations without reading their rows."""

from __future__ import annotations

import os
from pathlib import Path as FilePath

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.set_files import check_files, check_hdf5, videos
from recipes.demonstrations.set_info import HDF5_ENDINGS, STATISTICS, DatasetInfo, read_info
from recipes.demonstrations.shape import DatasetShape, check_alike
from recipes.demonstrations.video_faults import check_videos
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.learning.data_fit import check_fits
from recipes.embodied.rules.env_rules import sizes_of
from recipes.sections.checks import Report
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.tree import Path
from rlinf_core.process.requirements import install_command, missing_modules

_PATHS: Path = ("data", "train_data_paths")


def check_data(config: EmbodiedConfig, environments: EnvironmentConfig | None, report: Report) -> None:
    """Report data sets that are not there or are damaged, that differ from each other or do not fit the environments.

    Args:
        config: the whole file.
        environments: those that a policy of the data acts in; None: none.
        report: where findings go.
    """
    paths = config.data.train_data_paths
    shapes: list[tuple[Path, DatasetShape]] = []
    for index, path in enumerate(paths):
        at = (*_PATHS, index) if len(paths) > 1 else _PATHS
        try:
            if path.endswith(HDF5_ENDINGS):
                _check_hdf5(path, at, report)
            else:
                info = _lerobot(path, config, at, report)
                shapes.append((at, info.shape(path, config.data.state_keys)))
        except DatasetError as error:
            report(at, "unusable-path", _told(error), error.help or "")
    for at, shape in shapes[1:]:
        try:
            check_alike(shapes[0][1], shape)
        except DatasetError as error:
            report(at, "dataset-mismatch", _told(error), error.help or "")
    if shapes and environments is not None:
        _check_environment(config, environments, *shapes[0], report)


def _check_hdf5(path: str, at: Path, report: Report) -> None:
    if not os.path.isfile(path):
        report(at, "unusable-path", f"there is no file `{path}`", "name an HDF5 file of demonstrations")
        return
    check_hdf5(FilePath(path))
    _check_packages(path, ["h5py"], at, report)


def _lerobot(path: str, config: EmbodiedConfig, at: Path, report: Report) -> DatasetInfo:
    """Return what a folder says of itself, after a look at its files."""
    folder = FilePath(path)
    info = read_info(folder)
    check_files(folder, info)
    if not os.path.isfile(folder / STATISTICS):
        message = f"the data set has no `{STATISTICS}`: statistics are computed from its rows"
        report(at, "unusable-path", message, severity=Severity.NOTE)
    dtypes = {each.dtype for each in info.features.values()}
    needs = ["pyarrow", *(["av"] if "video" in dtypes else []), *(["PIL"] if "image" in dtypes else [])]
    if _check_packages(path, needs, at, report):
        try:
            for name, files in videos(folder, info).items():
                check_videos(files, name, info)
        except DatasetError as error:
            # The damaged episodes may be those that are left out.
            severity = Severity.WARNING if config.data.episodes else Severity.ERROR
            report(at, "unusable-path", _told(error), error.help or "", severity=severity)
    return info


def _check_packages(path: str, modules: list[str], at: Path, report: Report) -> bool:
    """Report a package that reading a data set needs and that is missing; return whether all are there."""
    missing = missing_modules(modules)
    if missing:
        needs = f"`{path}` needs the package `{missing[0]}`, which this Python does not have"
        report(at, "missing-extra", needs, f"run `{install_command(*missing)}`")
    return not missing


def _check_environment(
    config: EmbodiedConfig, environments: EnvironmentConfig, at: Path, shape: DatasetShape, report: Report
) -> None:
    """Report rows that are not what the environments show and take, and another rate than that of their actions."""
    facts = sizes_of(config, environments)
    about = [("env", name, key) for name in ("train", "eval") for key in ("env_type", "task", "options")]
    if facts.spec is not None:
        try:
            check_fits(shape, facts.spec, config.data.cameras)
        except DatasetError as error:
            kind = f"`env_type: {environments.env_type}`"
            report(at, "dataset-mismatch", f"{_told(error)}; {kind}", error.help or "", about=about)
    if facts.control_hz and shape.fps and round(facts.control_hz) != shape.fps:
        report(
            at,
            "dataset-mismatch",
            f"the data set has {shape.fps} rows in a second (fps), and `env_type: {environments.env_type}` takes"
            f" {facts.control_hz:g} actions in a second: `{shape.where}`",
            "an action then lasts longer or shorter than when it was recorded; use data of that rate, or correct `fps`"
            " in `meta/info.json` where it is wrong",
            about=about,
            severity=Severity.WARNING,
        )


def _told(error: DatasetError) -> str:
    """Return what is wrong, where, and why, in one line."""
    return f"{error.message}: `{error.where}`" + (f", {error.why}" if error.why else "")
