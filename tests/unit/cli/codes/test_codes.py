"""Every diagnostic code through the whole pipeline: its wrong example is reported at the markers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf_cli.codes import CLOSE, OPEN, Code, Example, all_codes
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.diagnostics import Diagnostic
from rlinf_core.job import find_recipe
from rlinf_core.job.load import Job, Probe
from rlinf_core.process.import_path import EntryPoint, offered
from rlinf_core.topology import NodeInfo

ROOT = Path(__file__).parents[4]
# Where findings are made.
FOLDERS = ("rlinf_core/config", "rlinf_core/hardware", "rlinf_core/placement", "rlinf_core/job", "rlinf_cli/job")
SOURCES = [
    *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")),
    *(ROOT / "recipes").glob("*/*.py"),
]
KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")

Load = Callable[[Example], "tuple[Job, tuple[str, int, int, int, int] | None]"]


class _BrokenEntryPoint(EntryPoint):
    def load(self) -> None:
        raise RuntimeError("out of order")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads an example; tells what it marked as (source name, line, column, end line, end column)."""
    broken = {"broken": _BrokenEntryPoint("broken", "broken:recipe")}
    monkeypatch.setattr(find_recipe, "offered", lambda group: {**offered(group), **broken})
    monkeypatch.chdir(tmp_path)

    def loading(example: Example) -> tuple[Job, tuple[str, int, int, int, int] | None]:
        clean, marked = without_markers(example)
        for name, text in clean.files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(text.encode())
        if not clean.name:
            (tmp_path / "job.yaml").write_bytes(clean.text.encode() if clean.data is None else clean.data)
        job = load_with_lint(
            clean.name or "job.yaml",
            clean.overrides,
            assume=clean.assume,
            environ=dict(clean.environ),
            probe=None if clean.found is None else nodes_with(clean.found),
        )
        return job, marked

    return loading


def nodes_with(accelerators: int) -> Probe:
    """Nodes that all turn out to have so many."""
    return lambda cluster: [NodeInfo(rank, accelerators, "NVIDIA") for rank in range(cluster.num_nodes)]


def without_markers(example: Example) -> tuple[Example, tuple[str, int, int, int, int] | None]:
    """Return the example as it is loaded, and the place that was marked in it."""
    overrides, assume = "\n".join(example.overrides), "\n".join(example.assume)
    sources = {"job.yaml": example.text, "<overrides>": overrides, "--assume": assume, **dict(example.files)}
    marked: tuple[str, int, int, int, int] | None = None
    for name, text in sources.items():
        if example.data is None and OPEN in text and CLOSE in text:
            assert marked is None, "two marked places"
            start, end = text.index(OPEN), text.index(CLOSE) - 1
            clean = text.replace(OPEN, "", 1).replace(CLOSE, "", 1)
            marked = (name, *position(clean, start), *position(clean, end))
            sources[name] = clean
    return replace(
        example,
        text=sources.pop("job.yaml"),
        overrides=tuple(sources.pop("<overrides>").split("\n")) if example.overrides else (),
        assume=tuple(sources.pop("--assume").split("\n")) if example.assume else (),
        files=tuple((name, sources[name]) for name, _ in example.files),
    ), marked


def position(text: str, offset: int) -> tuple[int, int]:
    before = text[:offset]
    return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


def place(diagnostic: Diagnostic) -> tuple[str, int, int, int, int]:
    span = diagnostic.span
    begin, finish = span.begin, span.finish
    return (span.source.name, begin.line, begin.column, finish.line, finish.column)


@pytest.mark.parametrize("code", all_codes().values(), ids=lambda code: code.name)
def test_examples_of_a_code(code: Code, load: Load) -> None:
    """The wrong one is reported at the markers, and the right one is free of the code."""
    job, marked = load(code.wrong)
    diagnostics = [diagnostic for diagnostic in job.diagnostics if diagnostic.code == code.name]
    assert diagnostics, f"not among {[diagnostic.code for diagnostic in job.diagnostics]}"
    assert {diagnostic.severity for diagnostic in diagnostics} == {code.severity}
    # Bytes that are no text have no markers; the reader's own tests look at the place.
    if code.wrong.data is None and marked is None:
        assert (diagnostics[0].span.begin.line, diagnostics[0].span.begin.column) == (1, 1)
    elif code.wrong.data is None:
        assert [place(diagnostic) for diagnostic in diagnostics] == [marked]
    job, marked = load(code.right)
    assert marked is None, "a right example marks nothing"
    assert [diagnostic.code for diagnostic in job.diagnostics if diagnostic.code == code.name] == []
    assert job.ok, [(diagnostic.code, diagnostic.message) for diagnostic in job.diagnostics]


@pytest.mark.parametrize("code", all_codes().values(), ids=lambda code: code.name)
def test_entry_is_complete(code: Code) -> None:
    assert KEBAB.fullmatch(code.name)
    assert code.title
    assert not code.title.endswith(".")
    assert code.meaning.endswith((".", "`"))
    assert "  " not in code.meaning, "a blank too many where two literals meet"


def emitted_codes() -> Iterator[tuple[str, str]]:
    """Return every kebab-case literal that code hands to something which makes a finding, with where it stands."""
    makers = {"Diagnostic", "Problem", "problem", "report", "_report", "_error", "error", "warning", "Words"}
    for file in SOURCES:
        if "codes" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in makers or name.lstrip("_").startswith(("report", "problem", "conflicts")):
                for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    if (
                        isinstance(value, ast.Constant)
                        and isinstance(value.value, str)
                        and KEBAB.fullmatch(value.value)
                    ):
                        yield value.value, f"{file.relative_to(ROOT)}:{value.lineno}"


def test_every_code_that_is_emitted_has_an_entry() -> None:
    emitted = dict(emitted_codes())
    assert {name: where for name, where in emitted.items() if name not in all_codes()} == {}
    # The scan sees every stage.
    assert emitted.keys() >= {"duplicate-key", "unknown-key", "bad-value", "duplicate-label", "placement-out-of-range"}
