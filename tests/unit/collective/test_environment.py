"""What the data plane finds around itself: memory limits, directories, processes, addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.collective import memory_budget
from rlinf_core.collective.endpoint_info import Settings, advertised_address, make_endpoint_info
from rlinf_core.collective.handshake import LONGEST_PATH, UnixDirectory, reap
from rlinf_core.errors import EnvironmentVariableError
from rlinf_core.process.proc import alive, identity

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": f"MemTotal: {16 * 1024 * 1024} kB\nMemAvailable: {8 * 1024 * 1024} kB\n"}


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    write(tmp_path, MEMINFO)
    assert memory_budget.allowed_bytes(tmp_path) == 16 << 30
    assert memory_budget.default_arena_bytes(tmp_path) == 2 << 30
    assert 7 << 30 < memory_budget.free_bytes(tmp_path) < 8 << 30


def test_the_tightest_group_decides(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/job/worker\n",
            f"{group}/job/memory.max": str(800 * MIB),
            f"{group}/job/memory.current": str(500 * MIB),
            f"{group}/job/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
            f"{group}/job/worker/memory.max": "max",
            f"{group}/job/worker/memory.current": "5",
            f"{group}/job/worker/memory.stat": "",
        },
    )
    assert memory_budget.allowed_bytes(tmp_path) == 800 * MIB
    assert memory_budget.default_arena_bytes(tmp_path) == 100 * MIB
    # What the kernel can drop does not count as used.
    assert memory_budget.free_bytes(tmp_path) == (800 - 400 - 64) * MIB


def test_older_cgroups_count_and_containers_see_their_own(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/abc\n0::/\n",
            f"{group}/memory.limit_in_bytes": str(400 * MIB),
            f"{group}/memory.usage_in_bytes": str(390 * MIB),
            f"{group}/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert memory_budget.allowed_bytes(tmp_path) == 400 * MIB
    assert memory_budget.free_bytes(tmp_path) == 0
    assert memory_budget.default_arena_bytes(tmp_path) == 64 * MIB


def test_the_environment_decides_about_times_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_SHM_LIMIT", "5MiB")
    monkeypatch.setenv("RLINF_TIMEOUT", "7")
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "3")
    settings = Settings.from_environment()
    assert (settings.arena_bytes, settings.timeout, settings.connect_timeout) == (5 * MIB, 7.0, 3.0)


def test_a_directory_is_private_and_goes_with_its_process(tmp_path: Path) -> None:
    base = f"/tmp/rlinf-test-{os.getpid()}"
    os.mkdir(base)
    try:
        mine = UnixDirectory(base)
        assert mine.path.stat().st_mode & 0o777 == 0o700
        code = (
            "import os, sys; from rlinf_core.collective.handshake import UnixDirectory;"
            f"print(UnixDirectory({base!r}).path, flush=True); os._exit(9)"
        )
        killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        left = Path(killed.stdout.strip())
        assert left.exists()
        reap(Path(base))
        assert not left.exists()
        assert mine.path.exists()
        mine.close()
        assert os.listdir(base) == []
    finally:
        os.rmdir(base)


def test_a_path_that_sockets_cannot_have_is_not_taken(tmp_path: Path) -> None:
    directory = UnixDirectory(str(tmp_path / ("x" * 120)))
    assert len(str(directory.path / "s")) < LONGEST_PATH
    directory.close()


def test_a_process_is_known_by_more_than_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identity(child.pid)
    assert process is not None
    assert alive(process)
    assert not alive(f"{child.pid}:another start")
    child.communicate(b"\n")
    assert not alive(process)


def test_the_interface_that_is_named_gives_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_NET_IF", "lo")
    assert advertised_address() == "127.0.0.1"
    monkeypatch.setenv("RLINF_NET_IF", "no-such0")
    with pytest.raises(EnvironmentVariableError, match="`lo`"):
        advertised_address()


def test_cards_of_one_host_share_it_and_no_two_are_the_same() -> None:
    one, two = make_endpoint_info("/a/s", "10.0.0.1", 1), make_endpoint_info("/b/s", "10.0.0.1", 2)
    assert one.incarnation != two.incarnation
    assert one.shares_host_with(two)
    assert not one.shares_host_with(make_endpoint_info(None, "10.0.0.1", 3))
