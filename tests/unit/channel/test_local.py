"""Channels within one process: what the rules for all channels do not say."""

from __future__ import annotations

import pytest

from rlinf_core.channel.channel import Channel


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan")])
def test_what_is_no_time_is_refused_and_nothing_is_put(timeout: float) -> None:
    channel = Channel.create("mailbox", local=True)
    with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
        channel.put(1, timeout=timeout)
    with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
        channel.get(timeout=timeout)
    handle = channel.get(async_op=True)
    with pytest.raises(ValueError, match="a timeout is a number of seconds from 0"):
        handle.wait(timeout)
    channel.put(2)
    assert handle.wait(5) == 2


@pytest.mark.parametrize("maxsize", [-1, 2.5, "4", float("nan"), None])
def test_a_bound_is_a_whole_number(maxsize: object) -> None:
    with pytest.raises(ValueError, match=r"`maxsize` is .*, expected an integer >= 0"):
        Channel.create("mailbox", maxsize, local=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("weight", [-1, "3", float("nan"), None])
def test_a_weight_is_a_number(weight: object) -> None:
    channel = Channel.create("mailbox", local=True)
    with pytest.raises(ValueError, match=r"`weight` is .*, expected a finite number from 0"):
        channel.put(1, weight)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ValueError, match=r"`batch_weight` is .*, expected a finite number above 0"):
        channel.get_batch(weight)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert channel.empty()
