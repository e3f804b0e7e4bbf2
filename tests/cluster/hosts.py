"""Hosts for tests, made of namespaces: each has its own processes, network, name, /tmp, /dev, home, and a real sshd.

Root on Linux only. The file system is this machine's, so that the checkout and its interpreter are there; what a host
writes to its /tmp, /dev/shm or home is seen by it alone. Everything hangs on processes of the test run and ends with
them: no namespace has a name, and what a run that was killed leaves is a folder, swept by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SSHD = "/usr/sbin/sshd"
_FOLDERS = Path("/var/tmp")
_PREFIX = "rlinf-hosts-"
_READY_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_NETWORK = "10.77.0"
_CONTROL_ADDRESS = f"{_NETWORK}.254"
# What runs first in a host: its own views of what machines don't share. `$1` is the host's folder, `$2` its name.
_MOUNTS = """
set -eu
hostname "$2"
mkdir -p "$1/home" "$1/dev"
mount -t tmpfs -o size=16m tmpfs "$1/dev"
for node in null zero full random urandom tty; do
  touch "$1/dev/$node"
  mount --bind "/dev/$node" "$1/dev/$node"
done
ln -s /proc/self/fd "$1/dev/fd"
for each in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${each%%:*}" "$1/dev/${each#*:}"; done
mkdir "$1/dev/shm"
mount -t tmpfs -o size=2g tmpfs "$1/dev/shm"
mount --rbind "$1/dev" /dev
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/../hosts" /etc/hosts
"""
_HOST = """
mount -t tmpfs -o size=8g tmpfs /tmp
chmod 1777 /tmp
mount -t tmpfs -o size=16m tmpfs /run
mkdir -p /run/sshd
ip link set lo up
echo ready
exec /usr/sbin/sshd -D -e -f "$1/sshd_config" 2> "$1/sshd.log"
"""
_CONTROL = """
ip link set lo up
echo ready
exec sleep infinity
"""
_SWITCH = """
set -eu
ip link add br0 type bridge
ip link set br0 up
echo ready
exec sleep infinity
"""
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


def why_not() -> str | None:
    """Why there can be no hosts on this machine, or None when there can be."""
    if os.geteuid() != 0:
        return "hosts need root"
    missing = [name for name in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen") if shutil.which(name) is None]
    missing += [] if os.path.exists(SSHD) else ["sshd"]
    if missing:
        return f"hosts need {', '.join(missing)}: apt-get install openssh-server openssh-client iproute2 util-linux"
    script = "ip link add rt0 type veth peer name rt1 && mount -t tmpfs tmpfs /tmp"
    spaces = ("--net", "--mount", "--uts", "--ipc", "--pid")
    tried = subprocess.run(
        ["unshare", *spaces, "--fork", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Space:
    """A process that holds namespaces. It, and all processes in its process space, end when this one ends."""

    def __init__(self, script: str, arguments: Sequence[str] = (), *, spaces: Sequence[str], log: Path) -> None:
        self._log = log
        forks = [f"--{each}" for each in spaces]
        if "pid" in spaces:
            forks += ["--fork", "--kill-child=KILL", "--mount-proc"]
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                ["unshare", *forks, "--propagation", "private", "bash", "-c", script, "space", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                # Ctrl-C at the test run is not for them.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._forked = "pid" in spaces

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line.strip() != b"ready":
            raise RuntimeError(f"a host did not start: {self._log.read_text(errors='replace')}")
        parent = self.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split() if self._forked else []
        self.pid = int(children[0]) if children else parent

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(timeout=30)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Host:
    """One machine.

    Attributes:
        name: its host name, under which ssh reaches it.
        address: its address in the network of all hosts.
        folder: what this machine keeps about it; `home` in it is the host's home.
    """

    def __init__(self, name: str, number: int, network: Hosts) -> None:
        self.name = name
        self.address = f"{_NETWORK}.{number + 1}"
        self.folder = network.folder / name
        self._network = network
        self._port = f"s{number}"
        self._space: _Space | None = None

    @property
    def pid(self) -> int:
        """Of its first process, as this machine numbers them."""
        assert self._space is not None
        return self._space.pid

    @property
    def alive(self) -> bool:
        return self._space is not None and self._space.process.poll() is None

    def begin(self) -> None:
        """Switches it on; `ready` waits for it."""
        spaces = ("net", "mount", "uts", "ipc", "pid")
        arguments = (str(self.folder), self.name)
        self._space = _Space(_MOUNTS + _HOST, arguments, spaces=spaces, log=self.folder / "init.log")

    def ready(self) -> None:
        assert self._space is not None
        self._space.wait_ready()
        self._network.plug(self._port, self.pid, self.address)

    def restart(self) -> None:
        """Switches it off and on again: an empty /tmp, no process of before."""
        self.kill()
        self.begin()
        self.ready()
        self._network.wait_for_ssh([self])

    def kill(self) -> None:
        """Switches it off: every process of it ends at once, and nothing answers any more."""
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
        """Pulls its cable (`down`) or plugs it in (`up`): packets vanish, nobody is told."""
        self._network.on_switch(f"link set {self._port} {state}")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        self.link("down")
        try:
            yield
        finally:
            self.link("up")

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on it, past ssh."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 60, **options}
        return subprocess.run([*self._enter(), *argv], env=self._environment(), **settings)

    def spawn(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command on it, past ssh; it ends with the host at the latest."""
        return subprocess.Popen([*self._enter(), *argv], env=self._environment(), text=True, **options)

    def sh(self, script: str) -> str:
        """What a shell script prints that runs on it."""
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
        """The command lines of its processes by their own pids, those of sshd and its logins left out."""
        listed = self.sh("ps -eo pid=,args= --no-headers").splitlines()
        pairs = (line.split(None, 1) for line in listed if line.strip())
        return {int(pid): args for pid, args in pairs if not args.startswith(("sshd:", SSHD, "ps -eo", "sh -ec"))}

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-i", "-p", "--"]

    def _environment(self) -> dict[str, str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": str(self.folder / "home"), "PATH": path, "LANG": "C.UTF-8"}


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
        self._space = _Space(
            _MOUNTS + _CONTROL, arguments, spaces=("net", "mount", "uts"), log=self.folder / "init.log"
        )

    def ready(self) -> None:
        self._space.wait_ready()
        self._network.plug("control", self._space.pid, _CONTROL_ADDRESS)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The same command, run there. It is the very process that is started: signals reach it."""
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
        """What `rlinf` answers there."""
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
        """Ends the connections that are held open for the next command, which would ask for no key."""
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
        self.hosts = [Host(name, number, self) for number, name in enumerate(names)]
        self._switch = _Space(_SWITCH, spaces=("net",), log=self.folder / "switch.log")
        try:
            self._write_files()
            for host in self.hosts:
                host.begin()
            self.control = Control(self)
            self._switch.wait_ready()
            for each in (*self.hosts, self.control):
                each.ready()
            self.wait_for_ssh(self.hosts)
        except BaseException:
            self.end()
            raise

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def interpreter(self, name: str, *, ray: bool = True, first_line: str = "") -> Path:
        """An interpreter of its own path, the same for the same name; see `make_venv`."""
        if name not in self._interpreters:
            self._interpreters[name] = make_venv(self.folder / "venvs" / name, ray=ray, first_line=first_line)
        return self._interpreters[name]

    def end(self) -> None:
        """Switches everything off, and leaves nothing."""
        for host in self.hosts:
            host.kill()
        if hasattr(self, "control"):
            self.control.forget_connections()
            self.control.end()
        self._switch.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def plug(self, port: str, pid: int, address: str) -> None:
        """Connects the network of a process to the switch."""
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
        """Takes away the cable of a host that is off, which would go by itself, but later."""
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
    """Removes the folders of runs that were killed. Their processes ended with them."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def make_venv(folder: Path, *, ray: bool = True, first_line: str = "") -> Path:
    """An interpreter of its own path, made offline; returns the path.

    Args:
        folder: where.
        ray: whether it has all that the interpreter of this process has.
        first_line: Python, run before anything else that it runs.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "stack_of_its_own.py").write_text('"""What the interpreter of the tests does not have."""\n')
    # Such files are read twice at the start of an interpreter of this kind.
    once = "exec('' if hasattr(sys, 'begun') else {}); sys.begun = True"
    lines = [f"import sys; {once.format(repr(first_line))}"] if first_line else []
    if ray:
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        checkout = str(Path(__file__).parents[2])
        lines += [f"import site; site.addsitedir({ours!r})", checkout]
    (packages / "a_first.pth").write_text("\n".join([*lines, ""]))
    return folder / "bin" / "python"


def main() -> None:
    """Brings the hosts up and opens a shell in the control namespace, to try things by hand."""
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
