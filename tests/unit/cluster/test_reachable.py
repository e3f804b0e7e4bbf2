"""An address that no driver can join is refused before Ray tries it."""

from __future__ import annotations

import socket
import time

import pytest

from rlinf_core.cluster import reachable
from rlinf_core.errors import ClusterError


@pytest.mark.parametrize("text", ["auto", "10.0.0.1", ":6379", "head:", "ray://head:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ClusterError, match=f"`{text}` is no address") as caught:
        reachable.check(text)
    assert "HOST:PORT" in str(caught.value.help)


def test_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(ClusterError, match=f"the cluster at {address} does not answer") as caught:
        reachable.check(address)
    assert caught.value.why == "Connection refused"
    assert time.monotonic() - begun < 10
