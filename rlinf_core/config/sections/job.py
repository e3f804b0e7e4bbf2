"""The keys that the file of every recipe has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from rlinf_core.config.cluster import ClusterConfig
from rlinf_core.config.model import ConfigModel
from rlinf_core.scalars import Text


class JobConfig(ConfigModel):
    """A whole file. A recipe adds its sections."""

    not_available: ClassVar[Mapping[str, str]] = {
        "defaults": "`extends: FILE`, or a list of files, names what this file overrides; each is a whole file",
        "hydra": "remove it: every run has a folder of its own below `runner.logger.log_path`",
        "task_type": "write `recipe: NAME`; `rlinf recipes` lists the names",
    }

    recipe: Text = Field(
        description="What is trained: a name that `rlinf recipes` lists. A file without it is about machines only."
    )
    cluster: ClusterConfig = Field(description="The machines, and the places of the components on them.")
