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
from rlinf_core.config.validating.validation import validate
from rlinf_core.config.variants import OneOf, Variant


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


class File(ConfigModel):
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
