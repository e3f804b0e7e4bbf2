"""A name that nobody can launch any more is refused within seconds, not at the end of the connect timeout."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import UnknownGroupError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.worker.worker import Worker


class Misspeller(Worker):
    def recv_from(self, group: str) -> Any:
        return self.recv(group, 0)

    def connect_to(self, channel: str) -> Any:
        return self.connect_channel(channel)


@pytest.mark.parametrize("method", ["recv_from", "connect_to"])
def test_a_misspelt_name_is_refused_when_everybody_waits(
    cluster: Cluster, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "600")
    with Misspeller.create_group().launch(cluster, name="misspeller") as group:
        with pytest.raises(WorkerGroupError) as caught:
            getattr(group, method)("mispeller").wait()
        (error,) = caught.value.exceptions
        assert isinstance(error, UnknownGroupError)
        assert "did you mean `misspeller`" in (error.help or "")
