"""`rlinf up` and `rlinf down` of this machine alone, with a real Ray and no ssh."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster import identity
from rlinf_core.process import proc
from tests.waiting import until

Run = Callable[..., Any]
pytestmark = pytest.mark.timeout(300)


def free_ports() -> range:
    """Return a range whose first ports nobody listens on; below those that Linux hands out."""
    for first in range(24000, 32000, 200):
        try:
            for port in range(first, first + 16):
                with socket.socket() as item:
                    item.bind(("", port))
        except OSError:
            continue
        return range(first, first + 200)
    pytest.skip("no free ports")


JOIN = """\
from rlinf_core import Cluster
from rlinf_core.cluster import engine
from tests.waiting import until
with Cluster(num_nodes=1):
    running = engine.current()
    print(running.embedded, running.address)
"""


@pytest.fixture
def base() -> Iterator[str]:
    """A short folder for temporary files of the test alone: no driver beside it sees the cluster."""
    with tempfile.TemporaryDirectory(prefix="up", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def env(tmp_path: Path, base: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "RAY_"))}
    return {**own, "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": base}


def joined(env: dict[str, str], **extra: str) -> list[str]:
    """Return what a driver on this machine says of its Ray: whether it is embedded, and its address."""
    done = subprocess.run(
        [sys.executable, "-c", JOIN], env={**env, **extra}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def run(tmp_path: Path, base: str, env: dict[str, str]) -> Iterator[Run]:
    """Runs `rlinf`: `run("up", "--quiet")`; the cluster is down at the end."""
    ports = free_ports()
    name = f"here-{os.getpid()}"
    file = tmp_path / f"{name}.yaml"
    file.write_text(f"cluster: {{num_nodes: 1, ports: {ports.start}-{ports.stop - 1}}}\n")

    def call(command: str, *arguments: str) -> Any:
        argv = [sys.executable, "-m", "rlinf_cli", command, str(file), "--json", *arguments]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    yield call
    call("down", "--force")
    cluster = identity.cluster_id(name)
    assert not proc.processes_of(cluster, f"{base}/rlinf-{os.getuid()}/up-{cluster}")


@pytest.mark.nightly
def test_a_driver_joins_it(run: Run, env: dict[str, str]) -> None:
    address = run("up", "--timeout", "120")["address"]
    assert joined(env) == ["False", address]
    assert joined(env, RLINF_ADDRESS=address) == ["False", address]
    assert joined(env, RLINF_ADDRESS="local")[0] == "True"
    assert run("down")["ok"]


@pytest.mark.nightly
def test_up_again_repaired_and_down(run: Run, tmp_path: Path) -> None:
    first = run("up", "--timeout", "120")
    assert [(node["up"], node["changed"]) for node in first["nodes"]] == [(True, True)]
    assert [node["changed"] for node in run("up")["nodes"]] == [False]
    [record] = (tmp_path / "state" / "rlinf" / "clusters").glob("*.json")
    written = json.loads(record.read_text())
    process = written["nodes"][0]["process"]
    folder = Path(written["nodes"][0]["folder"])
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    os.kill(int(process.split(":")[0]), signal.SIGKILL)
    until(lambda: not proc.alive(process), "the death of the node's process", 60)
    assert [node["changed"] for node in run("up", "--timeout", "120")["nodes"]] == [True]
    ended = run("down")
    assert [(node["found"], node["left"]) for node in ended["nodes"]] == [(True, [])]
    assert not folder.exists()
    assert not record.exists()
