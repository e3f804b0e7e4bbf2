"""A registry of named things."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlinf_core.errors import ConfigError
from rlinf_core.registry import Registry


def registry() -> Registry[object]:
    return Registry("number", {"pi": "math:pi"})


def test_names_stand_for_what_is_brought_registered_or_imported() -> None:
    numbers = registry()
    numbers.register("two")(2)
    assert numbers.names() == ["pi", "two"]
    assert numbers.get("pi") == numbers.get("math:pi") == math.pi
    assert numbers.get("two") == 2


def test_a_name_is_given_once() -> None:
    numbers = registry()
    three = [3]
    numbers.register("three")(three)
    numbers.register("three")(three)  # a module that is imported again says the same
    with pytest.raises(ConfigError, match="registered twice"):
        numbers.register("three")([3])
    with pytest.raises(ConfigError, match="`pi` comes with rlinf already"):
        numbers.register("pi")(3)


@pytest.mark.parametrize("name", ["", "a:b"])
def test_what_cannot_be_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid number name"):
        registry().register(name)


def test_remedy_of_a_name_taken_within_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_pi.py").write_text(
        "from rlinf_core.errors import ConfigError\nraise ConfigError('no', help='do')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded: no") as caught:
        registry().get("takes_pi:pi")
    assert caught.value.help == "do"


def test_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="unknown number `po`"):
        registry().get("po")
    with pytest.raises(ConfigError, match="cannot be loaded: AttributeError"):
        registry().get("math:no_such_name")
