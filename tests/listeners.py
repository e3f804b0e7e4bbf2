"""The sockets on which processes listen, and the table of docs/clusters.md that has a row for each kind of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rlinf_core.process.proc import open_files, pids, stat
from tests.waiting import until

PAGE = Path(__file__).parents[1] / "docs" / "clusters.md"
_LISTENS = "0A"
_ACCEPTS = "00010000"
_UNBOUND = "07"
# A stranger's bytes: the greeting of the data plane, to which nothing else knows an answer.
_GREETING = b"rlinf data plane 1\n" + bytes(32)
_SECONDS = 5.0
_PLACES = ("loopback", "unix socket", "every address")
# The rows that each job has sockets of.
ALWAYS = {"Data plane, one for each process", "Data plane within a node", "Ray", "Ray's agents", "Ray within a node"}


class Row(NamedTuple):
    """A row of the table: the listener's name, the protocol that it speaks and the places where it may listen."""

    name: str
    protocol: str
    places: str


class Listener(NamedTuple):
    """A socket that listens.

    Attributes:
        pids: the processes that hold it.
        place: `loopback`, `every address` or `unix socket`, otherwise the address.
        address: the address and port, or the path.
    """

    pids: frozenset[int]
    place: str
    address: tuple[str, int] | str


def rows() -> list[Row]:
    """Return the rows of the table "What listens"."""
    section = PAGE.read_text(encoding="utf-8").split("## What listens\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [Row(*(cell.strip() for cell in line.split("|")[1:4])) for line in lines if not line.startswith("| ---")]


def listeners_of(processes: Iterable[int]) -> list[Listener]:
    """Return the TCP, UDP and Unix sockets on which processes of this network namespace listen."""
    holders: dict[str, set[int]] = {}
    for pid in processes:
        for target in open_files(pid).values():
            if target.startswith("socket:["):
                holders.setdefault(target[len("socket:[") : -1], set()).add(pid)
    listeners: list[Listener] = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for row in _table(table):
            bound = row[3] == (_LISTENS if table.startswith("tcp") else _UNBOUND)
            if bound and row[9] in holders:
                host, port = _address(row[1])
                listeners.append(Listener(frozenset(holders[row[9]]), _place(host), (host, port)))
    accepting = (row for row in _table("unix") if row[3] == _ACCEPTS and row[6] in holders)
    return [
        *listeners,
        *(Listener(frozenset(holders[row[6]]), "unix socket", "".join(row[7:8])) for row in accepting),
    ]


def protocol_of(listener: Listener) -> str:
    """Return the protocol that a listener speaks, by what it answers to a stranger."""
    if isinstance(listener.address, str):
        if listener.address.startswith("@rlinf-"):
            return "JSON"
        name = Path(listener.address)
        if re.fullmatch(rf"rlinf-{os.getuid()}-\w+", name.parent.name):
            return "data plane"
        return "Ray's" if name.parent.name == "sockets" else listener.address
    with socket.create_connection(listener.address, timeout=_SECONDS) as sock:
        try:
            sock.sendall(_GREETING)
            answer = sock.recv(256)
        except TimeoutError:
            return "gloo"
        except ConnectionError:
            return "closes"
    if answer.startswith(b"rlinf data plane"):
        return "data plane"
    if answer.startswith(b"HTTP/1"):
        return "HTTP"
    # The settings that a server of HTTP/2 sends first: a frame of this type, on no stream.
    if answer[3:4] == b"\x04" and answer[5:9] == bytes(4):
        return "gRPC"
    return "lines of JSON" if answer.startswith(b"{") else repr(answer)


def _table(name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def _address(text: str) -> tuple[str, int]:
    """Return an address and port from the kernel's hexadecimal words, each in the order of this machine."""
    host, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)


def _place(host: str) -> str:
    if host.startswith("127.") or host == "::1":
        return "loopback"
    return "every address" if host in ("0.0.0.0", "::") else host


def compared(processes: Iterable[int]) -> set[str]:
    """Return the names of the rows that the sockets of processes may be of, once all of them have one."""
    table, names = rows(), set[str]()
    listeners = listeners_of(processes)
    with ThreadPoolExecutor(16) as pool:
        protocols = list(pool.map(protocol_of, listeners))
    for listener, protocol in zip(listeners, protocols, strict=True):
        place = listener.place if listener.place in _PLACES else "the node's address"
        of_it = {row.name for row in table if row.protocol == protocol and place in row.places}
        assert of_it, f"no row of {PAGE.name} has {listener}, which speaks {protocol}"
        names |= of_it
    return names


def family_of(root: int) -> set[int]:
    """Return a process with all that it has started and those have."""
    parents = {pid: stat(pid).parent for pid in pids()}
    family = {root}
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return family


def names_of_job(folder: Path, file: str, *overrides: str) -> set[str]:
    """Train until the first step has ended; return the rows that the job's sockets are of."""
    output_file = folder / "output"
    with output_file.open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", "rlinf_cli", "train", file, "runner.max_steps=100000", *overrides],
            cwd=folder,
            env={**os.environ, "RLINF_ADDRESS": "local", "PYTHONPATH": str(PAGE.parents[1])},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: driver.poll() is not None or "step 1/" in output_file.read_text(), "a step", 240)
        assert driver.poll() is None, output_file.read_text()
        return compared(family_of(driver.pid))
    finally:
        driver.send_signal(signal.SIGTERM)
        driver.wait(timeout=120)
