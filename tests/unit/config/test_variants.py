"""Sections of which a key chooses the kind: whose keys count, and what a file with a wrong one is told."""

from __future__ import annotations

from functools import reduce
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from rlinf_core import ConfigModel
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import read
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import MappingNode, merge
from rlinf_core.config.validating.kinds import key_of_others
from rlinf_core.config.validating.model_fields import fields_at
from rlinf_core.config.validating.validation import validate
from rlinf_core.config.variants import OneOf, Variant, one_of, options_of


class Shape(Variant):
    chosen_by: ClassVar[str] = "kind"

    kind: Literal["circle", "square", "my:round"] = "circle"
    color: str = "red"


class Circle(Shape):
    radius: int = Field(default=1, ge=1)

    @classmethod
    def takes(cls, name: str) -> bool:
        return name == "my:round" or super().takes(name)


class Square(Shape):
    kind: Literal["circle", "square", "my:round"] = "square"
    side: int = 2
    corners: dict[str, int] = Field(default_factory=dict[str, int])


class Paint(ConfigModel):
    layers: int = 1


class Glaze(ConfigModel):
    heat: int = 900


class Plain(Variant):
    chosen_by: ClassVar[str] = "kind"

    kind: str = "plain"
    coat: dict[str, int] = Field(default_factory=dict[str, int])


class Painted(Plain):
    kind: str = "painted"
    coat: options_of(Paint) = Field(default_factory=dict)  # pyright: ignore[reportInvalidTypeForm]


class Glazed(Plain):
    kind: str = "glazed"
    coat: options_of(Glaze) = Field(default_factory=dict)  # pyright: ignore[reportInvalidTypeForm]


class PaintedLid(Painted):
    follows: ClassVar[str] = "pot"


class GlazedLid(Glazed):
    follows: ClassVar[str] = "pot"


class File(ConfigModel):
    pot: one_of((Painted, Glazed, Plain)) = Field(default_factory=Painted)  # pyright: ignore[reportInvalidTypeForm]
    lid: one_of((PaintedLid, GlazedLid)) = Field(default_factory=PaintedLid)  # pyright: ignore[reportInvalidTypeForm]
    shape: Annotated[Circle | Square, OneOf("kind")] = Field(default_factory=Circle)


def tree_of(text: str) -> MappingNode:
    tree = read(SourceText("file.yaml", text), Diagnostics())
    assert isinstance(tree, MappingNode)
    return tree


def told(*texts: str) -> list[tuple[str, str, str]]:
    """Code, underlined text and remedy of each finding in a file over its bases, the first of them below all others."""
    diagnostics = Diagnostics()
    file = SourceText("file.yaml", texts[-1])
    sources = [*(SourceText("base.yaml", text).as_base(file, index) for index, text in enumerate(texts[:-1])), file]
    tree = reduce(merge, filter(None, (read(source, diagnostics) for source in sources)))
    assert isinstance(tree, MappingNode)
    validate(File, tree, diagnostics)
    return [(finding.code, finding.span.text, finding.help or "") for finding in diagnostics]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}", Circle()), ("{radius: 3}", Circle(radius=3)), ("{kind: square, side: 4}", Square(side=4))],
)
def test_a_key_chooses_the_kind(text: str, expected: Shape) -> None:
    view = validate(File, tree_of(f"shape: {text}"), Diagnostics())
    assert view.model is not None
    assert view.model.shape == expected
    assert type(view.model.shape) is type(expected)


def test_a_key_of_another_kind_is_unknown_and_says_whose_it_is() -> None:
    ((code, where, help),) = told("shape: {kind: square, radius: 3}")
    assert (code, where) == ("unknown-key", "radius")
    assert help == "it is a key of `kind` `circle`, not of `square`: remove it, or write `kind: circle`"


def test_known_keys_are_those_of_the_kind() -> None:
    ((_, _, help),) = told("shape: {kind: square, weight: 3}")
    assert "`side`" in help
    assert "radius" not in help


def test_a_misspelt_kind_is_told_alone_and_its_keys_are_checked() -> None:
    (choice, bound) = told("shape: {kind: circel, radius: 0}")
    assert choice[:2] == ("bad-value", "circel")
    assert "`circle`" in choice[2]
    assert bound[:2] == ("bad-value", "0")


