"""A layer of this machine's own programs, for examples and tests where no image is available."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from rlinf_core import ConfigError

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


def write_host_layer(target: IO[bytes]) -> None:
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


def host_fingerprint() -> str:
    """Return a digest that changes with each of the programs."""
    digest = hashlib.sha256(f"{sys.version}\0{_DATA}".encode())
    for path in (*(shutil.which(name) for name in _PROGRAMS), os.path.realpath(sys.executable)):
        if path is not None:
            status = os.stat(path)
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return f"host-{digest.hexdigest()[:19]}"
