"""Where processes listen: at one address, on the ports that a firewall lets through."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from rlinf_core.collective.connections.listener import listen_tcp
from rlinf_core.errors import ClusterError

BUFFER = 1 << 16


def test_it_is_at_its_address_alone() -> None:
    with listen_tcp("127.0.0.1", BUFFER) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_address_of_another_machine_covers_all_of_this_one() -> None:
    with listen_tcp("192.0.2.123", BUFFER) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_each_takes_a_port_of_the_range() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = int(probe.getsockname()[1])
    # Of a few ports here others may have some: not all of them are free for sure, and none is given twice.
    ports = range(first, first + 40)
    with ExitStack() as stack:
        taken = [stack.enter_context(listen_tcp("127.0.0.1", BUFFER, ports)).getsockname()[1] for _ in range(20)]
        assert len(set(taken)) == 20
        assert set(taken) <= set(ports)


def test_a_full_range_is_told() -> None:
    with listen_tcp("127.0.0.1", BUFFER) as other:
        port = int(other.getsockname()[1])
        with pytest.raises(ClusterError, match=f"no port from {port} to {port} is free") as caught:
            listen_tcp("127.0.0.1", BUFFER, range(port, port + 1))
    assert "cluster.ports" in (caught.value.help or "")


def test_a_port_is_free_again_once_its_process_is_gone() -> None:
    with listen_tcp("127.0.0.1", BUFFER) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            # The side that hangs up first keeps the port waiting.
            accepted.close()
    with listen_tcp("127.0.0.1", BUFFER, range(port, port + 1)) as again:
        assert again.getsockname()[1] == port
