"""The section `algorithm` as a union: policy gradients, and the settings of each off-policy algorithm.

A base class holds the keys that all off-policy algorithms share; another holds what each states about itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias, Union, cast

from pydantic import Field

from recipes.embodied.config.algorithm_config import (
    ALGORITHMS,
    ActorCriticConfig,
    GroupConfig,
    LearningConfig,
    PolicyGradientConfig,
)
from rlinf_core import ConfigModel, Count, Fraction
from rlinf_core.config.sections.values import NonNegativeInt, OptionalPath, PositiveFloat
from rlinf_core.registry import import_target

DEFAULT_BATCH: Final = 256
SQUASHED: Final = "squashed_policy"
# Sources of transitions.
ONLINE: Final = "online"
DEMONSTRATIONS: Final = "demonstrations"
INTERVENTIONS: Final = "interventions"
# The shares of every batch: of demonstrations, as in RLPD, and of interventions, once there are any.
DEMONSTRATIONS_SHARE: Final = 0.5
INTERVENTIONS_SHARE: Final = 0.25
# Rows reserved for interventions in addition, over all actors.
_INTERVENTION_ROWS: Final = 100_000
# What `options` holds.
OF_ALGORITHM: Final = "The keys of this algorithm alone (docs/embodied.md)."


class ReplayConfig(ConfigModel):
    """The replay buffer."""

    capacity: Count = Field(
        default=1_000_000,
        description="Capacity in rows, over all actors; the oldest go first. A row is an observation, an action and a"
        " reward; an episode takes one row more than it has steps.",
    )
    storage: OptionalPath = Field(
        default=None,
        description="Folder on a disk of the actors' node that keeps the observations of the replay buffers in files;"
        " their room is reserved when the run starts and freed when it ends, in any way. Default: memory."
        " Demonstrations stay in memory.",
    )
    recording_path: OptionalPath = Field(
        default=None,
        description="Folder on the actors' node that keeps a file of each rollout pass as it arrives, so that an"
        " aborted run loses none; passes already in the folder are trained on. Default: none.",
    )


def buffer_rows(replay: ReplayConfig, actors: int, *, intervenes: bool) -> dict[str, int]:
    """Return the rows of the buffers that an actor fills during a run: one of all steps, and one of interventions."""
    rows = {ONLINE: replay.capacity // actors}
    if intervenes:
        rows[INTERVENTIONS] = min(_INTERVENTION_ROWS, replay.capacity) // actors
    return rows


class OffPolicySettings(LearningConfig):
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
    critics: Count = Field(
        default=2, description="Critics in the ensemble, each with two hidden layers of `actor.model.hidden_dim`."
    )
    critic_norm: Literal["none", "layer", "batch"] = Field(
        default="none",
        description="none; layer: layer normalization, as in RLPD; batch: batch renormalization without target"
        " networks, as in CrossQ.",
    )
    target_rate: Fraction = Field(default=0.005, description="Update rate (tau) of the target networks.")
    replay: ReplayConfig = Field(
        default_factory=ReplayConfig, description="The replay buffer: capacity, storage, recording_path."
    )


def off_policy_of(section: LearningConfig) -> OffPolicySettings:
    """Return the section `algorithm` of a job that learns off-policy.

    Raises:
        TypeError: the job learns on-policy.
    """
    if not isinstance(section, OffPolicySettings):
        raise TypeError(f"`loss_type: {section.loss_type}` learns on-policy")
    return section


class BootstrappedOptions(ConfigModel):
    """Options of algorithms whose targets are values of actions that the policy chooses next."""

    critics_in_target: Count = Field(
        default=2, description="Critics drawn for each update, whose minimum is the target value."
    )


class BootstrappedSettings(OffPolicySettings):
    """Those of algorithms whose targets are values of actions that the policy chooses next."""

    options: BootstrappedOptions = Field(default_factory=BootstrappedOptions, description=OF_ALGORITHM)


class OffPolicyMethod:
    """Static properties of an off-policy algorithm.

    Attributes:
        settings_model: the section `algorithm` of a job that uses it.
        policy_type: the `actor.model.model_type` that it trains.
        has_fixed_noise: whether the policy explores with noise of a fixed size; None: it may.
        records_alone: whether it learns only from demonstrations, not from steps in the run.
        learns_drawn_actions: whether it learns from actions as drawn, even if others were executed.
        judges_states: whether its critics also estimate values of states.
        uses_target_critics, uses_target_policy: whether copies track critics and policy at `target_rate`.
    """

    settings_model: ClassVar[type[OffPolicySettings]]
    policy_type: ClassVar[str] = SQUASHED
    has_fixed_noise: ClassVar[bool | None] = None
    records_alone: ClassVar[bool] = False
    learns_drawn_actions: ClassVar[bool] = False
    judges_states: ClassVar[bool] = False
    uses_target_critics: ClassVar[bool] = True
    uses_target_policy: ClassVar[bool] = False


# The algorithms with `critic_norm: batch`.
_WITH_JOINT_CRITICS: Final[Mapping[str, str]] = {
    "sac": "recipes.embodied.off_policy.crossq:CrossQ",
    "td3": "recipes.embodied.off_policy.crossq:CrossQTd3",
    "td3_bc": "recipes.embodied.off_policy.crossq:CrossQTd3Bc",
    "dsrl": "recipes.embodied.off_policy.crossq:CrossQDsrl",
}


def is_off_policy(loss_type: str) -> bool:
    """Return whether a value of `algorithm.loss_type` learns from a replay buffer."""
    return loss_type in ALGORITHMS


def method_of(section: LearningConfig) -> type[OffPolicyMethod]:
    """Return the algorithm that the section `algorithm` names.

    Raises:
        TypeError: the job learns on-policy.
    """
    settings = off_policy_of(section)
    plain = ALGORITHMS[section.loss_type].target
    return _imported(_WITH_JOINT_CRITICS[section.loss_type] if settings.critic_norm == "batch" else plain)


def trainer_of(policy_type: str) -> str:
    """Return the first value of `algorithm.loss_type` that trains a policy of this kind."""
    return next(name for name, method in METHODS.items() if method.policy_type == policy_type)


def _imported(target: str) -> type[OffPolicyMethod]:
    return cast("type[OffPolicyMethod]", import_target(target, "off-policy algorithm"))


METHODS: Final = {name: _imported(algorithm.target) for name, algorithm in ALGORITHMS.items()}
if TYPE_CHECKING:
    Algorithm: TypeAlias = PolicyGradientConfig | OffPolicySettings
else:
    Algorithm = Union[(ActorCriticConfig, GroupConfig, *(method.settings_model for method in METHODS.values()))]
