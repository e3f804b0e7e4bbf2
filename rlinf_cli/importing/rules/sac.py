"""Rules for RLinf's soft actor-critic, `embodied_sac`, which is `loss_type: sac` here."""

from __future__ import annotations

from typing import Final

from rlinf_cli.importing.outcomes import Leaf, LeftOut
from rlinf_cli.importing.rules.shared import Result, Values, new, precision, same
from rlinf_core.errors import ConfigError

LOSS: Final = "embodied_sac"
_AT: Final = "algorithm"


def is_off_policy(values: Values) -> bool:
    """Return whether a file of RLinf trains by soft actor-critic.

    Raises:
        ConfigError: it does so with a policy by flow matching, or trains the noise that one starts from.
    """
    is_sac = LOSS in (values.get("algorithm.loss_type"), values.get("algorithm.adv_type"))
    if is_sac and values.get("actor.model.model_type") == "flow_policy":
        raise ConfigError(
            "this file trains a policy by flow matching with soft actor-critic, which no recipe here does",
            help="`loss_type: sac` trains `model_type: squashed_policy`; a flow policy learns by `actor_critic`",
        )
    if is_sac and values.get("actor.model.model_type") == "openpi":
        raise ConfigError(
            "this file trains the noise that steers a pi0, by soft actor-critic (DSRL), which no recipe here does",
            help="`loss_type: sac` trains `model_type: squashed_policy`; a pi0 learns by `actor_critic`",
        )
    return is_sac


def _steps_of_a_round(values: Values) -> tuple[int, str]:
    """Return how many environment steps a training step has, and the product in words."""
    names = ("total_num_envs", "max_steps_per_rollout_epoch", "rollout_epoch")
    numbers = [values.count(f"env.train.{name}", 1) for name in names]
    product = numbers[0] * numbers[1] * numbers[2]
    return product, " x ".join(map(str, numbers))


def update_epoch(leaf: Leaf, values: Values) -> Result:
    updates = values.of(leaf)
    steps, words = _steps_of_a_round(values)
    if not isinstance(updates, int) or updates < 1:
        return LeftOut("`algorithm.update_to_data` counts critic updates per environment step")
    return new(
        f"{_AT}.update_to_data",
        round(updates / steps, 6),
        f"counts critic updates per environment step: {updates} / ({words} = {steps})",
    )


def learning_starts(leaf: Leaf, values: Values) -> Result:
    trajectories = values.of(leaf)
    length = values.count("env.train.max_steps_per_rollout_epoch", 1)
    if not isinstance(trajectories, int):
        return LeftOut("`algorithm.learning_starts` counts environment steps")
    note = f"counts environment steps: {trajectories} trajectories x {length}, at least 1"
    return new(f"{_AT}.learning_starts", max(1, trajectories * length), note)


def temperature_learns(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) == "fixed_alpha":
        return new(f"{_AT}.learn_temperature", False)
    return LeftOut("the entropy's weight is learned by default", quiet=True)


def aggregate(leaf: Leaf, values: Values) -> Result:
    if values.of(leaf) == "min":
        return LeftOut("targets are the minimum of `algorithm.critics_in_target` critics", quiet=True)
    return new(f"{_AT}.critics_in_target", 1, "a mean of critics: one is drawn for each target")


def subsample(leaf: Leaf, values: Values) -> Result:
    if not isinstance(values.of(leaf), int) or values.of(leaf) < 1:
        return LeftOut("without a number two critics are drawn", quiet=True)
    return same(f"{_AT}.critics_in_target", leaf)


def computes_in_fp32(leaf: Leaf, values: Values) -> Result:
    plain = precision("actor.model.precision")(leaf, values)
    written = getattr(plain, "value", None)
    if getattr(written, "raw", written) == "fp32":
        return plain
    return new("actor.model.precision", "fp32", "`loss_type: sac` computes in fp32")
