"""An address that no driver can join is refused before Ray tries it."""

from __future__ import annotations

import socket
import threading

import pytest

from rlinf_core.cluster import reachable
from rlinf_core.errors import ClusterError


@pytest.mark.parametrize("text", ["auto", "10.0.0.1", ":6379", "head:", "ray://head:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ClusterError, match=f"`{text}` is not the address") as caught:
        reachable.check(text)
    assert "HOST:PORT" in str(caught.value.help)


def test_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ClusterError, match=f"the cluster at {address} does not answer") as caught:
        reachable.check(address)
    assert caught.value.why == "Connection refused"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "sent nothing within 0.2 s"),
        (b"", "or closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak gRPC"),
    ],
)
def test_where_something_else_than_a_head_listens(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, why: str
) -> None:
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "0.2" if answer is None else "60")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if answer is None:
                    # Until the other side has given up.
                    while connection.recv(64):
                        pass
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"the cluster at {address} does not answer") as caught:
            reachable.check(address)
        thread.join()
    assert str(caught.value.why).startswith("the listener there is not a Ray head: it ")
    assert why in str(caught.value.why)
