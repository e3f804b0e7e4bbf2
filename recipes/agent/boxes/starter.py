"""The process that starts boxes, with the holder's modules loaded, so that a box costs a fork, not an interpreter.

One starter serves all boxes of a process, and ends with it. A running box has its own lease and does not need it. It
uses only the standard library.
"""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import gc
import io
import json
import os
import signal
import socket
import sys
import tarfile
from typing import IO, Any, Final, cast

from recipes.agent.boxes import holder, kernel, layer_files, trees

LOCK: Final = "lock"
_NEW_LOCK: Final = "lock.new"
_NAME: Final = b"rlinf-boxes"
_FAILED: Final = 1


def main(descriptor: int) -> None:
    """Serve requests from a socket until it closes."""
    control = socket.socket(fileno=descriptor)
    kernel.set_name(_NAME)
    _load_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Keep memory pages with objects shared between this process and its forks.
    gc.freeze()
    control.send(b"1")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, holder.MESSAGE, 3)
        if not message:
            return
        request = json.loads(message)
        if os.fork() == 0:
            code = _FAILED
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _work(request, descriptors)
                code = 0
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)


def _load_all() -> None:
    """Load everything that would be loaded lazily, as within a box it would come from the box's files."""
    tarfile.open(fileobj=io.BytesIO(), mode="w|gz").close()
    for name in ("ascii", "utf-8", "latin-1", "idna"):
        codecs.lookup(name)
    ctypes.get_errno()


def _work(request: dict[str, Any], descriptors: list[int]) -> None:
    lease = socket.socket(fileno=descriptors[0])
    lease.setblocking(True)
    try:
        if request["do"] == "box":
            _hold(request, lease, descriptors[1] if len(descriptors) > 1 else None)
        elif request["do"] == "unpack":
            _unpack(request, lease, descriptors[1])
        elif request["do"] == "pack":
            _pack(request, lease, descriptors[1])
        else:
            _remove(request, lease)
    except Exception as error:  # noqa: BLE001 - the owner reports whatever it is
        lease.send(json.dumps({"failed": layer_files.why(error)}).encode())


def _hold(request: dict[str, Any], lease: socket.socket, group: int | None) -> None:
    spec, folder = cast("holder.BoxSpec", request["spec"]), request["folder"]
    kernel.set_name(b"rlinf-box")
    os.mkdir(folder, 0o711)
    parent = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY)
    os.chdir(folder)
    # Hold the lock while the box lives, as whoever gets it may remove the folder. So name it only once it is held.
    lock = os.open(_NEW_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(_NEW_LOCK, LOCK)
    for name in holder.FOLDERS:
        os.mkdir(name, 0o755)
        _give(name, spec["ids"])
    for number, layer in enumerate(spec["layers"]):
        os.symlink(layer, f"{holder.LAYERS}/{number}")
    _give(".", spec["ids"])
    box = holder.Holder(spec, lease, group)
    box.run()
    os.unlink(LOCK, dir_fd=_own_folder(parent, folder))
    os.rmdir(os.path.basename(folder), dir_fd=parent)


def _own_folder(parent: int, folder: str) -> int:
    return os.open(os.path.basename(folder), os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)


def _give(path: str, ids: kernel.Ids) -> None:
    """Make the box's root the owner of a path, if it is not the user of this process."""
    if ids["how"] == "written":
        os.chown(path, ids["users"][0], ids["groups"][0])


def _unpack(request: dict[str, Any], lease: socket.socket, archive: int) -> None:
    """Unpack a layer as root of a namespace with the ids of boxes, whose root folder is the layer's."""
    folder, ids = request["folder"], cast("kernel.Ids", request["ids"])
    os.mkdir(folder, 0o755)
    _give(folder, ids)
    os.chdir(folder)
    kernel.enter_namespaces(kernel.NEW_USER | kernel.NEW_MOUNTS, ids)
    os.chroot(".")
    sys.meta_path.clear()
    most, lent = (request["most_bytes"], request["most_files"]), ids["how"] != "single"
    size = layer_files.unpack(archive, "/", *most, layer=True, lent=lent)
    lease.send(json.dumps({"bytes": size}).encode())


def _pack(request: dict[str, Any], lease: socket.socket, archive: int) -> None:
    os.chdir(request["folder"])
    kernel.enter_namespaces(kernel.NEW_USER | kernel.NEW_MOUNTS, cast("kernel.Ids", request["ids"]))
    with os.fdopen(archive, "wb") as stream:
        layer_files.pack(".", cast("IO[bytes]", stream))
    lease.send(json.dumps({}).encode())


def _remove(request: dict[str, Any], lease: socket.socket) -> None:
    """Remove a folder whose files may belong to ids of boxes."""
    parent, name = os.path.split(request["folder"])
    os.chdir(parent)
    kernel.enter_namespaces(kernel.NEW_USER | kernel.NEW_MOUNTS, cast("kernel.Ids", request["ids"]))
    trees.remove_tree(name)
    lease.send(json.dumps({"gone": not os.path.lexists(name)}).encode())
