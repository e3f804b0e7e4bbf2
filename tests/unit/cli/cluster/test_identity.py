"""The name, the token and the lock of a cluster that is brought up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlinf_cli.cluster import identity
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.node import cluster_records
from rlinf_core.node.cluster_records import ClusterRecord, token_file


def test_a_token_that_others_could_read_is_not_used() -> None:
    identity.token_of("a")
    token_file("a").chmod(0o644)
    with pytest.raises(RLinfError, match="readable by others"):
        identity.token_of("a")


def test_a_token_is_made_once() -> None:
    first = identity.token_of("a")
    assert identity.token_of("a") == first
    assert identity.token_of("a", fresh=True) != first


@pytest.mark.parametrize(
    ("file", "name"),
    [("conf/hetero18.yaml", "hetero18"), ("-", "default"), ("a b;$(c).yaml", "a-b-c"), ("hetero18", "hetero18")],
)
def test_a_cluster_is_named_like_its_file(file: str, name: str) -> None:
    assert identity.cluster_name(file) == name


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-a", "a b", "x" * 65])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        identity.cluster_name("a.yaml", name)


def test_the_lock_is_free_again_afterwards() -> None:
    with identity.locked("a"):
        pass
    with (
        identity.locked("a"),
        pytest.raises(RLinfError, match="is working on cluster `a`"),
        identity.locked("a"),
    ):
        pass


def test_the_lock_goes_with_the_clusters_record() -> None:
    with identity.locked("a"):
        assert (cluster_records.folder() / "a.lock").exists()
    assert not (cluster_records.folder() / "a.lock").exists()
    cluster_records.save(ClusterRecord("a", "1", "a.yaml", "", False, (1, 2)))
    with identity.locked("a"):
        pass
    assert (cluster_records.folder() / "a.lock").exists()


def test_the_lock_is_waited_for_and_held_alone() -> None:
    holder = "import sys\nfrom rlinf_cli.cluster.identity import locked\n"
    holder += "with locked('a'):\n print('held', flush=True)\n sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RLinfError, match="is working"), identity.locked("a", seconds=0.3):
            pass
        process.stdin.close()
        with identity.locked("a", seconds=30), pytest.raises(RLinfError), identity.locked("a"):
            pass
