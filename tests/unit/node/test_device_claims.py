"""Claims on devices: one holder, all or none, freed by the kernel, and answers that nothing is lost by."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlinf_core.node import device_claims
from rlinf_core.node.device_claims import DeviceHolder, claim_name, holders, keep, listing
from rlinf_core.node.holder_words import job_words
from rlinf_core.process import proc
from tests.waiting import until

_HOLD = """\
import json, sys
from rlinf_core.node.device_claims import DeviceHolder, keep
holder = DeviceHolder()
for line in sys.stdin:
    verb, argument = json.loads(line)
    answer = None
    if verb == "take":
        answer = holder.take(argument).ok
    elif verb == "keep":
        keep(argument)
    elif verb == "tell":
        holder.tell(argument)
    elif verb == "wait":
        holder.wait()
    elif verb == "drop":
        holder.drop()
    print(json.dumps(answer), flush=True)
"""


class Other:
    """Another process with claims."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def do(self, verb: str, argument: object = None) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, argument]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


Start = Callable[[], Other]


@contextmanager
def _others() -> Generator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start() -> Other:
        process = subprocess.Popen([sys.executable, "-c", _HOLD], stdin=-1, stdout=-1, text=True)
        started.append(process)
        return Other(process)

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.fixture
def start() -> Generator[Start]:
    with _others() as begin:
        yield begin


@pytest.fixture
def devices() -> list[str]:
    """Four devices that no other test has."""
    vendor = f"T{secrets.token_hex(4)}"
    return [f"{vendor}:{number}" for number in range(4)]


@pytest.fixture
def holder() -> Generator[DeviceHolder]:
    made = DeviceHolder()
    yield made
    made.drop()


