"""The process that holds a box: it creates the box, starts commands, and ends the box with everything in it.

It is outside of the box's PID namespace, so that no process within can see, trace or kill it. It ends the box when the
lease closes, a socket to the owner, which the kernel closes whenever the owner ends. The box's init dies with the
holder. It uses only the standard library, and imports nothing after it sees the box's files.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypedDict

from recipes.agent.boxes import kernel, layer_files, trees

MESSAGE: Final = 192 << 10
# The folder of links to the image's layers, with short names that fit into a mount's page of options.
LAYERS: Final = "l"
FOLDERS: Final = ("upper", "work", "root", LAYERS, kernel.OWN_LAYER)
_TICK_MS: Final = 200
_DISK_SECONDS: Final = 1.0
_NO_COMMAND: Final = 126


class BoxSpec(TypedDict):
    """The description of a box, sent as JSON.

    Attributes:
        layers: the folders of the image, uppermost first, relative to the box's folder `LAYERS`.
        workdir: the folder of commands, created in the box if missing.
        folders: further folders, created if missing, in which every user of the box may write.
        limits: the limits of each command by names of `resource`, without `RLIMIT_`.
        memory: the bytes of all processes together, checked here; 0 if a control group bounds them.
        disk: the bytes that the box may write.
        files: the files and folders that the box may create.
        shared_memory: the bytes of `/dev/shm`.
        filter: the filter of system calls, in hexadecimal.
    """

    ids: kernel.Ids
    layers: list[str]
    workdir: str
    folders: list[str]
    limits: dict[str, int]
    memory: int
    disk: int
    files: int
    shared_memory: int
    filter: str


class Holder:
    """The holder of one box; its current folder is the box's.

    Args:
        spec: the description of the box.
        lease: the socket to the owner.
        group: the descriptor of a control group's `cgroup.procs`, open for writing; None: no group.
    """

    def __init__(self, spec: BoxSpec, lease: socket.socket, group: int | None) -> None:
        self._spec, self._lease, self._group = spec, lease, group
        self._filter = bytes.fromhex(spec["filter"])
        self._init = 0
        self._commands: dict[int, int] = {}
        self._peak = 0
        self._next_watch = self._next_disk = 0.0
        self._counting: Iterator[tuple[int, int]] | None = None
        self._over = ""
        # The time at which the last command ended, in nanoseconds since 1970.
        self._last_end = 0

    def run(self) -> None:
        """Make the box, serve the lease until it closes, and end the box."""
        self._own_folder, self._upper = (os.open(name, trees.FOLDER) for name in (".", "upper"))
        try:
            self._make()
            self._say(started=os.getpid())
            self._serve()
        except kernel.BlockedFolder as error:
            self._say(blocked=str(error))
        except OSError as error:
            self._say(failed=layer_files.why(error))
        finally:
            self._end_init()
            self._remove_files()

    # Making

    def _make(self) -> None:
        kernel.enter_namespaces(kernel.NEW_ALL, self._spec["ids"])
        socket.sethostname(kernel.HOST_NAME)
        kernel.loopback_up()
        kernel.mount_root(LAYERS, len(self._spec["layers"]), self._spec["shared_memory"])
        # From here on, the visible files are the box's: import nothing.
        sys.meta_path.clear()
        sys.path.clear()
        # The kernel allows a new /proc only while another complete one is visible, so before the old root is left.
        go = self._start_init()
        kernel.change_root()
        for folder in self._spec["folders"]:
            kernel.make_folder(folder)
            os.chmod(folder, 0o777)
        kernel.make_folder(self._spec["workdir"])
        os.write(go, b"1")
        os.close(go)

    def _start_init(self) -> int:
        """Start the box's first process, and return the pipe to tell it that the box is ready."""
        said_reader, said_writer = os.pipe()
        go_reader, go_writer = os.pipe()
        self._init = os.fork()
        if self._init == 0:
            try:
                self._be_init(said_writer, go_reader)
            finally:
                os._exit(1)
        os.close(said_writer)
        os.close(go_reader)
        said = os.read(said_reader, 500)
        os.close(said_reader)
        if said != b"1":
            raise OSError(f"the first process of the box: {said.decode(errors='replace') or 'ended'}")
        return go_writer

    def _be_init(self, said: int, go: int) -> None:
        try:
            kernel.die_with_parent()
            kernel.set_name(b"rlinf-box-init")
            kernel.mount("proc", "proc", "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
            self._enter_group()
            # Forbid namespaces within, whose root would have access to more of the kernel.
            with open("proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:
                file.write("0")
            # Close other descriptors before any command could see them.
            said, go = kernel.close_others(said, go)
            os.write(said, b"1")
        except OSError as error:
            os.write(said, str(error).encode()[:500])
            return
        os.read(go, 1)
        os.chdir("/")
        kernel.close_from(0)
        kernel.drop_capabilities()
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                signal.sigwait([signal.SIGCHLD])

    def _enter_group(self) -> None:
        if self._group is not None:
            os.write(self._group, b"0")

    # Serving

    def _serve(self) -> None:
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _wake_up)
        signal.set_wakeup_fd(wake_writer)
        poll = select.poll()
        poll.register(self._lease, select.POLLIN)
        poll.register(wake_reader, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(self._tick_ms if self._init else None):
                if descriptor == wake_reader:
                    os.read(wake_reader, 4096)
                elif not self._answer():
                    return
            self._reap()
            if self._init and time.monotonic() >= self._next_watch:
                self._watch()
                self._next_watch = time.monotonic() + self._tick_ms / 1000

    @property
    def _tick_ms(self) -> int:
        """The milliseconds between two checks of the box; idle boxes with control groups are checked rarely."""
        looks_often = self._spec["memory"] or self._counting is not None
        return _TICK_MS if looks_often else int(1000 * _DISK_SECONDS)

    def _answer(self) -> bool:
        """Answer one request; return False if the lease is closed."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._lease, MESSAGE, 3)
        except OSError:
            return False
        if not message:
            return False
        request: dict[str, Any] = json.loads(message)
        number = request.pop("id")
        verbs: dict[str, Callable[..., None]] = {
            "exec": self._exec,
            "kill": self._kill,
            "put": self._put,
            "finish": self._finish,
            "read": self._read,
        }
        try:
            verbs[request.pop("do")](number, descriptors, **request)
        except OSError as error:
            self._say(id=number, error=layer_files.why(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _say(self, **words: object) -> None:
        try:
            self._lease.send(json.dumps(words).encode())
        except OSError as error:
            # An owner who is gone has closed the lease. Report a message that is too long.
            if error.errno == errno.EMSGSIZE:
                raise

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._init:
                self._init = 0
                self._ended(f"its first process ended with status {os.waitstatus_to_exitcode(status)}")
            number = self._commands.pop(pid, None)
            if number is not None:
                self._last_end = time.time_ns()
                cpu = usage.ru_utime + usage.ru_stime
                self._say(id=number, status=os.waitstatus_to_exitcode(status), cpu=cpu)

    def _ended(self, why: str) -> None:
        self._over = self._over or why
        self._say(over=self._over)

    def _exec(
        self, number: int, descriptors: list[int], argv: list[str], env: dict[str, str], cwd: str, user: str
    ) -> None:
        if not self._init:
            raise OSError(f"the box has ended: {self._over}")
        child = os.fork()
        if child:
            self._commands[child] = number
            return
        try:
            self._be_command(descriptors, argv, env, cwd, user)
        except Exception as error:  # noqa: BLE001 - the command's errors say why it does not run
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            os.write(2, f"{argv[0]}: {why}\n".encode())
        finally:
            os._exit(_NO_COMMAND)

    def _be_command(self, descriptors: list[int], argv: list[str], env: Mapping[str, str], cwd: str, user: str) -> None:
        os.setsid()
        self._enter_group()
        kernel.close_others(*descriptors)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for name, value in self._spec["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        uid, gid, groups, home = kernel.find_user(user)
        os.chdir(cwd)
        kernel.filter_calls(self._filter)
        kernel.drop_capabilities()
        if uid or gid:
            if self._spec["ids"]["how"] != "single":
                os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        os.execvpe(argv[0], argv, {"HOME": home, **env})

    def _kill(self, number: int, descriptors: list[int], command: int) -> None:
        for pid in [pid for pid, known in self._commands.items() if known == command]:
            for kill in (os.killpg, os.kill):
                try:
                    kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    # The command has no process group yet.
                    continue

    def _put(self, number: int, descriptors: list[int], target: str, most: int) -> None:
        """Unpack an archive in a process of the box, which itself reports errors."""
        if not self._init:
            raise OSError(f"the box has ended: {self._over}")
        pid = os.fork()
        if pid:
            self._commands[pid] = number
            return
        code = 1
        try:
            # The target may be a link to `/proc/self/fd`, so keep no folder of the host open. A socket cannot be
            # opened.
            archive, reply = kernel.close_others(descriptors[0], self._lease.fileno())
            code = _unpack(archive, reply, target, most, number)
        finally:
            os._exit(code)

    def _watch(self) -> None:
        """End a box that exceeds its disk limit, or its memory limit if no control group bounds it."""
        limit = self._spec["memory"]
        if limit:
            used = _memory_use(limit)
            self._peak = max(self._peak, used)
            if used > limit:
                self._end_over(f"its processes took more memory than {limit >> 20} MiB")
        if self._init and (self._counting is not None or time.monotonic() >= self._next_disk):
            self._watch_disk()

    def _watch_disk(self) -> None:
        """Continue counting what the box has written, for at most a tenth of the time, to leave time for requests."""
        most, most_files = self._spec["disk"], self._spec["files"]
        if self._counting is None:
            self._counting = layer_files.disk_use(self._upper, most, most_files)
        until = time.monotonic() + _TICK_MS / 10_000
        for used, files in self._counting:
            if used > most:
                self._end_over(f"it wrote more than {most >> 20} MiB")
            elif files > most_files:
                self._end_over(f"it made more than {most_files} files")
            elif time.monotonic() > until:
                return
        self._counting = None
        self._next_disk = time.monotonic() + _DISK_SECONDS

    def _end_over(self, why: str) -> None:
        self._ended(why)
        self._end_init()

    # Ending

    def _finish(
        self, number: int, descriptors: list[int], keep: list[str] | None, never: list[str], grace: float
    ) -> None:
        """End all processes, and make the layer `kept` from files written below the folders `keep`.

        Processes may end by themselves within `grace` seconds; the reply has the number of those that did not.
        """
        until = time.monotonic() + grace
        while (left := self._running()) and time.monotonic() < until:
            time.sleep(0.01)
        self._end_init()
        kept = layer_files.Kept([], 0, whole=True)
        if keep is not None:
            kept = layer_files.keep_only(self._own_folder, keep, never, self._spec["files"])
        if not kept.whole:
            self._ended(f"it made more than {self._spec['files']} files")
        self._over = self._over or "it was finished"
        self._say(id=number, dropped=kept.dropped, dropped_count=kept.number, left=left, peak=self._peak)

    def _running(self) -> int:
        """Return the number of live processes in the box, except commands of the owner."""
        if not self._init:
            return 0
        return max(0, sum(_field(f"/proc/{pid}/statm", 1) > 0 for pid in _processes()) - len(self._commands))

    def _read(self, number: int, descriptors: list[int], path: str, most: int) -> None:
        """Send a regular file's first bytes, after all processes have ended, and whether it changed after the last
        command."""
        if self._init:
            raise OSError("processes of the box still run")
        written = layer_files.read_plain(path, most)
        data, late = (None, False) if written is None else (written.data.hex(), written.changed > self._last_end > 0)
        self._say(id=number, data=data, late=late)

    def _end_init(self) -> None:
        """Kill all processes of the box, and wait until they have ended."""
        signal.set_wakeup_fd(-1)
        if self._init:
            os.kill(self._init, signal.SIGKILL)
            self._init = 0
        # The first process can end only after all others, some of which this process must reap.
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            number = self._commands.pop(pid, None)
            if number is not None:
                self._say(id=number, status=os.waitstatus_to_exitcode(status), cpu=0.0)

    def _remove_files(self) -> None:
        for folder in (*FOLDERS, "kept"):
            trees.remove_tree(folder, self._own_folder)


def _unpack(archive: int, reply: int, target: str, most: int, number: int) -> int:
    """Unpack an archive, and return an exit status; an error is sent as the reply to the request."""
    try:
        layer_files.unpack(archive, target, most, 1 << 20, layer=False, lent=False)
    except Exception as error:  # noqa: BLE001 - the owner reports whatever it is
        os.write(reply, json.dumps({"id": number, "error": layer_files.why(error)}).encode())
        return 1
    return 0


def _wake_up(_signal: int, _frame: object) -> None:
    """Do nothing: the signal only has to end a wait."""


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _memory_use(limit: int) -> int:
    """Return the memory of the box's processes in bytes; shared pages count once if that matters for the limit."""
    page, pids = resource.getpagesize(), _processes()
    total = sum(_field(f"/proc/{pid}/statm", 1) for pid in pids) * page
    if total <= limit:
        return total
    return sum(_proportional(f"/proc/{pid}/smaps_rollup") for pid in pids)


def _field(path: str, place: int) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[place])
    except (OSError, IndexError, ValueError):
        return 0


def _proportional(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:")), 0)
    except OSError:
        return 0
