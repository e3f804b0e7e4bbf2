"""The registries of advantages and policy losses, and the options that only a custom function or model knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ValidationError

from rlinf_core.config.validating.validation_messages import refusals
from rlinf_core.errors import ConfigError
from rlinf_core.registry import Registry
from rlinf_core.suggest import short_repr

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf_core.algorithms.advantages import AdvantageFunction
    from rlinf_core.algorithms.loss_inputs import Loss, LossInputs, LossSettings

    PolicyLossFunction: TypeAlias = Callable[[LossInputs, LossSettings], Loss | Tensor]


_ADVANTAGES: Registry[AdvantageFunction] = Registry(
    "advantage",
    {
        name: f"rlinf_core.algorithms.advantages:{name}"
        for name in (
            *("gae", "turn_gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
            "distillation",
        )
    },
)
_POLICY_LOSSES: Registry[PolicyLossFunction] = Registry(
    "policy loss",
    {
        name: f"rlinf_core.algorithms.losses:{name}"
        for name in ("actor_critic", "actor", "decoupled_actor", "gspo", "gmpo", "cispo", "sapo")
    },
)
register_advantage = _ADVANTAGES.register
get_advantage = _ADVANTAGES.get
register_policy_loss = _POLICY_LOSSES.register
get_policy_loss = _POLICY_LOSSES.get


T = TypeVar("T")
ATTRIBUTE = "options_model"


def options_model(model: type[BaseModel]) -> Callable[[T], T]:
    """Return a decorator that declares a pydantic model for the options of a function or class."""
    if not hasattr(model, "model_fields"):
        raise ConfigError(f"{short_repr(model)} is no pydantic model", help="write `@options_model(MyOptions)`")

    def add(owner: T) -> T:
        setattr(owner, ATTRIBUTE, model)
        return owner

    return add


def options_model_of(owner: object) -> type[BaseModel] | None:
    """Return the pydantic model of an owner's options, or None."""
    return cast("type[BaseModel] | None", getattr(owner, ATTRIBUTE, None))


def options_for(owner: object, written: Mapping[str, Any]) -> Any:
    """Return an owner's part of the file's options: an instance of its model, or without a model all as a dictionary.

    Options that the model does not have belong to another owner and are left out.

    Raises:
        pydantic.ValidationError: an option is wrong or missing.
    """
    model = options_model_of(owner)
    if model is None:
        return dict(written)
    names = option_names(model)
    return model.model_validate({name: value for name, value in written.items() if names is None or name in names})


def checked_options(owner: object, written: Mapping[str, Any], section: str) -> Any:
    """Return `options_for` an owner, for use in a worker; `section` is the options' path, as in `algorithm.options`.

    Raises:
        ConfigError: an option is wrong or missing.
    """
    try:
        return options_for(owner, written)
    except ValidationError as error:
        problems = "; ".join(refusals(error, section))
        raise ConfigError(f"the options of `{getattr(owner, '__name__', owner)}` are wrong", why=problems) from error


def option_names(model: type[BaseModel]) -> set[str] | None:
    """Return the option names that a model accepts; None if it accepts any."""
    if model.model_config.get("extra") == "allow":
        return None
    return {alias for name, info in model.model_fields.items() for alias in (name, info.alias) if alias}
