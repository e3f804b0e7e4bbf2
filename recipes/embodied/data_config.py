"""`data`: demonstrations that a policy of the embodied recipes learns from, and the checks of their folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from recipes.demonstrations.errors import DatasetError
from recipes.demonstrations.info import HDF5_ENDINGS, STATISTICS, read_info
from recipes.sections.checks import Report
from recipes.sections.values import FilePaths
from rlinf_core import ConfigModel
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.values import Count, NonNegativeInt
from rlinf_core.requirements import install_command, missing_modules
from rlinf_core.scalars import Bool, Text


class DemonstrationsConfig(ConfigModel):
    """Demonstrations."""

    train_data_paths: FilePaths = Field(
        default=(),
        description="LeRobotDataset folders (v3), and HDF5 files of LIBERO and robomimic; one path or a list.",
    )
    episodes: tuple[NonNegativeInt, ...] = Field(
        default=(), description="Numbers of the episodes that are learned from. Default: all."
    )
    state_keys: tuple[Text, ...] = Field(
        default=(),
        description="Columns that make up the states, one behind the other. Default: `observation.state`, and in HDF5"
        " files the pose of the hand and the gripper.",
    )
    cameras: Mapping[Text, Text] = Field(
        default_factory=dict[str, str],
        description="The data set's camera for each of the environment's, such as {main: agentview_rgb}. Default: those"
        " of the same name, and the only one for the only one.",
    )
    only_interventions: Bool = Field(
        default=False,
        description="Imitate only the actions of who took over from a policy, where a data set tells which ones those"
        " are (`rlinf record RUN --device`); data sets that do not tell are imitated as a whole.",
    )
    normalization: Literal["none", "mean_std", "quantile"] = Field(
        default="mean_std",
        description="Normalize states and actions by statistics of the data, which are kept with the weights: by mean"
        " and standard deviation, by the quantiles of 0.01 and 0.99, or not at all.",
    )
    batches_per_step: Count = Field(
        default=20, description="Optimizer steps of one training step, where demonstrations are all there is."
    )


def check_data(data: DemonstrationsConfig, report: Report) -> None:
    """Report data sets that are not there or cannot be understood, and packages that reading them needs."""
    for index, path in enumerate(data.train_data_paths):
        at = ("data", "train_data_paths", index) if len(data.train_data_paths) > 1 else ("data", "train_data_paths")
        hdf5 = path.endswith(HDF5_ENDINGS)
        if hdf5 and not os.path.isfile(path):
            report(at, "unusable-path", f"there is no file `{path}`", "name an HDF5 file of demonstrations")
            continue
        modules = ["h5py"] if hdf5 else ["pyarrow"]
        if not hdf5:
            try:
                info = read_info(Path(path))
            except DatasetError as error:
                report(at, "unusable-path", f"{error.message}: `{error.where}`", error.help)
                continue
            dtypes = {each.dtype for each in info.features.values()}
            modules += [*(["av"] if "video" in dtypes else []), *(["PIL"] if "image" in dtypes else [])]
            if not os.path.isfile(Path(path) / STATISTICS):
                report(
                    at,
                    "unusable-path",
                    f"the data set has no `{STATISTICS}`: statistics are computed from its rows",
                    severity=Severity.NOTE,
                )
        missing = missing_modules(modules)
        if missing:
            needs = f"`{path}` needs the package `{missing[0]}`, which this Python does not have"
            report(at, "missing-extra", needs, f"run `{install_command(*missing)}`")
