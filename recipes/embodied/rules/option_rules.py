"""Rules of `actor.model.options`, validated by the pydantic models of policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from recipes.embodied.config.model_options import MODEL_OPTIONS
from recipes.sections.checks import Report
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
