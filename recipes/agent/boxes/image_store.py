"""The images of a node: each is built or loaded once, by its digest, and kept while a run uses it.

Examples and tests without images use a layer of this machine's own programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote

from pydantic import Field

from recipes.agent.boxes.boxes import DEFAULT_FOLDER, BoxHost
from recipes.agent.boxes.layer_files import disk_use
from recipes.agent.boxes.trees import opened
from rlinf_core import ConfigError
from rlinf_core.foreign.files import FileModel, read_fault, read_model
from rlinf_core.runners.storage.durable import write_whole
from rlinf_core.suggest import excerpt

_POLL_SECONDS: Final = 0.05
_DIGEST: Final = 24
_SCRATCH: Final = "scratch"
_MODE: Final = 0o600
_LONGEST_NAME: Final = 200
# The limits of an unpacked layer.
MOST_BYTES: Final = 64 << 30
MOST_FILES: Final = 4_000_000


class Image(FileModel):
    """The record of an image on this node.

    Attributes:
        digest: a digest of all that the image is made of.
        layers: the names of its layers, uppermost first.
        env, workdir, user: the variables, folder and user of commands.
    """

    digest: str
    layers: tuple[str, ...] = Field(strict=False)
    env: dict[str, str] = Field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str = ""


class ImageStore:
    """The images of this node, as used by this process's boxes.

    Args:
        boxes: the boxes of this process; images are beside them.
    """

    def __init__(self, boxes: BoxHost) -> None:
        self.boxes = boxes
        for name in ("images", "names", "locks"):
            (boxes.folder / name).mkdir(mode=0o700, exist_ok=True)
        # The locks that this process holds on the images it uses.
        self._uses: dict[str, int] = {}

    def layers(self, image: Image) -> list[Path]:
        """Return the layer folders of an image, uppermost first."""
        return [self.boxes.folder / "layers" / name for name in image.layers]

    def use(self, image: Image) -> Image:
        """Keep an image from being removed while this process lives. The caller holds its lock."""
        if image.digest not in self._uses and image.digest != _SCRATCH:
            descriptor = os.open(self._record(image.digest), os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(descriptor)
            self._uses[image.digest] = descriptor
        return image

    def close(self) -> None:
        """Release all images."""
        for descriptor in self._uses.values():
            os.close(descriptor)
        self._uses.clear()

    def find(self, digest: str) -> Image | None:
        """Return a complete image; None: this node lacks it.

        Raises:
            ConfigError: the record is damaged.
        """
        path = self._record(digest)
        try:
            return read_model(path, Image)
        except FileNotFoundError:
            return None
        except OSError as error:
            help = f"remove `{path}`: the image is made again"
            raise ConfigError(f"the record `{path}` of an image {read_fault(error)}", help=help) from None

    def check_name(self, name: str) -> None:
        """Check that an image can be loaded under a name.

        Raises:
            ConfigError: another image always has the name, or no file can.
        """
        if name in (HOST, _SCRATCH, ".", "..") or not 0 < len(quote(name, safe="")) < _LONGEST_NAME:
            help = "write a name as docker does, such as `python:3.12`"
            raise ConfigError(f"no image can be loaded as `{excerpt(name)}`", help=help)

    def named(self, name: str) -> Image | None:
        """Return the image of a name; None: unknown."""
        with contextlib.suppress(FileNotFoundError):
            return self.find((self.boxes.folder / "names" / quote(name, safe="")).read_text(encoding="ascii"))
        return None

    def add(self, image: Image, name: str | None = None) -> Image:
        """Write the record of an image whose layers exist. The caller holds the locks of both."""
        if self.find(image.digest) is None:
            # An existing file is kept, as processes that use the image hold locks on it.
            write_whole(self._record(image.digest), image.model_dump_json(indent=1), mode=_MODE)
        if name is not None:
            write_whole(self.boxes.folder / "names" / quote(name, safe=""), image.digest, mode=_MODE)
        return image

    async def base(self, name: str) -> Image:
        """Return the image that a Dockerfile or a task names, and keep it while this process lives.

        Raises:
            ConfigError: the image is not on this node, or no image can have the name.
        """
        if name == _SCRATCH:
            empty = self.boxes.folder / "layers/empty"
            empty.mkdir(exist_ok=True, mode=0o755)
            return Image(digest=_SCRATCH, layers=("empty",))
        if name == HOST:
            return await self._host()
        self.check_name(name)
        named = self.named(name)
        image = None
        if named is not None:
            async with self.alone(named.digest):
                image = self.use(named) if self.find(named.digest) is not None else None
        if image is None:
            raise ConfigError(
                f"the image `{name}` is not on this node, and is not downloaded",
                help=f"where there is docker or podman: `docker pull {name}`, `docker save {name} -o image.tar`; here:"
                f" `rlinf tasks load image.tar {name}`",
            )
        return image

    async def _host(self) -> Image:
        digest = _host_fingerprint()
        async with self.alone(digest):
            known = self.find(digest)
            if known is not None:
                return self.use(known)
            with tempfile.TemporaryFile() as archive:
                await asyncio.to_thread(_write_host_layer, archive)
                archive.seek(0)
                await self.unpack(archive.fileno(), digest)
            return self.use(self.add(Image(digest=digest, layers=(digest,), workdir="/app")))

    async def unpack(self, archive: int, layer: str) -> int:
        """Unpack an archive as a layer, replacing unfinished attempts. The caller holds the layer's lock.

        Raises:
            BoxError: the file is no archive, leads out of the folder, or is too large.
        """
        folder = self.boxes.folder / "layers" / layer
        await self._clear(folder)
        part = folder.with_name(f"{layer}.part")
        await self._clear(part)
        try:
            size = await self.boxes.unpack(archive, part, MOST_BYTES, MOST_FILES)
            part.rename(folder)
        except BaseException:
            await self._clear(part)
            raise
        return size

    async def take(self, kept: Path, layer: str) -> None:
        """Turn the files that a box left into a layer. The caller holds the layer's lock."""
        folder = self.boxes.folder / "layers" / layer
        await self._clear(folder)
        kept.rename(folder)

    async def _clear(self, folder: Path) -> None:
        if os.path.lexists(folder):
            await self.boxes.remove(folder)

    @asynccontextmanager
    async def alone(self, digest: str) -> AsyncGenerator[None]:
        """Hold the lock of an image or a layer, so that only one process of the node makes it."""
        descriptor = os.open(self.boxes.folder / "locks" / digest, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _lock(descriptor, fcntl.LOCK_EX):
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    async def prune(self, older_than: float, *, delete: bool) -> list[tuple[str, int]]:
        """Remove unused images, and layers without an image.

        Args:
            older_than: the minimum seconds since the last use.
            delete: whether to remove them, or only list them.

        Returns:
            The images' digests and sizes in bytes.
        """
        gone: list[tuple[str, int]] = []
        for path in self._records():
            async with self.alone(path.stem):
                image = self.find(path.stem)
                if image is not None and _is_unused(path, older_than):
                    gone.append((image.digest, _size(self.layers(image)[0])))
                    if delete:
                        path.unlink()
        for folder in sorted((self.boxes.folder / "layers").iterdir()) if delete else ():
            async with self.alone(folder.name.removesuffix(".part")):
                if folder.name != "empty" and not self._has(folder.name):
                    await self.boxes.remove(folder)
        return gone

    def _has(self, layer: str) -> bool:
        """Return whether an image has a layer; the caller holds the layer's lock."""
        images = (self.find(path.stem) for path in self._records())
        return any(image is not None and layer in image.layers for image in images)

    def _records(self) -> list[Path]:
        return sorted((self.boxes.folder / "images").glob("*.json"))

    def _record(self, digest: str) -> Path:
        return self.boxes.folder / "images" / f"{digest}.json"


def _is_unused(record: Path, seconds: float) -> bool:
    """Return whether no process uses an image, nor has used it for some time."""
    descriptor = os.open(record, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _lock(descriptor, fcntl.LOCK_EX) and time.time() - os.fstat(descriptor).st_mtime > seconds
    finally:
        os.close(descriptor)


def folder_digest(folder: Path, *texts: str, without: str = "") -> str:
    """Return a digest of the files of a folder, equal for equal files.

    Args:
        texts: further texts in the digest.
        without: the name of a file to leave out.

    Raises:
        ConfigError: the folder has something other than files, folders and links.
    """
    digest = hashlib.sha256("\0".join(texts).encode())
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if str(name) == without:
            continue
        if path.is_symlink():
            digest.update(f"{name}\0link\0{os.readlink(path)}\0".encode())
        elif path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name}\0{path.stat().st_mode & 0o111}\0{content}\0".encode())
        elif not path.is_dir():
            raise ConfigError(f"`{path}` is neither a file nor a folder")
    return digest.hexdigest()[:_DIGEST]


def _lock(descriptor: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False


def _size(folder: Path) -> int:
    size = 0
    with contextlib.suppress(OSError), opened(str(folder)) as top:
        for counted in disk_use(top, MOST_BYTES, MOST_FILES):
            size = counted[0]
    return size


_WEEK = 7 * 86_400.0


def collect(older_than: float | None, *, delete: bool) -> Sequence[tuple[str, int]]:
    """Remove unused images of boxes, except those used in the last week.

    Args:
        older_than: the minimum seconds since the last use; None: a week.
        delete: whether to remove them, or only list them.

    Returns:
        A description of each image, and its bytes.
    """
    folder = DEFAULT_FOLDER.expanduser()
    if not (folder / "images").is_dir():
        return ()

    async def run() -> list[tuple[str, int]]:
        boxes = BoxHost(folder, 1)
        try:
            return await ImageStore(boxes).prune(_WEEK if older_than is None else older_than, delete=delete)
        finally:
            await boxes.close()

    return [(f"image {digest} of boxes", size) for digest, size in asyncio.run(run())]


# The name of the layer's image in a Dockerfile's `FROM`.
HOST: Final = "rlinf/host"
_NEEDED: Final = ("bash", "cat")
_PROGRAMS: Final = (
    *("bash", "cat", "chmod", "chown", "cp", "cut", "date", "dirname", "echo", "env", "false", "find", "grep", "head"),
    *("id", "kill", "ln", "ls", "mkdir", "mktemp", "mv", "nproc", "printf", "pwd", "rm", "rmdir", "sed", "seq"),
    *("setsid", "sleep", "sort", "stat", "tail", "tar", "tee", "test", "tmux", "touch", "tr", "true", "tty", "uniq"),
    *("wc", "yes"),
)
_PASSWD: Final = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUP: Final = "root:x:0:\nnogroup:x:65534:\n"
_LEFT_OUT: Final = frozenset(
    (
        *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip"),
        *("lib2to3", "pydoc_data", "distutils", "curses", "dbm", "sqlite3", "wsgiref", "xmlrpc", "venv"),
    )
)
# Needed for UTF-8 and for terminal programs.
_DATA: Final = ("/usr/lib/locale/C.utf8", "/lib/terminfo")
_FOLDERS: Final = ("app", "dev", "etc", "proc", "root", "tmp", "usr/bin", "usr/lib", "var/tmp")


def _write_host_layer(target: IO[bytes]) -> None:
    """Write a tar archive of this machine's shell, basic programs and Python, and the libraries that they need.

    Raises:
        ConfigError: the machine has no `bash`, `cat` or `ldd`.
    """
    programs = {name: path for name in _PROGRAMS if (path := shutil.which(name)) is not None}
    missing = [name for name in (*_NEEDED, "ldd") if name not in programs and shutil.which(name) is None]
    if missing:
        raise ConfigError(f"`FROM {HOST}` needs `{missing[0]}`, which this machine does not have")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = os.path.realpath(sys.executable)
    library = Path(os.__file__).resolve().parent
    with tarfile.open(fileobj=target, mode="w|") as archive:
        for folder in _FOLDERS:
            _add(archive, folder, tarfile.DIRTYPE, 0o1777 if folder.endswith("tmp") else 0o755)
        for name, text in (("etc/passwd", _PASSWD), ("etc/group", _GROUP)):
            _add(archive, name, tarfile.REGTYPE, 0o644, data=text.encode())
        links = {"bin": "usr/bin", "sbin": "usr/bin", "usr/bin/sh": "bash"}
        for name, aim in {**links, "usr/bin/python3": version, "usr/bin/python": version}.items():
            _add(archive, name, tarfile.SYMTYPE, 0o777, aim)
        modules = {f"usr/lib/{version}/{name}": path for name, path in _modules(library)}
        extensions = [str(path) for path in modules.values() if path.suffix == ".so"]
        libraries = _libraries([*programs.values(), python, *extensions])
        files = {f"usr/bin/{name}": path for name, path in {**programs, version: python}.items()}
        data = {path.lstrip("/"): path for folder in _DATA for path in _files(folder)}
        for name, path in {**files, **modules, **data, **{path.lstrip("/"): path for path in libraries}}.items():
            _add_file(archive, name, Path(path))


def _files(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in sorted(names) if not os.path.islink(f"{parent}/{name}"))


def _modules(library: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative and full paths of the standard library's files."""
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT and not name.startswith("config-"))
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix in (".py", ".so") or name.endswith(f".{sys.implementation.cache_tag}.pyc"):
                yield str(path.relative_to(library)), path


def _libraries(paths: list[str]) -> list[str]:
    """Return the shared libraries that programs need, and the loader."""
    listed = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False, env={"LC_ALL": "C"}).stdout
    words = (word for line in listed.splitlines() if not line.endswith(":") for word in line.split())
    return sorted({word for word in words if word.startswith("/") and os.path.isfile(word)})


def _add(archive: tarfile.TarFile, name: str, kind: bytes, mode: int, aim: str = "", data: bytes = b"") -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.size = kind, mode, aim, len(data)
    archive.addfile(info, io.BytesIO(data))


def _add_file(archive: tarfile.TarFile, name: str, path: Path) -> None:
    info = tarfile.TarInfo(name)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        info.size, info.mtime = status.st_size, int(status.st_mtime)
        info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        archive.addfile(info, file)


def _host_fingerprint() -> str:
    """Return a digest that changes with each of the programs."""
    digest = hashlib.sha256(f"{sys.version}\0{_DATA}".encode())
    for path in (*(shutil.which(name) for name in _PROGRAMS), os.path.realpath(sys.executable)):
        if path is not None:
            status = os.stat(path)
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return f"host-{digest.hexdigest()[:19]}"
