"""Keys of language-model recipes that have no effect in combination with others: the table of `LanguageConfig`.

Keys that a section alone decides about have their rules there.
"""

from __future__ import annotations

from typing import Any, Final

from recipes.language.config.engine_facts import BACKENDS
from recipes.sections.no_effect import (
    NOT_TRAINED,
    WITHIN_GROUPS,
    adv_type,
    checkpoints_of,
    discount_of_total_rewards,
    lambda_without_values,
    of_one_rank,
    without_shards,
)
from rlinf_core import IgnoredKeys
from rlinf_core.config.model import WorldSizes

# Keys of `fsdp_config` that are about shards; in recipe `embodied` the first is an error.
SHARD_KEYS: Final = ("cpu_offload", "reduce_each_micro_batch")


def _has_no_critic(config: Any, sizes: WorldSizes) -> bool:
    return "critic" not in config.cluster.component_placement or not config.algorithm.wants_values


def _why_no_critic(config: Any) -> str:
    if not config.algorithm.wants_values:
        return f"{adv_type(config)} uses no value estimates"
    return "the group `critic`, which estimates values, has no placement"


def _has_no_reference(config: Any, sizes: WorldSizes) -> bool:
    return "reference" not in config.cluster.component_placement or not config.algorithm.kl_beta


def _why_no_reference(config: Any) -> str:
    return "the group `reference` has no placement" if config.algorithm.kl_beta else "`algorithm.kl_beta` is 0"


def _has_no_teacher(config: Any, sizes: WorldSizes) -> bool:
    return "teacher" not in config.cluster.component_placement or not config.algorithm.needs_teacher


def _why_no_teacher(config: Any) -> str:
    if not config.algorithm.needs_teacher:
        return f"{adv_type(config)} asks no teacher"
    return "the group `teacher` has no placement"


def _has_no_judge(config: Any, sizes: WorldSizes) -> bool:
    return "judge" not in config.cluster.component_placement or not config.reward.asks_judge


def _why_no_judge(config: Any) -> str:
    if not config.reward.asks_judge:
        return f"`reward_type: {config.reward.reward_type}` asks no judge"
    return "the group `judge` has no placement"


def distils(config: Any, sizes: WorldSizes) -> bool:
    """Return whether answers are learned from a teacher alone."""
    return config.algorithm.needs_teacher


def _builds_no_model(config: Any, sizes: WorldSizes) -> bool:
    models = [config.actor.model, *([config.critic.model] if config.critic.model is not None else [])]
    return all(model.model_path is not None for model in models)


def has_no_end(component: str) -> IgnoredKeys:
    """Return the rule about a decaying learning rate in a run without a last step."""

    def when(config: Any, sizes: WorldSizes) -> bool:
        optim = getattr(config, component).optim
        return optim.lr_scheduler != "constant" and (optim.total_training_steps or config.runner.last_step) is None

    return IgnoredKeys(
        (f"{component}.optim.lr_scheduler", f"{component}.optim.min_lr_ratio"),
        when,
        "a learning rate decays until the last step, and this run has no last step",
        f"write `runner.max_steps`, `runner.max_epochs` or `{component}.optim.total_training_steps`",
        because=("runner.max_steps", "runner.max_epochs"),
    )


def keeps_masters(model: Any) -> bool:
    """Return whether layers compute with copies of the weights, which takes FSDP2 for a single rank, too."""
    return model.precision != "fp32"


def _keys_of_engines() -> tuple[IgnoredKeys, ...]:
    """Return a rule for each key of `rollout` that not every engine reads."""
    readers: dict[str, list[str]] = {}
    for backend in dict.fromkeys(BACKENDS.values()):
        for key in sorted(backend.keys):
            readers.setdefault(key, []).append(backend.name)

    def unread(key: str) -> IgnoredKeys:
        return IgnoredKeys(
            (f"rollout.{key}",),
            lambda config, sizes: key not in BACKENDS[config.rollout.backend].keys,
            lambda config: f"engine `{BACKENDS[config.rollout.backend].name}` does not read it",
            "remove it, or write " + " or ".join(f"`backend: {name}`" for name in readers[key]),
            because=("rollout.backend",),
        )

    return tuple(map(unread, readers))


