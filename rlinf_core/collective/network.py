"""By which address other hosts reach this one."""

from __future__ import annotations

import fcntl
import socket
import struct

from rlinf_core import env_vars
from rlinf_core.errors import EnvironmentVariableError

_SIOCGIFADDR = 0x8915


def advertised_address() -> str:
    """Return the address of `RLINF_NET_IF` where it is set, else the one that the default route leaves by.

    Raises:
        EnvironmentVariableError: no such interface, or it has no IPv4 address.
    """
    interface = env_vars.NET_IF.get()
    if interface is None:
        return _default_route_address()
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
        except OSError:
            raise EnvironmentVariableError(
                env_vars.NET_IF.name, interface, expected=_interfaces(), help=env_vars.NET_IF.doc
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _interfaces() -> str:
    names = ", ".join(f"`{name}`" for _, name in socket.if_nameindex())
    return f"an interface with an IPv4 address; there are {names}"


def _default_route_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            # No packet is sent: the kernel only chooses the route. The address is one reserved for documentation.
            sock.connect(("192.0.2.1", 9))
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"
