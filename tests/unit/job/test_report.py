"""Findings of a recipe's rules: what follows from a wrong value is dropped, by its key and not by its words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from rlinf_cli.job.load import load_with_lint
from rlinf_core.config.diagnostics import Diagnostics, Severity
from rlinf_core.config.reading import decode, read
from rlinf_core.config.tree import Path
from rlinf_core.config.validating.model_fields import alternatives, model_of
from rlinf_core.config.validating.pruning import Validated
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.report import FindingPlace, Report

A: Path = ("section", "a")
B: Path = ("section", "b")


def is_reported(pruned: set[Path], at: Path | FindingPlace, message: str, about: list[Path]) -> bool:
    diagnostics = Diagnostics()
    source = decode("job.yaml", b"section: {a: 1, b: 2}\nother: 3\n", diagnostics)
    assert source is not None
    tree = read(source, diagnostics)
    assert tree is not None
    view: Validated[object] = Validated(None, tree, frozenset(pruned), {}, tree)  # type: ignore[type-var]
    Report(view, diagnostics)(at, "toy-rule", message, about=about, severity=Severity.WARNING)
    return bool(len(diagnostics))


@pytest.mark.parametrize(
    ("pruned", "at", "about", "expected"),
    [
        (set(), A, [], True),
        ({B}, A, [], True),
        ({A}, A, [], False),
        ({B}, A, [B], False),
        ({("section",)}, A, [], False),
        ({("other",)}, A, [B], True),
        ({B}, FindingPlace(A, (A, B)), [], False),
        ({B}, FindingPlace(A, (A, ("section",))), [], True),
    ],
)
def test_what_a_finding_is_about_decides(
    pruned: set[Path], at: Path | FindingPlace, about: list[Path], expected: bool
) -> None:
    assert is_reported(pruned, at, "`b` and `other` are named here", about) is expected


EMBODIED = (
    "recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,env: {node_group: node,"
    " placement: 0}\n"
)
GRPO = ("algorithm.adv_type=grpo", "algorithm.loss_type=actor", "algorithm.group_size=8")


@pytest.mark.parametrize("key", ["component_placment", "component_placement"])
def test_a_misspelt_section_is_one_mistake(key: str) -> None:
    text = EMBODIED.replace("component_placement", key).replace("num_nodes: 1", "num_nodes: 1\n  hosts: [a, b]")
    diagnostics = load_with_lint("-", stdin=text.encode(), environ={}).diagnostics
    others = [diagnostic.code for diagnostic in diagnostics if diagnostic.code != "unknown-key"]
    assert len(diagnostics) - len(others) == (key == "component_placment")
    assert others == ["hosts-count"]


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        below = [
            section for alternative in alternatives(field.annotation) if (section := model_of(alternative)) is not None
        ]
        at = f"{path}.{name}" if path else name
        if below:
            yield from (leaf for section in below for leaf in leaves(section, at))
        elif path:
            yield at


@pytest.mark.parametrize("base", [(), GRPO, ("algorithm.normalize_advantages=false", "runner.max_steps=-1")])
def test_one_wrong_value_is_one_finding(base: tuple[str, ...]) -> None:
    model = find_recipe("embodied").config_model()
    keys = [leaf for name in ("runner", "actor", "rollout", "env", "algorithm") for leaf in leaves(
        model_of(model.model_fields[name].annotation) or BaseModel, name)]  # fmt: skip
    assert len(keys) > 60
    wrong: dict[str, list[str]] = {}
    for key in keys:
        overrides = (*(item for item in base if not item.startswith(f"{key}=")), f"{key}=[[]]")
        job = load_with_lint("-", overrides, stdin=EMBODIED.encode(), environ={})
        findings = [
            f"{diagnostic.code}: {diagnostic.message}"
            for diagnostic in job.diagnostics
            if diagnostic.severity is Severity.ERROR
        ]
        if len(findings) > 1:
            wrong[key] = findings
    assert wrong == {}
