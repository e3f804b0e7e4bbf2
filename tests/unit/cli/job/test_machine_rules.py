"""Hosts and the address of the head."""

from __future__ import annotations

import pytest

from tests.unit.config.cluster_findings import check, faults_of, groups


def test_hosts_match_the_nodes() -> None:
    assert faults_of(groups("label: a, node_ranks: 0-1, hosts: [x, y]", num_nodes=2)) == []
    assert faults_of(groups('label: a, node_ranks: 0-1, hosts: "x[0-2]"', num_nodes=2)) == [
        ("hosts-count", 4, '"x[0-2]"')
    ]
    assert faults_of("cluster:\n  num_nodes: 3\n  hosts: [x, y]\n") == [("hosts-count", 3, "hosts")]
    assert faults_of("cluster:\n  num_nodes: 2\n  hosts: [x, y]\n") == []


def test_hosts_given_twice_hide_no_mistake_of_a_group() -> None:
    text = groups("label: a, node_ranks: 0-1, hosts: [x]", "label: b, node_ranks: 1, hosts: [z]", num_nodes=3)
    result = faults_of(text.replace("  node_groups", "  hosts: [u, v, w]\n  node_groups"))
    assert result == [("hosts-twice", 3, "hosts"), ("hosts-count", 5, "hosts")]


def test_a_host_is_one_node() -> None:
    diagnostics = check("cluster:\n  num_nodes: 6\n  hosts: ['a[0-1]', b, 'b,c', a1]\n")
    assert [(diagnostic.code, diagnostic.span.text, diagnostic.message) for diagnostic in diagnostics] == [
        ("duplicate-host", "'b,c'", "`b` is node 2 and node 3"),
        ("duplicate-host", "a1", "`a1` is node 1 and node 5"),
    ]
    assert [span.text for diagnostic in diagnostics for span, _ in diagnostic.related] == ["b", "'a[0-1]'"]
    text = groups("label: a, node_ranks: 0, hosts: x", "label: b, node_ranks: 1, hosts: x", num_nodes=2)
    assert faults_of(text) == [("duplicate-host", 5, "x")]


def test_groups_that_share_a_node_share_its_host() -> None:
    text = groups("label: a, node_ranks: 0-1, hosts: [x, y]", "label: b, node_ranks: 1, hosts: y", num_nodes=2)
    assert faults_of(text) == []
    assert faults_of(text.replace("hosts: y", "hosts: z")) == [("host-conflict", 5, "z")]


def test_nodes_without_host_are_named() -> None:
    verdict = check(groups("label: a, node_ranks: [1, 3], hosts: [x, y]", num_nodes=6))
    assert [result.message for result in verdict] == ["other nodes have a host, nodes 0,2,4-5 not"]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_head_that_nobody_reaches(address: str) -> None:
    text = f"cluster:\n  num_nodes: 2\n  head_address: {address}\n"
    assert faults_of(text) == [("head-address-local", 3, address)]
    assert faults_of(text.replace("2", "1", 1)) == []


def test_a_count_that_is_wrong_by_an_overlap_names_it() -> None:
    text = groups("label: train, node_ranks: 0-1, hosts: [x, y]", "label: sim, node_ranks: 1-3, hosts: [z, w]")
    (count,) = [finding for finding in check(text) if finding.code == "hosts-count"]
    assert (count.help or "").endswith("; node 1 of `node_ranks` overlaps with group `train`")
    (count,) = [finding for finding in check(text.replace("1-3", "0-3")) if finding.code == "hosts-count"]
    assert (count.help or "").endswith("; nodes 0-1 of `node_ranks` overlap with group `train`")
    (count,) = [finding for finding in check(text.replace("1-3", "2-4")) if finding.code == "hosts-count"]
    assert "overlap" not in (count.help or "")


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("root@sim1:2222", "root@sim1"),
        ("me@10.0.0.3:22", "me@10.0.0.3"),
        ("me@[2001:db8::7]:22", "me@2001:db8::7"),
        ("sim1:2222", "sim1"),
    ],
)
def test_a_host_loses_its_port_and_keeps_its_user(written: str, kept: str) -> None:
    (finding,) = check(f"cluster:\n  num_nodes: 1\n  hosts: ['{written}']\n")
    assert finding.help == f"remove it: `{kept}`; set the port of sshd with `port` of `ssh`"
