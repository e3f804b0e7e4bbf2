"""Errors of channels that are those of `asyncio.Queue`, too: apart, for whoever needs no errors of asyncio need not pay
for its import."""

from __future__ import annotations

from asyncio import QueueEmpty, QueueFull

from rlinf_core.errors import ChannelError


class ChannelFull(ChannelError, QueueFull):  # noqa: N818 - named like queue.Full
    """A put that must not wait found its queue full."""


class ChannelEmpty(ChannelError, QueueEmpty):  # noqa: N818 - named like queue.Empty
    """A get that must not wait found its queue empty."""
