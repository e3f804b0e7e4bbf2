"""Lines of workers are shown, those of Ray's own processes logged, and what is on its way is waited for."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.cluster import ray_process

ray_worker: Any = import_module("ray._private.worker")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray is left to print."""
    passed: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_process, "_shown", Counter())

    def show(data: dict[str, Any], ignore_prefix: bool) -> None:
        passed.append(data)

    monkeypatch.setattr(ray_worker, "print_to_stdstream", show)
    # Not the one that a process keeps: it would outlive the test.
    ray_process.take_over.__wrapped__()
    return passed


def lines_of(pid: object, *lines: str, **extra: Any) -> dict[str, Any]:
    return {"pid": pid, "lines": list(lines), "is_err": False, **extra}


def worker_file(folder: Path, pid: int, text: str) -> None:
    logs = folder / "session_latest" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"worker-0123-01000000-{pid}.out").write_text(text)


def test_what_workers_print_is_left_to_ray(seen: list[dict[str, Any]]) -> None:
    said = lines_of(17, "hello", job="01000000")
    ray_worker.print_to_stdstream(said, ignore_prefix=False)
    assert seen == [said]


@pytest.mark.parametrize(
    ("data", "level", "text"),
    [
        (lines_of("raylet", "the disk is full"), logging.WARNING, "Ray's raylet: the disk is full"),
        (
            lines_of("raylet", "Raylet is terminated. Last 20 lines of the Raylet logs:\n    [state-dump] \n"),
            logging.WARNING,
            "Ray's raylet: Raylet is terminated.",
        ),
        (lines_of("raylet", "A worker died or was killed while"), logging.INFO, "Ray's raylet: A worker died"),
        (
            lines_of("raylet", "WARNING: 8 PYTHON worker processes have been started on node: 0"),
            logging.INFO,
            "Ray's raylet: WARNING: 8 PYTHON",
        ),
        (lines_of("gcs_server", "[t] no exporter", job=None), logging.DEBUG, "Ray's gcs_server: [t] no exporter"),
        (lines_of("raylet", "x :info_message:Spilled 1 MB", job=None), logging.DEBUG, "Ray's raylet: Spilled 1 MB"),
    ],
)
def test_what_rays_own_processes_tell_is_logged(
    seen: list[dict[str, Any]], caplog: pytest.LogCaptureFixture, data: dict[str, Any], level: int, text: str
) -> None:
    with caplog.at_level(logging.DEBUG, logger="rlinf"):
        ray_worker.print_to_stdstream(data, ignore_prefix=False)
    assert seen == []
    [record] = caplog.records
    assert (record.name, record.levelno) == ("rlinf", level)
    assert record.getMessage().startswith(text)
    assert "\n" not in record.getMessage()


def test_the_end_waits_for_lines_on_their_way(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    worker_file(tmp_path, 17, ":job_id:01000000\n:actor_name:W\none\ntwo\nhalf a line")
    ray_worker.print_to_stdstream(lines_of(17, "one"), False)
    ended = threading.Event()

    def end() -> None:
        ray_process.show_the_rest(tmp_path)
        ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    assert not ended.wait(0.2)
    ray_worker.print_to_stdstream(lines_of(17, "two", "half a line"), False)
    thread.join()
    assert len(seen) == 2


def test_lines_that_never_come_hold_the_end_up_for_a_second(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    for pid in (17, 18, 19):
        worker_file(tmp_path, pid, "lost\n")
    begun = time.monotonic()
    ray_process.show_the_rest(tmp_path)
    assert time.monotonic() - begun >= 1.0


def test_nothing_printed_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    worker_file(tmp_path, 17, ":job_id:01000000\n:actor_name:W\n")
    ray_process.show_the_rest(tmp_path)
    ray_process.show_the_rest(tmp_path / "of no Ray")
    assert waited == []


@pytest.mark.parametrize(("terminal", "no_color", "plain"), [(True, "", False), (False, "", True), (True, "1", True)])
def test_ray_colours_and_folds_lines_on_a_terminal_only(
    terminal: bool, no_color: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_COLOR_PREFIX", "RAY_DEDUP_LOGS"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    ray_process.keep_plain()
    assert os.environ.get("RAY_COLOR_PREFIX") == ("0" if plain else None)
    assert os.environ.get("RAY_DEDUP_LOGS") == ("0" if plain else None)


def test_what_the_user_set_for_ray_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    ray_process.keep_plain()
    assert (os.environ["RAY_COLOR_PREFIX"], os.environ["RAY_DEDUP_LOGS"]) == ("1", "1")
