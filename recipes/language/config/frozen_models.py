"""The models that do not learn, as the section `actor.model` would name them: reference, teacher and judge."""

from __future__ import annotations

from recipes.language.config.judge_config import ENGINE_KEYS
from recipes.language.config.language_config import (
    LanguageConfig,
    LanguageModelConfig,
    TokenizerConfig,
    WarmStartConfig,
)
from recipes.language.config.rollout_config import LanguageSamplingParams, ServerSettings


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
        num_layers=teacher.num_layers,
    )


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
    model = _plain(config.actor.model, model_path=judge.model_path, precision=judge.precision)
    actor = config.actor.model_copy(update={"model": model, "tokenizer": TokenizerConfig()})
    sampling = LanguageSamplingParams(temperature=judge.temperature, max_new_tokens=judge.max_new_tokens)
    engine = {name: getattr(judge, name) for name in ENGINE_KEYS}
    rollout = config.rollout.model_copy(
        update={**engine, "sampling_params": sampling, "server": ServerSettings(), "enable_offload": False}
    )
    runner = config.runner.model_copy(update={"seq_length": judge.seq_length})
    return config.model_copy(update={"actor": actor, "rollout": rollout, "runner": runner})
