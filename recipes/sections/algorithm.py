"""`algorithm`: advantages, losses, how often samples are trained on, and options of a user's own component."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from recipes.sections.checks import Report
from recipes.sections.values import KnownOrOwn
from rlinf_core import ConfigError, ConfigModel, Count, Fraction, JobConfig
from rlinf_core.algorithms.options import option_names, options_model_of
from rlinf_core.config.sections.values import LossAggregation, NonNegativeFloat
from rlinf_core.config.tree import Path
from rlinf_core.registry import import_target
from rlinf_core.scalars import Bool, Data, Text

# Advantages that compare total rewards within a group and nothing else; all that compare the members of a group; and
# all that every recipe has.
WITHIN_GROUP_ADVANTAGES: Final = ("grpo", "dr_grpo", "rloo")
GROUP_ADVANTAGES: Final = (*WITHIN_GROUP_ADVANTAGES, "reinforce_pp_baseline")
ADVANTAGES: Final = ("gae", *WITHIN_GROUP_ADVANTAGES, "reinforce_pp", "reinforce_pp_baseline")
LOSSES: Final = ("actor_critic", "actor")


# Names that other projects give ours.
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
    normalize_advantages: Bool = Field(
        default=True, description="Normalize the advantages of a step to mean 0 and standard deviation 1."
    )
    clip_ratio_low: Fraction = Field(default=0.2, description="Lower clip of the probability ratio: 1 minus this.")
    clip_ratio_high: NonNegativeFloat = Field(
        default=0.2, description="Upper clip of the probability ratio: 1 plus this."
    )
    entropy_bonus: NonNegativeFloat = Field(default=0.0, description="Weight of the policy's entropy bonus.")


def check_algorithm_options(config: JobConfig, algorithm: AlgorithmConfig, report: Report) -> None:
    """Report options of advantage and loss that nothing takes, or that their owner's pydantic model refuses."""
    check_options(config, ("algorithm", "options"), algorithm.options, own_names(algorithm), report)


def own_names(algorithm: AlgorithmConfig) -> Mapping[str, str]:
    """Return the names that may be components of the user's own with options, by their keys."""
    return {"adv_type": algorithm.adv_type, "loss_type": algorithm.loss_type}


def check_options(
    config: JobConfig, at: Path, written: Mapping[str, Any], names: Mapping[str, str], report: Report
) -> None:
    """Report options that no component of the user's own takes; only the workers import it and check them.

    Args:
        config: the file.
        at: the path of the options, as in `("algorithm", "options")`.
        written: the options.
        names: the components that may take them, by the key beside the options that names each.
        report: takes findings.
    """
    if written and not any(":" in name for name in names.values()):
        keys = " or ".join(f"`{key}`" for key in names)
        message = f"`{at[-1]}` has no effect: {keys} name no component of your own"
        help = "remove it, or name a component as `package.module:name`"
        report(at, "not-available", message, help, about=[(*at[:-1], key) for key in names])


def refuse_unknown_options(written: Mapping[str, Any], names: Mapping[str, str], section: str) -> None:
    """Refuse options that none of the user's own components has, in a worker; see `checked_options` for the others.

    Args:
        written: the options.
        names: the components that may take them, by the key that names each.
        section: where the options are written, as in `algorithm.options`.

    Raises:
        ConfigError: an option is unknown, or a component cannot be imported.
    """
    owners = [import_target(name, key) for key, name in names.items() if ":" in name] if written else []
    unknown = unknown_options(owners, written) if owners else []
    if unknown:
        listed = ", ".join(f"`{section}.{name}`" for name in unknown)
        raise ConfigError(f"unknown options: {listed}", help=f"your own {' and '.join(names)} take no such option")


def unknown_options(owners: Iterable[object], written: Mapping[str, Any]) -> list[str]:
    """Return those options that none of the users' own `owners` knows; none where one of them takes any."""
    known: set[str] = set()
    for owner in owners:
        model = options_model_of(owner)
        names = None if model is None else option_names(model)
        if names is None:
            return []
        known |= names
    return [name for name in written if name not in known]
