"""`algorithm`: advantages, losses, how often samples are trained on, options of a user's own component, and rules on
keys that have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from recipes.sections.values import KnownOrOwn, check_names
from rlinf_core import ConfigError, ConfigModel, Count, Fraction, IgnoredKeys
from rlinf_core.algorithms.options import option_names, options_model_of
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.model import WorldSizes
from rlinf_core.config.sections.values import LossAggregation, NonNegativeFloat
from rlinf_core.registry import import_target
from rlinf_core.scalars import Data, Text

# Advantages that compare only total rewards within a group; all that compare the members of a group; all advantages
# that every recipe has.
_WITHIN_GROUP: Final = ("grpo", "dr_grpo", "rloo")
GROUP_ADVANTAGES: Final = (*_WITHIN_GROUP, "reinforce_pp_baseline")
ADVANTAGES: Final = ("gae", *_WITHIN_GROUP, "reinforce_pp", "reinforce_pp_baseline")
LOSSES: Final = ("actor_critic", "actor")


# The names of our advantages in other projects.
OTHER_ADVANTAGES: Final = {
    "reinpp": "reinforce_pp",
    "reinpp_baseline": "reinforce_pp_baseline",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
OTHER_LOSSES: Final = {"vanilla": "actor"}

AdvantageType = Annotated[Text, KnownOrOwn("adv_type", ADVANTAGES, OTHER_ADVANTAGES)]
LossType = Annotated[Text, KnownOrOwn("loss_type", LOSSES, OTHER_LOSSES)]


class AlgorithmConfig(ConfigModel):
    """Settings of every policy gradient."""

    adv_type: AdvantageType = Field(
        default="grpo",
        description="Advantage estimator: gae, grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, or"
        " `package.module:name`.",
    )
    loss_type: LossType = Field(
        default="actor",
        description="Loss. actor_critic: policy and value loss; actor: policy loss only; or `package.module:name`.",
    )
    loss_agg_func: LossAggregation = Field(
        default="token-mean",
        description="How token losses are aggregated: token-mean, seq-mean-token-sum, seq-mean-token-mean or"
        " seq-mean-token-sum-norm.",
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any],
        description="Parameters of a custom advantage or loss, by name; its pydantic model, if any, validates them.",
    )
    group_size: Count = Field(
        default=1,
        description="Samples per group: they share a start (a prompt or an initial state), and GRPO compares them.",
    )
    update_epoch: Count = Field(default=1, description="Passes over the samples of a training step.")
    clip_ratio_low: Fraction = Field(default=0.2, description="Lower clip of the probability ratio: 1 minus this.")
    clip_ratio_high: NonNegativeFloat = Field(
        default=0.2, description="Upper clip of the probability ratio: 1 plus this."
    )
    entropy_bonus: NonNegativeFloat = Field(default=0.0, description="Weight of the policy's entropy bonus.")

    # The options of built-in advantages and losses, and others with what reads them, which is not chosen.
    built_in: ClassVar[type[ConfigModel]] = ConfigModel
    of_others: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        """Refuse options that no component takes. Workers import a custom one, and check its options."""
        if ":" not in f"{self.adv_type}{self.loss_type}":
            readers = f"`adv_type: {self.adv_type}` or `loss_type: {self.loss_type}`"
            check_names("options", self.options, self.built_in.model_fields, readers, self.of_others)
        return self

    @property
    def settings(self) -> Any:
        """The options of built-in advantages and losses, defaults included."""
        return self.built_in.model_validate(self.options)

    @property
    def own_options(self) -> dict[str, Any]:
        """The options of components of your own."""
        return {name: value for name, value in self.options.items() if name not in self.built_in.model_fields}

    @property
    def inputs(self) -> SimpleNamespace:
        """All that built-in advantages and losses read: the keys of this section, and `settings`."""
        return SimpleNamespace(**{**dict(self.settings), **dict(self)})


def own_names(algorithm: AlgorithmConfig) -> Mapping[str, str]:
    """Return the names that may be custom components with options, by their keys."""
    return {"adv_type": algorithm.adv_type, "loss_type": algorithm.loss_type}


def refuse_unknown_options(written: Mapping[str, Any], names: Mapping[str, str], section: str) -> None:
    """Refuse, in a worker, options that no custom component has; `checked_options` checks the others.

    Args:
        written: the options.
        names: the components that may take them, by the key that names each.
        section: the section of the options, as in `algorithm.options`.

    Raises:
        ConfigError: an option is unknown, or a component cannot be imported.
    """
    owners = [import_target(name, key) for key, name in names.items() if ":" in name] if written else []
    unknown = unknown_options(owners, written) if owners else []
    if unknown:
        listed = ", ".join(f"`{section}.{name}`" for name in unknown)
        raise ConfigError(f"unknown options: {listed}", help=f"your own {' and '.join(names)} take no such option")


def unknown_options(owners: Iterable[object], written: Mapping[str, Any]) -> list[str]:
    """Return the options that no custom component in `owners` knows; none if a component takes any option."""
    known: set[str] = set()
    for owner in owners:
        model = options_model_of(owner)
        names = None if model is None else option_names(model)
        if names is None:
            return []
        known |= names
    return [name for name in written if name not in known]


NOT_TRAINED: Final = IgnoredKeys(
    ("algorithm", "actor.optim", "actor.global_batch_size", "actor.micro_batch_size"),
    lambda config, sizes: config.runner.only_eval,
    "`only_eval` trains nothing",
    "it takes effect again without `runner.only_eval`",
    because=("runner.only_eval",),
    severity=Severity.NOTE,
)


def compares_within_groups(config: Any, sizes: WorldSizes) -> bool:
    """Return whether the advantage compares only total rewards within a group."""
    return config.algorithm.adv_type in _WITHIN_GROUP


def adv_type(config: Any) -> str:
    """Return the type of advantage that the file sets."""
    return f"`adv_type: {config.algorithm.adv_type}`"


def discount_of_total_rewards(when: Callable[[Any, WorldSizes], bool] = compares_within_groups) -> IgnoredKeys:
    """Return the rule about `gamma` with an advantage of total rewards."""
    return IgnoredKeys(
        ("algorithm.gamma",),
        when,
        lambda config: f"{adv_type(config)} compares undiscounted total rewards",
        because=("algorithm.adv_type",),
    )
