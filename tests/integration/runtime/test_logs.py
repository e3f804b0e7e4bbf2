"""What workers log and print is in a file for each of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.context import enter_session
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.process.known_secrets import remember
from rlinf_core.worker.worker import Worker


class Talker(Worker):
    def talk(self, word: str) -> tuple[int, str]:
        self.log_info("logged %s", word)
        print(f"printed {word}")
        sys.stderr.writelines([f"complained {word}\n"])
        return sys.stdout.fileno(), sys.stdout.encoding


@pytest.fixture
def recorded(cluster: Cluster) -> Iterator[Cluster]:
    before = cluster.session
    yield cluster
    cluster.session = before
    enter_session(before)


def test_each_worker_has_a_file(recorded: Cluster, tmp_path: Path) -> None:
    recorded.record(tmp_path / "logs", log_names={"TalkGroup": "talk"})
    strategy = NodePlacementStrategy([0] * 2)
    for word in ("first", "second"):
        # A worker that is launched again writes behind the one before it.
        with Talker.create_group().launch(recorded, strategy, name="TalkGroup") as group:
            answers = group.talk(word).wait()
        assert [descriptor for descriptor, _ in answers] == [1, 1]
        assert {encoding.lower() for _, encoding in answers} == {"utf-8"}
    for rank in range(2):
        lines = (tmp_path / "logs" / "talk" / f"rank_{rank}.log").read_text().splitlines()
        logged = [line for line in lines if f"INFO [TalkGroup:{rank}] logged" in line]
        assert logged == [lines[1], lines[5]]
        births = [line for line in lines if f"is rank {rank} of 2 on node 0" in line]
        assert births == [lines[0], lines[4]]
        assert [line for line in lines if line not in logged + births] == [
            "printed first",
            "complained first",
            "printed second",
            "complained second",
        ]


@pytest.mark.security
def test_secret_values_are_masked_in_a_workers_log(
    recorded: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    remember(["value-of-an-api-key"])
    recorded.record(tmp_path / "logs", log_names={"TalkGroup": "talk"})
    with Talker.create_group().launch(recorded, NodePlacementStrategy([0]), name="TalkGroup") as group:
        group.talk("value-of-an-api-key").wait()
    text = (tmp_path / "logs" / "talk" / "rank_0.log").read_text()
    for begin in ("logged", "printed", "complained"):
        assert f"{begin} ********\n" in text
    assert "value-of-an-api-key" not in text


def test_a_folder_that_cannot_be_written_is_no_failure(recorded: Cluster, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    recorded.record(tmp_path / "logs")
    with Talker.create_group().launch(recorded, NodePlacementStrategy([0]), name="quiet") as group:
        assert group.talk("anyway").wait()


PRINTER = """
import sys, time
from rlinf_core import Cluster, NodePlacementStrategy, Worker

class Talker(Worker):
    def talk(self):
        print("hello from", self._rank)

with Cluster(num_nodes=1) as cluster:
    with Talker.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="talk") as group:
        group.talk().wait()
        print("said", flush=True)
        sys.stdin.read()
"""


def test_what_a_worker_prints_comes_to_the_driver_under_its_name() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", PRINTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"},
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    heard: set[str] = set()
    try:
        for line in driver.stdout:  # ends with the driver, if it never comes
            match = re.search(r"\((talk:\d) pid=\d+\).* hello from (\d)", line)
            if match:
                heard.add(f"{match[1]} {match[2]}")
            if len(heard) == 2:
                break
    finally:
        driver.stdin.close()
        driver.stdout.read()
        driver.wait(60)
    assert heard == {"talk:0 0", "talk:1 1"}
