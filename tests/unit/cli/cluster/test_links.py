"""Which ways between nodes are measured, and how; the measurement itself runs here, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rlinf_cli.cluster.checks import links
from rlinf_cli.cluster.checks.finding import CheckVerdict, ProbedNode
from rlinf_cli.cluster.checks.links import Measured, NodeLink
from rlinf_cli.cluster.inventory import NodeTarget, address_of
from rlinf_cli.cluster.node import node_links
from rlinf_cli.cluster.node.node_links import measure
from rlinf_cli.cluster.transports.transport import CommandResult, OnLine, Transport
from rlinf_core import env_vars
from tests.unit.cli.cluster.conftest import request_in

Nodes = Callable[..., tuple[NodeTarget, ...]]


def test_component_nodes_all_have_links_to_other_components() -> None:
    result = links.links_of({"actor": range(4), "rollout": [4, 5], "env": [6]}, 7)
    ends = {(link.one, link.other): link.uses for link in result}
    assert {pair for pair, uses in ends.items() if "Ray" in uses} == {(rank, 0) for rank in range(1, 7)}
    assert {pair for pair, uses in ends.items() if "actor" in uses} == {(1, 0), (2, 1), (3, 2), (3, 0)}
    assert {pair for pair, uses in ends.items() if "actor-rollout" in uses} == {(4, 0), (5, 1), (4, 2), (5, 3)}
    assert {pair for pair, uses in ends.items() if "actor-env" in uses} == {(6, rank) for rank in range(4)}
    assert {pair for pair, uses in ends.items() if "rollout-env" in uses} == {(6, 4), (6, 5)}
    assert all(one > other for one, other in ends)


def test_components_on_one_node_need_no_way() -> None:
    assert links.links_of({"actor": [0], "rollout": [0]}, 1) == []


def test_there_are_no_more_ways_than_a_few_for_each_node() -> None:
    result = links.links_of({"a": range(1000), "b": range(1000), "c": range(500, 1000)}, 1000)
    assert len(result) < 5 * 1000


@pytest.mark.parametrize(
    ("facts", "declared", "address"),
    [
        ({"address": "10.0.0.5", "primary": "10.9.9.9"}, None, "10.0.0.5"),
        ({"address": "10.0.0.5", "primary": "10.9.9.9"}, "10.7.7.7", "10.7.7.7"),
        ({"address": "127.0.0.1", "primary": "10.9.9.9"}, None, "10.9.9.9"),
        ({"address": None, "primary": "10.9.9.9", "record": {"alive": True, "address": "10.1.1.1"}}, None, "10.1.1.1"),
        ({"address": None, "primary": "10.9.9.9", "record": {"alive": False, "address": "10.1.1.1"}}, None, "10.9.9.9"),
    ],
)
def test_a_node_is_reached_where_the_others_will(facts: dict[str, object], declared: str | None, address: str) -> None:
    assert address_of(facts, declared) == address


@pytest.fixture
def here(make_nodes: Nodes) -> dict[int, ProbedNode]:
    """Two nodes that are both this machine."""
    text = "cluster: {num_nodes: 2, ports: 21300-21399}"
    nodes = [replace(node, interpreter=sys.executable) for node in make_nodes(text=text)]
    facts = {"address": None, "primary": "127.0.0.1", "record": None}
    return {node.rank: ProbedNode(node, facts, 0.0, 0.0) for node in nodes}


def test_a_way_is_measured(here: dict[int, ProbedNode]) -> None:
    link = NodeLink(1, 0, ("Ray",))
    (result,), left = asyncio.run(links.measure([link], here, Transport(), seconds=30))
    assert (result.fault, left) == (None, [])
    assert 0 < result.latency < 1
    assert result.bandwidth > 1e6


def test_ways_for_which_there_is_no_time_are_told(here: dict[int, ProbedNode]) -> None:
    link = NodeLink(1, 0, ("Ray",))
    measured, left = asyncio.run(links.measure([link], here, Transport(), seconds=-1))
    assert (measured, left) == ([], [link])
    (result,) = links.findings_of(measured, left, here)
    assert (result.verdict, "1 of 1" in result.what) == (CheckVerdict.SKIPPED, True)


class Busy(Transport):
    """Nodes that measure at once, and refuse to be asked for two links."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.most = 0

    async def run(
        self, node: NodeTarget, argv: Any, stdin: bytes = b"", *, deadline: float, on_line: OnLine | None = None
    ) -> CommandResult:
        assert node.rank not in self.busy
        self.busy.add(node.rank)
        self.most = max(self.most, len(self.busy))
        try:
            await asyncio.sleep(0)
            if request_in(stdin)["verb"] == "measure":
                return CommandResult(0, b'{"event": "result", "fault": null, "latency": 1e-3, "bandwidth": 1e9}', b"")
            assert on_line is not None
            on_line(b'{"event": "listening", "port": 1}')
            await asyncio.sleep(60)
            raise AssertionError("the measurement does not end")
        finally:
            self.busy.remove(node.rank)


