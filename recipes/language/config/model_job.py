"""The part of a file that every job has which trains a language model, whatever it learns from."""

from __future__ import annotations

from typing import ClassVar, Protocol

from recipes.language.config.language_config import (
    LanguageActorConfig,
    ModelRunnerConfig,
    TokenizerConfig,
)
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.sections.values import Precision


class BaseModelConfig(Protocol):
    """A section `model`: a folder, or the sizes of a model that is built on the spot."""

    @property
    def model_path(self) -> str | None: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def hidden_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


class DescribedModel(Protocol):
    """A section that describes a language model and its tokenizer."""

    built_symbols: ClassVar[str]
    built_words: ClassVar[tuple[str, ...]]
    built_template: ClassVar[str | None]

    @property
    def seed(self) -> int: ...
    @property
    def tokenizer(self) -> TokenizerConfig: ...
    @property
    def model(self) -> BaseModelConfig: ...


class DataPaths(Protocol):
    """A section `data` with files."""

    @property
    def train_files(self) -> tuple[str, ...]: ...
    @property
    def val_data_paths(self) -> tuple[str, ...]: ...


class ModelJobConfig(Protocol):
    """A file with a language model that is trained."""

    @property
    def recipe(self) -> str: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def actor(self) -> LanguageActorConfig: ...
    @property
    def runner(self) -> ModelRunnerConfig: ...
    @property
    def data(self) -> DataPaths: ...
