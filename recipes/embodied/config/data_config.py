"""`data`: demonstrations that a policy of the embodied recipes learns from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, PlainSerializer, PlainValidator, TypeAdapter

from recipes.demonstrations.columns import Flip
from recipes.sections.values import as_data, one_or_many
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import DataPath, NonNegativeInt, PositiveFloat
from rlinf_core.scalars import Bool, Float, Text, problem

Role: TypeAlias = Literal["action", "reward", "success", "done", "terminated", "truncated", "intervention"]
Column: TypeAlias = Role | Literal["state"]


class DataSource(ConfigModel):
    """A data set among several."""

    path: DataPath = Field(
        validation_alias=AliasChoices("path", "dataset_path"),
        description="Folder or file; `dataset_path` is an alias.",
    )
    weight: PositiveFloat | None = Field(
        default=None,
        description="Sampling weight relative to the other data sets. Default: its number of rows.",
    )
    episodes: tuple[NonNegativeInt, ...] = Field(
        default=(), description="Indices of the episodes to learn from. Default: all."
    )
    flip: Flip | None = Field(
        default=None,
        description="Flip of its images to the environment's orientation: `vertical` flips top and bottom,"
        " `horizontal` left and right, `rotate180` both; compared at the start of a run. Default: as the file states"
        " (LIBERO's own HDF5 files: `vertical`), or none.",
    )
    action_scale: Float | tuple[Float, ...] | None = Field(
        default=None,
        description="Scale its actions by this factor, or by one per dimension, to the environment's range of -1 to 1.",
    )
    clip_actions: Bool = Field(
        default=False,
        description="Clip its actions to -1 to 1; outside the environment's range they are an error otherwise. Logs how"
        " many.",
    )


_DATA_PATH: TypeAdapter[str] = TypeAdapter(DataPath)


def _source(value: Any) -> str | DataSource:
    if isinstance(value, DataSource):
        return value
    return DataSource.model_validate(value) if isinstance(value, Mapping) else _DATA_PATH.validate_python(value)


_Source: TypeAlias = Annotated[
    str | DataSource,
    PlainValidator(_source, json_schema_input_type=DataPath | DataSource),
    PlainSerializer(as_data),
]
DataSources = Annotated[
    tuple[_Source, ...],
    BeforeValidator(one_or_many, json_schema_input_type=_Source | list[_Source]),
]


def _one_but_of_state(columns: Mapping[Column, str | tuple[str, ...]]) -> Mapping[Column, str | tuple[str, ...]]:
    for role, names in columns.items():
        if role != "state" and not isinstance(names, str):
            raise problem("bad-value", f"`{role}` is one column", help=f"write its name, as in {{{role}: NAME}}")
    return columns


class DemonstrationsConfig(ConfigModel):
    """Demonstrations."""

    train_data_paths: DataSources = Field(
        default=(),
        description="LeRobotDataset folders (v2.0, v2.1, v3) and HDF5 files of LIBERO, robomimic and Isaac Lab: one"
        " path or a list. `{path: ..., weight: ..., episodes: [...], flip: ..., action_scale: ..., clip_actions:"
        " ...}` sets how often rows of a data set are sampled, from which episodes, and how its images and actions are"
        " converted.",
    )
    columns: Annotated[Mapping[Column, Text | tuple[Text, ...]], AfterValidator(_one_but_of_state)] = Field(
        default_factory=dict[Column, str | tuple[str, ...]],
        description="The data set's columns for action, reward, success, the ends of episodes or intervention, if their"
        " names are unusual, {success: task_done}, and the columns that are concatenated into the state, {state:"
        " [joints, gripper]}. Default of these: `observation.state`; in HDF5 files, the poses of hand and gripper.",
    )
    cameras: Mapping[Text, Text] = Field(
        default_factory=dict[str, str],
        description="The data set's camera for each camera of the environment, such as {main: agentview_rgb}. Default:"
        " the camera of the same name, or LIBERO's or robomimic's name for it; if both have one camera, that one.",
    )
    only_interventions: Bool = Field(
        default=False,
        description="Imitate only the actions of people who took over from a policy, in data sets that mark them"
        " (`rlinf record RUN --device`); data sets without marks are imitated in full.",
    )
    normalization: Literal["none", "mean_std", "quantile"] = Field(
        default="mean_std",
        description="Normalization of states and actions by statistics of the data, which are saved with the weights:"
        " mean and standard deviation, the 0.01 and 0.99 quantiles, or none.",
    )

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The columns that are concatenated into the state; empty: the usual ones."""
        names = self.columns.get("state", ())
        return (names,) if isinstance(names, str) else names

    @property
    def role_columns(self) -> dict[Role, str]:
        """The columns of other roles with unusual names."""
        return {role: names for role, names in self.columns.items() if role != "state" and isinstance(names, str)}

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The data sets with their settings."""
        return tuple(path if isinstance(path, DataSource) else DataSource(path=path) for path in self.train_data_paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders and files of the data sets."""
        return tuple(source.path for source in self.sources)