@pytest.mark.parametrize("most", [1, 3, 64])
def test_no_node_has_two_measurements_at_once(make_nodes: Nodes, most: int) -> None:
    wanted = links.links_of({"actor": range(6), "rollout": range(3, 9)}, 9)
    probed = {node.rank: ProbedNode(node, {"primary": "h"}, 0.0, 0.0) for node in make_nodes(9)}
    transport = Busy()
    measured, left = asyncio.run(links.measure(wanted, probed, transport, seconds=60, most=most))
    assert (sorted(result.link for result in measured), left) == (sorted(wanted), [])
    assert {result.latency for result in measured} == {1e-3}
    assert transport.most <= 2 * most


def test_clients_without_the_secret_are_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(30)
        secret = hashlib.sha256(b"one").hexdigest()
        peer = stranger.getsockname()

        async def both() -> dict[str, object]:
            asked = asyncio.to_thread(measure, {"secret": secret, "peer": list(peer), "seconds": 0.1})
            task = asyncio.ensure_future(asked)
            line, _ = await asyncio.to_thread(stranger.accept)
            with line:
                # It throws back what it gets, which proves nothing.
                said = b""
                while len(said) < 64:
                    part = await asyncio.to_thread(line.recv, 64)
                    said += part
                    line.sendall(part)
                return await task

        assert asyncio.run(both()) == {"fault": "something else answers there"}


def test_crowd_of_strangers_keeps_no_node_out(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = hashlib.sha256(b"one").hexdigest()
    said: queue.Queue[dict[str, Any]] = queue.Queue()
    measured = threading.Event()

    def say(line: dict[str, Any]) -> None:
        if measured.is_set():
            raise SystemExit  # as where nobody reads any more
        said.put(line)

    monkeypatch.setattr(node_links, "_say", say)
    request = {"secret": secret, "address": "127.0.0.1", "ports": [21400, 21499], "deadline": 60.0}

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            node_links.serve(request)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    port = said.get(timeout=30)["port"]
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(60)]
    result = measure({"secret": secret, "peer": ["127.0.0.1", port], "seconds": 0.1})
    assert result["fault"] is None
    answering = [thread for thread in threading.enumerate() if "_answer" in thread.name]
    assert len(answering) <= 32
    for member in crowd:
        member.close()
    measured.set()
    serving.join(60)
    assert not serving.is_alive()


def test_what_is_found_is_told_in_figures(here: dict[int, ProbedNode]) -> None:
    link = NodeLink(1, 0, ("Ray", "actor-env"))
    fast, slow, none = links.findings_of(
        [
            Measured(link, None, 0.00005, 1.5e9),
            Measured(link, None, 0.002, 11e6),
            Measured(link, "no answer at 10.0.0.1:20016"),
        ],
        [],
        here,
    )
    assert fast.what == "0.05 ms, 1.5 GB/s (Ray, actor-env)"
    assert slow.what == "slow: 2 ms, 11 MB/s (Ray, actor-env)"
    assert f"`{env_vars.NET_IF.name}`" in slow.help
    assert none.what == "no answer at 10.0.0.1:20016 (Ray, actor-env)"
    assert [item.verdict for item in (fast, slow, none)] == [CheckVerdict.OK, CheckVerdict.WARNING, CheckVerdict.FAULT]
    assert all(a.where == b.where for a, b in pairwise((fast, slow, none)))


def test_ranges_of_figures_share_a_unit() -> None:
    assert links.figures([0.0001, 0.0002], [5e8, 2e9]) == "0.1-0.2 ms, 0.5-2 GB/s"
    assert links.figures([0.12], [7.13e8]) == "120 ms, 710 MB/s"
