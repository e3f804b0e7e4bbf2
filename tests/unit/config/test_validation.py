"""What pydantic finds becomes findings at their places, and what is sound survives."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.tree import Composed, Path
from rlinf_core.config.validating.model_fields import Validated
from rlinf_core.config.validating.validation import validate
from rlinf_core.scalars import Bool, Float, Int, Text, problem
from tests.unit.config.texts import tree_of


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _even(value: int) -> int:
    if value % 2:
        raise problem("bad-value", f"`{value}` is odd", help="add one")
    return value


def _letters(text: str) -> str:
    for at, character in enumerate(text):
        if not character.isalpha():
            raise problem("name-syntax", f"`{character}` is no letter", start=at, end=at + 1)
    return text


class Wheel(Section):
    size: Annotated[Int, Field(ge=1)]
    spokes: Int = 32


class Engine(Section):
    power: Annotated[Float, Field(gt=0)] = 1.0
    fuel: Literal["petrol", "diesel"] = "petrol"


class Car(Section):
    name: Annotated[Text, Field(max_length=8)] = "car"
    wheels: tuple[Wheel, ...] = ()
    engine: Engine = Engine()
    electric: Bool = False
    axle: Int | Engine | None = None
    tags: dict[str, Annotated[Int, AfterValidator(_even)]] = Field(default_factory=dict[str, int])
    door_count: Int = 4

    @model_validator(mode="after")
    def _small(self) -> Car:
        if len(self.wheels) > 6:
            raise PydanticCustomError("bad-value", "more than six wheels")
        return self


class File(Section):
    car: Car


def check(text: str) -> tuple[list[Diagnostic], Validated[File]]:
    diagnostics = Diagnostics()
    view = validate(File, Composed(tree_of(text)), diagnostics)
    return list(diagnostics), view


def faults_of(collected: list[Diagnostic]) -> list[tuple[str, str]]:
    return [(diagnostic.code, diagnostic.span.text) for diagnostic in collected]


# A text with the underlined piece, the code, the message and the remedy.
MISTAKES = r"""
car: {«nmae»: x} | unknown-key | unknown key `nmae` in `car` | did you mean `name`?
car: {«spokes»: 1} | unknown-key | unknown key `spokes` in `car` | `spokes` belongs in `car.wheels[]`
car: {«wheels»,name: x} | wrong-type | `wheels` is empty; expected a list | inside braces a comma ends a key: write...
car: {name: a,«b»} | unknown-key | unknown key `b` in `car` | inside braces a comma ends a value: write `name: "a,b"`
car: {engine: {«zzz»: 1}} | unknown-key | unknown key `zzz` in `car.engine` | known keys: `power`, `fuel`
car:\n  wheels:\n    - «spokes: 3»\n | missing-key | `car.wheels[0]` needs `size` | add `size: 1`
car: {electric: «yes»} | wrong-type | `electric`: expected true or false, found text | write `true`
car: {electric: «1»} | wrong-type | `electric`: expected true or false, found an integer | write `true`
car: {door_count: «1_000»} | wrong-type | `door_count`: expected an integer, found text | write `1000`
car: {«\xa0name»: x} | unknown-key | unknown key `\xa0name` in `car` | it contains U+00A0 (no-break space)...
«ca\u200br»: {name: x} | unknown-key | unknown key `ca\u200br` at the top of the file | it contains U+200B ...
car: {door_count: «"4"»} | wrong-type | `door_count`: expected an integer, found text | remove the quotes
car: {door_count: «4.5»} | wrong-type | `door_count`: expected an integer, found a number | -
car: {«wheels»: {size: 1}} | wrong-type | `wheels`: expected a list, found a mapping | start each item...
car: {wheels: «3»} | wrong-type | `wheels`: expected a list, found an integer | write it as a list: `[3]`
car: {wheels: «"#: a"»} | wrong-type | `wheels`: expected a list, found text | write it as a list: `["#: a"]`
car: {engine: «big»} | wrong-type | `engine`: expected a mapping, found text | -
car:\n  «wheels»:\n | wrong-type | `wheels` is empty; expected a list | give it a value or remove the key
car: {wheels: [{size: «0»}]} | bad-value | `size` must be at least 1, found `0` | -
car: {engine: {power: «"1e-3"»}} | wrong-type | `power`: expected a number, found text | remove the quotes
car: {engine: {power: «".5"»}} | wrong-type | `power`: expected a number, found text | remove the quotes
car: {engine: {power: «-0x»}} | wrong-type | `power`: expected a number, found text | -
car: {engine: {power: «0.00»}} | bad-value | `power` must be greater than 0, found `0.00` | -
car: {engine: {fuel: «deisel»}} | bad-value | `fuel` must be one of `petrol`, `diesel`, found `deisel` | did you mean...
car: {axle: «big»} | wrong-type | `axle`: expected an integer or a mapping, found text | -
car: {name: «123456789»} | bad-value | `name` must have at most 8 characters, found `123456789` | -
"""


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_each_mistake_is_told_at_its_place(row: str) -> None:
    marked, code, message, help = (part.encode("latin-1").decode("unicode_escape") for part in row.split(" | "))
    start, end = marked.index("«"), marked.index("»") - 1
    (verdict,), _ = check(marked.replace("«", "").replace("»", "") + "\n")
    assert (verdict.code, verdict.span.start, verdict.span.end) == (code, start, end)
    shown = verdict.help or "-"
    assert verdict.message == message
    assert shown == help or (help.endswith("...") and shown.startswith(help.removesuffix("...")))


def test_missing_section_is_told_at_the_start_of_the_file() -> None:
    diagnostics, view = check("other: 1\n")
    assert [diagnostic.code for diagnostic in diagnostics] == ["missing-key", "unknown-key"]
    assert (diagnostics[0].span.start, diagnostics[0].span.end) == (0, 0)
    assert diagnostics[0].help == "add the section `car:`"
    assert view.model is None


# Files, and the code and the underlined text of each finding.
ALONE = [
    pytest.param("{name: 2CV, wheels: [{size: 3}]}", [], id="sound"),
    pytest.param("{wheels: [{sise: 3}]}", [("unknown-key", "sise")], id="a-required-key-that-is-mistyped"),
    # Without its sizes no wheel is sound, so the list is lost too; only the two wrong values are told.
    pytest.param("{wheels: [{size: x}, {size: y}]}", [("wrong-type", "x"), ("wrong-type", "y")], id="consequences"),
    pytest.param("{axle: {power: 0, fuel: x}}", [("bad-value", "0"), ("bad-value", "x")], id="member-that-was-meant"),
]


@pytest.mark.parametrize(("car", "expected"), ALONE)
def test_a_mistake_is_told_alone(car: str, expected: list[tuple[str, str]]) -> None:
    findings, view = check(f"car: {car}\n")
    assert faults_of(findings) == expected
    assert view.model is not None


def test_all_mistakes_are_told_at_once() -> None:
    diagnostics, _ = check("car:\n  nmae: x\n  wheels: [{size: 0}, {}]\n  electric: 1\n  engine: {fuel: x, power: 0}\n")
    codes = ["bad-value", "bad-value", "bad-value", "missing-key", "unknown-key", "wrong-type"]
    assert sorted(diagnostic.code for diagnostic in diagnostics) == codes


def test_what_is_sound_survives_and_keeps_its_index() -> None:
    _, view = check("car:\n  nmae: x\n  wheels: [{size: 1}, {size: 0}, {size: 3}, {}, {size: 5}]\n  electric: true\n")
    assert view.model is not None
    assert [wheel.size for wheel in view.model.car.wheels] == [1, 3, 5]
    assert view.original(("car", "wheels", 2, "size")) == ("car", "wheels", 4, "size")
    assert view.damaged(("car", "wheels", 1))
    assert view.damaged(("car", "wheels"))
    assert view.damaged(("car", "wheels", 1, "spokes"))
    assert not view.damaged(("car", "wheels", 2))
    assert not view.damaged(("car", "electric"))


def test_unknown_key_is_no_damage() -> None:
    _, view = check("car: {nmae: x, electric: true}\n")
    assert view.model is not None
    assert view.model.car.electric
    assert not view.damaged(("car",))


def test_rule_of_a_model_is_not_hidden_by_an_unknown_key() -> None:
    wheels = ", ".join(["{size: 1}"] * 7)
    diagnostics, _ = check(f"car: {{nmae: x, wheels: [{wheels}]}}\n")
    assert [(diagnostic.code, diagnostic.message) for diagnostic in diagnostics] == [
        ("bad-value", "more than six wheels"),
        ("unknown-key", "unknown key `nmae` in `car`"),
    ]


@pytest.mark.parametrize(
    ("written", "underlined"),
    [
        ("ab3d", "3"),
        ('"ab3d"', "3"),
        ("'ab3d'", "3"),
        ('"a\\x62\\x33d"', '"a\\x62\\x33d"'),
        (">\n  ab3d", ">"),
        ('"ab\\n  3d"', '"ab\\n  3d"'),
    ],
)
def test_verbatim_part_of_a_scalar_is_underlined(written: str, underlined: str) -> None:
    class Exact(Section):
        name: Annotated[Text, AfterValidator(_letters)]

    diagnostics = Diagnostics()
    validate(Exact, Composed(tree_of(f"name: {written}\n")), diagnostics)
    (diagnostic,) = diagnostics
    assert diagnostic.code == "name-syntax"
    assert diagnostic.span.text.split("\n")[0] == underlined


def test_key_of_a_mapping_is_underlined_itself() -> None:
    class Keyed(Section):
        sizes: dict[Annotated[str, AfterValidator(_letters)], Int]

    diagnostics = Diagnostics()
    view = validate(Keyed, Composed(tree_of("sizes:\n  a: 1\n  b2: 2\n")), diagnostics)
    assert faults_of(list(diagnostics)) == [("name-syntax", "2")]
    assert view.model is not None
    assert view.model.sizes == {"a": 1}


def test_alias_used_twice_is_one_finding_naming_both_uses() -> None:
    class Garage(Section):
        left: Car
        right: Car

    diagnostics = Diagnostics()
    validate(Garage, Composed(tree_of("left: &car\n  engine: {power: 0}\nright: *car\n")), diagnostics)
    (diagnostic,) = diagnostics
    assert (diagnostic.code, diagnostic.span.text, diagnostic.path) == ("bad-value", "0", ("left", "engine", "power"))
    assert [(span.text, words) for span, words in diagnostic.related] == [("right", "also used at")]


def test_stand_in_lets_the_rest_be_judged() -> None:
    diagnostics = Diagnostics()
    tree = tree_of("car: {wheels: [{size: x, spokes: 3}, {spokes: 4}, {size: 7}]}\n")
    view = validate(File, Composed(tree), diagnostics, stand_ins={("car", "wheels", "*", "size"): 1})
    assert view.model is not None
    assert [(wheel.size, wheel.spokes) for wheel in view.model.car.wheels] == [(1, 3), (1, 4), (7, 32)]
    assert view.damaged(("car", "wheels", 0, "size"))
    assert view.damaged(("car", "wheels", 1, "size"))
    assert not view.damaged(("car", "wheels", 0, "spokes"))
    assert not view.damaged(("car", "wheels", 2))
    assert [diagnostic.code for diagnostic in diagnostics] == ["wrong-type", "missing-key"]


def test_unresolved_value_is_not_judged_again() -> None:
    diagnostics = Diagnostics()
    tree = tree_of("car: {door_count: '${nope}', name: abc}\n")
    view = validate(File, Composed(tree, unresolved=frozenset({("car", "door_count")})), diagnostics)
    assert list(diagnostics) == []
    assert view.model is not None
    assert view.model.car.door_count == 4
    assert view.damaged(("car", "door_count"))


@pytest.mark.parametrize(
    ("text", "unresolved"),
    [
        ("car: {wings: '${nope}', name: abc}\n", ("car", "wings")),
        ("car: {wings: {left: [1, '${nope}']}, name: abc}\n", ("car", "wings", "left", 1)),
    ],
)
def test_unknown_key_is_told_although_a_reference_in_it_failed(text: str, unresolved: Path) -> None:
    diagnostics = Diagnostics()
    view = validate(File, Composed(tree_of(text), unresolved=frozenset({unresolved})), diagnostics)
    assert faults_of(list(diagnostics)) == [("unknown-key", "wings")]
    assert view.model is not None
    assert view.model.car.name == "abc"


def test_secret_value_is_not_quoted() -> None:
    class Login(Section):
        password: Literal["open", "shut"]
        user: Literal["root", "nobody"]

    diagnostics = Diagnostics()
    validate(Login, Composed(tree_of("password: hunter2\nuser: hunter3\n"), secret=frozenset({("user",)})), diagnostics)
    messages = " ".join(diagnostic.message for diagnostic in diagnostics)
    assert "hunter" not in messages
    assert "`********`" in messages
    assert "`open`, `shut`" in messages


@pytest.mark.parametrize("wheels", [500, pytest.param(5_000, marks=pytest.mark.nightly)])
def test_thousands_of_mistakes_are_cheap(wheels: int) -> None:
    items = "".join(f"    - {{size: 0, nope{index}: 1}}\n" for index in range(wheels))
    verdict, view = check(f"car:\n  wheels:\n{items}")
    assert sum(finding.findings for finding in verdict) == 2 * wheels
    assert view.model is not None
