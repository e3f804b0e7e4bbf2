"""A sandbox for Python programs that a model wrote, made of bubblewrap's namespaces and kernel limits.

A program sees its interpreter with the standard library, `/usr`, and an empty `/tmp`. It has no network, sees no other
processes and no environment variables of this one, and cannot regain privileges. Socket families other than Unix, IP
and netlink, which namespaces do not isolate, are refused. A program is killed with all that it started.

`rlinf doctor` tests the sandbox where programs would run; the last output line is a JSON record:

    python -m recipes.language.sandbox.sandbox
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
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

from recipes.language.sandbox import program_limits
from recipes.language.sandbox.program_limits import memory_groups
from rlinf_core import ConfigError
from rlinf_core.node.process_life import kills_in

MIB: Final = 1 << 20
# Exit statuses above it are signals, by the shell's convention.
_ENDED_BY: Final = 128
# The maximum output, in bytes; a program that writes more is killed.
OUTPUT_BYTES: Final = 64 * 1024
_TRIAL_SECONDS: Final = 30.0
# The kernel reports 2 when a filter is active.
_TRIAL: Final = "print(6 * 7); print(open('/proc/self/status').read().split('Seccomp:')[1].split()[0])"
# Programs that the sandbox needs, and their packages in Debian and Ubuntu.
_PROGRAMS: Final = {"bwrap": "bubblewrap", **dict.fromkeys(("unshare", "setpriv", "prlimit"), "util-linux")}
_NAMESPACES_HELP: Final = (
    "it needs bubblewrap 0.8 or newer (`bwrap --version`) and user namespaces: `sysctl user.max_user_namespaces` above"
    " 0, and on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)
# Under root, each program runs as a separate user, isolated from others and without root's exemptions from limits. No
# system assigns these numbers to its users.
_FIRST_UID: Final = 1_800_000_000
_UIDS_PER_PROCESS: Final = 256
_calls = itertools.count()
_SYSTEM_FOLDERS: Final = ("/bin", "/sbin", "/lib", "/lib64")
# A mount point that every system has; the mount is private to one process.
_STAGE: Final = "/mnt"
# The first byte says that the sandbox is ready for the program. A sandbox that is killed earlier reads nothing and
# ends, even if bubblewrap dies before its child is tied to it.
_READY: Final = b"\n"
# The program follows its length, so that its standard input can come after it. As in interactive Python, programs have
# `exit`, and the length of integers is unlimited.
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
        seconds: the CPU seconds of each process; callers must limit wall-clock time.
        memory: the bytes of each process.
        processes: the number of processes at once, including threads and the sandbox's processes.
        files: the bytes of all files together, and of the largest.
    """

    seconds: float = 5.0
    memory: int = 256 * MIB
    processes: int = 16
    files: int = 16 * MIB

    @property
    def total(self) -> int:
        """Bytes of all processes together with their kernel memory, if these can be bounded."""
        return 2 * self.memory + self.files


class SandboxError(Exception):
    """A failure to create a sandbox, so that no program ran."""


class ProgramResult(NamedTuple):
    """The result of a program: its exit status (negative: a signal), and its output, truncated if too long.

    Attributes:
        flooded: whether the program was killed for writing more than `OUTPUT_BYTES`.
        out_of_memory: whether a process was killed because all together exceeded their memory limit.
    """

    status: int
    output: str
    errors: str
    flooded: bool
    out_of_memory: bool = False


def signal_of(ran: ProgramResult) -> signal.Signals | None:
    """Return the signal that ended a program; None if it ended by itself."""
    number = -ran.status if ran.status < 0 else ran.status - _ENDED_BY
    # A program may exit with any status, also one that matches no signal.
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
        program: the text of the program.
        limits: the limits of the program.
        input: the standard input of the program.

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
        # Wait before killing: bubblewrap killed during setup leaves a process behind that waits forever.
        await _end((await starting)[0])
        raise
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise RuntimeError("the process has no pipes")
    try:
        output, errors, _ = await asyncio.gather(
            _head(process, process.stdout), _head(process, process.stderr), _feed(process.stdin, program, input)
        )
        # Drain the pipes: leftover data would keep them open.
        await process.communicate()
    finally:
        await _end(process)
    texts = [data.decode("utf-8", "replace") for data in (output, errors)]
    if not stands:
        lines = texts[1].strip().splitlines()
        raise SandboxError(lines[-1] if lines else f"it ended with status {process.returncode}")
    return ProgramResult(process.returncode or 0, *texts, flooded=max(len(output), len(errors)) > OUTPUT_BYTES)


async def _start(limits: SandboxLimits, group: Path | None) -> tuple[asyncio.subprocess.Process, bool]:
    """Return the process of a sandbox, and whether the sandbox is ready; if not, the process has ended.

    Raises:
        OSError: the system cannot start another process.
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
    """Kill a process if it still runs, and wait for its end."""
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
        # The program ended before it read everything; its status says why.
        pass


def _message(program: str, input: bytes = b"") -> bytes:
    """Return the input of the sandbox: the program's length and text, and the program's standard input."""
    text = program.encode("utf-8", "replace")
    return f"{len(text):0{_DIGITS}}".encode() + text + input


def check() -> None:
    """Run a trial program.

    Raises:
        ConfigError: the sandbox does not work on this machine.
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
    refusing = program_limits.call_filter()
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
    """Return the environment of the sandbox's processes; a program can read that of the first."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def command(limits: SandboxLimits, filter_fd: int, group: Path | None = None) -> list[str]:
    """Return the command that reads a Python program from its standard input and runs it in a sandbox.

    Args:
        filter_fd: the inherited descriptor from which the system-call filter is read.
        group: the control group for the command, if any.
    """
    if group is not None:
        # Enter the group first, with this process's rights, and without forking.
        entered = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", entered, str(group), *command(limits, filter_fd)]
    prefix = os.path.realpath(sys.base_prefix)
    if os.getuid() != 0:
        return _sandboxed(prefix, prefix, limits, filter_fd)
    # An unprivileged user cannot reach an interpreter in root's home, so a private mount shows it in another place. No
    # step forks, so that the started process is the one that dies with its parent.
    user = str(_FIRST_UID + os.getpid() % 65536 * _UIDS_PER_PROCESS + next(_calls) % _UIDS_PER_PROCESS)
    staged = ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" {_STAGE} && exec "$@"', prefix]
    as_user = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    return [*staged, *as_user, "--no-new-privs", "--", *_sandboxed(prefix, _STAGE, limits, filter_fd)]


def _sandboxed(prefix: str, source: str, limits: SandboxLimits, filter_fd: int) -> list[str]:
    """Return the command of a sandbox that shows the folder `source` as `prefix`, the interpreter's prefix."""
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
    """Return options that mount the program and library folders beside `/usr`, which most systems link into it."""
    options: list[str] = []
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    return options


def look() -> dict[str, str]:
    """Return the result of a test program for `rlinf doctor`: `verdict`, `what` and `help`."""
    try:
        check()
    except ConfigError as error:
        return {"verdict": "fault", "what": f"{error.message}: {error.why}", "help": error.help or ""}
    together = "is bounded" if memory_groups() else "is not bounded: no control group of version 2 is delegated"
    what = f"{_version()} runs programs of a model; the memory of a program's processes together {together}"
    return {"verdict": "ok", "what": what, "help": ""}


def _version() -> str:
    """Return `bubblewrap 0.8.0`."""
    program = shutil.which("bwrap") or "bwrap"
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    print(json.dumps(look()))
