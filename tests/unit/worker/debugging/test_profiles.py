"""Profiles of a worker's process: torch's, and py-spy's by a stand-in where it is not installed."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from rlinf_core.worker.debugging import profiles
from rlinf_core.worker.debugging.profiles import start_profile
from tests.waiting import until

SPY = """#!{python}
import signal, sys
output = sys.argv[sys.argv.index("--output") + 1]
def end(*_):
    open(output, "w").write(" ".join(sys.argv[1:]))
    sys.exit()
signal.signal(signal.SIGINT, end)
open(output + ".ready", "w").close()
signal.pause()
"""
FAILS = """#!/bin/sh
trap '' INT
: > "$7.ready"
echo 'Error: Permission denied' >&2
exit 1
"""


def spy(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "py-spy"
    program.write_text(code.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(profiles, "py_spy", lambda: str(program))


def test_torch_writes_operators(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "profiles" / "actor-0.json"
    profile = start_profile("torch", str(file))
    assert profile is not None
    torch.ones(8, 8).mm(torch.ones(8, 8))
    profile.stop()
    names = {event.get("name") for event in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]}
    assert "aten::mm" in names


def test_link_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "kept").write_text("kept", encoding="utf-8")
    file = tmp_path / "actor-0.json"
    file.symlink_to(tmp_path / "kept")
    profile = start_profile("torch", str(file))
    assert profile is not None
    profile.stop()
    assert (tmp_path / "kept").read_text(encoding="utf-8") == "kept"
    assert not file.is_symlink()


def test_worker_without_torch_has_no_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert start_profile("torch", str(tmp_path / "env-0.json")) is None


def test_py_spy_is_ended_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy(tmp_path, SPY, monkeypatch)
    file = tmp_path / "env-0.json"
    profile = start_profile("py-spy", str(file))
    assert profile is not None
    until(lambda: Path(f"{file}.ready").exists())
    profile.stop()
    assert "--format speedscope" in file.read_text(encoding="utf-8")


def test_refusal_of_py_spy_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spy(tmp_path, FAILS, monkeypatch)
    caplog.set_level(logging.WARNING, "rlinf")
    file = tmp_path / "env-0.json"
    profile = start_profile("py-spy", str(file))
    assert profile is not None
    until(lambda: Path(f"{file}.ready").exists())
    profile.stop()
    assert "py-spy wrote no profile of this worker: Error: Permission denied" in caplog.text


def test_missing_py_spy_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiles, "py_spy", lambda: None)
    caplog.set_level(logging.WARNING, "rlinf")
    assert start_profile("py-spy", str(tmp_path / "env-0.json")) is None
    assert "py-spy is not installed here" in caplog.text
