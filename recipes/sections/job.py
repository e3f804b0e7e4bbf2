"""Base configuration of recipes with an actor and a rollout."""

from __future__ import annotations

from rlinf_core import JobConfig


class ActorRolloutJob(JobConfig):
    """A whole file. A recipe adds its sections."""
