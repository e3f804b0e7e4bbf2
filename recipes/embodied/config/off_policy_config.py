"""`algorithm.off_policy`: the replay buffer, the critics and the pace of `OFF_POLICY_LOSSES`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from rlinf_core import ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.config.sections.values import NonNegativeInt, OptionalPath, PositiveFloat
from rlinf_core.scalars import Bool, Float

# Values of `algorithm.loss_type` that learn from a replay buffer.
OFF_POLICY_LOSSES: Final = ("sac", "td3", "td3_bc", "iql", "dsrl")
DETERMINISTIC_LOSSES: Final = ("td3", "td3_bc")
CLONING_LOSS: Final = "td3_bc"
IMPLICIT_LOSS: Final = "iql"
# Whose action is the noise that a frozen policy begins with.
NOISE_LOSS: Final = "dsrl"
ENTROPY_LOSSES: Final = ("sac", NOISE_LOSS)
# Those that learn from recorded transitions alone.
RECORDED_LOSSES: Final = (CLONING_LOSS, IMPLICIT_LOSS)
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


class OffPolicyConfig(ConfigModel):
    """The replay buffer, the critics and the pace of learning."""

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
    critics_in_target: Count = Field(
        default=2, description="Critics drawn for each update, whose minimum is the target value."
    )
    critic_layers: Count = Field(
        default=2, description="Hidden layers of a critic, each `actor.model.hidden_dim` wide."
    )
    critic_norm: Literal["none", "layer", "batch"] = Field(
        default="none",
        description="none; layer: layer normalization, as in RLPD; batch: batch renormalization without target"
        " networks, as in CrossQ.",
    )
    policy_values: Literal["min", "mean"] = Field(
        default="min", description="Value of the ensemble that the policy maximizes: the minimum or the mean."
    )
    target_rate: Fraction = Field(default=0.005, description="Update rate (tau) of the target networks.")
    temperature: PositiveFloat = Field(default=1.0, description="Initial weight of the entropy.")
    learn_temperature: Bool = Field(default=True, description="Adapt the entropy weight to reach `target_entropy`.")
    target_entropy: Float | None = Field(
        default=None, description="Target entropy, in nats. Default: minus the action dimension."
    )
    entropy_in_target: Bool = Field(default=True, description="Include the entropy of later actions in the return.")
    target_noise: PositiveFloat = Field(
        default=0.2, description="Standard deviation of the noise on the next actions in targets, as in TD3."
    )
    target_noise_clip: PositiveFloat = Field(
        default=0.5, description="Bound of the noise on the next actions in targets."
    )
    cloning_scale: PositiveFloat = Field(
        default=2.5,
        description="Weight of values against the distance from recorded actions (alpha) with `loss_type: td3_bc`.",
    )
    expectile: Annotated[Float, Field(gt=0, lt=1)] = Field(
        default=0.7,
        description="Expectile of recorded actions' values that a state's value is, with `loss_type: iql` (tau).",
    )
    advantage_scale: PositiveFloat = Field(
        default=3.0,
        description="Inverse temperature (beta) of `loss_type: iql`: recorded actions weigh exp(beta * advantage).",
    )
    noise_aliasing: Bool = Field(
        default=False,
        description="Learn values of actions, and of noise from those, with `loss_type: dsrl` (DSRL-NA): fewer steps,"
        " but every update runs the frozen policy twice. Else values of noise alone (DSRL-SAC).",
    )
    replay: ReplayConfig = Field(
        default_factory=ReplayConfig, description="The replay buffer: capacity, prioritized, demonstrations_share."
    )
