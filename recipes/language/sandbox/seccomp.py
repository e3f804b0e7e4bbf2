"""A filter of system calls that use memory outside of a process's limits, or reach beyond its namespaces.

The instructions are written out, as `pyseccomp` would require libseccomp on each node for only forty instructions.
"""

from __future__ import annotations

import platform
import struct
from typing import Final, NamedTuple


class _Architecture(NamedTuple):
    """The system calls of a machine architecture.

    Attributes:
        number: the kernel's number of the architecture.
        refused: calls to refuse. Keys have no namespace; System V segments and queues, memory files, rings and BPF
            programs count toward no limit of a process. A ring can also create sockets. A real-time scheduler, if
            allowed by inherited limits, would take a processor from everybody.
        sockets: calls that create a socket, with its family as first argument.
    """

    number: int
    refused: tuple[int, ...]
    sockets: tuple[int, ...]


_ARCHITECTURES: Final = {
    # shmget, semget, msgget, add_key, request_key, keyctl, memfd_create, bpf, userfaultfd, io_uring_setup,
    # memfd_secret, sched_setparam, sched_setscheduler, sched_setattr; socket, socketpair. Neither has `socketcall`.
    "x86_64": _Architecture(0xC000003E, (29, 64, 68, 248, 249, 250, 319, 321, 323, 425, 447, 142, 144, 314), (41, 53)),
    "aarch64": _Architecture(
        0xC00000B7, (194, 190, 186, 217, 218, 219, 279, 280, 282, 425, 447, 118, 119, 274), (198, 199)
    ),
}
# AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, which a network namespace isolates. It does not isolate AF_VSOCK, which
# connects a virtual machine with its host.
_FAMILIES: Final = (1, 2, 10, 16)
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
# Allow; refuse with EPERM; refuse with EAFNOSUPPORT; end the process.
_ALLOW, _REFUSE, _NO_FAMILY, _END = 0x7FFF0000, 0x00050001, 0x00050061, 0x80000000
# Offsets in the kernel's description of a call; that of the first argument is of its lower half, the socket family.
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
# From here on, numbers belong to x86's x32 ABI, which has a second number for each call.
_X32: Final = 0x40000000

_Step = tuple[int, str, int]


def refusing(machine: str | None = None) -> bytes | None:
    """Return a filter for bubblewrap, or None if the machine's calls are unknown.

    Args:
        machine: the architecture, such as `x86_64`; by default this machine's.
    """
    architecture = _ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return None
    # The operation, the label to jump to if a comparison holds, and the operand.
    steps: list[_Step] = [(_LOAD, "", _ARCHITECTURE_AT), (_EQUAL, "number", architecture.number), (_RETURN, "", _END)]
    labels = {"number": len(steps)}
    steps += [(_LOAD, "", _NUMBER_AT), (_AT_LEAST, "refuse", _X32)]
    steps += [(_EQUAL, "refuse", call) for call in architecture.refused]
    steps += [(_EQUAL, "family", call) for call in architecture.sockets]
    steps += [(_RETURN, "", _ALLOW)]
    labels["family"] = len(steps)
    steps += [(_LOAD, "", _ARGUMENT_AT), *((_EQUAL, "allow", family) for family in _FAMILIES)]
    steps += [(_RETURN, "", _NO_FAMILY)]
    labels["allow"] = len(steps)
    steps += [(_RETURN, "", _ALLOW)]
    labels["refuse"] = len(steps)
    steps += [(_RETURN, "", _REFUSE)]
    return b"".join(
        struct.pack("=HBBI", operation, labels[target] - at - 1 if target else 0, 0, operand)
        for at, (operation, target, operand) in enumerate(steps)
    )
