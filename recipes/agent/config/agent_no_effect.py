"""Keys of the agent recipe that change nothing beside others."""

from __future__ import annotations

from typing import Final

from recipes.language.config.language_no_effect import LANGUAGE
from rlinf_core.config.model import NoEffect

AGENT: Final = (
    *LANGUAGE,
    NoEffect(
        ("actor.warm_start.tool_share",),
        lambda config, sizes: config.data.source not in ("calculations", "lookups", "episodes"),
        lambda config: f"tasks of {config.data.source} do not say which calls lead to their answers",
        because=("data.type", "data.train_data_paths"),
    ),
    NoEffect(
        ("data.shuffle",),
        lambda config, sizes: config.data.source == "episodes",
        "seeds of episodes are taken in their order",
        because=("data.type",),
    ),
)
