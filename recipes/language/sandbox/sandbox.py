"""A sandbox for Python programs that a model wrote, made of bubblewrap's namespaces and of limits of the kernel.

A program sees its interpreter with the standard library, `/usr`, and an empty `/tmp`. It has no network, no other
process, no variable of this one, and no privilege that it could get back. Sockets of other families than Unix, IP and
netlink, which no namespace holds, are refused. It is ended with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from recipes.language.sandbox import seccomp
from recipes.language.sandbox.memory_groups import memory_groups
from rlinf_core import ConfigError
from rlinf_core.node.process_end import kills_in

MIB: Final = 1 << 20
# Exit statuses above it are signals, by the shell's convention.
_ENDED_BY: Final = 128
# Longest output that is read, in bytes. A program that writes more is ended.
OUTPUT_BYTES: Final = 64 * 1024
_TRIAL_SECONDS: Final = 30.0
# The kernel reports 2 when a filter is active.
_TRIAL: Final = "print(6 * 7); print(open('/proc/self/status').read().split('Seccomp:')[1].split()[0])"
# Programs that make the sandbox, and the packages of Debian and Ubuntu that hold them.
_PROGRAMS: Final = {"bwrap": "bubblewrap", **dict.fromkeys(("unshare", "setpriv", "prlimit"), "util-linux")}
_NAMESPACES_HELP: Final = (
    "it needs bubblewrap 0.8 or newer (`bwrap --version`) and user namespaces: `sysctl user.max_user_namespaces` above"
    " 0, and on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)
# Where root runs it, each program is a separate user, so that none can reach another's, or spend root's exemptions
# from limits: numbers that no system gives to its users.
_FIRST_UID: Final = 1_800_000_000
_UIDS_PER_PROCESS: Final = 256
_calls = itertools.count()
_SYSTEM_FOLDERS: Final = ("/bin", "/sbin", "/lib", "/lib64")
# A folder that every system has; what is mounted there is seen by one process.
_STAGE: Final = "/mnt"
# The program is sent when the sandbox stands, which a first byte says: one that is ended before reads nothing and ends,
# even where bubblewrap was killed before its child was bound to it.
_READY: Final = b"\n"
# It is read by its length, so that more can follow it on standard input. Programs have what an interactive Python has,
# `exit` and long integers.
_DIGITS: Final = 12
_READER: Final = f"""
import builtins, os, sys
os.write(1, b"\\n")
builtins.exit = builtins.quit = sys.exit
sys.set_int_max_str_digits(0)
def read(length):
    data = b""
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            os._exit(1)
        data += chunk
    return data
program = compile(read(int(read({_DIGITS}))), "<program>", "exec")
del builtins, os, read
exec(program)
"""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one program.

    Attributes:
        seconds: the seconds of CPU time of each of its processes; time by the clock is the caller's to limit.
        memory: bytes of each of its processes.
        processes: how many it may have at once, threads and the sandbox's own included.
        files: bytes of all its files, and of the largest.
    """

    seconds: float = 5.0
    memory: int = 256 * MIB
    processes: int = 16
    files: int = 16 * MIB

    @property
    def total(self) -> int:
        """Bytes of all processes together, and of what the kernel holds for them, where that can be bounded."""
        return 2 * self.memory + self.files


class SandboxError(Exception):
    """A sandbox that could not be made: no program ran in it."""


class ProgramResult(NamedTuple):
    """The result of a program: its exit status (negative: a signal), and its output, truncated if too long.

    Attributes:
        flooded: whether it was ended for writing more than `OUTPUT_BYTES`.
        out_of_memory: whether a process was ended because all of them together took more memory than they may.
    """

    status: int
    output: str
    errors: str
    flooded: bool
    out_of_memory: bool = False


def signal_of(ran: ProgramResult) -> signal.Signals | None:
    """Return the signal that ended a program; None where none did."""
    number = -ran.status if ran.status < 0 else ran.status - _ENDED_BY
    # A program may end with any status, also those of signals without a name.
    return signal.Signals(number) if number in tuple(signal.Signals) else None


