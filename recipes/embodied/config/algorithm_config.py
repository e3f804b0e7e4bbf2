"""`algorithm` of the embodied recipe, as a union: policy gradients, and the settings of each off-policy algorithm.

Here are the keys of every algorithm, of policy gradients, and those that off-policy algorithms share; the keys of a
single one are beside its loss, in `off_policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, Union, cast

from pydantic import Field

from recipes.sections.algorithm import LOSSES, OTHER_LOSSES, AdvantageType, AlgorithmConfig
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigModel, Count, Fraction
from rlinf_core.config.model import Options, Variant
from rlinf_core.config.sections.values import Level, NonNegativeFloat, NonNegativeInt, OptionalPath, PositiveFloat
from rlinf_core.registry import import_target
from rlinf_core.scalars import Bool, Text


class OffPolicyType(NamedTuple):
    """An off-policy algorithm: its class as `package.module:Class`, and a few words about it."""

    target: str
    summary: str


# Classes are named, since their modules import torch and this configuration.
ALGORITHMS: Final[Mapping[str, OffPolicyType]] = {
    "sac": OffPolicyType("recipes.embodied.off_policy.sac:Sac", "soft actor-critic"),
    "td3": OffPolicyType("recipes.embodied.off_policy.td3:Td3", "a deterministic policy and delayed updates"),
    "td3_bc": OffPolicyType(
        "recipes.embodied.off_policy.td3_bc:Td3Bc", "td3 on demonstrations, whose actions it also imitates"
    ),
    "iql": OffPolicyType(
        "recipes.embodied.off_policy.iql:Iql",
        "implicit Q-learning, demonstrations of which better actions weigh more",
    ),
    "dsrl": OffPolicyType(
        "recipes.embodied.off_policy.dsrl:Dsrl", "sac on the noise of a frozen diffusion or flow policy"
    ),
}
LossName = Annotated[Text, KnownOrOwn("loss_type", (*LOSSES, *ALGORITHMS), OTHER_LOSSES)]


class LearningConfig(Variant):
    """The keys of every algorithm."""

    chosen_by: ClassVar[str] = "loss_type"

    loss_type: LossName = Field(
        default="actor_critic",
        description="Loss. actor_critic: policy and value loss; actor: policy loss only; off policy, with critics of"
        " actions trained from a replay buffer, "
        + "; ".join(f"{name}: {algorithm.summary}" for name, algorithm in ALGORITHMS.items())
        + "; or `package.module:name`. It chooses the other keys.",
    )
    group_size: Count = Field(
        default=1,
        description="Samples per group: they share a start (a prompt or an initial state), and GRPO compares them.",
    )
    gamma: Fraction = Field(default=0.99, description="Discount factor of rewards, per step.")
    normalize_observations: Bool = Field(
        default=False,
        description="Normalize states by the mean and standard deviation of all rows so far, updated after each"
        " training step, with mlp_policy, cnn_policy and squashed_policy. They are saved and exported with the policy."
        " Off policy, rows of demonstrations count, too.",
    )


class PolicyGradientOptions(ConfigModel, extra="allow"):
    """Options of built-in advantages and losses. Those of a component of your own may have any name."""

    normalize_advantages: Bool = Field(
        default=True, description="Normalize the advantages of a step to mean 0 and standard deviation 1."
    )
    filter_rewards: Bool = Field(
        default=False, description="Drop groups whose rewards are all equal; under GRPO they carry no learning signal."
    )


class ActorCriticOptions(PolicyGradientOptions):
    """Options of `actor_critic` and its advantages."""

    critic_warmup_steps: NonNegativeInt = Field(
        default=0,
        description="Initial training steps that train only the value head, for a pretrained policy with an untrained"
        " head.",
    )
    gae_lambda: Fraction = Field(default=0.95, description="Lambda of GAE.")
    value_clip: PositiveFloat | None = Field(
        default=None,
        description="Value clipping: largest change of a value in one training step, in units of return; null: none.",
    )
    value_weight: PositiveFloat = Field(
        default=1.0,
        description="Weight of the value loss, half the squared error, relative to the policy loss.",
    )


_OPTIONS: Final = (
    "The keys of this advantage and this loss alone (docs/embodied.md), and parameters of a custom one; its pydantic"
    " model, if any, validates them."
)


class PolicyGradientConfig(LearningConfig, AlgorithmConfig):
    """The keys of policy gradients."""

    built_in: ClassVar[type[PolicyGradientOptions]] = PolicyGradientOptions
    of_others: ClassVar[Mapping[str, str]] = dict.fromkeys(ActorCriticOptions.model_fields, "`loss_type: actor_critic`")

    loss_type: LossName = "actor_critic"
    options: Options[PolicyGradientOptions] = Field(default_factory=dict[str, Any], description=_OPTIONS)
    update_epoch: Count = 6
    normalize_rewards: Bool = Field(
        default=False,
        description="Divide rewards by the running standard deviation of discounted returns, and clip them to -10..10."
        " `env/` and `eval/` metrics are of rewards as they are.",
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="Divergence of the policy from the one that acted (`train/actor/approx_kl`) in the last batch of a"
        " pass over the samples, above which the training step takes no further pass; null: `update_epoch` passes.",
    )
    logprob_type: Level = Field(
        default="action_level",
        description="Unit of a probability ratio and of an entropy: a token, an action or a chunk, whose rewards then"
        " are summed.",
    )
    bc_weight: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of the behavior-cloning loss on demonstrations (`data.train_data_paths`) relative to the"
        " policy loss; every micro batch adds as many demonstration rows. 0: none.",
    )

    @property
    def settings(self) -> PolicyGradientOptions:
        return self.built_in.model_validate(self.options)


def policy_gradient_of(section: LearningConfig) -> PolicyGradientConfig:
    """Return the section `algorithm` of a job that learns on-policy.

    Raises:
        TypeError: the job learns off-policy.
    """
    if not isinstance(section, PolicyGradientConfig):
        raise TypeError(
            f"`loss_type: {section.loss_type}` learns off-policy: `OffPolicyActor` and `OffPolicyRolloutWorker` run it"
        )
    return section


class ActorCriticConfig(PolicyGradientConfig):
    """PPO with GAE, and losses of your own."""

    others: ClassVar[tuple[str, ...]] = ("package.module:name",)

    built_in: ClassVar[type[PolicyGradientOptions]] = ActorCriticOptions

    loss_type: LossName = "actor_critic"
    adv_type: AdvantageType = "gae"
    options: Options[ActorCriticOptions] = Field(default_factory=dict[str, Any], description=_OPTIONS)

    @classmethod
    def takes(cls, name: str) -> bool:
        """Return whether `name` is `actor_critic` or a custom loss."""
        return ":" in name or super().takes(name)


def warmup_steps(algorithm: PolicyGradientConfig) -> int:
    """Return how many training steps train only the value head."""
    settings = algorithm.settings
    return settings.critic_warmup_steps if isinstance(settings, ActorCriticOptions) else 0


class GroupConfig(PolicyGradientConfig):
    """GRPO, and others without values."""

    loss_type: LossName = "actor"
    adv_type: AdvantageType = "grpo"


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
