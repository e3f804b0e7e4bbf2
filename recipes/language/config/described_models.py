"""Model sections of a job: the trained model, and reference, teacher and judge in the form of `actor.model`."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Protocol

from recipes.language.config.language_config import (
    LanguageActorConfig,
    LanguageConfig,
    LanguageModelConfig,
    ModelRunnerConfig,
    TokenizerConfig,
    WarmStartConfig,
)
from recipes.language.config.rollout_config import (
    JUDGED_TOKENS,
    EngineSettings,
    LanguageSamplingParams,
)
from recipes.sections.actor import OptimConfig
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.sections.values import Precision

# The supervised training of a teacher built from scratch.
TEACHER_STEPS: Final = 400
TEACHER_RATE: Final = 1e-3


class BaseModelConfig(Protocol):
    """A section `model`: a folder, or the sizes of a tiny random model."""

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
    """A section `data` that names files."""

    @property
    def train_files(self) -> tuple[str, ...]: ...
    @property
    def val_data_paths(self) -> tuple[str, ...]: ...


class ModelJobConfig(Protocol):
    """The configuration of a job that trains a language model."""

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
    """Return the reference model: `reference.model_path`, or the actor's initial model."""
    path = config.reference.model_path
    return config.actor.model if path is None else _plain(config.actor.model, model_path=path)


def teacher_model(config: LanguageConfig) -> LanguageModelConfig:
    """Return the teacher's model: `teacher.model_path`, or a tiny random model."""
    teacher = config.teacher
    return _plain(
        config.actor.model,
        model_path=teacher.model_path,
        hidden_dim=teacher.hidden_dim,
    )


def teacher_start(config: LanguageConfig) -> WarmStartConfig:
    """Return the supervised training of a teacher built from scratch."""
    return config.actor.warm_start.model_copy(update={"steps": TEACHER_STEPS, "lr": TEACHER_RATE})


def critic_model(config: LanguageConfig) -> LanguageModelConfig:
    """Return the critic's model: `critic.model_path`, or the actor's initial model."""
    path = config.critic.model_path
    return config.actor.model if path is None else config.actor.model.model_copy(update={"model_path": path})


def critic_optim(config: LanguageConfig) -> OptimConfig:
    """Return the critic's optimizer: the actor's, with the critic's constant learning rate."""
    constant = {"lr": config.critic.lr, "lr_scheduler": "constant", "lr_warmup_steps": 0}
    return config.actor.optim.model_copy(update=constant)


def with_model(
    config: LanguageConfig, model: LanguageModelConfig, warm_start: WarmStartConfig | None = None
) -> LanguageConfig:
    """Return a configuration whose actor has this model, and this warm start if given."""
    changes = {"model": model, "warm_start": warm_start or config.actor.warm_start}
    return config.model_copy(update={"actor": config.actor.model_copy(update=changes)})


def _plain(model: LanguageModelConfig, **changes: str | int | None) -> LanguageModelConfig:
    """Return a model without adapters, in the same precision."""
    return model.model_copy(update={"lora": None, **changes})


def judge_job(config: LanguageConfig) -> LanguageConfig:
    """Return a configuration whose actor has the judge's model and tokenizer, and whose rollout has the judge's
    engine."""
    judge, asked = config.judge, config.reward.judging
    model = _plain(config.actor.model, model_path=judge.model_path)
    actor = config.actor.model_copy(update={"model": model, "tokenizer": TokenizerConfig()})
    sampling = LanguageSamplingParams(temperature=asked.temperature, max_new_tokens=asked.max_new_tokens)
    engine: dict[str, Any] = {name: getattr(judge, name) for name in EngineSettings.model_fields}
    engine |= {"max_running_tokens": JUDGED_TOKENS, "enable_offload": False}
    rollout = config.rollout.model_copy(update={**engine, "sampling_params": sampling})
    runner = config.runner.model_copy(update={"seq_length": asked.seq_length})
    return config.model_copy(update={"actor": actor, "rollout": rollout, "runner": runner})
