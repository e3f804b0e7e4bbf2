"""References of OmegaConf in our form, and what they stand for."""

from __future__ import annotations

import json

import pytest

from rlinf_cli.importing.references import References, UnresolvableError
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import read
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import MappingNode, ScalarNode, find

TEXT = """
a:
  b: 3
  c: ${.b}
  d: ${..e.f}
  self: ${a.self}
  one: ${.other}
  other: ${.one}
e:
  f: x
  list: [10, 20]
  open: "${a.b"
"""


def tree(new: str = "") -> MappingNode:
    """Return the tree with a text at `a.new`."""
    text = read(SourceText("a.yaml", TEXT.replace("a:\n", f"a:\n  new: {json.dumps(new)}\n", 1)), Diagnostics())
    assert text is not None
    return text


def rewritten(text: str, *, carried: bool = True, environ: dict[str, str] | None = None) -> tuple[str, str | None]:
    """Return a value at `a.new` in our form; `a.b` and `e.f` are carried over as `x.b` and `y.f`."""
    names = {("a", "b"): ("x", "b"), ("e", "f"): ("y", "f")} if carried else {}
    whole, at = tree(text), ("a", "new")
    node = find(whole, at)
    assert isinstance(node, ScalarNode)
    result = References(whole, environ or {}).rewritten(node, at, names)
    return result.raw, result.note


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("${a.b}", "${x.b}"),
        ("${.b}", "${x.b}"),
        ("${..e.f}", "${y.f}"),
        ("in ${.b} and ${e.f}", "in ${x.b} and ${y.f}"),
        ("${oc.env:HOME}/results", "${env:HOME}/results"),
        ("${oc.env:HOME,/tmp}", "${env:HOME:-/tmp}"),
        ("${oc.env:HOME,'/tmp'}", "${env:HOME:-/tmp}"),
        ("${oc.env:HOME,null}", "${env:HOME:-}"),
        ("${oc.env:HOME,${a.b}}", "${env:HOME:-3}"),
        ("${env:HOME}", "${env:HOME}"),
    ],
)
def test_what_is_carried_over_stays_a_reference(text: str, ours: str) -> None:
    assert rewritten(text) == (ours, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${a.b}", "3"),
        ("${.c}", "3"),
        ("${a.d}-${a.b}", "x-3"),
        ("${e.list.1}", "20"),
        ("${e.list[0]}", "10"),
        ("${multiply:${a.b},4}", "12"),
        ("${int_div:${e.list.1}, ${subtract:${a.b},1}}", "10"),
        ("${oc.select:a.b,7}", "3"),
        ("${oc.select:a.nothing,7}", "7"),
        ("${oc.decode:${oc.env:N,5}}", "5"),
    ],
)
def test_what_is_not_carried_over_is_replaced_by_its_value(text: str, value: str) -> None:
    raw, note = rewritten(text, carried=False)
    assert raw == value
    assert note is not None
    assert text in note


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${a.nothing}", "refers to nothing"),
        ("${a.self}", "refers back to itself"),
        ("${a.one}", "refers back to itself"),
        ("${......b}", "points above the root of the file"),
        ("${now:%Y}", "every run gets its own folder"),
        ("${hydra:runtime.cwd}", "does not exist here"),
        ("${seed_of:run}", "no resolver `seed_of`"),
        ("${int_div:1,0}", "divides by 0"),
        ("${multiply:a,2}", "`a` is not a number"),
        ("${e}", "a section or a list"),
        ("${a.b", "is not a reference"),
        ("${e.open}", "is not a reference"),
        ("${a.${a.b}}", "is not a reference"),
        ("${oc.select:${e.f}}", "is not a reference"),
        ("${oc.create:${e.f}}", "no resolver `oc.create`"),
    ],
)
def test_what_cannot_be_known_says_why(text: str, why: str) -> None:
    with pytest.raises(UnresolvableError, match=why.replace("(", r"\(")):
        rewritten(text, carried=False)


def test_a_variable_that_is_set_decides_a_value() -> None:
    assert rewritten("${multiply:${oc.env:N},2}", environ={"N": "4"})[0] == "8"


def test_a_section_behind_references_is_found() -> None:
    whole = tree()
    node = find(whole, ("a", "c"))
    assert node is not None
    result = References(whole, {}).section(node, ("a", "c"))
    assert isinstance(result, ScalarNode)
    assert result.raw == "3"
