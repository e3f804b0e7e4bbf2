"""Namespaces of Linux that hang on one process each, and what runs in them: a host, the control host, the switch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SSHD = "/usr/sbin/sshd"
_PR_SET_PDEATHSIG = 1
# What runs first in a host: its own views of what machines don't share. `$1` is the host's folder, `$2` its name.
MOUNTS = """
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
# An empty /tmp, but for a clone or an interpreter that lies there: `$3` and what follows name such folders.
HOST = """
kept="$1/kept"
for folder in "${@:3}"; do
  mkdir -p "$kept$folder"
  mount --bind "$folder" "$kept$folder"
done
mount -t tmpfs -o size=8g tmpfs /tmp
chmod 1777 /tmp
for folder in "${@:3}"; do
  mkdir -p "$folder"
  mount --bind "$kept$folder" "$folder"
done
mount -t tmpfs -o size=16m tmpfs /run
mkdir -p /run/sshd
ip link set lo up
echo ready
exec /usr/sbin/sshd -D -e -f "$1/sshd_config" 2> "$1/sshd.log"
"""
CONTROL = """
ip link set lo up
echo ready
exec sleep infinity
"""
SWITCH = """
set -eu
ip link add br0 type bridge
ip link set br0 up
echo ready
exec sleep infinity
"""


def why_not() -> str | None:
    """Return why there can be no hosts on this machine, or None when there can be."""
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


def folders_below_tmp() -> list[str]:
    """Return the folders of this checkout and its interpreter that an empty /tmp would hide."""
    folders = dict.fromkeys((Path(__file__).resolve().parents[2], Path(sys.prefix), Path(sys.base_prefix)))
    return [str(folder) for folder in folders if Path("/tmp") in folder.parents]


def die_with_parent() -> None:
    """Have this process killed when its parent ends; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Space:
    """A process that holds namespaces. It, and all processes in its process space, end when this one ends."""

    def __init__(self, script: str, arguments: Sequence[str] = (), *, spaces: Sequence[str], log: Path) -> None:
        self._log = log
        forks = [f"--{space}" for space in spaces]
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
                preexec_fn=die_with_parent,
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
