"""How many boxes `rlinf inspect placement` says that nodes may hold."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recipes.agent.box_capacity import placement_notes
from tests.unit.recipes.agent.harbor.made_tasks import double_task, greeting_task


def _config(path: Path, memory: int | None = None, most: int = 256, *, plays: bool = True) -> Any:
    environment = SimpleNamespace(path=str(path), box_memory_mib=memory)
    return SimpleNamespace(agent=SimpleNamespace(tasks=environment if plays else None, max_concurrent=most))


def test_boxes_are_counted_by_node_and_by_memory(tmp_path: Path) -> None:
    for folder, memory in ((greeting_task(tmp_path), 200), (double_task(tmp_path), 500)):
        toml = folder / "task.toml"
        toml.write_text(f"[environment]\nmemory_mb = {memory}\n")
    nodes = {"agent": [0, 0, 1, 1, 2], "actor": [3]}
    assert placement_notes(_config(tmp_path, 2000, most=4), nodes) == [
        "boxes of 2 agent processes on nodes 0-1: 4-8 at once in 2000 MiB (a task needs 200-500 MiB)",
        "boxes of 1 agent process on node 2: 4 at once in 2000 MiB (a task needs 200-500 MiB)",
    ]
    assert placement_notes(_config(tmp_path, 400), {"agent": [0]}) == [
        "boxes of 1 agent process on node 0: a task of 500 MiB never fits into 400 MiB"
        " (`agent.environment.box_memory_mib`) (a task needs 200-500 MiB)"
    ]
    assert placement_notes(_config(tmp_path / "none", 2000), {"agent": [0]}) == [
        "boxes of 1 agent process on node 0: as many as fit into 2000 MiB"
    ]
    assert placement_notes(_config(tmp_path / "none"), {"agent": [0]}) == [
        "boxes of 1 agent process on node 0: as many as fit into half of its memory"
    ]
    assert placement_notes(_config(tmp_path, plays=False), {"actor": [0]}) == []


def test_nothing_of_a_task_is_read_but_its_sizes(tmp_path: Path) -> None:
    task = greeting_task(tmp_path)
    # What `folder_digest` refuses.
    os.mkfifo(task / "environment/pipe")
    (notes,) = placement_notes(_config(task, 512), {"agent": [0]})
    assert notes.endswith("2 at once in 512 MiB (a task needs 256 MiB)")
    (task / "task.toml").unlink()
    (task / "task.toml").mkdir()
    (notes,) = placement_notes(_config(task, 512), {"agent": [0]})
    assert notes.endswith("as many as fit into 512 MiB")
