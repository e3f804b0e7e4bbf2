"""Sections of which a key chooses the kind: whose keys count, and what a file with a wrong one is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from rlinf_core import ConfigModel
from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.model import NoOptions, OneOf, Options, Variant, one_of
from rlinf_core.config.reading import read
from rlinf_core.config.sections.values import DataPath, hub_paths
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.tree import Composed, MappingNode, SourceText, merge, to_data
from rlinf_core.config.validating.kinds import key_of_others, without_idle_keys
from rlinf_core.config.validating.model_fields import fields_at
from rlinf_core.config.validating.validation import validate
from tests.unit.config.texts import tree_of


class Shape(Variant):
    chosen_by: ClassVar[str] = "kind"

    kind: Literal["circle", "square", "my:round"] = "circle"
    color: str = "red"


class Circle(Shape):
    lacking: ClassVar[Mapping[str, str]] = {"side": "it is round"}

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
    of_kind: ClassVar[tuple[str, ...]] = ("size",)
    form: ClassVar[str] = "my:.*"

    kind: str = "plain"
    size: str | None = None
    coat: dict[str, int] = Field(default_factory=dict[str, int])

    @classmethod
    def keeps(cls, key: str, value: object, before: str, now: str) -> bool:
        return value == "small"


class Painted(Plain):
    form: ClassVar[str] = ""

    kind: str = "painted"
    coat: Options[Paint] = Field(default_factory=dict)  # pyright: ignore[reportInvalidTypeForm]


class Glazed(Plain):
    form: ClassVar[str] = ""

    kind: str = "glazed"
    coat: Options[Glaze] = Field(default_factory=dict)  # pyright: ignore[reportInvalidTypeForm]


class Bare(Plain):
    form: ClassVar[str] = ""

    kind: str = "bare"
    coat: Options[NoOptions] = Field(default_factory=dict)  # pyright: ignore[reportInvalidTypeForm]


class PaintedLid(Painted):
    follows: ClassVar[str] = "pot"


class GlazedLid(Glazed):
    follows: ClassVar[str] = "pot"


class File(ConfigModel):
    pot: one_of((Painted, Glazed, Bare, Plain)) = Field(default_factory=Painted)  # pyright: ignore[reportInvalidTypeForm]
    lid: one_of((PaintedLid, GlazedLid)) = Field(default_factory=PaintedLid)  # pyright: ignore[reportInvalidTypeForm]
    shape: Annotated[Circle | Square, OneOf("kind")] = Field(default_factory=Circle)


def told(*texts: str) -> list[tuple[str, str, str]]:
    """Code, underlined text and remedy of each error in a file over its bases, the first of them below all others."""
    errors = [finding for finding in findings(*texts) if finding.severity is Severity.ERROR]
    return [(error.code, error.span.text, error.help or "") for error in errors]


def noted(*texts: str, base: str = "base.yaml") -> list[str]:
    """The notes on a file over its bases."""
    return [finding.message for finding in findings(*texts, base=base) if finding.severity is Severity.NOTE]


def findings(*texts: str, base: str = "base.yaml") -> Diagnostics:
    diagnostics = Diagnostics()
    validate(File, Composed(merged(*texts, base=base)), diagnostics)
    return diagnostics


def merged(*texts: str, base: str = "base.yaml") -> MappingNode:
    file = SourceText("file.yaml", texts[-1])
    sources = [*(SourceText(base, text).as_base(file, index) for index, text in enumerate(texts[:-1])), file]
    tree = reduce(merge, filter(None, (read(source, Diagnostics()) for source in sources)))
    assert isinstance(tree, MappingNode)
    return tree


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}", Circle()), ("{radius: 3}", Circle(radius=3)), ("{kind: square, side: 4}", Square(side=4))],
)
def test_a_key_chooses_the_kind(text: str, expected: Shape) -> None:
    view = validate(File, Composed(tree_of(f"shape: {text}")), Diagnostics())
    assert view.model is not None
    assert view.model.shape == expected
    assert type(view.model.shape) is type(expected)


SIDE = "it is a key of `kind` `square`"


@pytest.mark.parametrize(
    ("text", "underlined", "help"),
    [
        ("shape: {kind: square, radius: 3}", "radius", "it is a key of `kind` `circle`, not of `square`: remove it"),
        (
            "shape: {kind: 'my:round', side: 3}",
            "side",
            "it is a key of `kind` `square`, not of `my:round`: it is round; remove it",
        ),
        ("shape: {side: 3}", "side", f"{SIDE}, not of `circle`: it is round; remove it"),
        ("shape: {kind: square, weight: 3}", "weight", "known keys: `kind`, `color`, `side`, `corners`"),
        ("pot: {coat: {heat: 3}}", "heat", "it is a key of `kind` `glazed`, not of `painted`: remove it"),
        ("pot: {kind: bare, coat: {depth: 3}}", "depth", "`bare` has no `coat`: remove it"),
    ],
)
def test_a_key_of_another_kind_is_unknown_and_says_whose_it_is(text: str, underlined: str, help: str) -> None:
    assert told(text) == [("unknown-key", underlined, help)]


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


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # To a kind that takes any keys.
        (("pot: {kind: glazed, coat: {heat: 3}}", "pot: {kind: plain}"), {}),
        (("pot: {coat: {layers: 3}}", "pot: {kind: plain, coat: {any: 1}}"), {"any": 1}),
        (("pot: {kind: plain, coat: {any: 1}}", "pot: {kind: 'my:pot'}"), {}),
        (("pot: {kind: plain, coat: {any: 1}}", "pot: {kind: plain, coat: {other: 2}}"), {"any": 1, "other": 2}),
        # From one.
        (("pot: {kind: plain, coat: {any: 1}}", "pot: {kind: glazed}"), {}),
        (("pot: {kind: plain, coat: {heat: 4}}", "pot: {kind: glazed, coat: {heat: 5}}"), {"heat": 5}),
    ],
)
def test_options_of_a_free_kind_are_its_own(texts: tuple[str, ...], expected: dict[str, int]) -> None:
    view = validate(File, Composed(merged(*texts)), Diagnostics())
    assert told(*texts) == []
    assert view.model is not None
    assert view.model.pot.coat == expected


@pytest.mark.parametrize(
    ("texts", "size"),
    [
        (("pot: {kind: glazed, size: large}", "pot: {kind: painted}"), None),
        (("pot: {kind: glazed, size: large}", "pot: {kind: painted, size: wide}"), "wide"),
        (("pot: {kind: glazed, size: small}", "pot: {kind: painted}"), "small"),
        (("pot: {kind: glazed, size: large}", "pot: {kind: glazed}"), "large"),
    ],
)
def test_a_key_of_all_kinds_may_say_something_else_to_each(texts: tuple[str, ...], size: str | None) -> None:
    view = validate(File, Composed(merged(*texts)), Diagnostics())
    assert view.model is not None
    assert view.model.pot.size == size


def test_keys_that_are_left_out_are_noted_by_section() -> None:
    texts = (
        "{pot: {kind: plain, size: large, coat: {a: 1}}, shape: {radius: 3}}",
        "pot: {kind: glazed}\nshape: {kind: square}",
    )
    assert noted(*texts) == [
        "of `pot`, `size`, `coat.a` of `plain` are left out: `kind: glazed` is chosen in file.yaml:1",
        "of `shape`, `radius` of `circle` is left out: `kind: square` is chosen in file.yaml:2",
    ]


def test_nobody_is_told_of_keys_that_no_person_wrote() -> None:
    texts = ("shape: {radius: 3}", "shape: {kind: square}")
    assert noted(*texts, base=str(shipped_configs()["embodied/pick-laptop"])) == []
    assert noted("shape: {radius: null}", "shape: {kind: square}") == []


def test_all_keys_of_other_kinds_go_from_an_earlier_run() -> None:
    tree = tree_of("{pot: {kind: glazed, coat: {layers: 3}}, shape: {kind: square, radius: 7, side: 3, other: 1}}")
    kept = to_data(without_idle_keys(File, tree))
    assert kept == {"pot": {"kind": "glazed", "coat": {}}, "shape": {"kind": "square", "side": 3, "other": 1}}


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
    view = validate(File, Composed(tree_of("pot: {kind: glazed, coat: {heat: 900}}")), Diagnostics())
    assert view.model is not None
    assert (view.model.pot.coat, File().pot.coat) == ({"heat": 900}, {})
    assert view.model.model_dump()["pot"]["coat"] == {"heat": 900}


class Recipe(ConfigModel):
    pages: DataPath | None = None


class FreeRecipe(Recipe, extra="allow"):
    """One with ingredients."""


class Stew(Plain):
    form: ClassVar[str] = ""

    kind: str = "stew"
    coat: Options[FreeRecipe] = Field(default_factory=dict)  # pyright: ignore[reportInvalidTypeForm]


class Kitchen(ConfigModel):
    pot: one_of((Painted, Stew, Bare)) = Field(default_factory=Painted)  # pyright: ignore[reportInvalidTypeForm]


@pytest.mark.parametrize("kind", ["painted", "bare"])
def test_options_beside_the_named_ones_go_with_their_kind(kind: str) -> None:
    tree = merged("pot: {kind: stew, coat: {pages: a, salt: 1}}", f"pot: {{kind: {kind}}}")
    diagnostics = Diagnostics()
    view = validate(Kitchen, Composed(tree), diagnostics)
    assert view.model is not None
    assert (view.model.pot.coat, [item.code for item in diagnostics]) == ({}, ["no-effect"])


class Cooked(ConfigModel):
    pot: Options[FreeRecipe] = Field(default_factory=dict)  # pyright: ignore[reportInvalidTypeForm]


def test_options_keep_names_of_the_hub() -> None:
    view = validate(Cooked, Composed(tree_of("pot: {pages: 'hf://datasets/org/name'}")), Diagnostics())
    assert view.model is not None
    assert [(at, path.name) for at, path in hub_paths(view.model)] == [(("pot", "pages"), "org/name")]


def test_options_keep_numbers_that_json_lacks() -> None:
    view = validate(
        Cooked, Composed(tree_of("pot: {salt: .inf, spices: [{hot: -.inf}, 1.5], none: null}")), Diagnostics()
    )
    assert view.model is not None
    assert view.model.pot == {"salt": math.inf, "spices": [{"hot": -math.inf}, 1.5], "none": None}
