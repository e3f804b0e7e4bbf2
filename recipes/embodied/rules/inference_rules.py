"""The rules about `env.eval.inference`: an emulated delay of the policy."""

from __future__ import annotations

from typing import Final

from recipes.embodied.config import PolicyJob
from recipes.embodied.config.env_types import is_robot
from recipes.embodied.models.folder_facts import published_horizon
from recipes.sections.checks import Report
from rlinf_core.config.tree import Path

_EVAL: Final[Path] = ("env", "eval", "inference")
_MODEL: Final[Path] = ("actor", "model", "model_type")
# By flow matching, with a horizon that may be longer than what is carried out.
_FLOWS: Final = ("flow_policy", "pi0", "pi05", "smolvla")


def check_inference(config: PolicyJob, report: Report) -> None:
    """Report a delay that the policy cannot bridge, and one of a robot."""
    inference = config.env.eval.inference
    if (inference.delay or inference.chunking != "wait") and is_robot(config.env.eval.env_type):
        report(_EVAL, "conflicting-settings", "a robot's delay is real, and not emulated", "remove it")
    if inference.chunking == "wait":
        return
    model, at = config.actor.model, (*_EVAL, "chunking")
    if model.model_type not in _FLOWS and ":" not in model.model_type:
        report(
            at,
            "conflicting-settings",
            f"`chunking: {inference.chunking}` needs a policy by flow matching, and `{model.model_type}` is none",
            f"use one of {', '.join(f'`{name}`' for name in _FLOWS)}, or remove it",
            about=[_MODEL],
        )
        return
    if inference.chunking == "real_time" and model.options.get("relative_actions"):
        report(
            at,
            "conflicting-settings",
            "real-time chunking needs absolute actions: those of two chunks are relative to different states",
            "remove it, or write `chunking: switch`",
            about=[("actor", "model", "options", "relative_actions")],
        )
    configured = model.options.get("action_horizon")
    published = published_horizon(model.model_path) if model.model_path else None
    horizon = configured or published or (None if ":" in model.model_type else model.num_action_chunks)
    executed = model.num_action_chunks
    if isinstance(horizon, int) and inference.delay > (most := max(0, min(executed, horizon - executed))):
        report(
            (*_EVAL, "delay"),
            "conflicting-settings",
            f"a delay of {inference.delay} steps is too long: the policy looks once meanwhile, and the arm goes on with"
            f" the chunk before, of whose {horizon} actions {executed} are carried out by then",
            f"write at most {most}; or change `num_action_chunks` or `options.action_horizon`",
            about=[("actor", "model", "num_action_chunks"), ("actor", "model", "options", "action_horizon")],
        )