def reason_of(ran: ProgramResult) -> str:
    """Return the reason of a failure: the last line of the traceback, or the signal that ended the program."""
    if ran.out_of_memory:
        return "the program's processes took more memory together than they may"
    number = signal_of(ran)
    if number is not None:
        return f"the program was ended by {number.name}"
    lines = ran.errors.strip().splitlines()
    return lines[-1] if lines else f"the program ended with status {ran.status}"


async def run(program: str, limits: SandboxLimits, input: bytes = b"") -> ProgramResult:
    """Run a Python program. When cancelled, it returns only after all processes of the program have ended.

    Args:
        program: its text.
        limits: its limits.
        input: its standard input.

    Raises:
        SandboxError: the sandbox could not be created.
    """
    groups = memory_groups()
    try:
        with contextlib.nullcontext() if groups is None else groups.borrow(limits.total) as group:
            before = kills_in(group) if group is not None else None
            result = await _run(program, limits, input, group)
            return result._replace(out_of_memory=group is not None and kills_in(group) != before)
    except OSError as error:
        raise SandboxError(str(error)) from None


async def _run(program: str, limits: SandboxLimits, input: bytes, group: Path | None) -> ProgramResult:
    starting = asyncio.ensure_future(_start(limits, group))
    try:
        process, stands = await asyncio.shield(starting)
    except OSError as error:
        raise SandboxError(str(error)) from None
    except asyncio.CancelledError:
        # Killed while it makes the sandbox, bubblewrap leaves a process behind that waits for it without an end.
        await _end((await starting)[0])
        raise
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise RuntimeError("the process has no pipes")
    try:
        output, errors, _ = await asyncio.gather(
            _head(process, process.stdout), _head(process, process.stderr), _feed(process.stdin, program, input)
        )
        # What is left in the pipes would keep them open.
        await process.communicate()
    finally:
        await _end(process)
    texts = [data.decode("utf-8", "replace") for data in (output, errors)]
    if not stands:
        lines = texts[1].strip().splitlines()
        raise SandboxError(lines[-1] if lines else f"it ended with status {process.returncode}")
    return ProgramResult(process.returncode or 0, *texts, flooded=max(len(output), len(errors)) > OUTPUT_BYTES)


async def _start(limits: SandboxLimits, group: Path | None) -> tuple[asyncio.subprocess.Process, bool]:
    """Return the process of a sandbox, and whether it is made; one that could not be made has ended.

    Raises:
        OSError: the system has no room for another process.
    """
    with _filter() as filter_fd:
        process = await asyncio.create_subprocess_exec(
            *command(limits, filter_fd, group),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env=_environment(),
            pass_fds=[filter_fd],
        )
    ready = b"" if process.stdout is None else await process.stdout.read(len(_READY))
    return process, ready == _READY


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process that still runs, and return when it has ended."""
    if process.returncode is None:
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.communicate()


async def _head(process: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> bytes:
    """Return the output of a program; kill the program if it writes too much."""
    head = b""
    while len(head) <= OUTPUT_BYTES:
        chunk = await stream.read(OUTPUT_BYTES)
        if not chunk:
            return head
        head += chunk
    if process.returncode is None:
        process.kill()
    return head


async def _feed(stream: asyncio.StreamWriter, program: str, input: bytes) -> None:
    try:
        stream.write(_message(program, input))
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        # It ended before it had read all: its status says why.
        pass


def _message(program: str, input: bytes = b"") -> bytes:
    """Return a program's standard input: its own text, by its length, and what it reads."""
    text = program.encode("utf-8", "replace")
    return f"{len(text):0{_DIGITS}}".encode() + text + input


