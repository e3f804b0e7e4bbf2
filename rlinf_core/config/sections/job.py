"""The keys that the file of every recipe has."""

from __future__ import annotations

from pydantic import Field

from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.config.model import ConfigModel
from rlinf_core.scalars import Text


class JobConfig(ConfigModel):
    """A whole file. A recipe adds its sections."""

    recipe: Text = Field(
        description="Recipe to train, a name listed by `rlinf recipes`, or your own as `package.module:name`. A file"
        " without it only describes machines."
    )
    cluster: ClusterConfig = Field(description="The machines, and the placement of components on them.")
