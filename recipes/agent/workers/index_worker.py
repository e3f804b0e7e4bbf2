"""The workers that hold the index of `search` for many agent processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from recipes.agent.agent_config import AgentConfig
from recipes.agent.task_calls import IndexGroup
from recipes.agent.tasks_and_tools import make_search
from recipes.agent.tools.computing_tools import NOTHING_FOUND, Search
from recipes.agent.tools.tool import Tool, ToolError, ToolUnavailable
from recipes.language.loop.worker_groups import LanguageLayout
from rlinf_core import RLinfError, Worker


class IndexWorker(Worker):
    """Answers searches of agent processes, many per call. The process does not import torch."""

    config_section = "index"

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Read and index the corpus.

        Raises:
            ConfigError: the corpus cannot be read.
        """
        self._search = make_search(self._config)

    def search(self, queries: Sequence[str]) -> list[str | None]:
        """Return the results of each query; None if there are none."""
        return [self._found(query) for query in queries]

    def _found(self, query: str) -> str | None:
        try:
            return self._search.find(query)
        except ToolError:
            return None


class IndexSearch(Tool):
    """Search by an index worker; concurrent queries share one call.

    Args:
        index: the worker.
        warn: called once if the worker no longer answers.
    """

    name = Search.name
    description = Search.description

    def __init__(self, index: IndexGroup, warn: Callable[[str], None]) -> None:
        self._index = index
        self._warn = warn
        self._warned = False
        self._waiting: list[tuple[str, asyncio.Future[str]]] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def call(self, argument: str) -> str:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((argument, result))
        return await result

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._ask(waiting))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, waiting: list[tuple[str, asyncio.Future[str]]]) -> None:
        try:
            (texts,) = await self._index.search([query for query, _ in waiting]).async_wait()
        except RLinfError as error:
            reason = str(error).partition("\n")[0]
            if not self._warned:
                self._warned = True
                self._warn(f"searches fail because the index is unreachable: {reason}")
            for _, result in waiting:
                _settle(result, ToolUnavailable(f"the index is unreachable: {reason}"))
            return
        for (_, result), text in zip(waiting, texts, strict=True):
            _settle(result, ToolError(NOTHING_FOUND) if text is None else text)


def _settle(waiting: asyncio.Future[str], outcome: str | Exception) -> None:
    """Set the result of a search, unless its call has timed out."""
    if waiting.done():
        return
    if isinstance(outcome, Exception):
        waiting.set_exception(outcome)
    else:
        waiting.set_result(outcome)
