"""A run watched by others' tools: Debian's Prometheus scrapes it."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.integration.cli.test_train_embodied import SMALL
from tests.unit.docs.test_made_pages import panels
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
RLINF = Path(sys.executable).with_name("rlinf")
PROMETHEUS = shutil.which("prometheus")
ENDLESS = (*SMALL, "runner.max_steps=-1", "runner.max_restarts=0", "runner.val_check_interval=1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """A server of Prometheus that scrapes one port of loopback each second."""

    def __init__(self, folder: Path, target: int) -> None:
        assert PROMETHEUS is not None
        self._port = free_port()
        settings = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "rlinf", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(settings))
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression; none while the server starts."""
        try:
            address = f"http://127.0.0.1:{self._port}/api/v1/query?{urlencode({'query': expression})}"
            with urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]["result"]
        except URLError:
            return []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(process: subprocess.Popen[str]) -> RunFolder:
    """Interrupt the run, and return its folder."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    run = RunFolder.latest("runs")
    assert run is not None
    return run


@pytest.fixture
def scraped(folder: Path) -> Iterator[tuple[Prometheus, subprocess.Popen[str]]]:
    port = free_port()
    server = Prometheus(folder, port)
    arguments = [RLINF, "train", *ENDLESS, f"runner.metrics_port={port}"]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        yield server, process
        process.kill()
    server.close()


@pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus is installed: apt-get install prometheus")
def test_prometheus_has_what_the_dashboard_asks_for(scraped: tuple[Prometheus, subprocess.Popen[str]]) -> None:
    server, process = scraped
    until(lambda: any(float(series["value"][1]) >= 2 for series in server.query("rlinf_step")), "a scrape", 120, 0.2)
    expressions = [target["expr"].replace("$run", ".+") for panel in panels() for target in panel["targets"]]
    answered = [expression for expression in expressions if server.query(expression)]
    names = {series["metric"]["__name__"] for series in server.query('{__name__=~"rlinf_.+"}')}
    run = ended(process)
    (last, *_) = reversed(read_metrics(run.metrics_file))
    # Those of language models, of imitation and of accelerators have no series here.
    assert len(answered) >= 18, answered
    assert {"rlinf_env_return", "rlinf_eval_return", "rlinf_time_step", "rlinf_speed_env_idle"} <= names
    assert last.step >= 2
