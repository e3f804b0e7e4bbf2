"""Figures of the groups of a training step, and why a step has nothing to learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipes.language.prompts.prompt_messages import GroupReport
from rlinf_core.errors import RunError
from rlinf_core.statistics import mean


def group_metrics(groups: Sequence[GroupReport]) -> dict[str, float]:
    """Return figures of all answers of a step that could be scored, and counts of the others."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [length for group in groups for length in group.lengths]
    count = max(1, len(rewards))
    average = mean(rewards)
    metrics = {
        "rollout/reward": average,
        "rollout/correct": mean([float(right) for group in groups for right in group.corrects]),
        "rollout/reward_std": mean([(reward - average) ** 2 for reward in rewards]) ** 0.5,
        "rollout/groups_equal": mean([float(len(set(group.rewards)) < 2) for group in groups if group.rewards]),
        "rollout/response_length": mean(lengths),
        "rollout/truncated": sum(group.truncated for group in groups) / count,
        "rollout/prompts_skipped": float(sum(group.skipped for group in groups)),
    }
    tokens = sum(group.tokens for group in groups)
    if rewards:
        metrics["rollout/prompt_length"] = (tokens - sum(lengths)) / count
    for group in groups:
        for kind, number in group.failures.items():
            key = f"failed/{kind}"
            metrics[key] = metrics.get(key, 0.0) + number
        for status, number in group.exits.items():
            key = f"exit/{status}"
            metrics[key] = metrics.get(key, 0.0) + number / count
        for name, total in group.parts.items():
            key = f"reward/{name}"
            metrics[key] = metrics.get(key, 0.0) + total / count
        for key, total in group.figures.items():
            metrics[key] = metrics.get(key, 0.0) + total / count
    return metrics


def nothing_to_learn(step: int, groups: Sequence[GroupReport]) -> RunError:
    """Return the error of a step none of whose groups can be trained on."""
    skipped, spoiled = (sum(getattr(group, name) for group in groups) for name in ("skipped", "spoiled"))
    help = "use other problems, a larger `algorithm.group_size`, or `filter_groups: false`"
    if skipped == len(groups):
        code, why = "prompts-skipped", f"all {skipped} prompts are longer than `data.max_prompt_length`"
    elif spoiled + skipped == len(groups):
        first = next(group.failure for group in groups if group.spoiled)
        code, why = "reward-fails", f"too few answers to {spoiled} prompts could be scored; the first: {first}"
    else:
        equal = len(groups) - skipped - spoiled
        code, why = "groups-equal", f"the answers to {equal} prompts have equal rewards within their group"
    help = "fix the scoring or generation" if spoiled else help
    return RunError(f"step {step} has no samples to learn from", why=why, help=help, code=code)


def rank_figures(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return figures of ranks as their mean over those that have them; of those that are a largest one, the largest."""
    names = dict.fromkeys(name for metrics in by_rank for name in metrics)
    columns = {name: [metrics[name] for metrics in by_rank if name in metrics] for name in names}
    return {name: max(values) if name.endswith("_max") else mean(values) for name, values in columns.items()}
