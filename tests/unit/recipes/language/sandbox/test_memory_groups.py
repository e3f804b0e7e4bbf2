"""Control groups of programs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import pytest

from recipes.language.sandbox import sandbox
from recipes.language.sandbox.program_limits import MemoryGroups, place_of_groups
from rlinf_core import ConfigError
from rlinf_core.node.process_life import own_group

# Each process has far less than it may. The next one starts once the last has its memory, or has been killed for it.
PROCESSES: Final = """
import os
wait, hold = os.pipe()
for _ in range(5):
    ready, report = os.pipe()
    if os.fork() == 0:
        os.close(hold)
        data = bytearray(24 << 20)
        os.write(report, b".")
        os.read(wait, 1)
        os._exit(0)
    os.close(report)
    os.read(ready, 1)
"""


def delegated(folder: Path, controllers: str) -> Path:
    own = folder / "user.service" / "session.scope"
    own.mkdir(parents=True)
    (own.parent / "cgroup.subtree_control").write_text(controllers)
    (own.parent / "cgroup.procs").write_text("")
    return own


def test_groups_are_made_beside_the_own_where_they_are_delegated(tmp_path: Path) -> None:
    own = delegated(tmp_path / "a", "cpu memory pids\n")
    assert place_of_groups(str(own)) == own.parent
    assert place_of_groups(str(delegated(tmp_path / "b", "cpu pids\n"))) is None
    assert place_of_groups(str(tmp_path)) is None
    assert place_of_groups(None) is None


def test_groups_are_used_again_and_left_over_ones_removed(tmp_path: Path) -> None:
    (tmp_path / "rlinf-program-999999999-0").mkdir()
    (tmp_path / "rlinf-program-1-0").mkdir()
    groups = MemoryGroups(tmp_path)
    assert [path.name for path in tmp_path.glob("rlinf-*")] == ["rlinf-program-1-0"]
    with groups.borrow(5) as first, groups.borrow(5) as second:
        assert first != second
        assert (first / "memory.max").read_text() == "5"
    with groups.borrow(5) as again, groups.borrow(6) as other:
        assert again in (first, second)
        assert other not in (first, second)


@pytest.fixture
def groups() -> MemoryGroups:
    own = own_group()
    if own is None or not os.access(own.path, os.W_OK) or not Path(own.path, "memory.limit_in_bytes").exists():
        pytest.skip("this process may make no control groups of version 1, which show the same")
    try:
        sandbox.check()
    except ConfigError as error:
        pytest.skip(str(error))
    return MemoryGroups(Path(own.path))


def test_processes_of_a_program_are_bounded_together(groups: MemoryGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = sandbox.SandboxLimits(memory=128 << 20)
    monkeypatch.setattr(sandbox.SandboxLimits, "total", 64 << 20)
    monkeypatch.setattr(sandbox, "memory_groups", lambda: groups)
    for program, ended in ((PROCESSES, True), ("print(1)", False)):
        result = asyncio.run(sandbox.run(program, limits))
        assert result.out_of_memory is ended
    assert result.output == "1\n"
    groups.close()
