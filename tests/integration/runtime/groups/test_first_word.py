"""No wait is silent: one that lasts says whom it waits for."""

from __future__ import annotations

import logging
import threading

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.supervision.waits import LongWaits

# Seconds after which it never comes, however busy the machine is: all that it takes is one.
NEVER = 60


class Wake(logging.Handler):
    """Puts an item into a channel as soon as a line is logged that begins so."""

    def __init__(self, beginning: str, channel: Channel) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.beginning, self.channel = beginning, channel

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith(self.beginning) and not self.lines:
            self.lines.append(line)
            threading.Thread(target=self.channel.put, args=("woken",)).start()


def test_a_get_that_lasts_says_on_what_it_waits(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.client.wait_reports, "long_waits", LongWaits(0.1))
    channel = Channel.create("first_word")
    wake = Wake("driver waits on channel `first_word`", channel)
    logger = logging.getLogger("rlinf.job")
    logger.addHandler(wake)
    try:
        assert channel.get(timeout=NEVER) == "woken"
    finally:
        logger.removeHandler(wake)
    assert "empty" in wake.lines[0]
    channel.close()