def check() -> None:
    """Run a trial program.

    Raises:
        ConfigError: this machine has no sandbox; nothing is ever run without.
    """
    for needed, package in _PROGRAMS.items():
        if shutil.which(needed) is None:
            raise _unavailable(f"`{needed}` is not installed", f"run `apt install {package}`")
    try:
        with _filter() as filter_fd:
            done = subprocess.run(
                command(SandboxLimits(), filter_fd),
                input=_message(_TRIAL),
                capture_output=True,
                timeout=_TRIAL_SECONDS,
                check=False,
                cwd="/",
                env=_environment(),
                pass_fds=[filter_fd],
            )
    except subprocess.TimeoutExpired:
        why = f"a test program did not end within {_TRIAL_SECONDS:g} s"
        raise _unavailable(why, "try again when the machine is less busy") from None
    if done.stdout == b"\n42\n0\n":
        raise _unavailable("the kernel does not filter system calls", "it needs CONFIG_SECCOMP_FILTER")
    if done.stdout != b"\n42\n2\n":
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else f"a test program ended with status {done.returncode}"
        raise _unavailable(why, _NAMESPACES_HELP)


def _unavailable(why: str, help: str) -> ConfigError:
    return ConfigError(
        "this machine has no sandbox, and programs written by a model run only in one", why=why, help=help
    )


@contextlib.contextmanager
def _filter() -> Generator[int]:
    """Yield a file descriptor from which the system-call filter can be read once."""
    refusing = seccomp.refusing()
    if refusing is None:
        why = f"no system-call filter for `{platform.machine()}` machines"
        raise _unavailable(why, "place what runs programs on x86_64 or aarch64 machines")
    reader, writer = os.pipe()
    try:
        with open(writer, "wb") as file:
            file.write(refusing)
        yield reader
    finally:
        os.close(reader)


def _environment() -> dict[str, str]:
    """Return the variables of the sandbox's own processes, the first of which a program in it can read."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def command(limits: SandboxLimits, filter_fd: int, group: Path | None = None) -> list[str]:
    """Return the command that reads a Python program from its standard input and runs it in a sandbox.

    Args:
        filter_fd: open in it; its filter of system calls is read from there.
        group: the control group that it is put into, if any.
    """
    if group is not None:
        # As the first thing, with the rights of this process; no step forks.
        entered = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", entered, str(group), *command(limits, filter_fd)]
    prefix = os.path.realpath(sys.base_prefix)
    if os.getuid() != 0:
        return _sandboxed(prefix, prefix, limits, filter_fd)
    # A user without privileges cannot reach an interpreter in root's home: it is shown in another place first, to this
    # process alone. No step forks, so that the process which is started is the one that ends with its parent.
    user = str(_FIRST_UID + os.getpid() % 65536 * _UIDS_PER_PROCESS + next(_calls) % _UIDS_PER_PROCESS)
    staged = ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" {_STAGE} && exec "$@"', prefix]
    as_user = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    return [*staged, *as_user, "--no-new-privs", "--", *_sandboxed(prefix, _STAGE, limits, filter_fd)]


def _sandboxed(prefix: str, source: str, limits: SandboxLimits, filter_fd: int) -> list[str]:
    """Return the command of a sandbox in which the folder `source` is seen as `prefix`, that of the interpreter."""
    python = os.path.join(prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    interpreter = [] if Path(prefix) == Path("/usr") else ["--ro-bind", source, prefix]
    variables = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--seccomp", str(filter_fd)),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv"),
        *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        *("--ro-bind", "/usr", "/usr", *_system_folders(), *interpreter),
        *("--proc", "/proc", "--dev", "/dev", "--size", "4096", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(limits.files), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/", "--"),
        *("prlimit", f"--nproc={limits.processes}", f"--as={limits.memory}", f"--cpu={math.ceil(limits.seconds)}"),
        *(f"--fsize={limits.files}", "--core=0", "--nofile=64", "--memlock=0", "--msgqueue=0"),
        *("--rtprio=0", "--nice=0", "--"),
        *(python, "-I", "-S", "-c", _READER),
    ]


def _system_folders() -> list[str]:
    """Return options that mount the program and library folders beside `/usr`; most systems have links into it."""
    options: list[str] = []
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    return options
