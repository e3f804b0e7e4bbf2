"""The number of boxes that the nodes of a placement can hold at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from recipes.agent.config.agent_config import AgentConfig
from recipes.agent.harbor.task_folder import find_tasks, memory_of
from rlinf_core import ConfigError
from rlinf_core.config.ranks import format_ranks


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
