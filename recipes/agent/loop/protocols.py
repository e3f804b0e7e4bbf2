"""The methods that the loop of agents calls: of a worker, and of a group, which returns a handle."""

from __future__ import annotations

from typing import Any, Protocol

from recipes.language.loop.prompts import GenerationReport, Prompt
from recipes.language.loop.protocols import AnsweringGroup, EngineGroup
from recipes.training.comparing_worker import Comparing
from rlinf_core import WorkerGroupHandle


class AgentRollout(Comparing, Protocol):
    """The methods of a worker that draws turns."""

    def init_worker(self, layout: Any, /) -> None: ...
    def sync_model_from_actor(self) -> int: ...
    def offload(self, weights_follow: bool, /) -> None: ...
    def serve(self) -> GenerationReport: ...
    def serve_forever(self) -> None: ...


class AgentRunning(Comparing, Protocol):
    """The methods of a worker that runs agents."""

    def init_worker(self, layout: Any, /) -> None: ...
    def problem_counts(self) -> tuple[int, int]: ...
    async def generate(self, prompts: tuple[Prompt, ...], /) -> GenerationReport: ...
    async def generate_forever(self) -> None: ...


class Indexing(Protocol):
    """The methods of a worker that holds the index of `search`."""

    def init_worker(self, layout: Any, /) -> None: ...
    def search(self, queries: list[str], /) -> list[str | None]: ...


class TurnGroup(EngineGroup, Protocol):
    """Calls on the workers that draw turns."""

    def serve(self) -> WorkerGroupHandle[GenerationReport]: ...
    def serve_forever(self) -> WorkerGroupHandle[None]: ...


class AgentView(Protocol):
    """Calls on some of the workers that run agents."""

    def generate(self, prompts: tuple[Prompt, ...], /) -> WorkerGroupHandle[GenerationReport]: ...
    def handle(self, method: str, references: list[Any], /) -> WorkerGroupHandle[Any]: ...


class AgentGroup(AnsweringGroup, Protocol):
    """Calls on the workers that run agents."""

    def execute_on(self, *ranks: int) -> AgentView: ...
    def generate_forever(self) -> WorkerGroupHandle[None]: ...
