from __future__ import annotations

import asyncio
from typing import Any

import pytest

from recipes.agent.tools.tool import ToolUnavailable
from recipes.agent.tools.toolbox import Toolbox
from recipes.agent.workers.index_worker import IndexSearch
from rlinf_core import WorkerDiedError, WorkerGroupError


class Index:
    """An index in this process; one that is dead raises what a group call raises."""

    def __init__(self, documents: list[str]) -> None:
        self._documents = {document.partition(" ")[0]: document for document in documents}
        self.calls: list[list[str]] = []
        self.dead = False

    def search(self, queries: list[str]) -> Any:
        self.calls.append(queries)
        return self

    async def async_wait(self) -> list[list[str | None]]:
        if self.dead:
            raise WorkerGroupError("IndexGroup", "search", {0: WorkerDiedError("IndexGroup:0")}, 1)
        return [[self._documents.get(call) for call in self.calls[-1]]]


def answers_of(tools: Toolbox, *queries: str) -> list[tuple[str, str]]:
    async def run() -> list[tuple[str, str]]:
        seen = await asyncio.gather(*(tools.call("search", query) for query in queries))
        return [(item.text, item.failure) for item in seen]

    return asyncio.run(run())


def test_searches_at_the_same_time_are_one_call() -> None:
    index = Index(["one 1", "two 2"])
    tools = Toolbox([IndexSearch(index, print)], 30.0)
    assert answers_of(tools, "one", "three", "two") == [("one 1", ""), ("error: nothing found", "error"), ("two 2", "")]
    assert index.calls == [["one", "three", "two"]]


def test_a_dead_index_is_told_once_and_fails_the_runs() -> None:
    index, warnings = Index(["one 1"]), list[str]()
    index.dead = True
    tools = Toolbox([IndexSearch(index, warnings.append)], 30.0)
    for queries in (("one", "one"), ("one",)):
        with pytest.raises(ToolUnavailable, match="the index is unreachable: "):
            answers_of(tools, *queries)
    assert len(warnings) == 1
    assert "IndexGroup" in warnings[0]
