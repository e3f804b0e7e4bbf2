"""Rules about keys without effect that several recipes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from recipes.sections.algorithm import WITHIN_GROUP_ADVANTAGES
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
    """Return whether the advantage compares only total rewards within a group."""
    return config.algorithm.adv_type in WITHIN_GROUP_ADVANTAGES


def adv_type(config: Any) -> str:
    """Return the type of advantage that the file sets."""
    return f"`adv_type: {config.algorithm.adv_type}`"


def discount_of_total_rewards(when: Callable[[Any, WorldSizes], bool] = compares_within_groups) -> IgnoredKeys:
    """Return the rule about `gamma` with an advantage of total rewards."""
    return IgnoredKeys(
        ("algorithm.gamma",),
        when,
        lambda config: f"{adv_type(config)} compares undiscounted total rewards",
        because=("algorithm.adv_type",),
    )


def of_one_rank(component: str, *others: str, reads: Callable[[Any], bool] = lambda config: False) -> IgnoredKeys:
    """Return the rule about `fsdp_config` of a component that has a single process.

    Args:
        component: the section.
        others: further components that read `fsdp_config`; each must have a single process, too.
        reads: returns whether a single process reads it nevertheless in a given job.
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
    """Return the rule about `cpu_offload` of a component each of whose ranks holds all weights.

    Args:
        component: the section.
        reads: returns whether `cpu_offload` is read nevertheless in a given job.
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
