"""A name that nobody can launch any more is refused within seconds, not at the end of the connect timeout."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import PeerNotFoundError, UnknownGroupError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.worker.worker import Worker


class Misspeller(Worker):
    def recv_from(self, group: str) -> Any:
        return self.recv(group, 0)

    def send_to(self, group: str) -> None:
        self.send("hello", group, 0)

    def send_in_background(self, group: str) -> None:
        self.send([0] * 100_000, group, 0, async_op=True).wait()

    def connect_to(self, channel: str) -> Any:
        return self.connect_channel(channel)


def refused(cluster: Cluster, method: str, name: str) -> UnknownGroupError:
    with Misspeller.create_group().launch(cluster, "0:0", name="misspeller") as group:
        with pytest.raises(WorkerGroupError) as caught:
            getattr(group, method)(name).wait()
        (error,) = caught.value.exceptions
        assert isinstance(error, UnknownGroupError)
        return error


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_CONNECT_TIMEOUT", "600")


@pytest.mark.parametrize("method", ["recv_from", "send_to", "send_in_background"])
def test_a_misspelt_group_is_refused_when_everybody_waits(cluster: Cluster, method: str) -> None:
    error = refused(cluster, method, "mispeller")
    assert "did you mean `misspeller`" in (error.help or "")


def test_a_misspelt_channel_is_refused_with_those_that_exist(cluster: Cluster) -> None:
    Channel.create("rollout_output")
    error = refused(cluster, "connect_to", "rollout_outputs")
    assert error.message == "no channel is named `rollout_outputs`"
    assert "rollout_output" in error.known
    assert "misspeller" not in error.known
    assert "did you mean `rollout_output`" in (error.help or "")


def test_channel_that_is_not_created_in_time_is_no_group(cluster: Cluster) -> None:
    with pytest.raises(PeerNotFoundError, match="no channel is named `late`") as caught:
        Channel.connect("late", timeout=0.2)
    assert "group" not in str(caught.value)
