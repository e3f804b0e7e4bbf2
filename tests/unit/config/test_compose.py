"""A file, its bases, the overrides and the references together; and every code of this stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_core.config.codes import CLOSE, OPEN, Code, Example, codes_by_stage
from rlinf_core.config.compose import Composed, compose
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.dump import to_yaml
from rlinf_core.config.reader import load_source
from rlinf_core.config.tree import to_data


def unmarked(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def findings(folder: Path, example: Example) -> tuple[Composed | None, Diagnostics]:
    for name, text in (("job.yaml", example.text), *example.files):
        (folder / name).write_text(unmarked(text), encoding="utf-8")
    found = Diagnostics()
    source = load_source(str(folder / "job.yaml"), found)
    assert source is not None
    overrides = [unmarked(argument) for argument in example.overrides]
    return compose(source, overrides, found, environ=dict(example.environ), without_recipe="cluster"), found


def marked(example: Example) -> tuple[str, int, int]:
    """Return the last part of the source's name, and the offsets, of what stands between the markers."""
    texts = [("job.yaml", example.text), *example.files, ("<overrides>", "\n".join(example.overrides))]
    ((name, text),) = [(name, text) for name, text in texts if OPEN in text]
    return name, text.index(OPEN), text.index(CLOSE) - len(OPEN)


def place(problem: Diagnostic) -> tuple[str, int, int]:
    return Path(problem.span.source.name).name, problem.span.start, problem.span.end


@pytest.mark.parametrize("code", codes_by_stage()["composing"], ids=lambda code: code.name)
def test_the_wrong_example_is_reported_at_its_marker(tmp_path: Path, code: Code) -> None:
    _, found = findings(tmp_path, code.wrong)
    (problem,) = found
    assert (problem.code, problem.severity) == (code.name, code.severity)
    assert place(problem) == marked(code.wrong)


@pytest.mark.parametrize("code", codes_by_stage()["composing"], ids=lambda code: code.name)
def test_the_right_example_composes(tmp_path: Path, code: Code) -> None:
    composed, found = findings(tmp_path, code.right)
    assert composed is not None
    assert not list(found)


def test_the_order_is_base_file_overrides_references(tmp_path: Path) -> None:
    example = Example(
        "extends: base.yaml\nx: file\nfrom_base: ${y}\n",
        overrides=("y=override", "z=${x}"),
        files=(("base.yaml", "x: base\ny: base\nshown: ${x}-${y}\n"),),
    )
    composed, found = findings(tmp_path, example)
    assert composed is not None
    assert found.ok
    assert to_data(composed.tree) == {
        "x": "file",
        "y": "override",
        "shown": "file-override",
        "from_base": "override",
        "z": "file",
    }
    assert [Path(source.name).name for source in composed.sources] == ["job.yaml", "base.yaml", "<overrides>"]


def test_all_mistakes_are_found_in_one_pass(tmp_path: Path) -> None:
    example = Example(
        "extends: base.yaml\nrecipe: x\na: ${gone}\n",
        overrides=("+b=1", "c", "d.e=2"),
        files=(("base.yaml", "d: ${env:NONE}\n"),),
    )
    _, found = findings(tmp_path, example)
    assert {problem.code for problem in found} == {
        "override-plus",
        "override-syntax",
        "override-path",
        "unknown-reference",
        "unknown-variable",
    }


def test_overrides_are_judged_when_a_base_is_missing(tmp_path: Path) -> None:
    composed, found = findings(tmp_path, Example("extends: gone.yaml\n", overrides=("+a=1",)))
    assert composed is None
    assert {problem.code for problem in found} == {"base-unreadable", "override-plus"}


def test_a_composed_configuration_is_saved_and_loads_back(tmp_path: Path) -> None:
    example = Example(
        "extends: base.yaml\ncluster:\n  num_nodes: ${env:N}\n  component_placement:\n    actor: 0-3\nv: $${x}\n",
        overrides=("w=2.50",),
        files=(("base.yaml", "cluster:\n  component_placement:\n    actor,env: 0-7\n"),),
        environ=(("N", "2"),),
    )
    composed, found = findings(tmp_path, example)
    assert composed is not None
    assert found.ok
    (tmp_path / "saved").mkdir()
    again, found = findings(tmp_path / "saved", Example(to_yaml(composed.tree)))
    assert again is not None
    assert found.ok
    assert to_yaml(again.tree) == to_yaml(composed.tree)
    assert to_data(again.tree) == to_data(composed.tree)
