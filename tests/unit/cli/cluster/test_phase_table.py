"""What is shown of many nodes while they come up: lines in a pipe, a table on a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rlinf_cli.cluster import inventory
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.progress import Event, Phase, PhaseTable, Progress
from rlinf_cli.console import console
from rlinf_core.config.machines.cluster import ClusterConfig


@pytest.fixture
def nodes() -> Callable[[int], Sequence[NodeTarget]]:
    def make(count: int) -> Sequence[NodeTarget]:
        config = ClusterConfig.model_validate({"num_nodes": count, "hosts": [f"h{rank}" for rank in range(count)]})
        return inventory.targets(config)

    return make


def test_each_step_of_few_nodes_is_a_line(
    nodes: Callable[[int], Sequence[NodeTarget]], capsys: pytest.CaptureFixture[str]
) -> None:
    table = PhaseTable(nodes(2), Phase.VERIFY)
    with table.shown():
        table.update(Event(1, Phase.JOIN, Progress.BEGUN, deadline=60))
        table.update(Event(1, Phase.JOIN, Progress.DONE, "10.0.0.2"))
        table.update(Event(0, Phase.HEAD, Progress.FAILED, "port 1 is taken"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["node 1 (h1): join ok (10.0.0.2)", "node 0 (h0): start head failed (port 1 is taken)"]


def test_of_many_nodes_only_failures_are_lines(
    nodes: Callable[[int], Sequence[NodeTarget]], capsys: pytest.CaptureFixture[str]
) -> None:
    table = PhaseTable(nodes(100), Phase.VERIFY)
    for rank in range(100):
        table.update(Event(rank, Phase.PROBE, Progress.DONE if rank != 7 else Progress.FAILED, "x"))
    assert capsys.readouterr().err.splitlines() == ["node 7 (h7): probe failed (x)"]


def test_a_wait_is_told_with_its_deadline(
    nodes: Callable[[int], Sequence[NodeTarget]], capsys: pytest.CaptureFixture[str]
) -> None:
    table = PhaseTable(nodes(5), Phase.VERIFY)
    for rank in range(5):
        table.update(Event(rank, Phase.JOIN, Progress.BEGUN, deadline=60))
    table.remind()
    assert capsys.readouterr().err == ""
    table._word_at = 0.0
    table.remind()
    assert capsys.readouterr().err == (
        "waiting for node 0 in join, 0 of 60 s, node 1 in join, 0 of 60 s, node 2 in join, 0 of 60 s, and 2 more\n"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("count", [3, 100])
def test_a_terminal_gets_a_table(
    nodes: Callable[[int], Sequence[NodeTarget]], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(console.verbosity, "quiet", False)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    table = PhaseTable(nodes(count), Phase.VERIFY)
    with table.shown():
        for rank in range(count):
            table.update(Event(rank, Phase.JOIN, Progress.BEGUN, deadline=60))
        table.update(Event(2, Phase.JOIN, Progress.FAILED, "a reason that is far too long for a terminal " * 3))
    shown = screen.getvalue()
    assert "join, 0 of 60 s" in shown
    assert "join failed" in shown
    if count > 24:
        assert "100 nodes: 100 in join" in shown


def test_answers_of_nodes_are_text_not_markup_or_control(
    nodes: Callable[[int], Sequence[NodeTarget]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    table = PhaseTable(nodes(1), Phase.VERIFY)
    row = table._rows[0]
    row.node = replace(row.node, host="[red]h0")
    row.detail = "\x1b]0;x\x07 [bold]"
    screen = Console(file=io.StringIO(), width=120, force_terminal=True)
    screen.print(table._grid())
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "[red]h0" in shown
    assert "[bold]" in shown
    assert "\x1b]" not in shown
