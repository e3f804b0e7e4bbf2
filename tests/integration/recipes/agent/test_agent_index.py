"""The group `index`: agents search in it, and their runs fail when it has died."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, cast

import pytest

from recipes.agent.agent_config import AgentConfig
from recipes.agent.tasks_and_tools import lookup_corpus
from recipes.agent.tools.tool import Toolbox, ToolUnavailable
from recipes.agent.workers.index_worker import IndexGroup, IndexSearch, IndexWorker
from rlinf_core import Cluster, NodePlacementStrategy, Worker, WorkerGroup, load_job

pytestmark = pytest.mark.ray

FILE = """
recipe: agent
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout,reward,agent,index: {node_group: node, placement: 0}
data: {type: lookups}
agent: {tools: [search]}
"""


class Searcher(Worker):
    """Searches as an agent process does."""

    def search(self, name: str, queries: list[str]) -> list[tuple[str, str]]:
        group = WorkerGroup.from_group_name(IndexWorker, name)
        tools = Toolbox([IndexSearch(cast("IndexGroup", group.execute_on(0)), self.log_warning)], 30.0)

        async def ask(query: str) -> tuple[str, str]:
            try:
                seen = await tools.call("search", query)
            except ToolUnavailable:
                return "", "unavailable"
            return seen.text, seen.failure

        async def run() -> list[tuple[str, str]]:
            return await asyncio.gather(*(ask(query) for query in queries))

        return asyncio.run(run())


class PlacedIndex(IndexWorker):
    """An index that says which process it is, and which modules it has imported."""

    def process(self) -> tuple[int, bool]:
        import sys

        return os.getpid(), "torch" in sys.modules


def test_agents_search_in_workers_of_the_index(cluster: Cluster, tmp_path: Any) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    config = cast("AgentConfig", load_job(str(path)).config)
    assert config.has_index
    index = PlacedIndex.create_group(config).launch(cluster, NodePlacementStrategy([0]), "TestedIndex")
    searcher = Searcher.create_group().launch(cluster, NodePlacementStrategy([0]), "TestedSearcher")
    index.init_worker(None).wait()
    documents = lookup_corpus(config.data.seed)
    queries = [documents[0].rpartition(" ")[0], "nowhere", documents[-1].rpartition(" ")[0]]

    (seen,) = searcher.search("TestedIndex", queries).wait()
    assert seen == [(documents[0], ""), ("error: nothing found", "error"), (documents[-1], "")]
    ((pid, torch),) = index.process().wait()
    assert not torch

    os.kill(pid, signal.SIGKILL)
    (seen,) = searcher.search("TestedIndex", queries[:1]).wait()
    assert seen == [("", "unavailable")]
    searcher.shutdown()
