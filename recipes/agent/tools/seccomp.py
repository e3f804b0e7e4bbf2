"""A filter of system calls that hold memory outside of the limits of a process, or reach keys of the host.

Written out: `pyseccomp`, which needs libseccomp on each node, would be one more dependency for thirty instructions.
"""

from __future__ import annotations

import platform
import struct
from typing import Final

# The number that the kernel gives an architecture, and the calls refused there: keys are of no namespace; segments
# and queues of System V, files of memory, rings and programs of the kernel count toward no limit of a process.
_ARCHITECTURES: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    # shmget, semget, msgget, add_key, request_key, keyctl, memfd_create, bpf, userfaultfd, io_uring_setup, memfd_secret
    "x86_64": (0xC000003E, (29, 64, 68, 248, 249, 250, 319, 321, 323, 425, 447)),
    "aarch64": (0xC00000B7, (194, 190, 186, 217, 218, 219, 279, 280, 282, 425, 447)),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _END = 0x7FFF0000, 0x00050001, 0x80000000
# Numbers from here on are those of x86's x32, a second name of each call.
_X32: Final = 0x40000000


def refusing() -> bytes | None:
    """Return a filter for bubblewrap, or `None` where the machine's calls are not known."""
    if platform.machine() not in _ARCHITECTURES:
        return None
    architecture, calls = _ARCHITECTURES[platform.machine()]
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _END), (_LOAD, 0, 0, 0)]
    steps += [(_AT_LEAST, len(calls) + 1, 0, _X32)]
    steps += [(_EQUAL, len(calls) - at, 0, call) for at, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
