"""Keys of the agent recipe that have no effect in combination with others."""

from __future__ import annotations

from typing import Final

from recipes.language.config.language_no_effect import LANGUAGE
from rlinf_core import NoEffect

AGENT: Final = (
    *LANGUAGE,
    NoEffect(
        ("actor.warm_start.tool_share",),
        lambda config, sizes: config.data.source not in ("calculations", "lookups", "episodes"),
        lambda config: f"tasks of {config.data.source} do not specify the calls that solve them",
        because=("data.type", "data.train_data_paths"),
    ),
    NoEffect(
        ("data.shuffle",),
        lambda config, sizes: config.data.source == "episodes",
        "episode seeds are used in order",
        because=("data.type",),
    ),
)
