"""The boxes of this process: their folder, their ids, and the process that starts them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import platform
import pwd
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes.agent.boxes.box import BoxBlocked, BoxError, LiveBox
from recipes.agent.boxes.box_limits import PREFIX, BoxGroup, BoxMemory, group_place, remove_left_over
from recipes.agent.boxes.holder import LAYERS, MESSAGE, BoxSpec
from recipes.agent.boxes.kernel import Ids
from recipes.agent.boxes.starter import LOCK
from recipes.agent.boxes.trees import remove_tree
from recipes.language.sandbox import program_limits
from rlinf_core import ConfigError
from rlinf_core.waiting import spell_seconds

DEFAULT_FOLDER: Final = Path("~/.rlinf/boxes")
MIB: Final = 1 << 20
# The maximum layers of the kernel's overlay besides the box's own, and of an archive, to which builds add some.
_MOST_LOWER, MOST_LAYERS = 499, 480
# Under root, boxes have ids that no system assigns to its users, different from those of the program sandbox.
_FIRST_ID: Final = 1_900_000_000
_IDS: Final = 65_536
_START_SECONDS: Final = 60.0
# The maximum seconds between the creation of a folder and of its lock.
_BIRTH_SECONDS: Final = 60.0
# File systems that cannot hold an overlay's upper layer: a container's root, and network file systems.
_NO_UPPER: Final = ("overlay", "nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse", "9p", "vfat", "exfat")
# The starter finds its modules without loading the packages above them.
_STARTER: Final = """
import sys, types
for name, path in zip(("recipes", "recipes.agent", "recipes.agent.boxes"), sys.argv[2:]):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [path]
from recipes.agent.boxes.starter import main
main(int(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """Limits of a box.

    Attributes:
        memory: the bytes of all processes together.
        processes: the processes of a user of the box at once, including threads.
        disk: the bytes that the box may write.
        files: the files and folders that the box may create.
        cpus: the number of processors, if control groups of version 2 are delegated; 0: all.
        output: the bytes to keep of each output of a command.
    """

    memory: int = 2048 * MIB
    processes: int = 512
    disk: int = 10240 * MIB
    files: int = 250_000
    cpus: float = 0.0
    output: int = MIB


class BoxHost:
    """The boxes of this process, and its part of the node's memory for boxes.

    Args:
        folder: the folder of all boxes and images of this user on this node; its file system must support the upper
            layer of an overlay, which network file systems do not.
        memory: the MiB for all boxes of the node.

    Raises:
        ConfigError: the folder cannot be created, or the machine has no filter of system calls.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        filter_steps = program_limits.call_filter()
        if filter_steps is None:
            raise ConfigError(
                f"boxes have no filter of system calls for `{platform.machine()}` machines",
                help="place agents on x86_64 or aarch64 machines",
            )
        self.folder = folder.expanduser().absolute()
        self.ids = own_ids()
        self._filter = filter_steps.hex()
        self._group_place = group_place()
        self._starter: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._sweeping: asyncio.Task[list[str]] | None = None
        self._live: dict[LiveBox, str] = {}
        try:
            for name in ("", "live", "layers"):
                self._make(self.folder / name)
        except OSError as error:
            help = "name another folder by `agent.environment.options.box_folder` or `rlinf tasks --boxes`"
            raise ConfigError(f"`{self.folder}` cannot hold boxes", why=error.strerror, help=help) from None
        self.admission = BoxMemory(self.folder / "memory", memory)

    def _make(self, folder: Path) -> None:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self.ids["how"] != "written":
            return
        # The box's root is another user, who must pass through the folder to its layers.
        folder.chmod(folder.stat().st_mode & 0o777 | 0o011)
        if folder != self.folder:
            os.chown(folder, self.ids["users"][0], self.ids["groups"][0])

    @property
    def bounds_memory(self) -> bool:
        """Whether control groups bound a box's memory; if not, the holder checks it five times a second."""
        return self._group_place is not None

    @asynccontextmanager
    async def box(
        self,
        layers: Sequence[Path],
        limits: BoxLimits,
        *,
        env: Mapping[str, str] | None = None,
        workdir: str = "/",
        folders: Sequence[str] = (),
        title: str = "a box",
    ) -> AsyncGenerator[LiveBox]:
        """Start a box, and end it afterwards. Its memory must have been admitted.

        Args:
            layers: the folders of the image, uppermost first.
            env, workdir: environment variables and working folder of commands.
            folders: folders to create in the box if missing.
            title: the description in `rlinf ps`.

        Raises:
            BoxBlocked: a layer has something else where `workdir` or one of `folders` belongs.
            BoxError: the box cannot be created.
        """
        name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        group = self._new_group(name, limits)
        try:
            box = await self._start(name, layers, limits, group, env or {}, workdir, folders)
        except BaseException:
            if group is not None:
                group.remove()
            raise
        self._live[box] = title
        try:
            await self._started(box)
            yield box
        finally:
            try:
                await asyncio.shield(box.close())
            finally:
                del self._live[box]

    def shown(self) -> list[str]:
        """Return a summary line, and a line with the running commands of each box that is not finished.

        Boxes with a running command come first.
        """
        live = [(box, title) for box, title in self._live.items() if not box.finished]
        live.sort(key=lambda one: not one[0].commands)
        waiting = self.admission.waiting
        if not live and not waiting:
            return []
        memory = f"{self.admission.free()} of {self.admission.memory} MiB for boxes are free"
        late = f", {waiting} task{'s wait' if waiting > 1 else ' waits'} for memory" if waiting else ""
        now = time.monotonic()
        boxes = [
            f"{title} for {spell_seconds(now - box.began)}: {'; '.join(list(box.commands.values())) or 'idle'}"
            for box, title in live
        ]
        return [f"holds {len(live)} box{'es' if len(live) != 1 else ''}, {memory}{late}", *boxes]

    async def _started(self, box: LiveBox) -> None:
        try:
            await box.started()
        except BoxBlocked:
            raise
        except BoxError as error:
            kind = file_system_of(self.folder) if "mount overlay" in str(error) else ""
            if kind not in _NO_UPPER:
                raise
            raise BoxError(
                f"{error}: `{self.folder}` is on a file system of the kind `{kind}`, which cannot hold what a box"
                " writes; name a folder on a disk, in a container on a volume, by"
                " `agent.environment.options.box_folder` or `rlinf tasks --boxes`"
            ) from None

    def kept(self, box: LiveBox) -> Path:
        """Return the layer that `LiveBox.finish` made, which exists until the box is closed."""
        return self.folder / "live" / box.name / "kept"

    async def unpack(self, archive: int, folder: Path, most_bytes: int, most_files: int) -> int:
        """Unpack a layer from an open file, as root of a namespace whose only folder is the layer's.

        Returns:
            The bytes of its files.

        Raises:
            BoxError: the file is no archive, leads out of the folder, or is too large.
        """
        request = {"do": "unpack", "folder": str(folder), "most_bytes": most_bytes, "most_files": most_files}
        return int((await self._job(request, archive))["bytes"])

    async def pack(self, folder: Path, archive: int) -> None:
        """Write a layer as a tar archive into an open file.

        Raises:
            BoxError: the layer cannot be read, or the disk is full.
        """
        await self._job({"do": "pack", "folder": str(folder)}, archive)

    async def remove(self, folder: Path) -> None:
        """Remove a folder whose files belong to ids of boxes."""
        with contextlib.suppress(BoxError):
            await self._job({"do": "remove", "folder": str(folder)})
        await asyncio.to_thread(remove_tree, str(folder))

    async def sweep(self) -> list[str]:
        """Remove the remains of boxes whose holders were killed, and return their names."""
        removed: list[str] = []
        live = self.folder / "live"
        for folder in live.glob(f"{PREFIX}*"):
            if _is_left_over(folder):
                await self.remove(folder)
                removed.append(folder.name)
        if self._group_place is not None:
            remove_left_over(self._group_place, {folder.name for folder in live.glob(f"{PREFIX}*")}, _BIRTH_SECONDS)
        return removed

    async def close(self) -> None:
        """End the starter; live boxes end with their leases."""
        if self._sweeping is not None and self._sweeping is not asyncio.current_task():
            self._sweeping.cancel()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._starter is not None:
            await asyncio.to_thread(self._starter.wait)
            self._starter = None

    def _new_group(self, name: str, limits: BoxLimits) -> BoxGroup | None:
        if self._group_place is None:
            return None
        try:
            return BoxGroup(self._group_place, name, limits.memory, limits.processes, limits.cpus)
        except OSError as error:
            raise BoxError(f"the control group of a box cannot be made: {error}") from None

    async def _start(
        self,
        name: str,
        layers: Sequence[Path],
        limits: BoxLimits,
        group: BoxGroup | None,
        env: Mapping[str, str],
        workdir: str,
        folders: Sequence[str],
    ) -> LiveBox:
        live = self.folder / "live"
        # The overlay accepts a folder only once, and the uppermost occurrence hides the others anyway.
        distinct = list(dict.fromkeys(layers))
        if len(distinct) > _MOST_LOWER:
            raise BoxError(f"a box of {len(distinct)} layers cannot be started: {_MOST_LOWER} is the most")
        spec: BoxSpec = {
            "ids": self.ids,
            "layers": [os.path.relpath(layer, live / name / LAYERS) for layer in distinct],
            "workdir": workdir,
            "folders": list(folders),
            "limits": {
                "NPROC": limits.processes,
                "FSIZE": limits.disk,
                "DATA": limits.memory,
                **dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE", "RTPRIO", "NICE"), 0),
            },
            "memory": 0 if group is not None else limits.memory,
            "disk": limits.disk,
            "files": limits.files,
            "shared_memory": min(64 * MIB, limits.memory // 4),
            "filter": self._filter,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            request = {"do": "box", "folder": str(live / name), "spec": spec}
            await self._send(request, theirs.fileno(), *([group.entrance] if group is not None else []))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return LiveBox(name, ours, env=env, workdir=workdir, output_limit=limits.output, group=group)

    async def _job(self, request: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with ours:
            try:
                await self._send({**request, "ids": self.ids}, theirs.fileno(), *descriptors)
            finally:
                theirs.close()
            said = await asyncio.get_running_loop().sock_recv(ours, MESSAGE)
        answer: dict[str, Any] = json.loads(said) if said else {"failed": "the process that did it was ended"}
        if "failed" in answer:
            raise BoxError(answer["failed"])
        return answer

    async def _send(self, request: dict[str, Any], *descriptors: int) -> None:
        data = json.dumps(request).encode()
        if len(data) > MESSAGE:
            raise BoxError("what a box is made of is too much for a message")
        for _ in range(2):
            control = await self._running()
            try:
                socket.send_fds(control, [data], descriptors)
                return
            except (BrokenPipeError, ConnectionError):
                # The starter was killed: start another.
                await self.close()
            except OSError as error:
                raise BoxError(f"the process that starts boxes cannot be asked: {error.strerror}") from None
        raise BoxError("the process that starts boxes ends again and again")

    async def _running(self) -> socket.socket:
        """Return the socket of the starter, and start it if necessary."""
        async with self._starting:
            if self._control is None:
                self._control, self._starter = await asyncio.to_thread(_start_starter)
                # Remove the remains of earlier processes.
                self._sweeping = asyncio.create_task(self.sweep())
            return self._control


def _start_starter() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    here = Path(__file__).parent
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        folders = (here.parents[1], here.parent, here)
        command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _STARTER, str(theirs.fileno())]
        process = subprocess.Popen(
            [*command, *map(str, folders)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
    ours.settimeout(_START_SECONDS)
    try:
        ready = ours.recv(1)
    except TimeoutError:
        ready = b""
    if not ready:
        ours.close()
        process.kill()
        process.wait()
        raise BoxError("the process that starts boxes did not start")
    ours.settimeout(None)
    return ours, process


def file_system_of(folder: Path) -> str:
    """Return the kernel's name of a folder's file system; "": unknown."""
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            if words[2] == f"{os.major(device)}:{os.minor(device)}":
                return words[words.index("-") + 1]
    return ""


def _is_left_over(folder: Path) -> bool:
    try:
        with open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        # The box is being created, or was being removed.
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime > _BIRTH_SECONDS
        return False


def own_ids() -> Ids:
    """Return the ids of this user's boxes.

    Root's boxes get ids that nobody has. Another user's boxes get ids from `/etc/subuid`; without these, a box has only
    the user root, who is the user outside.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        return {"how": "written", "users": (_FIRST_ID, _IDS), "groups": (_FIRST_ID, _IDS)}
    users, groups = (_lent(Path(f"/etc/sub{kind}"), uid) for kind in ("uid", "gid"))
    if users and groups and shutil.which("newuidmap") and shutil.which("newgidmap"):
        return {"how": "lent", "users": users, "groups": groups}
    return {"how": "single", "users": (uid, 1), "groups": (gid, 1)}


def _lent(path: Path, uid: int) -> tuple[int, int] | None:
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
        rows = [line.strip().split(":") for line in path.read_text(encoding="utf-8").splitlines()]
        return next((int(row[1]), int(row[2])) for row in rows if len(row) == 3 and row[0] in names)
    except (OSError, KeyError, ValueError, StopIteration):
        return None
