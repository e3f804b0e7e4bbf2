"""Rules of `actor.model.options`, validated by the pydantic models of policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from recipes.embodied.config.model_options import MODEL_OPTIONS
from recipes.embodied.models.folder_facts import published_horizon
from recipes.sections.checks import Report, blame
from recipes.sections.own_options import check_options, check_values
from rlinf_core import with_options
from rlinf_core.config.tree import Path

if TYPE_CHECKING:
    from recipes.embodied.config import PolicyJob


def check_model_options(config: PolicyJob, report: Report) -> None:
    """Report options of the policy that nothing takes, or that its pydantic model refuses."""
    model = config.actor.model
    ours = MODEL_OPTIONS.get(model.model_type)
    at: Path = ("actor", "model", "options")
    if ours is None:
        check_options(config, at, model.options, {"model_type": model.model_type}, report)
    elif model.options:
        check_values(at, model.options, [with_options(ours)(SimpleNamespace(__name__=model.model_type))], report)
    if ours is not None and "action_horizon" in ours.model_fields:
        _check_horizon(config, report)


def _check_horizon(config: PolicyJob, report: Report) -> None:
    """Report that more actions are carried out than the model predicts."""
    model = config.actor.model
    configured = model.options.get("action_horizon")
    published = published_horizon(model.model_path) if configured is None and model.model_path else None
    horizon = configured if isinstance(configured, int) else published
    if horizon is None or model.num_action_chunks <= horizon:
        return
    source = f"the model in `{model.model_path}`" if configured is None else "the model"
    report(
        blame(config, ("actor", "model", "num_action_chunks"), ("actor", "model", "options", "action_horizon")),
        "conflicting-settings",
        f"{source} predicts {horizon} actions, but `num_action_chunks` is {model.num_action_chunks}",
        f"write `num_action_chunks: {horizon}` or less; or, to train it to predict more,"
        f" `options: {{action_horizon: {model.num_action_chunks}}}`",
        about=[("actor", "model", "model_path")],
    )
