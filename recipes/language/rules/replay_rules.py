"""Rules about `actor.router_replay`: a mixture of experts, and an engine that reports its choices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from recipes.language.config import LanguageConfig
from recipes.language.config.engine_facts import BACKENDS
from recipes.language.models.expert_sizes import expert_sizes
from recipes.sections.checks import Report, blame
from recipes.sections.model_folders import SETTINGS, read_object

# Model types that choose experts without `torch.topk`, or twice in a layer.
NOT_REPLAYED: Final = frozenset(("beam", "flint", "jetmoe", "longcat_flash", "phimoe"))
_KEY: Final = ("actor", "router_replay")
_MODEL: Final = ("actor", "model", "model_path")


def check_router_replay(config: LanguageConfig, report: Report) -> None:
    """Report what the choices of experts cannot be replayed with."""
    if not config.actor.replays_routers:
        return
    remedy, folder = "write `router_replay: false`", config.actor.model.model_path
    backend = BACKENDS[config.rollout.backend].name
    if backend != "torch":
        report(
            blame(config, _KEY, ("rollout", "backend")),
            "conflicting-settings",
            f"engine `{backend}` does not report the experts that it chose",
            f"{remedy}, or `rollout.backend: torch`",
        )
    fault = "a model built from scratch has no experts" if folder is None else _fault(folder)
    if fault is not None:
        report(_KEY, "conflicting-settings", fault, remedy, about=[_MODEL])


def _fault(folder: str) -> str | None:
    """Return why the experts of the model in a folder cannot be replayed; None: nothing is known against it."""
    settings = read_object(Path(folder) / SETTINGS)
    return fault_of_replay(settings) if settings else None


def fault_of_replay(settings: Mapping[str, Any]) -> str | None:
    """Return why the choices of a model's routers cannot be replayed; None: nothing is known against it.

    Args:
        settings: config.json of its folder.
    """
    kind, text = settings.get("model_type"), settings.get("text_config")
    text = cast("Mapping[str, Any]", text) if isinstance(text, dict) else settings
    if kind in NOT_REPLAYED:
        return f"the choices of experts of models of type `{kind}` cannot be replayed"
    if text.get("topk_method") == "group_limited_greedy":
        return "experts that are chosen by groups (`topk_method: group_limited_greedy`) cannot be replayed"
    return None if expert_sizes(text) else f"the model, of type `{kind}`, has no experts"