DISTILS: Final = "`adv_type: distillation` learns from the teacher, token by token, and from no reward"
LANGUAGE: Final = (
    NOT_TRAINED,
    IgnoredKeys(
        ("critic",),
        _has_no_critic,
        _why_no_critic,
        "remove it, or write `algorithm.adv_type: gae` and `critic: 0` in `cluster.component_placement`",
        because=("algorithm.adv_type",),
    ),
    IgnoredKeys(
        ("algorithm.value_clip", "algorithm.huber_delta"),
        _has_no_critic,
        _why_no_critic,
        "remove it, or write `adv_type: gae` and `critic: 0` in `cluster.component_placement`",
        because=("algorithm.adv_type",),
    ),
    IgnoredKeys(
        ("reference",),
        _has_no_reference,
        _why_no_reference,
        "remove it, or write `algorithm.kl_beta: 0.001` and `reference: 0` in `cluster.component_placement`",
        because=("algorithm.kl_beta",),
    ),
    IgnoredKeys(
        ("teacher",),
        _has_no_teacher,
        _why_no_teacher,
        "remove it, or write `algorithm.adv_type: distillation` and `teacher: 0` in `cluster.component_placement`",
        because=("algorithm.adv_type",),
    ),
    IgnoredKeys(
        ("algorithm.gamma", "algorithm.gae_lambda"),
        distils,
        DISTILS,
        because=("algorithm.adv_type",),
    ),
    IgnoredKeys(
        ("judge",),
        _has_no_judge,
        _why_no_judge,
        "remove it, or write `reward.reward_type: judge` and `judge: 0` in `cluster.component_placement`",
        because=("reward.reward_type",),
    ),
    IgnoredKeys(
        ("judge.tensor_parallel_size", "judge.gpu_memory_utilization", "judge.engine_options"),
        lambda config, sizes: config.judge.backend == "torch",
        "engine `torch` does not read it",
        "remove it, or write `judge.backend: vllm`",
        because=("judge.backend",),
    ),
    has_no_end("actor"),
    has_no_end("critic"),
    IgnoredKeys(
        ("actor.warm_start",),
        _builds_no_model,
        "only a model built from scratch gets a supervised warm start, and `model_path` names one",
        because=("actor.model.model_path",),
    ),
    discount_of_total_rewards(),
    lambda_without_values("`adv_type: gae` and `critic: 0` in `cluster.component_placement`"),
    WITHIN_GROUPS,
    IgnoredKeys(
        ("runner.partial_rollout",),
        lambda config, sizes: not config.runner.max_staleness,
        "`max_staleness` is 0: no answer is in progress when weights change",
        "remove it, or write `runner.max_staleness: 1`",
        because=("runner.max_staleness",),
    ),
    *_keys_of_engines(),
    IgnoredKeys(
        ("rollout.sampling_params.top_k", "rollout.sampling_params.top_p"),
        lambda config, sizes: config.rollout.sampling_params.temperature == 0,
        "`temperature: 0` samples greedily",
        because=("rollout.sampling_params.temperature",),
    ),
    IgnoredKeys(
        ("data.val_samples", "data.val_rollout_batch_size"),
        lambda config, sizes: config.runner.val_check_interval == -1 and not config.runner.only_eval,
        "the run has no evaluations: `val_check_interval` is -1",
        "remove it, or write `runner.val_check_interval: 10`",
        because=("runner.val_check_interval",),
    ),
    of_one_rank("actor", "reference", reads=lambda config: keeps_masters(config.actor.model)),
    of_one_rank("critic", reads=lambda config: keeps_masters(config.critic.model or config.actor.model)),
    without_shards("actor", *SHARD_KEYS, reads=lambda config: keeps_masters(config.actor.model)),
    without_shards(
        "critic", *SHARD_KEYS, reads=lambda config: keeps_masters(config.critic.model or config.actor.model)
    ),
    checkpoints_of("actor"),
)
