"""Models as a file describes them: those of every job that trains one, and, as the section `actor.model` would name
them, reference, teacher and judge."""

from __future__ import annotations

from typing import ClassVar, Protocol

from recipes.language.config.language_config import (
    LanguageActorConfig,
    LanguageConfig,
    LanguageModelConfig,
    ModelRunnerConfig,
    TokenizerConfig,
    WarmStartConfig,
)
from recipes.language.config.rollout_config import (
    ENGINE_KEYS,
    JUDGED_TOKENS,
    LanguageSamplingParams,
    ServerSettings,
)
from recipes.sections.actor import ValueOptimConfig
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


def reference_model(config: LanguageConfig) -> LanguageModelConfig:
    """Return the reference: the initial model of the actor, or `reference.model_path`."""
    path = config.reference.model_path
    return config.actor.model if path is None else _plain(config.actor.model, model_path=path)


def teacher_model(config: LanguageConfig) -> LanguageModelConfig:
    """Return the teacher: `teacher.model_path`, or a model that is built on the spot."""
    teacher = config.teacher
    return _plain(
        config.actor.model,
        model_path=teacher.model_path,
        hidden_dim=teacher.hidden_dim,
    )


def critic_model(config: LanguageConfig) -> LanguageModelConfig:
    """Return the model that learns values: the initial model of the actor, or `critic.model_path`."""
    path = config.critic.model_path
    return config.actor.model if path is None else config.actor.model.model_copy(update={"model_path": path})


def critic_optim(config: LanguageConfig) -> ValueOptimConfig:
    """Return the critic's optimizer: the actor's, with constant learning rates of its own."""
    constant = {"lr_scheduler": "constant", "lr_warmup_steps": 0}
    rates = {"lr": config.critic.lr, "value_lr": config.critic.value_lr}
    return ValueOptimConfig.model_validate({**dict(config.actor.optim), **constant, **rates})


def with_model(
    config: LanguageConfig, model: LanguageModelConfig, warm_start: WarmStartConfig | None = None
) -> LanguageConfig:
    """Return a file whose actor has another model, and another warm start where one is given."""
    changes = {"model": model, "warm_start": warm_start or config.actor.warm_start}
    return config.model_copy(update={"actor": config.actor.model_copy(update=changes)})


def _plain(model: LanguageModelConfig, **changes: str | int | None) -> LanguageModelConfig:
    """Return a model without adapters, in the same precision."""
    return model.model_copy(update={"lora": None, "is_lora": False, **changes})


def judge_job(config: LanguageConfig) -> LanguageConfig:
    """Return a file whose actor has the judge's model and tokenizer, and whose rollout has the judge's engine."""
    judge = config.judge
    model = _plain(config.actor.model, model_path=judge.model_path)
    actor = config.actor.model_copy(update={"model": model, "tokenizer": TokenizerConfig()})
    sampling = LanguageSamplingParams(temperature=judge.temperature, max_new_tokens=judge.max_new_tokens)
    engine = {name: getattr(judge, name) for name in ENGINE_KEYS}
    engine |= {"max_running_tokens": JUDGED_TOKENS, "enable_offload": False}
    rollout = config.rollout.model_copy(update={**engine, "sampling_params": sampling, "server": ServerSettings()})
    runner = config.runner.model_copy(update={"seq_length": judge.seq_length})
    return config.model_copy(update={"actor": actor, "rollout": rollout, "runner": runner})
