"""Rules about keys without effect that several recipes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import NoEffect

NOT_TRAINED: Final = NoEffect(
    ("algorithm", "actor.optim", "actor.global_batch_size", "actor.micro_batch_size"),
    lambda config, sizes: config.runner.only_eval,
    "`only_eval` trains nothing",
    "it is read again without `runner.only_eval`",
    because=("runner.only_eval",),
    severity=Severity.NOTE,
)


def of_one_rank(component: str, *others: str, reads: Callable[[Any], bool] = lambda config: False) -> NoEffect:
    """Return the rule about `fsdp_config` of a component that has a single process.

    Args:
        component: the section.
        others: components that read it as well; they must have a single process, too.
        reads: whether a single process reads it nevertheless, in a file.
    """
    alone = (component, *others)
    names = ("sharding_strategy", "reshard_after_forward", "cpu_offload", "mixed_precision.reduce_dtype")
    return NoEffect(
        tuple(f"{component}.fsdp_config.{name}" for name in names),
        lambda config, sizes: (
            component in sizes and all(sizes.get(each, 1) == 1 for each in alone) and not reads(config)
        ),
        f"`{component}` is one process, which shares weights with no other",
        f"it is read where `{component}` has several processes",
        because=("cluster.component_placement",),
        severity=Severity.NOTE,
    )


def checkpoints_of(component: str) -> NoEffect:
    """Return the rule about the folder of checkpoints in a run that writes none."""
    return NoEffect(
        (f"{component}.checkpoint_save_path",),
        lambda config, sizes: config.runner.save_interval == -1 and not config.runner.save_on_interrupt,
        "the run writes no checkpoints",
        "remove it, or write `runner.save_interval: 100`",
        because=("runner.save_interval",),
    )