def test_keys_of_an_unknown_kind_say_which_is_meant() -> None:
    ((code, where, _),) = told("shape: {kind: xyz, side: 3, corners: {a: 1}}")
    assert (code, where) == ("bad-value", "xyz")


def test_null_takes_a_key_of_another_kind_back() -> None:
    assert told("shape: {kind: square, radius: null}") == []


def test_a_kind_by_another_form_is_named_as_it_is_written() -> None:
    ((_, where, help),) = told("shape: {kind: 'my:round', side: 3}")
    assert where == "side"
    assert "not of `my:round`" in help


@pytest.mark.parametrize("value", ["[square]", "{square: 1}", "4", "''"])
def test_what_is_no_name_chooses_the_first_kind(value: str) -> None:
    ((code, _, _),) = told(f"shape: {{kind: {value}, radius: 3}}")
    assert code != "unknown-key"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # Bases chose the kind that has the key.
        (("shape: {kind: square, side: 3}", "shape: {kind: circle}"), []),
        (("shape: {radius: 3}", "shape: {kind: square}"), []),
        # A file that was written out has all keys.
        (("shape: {kind: square, radius: 1}",), []),
        (("shape: {kind: square, radius: true}",), ["radius"]),
        (("shape: {kind: square}", "shape: {side: 3}", "shape: {kind: circle}"), []),
        (("shape: {side: 3}", "shape: {kind: square}", "shape: {kind: circle}"), []),
        # They chose none that has it.
        (("shape: {kind: circle, side: 3}", "shape: {kind: circle}"), ["side"]),
        (("shape: {kind: square, radius: 3}", "shape: {kind: square}"), ["radius"]),
        (("shape: {side: 3}", "shape: {kind: circle}"), ["side"]),
        (("shape: {kind: square}", "shape: {kind: circle, side: 3}", "shape: {kind: circle}"), ["side"]),
        # Nor is it dropped where the same file chooses.
        (("shape: {kind: square}", "shape: {kind: circle, side: 3}"), ["side"]),
    ],
)
def test_keys_of_a_base_are_dropped_with_its_kind(texts: tuple[str, ...], expected: list[str]) -> None:
    assert [where for _, where, _ in told(*texts)] == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("pot: {coat: {heat: 3}}",), ["heat"]),
        (("pot: {kind: glazed, coat: {heat: 3}}",), []),
        (("pot: {kind: plain, coat: {anything: 3}}",), []),
        # A lower layer said it to another kind.
        (("pot: {coat: {layers: 3}}", "pot: {kind: glazed}"), []),
        (("pot: {kind: glazed, coat: {heat: 3}}", "pot: {kind: painted}"), []),
        (("pot: {kind: glazed, coat: {heat: 3}}", "pot: {kind: glazed, coat: {layers: 2}}"), ["layers"]),
        (("pot: {coat: {heat: 3}}", "pot: {kind: painted}"), ["heat"]),
    ],
)
def test_keys_within_a_kind_belong_to_it(texts: tuple[str, ...], expected: list[str]) -> None:
    assert [where for _, where, _ in told(*texts)] == expected


def test_a_key_within_another_kind_says_whose_it_is() -> None:
    ((_, _, help),) = told("pot: {coat: {heat: 3}}")
    assert help == "it is a key of `kind` `glazed`, not of `painted`: remove it, or write `kind: glazed`"


@pytest.mark.parametrize(
    ("lid", "expected"),
    [("{}", "heat"), ("{kind: null}", "heat"), ("{kind: painted}", "layers"), ("{kind: 4}", "layers")],
)
def test_a_section_that_names_no_kind_follows_another(lid: str, expected: str) -> None:
    tree = tree_of(f"{{pot: {{kind: glazed}}, lid: {lid}}}")
    assert [*fields_at(File, ("lid", "coat"), tree)] == [expected]
    hint = key_of_others(File, tree, ("lid", "coat", {"heat": "layers", "layers": "heat"}[expected]))
    assert hint is not None
    assert f"not of `{'glazed' if expected == 'heat' else 'painted'}`" in hint


def test_options_are_those_that_the_file_sets() -> None:
    view = validate(File, tree_of("pot: {kind: glazed, coat: {heat: 900}}"), Diagnostics())
    assert view.model is not None
    assert (view.model.pot.coat, File().pot.coat) == ({"heat": 900}, {})
    assert view.model.model_dump()["pot"]["coat"] == {"heat": 900}
