"""Every code of the reader has an example that triggers it at its marker, and one that does not."""

from __future__ import annotations

import pytest

from rlinf_cli.codes import CLOSE, OPEN, Code, Example, codes_by_stage
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import decode, load_source, read


def findings(example: Example) -> Diagnostics:
    diagnostics = Diagnostics()
    if example.name:
        source = load_source(example.name, diagnostics)
    else:
        text = example.text.replace(OPEN, "").replace(CLOSE, "")
        source = decode("example.yaml", example.data if example.data is not None else text.encode(), diagnostics)
    if source is not None:
        read(source, diagnostics)
    return diagnostics


@pytest.mark.parametrize("code", codes_by_stage()["reading"], ids=lambda code: code.name)
def test_the_wrong_example_is_reported_at_its_marker(code: Code) -> None:
    results = [d for d in findings(code.wrong) if d.code == code.name]
    assert results, f"{code.name} is not reported"
    assert results[0].severity is code.severity
    if OPEN in code.wrong.text:
        start = code.wrong.text.index(OPEN)
        marked = (start, code.wrong.text.index(CLOSE) - len(OPEN))
        assert (results[0].span.start, results[0].span.end) == marked


@pytest.mark.parametrize("code", codes_by_stage()["reading"], ids=lambda code: code.name)
def test_the_right_example_reads_without_a_finding(code: Code) -> None:
    assert not list(findings(code.right))
