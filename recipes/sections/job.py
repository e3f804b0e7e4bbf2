"""The whole file of a recipe whose job has an actor and a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rlinf_core import JobConfig


class ActorRolloutJob(JobConfig):
    """A whole file. A recipe adds its sections."""

    not_available: ClassVar[Mapping[str, str]] = {
        **JobConfig.not_available,
        "weight_syncer": "`runner.weight_sync_interval` says how often weights are sent",
        "inference": "the actor computes log probabilities itself: remove the section, and its place",
        "reward": "remove it: environments give the rewards",
        "critic": "values come from the model that acts: `actor.model.add_value_head`",
        "trainer": "`runner` says how long a run lasts, what it keeps, and where results go",
        "actor_rollout_ref": "its parts are the sections `actor` and `rollout`",
    }
