"""One machine made of namespaces, and what can be wrong with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tests.cluster.spaces import HOST, MOUNTS, SSHD, Space, folders_below_tmp

if TYPE_CHECKING:
    from tests.cluster.hosts import Hosts


class Host:
    """One machine.

    Attributes:
        name: its host name, under which ssh reaches it.
        address: its address in the network of all hosts.
        folder: what this machine keeps about it; `home` in it is the host's home.
    """

    def __init__(self, name: str, address: str, port: str, network: Hosts) -> None:
        self.name = name
        self.address = address
        self.folder = network.folder / name
        self._network = network
        self._port = port
        self._space: Space | None = None

    @property
    def pid(self) -> int:
        """Of its first process, as this machine numbers them."""
        assert self._space is not None
        return self._space.pid

    @property
    def alive(self) -> bool:
        return self._space is not None and self._space.process.poll() is None

    def begin(self) -> None:
        """Switch it on; `ready` waits for it."""
        spaces = ("net", "mount", "uts", "ipc", "pid")
        arguments = (str(self.folder), self.name, *folders_below_tmp())
        self._space = Space(MOUNTS + HOST, arguments, spaces=spaces, log=self.folder / "init.log")

    def ready(self) -> None:
        assert self._space is not None
        self._space.wait_ready()
        self._network.plug(self._port, self.pid, self.address)

    def restart(self) -> None:
        """Switch it off and on again: an empty /tmp, no process of before."""
        self.kill()
        self.begin()
        self.ready()
        self._network.wait_for_ssh([self])

    def kill(self) -> None:
        """Switch it off: every process of it ends at once, and nothing answers any more."""
        if self._space is not None:
            self._space.end()
            self._space = None
            self._network.unplug(self._port)

    def freeze(self) -> None:
        """Its ssh daemon no longer does anything; connections are still accepted by the kernel."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def link(self, state: str) -> None:
        """Pull its cable (`down`) or plugs it in (`up`): packets vanish, nobody is told."""
        self._network.on_switch(f"link set {self._port} {state}")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        self.link("down")
        try:
            yield
        finally:
            self.link("up")

    def argv(self, argv: Sequence[str]) -> list[str]:
        """Return the same command, run there past ssh."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-i", "-p", "--", *argv]

    @contextlib.contextmanager
    def apart_from(self, other: Host) -> Iterator[None]:
        """Packets between it and another host vanish, nobody is told; both reach all others."""
        ports = (self._port, other._port)
        self._network.on_switch(*(f"link set {port} type bridge_slave isolated on" for port in ports))
        try:
            yield
        finally:
            self._network.on_switch(*(f"link set {port} type bridge_slave isolated off" for port in ports))

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on it, past ssh."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 60, **options}
        return subprocess.run(self.argv(argv), env=self._environment(), **settings)

    def spawn(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on it, past ssh; it ends with the host at the latest."""
        return subprocess.Popen(self.argv(argv), env=self._environment(), text=True, **options)

    def sh(self, script: str) -> str:
        """Return what a shell script prints that runs on it."""
        return self.run(["sh", "-ec", script]).stdout

    @contextlib.contextmanager
    def listening(self, port: int, address: str = "0.0.0.0") -> Iterator[None]:
        """Somebody else's program listens on a TCP port."""
        code = (
            "import socket,sys; s=socket.create_server((sys.argv[1], int(sys.argv[2])));"
            "print('ready', flush=True); sys.stdin.read()"
        )
        process = self.spawn(
            [sys.executable, "-c", code, address, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.communicate(timeout=30)

    @contextlib.contextmanager
    def small_disk(self, mebibytes: int) -> Iterator[None]:
        """Its /tmp holds no more than so much."""
        self.sh(f"mount -o remount,size={mebibytes}m /tmp")
        try:
            yield
        finally:
            self.sh("mount -o remount,size=8g /tmp")

    @contextlib.contextmanager
    def small_shm(self, mebibytes: int) -> Iterator[None]:
        """Its /dev/shm holds no more than so much, as in a container."""
        self.sh(f"mount -o remount,size={mebibytes}m /dev/shm")
        try:
            yield
        finally:
            self.sh("mount -o remount,size=2g /dev/shm")

    @contextlib.contextmanager
    def nvidia(self, count: int) -> Iterator[None]:
        """The device files of `count` NVIDIA accelerators, which is all that is looked at without the vendor's tool."""
        names = ["/dev/nvidiactl", *(f"/dev/nvidia{index}" for index in range(count))]
        self.run(["touch", *names])
        try:
            yield
        finally:
            self.run(["rm", *names])

    @contextlib.contextmanager
    def second_address(self, address: str) -> Iterator[None]:
        """A device that only this host reaches, such as the controller of a robot."""
        self.sh(f"ip addr add {address}/32 dev lo")
        try:
            yield
        finally:
            self.sh(f"ip addr del {address}/32 dev lo")

    @contextlib.contextmanager
    def refusing_keys(self) -> Iterator[None]:
        """Its sshd takes nobody's key."""
        keys = self.folder / "authorized_keys"
        text = keys.read_text()
        keys.write_text("")
        try:
            yield
        finally:
            keys.write_text(text)

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes by their own pids, those of sshd and its logins left out."""
        listed = self.sh("ps -eo pid=,args= --no-headers").splitlines()
        pairs = (line.split(None, 1) for line in listed if line.strip())
        return {int(pid): args for pid, args in pairs if not args.startswith(("sshd:", SSHD, "ps -eo", "sh -ec"))}

    def _environment(self) -> dict[str, str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": str(self.folder / "home"), "PATH": path, "LANG": "C.UTF-8"}
