"""`data`: demonstrations that a policy of the embodied recipes learns from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import BeforeValidator, Field, PlainValidator, TypeAdapter, WithJsonSchema

from recipes.demonstrations.names import Flip
from recipes.sections.values import one_or_many
from rlinf_core import ConfigModel
from rlinf_core.config.sections.values import Count, FilePath, NonNegativeInt
from rlinf_core.scalars import Bool, Float, Text

Column: TypeAlias = Literal["action", "reward", "success", "intervention"]


class DataSource(ConfigModel):
    """A data set among several."""

    path: FilePath = Field(description="Folder or file; `dataset_path` means the same.")
    weight: Annotated[Float, Field(gt=0)] | None = Field(
        default=None,
        description="Share of the rows that are drawn, relative to the other data sets. Default: by its rows.",
    )
    episodes: tuple[NonNegativeInt, ...] = Field(
        default=(), description="Numbers of the episodes that are learned from. Default: all."
    )
    flip: Flip | None = Field(default=None, description="Turn its pictures otherwise than `data.flip` says.")


_FILE_PATH: TypeAdapter[str] = TypeAdapter(FilePath)


def _source(value: Any) -> str | DataSource:
    if isinstance(value, DataSource):
        return value
    if not isinstance(value, Mapping):
        return _FILE_PATH.validate_python(value)
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
    tuple[Annotated[str | DataSource, PlainValidator(_source)], ...],
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
        description="LeRobotDataset folders (v2.0, v2.1, v3), and HDF5 files of LIBERO, robomimic and Isaac Lab; one"
        " path or a list. `{path: ..., weight: ..., episodes: [...], flip: ...}` says how often rows of a data set are"
        " drawn, which ones, and how its pictures are turned.",
    )
    episodes: tuple[NonNegativeInt, ...] = Field(
        default=(), description="Numbers of the episodes that are learned from, of a single data set. Default: all."
    )
    filter_key: Text | None = Field(
        default=None,
        description="Learn from a part alone, such as `train`: `mask/train` of a robomimic file, or the split of that"
        " name in a LeRobotDataset.",
    )
    state_keys: tuple[Text, ...] = Field(
        default=(),
        description="Columns that make up the states, one behind the other. Default: `observation.state`, and in HDF5"
        " files the pose of the hand and the gripper.",
    )
    columns: Mapping[Column, Text] = Field(
        default_factory=dict[Column, str],
        description="The data set's column for action, reward, success or intervention, where it has an unusual name:"
        " {success: task_done}.",
    )
    cameras: Mapping[Text, Text] = Field(
        default_factory=dict[str, str],
        description="The data set's camera for each of the environment's, such as {main: agentview_rgb}. Default: those"
        " of the same name or of LIBERO's and robomimic's for it, and the only one for the only one.",
    )
    flip: Flip | None = Field(
        default=None,
        description="Turn the pictures as the environment's stand: `vertical` exchanges above and below, `horizontal`"
        " left and right, `rotate180` both. The start of a run compares them. Default: as the file says (LIBERO's own"
        " HDF5 files: `vertical`), or none.",
    )
    action_scale: Float | tuple[Float, ...] | None = Field(
        default=None,
        description="Multiply actions by this number, or by one for each dimension, so that -1 to 1 is what the"
        " environment takes.",
    )
    clip_actions: Bool = Field(
        default=False,
        description="Clip actions beyond the environment's range, which are an error otherwise; tells how many.",
    )
    only_interventions: Bool = Field(
        default=False,
        description="Imitate only the actions of who took over from a policy, where a data set tells which ones those"
        " are (`rlinf record RUN --device`); of several, those that do not tell are imitated as a whole.",
    )
    normalization: Literal["none", "mean_std", "quantile"] = Field(
        default="mean_std",
        description="Normalize states and actions by statistics of the data, which are kept with the weights: by mean"
        " and standard deviation, by the quantiles of 0.01 and 0.99, or not at all.",
    )
    batches_per_step: Count = Field(
        default=20, description="Optimizer steps of one training step, where demonstrations are all there is."
    )

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The data sets, with what is said of each."""
        return tuple(
            each if isinstance(each, DataSource) else DataSource(path=each, episodes=self.episodes)
            for each in self.train_data_paths
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders and files of the data sets."""
        return tuple(each.path for each in self.sources)
