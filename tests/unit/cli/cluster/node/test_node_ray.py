"""Starting Ray on a node, with a program in its place that does what Ray does on a busy machine."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster.node import node_ray
from rlinf_core.node import node_facts
from rlinf_core.process import proc

GIVES_UP = "sys.exit('Exception: The current node timed out during startup. This could happen because of anything.')"
LISTENS = "open_port = socket.create_server(('127.0.0.1', {port}))"
# At its first start it gives up, at the second it listens.
STAND_IN = """
import pathlib, socket, sys, time
mark = pathlib.Path({mark!r})
if not mark.exists():
    mark.touch()
    {first}
with socket.create_server(("127.0.0.1", {port})):
    print("Ray runtime started.", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def request_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`request_for(first)`: a request to start a head whose Ray is a stand-in that does `first` at first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    cluster = f"test-{port}"
    folder = tmp_path / "up"

    def folder_of(_: str) -> str:
        return str(folder / cluster)

    monkeypatch.setattr(node_facts, "folder_of", folder_of)
    ports = dict.fromkeys(("gcs", "node_manager"), port)

    def make(first: str, deadline: float = 60.0) -> dict[str, Any]:
        first = first.replace(LISTENS, LISTENS.format(port=port))
        code = STAND_IN.format(mark=str(tmp_path / "started"), first=first, port=port)
        command = [sys.executable, "-c", code]

        def stand_in(*_: object) -> list[str]:
            return command

        monkeypatch.setattr(node_ray, "_command", stand_in)
        who = {"cluster": cluster, "name": "c", "rank": 0, "head": True, "address": "127.0.0.1", "head_address": None}
        return {**who, "ports": ports, "fixed": [], "spec": {}, "deadline": deadline}

    yield make
    proc.kill_all(cluster, str(folder / cluster))


def test_ray_that_gives_up_for_being_slow_is_started_again(request_for: Any) -> None:
    record = node_ray.start(request_for(GIVES_UP))
    assert record["started"]
    assert proc.alive(record["process"])


def test_ray_that_gives_up_after_it_listens_is_started_again(request_for: Any, tmp_path: Path) -> None:
    gives_up_late = f"{LISTENS}; open_port.accept(); {GIVES_UP}"
    record = node_ray.start(request_for(gives_up_late))
    assert record["started"]
    assert proc.alive(record["process"])
    assert "Ray runtime started." in (tmp_path / "up" / record["cluster"] / "up.log").read_text()


def test_there_is_an_end_to_it(request_for: Any, tmp_path: Path) -> None:
    # Which of the two is seen first is the machine's choice.
    with pytest.raises(node_ray.NodeError, match=r"timed out during startup|did not come up within 1 s"):
        node_ray.start(request_for(f"mark.unlink(); {GIVES_UP}", deadline=1.0))
    assert not list((tmp_path / "up").glob("*"))


def test_ray_that_ends_for_another_reason_is_not_started_again(request_for: Any, tmp_path: Path) -> None:
    with pytest.raises(node_ray.NodeError, match="Ray ended during startup") as caught:
        node_ray.start(request_for("sys.exit('no such option')"))
    assert "exit code 1: no such option" in str(caught.value.answer["why"])
    assert not list((tmp_path / "up").glob("*"))
