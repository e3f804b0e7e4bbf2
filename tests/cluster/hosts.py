"""Hosts for tests, made of namespaces: each has its own processes, network, name, /tmp, /dev, home, and a real sshd.

Root on Linux only. The file system is this machine's, so that the checkout and its interpreter are there; what a host
writes to its /tmp, /dev/shm or home is seen by it alone. Everything hangs on processes of the test run and ends with
them: no namespace has a name, and what a run that was killed leaves is a folder, swept by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.host import Host
from tests.cluster.spaces import CONTROL, MOUNTS, SWITCH, Space
from tests.cluster.venvs import make_venv

_FOLDERS = Path("/var/tmp")
_PREFIX = "rlinf-hosts-"
_READY_SECONDS = 30.0
_NETWORK = "10.77.0"
_CONTROL_ADDRESS = f"{_NETWORK}.254"
_SSHD_CONFIG = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PermitRootLogin prohibit-password
MaxStartups 200
MaxSessions 200
AcceptEnv LANG LC_*
"""


class Control:
    """Where `rlinf` is run from: no node, but a login on all of them. Its /tmp is this machine's.

    Attributes:
        home: of its user, with `.ssh`.
    """

    def __init__(self, network: Hosts) -> None:
        self.folder = network.folder / "control"
        self.home = self.folder / "home"
        self._network = network
        arguments = (str(self.folder), f"control{os.getpid()}")
        self._space = Space(MOUNTS + CONTROL, arguments, spaces=("net", "mount", "uts"), log=self.folder / "init.log")

    def ready(self) -> None:
        self._space.wait_ready()
        self._network.plug("control", self._space.pid, _CONTROL_ADDRESS)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """Return the same command, run there. It is the very process that is started: signals reach it."""
        return ["nsenter", "-t", str(self._space.pid), "-n", "-m", "-u", "--", *argv]

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RLINF_", "XDG_"))}
        return {**kept, "HOME": str(self.home), **(env or {})}

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        settings: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": 110, **options}
        return subprocess.run(self.argv(argv), env=self.environment(env), **settings)

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(self.argv(argv), env=self.environment(env), text=True, **options)

    def rlinf(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Return what `rlinf` answers there."""
        return self.run([sys.executable, "-m", "rlinf_cli", *arguments], **options)

    @contextlib.contextmanager
    def known_hosts(self, *, without: str = "", wrong: str = "") -> Iterator[None]:
        """Its user has never logged in at the host `without`, or knows another key of the host `wrong`."""
        path = self.home / ".ssh" / "known_hosts"
        before = path.read_text()
        lines: list[str] = []
        other = next(line for line in before.splitlines() if not line.startswith(f"{wrong},")).split(" ", 1)[1]
        for line in before.splitlines():
            name, _, rest = line.partition(" ")
            if without and name.startswith(f"{without},"):
                continue
            lines.append(f"{name} {other if wrong and name.startswith(f'{wrong},') else rest}")
        self.forget_connections()
        path.write_text("\n".join([*lines, ""]))
        try:
            yield
        finally:
            path.write_text(before)

    def forget_connections(self) -> None:
        """End the connections that are held open for the next command, which would ask for no key."""
        path = Path(tempfile.gettempdir()) / f"rlinf-{os.getuid()}" / "ssh" / "%C"
        for host in self._network.hosts:
            self.run(["ssh", "-o", f"ControlPath={path}", "-O", "exit", host.name])

    def end(self) -> None:
        self._space.end()


class Hosts:
    """A network of machines and the place from where they are commanded.

    Args:
        names: of the machines, in rank order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_FOLDERS))
        self._interpreters: dict[str, Path] = {}
        self.hosts = [Host(name, f"{_NETWORK}.{number + 1}", f"s{number}", self) for number, name in enumerate(names)]
        self._switch = Space(SWITCH, spaces=("net",), log=self.folder / "switch.log")
        try:
            self._write_files()
            for host in self.hosts:
                host.begin()
            self.control = Control(self)
            self._switch.wait_ready()
            for item in (*self.hosts, self.control):
                item.ready()
            self.wait_for_ssh(self.hosts)
        except BaseException:
            self.end()
            raise

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def interpreter(self, name: str, *, ray: bool = True, first_line: str = "") -> Path:
        """Return an interpreter of its own path, the same for the same name; see `make_venv`."""
        if name not in self._interpreters:
            self._interpreters[name] = make_venv(self.folder / "venvs" / name, ray=ray, first_line=first_line)
        return self._interpreters[name]

    def end(self) -> None:
        """Switch everything off, and leaves nothing."""
        for host in self.hosts:
            host.kill()
        if hasattr(self, "control"):
            self.control.forget_connections()
            self.control.end()
        self._switch.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def plug(self, port: str, pid: int, address: str) -> None:
        """Connect the network of a process to the switch."""
        # The same card after a restart: the others remember it.
        card = f"02:00:0a:4d:00:{int(address.rpartition('.')[2]):02x}"
        self.on_switch(
            f"link add {port} type veth peer name eth0 address {card} netns {pid}",
            f"link set {port} master br0",
            f"link set {port} up",
        )
        inside = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
        lines = (f"addr add {address}/24 dev eth0", "link set eth0 up", f"route add default via {_CONTROL_ADDRESS}")
        # The default route is what tells the machine's own address; nothing is sent over it.
        subprocess.run(inside, input="\n".join(lines[: 2 if port == "control" else 3]), text=True, check=True)

    def unplug(self, port: str) -> None:
        """Take away the cable of a host that is off, which would go by itself, but later."""
        argv = ["nsenter", "-t", str(self._switch.pid), "-n", "ip", "link", "del", port]
        subprocess.run(argv, capture_output=True, check=False)

    def on_switch(self, *commands: str) -> None:
        argv = ["nsenter", "-t", str(self._switch.pid), "-n", "ip", "-batch", "-"]
        subprocess.run(argv, input="\n".join(commands), text=True, check=True)

    def wait_for_ssh(self, hosts: Sequence[Host]) -> None:
        """Until every sshd answers."""
        code = (
            "import socket,sys,time\n"
            "end = time.monotonic() + float(sys.argv[1])\n"
            "for address in sys.argv[2:]:\n"
            "    while True:\n"
            "        try:\n"
            "            with socket.create_connection((address, 22), 5) as s: assert s.recv(4)\n"
            "            break\n"
            "        except (OSError, AssertionError):\n"
            "            if time.monotonic() > end: raise\n"
            "            time.sleep(0.05)\n"
        )
        done = self.control.run(
            [sys.executable, "-c", code, str(_READY_SECONDS), *(host.address for host in hosts)], timeout=60
        )
        if done.returncode:
            logs = "\n".join((host.folder / "sshd.log").read_text(errors="replace") for host in hosts)
            raise RuntimeError(f"sshd does not answer: {done.stderr}\n{logs}")

    def _write_files(self) -> None:
        passwd = Path("/etc/passwd").read_text().splitlines()
        names = [(host.address, host.name) for host in self.hosts]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in names)]
        (self.folder / "hosts").write_text("\n".join([*lines, ""]))
        for folder in (*(host.folder for host in self.hosts), self.folder / "control"):
            folder.mkdir()
            (folder / "home").mkdir()
            root = f"root:x:0:0:root:{folder}/home:/bin/bash"
            (folder / "passwd").write_text(
                "\n".join([root, *(line for line in passwd if not line.startswith("root:")), ""])
            )
        ssh = self.folder / "control" / "home" / ".ssh"
        ssh.mkdir(mode=0o700)
        _make_key(ssh / "id_ed25519")
        public = (ssh / "id_ed25519.pub").read_text()
        known: list[str] = []
        for host in self.hosts:
            _make_key(host.folder / "host_key")
            (host.folder / "authorized_keys").write_text(public)
            (host.folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=host.folder))
            kind, key = (host.folder / "host_key.pub").read_text().split()[:2]
            known.append(f"{host.name},{host.address} {kind} {key}\n")
        (ssh / "known_hosts").write_text("".join(known))


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)


def sweep() -> None:
    """Remove the folders of runs that were killed. Their processes ended with them."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Bring the hosts up and opens a shell in the control namespace, to try things by hand."""
    begun = time.monotonic()
    hosts = Hosts(["trainer0", "trainer1", "render0", "render1", "robot0"])
    try:
        print(
            f"{len(hosts.hosts)} hosts after {time.monotonic() - begun:.2f} s: {' '.join(h.name for h in hosts.hosts)}"
        )
        command = sys.argv[1:] or [os.environ.get("SHELL", "bash")]
        print(f"in the control namespace: {shlex.join(command)}", flush=True)
        subprocess.run(hosts.control.argv(command), env=hosts.control.environment(), check=False)
    finally:
        hosts.end()


if __name__ == "__main__":
    main()
