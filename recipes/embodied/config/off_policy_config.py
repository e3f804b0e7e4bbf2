"""`algorithm.off_policy`: the replay buffer, the critics and the pace of `loss_type: sac` and `td3`."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from rlinf_core import ConfigModel
from rlinf_core.config.model import NoEffect
from rlinf_core.config.sections.values import Count, Fraction, NonNegativeInt, OptionalPath, PositiveFloat
from rlinf_core.scalars import Bool, Float

# Values of `algorithm.loss_type` that learn from a replay buffer.
OFF_POLICY_LOSSES: Final = ("sac", "td3")
DEFAULT_BATCH: Final = 256
# Sources of transitions.
ONLINE: Final = "online"
DEMONSTRATIONS: Final = "demonstrations"
INTERVENTIONS: Final = "interventions"


def is_off_policy(loss_type: str) -> bool:
    """Return whether a value of `algorithm.loss_type` learns from a replay buffer."""
    return loss_type in OFF_POLICY_LOSSES


class ReplayConfig(ConfigModel):
    """The replay buffer."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("priority_alpha", "priority_beta"),
            lambda replay, sizes: not replay.prioritized,
            "transitions are drawn uniformly: `prioritized` is false",
            "remove it, or write `prioritized: true`",
            because=("prioritized",),
        ),
        NoEffect(
            ("spill_path",),
            lambda replay, sizes: replay.memory_gib is None,
            "all rows are kept in memory: `memory_gib` is not given",
            "remove it, or write `memory_gib`",
            because=("memory_gib",),
        ),
    )

    capacity: Count = Field(
        default=1_000_000,
        description="Rows that are kept, the newest, over all actors; a row is an observation, an action and a reward,"
        " and an episode has one more than its steps.",
    )
    prioritized: Bool = Field(default=False, description="Draw transitions by their last error, instead of uniformly.")
    priority_alpha: Fraction = Field(default=0.6, description="Exponent of errors: 0 draws uniformly.")
    priority_beta: Fraction = Field(default=0.4, description="How much of the bias that this brings is corrected.")
    demonstrations_share: Fraction = Field(
        default=0.5, description="Share of every batch that comes from `data.train_data_paths`, where there are any."
    )
    interventions_share: Fraction = Field(
        default=0.25,
        description="Share of every batch that comes from steps in which somebody intervened, as soon as there are any"
        " (`env.train.intervention`).",
    )
    interventions_capacity: Count = Field(
        default=100_000, description="Rows of such steps that are kept besides, over all actors; at most `capacity`."
    )
    image_memory_gib: PositiveFloat | None = Field(
        default=None,
        description="Compress images, without loss, into at most so many GiB over all actors; where that is used up"
        " the oldest rows go, whatever `capacity` says. Demonstrations are compressed, too, and not counted. Default:"
        " images are kept as they are.",
    )
    memory_gib: PositiveFloat | None = Field(
        default=None,
        description="Memory of the replay buffers, in GiB over all actors; observations that do not fit go to files in"
        " `spill_path`. Demonstrations stay in memory, and are not counted. Default: everything is in memory.",
    )
    spill_path: OptionalPath = Field(
        default=None,
        description="Folder, on the node of the actors, of the files of `memory_gib`. Their room is taken when the run"
        " begins, and given back when it ends, however it does.",
    )
    recording_path: OptionalPath = Field(
        default=None,
        description="Folder, on the node of the actors, in which every step is recorded as it arrives, so that nothing"
        " is lost with the run; steps that are there already are learned from. Default: none.",
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


class OffPolicyConfig(ConfigModel):
    """The replay buffer, the critics and the pace of learning."""

    update_to_data: PositiveFloat = Field(
        default=1.0, description="Updates of the critics for each step of an environment."
    )
    policy_interval: Count = Field(default=1, description="Updates of the critics for each one of the policy.")
    learning_starts: Count = Field(default=1000, description="Steps over all environments before anything is learned.")
    random_steps: NonNegativeInt = Field(
        default=0,
        description="Steps over all environments at the beginning whose actions are drawn uniformly, instead of by the"
        " policy.",
    )
    n_steps: Count = Field(default=1, description="Steps whose rewards count before a value stands in for the others.")
    critics: Count = Field(default=2, description="Critics in the ensemble.")
    critics_in_target: Count = Field(
        default=2, description="How many of them, drawn anew for each update, the smallest value of a target is from."
    )
    critic_layers: Count = Field(
        default=2, description="Hidden layers of a critic, each `actor.model.hidden_dim` wide."
    )
    critic_norm: Literal["none", "layer", "batch"] = Field(
        default="none",
        description="none; layer: layer normalization, as RLPD has it; batch: batch renormalization and no target"
        " networks, as CrossQ has it.",
    )
    policy_values: Literal["min", "mean"] = Field(
        default="min", description="Which value of the ensemble the policy ascends: the smallest, or the mean."
    )
    target_rate: Fraction = Field(default=0.005, description="How far target networks move in an update.")
    temperature: PositiveFloat = Field(default=1.0, description="Weight of the entropy at first.")
    learn_temperature: Bool = Field(
        default=True, description="Adapt the weight of the entropy, so that the entropy is `target_entropy`."
    )
    target_entropy: Float | None = Field(
        default=None, description="In nats. Default: minus the number of numbers in an action."
    )
    entropy_in_target: Bool = Field(default=True, description="Count the entropy of later actions as reward.")
    target_noise: PositiveFloat = Field(
        default=0.2, description="Deviation of the noise on the next actions in targets, as TD3 has it."
    )
    target_noise_clip: PositiveFloat = Field(default=0.5, description="Largest noise on the next actions in targets.")
    replay: ReplayConfig = Field(
        default_factory=ReplayConfig, description="The replay buffer: capacity, prioritized, demonstrations_share."
    )
