"""The agent on a node: requests and replies, Ray there, what its head lists, and a home that nodes share."""

from __future__ import annotations

import ast
import asyncio
import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.down import take_down
from rlinf_cli.cluster.inventory import NodeTarget, here
from rlinf_cli.cluster.node import node_agent, node_probe, node_ray, node_requests
from rlinf_cli.cluster.transport import Transport
from rlinf_cli.cluster.up import UpReport, UpRequest, bring_up
from rlinf_core import __version__
from rlinf_core.errors import ConfigError
from rlinf_core.node import cluster_records, node_facts
from rlinf_core.process import proc
from tests.unit.cli.cluster.conftest import CODE, FakeCluster
from tests.unit.cli.typed import text_file
from tests.waiting import until

Nodes = Callable[..., tuple[NodeTarget, ...]]


@pytest.mark.parametrize("name", node_requests.PARTS)
def test_parts_are_of_python_3_8_and_of_its_library(name: str) -> None:
    source = node_requests.path_of(name).read_text(encoding="utf-8")
    # Every part that another imports travels before it.
    for other in node_requests.PARTS[node_requests.PARTS.index(name) :]:
        package, _, own = other.rpartition(".")
        assert f"{other} import" not in source
        assert not re.search(rf"from {package} import .*\b{own}\b", source)
    tree = ast.parse(source, feature_version=(3, 8))
    if name == node_requests.QUESTIONS:
        return  # what a question imports besides, the interpreter has that is asked
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    modules = {alias.name for node in imports for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {module for module in modules if module.startswith("rlinf")}
    assert ours <= {part.rpartition(".")[0] for part in node_requests.PARTS} | set(node_requests.PARTS)
    assert {module.partition(".")[0] for module in modules - ours} <= set(sys.stdlib_module_names)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {"removeprefix", "removesuffix"} & attributes  # of 3.9


@pytest.fixture
def ask(make_nodes: Nodes) -> Callable[..., node_requests.AgentReply]:
    def call(request: dict[str, Any], *, deadline: float = 60, **changes: Any) -> node_requests.AgentReply:
        node = replace(make_nodes(text="cluster: {num_nodes: 1}")[0], **{"interpreter": sys.executable, **changes})
        return asyncio.run(node_requests.ask(Transport(), node, request, deadline=deadline))

    return call


def test_the_facts_of_this_machine(ask: Callable[..., node_requests.AgentReply]) -> None:
    answer = ask({"verb": "probe", "cluster": "test-e1-none", "env": {}, "ports": {}})
    assert answer.data is not None, answer
    facts = answer.data or {}
    assert facts["python"] == list(sys.version_info[:3])
    assert facts["interpreter"] == sys.executable
    assert facts["record"] is None
    assert facts["fingerprint"]
    assert facts["places"]["rlinf_core"]
    assert facts["disk_free"] > 0


def test_a_taken_port_is_told_with_who_has_it(ask: Callable[..., node_requests.AgentReply]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        facts = ask({"verb": "probe", "cluster": "test-e1-none", "ports": {"gcs": port, "free": 1}}).data or {}
    [[name, number, who]] = facts["taken"]
    assert (name, number) == ("gcs", port)
    assert "pid" in who
    assert "cluster" not in who


def test_a_taken_port_names_the_cluster_that_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node_probe, "folder_of", lambda cluster: str(tmp_path / cluster))
    (tmp_path / "68b076be").mkdir()
    (tmp_path / "68b076be" / "node.json").write_text('{"name": "lap"}')
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
    code += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    env, pipe = {**os.environ, "RLINF_RAY": "68b076be"}, subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=env) as held:
        assert held.stdin is not None
        assert held.stdout is not None
        port = int(held.stdout.readline())
        [[_, _, who]] = node_probe.taken_ports({"gcs": port}, set())
        held.stdin.close()
    assert who.endswith(" of cluster `lap` (`rlinf down --name lap`)")


def test_the_environment_has_the_code_that_was_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of somebody else")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    env = node_probe.environment({"env": {"A": "1"}, "code": True, "cluster": "test-e1-none"})
    assert (env["PATH"], env["A"]) == ("/usr/bin", "1")
    assert env["PYTHONPATH"] == node_probe.code_folder("test-e1-none")
    assert "RAY_AUTH_TOKEN" not in env


def test_an_interpreter_that_is_not_there(ask: Callable[..., node_requests.AgentReply]) -> None:
    answer = ask({"verb": "probe"}, interpreter="/nowhere/python", declared_interpreter=True)
    assert answer.message == "the interpreter `/nowhere/python` does not exist"
    assert answer.help == "correct `python_interpreter_path`"
    assert answer.rc == 127


