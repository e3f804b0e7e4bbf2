"""The rules about `env.eval.inference`: an emulated delay of the policy, and temporal ensembling."""

from __future__ import annotations

from typing import Final

from recipes.embodied.config import PolicyJob
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.config.model_options import RANDOM_LEROBOT
from recipes.embodied.models.folder_facts import lerobot_type, published_horizon
from recipes.sections.checks import Report
from rlinf_core.config.tree import Path

_EVAL: Final[Path] = ("env", "eval", "inference")
_MODEL: Final[Path] = ("actor", "model", "model_type")
# By flow matching, with a horizon that may be longer than what is carried out.
_FLOWS: Final = ("flow_policy", "pi0", "pi05", "smolvla")


def check_inference(config: PolicyJob, report: Report) -> None:
    """Report a delay that the policy cannot bridge, and one of a robot."""
    inference = config.env.eval.inference
    if (inference.delay or inference.chunking not in ("wait", "ensemble")) and is_robot(config.env.eval.env_type):
        report(_EVAL, "conflicting-settings", "a robot's delay is real, and not emulated", "remove it")
    if inference.chunking == "wait":
        return
    model, at = config.actor.model, (*_EVAL, "chunking")
    if inference.chunking == "ensemble":
        _check_ensemble(config, report)
        return
    if model.model_type not in _FLOWS and ":" not in model.model_type:
        report(
            at,
            "conflicting-settings",
            f"`chunking: {inference.chunking}` needs a policy by flow matching, and `{model.model_type}` is none",
            f"use one of {', '.join(f'`{name}`' for name in _FLOWS)}, or remove it",
            about=[_MODEL],
        )
        return
    if inference.chunking == "real_time":
        _check_absolute(config, "real-time chunking", report)
    horizon, executed = _horizon(config), model.num_action_chunks
    if isinstance(horizon, int) and inference.delay > (most := max(0, min(executed, horizon - executed))):
        report(
            (*_EVAL, "delay"),
            "conflicting-settings",
            f"a delay of {inference.delay} steps is too long: the policy looks once meanwhile, and the arm goes on with"
            f" the chunk before, of whose {horizon} actions {executed} are carried out by then",
            f"write at most {most}; or change `num_action_chunks` or `options.action_horizon`",
            about=[("actor", "model", "num_action_chunks"), ("actor", "model", "options", "action_horizon")],
        )


def _check_ensemble(config: PolicyJob, report: Report) -> None:
    """Report a policy of which no step is predicted twice, or whose predictions have no mean."""
    model, at = config.actor.model, (*_EVAL, "chunking")
    if config.env.eval.inference.delay:
        report(
            (*_EVAL, "delay"),
            "conflicting-settings",
            "`chunking: ensemble` averages predictions that are there at once",
            "remove it, or write `chunking: real_time`",
            about=[at],
        )
    _check_absolute(config, "temporal ensembling", report)
    horizon = _horizon(config)
    is_act = model.model_type == "lerobot" and lerobot_type(model) in (None, *RANDOM_LEROBOT)
    if model.model_type not in _FLOWS and ":" not in model.model_type and not is_act:
        report(
            at,
            "conflicting-settings",
            f"`chunking: ensemble` needs a policy that predicts more than is carried out, and `{model.model_type}`"
            " does not",
            f"use lerobot's `act`, or one of {', '.join(f'`{name}`' for name in _FLOWS)}, or remove it",
            about=[_MODEL],
        )
    elif isinstance(horizon, int) and horizon <= model.num_action_chunks and not is_act:
        report(
            at,
            "conflicting-settings",
            f"`chunking: ensemble` averages predictions of a step, but all {horizon} actions of a chunk are carried out"
            " before the next one",
            "write `num_action_chunks: 1`, as in ACT, with `options: {action_horizon: ...}`",
            about=[("actor", "model", "num_action_chunks")],
        )


def _check_absolute(config: PolicyJob, what: str, report: Report) -> None:
    """Report actions relative to a state, which differ between chunks."""
    if config.actor.model.options.get("relative_actions"):
        report(
            (*_EVAL, "chunking"),
            "conflicting-settings",
            f"{what} needs absolute actions: those of two chunks are relative to different states",
            "remove it, or write `chunking: switch`",
            about=[("actor", "model", "options", "relative_actions")],
        )


def _horizon(config: PolicyJob) -> object:
    """Return the actions that a policy predicts together; None: not known."""
    model = config.actor.model
    published = published_horizon(model.model_path) if model.model_path else None
    return (
        model.options.get("action_horizon")
        or published
        or (None if ":" in model.model_type else model.num_action_chunks)
    )
