"""rlinf train as a person runs it, and what monitors it: in processes of their own."""

from __future__ import annotations

import json
import os
import re
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
from tests.rlinf_command import REACH
from tests.unit.docs.test_made_pages import panels
from tests.waiting import until

# Each test starts Ray more than once.
RLINF = Path(sys.executable).with_name("rlinf")
SMALL = ("recipe=embodied", *REACH, "algorithm.update_epoch=1", "runner.save_interval=1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Unix sockets are made below the folder for temporary files, so that stays the short one of the machine.
    return tmp_path


@pytest.fixture
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run without an end, as soon as it has a checkpoint."""
    process = subprocess.Popen(
        [RLINF, "train", *SMALL, "runner.max_steps=-1", "runner.max_restarts=0", "runner.val_check_interval=-1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen: list[str] = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("saved global_step_"):
            break
    else:
        raise AssertionError("".join(seen))
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


def rlinf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RLINF, *arguments], capture_output=True, text=True, timeout=140, check=False)


def last_run() -> RunFolder:
    result = RunFolder.latest("runs")
    assert result is not None
    return result


@pytest.mark.timeout(300)
def test_interrupted_and_continued_to_its_end(running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=100)
    assert (running.returncode, out) == (130, ""), err
    assert "Traceback" not in err
    assert "` to resume from the last checkpoint" in err
    run = last_run()
    assert (run.state.status, run.state.reason) == ("interrupted", "interrupted")
    kept = run.checkpoints.latest()
    assert kept is not None

    last = kept.step + 2
    ended = rlinf("train", *SMALL, f"runner.max_steps={last}", "runner.resume_dir=auto", "--json")
    assert ended.returncode == 0, ended.stderr
    data: dict[str, Any] = json.loads(ended.stdout)
    assert (data["status"], data["step"], data["folder"]) == ("finished", last, str(run.path))
    assert data["evaluation"]["step"] == last
    assert "\x1b" not in ended.stderr
    assert [record.step for record in read_metrics(run.metrics_file)] == list(range(1, last + 1))
    assert run.refresh().status == "finished"

    logged = rlinf("logs", "--lines", "-1")
    assert logged.returncode == 0, logged.stderr
    assert f"[driver] evaluated at step {last}: " in logged.stdout
    assert logged.stderr == f"runs/{run.path.name}: finished, step {last} done\n"
    assert {path.name for path in run.logs.iterdir()} >= {"driver", "actor", "rollout", "env"}


@pytest.mark.timeout(300)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("gcs_server", "gcs/gcs_server"),
        ("manager", "ray::ManagerProcess"),
        ("raylet", "raylet/raylet"),
        # Without one of its agents a raylet ends itself, and everything below it before.
        ("raylet", "ray::RuntimeEnvAgent"),
        ("raylet", "ray::DashboardAgent"),
    ],
)
def test_watcher_that_dies_is_named(running: subprocess.Popen[str], name: str, command: str) -> None:
    os.kill(_process_below(running.pid, command), signal.SIGKILL)
    _, err = running.communicate(timeout=100)
    assert running.returncode == 1, err
    assert f"error: `{name}` on this machine died" in err
    asked = rlinf("why", "--json")
    assert asked.returncode == 1, asked.stderr
    (failure,) = json.loads(asked.stdout)["failures"]
    assert (failure["code"], failure["ended_run"]) == ("watcher-died", True)
    assert f"`{name}`" in failure["what"]


def _process_below(pid: int, command: str) -> int:
    """The process with `command` in its command line that descends from `pid`."""
    listed = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(row[0]), int(row[1]), row[2]) for line in listed.splitlines() if len(row := line.split(None, 2)) == 3]
    parents = {child: parent for child, parent, _ in rows}

    def descends(child: int) -> bool:
        return child == pid or (child in parents and descends(parents[child]))

    return next(child for child, _, words in rows if command in words and descends(child))


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_a_worker_that_dies_is_told_first(running: subprocess.Popen[str]) -> None:
    jobs = rlinf("ps", "--json", "--job", _job_of(running.pid))
    assert jobs.returncode == 0, jobs.stderr
    workers = {worker["name"]: worker for worker in json.loads(jobs.stdout)["workers"]}
    victim = workers["RolloutGroup:0"]["pid"]
    os.kill(victim, signal.SIGKILL)
    out, err = running.communicate(timeout=100)
    assert (running.returncode, out) == (1, ""), err
    _, _, output = err.partition("error: ")
    assert re.match(r"`RolloutGroup:0` died in `\w+`\n", output), err
    assert "where: component `rollout`; node 0" in output
    assert f"pid {victim}" in output
    assert "Traceback" not in output
    state = last_run().state
    assert state.status == "failed"
    assert state.reason.startswith("`RolloutGroup:0` died in ")


def _job_of(pid: int) -> str:
    """Return the name of the job whose driver has this pid: others may run on this machine."""
    from rlinf_core.cluster.engine import running_jobs

    return next(record.job for record in running_jobs() if record.pid == pid)


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_diverging_run_fails_and_keeps_good_checkpoints(folder: Path) -> None:
    quiet = ("runner.val_check_interval=-1", "runner.keep_checkpoints=1")
    assert rlinf("train", *SMALL, *quiet, "runner.max_steps=2").returncode == 0
    good = last_run()
    refused = rlinf("train", *SMALL, *quiet, "runner.resume_dir=auto", "actor.model.hidden_dim=8")
    assert (refused.returncode, good.refresh().status, good.state.step) == (1, "finished", 2)
    assert "`actor.model.hidden_dim` is `16` there and `8` now" in refused.stderr
    ended = rlinf(
        "train", *SMALL, *quiet, f"runner.resume_dir={good.path}", "runner.max_steps=9", "actor.optim.lr=1e30"
    )
    assert ended.returncode == 1, ended.stderr
    state = good.refresh()
    assert (state.status, state.step) == ("failed", 2)
    assert "is nan, not a finite number" in state.reason
    assert "step 3" in ended.stderr
    assert "actor.optim.lr" in ended.stderr
    assert [item.step for item in good.checkpoints.complete()] == [2]


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


@pytest.mark.nightly
@pytest.mark.timeout(300)
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
