"""The identity of a process in a file: what matches, what cannot be told, and what is signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core.node import process_identity as subject
from rlinf_core.node.process_identity import Presence, ProcessIdentity, UnprovenProcessError, held, look, own_identity

OTHER_BOOT = "11111111-2222-3333-4444-555555555555"
_HOLD = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has `tmp_path` open, as the driver of a run has its folder."""
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def of(pid: int) -> ProcessIdentity:
    return own_identity()._replace(pid=pid, start=subject.identity(pid) or f"{pid}:0")


def test_this_process_is_alive() -> None:
    own = own_identity()
    assert own.pid == os.getpid()
    assert all((own.start, own.host, own.boot, own.pid_namespace))
    assert look(own) is Presence.ALIVE


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": -1, "start": ""},
        {"pid": 0, "start": ""},
        {"pid": 0, "start": "0:1"},
        {"start": ""},
        {"start": "None"},
        {"start": "1:1"},
        {"host": "elsewhere", "boot": OTHER_BOOT},
        {"host": "elsewhere", "boot": "", "pid_namespace": 0},
        {"boot": OTHER_BOOT},
        {"pid_namespace": 12345},
        {"pid_namespace": 12345, "start": f"{os.getpid()}:1"},
    ],
)
def test_what_is_absent_or_elsewhere_cannot_be_told(fields: dict[str, object]) -> None:
    assert look(own_identity()._replace(**fields)) is Presence.UNKNOWN  # pyright: ignore[reportArgumentType]


def test_a_later_process_of_the_same_pid_is_another_one() -> None:
    assert look(own_identity()._replace(start=f"{os.getpid()}:1")) is Presence.GONE
    assert look(own_identity()._replace(pid=2**22, start=f"{2**22}:1")) is Presence.GONE


def test_an_earlier_rlinf_wrote_pid_start_and_host_alone() -> None:
    old = own_identity()._replace(boot="", pid_namespace=0, machine="")
    assert look(old) is Presence.ALIVE
    # It may be in another container of this host's name.
    assert look(old._replace(start=f"{old.pid}:1")) is Presence.UNKNOWN


class TestAnEarlierBoot:
    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subject, "machine_id", lambda: "abc")
        monkeypatch.setattr(subject, "_booted", lambda: 1000.0)

    def test_its_processes_ended_with_it(self) -> None:
        assert look(own_identity()._replace(boot=OTHER_BOOT), written=999.0) is Presence.GONE

    @pytest.mark.parametrize("fields", [{"machine": ""}, {"machine": "def"}, {"host": "other"}, {"pid_namespace": 7}])
    def test_another_machine_is_none(self, fields: dict[str, object]) -> None:
        other = own_identity()._replace(boot=OTHER_BOOT, **fields)  # pyright: ignore[reportArgumentType]
        assert look(other, written=999.0) is Presence.UNKNOWN

    @pytest.mark.parametrize("written", [0.0, 1000.0, 2000.0])
    def test_one_that_wrote_after_this_start_is_another_machine(self, written: float) -> None:
        assert look(own_identity()._replace(boot=OTHER_BOOT), written=written) is Presence.UNKNOWN

    def test_an_installation_without_an_id_is_never_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subject, "machine_id", lambda: "")
        assert look(own_identity()._replace(boot=OTHER_BOOT), written=999.0) is Presence.UNKNOWN


def test_proc_of_another_name_space_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_identity()
    monkeypatch.setattr(subject.os, "readlink", lambda path: "99999")
    assert look(own) is Presence.UNKNOWN
    assert own_identity().start == ""


class TestHeld:
    def test_the_process_that_has_the_folder_open(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        with held(of(child.pid), tmp_path) as handle:
            subject.send(handle, signal.SIGTERM)
        assert child.wait(timeout=30) == -signal.SIGTERM

    def test_any_other_process_is_refused(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        (tmp_path / "copy").mkdir()
        with (
            pytest.raises(UnprovenProcessError, match="does not have the folder open"),
            held(of(child.pid), tmp_path / "copy"),
        ):
            pass
        assert child.poll() is None

    @pytest.mark.parametrize("pid", [-1, 0, 1])
    def test_low_numbers_are_never_held(self, pid: int, tmp_path: Path) -> None:
        with pytest.raises(UnprovenProcessError, match="never signalled"), held(of(1)._replace(pid=pid), tmp_path):
            pass

    def test_a_later_process_of_the_pid_is_refused(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        with pytest.raises(ProcessLookupError), held(of(child.pid)._replace(start=f"{child.pid}:1"), tmp_path):
            pass

    def test_an_identity_of_an_earlier_rlinf_is_refused(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        old = of(child.pid)._replace(boot="", pid_namespace=0)
        with pytest.raises(UnprovenProcessError, match="earlier rlinf"), held(old, tmp_path):
            pass
