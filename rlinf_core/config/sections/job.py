"""The keys that the file of every recipe has."""

from __future__ import annotations

from pydantic import Field

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.model import ConfigModel
from rlinf_core.scalars import Text


class JobConfig(ConfigModel):
    """A whole file. A recipe adds its sections."""

    recipe: Text = Field(
        description="What is trained: a name that `rlinf recipes` lists. A file without it is about machines only."
    )
    cluster: ClusterConfig = Field(description="The machines, and the places of the components on them.")
