"""Processors of lerobot's policies, with the statistics that a policy has here."""

# lerobot and safetensors have few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from recipes.embodied.models.lerobot.lerobot_config import ACTION, ENVIRONMENT_STATE, STATE, reason_of
from recipes.embodied.models.normalization import Normalization, Scheme, Statistics
from recipes.training.arrays import Array
from rlinf_core import ConfigError

PREPROCESSOR: Final = "policy_preprocessor.json"
POSTPROCESSOR: Final = "policy_postprocessor.json"
EPSILON: Final = 1e-8
# Of ImageNet: by them lerobot normalizes pictures of every data set, unless configured otherwise.
_IMAGES: Final = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
# Of lerobot's modes: which share of the rows is below the lower bound, and above the upper one.
_OUTSIDE: Final = {"MIN_MAX": 0.0, "QUANTILES": 0.01, "QUANTILE10": 0.1}


class Processors(NamedTuple):
    """The pipelines from observations to a policy's inputs, and from its outputs to actions."""

    before: Any
    after: Any


def make_processors(shape: Any, folder: str | None, normalization: Normalization) -> Processors:
    """Return the processors of a policy.

    Args:
        shape: its configuration.
        folder: the folder that has them; None: the policy was built.
        normalization: the normalization of states and actions, which replaces that of the folder.

    Raises:
        ConfigError: lerobot cannot make them.
    """
    from lerobot.policies.factory import make_pre_post_processors

    stats = _statistics(shape, folder, normalization)
    overrides = {
        "preprocessor_overrides": {"device_processor": {"device": "cpu"}, "normalizer_processor": {"stats": stats}},
        "postprocessor_overrides": {"unnormalizer_processor": {"stats": stats}},
    }
    try:
        if folder is None:
            before, after = make_pre_post_processors(shape, dataset_stats=stats)
        else:
            before, after = make_pre_post_processors(shape, pretrained_path=folder, **overrides)
    except Exception as error:  # noqa: BLE001 - of draccus, json, tokenizers: each step has its own
        raise ConfigError(
            f"lerobot cannot make the processors of a `{shape.type}`",
            why=reason_of(error),
            help="nothing is downloaded: the folder must hold its processors, and tokenizers that they name be folders",
        ) from None
    relative = next((step for step in before.steps if "Relative" in type(step).__name__ and step.enabled), None)
    if relative is not None:
        raise ConfigError(
            f"the policy in `{folder}` predicts actions relative to the state (`{type(relative).__name__}`)",
            help="write `model_type: pi0` or `pi05`, which have `options.relative_actions`",
        )
    return Processors(before, after)


def normalization_of(shape: Any, states: Array | None, actions: Array) -> Normalization:
    """Return the statistics of a data set's rows, [N, S] and [N, A], as lerobot's configuration wants them.

    Raises:
        ConfigError: lerobot normalizes such a policy in an unknown way.
    """
    of_states, scheme = _numbers(shape, "STATE", states)
    of_actions, action_scheme = _numbers(shape, "ACTION", actions)
    if of_states is None and of_actions is None:
        return Normalization()
    return Normalization(scheme, of_states, of_actions, EPSILON, action_scheme)


def _numbers(shape: Any, kind: Literal["STATE", "ACTION"], rows: Array | None) -> tuple[Statistics | None, Scheme]:
    """Return the statistics of rows [N, D], None where they are taken as they are, and how they are applied."""
    mode = _mode(shape, kind)
    if rows is None or mode == "IDENTITY":
        return None, "mean_std"
    if mode == "MEAN_STD":
        return Statistics.of(rows), "mean_std"
    if mode not in _OUTSIDE:
        raise ConfigError(f"lerobot normalizes `{kind}` of a `{shape.type}` by `{mode}`, which is not known here")
    outside = _OUTSIDE[mode]
    low, high = np.quantile(np.asarray(rows, np.float64), (outside, 1 - outside), axis=0)
    return Statistics.of_bounds(low.tolist(), high.tolist()), "quantile"


def _mode(shape: Any, kind: Literal["STATE", "ACTION"]) -> str:
    mode = {str(getattr(name, "value", name)): way for name, way in shape.normalization_mapping.items()}.get(kind)
    return "IDENTITY" if mode is None else str(mode.value)


def _statistics(shape: Any, folder: str | None, normalization: Normalization) -> dict[str, dict[str, Any]]:
    """Return statistics as lerobot has them, by feature and by name."""
    stats = _of_folder(folder) if folder else {}
    for key in shape.image_features:
        stats.setdefault(key, {name: torch.tensor(values)[:, None, None] for name, values in _IMAGES.items()})
    for key, own in ((STATE, normalization.states), (ACTION, normalization.actions)):
        stats.pop(key, None)
        if own is not None:
            columns = {
                "mean": own.mean,
                "std": own.std,
                **dict.fromkeys(("min", "q01", "q10"), own.low),
                **dict.fromkeys(("max", "q99", "q90"), own.high),
            }
            stats[key] = {name: torch.tensor(values) for name, values in columns.items()}
    if ENVIRONMENT_STATE in shape.input_features and STATE in stats:
        # safetensors does not write one memory under two names.
        stats[ENVIRONMENT_STATE] = {name: values.clone() for name, values in stats[STATE].items()}
    return stats


def _of_folder(folder: str) -> dict[str, dict[str, Any]]:
    """Return all statistics in a folder, those of pictures among them."""
    from safetensors.torch import load_file

    stats: dict[str, dict[str, Any]] = {}
    for file in sorted(Path(folder).glob("policy_preprocessor_step_*_normalizer_processor.safetensors")):
        for name, values in load_file(file).items():
            key, _, statistic = name.rpartition(".")
            stats.setdefault(key, {})[statistic] = values
    return stats
