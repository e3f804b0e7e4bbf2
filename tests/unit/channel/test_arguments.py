"""What callers may say to a channel, whether it is one of a job or a local one."""

from __future__ import annotations

import pytest

from rlinf_core.channel.channel import Channel
from tests.unit.channel.conftest import Stage


@pytest.fixture(params=["of a job", "local"])
def channel(request: pytest.FixtureRequest, stage: Stage) -> Channel:
    return stage.client("p:0") if request.param == "of a job" else Channel.create("c", local=True)


def test_a_key_without_letters_is_a_queue_of_its_own(channel: Channel) -> None:
    channel.put("of no key")
    channel.put("of the empty key", key="")
    handle = channel.put("put without waiting", key="", async_op=True)
    handle.wait()
    assert (channel.qsize(), channel.qsize(key="")) == (1, 2)
    assert channel.peek_all() == channel.peek_all("default") == ["of no key"]
    assert set(channel.statistics()) == {"default", ""}
    assert channel.get(key="") == "of the empty key"
    assert channel.get() == "of no key"
    assert channel.get_nowait(key="") == "put without waiting"