def program(tmp_path: Path, script: str) -> str:
    """Return the path of an interpreter that is a script of the shell."""
    path = text_file(tmp_path / "python", f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_that_is_none(ask: Callable[..., node_requests.AgentReply], tmp_path: Path) -> None:
    path = text_file(tmp_path / "text", "no program\n")
    assert "is not executable" in ask({"verb": "probe"}, interpreter=str(path)).message
    answer = ask({"verb": "probe"}, interpreter=program(tmp_path, "echo broken >&2\nexit 3"))
    assert "cannot run the agent" in answer.message
    assert (answer.rc, answer.lines) == (3, "broken")
    hangs = program(tmp_path, "exec sleep 600")
    answer = ask({"verb": "probe"}, deadline=0.2, interpreter=hangs)
    assert answer.message == "no answer within 0.2 s"
    assert answer.why == f"`{hangs}`, or a script of the login shell before it, printed nothing"
    assert answer.help == f"try `{hangs} -V` there"


@pytest.mark.parametrize(
    ("login", "takes"),
    [
        ("read -r answer", False),
        ("read a; read b; read c", False),
        ('echo "Welcome!"\necho 12', False),
        ("cat >/dev/null", True),
        ("while read -r line; do :; done", True),
        ("dd bs=100 count=1 2>/dev/null", True),
    ],
)
def test_a_login_script_that_takes_the_input_is_named(
    ask: Callable[..., node_requests.AgentReply], tmp_path: Path, login: str, takes: bool
) -> None:
    own = program(tmp_path, f'{login}\nexec {sys.executable} "$@"')
    answer = ask({"verb": "probe", "cluster": "test-e1-none"}, interpreter=own)
    assert (answer.data is None) is takes
    if takes:
        assert answer.message == "the login shell took the standard input of the command"
        assert "~/.bashrc" in answer.why


def test_a_bug_of_the_agent_is_told_and_not_its_request(ask: Callable[..., node_requests.AgentReply]) -> None:
    answer = ask({"verb": "start", "token": "0123456789abcdef"})
    assert answer.data is None
    assert "KeyError" in answer.message
    assert "0123456789abcdef" not in str(answer)


def test_its_version_is_that_of_the_code_and_of_no_distribution(tmp_path: Path) -> None:
    """Code that `--sync` shipped has no distribution, and one called `rlinf` may be another project's."""
    assert node_probe.software(dict(os.environ))["rlinf"] == __version__
    facts = node_probe.software({}, str(tmp_path / "python"))
    assert facts["ray"] is None
    assert facts["fault"]


def test_a_folder_is_short_enough_for_rays_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts.tempfile, "gettempdir", lambda: "/a/very/long/folder/that/somebody/chose/for/TMPDIR")
    assert node_facts.folder_of("01234567").startswith("/tmp/rlinf-")


def test_what_was_written_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    node_facts.write_private(str(path), json.dumps({"process": "1:2", "env": {"SECRET": "x"}}))
    assert path.stat().st_mode & 0o777 == 0o600
    result = node_facts.running(str(tmp_path))
    assert result is not None
    assert "env" not in result
    assert result["alive"] is False
    path.write_text("{")
    assert node_facts.running(str(tmp_path)) is None


def test_shipped_code_comes_first_and_replaces_older_code(
    ask: Callable[..., node_requests.AgentReply], tmp_path: Path
) -> None:
    code = tmp_path / "code"
    (code / "own" / "__pycache__").mkdir(parents=True)
    (code / "own" / "__init__.py").write_text("x = 1\n")
    (code / "own" / "__pycache__" / "x.pyc").write_text("")
    packed = node_requests.archive(code)
    cluster = f"t{tmp_path.stat().st_ino}"
    folder = Path(node_probe.code_folder(cluster))
    try:
        first = ask({"verb": "sync", "cluster": cluster, "archive": packed})
        assert first.data is not None, first
        assert (folder / "own" / "__init__.py").read_text() == "x = 1\n"
        assert (folder / "rlinf_core" / "errors.py").exists()
        assert not (folder / "own" / "__pycache__").exists()
        (folder / "stale.py").write_text("")
        assert ask({"verb": "sync", "cluster": cluster, "archive": packed}).data is not None
        assert not (folder / "stale.py").exists()
        facts = ask({"verb": "probe", "cluster": cluster, "code": True}).data or {}
        assert facts["places"]["rlinf_core"] == str(folder / "rlinf_core")
        ended = ask({"verb": "stop", "cluster": cluster}).data or {}
        assert (ended["found"], ended["files"]) == (True, [])
        assert not folder.exists()
    finally:
        node_probe.remove(str(folder))


