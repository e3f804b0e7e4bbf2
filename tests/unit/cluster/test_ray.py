"""Ray: its processes, its interface, and the private parts that are used."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.cluster import engine, ray_process
from rlinf_core.cluster import ray_api as module
from rlinf_core.cluster.ray_api import PARTS, PrivatePart, ray_api
from rlinf_core.errors import ClusterError
from rlinf_core.node.node_facts import ray_environment
from rlinf_core.process.proc import MARK

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


@pytest.mark.parametrize(
    "use", [lambda ray: ray.put(1), lambda ray: ray.remote(lambda: 1).remote()], ids=["put", "task"]
)
def test_outside_of_a_cluster_it_starts_none(monkeypatch: pytest.MonkeyPatch, use: Any) -> None:
    ray = ray_api()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: pytest.fail("Ray starts by itself"))
    with pytest.raises(ClusterError):
        use(ray)
    assert import_module("ray._private.auto_init_hook").enable_auto_connect is False


def test_starting_ray_is_asked_once_the_head_lists_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[dict[bytes, object]] = [{}, {b"\x0a": None}, {b"\x0a": None, b"\x0b": None}]
    asked: list[tuple[int, str, str]] = []

    class Head:
        def get_all_node_info(self, timeout: float) -> dict[bytes, object]:
            return listed.pop(0)

    services = import_module("ray._private.services")
    monkeypatch.setattr(module, "gcs_client", lambda address: Head())
    monkeypatch.setattr(services, "get_node", lambda *arguments: asked.append((len(listed), *arguments)))
    own = services.get_node
    with module.quick_start():
        services.get_node("127.0.0.1:1", "0b")
    assert asked == [(0, "127.0.0.1:1", "0b")]
    assert services.get_node is own


ROOT = Path(module.__file__).parents[2]
# What is run on a node in an interpreter of its own, which has no rlinf, is a text.
AS_TEXT = "rlinf_cli/cluster/node/questions.py"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.module)
def test_ray_has_it_still(part: PrivatePart) -> None:
    module = import_module(part.module)
    for name in part.names:
        result = module
        for word in name.split("."):
            assert hasattr(result, word), f"{part.module}.{name}: {part.reason}"
            result = getattr(result, word)


def test_a_job_config_keeps_its_list_of_folders() -> None:
    assert import_module("ray.job_config").JobConfig()._py_driver_sys_path == []


def test_ray_still_knows_the_variables_of_its_environment() -> None:
    # Of some of its variables Python sees no more than their names, which end with a zero.
    native = Path(import_module("ray._raylet").__file__ or "").read_bytes()
    log_monitor = import_module("ray._private.log_monitor")
    variables = ray_environment("owner", "folder", None).keys() - {MARK, "RAY_AUTH_MODE"}
    assert variables
    for name in variables:
        assert f"{name}\0".encode() in native or hasattr(log_monitor, name), name


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"\bray\._(?!_)|\b_raylet\b", {"rlinf_core/cluster/ray_api.py", AS_TEXT}),
        (r"^\s*(from|import) ray\b|import_module\(.ray\b", {"rlinf_core/cluster/ray_api.py", AS_TEXT}),
    ],
    ids=["private", "any"],
)
def test_one_place_touches_ray(pattern: str, allowed: set[str]) -> None:
    result: list[str] = []
    for package in ("rlinf_core", "rlinf_cli", "recipes"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            lines = file.read_text(encoding="utf-8").splitlines()
            used = [line for line in lines if "ray_module(" not in line and re.search(pattern, line)]
            if used and name not in allowed:
                result += [f"{name}: {line.strip()}" for line in used]
    assert result == []


def test_what_is_not_listed_is_refused() -> None:
    with pytest.raises(KeyError):
        module.ray_module("ray._private.runtime_env")


def test_without_standard_error_the_true_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(ClusterError, match="standard error is closed"):
        engine.connect(None, "test", may_start=True)
