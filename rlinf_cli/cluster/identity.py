"""The name, id, token and lock of a cluster that this user brings up."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.node.cluster_records import folder, make_folder, token_file, write

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}\Z")
DEFAULT_NAME: Final = "default"
_PAUSE: Final = 0.2


def cluster_name(file: str, name: str | None = None) -> str:
    """Return the name of a file's cluster: `name` if given, else the file name without extension.

    Raises:
        ConfigError: `name` is not valid.
    """
    if name is not None:
        if not _NAME.match(name):
            raise ConfigError(
                f"`{name}` is not a valid cluster name",
                help="use up to 64 letters, digits, `_`, `-` and `.`, starting with a letter or a digit",
            )
        return name
    stem = re.sub(r"[^A-Za-z0-9_.\-]+", "-", Path(file).stem).strip("-.")[:64]
    # Files whose names have no such letter must not share a cluster.
    return stem or (DEFAULT_NAME if file == "-" else f"cluster-{cluster_id(Path(file).stem)}")


def cluster_id(name: str) -> str:
    """Return the id that marks a cluster on its nodes, derived from the name so that it is known without a record."""
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def token_of(name: str, *, fresh: bool = False) -> str:
    """Return the token of a cluster; create it if it is missing or a `fresh` one is wanted.

    Raises:
        RLinfError: the token file is readable by others, or holds no token.
    """
    if not fresh:
        help = f"run `chmod 600` on it if it is certainly unread, else `rlinf down` and `rlinf up` cluster `{name}`"
        try:
            return _read_token(token_file(name), "the token of the cluster is readable by others", help)
        except FileNotFoundError:
            pass
    token = secrets.token_hex(32)
    keep_token(name, token)
    return token


def _read_token(path: Path, refusal: str, help: str) -> str:
    if path.stat().st_mode & 0o077:
        raise RLinfError(refusal, where=str(path), help=help)
    words = path.read_text(encoding="ascii", errors="replace").split()
    if len(words) != 1 or not words[0].isascii():
        help = "copy it again from node 0, or `rlinf down` and `rlinf up` the cluster"
        raise RLinfError("the file holds no token of a cluster", where=str(path), help=help)
    return words[0]


def keep_token(name: str, token: str) -> None:
    """Write the token of a cluster, readable by this user only."""
    write(token_file(name), token)


def shared_token(name: str, file: str | None, alone_rank: int | None, seconds: float) -> str | None:
    """Return the token for a node started by hand; None if this machine uses or creates the cluster's own.

    Node 0 creates the token. The others wait for its file on a shared home.

    Args:
        name: the cluster.
        file: the file of the token, if the user names one.
        alone_rank: the rank of a node that is started on its own machine, else None.
        seconds: the seconds to wait for the file.

    Raises:
        RLinfError: the token does not appear in time, is none, or is readable by others.
    """
    if file is None and (alone_rank in (None, 0)):
        return None
    path = Path(file) if file is not None else token_file(name)
    end = time.monotonic() + seconds
    while not path.exists() and file is None and time.monotonic() < end:
        time.sleep(_PAUSE)
    try:
        return _read_token(path, "the token is readable by others", "run `chmod 600` on it")
    except OSError as error:
        raise RLinfError(
            "this node has no token of the cluster",
            where=str(path),
            why=str(error.strerror),
            help="node 0 creates it: start node 0 first, and pass its file to the others with `--token-file`",
        ) from None


@contextmanager
def locked(name: str, seconds: float = 0.0) -> Generator[None, None, None]:
    """Hold the lock of a cluster: only one `up` or `down` works at a time.

    Args:
        seconds: the seconds to wait for another command that holds it.

    Raises:
        RLinfError: another command holds it.
    """
    make_folder()
    path = folder() / f"{name}.lock"
    end = time.monotonic() + seconds
    while (lock := _try_lock(path)) is None:
        if time.monotonic() >= end:
            raise RLinfError(
                f"another `rlinf up` or `rlinf down` is working on cluster `{name}`",
                why=_holder(path),
                help="wait until it has ended, and run the command again",
            )
        time.sleep(_PAUSE)
    try:
        with suppress(OSError):  # on a full disk the lock holds nevertheless
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()}, since {time.strftime('%H:%M:%S')}".encode(), 0)
        yield
    finally:
        if not (folder() / f"{name}.json").exists():
            path.unlink(missing_ok=True)
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None while another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the file, and another process may hold the next one.
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _holder(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:200] or None
    except OSError:
        return None
