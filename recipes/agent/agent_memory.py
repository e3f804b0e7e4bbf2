"""The memory estimate of an agent job: its language model, agents with tools, and the index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from recipes.agent.config.agent_config import AgentConfig
from recipes.language.language_memory import Sizes, component_forecasts
from recipes.training.memory_parts import WORKER
from rlinf_core.job.recipe import ProcessForecast

# The additional imports of an agent process, as measured.
_AGENT: Final = 12 * 2**20
# Bytes in memory per byte of the documents of `search`: texts and word counts.
_INDEXED: Final = 12


def forecast(config: AgentConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory estimate of each process of a job, see `Recipe.memory`; raises as `model_sizes` does."""
    sizes, agent = Sizes.of(config, world_sizes), config.agent
    corpus = Path(agent.settings.corpus_path) if "search" in agent.tools and agent.settings.corpus_path else None
    index = _INDEXED * corpus.stat().st_size if corpus is not None and corpus.is_file() else 0
    count, base = sizes.count("agent"), WORKER + _AGENT
    notes: list[str] = []
    if agent.mcp:
        notes.append("the MCP servers that each agent process starts are not counted")
    if "python" in agent.tools:
        notes.append(f"programs of `python` take up to {agent.settings.python_memory_mib} MiB each")
    if ":" in agent.run:
        notes.append(f"what `{agent.run}` holds is not counted, nor are conversations besides its first")
    if config.plays_tasks:
        notes.append("boxes take what `agent.environment.options.box_memory_mib` says of each node besides")
    parts = {"base": base, "answers": sizes.objects("agent"), **({} if config.has_index else {"index": index})}
    forecasts = [*component_forecasts(sizes), ProcessForecast("agent", count, parts, notes=tuple(notes))]
    if config.has_index:
        forecasts.append(ProcessForecast("index", sizes.count("index"), {"base": base, "index": index}))
    return forecasts
