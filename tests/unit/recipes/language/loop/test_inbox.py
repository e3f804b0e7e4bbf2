"""Inboxes over a channel of this process."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from recipes.language.loop.order_inbox import Inbox
from rlinf_core.channel.channel import Channel


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The gets whose handles were dropped unread, which people are told of."""
    result: list[object] = []
    # Those that other tests have left are told before.
    gc.collect()
    monkeypatch.setattr("rlinf_core.channel.handle.REAPER", SimpleNamespace(dropped=SimpleNamespace(put=result.append)))
    return result


def test_items_come_in_order_and_a_poll_does_not_wait() -> None:
    channel = Channel.create("c", local=True)
    inbox = Inbox(channel, "k")
    assert inbox.poll() == []
    for number in range(3):
        channel.put(number, key="k")
    assert inbox.wait() == 0
    assert inbox.poll() == [1, 2]


@pytest.mark.parametrize("abandoned", [False, True])
def test_the_item_of_a_run_that_failed_is_given_up_in_silence(dropped: list[object], abandoned: bool) -> None:
    inbox = Inbox(Channel.create("c", local=True), "k")
    assert inbox.poll() == []
    if abandoned:
        inbox.abandon()
    del inbox
    gc.collect()
    assert len(dropped) == (0 if abandoned else 1)