@pytest.mark.parametrize("name", ["/tmp/evil", "../evil", "a/../../evil"])
def test_an_archive_writes_nowhere_else(
    ask: Callable[..., node_requests.AgentReply], tmp_path: Path, name: str
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        packed.addfile(tarfile.TarInfo(name))
    archive = base64.b64encode(buffer.getvalue()).decode()
    answer = ask({"verb": "sync", "cluster": f"t{tmp_path.stat().st_ino}", "archive": archive})
    assert answer.data is None
    assert "cannot be written" in answer.message
    assert not Path("/tmp/evil").exists()


def test_what_is_no_code_is_not_shipped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        node_requests.archive(tmp_path / "none")
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigError, match="too large to be copied"):
        node_requests.archive(tmp_path)


def test_robot_address_comes_from_its_nodes_variable(ask: Callable[..., node_requests.AgentReply]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as robot:
        port = robot.getsockname()[1]
        environment = {"interpreter": sys.executable, "env": {"ARM": "127.0.0.1"}, "prepended": []}
        request = {"verb": "inspect", "cluster": "test-e1-none", "camera_environment": environment}
        reply = ask({**request, "addresses": [["$ARM", port], ["$LEG", port]]}).data or {}
    fault = "the node's environment has no variable `LEG`"
    assert reply["robots"] == [["$ARM", port, None], ["$LEG", port, fault]]


ADDRESS = "10.0.0.1"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process on a node of this cluster."""
    monkeypatch.setattr(node_facts, "folder_of", lambda cluster: str(tmp_path))
    node_facts.write_private(str(tmp_path / "node.json"), f'{{"address": "{ADDRESS}"}}')
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    # For a moment in which it is executed it has no command line.
    until(lambda: "sleep" in node_probe.command_of(process.pid), "its command")
    yield process
    process.kill()
    process.wait()


def end(driver: subprocess.Popen[bytes], **changes: Any) -> dict[str, Any]:
    job = {"address": ADDRESS, "pid": driver.pid, "command": node_probe.command_of(driver.pid), **changes}
    return node_agent.end_jobs({"cluster": "c", "jobs": [job], "deadline": 20.0})


def test_a_driver_is_told_to_end(driver: subprocess.Popen[bytes]) -> None:
    assert end(driver) == {"told": 1, "left": 0}
    assert driver.wait() == -15


@pytest.mark.parametrize("change", [{"address": "10.0.0.2"}, {"command": "python train.py"}, {"pid": os.getpid()}])
def test_another_process_is_left_alone(driver: subprocess.Popen[bytes], change: dict[str, Any]) -> None:
    assert end(driver, **change) == {"told": 0, "left": 0}
    assert driver.poll() is None


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


@pytest.mark.parametrize("first", [GIVES_UP, f"{LISTENS}; open_port.accept(); {GIVES_UP}"], ids=["slow", "late"])
def test_ray_that_gives_up_is_started_again(request_for: Any, tmp_path: Path, first: str) -> None:
    record = node_ray.start(request_for(first))
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


def test_a_head_needs_an_interpreter_that_shells_take(request_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for("")
    monkeypatch.setattr(sys, "executable", "/home/me/my lab/.venv/bin/python")
    with pytest.raises(node_ray.NodeError, match="cannot be started by `/home/me/my lab/"):
        node_ray.start(request)


def test_nodes_come_up_and_end_while_the_head_is_at_work(make_nodes: Nodes) -> None:
    nodes = here(make_nodes(3))
    fake = FakeCluster(3)

    def up(rank: int) -> UpReport:
        request = UpRequest("c", "c.yaml", nodes, "10.0.0.1", only=rank, token="t" * 64, fingerprint=CODE)
        return asyncio.run(bring_up(request, fake, lambda _: None))

    assert up(0).ok
    # As while `up` or `down` of the head is at work on another machine, whose locks reach as far as the home.
    with identity.locked("c"):
        assert up(1).ok
        assert up(2).ok
        before = cluster_records.load("c")
        ended = asyncio.run(take_down("c", nodes[1:2], fake, lambda _: None))
    assert ended.ok
    assert cluster_records.load("c") == before
    asyncio.run(take_down("c", nodes[:1], fake, lambda _: None))
    assert cluster_records.load("c") is None
