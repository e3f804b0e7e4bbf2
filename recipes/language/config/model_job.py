"""The part of a file that every job has which trains a language model, whatever it learns from."""

from __future__ import annotations

from typing import Protocol

from recipes.language.config.language_config import LanguageActorConfig, ModelRunnerConfig
from rlinf_core import ClusterConfig


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
