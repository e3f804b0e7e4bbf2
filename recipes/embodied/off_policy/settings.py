"""Keys that every off-policy algorithm has: `algorithm.off_policy` without those of single algorithms."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from rlinf_core import ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.config.sections.values import NonNegativeInt, OptionalPath, PositiveFloat
from rlinf_core.scalars import Bool

DEFAULT_BATCH: Final = 256
SQUASHED: Final = "squashed_policy"
# Sources of transitions.
ONLINE: Final = "online"
DEMONSTRATIONS: Final = "demonstrations"
INTERVENTIONS: Final = "interventions"


class ReplayConfig(ConfigModel):
    """The replay buffer."""

    no_effect: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys(
            ("priority_alpha", "priority_beta"),
            lambda replay, sizes: not replay.prioritized,
            "transitions are drawn uniformly: `prioritized` is false",
            "remove it, or write `prioritized: true`",
            because=("prioritized",),
        ),
        IgnoredKeys(
            ("spill_path",),
            lambda replay, sizes: replay.memory_gib is None,
            "all rows are kept in memory: `memory_gib` is not set",
            "remove it, or write `memory_gib`",
            because=("memory_gib",),
        ),
    )

    capacity: Count = Field(
        default=1_000_000,
        description="Capacity in rows, over all actors; the oldest go first. A row is an observation, an action and a"
        " reward; an episode takes one row more than it has steps.",
    )
    prioritized: Bool = Field(default=False, description="Sample transitions by their last error instead of uniformly.")
    priority_alpha: Fraction = Field(default=0.6, description="Exponent of the priorities; 0: uniform.")
    priority_beta: Fraction = Field(
        default=0.4, description="Importance-sampling exponent: how much of the priority bias is corrected."
    )
    demonstrations_share: Fraction = Field(
        default=0.5, description="Share of every batch drawn from `data.train_data_paths`, if there are any."
    )
    interventions_share: Fraction = Field(
        default=0.25,
        description="Share of every batch drawn from human interventions, once there are any"
        " (`env.train.intervention`).",
    )
    interventions_capacity: Count = Field(
        default=100_000, description="Additional rows reserved for interventions, over all actors; at most `capacity`."
    )
    image_memory_gib: PositiveFloat | None = Field(
        default=None,
        description="Compress images losslessly into at most this many GiB, over all actors; when full, the oldest"
        " rows are dropped, even below `capacity`. Demonstrations are compressed too and not counted."
        " Default: images are not compressed.",
    )
    memory_gib: PositiveFloat | None = Field(
        default=None,
        description="Memory of the replay buffers, in GiB over all actors; observations beyond it are spilled to files"
        " in `spill_path`. Demonstrations stay in memory and are not counted. Default: everything is in"
        " memory.",
    )
    spill_path: OptionalPath = Field(
        default=None,
        description="Folder for the spill files of `memory_gib`, on the actors' node. Disk space is reserved when the"
        " run starts and freed when it ends, in any way.",
    )
    recording_path: OptionalPath = Field(
        default=None,
        description="Folder on the actors' node that records every step as it arrives, so that an aborted run loses"
        " none; steps already in the folder are trained on. Default: none.",
    )


class BufferSize(NamedTuple):
    """The bounds of one actor's buffer of one source.

    Attributes:
        rows: the most that are kept.
        image_bytes: the most that its compressed images take; None: they are not compressed.
        memory_bytes: the most that its columns take in memory; None: all of them are there.
    """

    rows: int
    image_bytes: int | None
    memory_bytes: int | None


def buffer_sizes(replay: ReplayConfig, actors: int, *, intervenes: bool) -> dict[str, BufferSize]:
    """Return the bounds of the buffers that fill up in a run: of all steps, and of those of interventions."""
    rows = {ONLINE: replay.capacity // actors}
    if intervenes:
        rows[INTERVENTIONS] = min(replay.interventions_capacity, replay.capacity) // actors
    total = sum(rows.values())

    def share(gib: float | None, count: int) -> int | None:
        return None if gib is None else int(gib * 2**30) // actors * count // total

    return {
        name: BufferSize(count, share(replay.image_memory_gib, count), share(replay.memory_gib, count))
        for name, count in rows.items()
    }


class OffPolicySettings(ConfigModel):
    """The pace of learning, the critics, their targets and the replay buffer."""

    update_to_data: PositiveFloat = Field(default=1.0, description="Critic updates per environment step.")
    policy_interval: Count = Field(default=1, description="Critic updates per policy update.")
    learning_starts: Count = Field(
        default=1000, description="Environment steps, over all environments, before learning starts."
    )
    random_steps: NonNegativeInt = Field(
        default=0,
        description="Initial environment steps, over all environments, with uniformly random actions instead of the"
        " policy's.",
    )
    n_steps: Count = Field(
        default=1, description="n-step returns: steps whose rewards are summed before the value is bootstrapped."
    )
    critics: Count = Field(default=2, description="Critics in the ensemble.")
    critic_layers: Count = Field(
        default=2, description="Hidden layers of a critic, each `actor.model.hidden_dim` wide."
    )
    critic_norm: Literal["none", "layer", "batch"] = Field(
        default="none",
        description="none; layer: layer normalization, as in RLPD; batch: batch renormalization without target"
        " networks, as in CrossQ.",
    )
    target_rate: Fraction = Field(default=0.005, description="Update rate (tau) of the target networks.")
    replay: ReplayConfig = Field(
        default_factory=ReplayConfig, description="The replay buffer: capacity, prioritized, demonstrations_share."
    )


class BootstrappedSettings(OffPolicySettings):
    """Those of algorithms whose targets are values of actions that the policy chooses next."""

    critics_in_target: Count = Field(
        default=2, description="Critics drawn for each update, whose minimum is the target value."
    )
