"""The workers that hold the index of `search`, once for many agent processes."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.agent.config import AgentConfig
from recipes.agent.tasks.make_tools import make_search
from recipes.agent.tools.tool import ToolError
from recipes.language.config.group_names import LanguageLayout
from rlinf_core import Worker


class IndexWorker(Worker):
    """Answers searches of agent processes, many by one call. The process imports no torch."""

    config_section = "index"

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Read the corpus, and make its index.

        Raises:
            ConfigError: the corpus cannot be read.
        """
        self._search = make_search(self._config)

    def search(self, queries: Sequence[str]) -> list[str | None]:
        """Return the results of every query; None if a query has none."""
        return [self._found(query) for query in queries]

    def _found(self, query: str) -> str | None:
        try:
            return self._search.find(query)
        except ToolError:
            return None
