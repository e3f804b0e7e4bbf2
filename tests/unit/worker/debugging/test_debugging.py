"""Breakpoints and profiles of workers."""

from __future__ import annotations

import bdb
import json
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.context import Session
from rlinf_core.errors import CancelledOperationError
from rlinf_core.supervision.client import ManagerClient, enter_job
from rlinf_core.supervision.manager import ManagerProcess
from rlinf_core.waiting import OperationKind
from rlinf_core.worker import debugging
from rlinf_core.worker.calls import MethodCall, current_call
from rlinf_core.worker.debugging import GOES_ON, socket_of, start_profile
from tests.waiting import until

SECRET = b"0123456789abcdef" * 2


@pytest.fixture
def client() -> Iterator[ManagerClient]:
    manager = ManagerProcess("job", SECRET, "127.0.0.1", None)
    joined = ManagerClient(Session("job", SECRET), manager.info(), WorkerAddress("actor", 0), ip="127.0.0.1")
    enter_job(joined)
    yield joined
    enter_job(None)
    joined.close(linger=0.0)
    manager._endpoint.close(linger=0.0)


class Stopped:
    """Code that stops at a breakpoint, in a thread of its own."""

    def __init__(self, call: MethodCall | None = None) -> None:
        self.outcome: object = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._call is not None:
            current_call.set(self._call)
        value = 41
        try:
            debugging.wait_here()
            value += 1
            self.outcome = value
        except BaseException as error:
            self.outcome = error

    def join(self) -> object:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.outcome


class Terminal:
    """The other end of a breakpoint's socket."""

    def __init__(self, client: ManagerClient) -> None:
        path = client.endpoint.info.unix_path
        assert path is not None
        self.path = socket_of(path)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        until(self._connects)

    def _connects(self) -> bool:
        try:
            self.socket.connect(self.path)
        except OSError:
            return False
        return True

    def read_prompt(self) -> str:
        text = ""
        while not text.endswith("(rlinf) "):
            part = self.socket.recv(4096)
            assert part, text
            text += part.decode()
        return text

    def say(self, line: str) -> None:
        self.socket.sendall(f"{line}\n".encode())

    def is_closed(self) -> bool:
        return self.socket.recv(4096) == b""

    def read_end(self) -> str:
        """Return what comes until the other end closes."""
        return b"".join(iter(lambda: self.socket.recv(4096), b"")).decode()


def waits(client: ManagerClient) -> list[str]:
    operations = client.operations.publication().operations
    return [one.target for one in operations if one.kind is OperationKind.BREAKPOINT]


def test_code_waits_until_the_terminal_continues(client: ManagerClient) -> None:
    stopped = Stopped()
    until(lambda: waits(client))
    (place,) = waits(client)
    assert place.rpartition(":")[0].endswith("test_debugging.py")
    terminal = Terminal(client)
    assert "value += 1" in terminal.read_prompt()
    terminal.say("p value * 2")
    assert terminal.read_prompt().startswith("82")
    terminal.say("value = 1")
    terminal.read_prompt()
    terminal.say("n")
    assert "self.outcome = value" in terminal.read_prompt()
    terminal.say("c")
    assert terminal.read_end() == GOES_ON
    assert stopped.join() == 2
    assert waits(client) == []
    assert not os.path.exists(terminal.path)


def test_detached_code_waits_for_the_next_terminal(client: ManagerClient) -> None:
    stopped = Stopped()
    first = Terminal(client)
    shown = first.read_prompt()
    first.socket.close()
    second = Terminal(client)
    assert second.read_prompt() == shown
    second.say("c")
    assert stopped.join() == 42


def test_second_terminal_is_refused(client: ManagerClient) -> None:
    stopped = Stopped()
    first = Terminal(client)
    first.read_prompt()
    with socket.socket(socket.AF_UNIX) as other, pytest.raises(ConnectionRefusedError):
        other.connect(first.path)
    first.say("c")
    assert stopped.join() == 42


def test_quit_fails_the_call(client: ManagerClient) -> None:
    stopped = Stopped()
    terminal = Terminal(client)
    terminal.read_prompt()
    terminal.say("q")
    assert isinstance(stopped.join(), bdb.BdbQuit)
    assert waits(client) == []


def test_cancelled_call_leaves_its_breakpoint(client: ManagerClient) -> None:
    call = MethodCall("1", None)
    stopped = Stopped(call)
    until(lambda: waits(client))
    call.given_up = CancelledOperationError("the call was cancelled")
    assert stopped.join() is call.given_up
    assert waits(client) == []


def test_another_user_is_sent_away(client: ManagerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "is_own_peer", lambda connection: False)
    stopped = Stopped()
    terminal = Terminal(client)
    assert terminal.is_closed()
    monkeypatch.undo()
    own = Terminal(client)
    own.read_prompt()
    own.say("c")
    assert stopped.join() == 42


def test_socket_is_in_a_folder_of_this_user_alone(client: ManagerClient) -> None:
    stopped = Stopped()
    terminal = Terminal(client)
    folder = Path(terminal.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    terminal.say("c")
    assert stopped.join() == 42


def test_process_without_a_job_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert Stopped().join() == 42
    assert "test_debugging.py:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, f"{debugging.__name__}.wait_here"),
        ("ray.util.rpdb.set_trace", f"{debugging.__name__}.wait_here"),
        ("0", "0"),
        ("ipdb.set_trace", "ipdb.set_trace"),
    ],
)
def test_hook_of_the_user_is_kept(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", before or "")
    if before is None:
        monkeypatch.delenv("PYTHONBREAKPOINT")
    debugging.enter_breakpoints()
    assert os.environ["PYTHONBREAKPOINT"] == after


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
    monkeypatch.setattr(debugging, "py_spy", lambda: str(program))


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
    monkeypatch.setattr(debugging, "py_spy", lambda: None)
    caplog.set_level(logging.WARNING, "rlinf")
    assert start_profile("py-spy", str(tmp_path / "env-0.json")) is None
    assert "py-spy is not installed here" in caplog.text
