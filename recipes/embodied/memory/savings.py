"""Changes of a file that save memory, which `rlinf inspect memory` proposes where a job does not fit."""

from __future__ import annotations

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.batch_sizes import batch_sizes
from recipes.embodied.config.embodied_no_effect import SMALL_MODELS

_CHECKPOINTING = "actor.fsdp_config.gradient_checkpointing=true"


def savings(config: EmbodiedConfig) -> list[tuple[str, ...]]:
    """Return changes that save memory, the nearest first.

    Activations that are computed again, smaller parts of a batch, both, and fewer simulator processes leave what is
    learned as it is; fewer environments come last.
    """
    share, micro = batch_sizes(config, 1)
    given = () if config.actor.global_batch_size is not None else (f"actor.global_batch_size={share}",)
    parts = [(f"actor.micro_batch_size={size}", *given) for size in _divisors(share) if size < micro]
    found = parts
    if _can_checkpoint(config) and not config.actor.fsdp_config.gradient_checkpointing:
        halves = [(f"actor.micro_batch_size={size}", *given) for size in _halves(share, micro)[1:]]
        found = [(_CHECKPOINTING,), *parts, *((_CHECKPOINTING, *each) for each in halves)]
    processes = config.env.train.num_processes or 1
    found += [(f"env.train.num_processes={count}",) for count in _halves(processes, processes // 2)]
    envs, group = config.env.train.total_num_envs, config.algorithm.group_size
    for count in _divisors(envs)[1:]:
        batch = share * count // envs
        if count % group or not batch:
            continue
        fewer = (
            f"env.train.total_num_envs={count}",
            f"env.eval.total_num_envs={count}",
            f"actor.global_batch_size={batch}",
        )
        found += [(*fewer, f"actor.micro_batch_size={size}") for size in _halves(batch, micro)]
    return found


def _can_checkpoint(config: EmbodiedConfig) -> bool:
    """Return whether the policy can compute activations again; of one of the user's own that is not known."""
    kind = config.actor.model.model_type
    return kind not in SMALL_MODELS and ":" not in kind


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [each for each in range(number, 0, -1) if number % each == 0]


def _halves(number: int, most: int) -> list[int]:
    """Return divisors of a number that are at most `most`, each no more than half of the one before, down to 1."""
    found: list[int] = []
    for each in _divisors(number):
        if each <= most and (not found or 2 * each <= found[-1] or each == 1):
            found.append(each)
    return found
