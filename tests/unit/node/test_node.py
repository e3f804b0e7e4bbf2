"""The machine that a process is on: its clusters, variables, facts and ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.errors import ClusterError, ConfigError, RLinfError
from rlinf_core.node import attach, cluster_records, node_env, node_facts
from rlinf_core.node.attach import Known, NodePorts
from rlinf_core.node.cluster_records import ClusterRecord, RecordedNode


def record(name: str = "a", **changes: object) -> ClusterRecord:
    node = RecordedNode(0, "h", ("g",), "/opt/python", {"user": "me", "options": {"Compression": "yes"}}, "10.0.0.1")
    values = {
        "name": name,
        "id": "0badcafe",
        "file": "a.yaml",
        "address": "10.0.0.1:20000",
        "authenticated": True,
        "ports": (20000, 20999),
        "nodes": (node, node._replace(rank=1, host="i")),
        "since": 1.5,
    }
    return ClusterRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_what_is_saved_comes_back() -> None:
    cluster_records.save(record())
    assert cluster_records.load("a") == record()
    assert cluster_records.recorded() == record()
    assert cluster_records.recorded("a") == record()
    cluster_records.forget("a")
    assert cluster_records.recorded() is None
    cluster_records.forget("a")


def test_of_several_one_is_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_records.save(record("a"))
    cluster_records.save(record("b"))
    assert cluster_records.names() == ["a", "b"]
    with pytest.raises(ClusterError, match="several clusters are up: `a`, `b`"):
        cluster_records.recorded()
    assert cluster_records.recorded("none") is None
    monkeypatch.setenv("RLINF_CLUSTER", "b")
    assert cluster_records.recorded() == record("b")
    assert cluster_records.recorded("a") == record("a")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1, "nodes": [{"rank": 0}]}'])
def test_a_broken_record_is_one_error(text: str, state_home: Path) -> None:
    cluster_records.save(record())
    (state_home / "rlinf" / "clusters" / "a.json").write_text(text)
    with pytest.raises(RLinfError, match="the record of cluster `a` cannot be read"):
        cluster_records.load("a")


def test_the_folder_is_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cluster_records.folder() == tmp_path / ".local" / "state" / "rlinf" / "clusters"


def test_which_node_is_here() -> None:
    made = record()
    assert made.here() is None
    nodes = (made.nodes[0], made.nodes[1]._replace(machine=node_facts.machine()), *made.nodes[2:])
    result = replace(made, nodes=nodes).here()
    assert result is not None
    assert result.rank == 1


@pytest.mark.parametrize("what", ["a file", "below a file", "read-only"])
def test_state_folder_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, state_home: Path, tmp_path: Path, what: str
) -> None:
    folder = state_home / "rlinf" / "clusters"
    if what == "read-only":
        # To root every folder of the disk is writable.
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        place = folder if what == "a file" else state_home / "rlinf"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("")
        assert cluster_records.names() == []
    with pytest.raises(RLinfError, match="the folder of cluster records cannot be used") as caught:
        cluster_records.save(record())
    assert (caught.value.where, "XDG_STATE_HOME" in str(caught.value.help)) == (str(folder), True)


LAPTOP = Known("laptop", "127.0.0.1:20000", "/t/laptop", 1)
LAB = Known("lab", "10.0.0.1:20000", "/t/lab", 5)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[Known]:
    """The clusters that run on this machine."""
    result: list[Known] = []
    monkeypatch.setattr(attach, "running_here", lambda: iter(result))
    for name in ("RLINF_ADDRESS", "RLINF_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    return result


@pytest.mark.usefixtures("running")
def test_one_machine_joins_the_cluster_of_one_machine(running: list[Known]) -> None:
    assert attach.destination(None, 1, may_start=True) is None
    running += [LAB]
    assert attach.destination(None, 1, may_start=True) is None
    assert attach.destination(None, None, may_start=True) == LAB
    running += [LAPTOP]
    assert attach.destination(None, 1, may_start=True) == LAPTOP
    assert attach.destination("local", 1, may_start=True) is None
    with pytest.raises(ClusterError, match="several clusters: `lab`, `laptop`"):
        attach.destination(None, None, may_start=True)


@pytest.mark.usefixtures("running")
def test_the_variable_names_one(running: list[Known], monkeypatch: pytest.MonkeyPatch) -> None:
    running += [LAPTOP, LAB]
    monkeypatch.setenv("RLINF_CLUSTER", "lab")
    assert attach.destination(None, 1, may_start=True) == LAB
    monkeypatch.setenv("RLINF_CLUSTER", "labs")
    with pytest.raises(ClusterError, match="no cluster `labs` is known here") as caught:
        attach.destination(None, 1, may_start=True)
    assert caught.value.why == "known are `lab`, `laptop`"


@pytest.mark.usefixtures("running")
def test_several_nodes_need_a_cluster(running: list[Known]) -> None:
    with pytest.raises(ClusterError, match="no cluster is running that could be joined"):
        attach.destination(None, 5, may_start=False)
    running += [LAB]
    assert attach.destination(None, 5, may_start=False) == LAB


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("address", ["127.0.0.1:20000", "localhost:20000"])
def test_an_address_finds_its_cluster(running: list[Known], monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RLINF_ADDRESS", address)
    assert attach.destination(None, 1, may_start=True) == address
    running += [LAB, LAPTOP]
    assert attach.destination(None, 1, may_start=True) == LAPTOP
    assert attach.destination("10.0.0.9:20000", 1, may_start=True) == "10.0.0.9:20000"
    port: Any = 6379  # refused as text, as it is no address
    assert attach.destination(port, 1, may_start=True) == "6379"


@pytest.mark.usefixtures("running")
def test_an_address_finds_the_record_of_its_cluster() -> None:
    node = RecordedNode(0, "h", (), "/opt/python", {})
    cluster_records.save(ClusterRecord("far", "1", "far.yaml", "10.0.0.7:20000", True, (20000, 20999), (node,)))
    (cluster_records.folder() / "broken.json").write_text("{")
    result = attach.destination("10.0.0.7:20000", 1, may_start=True)
    assert result == Known("far", "10.0.0.7:20000", str(cluster_records.token_file("far")), 1, runs_here=False)


@pytest.mark.usefixtures("running")
def test_the_token_of_the_cluster_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("abc")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    attach.prepare(LAB._replace(token_path=str(token)))
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))
    assert "RAY_AUTH_TOKEN" not in os.environ
    attach.prepare(LAB._replace(token_path=None))
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


@pytest.mark.usefixtures("running")
def test_a_named_token_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("abc")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    attach.prepare(None)
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("text", [None, "", "\n"])
def test_a_missing_token_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(ClusterError, match="this process has no token for Ray"):
        attach.prepare(None)


@pytest.mark.parametrize(
    "value", ["$HOME costs 5$", "${HOME}", "${NOWHERE}x", "`id`", "a'b\"c\\", "two\nlines", "", "é"]
)
def test_a_value_arrives_as_it_is_written(tmp_path: Path, value: str) -> None:
    request = {"interpreter": sys.executable, "env": {"A": value, "HOME": "/elsewhere"}, "prepended": []}
    command = node_env.command(sys.executable, node_env.write(str(tmp_path), request))
    asked = "import json, os, sys; print(json.dumps([os.environ['A'], os.environ['HOME'], sys.argv[1:]]))"
    said = subprocess.run([*command, "-c", asked, "$HOME"], capture_output=True, check=True, timeout=60).stdout
    assert json.loads(said) == [value, "/elsewhere", ["$HOME"]]


def test_lists_of_directories_go_before_the_own_ones_once() -> None:
    def path(own: str | None, inputs: str) -> str:
        return node_env.merged({} if own is None else {"PATH": own}, {"PATH": inputs}, ["PATH"])["PATH"]

    assert path("/usr/bin", "/opt/bin") == "/opt/bin:/usr/bin"
    assert path("/opt/bin:/usr/bin", "/opt/bin") == "/opt/bin:/usr/bin"
    assert path("/opt/bin2", "/opt/bin") == "/opt/bin:/opt/bin2"
    assert path("/usr/bin", "/usr/bin") == "/usr/bin"
    # An empty entry of such a list would mean the working directory.
    assert [path(None, "/opt/bin"), path("", "/opt/bin"), path("/usr/bin", "")] == ["/opt/bin", "/opt/bin", "/usr/bin"]


def test_other_variables_replace_the_own_ones() -> None:
    assert node_env.merged({"A": "1", "B": "2"}, {"B": "3"}, ["PATH"]) == {"A": "1", "B": "3"}


def test_only_the_user_reads_what_may_be_secret(tmp_path: Path) -> None:
    path = node_env.write(str(tmp_path), {"interpreter": "/x", "env": {"TOKEN": "hunter2"}, "prepended": []})
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert "hunter2" not in path
    assert [path.name for path in tmp_path.iterdir()] == [Path(path).name]


# What Ray adds to its folder: a session, and the longest name among its sockets.
RAYS_PART = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
LIMIT = 107


@pytest.mark.parametrize("length", [6, 17, 18, 21, 40, 100])
def test_sockets_fit_below_whatever_tmpdir_is(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/".ljust(length, "x"))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    base = node_facts.private_base()
    assert os.path.basename(base) == "rlinf-1000"
    assert os.path.dirname(base) == (tempfile.tempdir if length <= 17 else "/tmp")
    for folder in (node_facts.folder_of("12345678"), os.path.join(base, "abcdefgh")):
        assert len(folder + RAYS_PART) <= LIMIT


def test_tmpdir_with_blanks_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/a b")
    assert node_facts.private_base() == f"/tmp/a b/rlinf-{os.getuid()}"


def test_where_no_temporary_folder_can_be_written_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_usable() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_usable)
    assert node_facts.private_base() == f"/tmp/rlinf-{os.getuid()}"


def test_ports_lie_in_the_range_and_apart() -> None:
    ports = NodePorts.of(range(20000, 21000))
    fixed = ports.fixed(head=True)
    assert len(set(fixed.values())) == len(fixed) == 9
    assert max(fixed.values()) < ports.first_worker < ports.last_worker < ports.first_data < ports.last_data == 20999
    assert (ports.full_range, ports.data) == ("20000-20999", "20672-20999")
    assert set(fixed) - set(ports.fixed(head=False)) == {"gcs", "dashboard", "client_server"}


def test_a_short_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 50 ports, Ray needs 100"):
        NodePorts.of(range(20000, 20050))