def test_who_asks_for_a_held_device_hears_whose_it_is(
    start: Start, holder: DeviceHolder, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may answer late.
    monkeypatch.setattr(device_claims, "_ASK_SECONDS", 60.0)
    other = start()
    other.do("tell", {"run": "/runs/a", "step": 12, "left": 60.0})
    assert other.do("take", devices[:1])
    taken = holder.take(devices[:1])
    assert not taken.ok
    (one,) = taken.others
    assert (one.device, one.pid, one.user) == (devices[0], other.process.pid, os.getuid())
    assert one.about is not None
    assert one.about["step"] == 12
    assert 0 < one.about["left"] <= 60.0


def test_a_stopped_holder_is_known_as_stopped(start: Start, devices: list[str]) -> None:
    other = start()
    other.do("tell", {"run": "/runs/a"})
    assert other.do("take", devices[:1])
    other.process.send_signal(signal.SIGSTOP)
    # Signals arrive soon, and its answer of before may be on its way.
    until(lambda: [one.about for one in holders(devices[:1])] == [None], "no answer of a stopped process")
    (one,) = holders(devices[:1])
    assert (one.pid, one.stopped) == (other.process.pid, True)
    assert job_words(one).startswith(f"process {one.pid}, which is stopped (`kill -CONT {one.pid}`")


def test_all_devices_are_taken_or_none(start: Start, holder: DeviceHolder, devices: list[str]) -> None:
    assert start().do("take", [devices[2]])
    assert not holder.take(devices).ok
    assert [one.device for one in holders(devices)] == [devices[2]]
    assert holder.take([devices[0], devices[1], devices[3]]).ok


def test_the_kernel_frees_what_a_killed_process_held(start: Start, holder: DeviceHolder, devices: list[str]) -> None:
    other = start()
    assert other.do("take", devices)
    other.process.kill()
    other.process.wait()
    assert holder.take(devices).ok


def test_a_claim_lasts_as_long_as_a_worker_with_its_copy(
    start: Start, holder: DeviceHolder, devices: list[str]
) -> None:
    driver, worker = start(), start()
    assert driver.do("take", devices[:1])
    worker.do("keep", [claim_name(devices[0])])
    driver.process.kill()
    driver.process.wait()
    taken = holder.take(devices[:1])
    assert not taken.ok
    # Nobody answers any more, which delays nobody for long.
    assert [one.about for one in taken.others] == [None]
    worker.process.kill()
    worker.process.wait()
    assert holder.take(devices[:1]).ok


def test_who_shares_is_a_holder_too(start: Start, holder: DeviceHolder, devices: list[str]) -> None:
    first, third = start(), start()
    assert first.do("take", devices[:1])
    assert [one.pid for one in holder.take(devices[:1], share=True).others] == [first.process.pid]
    first.do("drop")
    assert not third.do("take", devices[:1])
    holder.drop()
    until(lambda: third.do("take", devices[:1]), "the device")


def test_a_group_shares_and_strangers_do_not(holder: DeviceHolder, devices: list[str]) -> None:
    first, second = DeviceHolder(), DeviceHolder()
    try:
        assert first.take(devices[:1], group="sweep").ok
        assert second.take(devices[:1], group="sweep").ok
        assert second.look(devices[:1], group="sweep") == []
        assert not holder.take(devices[:1]).ok
        assert not holder.take(devices[:1], group="another").ok
        assert holder.take(devices[1:2]).ok
        assert not first.take(devices[:2], group="sweep").ok
    finally:
        first.drop()
        second.drop()


def test_two_that_look_at_once_see_each_other(
    holder: DeviceHolder, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a group and a stranger, of which each has seen nobody before it binds its name."""
    stranger, bind = DeviceHolder(), device_claims.bind
    results: list[bool] = []

    def bind_after_another(name: str) -> socket.socket | None:
        monkeypatch.setattr(device_claims, "bind", bind)
        sock = bind(name)
        results.append(stranger.take(devices[:1]).ok)
        return sock

    monkeypatch.setattr(device_claims, "bind", bind_after_another)
    try:
        results.append(holder.take(devices[:1], group="sweep").ok)
        assert results == [False, True]
    finally:
        stranger.drop()


def test_a_forked_child_has_no_claim(holder: DeviceHolder, devices: list[str], start: Start) -> None:
    assert holder.take(devices[:1]).ok
    ready, stop = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b".")
        os.read(stop[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    holder.drop()
    other = start()
    until(lambda: other.do("take", devices[:1]), "the device")
    os.write(stop[1], b".")
    os.waitpid(child, 0)
    for descriptor in (*ready, *stop):
        os.close(descriptor)


def test_who_waits_is_listed_until_it_has_what_it_waits_for(start: Start) -> None:
    other = start()
    other.do("tell", {"waits_for": "accelerator 0 of node 0: runs/a"})
    other.do("wait")
    waiting = [one for one in listing()["waiting"] if one["pid"] == other.process.pid]
    assert [one["about"]["waits_for"] for one in waiting] == ["accelerator 0 of node 0: runs/a"]
    other.do("drop")
    until(lambda: all(one["pid"] != other.process.pid for one in listing()["waiting"]), "the end of the wait")


@pytest.mark.security
@pytest.mark.parametrize(
    "answer", [b"x" * 5000, b"[" * 4000, b"[1, 2]", b"\xff\xfe", b"", b'{"a": 1' + b" " * 4090 + b"}"]
)
def test_a_damaged_answer_says_nothing(answer: bytes, devices: list[str], holder: DeviceHolder) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as liar:
        liar.bind(f"\0{claim_name(devices[0])}")
        liar.listen()

        def lie() -> None:
            connection, _ = liar.accept()
            with connection:
                connection.send(answer)

        thread = threading.Thread(target=lie)
        thread.start()
        (one,) = holders(devices[:1])
        thread.join()
        assert one.about is None
        assert not holder.take(devices[:1]).ok


@pytest.mark.security
@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
@pytest.mark.parametrize("suffix", ["", "+x-00000000"])
@pytest.mark.parametrize("listens", [True, False])
def test_a_name_that_another_user_binds_bars_nobody(
    suffix: str, listens: bool, holder: DeviceHolder, devices: list[str], start: Start
) -> None:
    script = f"""
import os, socket, sys
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind("\\0{claim_name(devices[0])}{suffix}")
{"s.listen()" if listens else ""}
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=-1, stdin=-1, text=True) as thief:
        assert thief.stdout is not None
        assert thief.stdout.readline() == "ready\n"
        assert holders(devices[:1]) == []
        taken = holder.take(devices[:1])
        assert taken.ok
        assert not start().do("take", devices[:1])
        # A worker takes no copy from it.
        assert keep([claim_name(devices[0]) + suffix], seconds=0) == [claim_name(devices[0]) + suffix]
        assert keep(taken.names.values()) == []
        thief.kill()


@pytest.mark.security
def test_another_users_socket_does_not_count(
    devices: list[str], holder: DeviceHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the kernel named another user, which takes no other user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as thief:
        thief.bind(f"\0{claim_name(devices[0])}")
        number, owner = os.fstat(thief.fileno()).st_ino, proc._owner  # pyright: ignore[reportPrivateUsage]
        assert owner(number) in (os.getuid(), None)

        def another(asked: int) -> int | None:
            return os.getuid() + 1 if asked == number else owner(asked)

        monkeypatch.setattr(proc, "_owner", another)
        assert holders(devices[:1]) == []
        assert holder.take(devices[:1]).ok


def test_a_bind_that_the_kernel_refuses_is_an_error(
    holder: DeviceHolder, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(device_claims.socket.socket, "bind", refuse)
    with pytest.raises(PermissionError):
        holder.take(devices)
    monkeypatch.undo()
    assert holders(devices) == []


def test_workers_get_their_copies_of_a_busy_driver(
    start: Start, holder: DeviceHolder, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is full at first, and then it accepts nobody for a while."""
    name, tries = claim_name(devices[0]), list[float]()
    other = start()
    assert other.do("take", devices[:1])
    connected = device_claims.connected

    def busy(name: str, seconds: float) -> socket.socket:
        tries.append(seconds)
        if len(tries) < 4:
            raise BlockingIOError
        return connected(name, seconds)

    monkeypatch.setattr(device_claims, "connected", busy)
    monkeypatch.setattr(device_claims, "_copies", copies := list[socket.socket]())
    assert keep([name]) == []
    assert len(copies) == 1
    copies[0].close()
    assert len(tries) == 4


def test_a_worker_hears_which_claims_it_has_no_copy_of(devices: list[str]) -> None:
    assert keep([claim_name(devices[0])]) == [claim_name(devices[0])]


def test_an_estimate_that_has_run_out_is_none(start: Start, devices: list[str]) -> None:
    other = start()
    other.do("tell", {"run": "/runs/a", "left": 0.0})
    assert other.do("take", devices[:1])
    (one,) = holders(devices[:1])
    assert one.about == {"run": "/runs/a"}


_TOUCH = """\
import os, random, sys, time
from rlinf_core.node.device_claims import DeviceHolder
folder, seed, devices = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
holder = DeviceHolder()
random.seed(seed)
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.01)
while not holder.take(devices).ok:
    time.sleep(random.uniform(0.01, 0.1))
files = [f"{folder}/{device}" for device in devices]
for file in files:
    os.close(os.open(file, os.O_CREAT | os.O_EXCL))
time.sleep(0.01)
for file in files:
    os.unlink(file)
if seed % 3:
    holder.drop()
os.kill(os.getpid(), 9 if seed % 3 == 2 else 0)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("starts", [12, pytest.param(100, marks=pytest.mark.nightly)])
def test_many_starts_at_once_all_get_their_devices_in_turn(starts: int, devices: list[str], tmp_path: Path) -> None:
    """Two jobs that overlap, each started as often as that: a device that two held would have its file already."""
    wanted: Sequence[list[str]] = ([devices[0], devices[1], devices[2]], [devices[3], devices[2], devices[1]])
    processes = [
        subprocess.Popen([sys.executable, "-c", _TOUCH, str(tmp_path), str(number), *wanted[number % 2]])
        for number in range(starts)
    ]
    (tmp_path / "go").touch()
    codes = [process.wait() for process in processes]
    assert codes == [-9 if number % 3 == 2 else 0 for number in range(starts)]
    assert holders(devices) == []


def test_long_and_odd_names_of_devices_stay_apart() -> None:
    names = ["A:0", "A 0", "A_0", "A:" + "x" * 200, "A:" + "x" * 199 + "y", "A:\u00e9", "A:/dev/ttyACM0"]
    assert len({claim_name(name) for name in names}) == len(names)
    # The kernel takes 107 bytes, of which a suffix needs some.
    assert all(len(claim_name(name).encode()) <= 85 for name in names)


def test_a_holder_with_too_much_to_say_is_still_a_holder(
    holder: DeviceHolder, devices: list[str], start: Start
) -> None:
    other = start()
    other.do("tell", {"run": "x" * 5000})
    assert other.do("take", devices[:1])
    (one,) = holder.take(devices[:1]).others
    assert (one.pid, one.about) == (other.process.pid, None)
    assert device_claims.claim_name(one.device) == claim_name(devices[0])
