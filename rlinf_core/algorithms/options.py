"""Options of advantages, losses and models that users bring: keys of a file that only their owner knows.

    class CispoOptions(BaseModel):
        largest_weight: float = 5.0

    @options_model(CispoOptions)
    def cispo(inputs, settings): ...        # settings.options is a CispoOptions

A class, such as a policy, has its model as the attribute `options_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from rlinf_core.errors import ConfigError

T = TypeVar("T")
ATTRIBUTE = "options_model"


def options_model(model: type[BaseModel]) -> Callable[[T], T]:
    """Return a decorator that has the options of a function checked by a pydantic model."""

    def add(owner: T) -> T:
        setattr(owner, ATTRIBUTE, model)
        return owner

    return add


def options_model_of(owner: object) -> type[BaseModel] | None:
    """Return the pydantic model of an owner's options, or None."""
    return cast("type[BaseModel] | None", getattr(owner, ATTRIBUTE, None))


def options_for(owner: object, written: Mapping[str, Any]) -> Any:
    """Return what an owner is given of the options of a file: an instance of its model, or without one a dictionary of
    all.

    Options of another owner, which the model does not have, are left out.

    Raises:
        pydantic.ValidationError: an option is wrong or missing.
    """
    model = options_model_of(owner)
    if model is None:
        return dict(written)
    names = option_names(model)
    return model.model_validate({name: value for name, value in written.items() if names is None or name in names})


def checked_options(owner: object, written: Mapping[str, Any], section: str) -> Any:
    """Return `options_for` an owner, in a worker; `section` is where they are written, as in `algorithm.options`.

    Raises:
        ConfigError: an option is wrong or missing.
    """
    try:
        return options_for(owner, written)
    except ValidationError as error:
        problems = "; ".join(
            f"`{'.'.join(map(str, (section, *problem['loc'])))}`: {problem['msg']}" for problem in error.errors()
        )
        raise ConfigError(f"the options of `{getattr(owner, '__name__', owner)}` are wrong", why=problems) from error


def option_names(model: type[BaseModel]) -> set[str] | None:
    """Return the names that a model takes; None: any."""
    if model.model_config.get("extra") == "allow":
        return None
    return {alias for name, info in model.model_fields.items() for alias in (name, info.alias) if alias}
