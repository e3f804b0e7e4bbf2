"""`data`: demonstrations that a policy of the embodied recipes learns from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, TypeAdapter, WithJsonSchema

from recipes.demonstrations.names import Flip
from recipes.sections.values import as_data, one_or_many
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import DataPath, NonNegativeInt
from rlinf_core.scalars import Bool, Float, Text

Column: TypeAlias = Literal["action", "reward", "success", "done", "terminated", "truncated", "intervention"]


class DataSource(ConfigModel):
    """A data set among several."""

    path: DataPath = Field(description="Folder or file; `dataset_path` is an alias.")
    weight: Annotated[Float, Field(gt=0)] | None = Field(
        default=None,
        description="Sampling weight relative to the other data sets. Default: its number of rows.",
    )
    episodes: tuple[NonNegativeInt, ...] = Field(
        default=(), description="Indices of the episodes to learn from. Default: all."
    )
    flip: Flip | None = Field(default=None, description="Flip of this data set's images, overriding `data.flip`.")


_DATA_PATH: TypeAdapter[str] = TypeAdapter(DataPath)


def _source(value: Any) -> str | DataSource:
    if isinstance(value, DataSource):
        return value
    if not isinstance(value, Mapping):
        return _DATA_PATH.validate_python(value)
    written = dict(cast("Mapping[str, Any]", value))
    if "dataset_path" in written and "path" not in written:
        written["path"] = written.pop("dataset_path")
    return DataSource.model_validate(written)


_SOURCE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "dataset_path": {"type": "string"},
        "weight": {"type": "number", "exclusiveMinimum": 0},
        "episodes": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "flip": {"enum": list(get_args(Flip))},
    },
    "additionalProperties": False,
}
DataSources = Annotated[
    tuple[Annotated[str | DataSource, PlainValidator(_source), PlainSerializer(as_data)], ...],
    BeforeValidator(one_or_many),
    WithJsonSchema(
        {
            "type": ["string", "object", "array"],
            **{key: value for key, value in _SOURCE_SCHEMA.items() if key != "type"},
            "items": {"anyOf": [{"type": "string"}, _SOURCE_SCHEMA]},
        }
    ),
]


class DemonstrationsConfig(ConfigModel):
    """Demonstrations."""

    train_data_paths: DataSources = Field(
        default=(),
        description="LeRobotDataset folders (v2.0, v2.1, v3) and HDF5 files of LIBERO, robomimic and Isaac Lab: one"
        " path or a list. `{path: ..., weight: ..., episodes: [...], flip: ...}` sets how often rows of a data set"
        " are sampled, from which episodes, and how its images are flipped.",
    )
    state_keys: tuple[Text, ...] = Field(
        default=(),
        description="Columns that are concatenated into the state. Default: `observation.state`; in HDF5 files, the"
        " poses of hand and gripper.",
    )
    columns: Mapping[Column, Text] = Field(
        default_factory=dict[Column, str],
        description="The data set's columns for action, reward, success, the ends of episodes or intervention, if their"
        " names are unusual: {success: task_done}.",
    )
    cameras: Mapping[Text, Text] = Field(
        default_factory=dict[str, str],
        description="The data set's camera for each camera of the environment, such as {main: agentview_rgb}. Default:"
        " the camera of the same name, or LIBERO's or robomimic's name for it; if both have one camera, that one.",
    )
    flip: Flip | None = Field(
        default=None,
        description="Flip images to the environment's orientation: `vertical` flips top and bottom, `horizontal` left"
        " and right, `rotate180` both; compared at the start of a run. Default: as the file states (LIBERO's own HDF5"
        " files: `vertical`), or none.",
    )
    action_scale: Float | tuple[Float, ...] | None = Field(
        default=None,
        description="Scale actions by this factor, or by one per dimension, to the environment's range of -1 to 1.",
    )
    clip_actions: Bool = Field(
        default=False,
        description="Clip actions outside the environment's range, which are an error otherwise; logs how many.",
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
    def sources(self) -> tuple[DataSource, ...]:
        """The data sets, with what is said of each."""
        return tuple(path if isinstance(path, DataSource) else DataSource(path=path) for path in self.train_data_paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders and files of the data sets."""
        return tuple(source.path for source in self.sources)
