"""The memory estimate of an agent job: its language model, agents with tools, and the index; and the number of boxes
that the nodes of a placement can hold at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from recipes.agent.agent_config import AgentConfig
from recipes.agent.harbor.task_folder import find_tasks, memory_of
from recipes.language.language_memory import Sizes, component_forecasts
from recipes.training.without_memory import WORKER
from rlinf_core import ConfigError
from rlinf_core.config.ranks import format_ranks
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


def placement_notes(config: AgentConfig, nodes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a line for each group of nodes with equal capacity; see `PlacementNotes`."""
    environment = config.agent.tasks
    if environment is None:
        return []
    sizes = _sizes(environment.path)
    alike: dict[int, list[int]] = {}
    for node, processes in sorted(Counter(nodes["agent"]).items()):
        alike.setdefault(processes, []).append(node)
    lines: list[str] = []
    for processes, ranks in alike.items():
        where = f"node{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
        most = processes * config.agent.max_concurrent
        memory = environment.box_memory_mib
        if memory is None:
            held = "as many as fit into half of its memory"
        elif sizes and sizes[-1] > memory:
            held = (
                f"a task of {sizes[-1]} MiB never fits into {memory} MiB (`agent.environment.options.box_memory_mib`)"
            )
        elif sizes:
            held = f"{_spelled(min(most, memory // size) for size in sizes)} at once in {memory} MiB"
        else:
            held = f"as many as fit into {memory} MiB"
        needs = f" (a task needs {_spelled(sizes)} MiB)" if sizes else ""
        of = f"{processes} agent process{'es' if processes > 1 else ''}"
        lines.append(f"boxes of {of} on {where}: {held}{needs}")
    return lines


def _spelled(numbers: Iterable[int]) -> str:
    return "-".join(map(str, sorted(set(numbers))))


def _sizes(path: str | None) -> list[int]:
    """Return the minimum and maximum memory of the tasks' boxes, in MiB; empty if tasks cannot be read here."""
    try:
        sizes = {memory_of(folder) for folder in find_tasks(Path(path or "."))}
    except (ConfigError, OSError):
        return []
    return sorted({min(sizes), max(sizes)})
