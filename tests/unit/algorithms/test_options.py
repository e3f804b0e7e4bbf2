"""Options of a user's own loss, advantage or model, with and without a pydantic model of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.sections.own_options import unknown_options
from rlinf_core.algorithms.options import checked_options, options_for, options_model
from rlinf_core.errors import ConfigError


class CispoOptions(BaseModel):
    largest_weight: float = Field(gt=0)


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


@options_model(CispoOptions)
def cispo(inputs: Any, settings: Any) -> None:
    """A loss with one option."""


def plain(inputs: Any, settings: Any) -> None:
    """A loss that reads its options as a dictionary."""


class Policy:
    options_model = Anything


def test_a_model_s_instance_or_the_dictionary() -> None:
    result = options_for(cispo, {"largest_weight": "2", "of_another": 1})
    assert result == CispoOptions(largest_weight=2)
    written = {"largest_weight": 2}
    assert options_for(plain, written) == written
    assert options_for(Policy, {"depth": 3}).depth == 3


@pytest.mark.parametrize("written", [{}, {"largest_weight": -1}, {"largest_weight": "much"}])
def test_what_the_model_refuses(written: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options_for(cispo, written)
    with pytest.raises(ConfigError, match="options of `cispo`") as raised:
        checked_options(cispo, written, "algorithm.options")
    assert "`algorithm.options.largest_weight`" in str(raised.value)


def test_option_unknown_to_every_owners_model_is_refused() -> None:
    assert unknown_options([cispo], {"largest_weight": 1, "smallest": 2}) == ["smallest"]
    assert unknown_options([cispo, plain], {"smallest": 2}) == []
    assert unknown_options([cispo, Policy], {"smallest": 2}) == []
