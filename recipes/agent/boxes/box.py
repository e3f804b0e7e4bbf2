"""The owner's side of a box, which runs commands, puts files and collects results."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import socket
import tarfile
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from recipes.agent.boxes.box_limits import BoxGroup
from recipes.agent.boxes.holder import MESSAGE

# The `PATH` of commands where an image sets none.
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The bytes of a message besides the command.
_HEAD: Final = 1 << 10
_NOT_STARTED: Final = 126
_REPLY_SECONDS: Final = 60.0
# The time limit of requests that walk through all files, in seconds.
_FILES_SECONDS: Final = 300.0
_PUT_BYTES: Final = 1 << 30
READ_BYTES: Final = 64 << 10
_leases: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class BoxError(Exception):
    """A failure of a box's machinery, not of anything that ran in it."""


class BoxBlocked(BoxError):  # noqa: N818 - says what the layers have
    """A box whose layers have something else in place of a folder that it needs, so that its start always fails."""


class BoxEnded(Exception):  # noqa: N818 - what the commands of the box did, and no error of this program
    """The end of a box that its commands caused, by exceeding a limit or breaking the box."""


class Done(NamedTuple):
    """The end of a command.

    Attributes:
        status: the exit status; negative: the signal that ended the command.
        output, errors: the first bytes of each, up to the box's `output_limit`.
        timed_out: whether the command was killed at its time limit.
        cpu: the seconds of processor time, including those of ended children.
    """

    status: int
    output: bytes
    errors: bytes
    timed_out: bool
    cpu: float


class Left(NamedTuple):
    """The remains of a box.

    Attributes:
        dropped: paths that were not kept, as many as fit into a message.
        dropped_count: the number of all dropped paths.
        running: the number of processes at the end, besides commands of the owner.
        peak: the peak memory in bytes; 0: unknown.
    """

    dropped: tuple[str, ...]
    dropped_count: int
    running: int
    peak: int


class Written(NamedTuple):
    """A file of a finished box.

    Attributes:
        data: the first bytes of the file.
        late: whether the file, or a folder of its path, was changed after the last command ended; keeping a layer
            changes its files.
    """

    data: bytes
    late: bool


