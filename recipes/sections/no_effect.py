"""Rules about keys without effect that several recipes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from recipes.sections.algorithm import ADVANTAGES, WITHIN_GROUP_ADVANTAGES
from rlinf_core import IgnoredKeys
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import WorldSizes

NOT_TRAINED: Final = IgnoredKeys(
    ("algorithm", "actor.optim", "actor.global_batch_size", "actor.micro_batch_size"),
    lambda config, sizes: config.runner.only_eval,
    "`only_eval` trains nothing",
    "it takes effect again without `runner.only_eval`",
    because=("runner.only_eval",),
    severity=Severity.NOTE,
)


def compares_within_groups(config: Any, sizes: WorldSizes) -> bool:
    """Return whether the advantage compares total rewards within a group and nothing else."""
    return config.algorithm.adv_type in WITHIN_GROUP_ADVANTAGES


def adv_type(config: Any) -> str:
    """Return the type of advantage that the file sets."""
    return f"`adv_type: {config.algorithm.adv_type}`"


WITHIN_GROUPS: Final = IgnoredKeys(
    ("algorithm.normalize_advantages",),
    compares_within_groups,
    lambda config: f"{adv_type(config)} compares samples within groups",
    "remove it; `adv_type: dr_grpo` does not divide by the standard deviation",
    because=("algorithm.adv_type",),
)


def discount_of_total_rewards(when: Callable[[Any, WorldSizes], bool] = compares_within_groups) -> IgnoredKeys:
    """Return the rule about `gamma` with an advantage of total rewards."""
    return IgnoredKeys(
        ("algorithm.gamma",),
        when,
        lambda config: f"{adv_type(config)} compares undiscounted total rewards",
        because=("algorithm.adv_type",),
    )


def lambda_without_values(instead: str) -> IgnoredKeys:
    """Return the rule about `gae_lambda` with an advantage that uses no values.

    Args:
        instead: settings of the recipe under which it is read.
    """
    return IgnoredKeys(
        ("algorithm.gae_lambda",),
        lambda config, sizes: config.algorithm.adv_type in ADVANTAGES and config.algorithm.adv_type != "gae",
        lambda config: f"{adv_type(config)} uses no value estimates",
        f"remove it, or write {instead}",
        because=("algorithm.adv_type",),
    )


def of_one_rank(component: str, *others: str, reads: Callable[[Any], bool] = lambda config: False) -> IgnoredKeys:
    """Return the rule about `fsdp_config` of a component that has a single process.

    Args:
        component: the section.
        others: components that read it as well; they must have a single process, too.
        reads: whether a single process reads it nevertheless, in a file.
    """
    alone = (component, *others)
    names = ("sharding_strategy", "cpu_offload", "mixed_precision.reduce_dtype")
    return IgnoredKeys(
        tuple(f"{component}.fsdp_config.{name}" for name in names),
        lambda config, sizes: (
            component in sizes and all(sizes.get(other, 1) == 1 for other in alone) and not reads(config)
        ),
        f"`{component}` is a single process and shares weights with no other",
        f"it takes effect when `{component}` has several processes",
        because=("cluster.component_placement",),
        severity=Severity.NOTE,
    )


def without_shards(component: str, reads: Callable[[Any], bool]) -> IgnoredKeys:
    """Return the rule about `cpu_offload` of a component whose every rank holds all weights.

    Args:
        component: the section.
        reads: whether it is read nevertheless, in a file.
    """
    strategy = f"{component}.fsdp_config.sharding_strategy"
    return IgnoredKeys(
        (f"{component}.fsdp_config.cpu_offload",),
        lambda config, sizes: (
            getattr(config, component).fsdp_config.sharding_strategy == "no_shard" and not reads(config)
        ),
        "it is about shards of weights and gradients, and `sharding_strategy: no_shard` makes none",
        because=(strategy,),
    )


def checkpoints_of(component: str) -> IgnoredKeys:
    """Return the rule about the folder of checkpoints in a run that writes none."""
    return IgnoredKeys(
        (f"{component}.checkpoint_save_path",),
        lambda config, sizes: config.runner.save_interval == -1 and not config.runner.save_on_interrupt,
        "the run writes no checkpoints",
        "remove it, or write `runner.save_interval: 100`",
        because=("runner.save_interval",),
    )
