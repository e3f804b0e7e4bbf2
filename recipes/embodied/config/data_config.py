"""`data`: demonstrations that a policy of the embodied recipes learns from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from recipes.sections.values import FilePaths
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import Count, NonNegativeInt
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
