"""The groups of workers as the loop of agents calls them."""

from __future__ import annotations

from typing import Any, Protocol

from recipes.language.loop.protocols import AnsweringGroup, EngineGroup, Nothing
from recipes.language.prompts.prompt_messages import GenerationReport, Prompt
from rlinf_core import WorkerGroupHandle


class TurnGroup(EngineGroup, Protocol):
    """The workers that draw turns."""

    def serve(self) -> WorkerGroupHandle[GenerationReport]: ...
    def serve_forever(self) -> Nothing: ...


class AgentCalls(AnsweringGroup, Protocol):
    """The workers that run agents."""

    def generate_forever(self) -> Nothing: ...


class AgentView(Protocol):
    """Calls on some of the workers that run agents."""

    def generate(self, prompts: tuple[Prompt, ...], /) -> WorkerGroupHandle[GenerationReport]: ...
    def handle(self, method: str, references: list[Any], /) -> WorkerGroupHandle[Any]: ...


class AgentGroup(AgentCalls, Protocol):
    """The workers that run agents, all together and some of them."""

    def execute_on(self, *ranks: int) -> AgentView: ...


class IndexGroup(Protocol):
    """The workers that hold the index of `search`."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def search(self, queries: list[str], /) -> WorkerGroupHandle[list[str | None]]: ...
