"""Exclusive claims of processes on robots, so that no two jobs of a node move the same one.

A claim is a lock on a file of the node, which ends with the process, even after `kill -9`. It is for robots whose
controller grants no lease; the Franka arm's controller does.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pwd
import stat
import tempfile
from pathlib import Path
from typing import Self

from recipes.embodied.robots.controller_client import holder_name
from recipes.embodied.robots.robot_errors import RobotLeaseError
from rlinf_core.config.diagnostics import visible


class RobotClaim:
    """The right to move a robot, until `release` or the end of the process.

    Args:
        place: the robot's address on this node.

    Raises:
        RobotLeaseError: another process holds the claim.
    """

    def __init__(self, place: str) -> None:
        # All users can write to the folder: a link planted by another user must not redirect the write below.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = claim_file(place)
        try:
            self._descriptor = os.open(file, flags, 0o666)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                os.close(self._descriptor)
                raise OSError(errno.EINVAL, "it is not a regular file")
        except OSError as error:
            holder = _owner(file)
            raise RobotLeaseError(
                "the robot cannot be claimed",
                holder=holder,
                where=place,
                why=f"`{file}`, created by {holder or 'another user'}, cannot be used: {error.strerror}",
                help=f"ask {holder or 'its owner'} to end the process that moves the robot, and to remove the file",
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = visible(os.pread(self._descriptor, 1000, 0).decode("utf-8", "replace").strip()) or None
            os.close(self._descriptor)
            raise RobotLeaseError(
                "the robot is in use",
                holder=holder,
                where=place,
                why=f"{holder or 'another process'} controls it",
                help="end that process, or wait until it is done; give each env worker its own robot",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, holder_name().encode(), 0)

    def release(self) -> None:
        """Release the robot. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _owner(file: Path) -> str | None:
    """Return the owner of a file, as text; None if unknown."""
    try:
        return f"user {pwd.getpwuid(file.lstat().st_uid).pw_name}"
    except (OSError, KeyError):
        return None


def claim_file(place: str) -> Path:
    """Return the file whose lock is the claim on a robot."""
    digest = hashlib.sha256(os.path.realpath(place).encode() if place.startswith("/") else place.encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"rlinf-robot-{digest[:16]}.claim"


def claimed_by(place: str) -> str | None:
    """Return the holder of a robot, as text; None if it is free."""
    try:
        with RobotClaim(place):
            return None
    except RobotLeaseError as error:
        return error.holder or "another process"
