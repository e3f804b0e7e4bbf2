from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.inventory import NodeTarget, ThisNode, here, place
from rlinf_core.errors import ConfigError, RLinfError

Nodes = Callable[..., tuple[NodeTarget, ...]]
SLURM = {"SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "gpu[07-09,12]"}


@pytest.fixture
def without(make_nodes: Nodes) -> tuple[NodeTarget, ...]:
    return make_nodes(text="cluster: {num_nodes: 4}")


def test_hosts_or_a_single_node_are_started_from_here(make_nodes: Nodes) -> None:
    assert place(make_nodes(3), None, None, SLURM) is None
    assert place(make_nodes(text="cluster: {num_nodes: 1}"), None, None, SLURM) is None


def test_what_is_asked_for_and_what_slurm_says(without: tuple[NodeTarget, ...]) -> None:
    assert place(without, 3, "10.0.0.1", SLURM) == ThisNode(3, "10.0.0.1")
    assert place(without, None, None, SLURM) == ThisNode(2, "gpu07")
    assert place(without, 1, None, SLURM) == ThisNode(1, "gpu07")
    assert place(without, 0, None, {}) == ThisNode(0, None)


def test_nothing_says_how_to_reach_the_nodes(without: tuple[NodeTarget, ...]) -> None:
    with pytest.raises(ConfigError, match="4 nodes and no hosts"):
        place(without, None, None, {})
    with pytest.raises(ConfigError, match="the address of node 0 is missing"):
        place(without, 1, None, {})
    with pytest.raises(ConfigError, match="the file has no node 4"):
        place(without, 4, "h", {})
    with pytest.raises(ConfigError, match="requires `--node-rank`"):
        place(without, None, "h", {})
    with pytest.raises(ConfigError, match="the address of node 0 is missing"):
        place(without, 1, None, {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu["})


def test_nodes_that_start_themselves_are_reached_without_ssh(make_nodes: Nodes) -> None:
    assert {node.host for node in here(make_nodes(3))} == {None}


def test_the_token_is_the_heads(tmp_path: Path) -> None:
    assert identity.shared_token("c", None, None, 1.0) is None
    assert identity.shared_token("c", None, 0, 1.0) is None
    token = identity.token_of("c")
    assert identity.shared_token("c", None, 1, 1.0) == token
    other = tmp_path / "token"
    other.write_text("t" * 64)
    other.chmod(0o600)
    assert identity.shared_token("c", str(other), 1, 1.0) == "t" * 64
    other.chmod(0o640)
    with pytest.raises(RLinfError, match="readable by others"):
        identity.shared_token("c", str(other), 1, 1.0)


def test_a_token_that_does_not_come_is_told_in_time() -> None:
    with pytest.raises(RLinfError, match="this node has no token") as caught:
        identity.shared_token("c", None, 1, 0.3)
    assert "--token-file" in str(caught.value.help)
