"""A failure that others follow from is told first, also where nobody waits for the call that failed."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import DeadlockError, PayloadError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.worker.worker import Worker

SCRIPT = """
from rlinf_core import Channel, Cluster, Worker

class Producer(Worker):
    def run(self):
        self.connect_channel("frames").put("a frame")
        raise ValueError("camera unplugged")

class Consumer(Worker):
    def run(self):
        channel = self.connect_channel("frames")
        channel.get()
        channel.get()

with Cluster(num_nodes=1) as cluster:
    channel = Channel.create("frames")
    producer = Producer.create_group().launch(cluster, name="producer")
    consumer = Consumer.create_group().launch(cluster, name="consumer")
    producer.run()
    handle = consumer.run()
    {wait}
"""


class Producer(Worker):
    def run(self, channel: str) -> None:
        self.connect_channel(channel).put("a frame")
        raise ValueError("camera unplugged")

    def lock(self) -> Any:
        return threading.Lock()

    def fine(self) -> str:
        return "fine"


class Consumer(Worker):
    def run(self, channel: str) -> Any:
        connected = self.connect_channel(channel)
        connected.get()
        return connected.get()


def test_deadlock_is_raised_from_its_first_failure(cluster: Cluster) -> None:
    channel, run = f"frames-{uuid.uuid4().hex}", uuid.uuid4().hex
    with (
        Producer.create_group().launch(cluster, name=f"producer-{run}") as producer,
        Consumer.create_group().launch(cluster, name=f"consumer-{run}") as consumer,
    ):
        Channel.create(channel)
        producer.run(channel)
        with pytest.raises(WorkerGroupError) as caught:
            consumer.run(channel).wait()
        (error,) = caught.value.exceptions
        assert isinstance(error, DeadlockError)
        assert f"producer-{run}:0 is idle since its `run` raised ValueError: camera unplugged" in error.picture
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerGroupError)
        assert (cause.group, cause.method) == (f"producer-{run}", "run")
        assert isinstance(cause.exceptions[0], ValueError)


@pytest.mark.nightly
@pytest.mark.parametrize("wait", ["handle.wait()", "[channel.get(timeout=20) for _ in range(2)]"])
def test_a_script_prints_the_first_cause_first(tmp_path: Path, wait: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(wait=wait))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 1
    assert "the direct cause of the following exception" in done.stderr, done.stderr
    first, then = done.stderr.split("The above exception was the direct cause", 1)
    assert "ValueError: camera unplugged" in first
    assert "Traceback (most recent call last):\n    |   File" in first, "where the user's own method raised"
    assert "rlinf_core/worker/process.py" not in first
    assert "followed from the failure of `producer:0` in `run`" in then
    assert "DeadlockError" in then or "CommunicationTimeoutError" in then


def test_a_result_that_does_not_pickle_is_told_as_one(cluster: Cluster) -> None:
    with Producer.create_group().launch(cluster, name=f"producer-{uuid.uuid4().hex}") as group:
        with pytest.raises(WorkerGroupError) as caught:
            group.lock().wait()
        (error,) = caught.value.exceptions
        assert isinstance(error, PayloadError)
        assert error.message == "the result of `lock` cannot be sent"
        assert error.where == str(group.addresses[0])
        assert "lock" in (error.why or "")
        assert group.fine().wait() == ["fine"]