class LiveBox:
    """A running box. Use `BoxHost.box` to create one.

    Args:
        name: the name of the box's folder.
        lease: the socket to the box's holder.
        env: the environment variables of all commands.
        workdir: the working folder of commands.
        output_limit: the bytes to keep of each output of a command.

    Attributes:
        over: why commands ended the box; "": they did not.
        finished: whether the owner has ended all processes; the files still exist.
        began: the time of creation, by the monotonic clock, in seconds.
        commands: the running commands, by number.
    """

    def __init__(
        self,
        name: str,
        lease: socket.socket,
        *,
        env: Mapping[str, str],
        workdir: str,
        output_limit: int,
        group: BoxGroup | None,
    ) -> None:
        self.name, self.over, self.began = name, "", time.monotonic()
        self.finished = False
        self.commands: dict[int, str] = {}
        self._lease, self._env, self._workdir, self._group = lease, dict(env), workdir, group
        self._output_limit = output_limit
        self._broke = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _leases.add(lease)
        self._started = self._expect(0)
        asyncio.get_running_loop().add_reader(lease, self._heard)

    async def started(self) -> None:
        """Wait until the box has started.

        Raises:
            BoxBlocked: the box cannot be made of these layers.
            BoxError: the box could not be made.
        """
        await self._reply(self._started)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str = "",
        timeout: float,
        most: int | None = None,
    ) -> Done:
        """Run a command, and kill it when cancelled. Its background processes continue until the box ends.

        Args:
            user: a name or number in the box; "": root.
            timeout: the time limit in seconds.
            most: the bytes to keep of each output; None: the box's limit.

        Raises:
            BoxEnded: commands ended the box.
            BoxError: the holder is gone.
        """
        if not (cwd or self._workdir).startswith("/"):
            raise ValueError(f"a command runs in an absolute folder, not in `{cwd or self._workdir}`")
        request: dict[str, Any] = {
            "argv": list(argv),
            "env": {"PATH": PATH, **self._env, **(env or {})},
            "cwd": cwd or self._workdir,
            "user": user,
        }
        if len(_written(request)) > MESSAGE - _HEAD:
            # The message of a shell.
            return Done(_NOT_STARTED, b"", b"Argument list too long\n", timed_out=False, cpu=0.0)
        kept = self._output_limit if most is None else most
        output, errors = _Drain(kept), _Drain(kept)
        try:
            with open(os.devnull, "rb") as nothing:
                number, done = self._ask((nothing.fileno(), output.writer, errors.writer), do="exec", **request)
            self.commands[number] = argv[-1]
            output.begin()
            errors.begin()
            said, timed_out = await self._ended(number, done, timeout)
        finally:
            texts = output.end(), errors.end()
        if "error" in said:
            raise BoxEnded(said["error"])
        if self.over and said["status"] < 0:
            raise BoxEnded(f"the box has ended: {self.over}")
        return Done(said["status"], *texts, timed_out, said["cpu"])

    async def _ended(
        self, number: int, done: asyncio.Future[dict[str, Any]], timeout: float
    ) -> tuple[dict[str, Any], bool]:
        """Wait for the end of a command, and return it with whether the time was up."""
        try:
            ended, _ = await asyncio.wait({done}, timeout=timeout)
        except asyncio.CancelledError:
            with contextlib.suppress(BoxError):
                self._send((), do="kill", id=-1, command=number)
            raise
        finally:
            del self.commands[number]
        if not ended:
            self._send((), do="kill", id=-1, command=number)
        return await self._reply(done), not ended

    async def put(self, archive: IO[bytes], target: str) -> None:
        """Unpack an open tar archive below a folder, as root. No process of a policy may run there.

        Raises:
            BoxError: the archive cannot be unpacked.
        """
        _, done = self._ask((archive.fileno(),), do="put", target=target, most=_PUT_BYTES)
        said = await self._reply(done, _FILES_SECONDS)
        if said.get("status") != 0:
            why = said.get("error") or "the process that did it was ended"
            raise BoxError(f"an archive could not be unpacked into {target}: {why}")

    async def put_files(self, members: Iterable[tuple[str, Path]], target: str, mode: int | None = None) -> None:
        """Write files, folders and links below a folder, owned by root.

        Args:
            members: the paths, each with its name in the folder.
            mode: the permissions of files; None: unchanged.

        Raises:
            BoxError: the files cannot be read or written, or exceed 1 GiB together.
        """
        with tempfile.TemporaryFile() as archive:
            try:
                await asyncio.to_thread(_pack, archive, members, mode)
            except OSError as error:
                raise BoxError(f"`{error.filename}` cannot be put into a box: {error.strerror}") from None
            await self.put(archive, target)

    async def finish(self, keep: Sequence[str] | None = None, never: Sequence[str] = (), *, grace: float = 0.0) -> Left:
        """End all processes. Files written below the folders `keep` become a layer, `kept`.

        Args:
            keep: folders and files to keep; None: no layer is made.
            never: paths to drop even there.
            grace: the seconds in which processes may end by themselves.

        Raises:
            BoxError: the holder is gone, or the disk is full.
        """
        keeping = None if keep is None else list(keep)
        _, done = self._ask((), do="finish", keep=keeping, never=list(never), grace=grace)
        said = await self._reply(done, _FILES_SECONDS)
        self.finished = True
        if "error" in said:
            raise BoxError(f"what the box left could not be kept: {said['error']}")
        peak = max(said["peak"], self._group.peak if self._group is not None else 0)
        return Left(tuple(said["dropped"]), said["dropped_count"], said["left"], peak)

    async def read(self, path: str) -> Written | None:
        """Return the first 64 KiB of a regular file of a finished box; None if there is none, or its path has a link.

        Raises:
            BoxError: its holder is gone.
        """
        _, done = self._ask((), do="read", path=path, most=READ_BYTES)
        said = await self._reply(done)
        if "error" in said:
            raise BoxError(said["error"])
        return None if said["data"] is None else Written(bytes.fromhex(said["data"]), said["late"])

    async def close(self) -> None:
        """Close the lease, and wait until the holder has ended everything and removed the box's files."""
        if self._lease.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._lease.shutdown(socket.SHUT_WR)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._gone), _REPLY_SECONDS)
        finally:
            asyncio.get_running_loop().remove_reader(self._lease)
            self._lease.close()
            if self._group is not None:
                self._group.remove()

    # The lease

    def _expect(self, number: int) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        return future

    async def _reply(self, future: asyncio.Future[dict[str, Any]], seconds: float = _REPLY_SECONDS) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(asyncio.shield(future), seconds)
        except TimeoutError:
            raise BoxError(f"the holder of the box did not answer within {seconds:g} s") from None

    def _ask(self, descriptors: Sequence[int], **request: Any) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        number = next(self._numbers)
        self._send(descriptors, id=number, **request)
        return number, self._expect(number)

    def _send(self, descriptors: Sequence[int], **request: Any) -> None:
        if self._broke:
            raise BoxError(self._broke)
        try:
            socket.send_fds(self._lease, [_written(request)], descriptors)
        except OSError as error:
            raise BoxError(f"the box has no holder: {error.strerror}") from None

    def _heard(self) -> None:
        try:
            message = self._lease.recv(MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(self._lease)
            self._fail("the holder of the box has ended")
            if not self._gone.done():
                self._gone.set_result(None)
            return
        said: dict[str, Any] = json.loads(message)
        if "over" in said:
            self.over = said["over"]
        elif "failed" in said:
            self._fail(f"the box could not be made: {said['failed']}")
        elif "blocked" in said:
            self._fail(f"the box could not be made: {said['blocked']}", BoxBlocked)
        else:
            future = self._waiting.pop(said.get("id", 0), None)
            if future is not None and not future.done():
                future.set_result(said)

    def _fail(self, why: str, kind: type[BoxError] = BoxError) -> None:
        self._broke = self._broke or why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(kind(self._broke))
                # A waiter may have been cancelled.
                future.exception()
        self._waiting.clear()


class _Drain:
    """A reader that drains a pipe, so that its writer never blocks, and keeps the first bytes."""

    def __init__(self, most: int) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        # Whoever the command runs as may open it once more, as `/dev/stderr`.
        os.fchmod(self.writer, 0o622)
        self._most, self._data = most, bytearray()
        self._begun = False

    def begin(self) -> None:
        """Start reading, and close our copy of the writer's end."""
        os.close(self.writer)
        self._begun = True
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def _read(self, most: int = 1 << 18) -> bool:
        """Read once; return whether there may be more."""
        try:
            chunk = os.read(self._reader, most)
        except BlockingIOError:
            return False
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._reader)
            return False
        self._data += chunk[: max(0, self._most - len(self._data))]
        return True

    def end(self) -> bytes:
        """Return the kept bytes, and those still in the pipe."""
        if not self._begun:
            os.close(self.writer)
        while self._read() and len(self._data) < self._most:
            continue
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        return bytes(self._data)


def _written(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "replace")


def _pack(archive: IO[bytes], members: Iterable[tuple[str, Path]], mode: int | None) -> None:
    total = 0
    with tarfile.open(fileobj=archive, mode="w") as packed:
        for name, path in members:
            info = packed.gettarinfo(path, name)
            total += info.size
            if total > _PUT_BYTES:
                raise OSError(errno.EFBIG, f"with it, there are more than {_PUT_BYTES >> 20} MiB", str(path))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.isreg():
                info.mode = info.mode if mode is None else mode
                with path.open("rb") as file:
                    packed.addfile(info, file)
            else:
                packed.addfile(info)
    archive.seek(0)


def _forget_leases() -> None:
    """Close the leases in a fork of this process, so that a box ends with its owner, not with the last child."""
    for lease in list(_leases):
        lease.close()


os.register_at_fork(after_in_child=_forget_leases)
