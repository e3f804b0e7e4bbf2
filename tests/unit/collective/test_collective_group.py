"""What a member of a group hands to its process's endpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.collective_group import CollectiveGroup
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.errors import MismatchError

HERE, THERE = WorkerAddress("here", 0), WorkerAddress("there", 0)


class SlowEndpoint:
    """An endpoint whose peer refuses each message before its send has ended."""

    waits: Any = None

    def __init__(self) -> None:
        self.made = PeerStream(str(HERE), str(THERE))

    def stream(self, *_: object) -> PeerStream:
        return self.made

    def seconds(self, timeout: float | None) -> float:
        return timeout or 5.0

    def send(self, stream: PeerStream, message: Any, work: Any) -> None:
        stream.unacknowledged[1] = message.acknowledgement, None
        stream.queue(lambda: stream.acknowledged(1, MismatchError("uint8[5]", "uint8[3]")), work)
        work.wait()


def test_refusal_before_a_send_ends_is_reported_once() -> None:
    endpoint: Any = SlowEndpoint()
    group = CollectiveGroup(endpoint, HERE, [THERE], endpoint)
    group.send_tensor(np.zeros(5, np.uint8), THERE)  # type: ignore[arg-type] - arrays go where tensors do
    assert len(endpoint.made.take_mismatches()) == 1
    assert endpoint.made.unacknowledged == {}
