"""The rules about `algorithm.normalize_observations`."""

from __future__ import annotations

from recipes.embodied.config import EmbodiedConfig
from recipes.sections.checks import Report
from rlinf_core.config.tree import Path

_KEY: Path = ("algorithm", "normalize_observations")
# Policies that normalize states before they act, and learn from normalized ones.
_MODELS = ("mlp_policy", "cnn_policy")


def check_running_statistics(config: EmbodiedConfig, report: Report) -> None:
    """Report settings with which states cannot be normalized by running statistics."""
    if not config.algorithm.normalize_observations:
        return
    model, runner = config.actor.model.model_type, config.runner
    if model not in _MODELS:
        report(
            _KEY,
            "conflicting-settings",
            f"`{model}` does not take running statistics of states",
            f"remove it, or use {' or '.join(f'`{name}`' for name in _MODELS)}",
            about=[("actor", "model", "model_type")],
        )
    if config.algorithm.bc_weight:
        report(
            _KEY,
            "conflicting-settings",
            "demonstrations bring their own statistics (`data.normalization`)",
            "remove it, or `algorithm.bc_weight`",
            about=[("algorithm", "bc_weight")],
        )
    if runner.staleness or runner.weight_sync_interval != 1:
        name = "max_staleness" if runner.staleness else "weight_sync_interval"
        report(
            _KEY,
            "conflicting-settings",
            f"with `runner.{name}` samples were normalized by older statistics than those that are known",
            f"remove one of the two: `runner.{name}`, or `algorithm.normalize_observations`",
            about=[("runner", name)],
        )
