"""Ending the drivers of jobs, as a node does it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster.node import node_agent, node_holdings
from rlinf_core.node import node_facts
from tests.waiting import until

ADDRESS = "10.0.0.1"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process on a node of this cluster."""
    monkeypatch.setattr(node_facts, "folder_of", lambda cluster: str(tmp_path))
    node_facts.write_private(str(tmp_path / "node.json"), f'{{"address": "{ADDRESS}"}}')
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    # For a moment in which it is executed it has no command line.
    until(lambda: "sleep" in node_holdings.command_of(process.pid), "its command")
    yield process
    process.kill()
    process.wait()


def end(driver: subprocess.Popen[bytes], **changes: Any) -> dict[str, Any]:
    job = {"address": ADDRESS, "pid": driver.pid, "command": node_holdings.command_of(driver.pid), **changes}
    return node_agent.end_jobs({"cluster": "c", "jobs": [job], "deadline": 20.0})


def test_a_driver_is_told_to_end(driver: subprocess.Popen[bytes]) -> None:
    assert end(driver) == {"told": 1, "left": 0}
    assert driver.wait() == -15


@pytest.mark.parametrize("change", [{"address": "10.0.0.2"}, {"command": "python train.py"}, {"pid": os.getpid()}])
def test_another_process_is_left_alone(driver: subprocess.Popen[bytes], change: dict[str, Any]) -> None:
    assert end(driver, **change) == {"told": 0, "left": 0}
    assert driver.poll() is None
