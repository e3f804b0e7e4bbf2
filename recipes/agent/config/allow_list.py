"""Hosts that the `http` tool may reach."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_SCHEME: Final = re.compile(r"(?:(\w+)://)?(.*)", re.DOTALL)
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
# Characters that stay as they are in a path and a query.
_SAFE: Final = "/%?&=;:@!$'()*+,~"
# IPv4 addresses as a gateway writes them in IPv6.
_NAT64: Final = IPv6Network("64:ff9b::/96")
_LOOPBACK: Final = (ip_network("127.0.0.0/8"), ip_network("::1/128"))


class AllowedHost(NamedTuple):
    """An entry of the list.

    Attributes:
        scheme: `http` or `https`; empty: both.
        name: a host, or `*.` before one for everything below it; empty for addresses.
        network: addresses; None for names.
        port: None: that of the scheme.
    """

    scheme: str
    name: str
    network: Network | None
    port: int | None

    def holds(self, scheme: str, host: str, port: int) -> bool:
        """Return whether an URL with these parts is one of the entry's."""
        if self.scheme not in ("", scheme) or port != (self.port or DEFAULT_PORTS[scheme]):
            return False
        if self.network is not None:
            address = _address(host)
            return address is not None and address in self.network
        return host.endswith(self.name[1:]) if self.name.startswith("*.") else host == self.name


class UrlParts(NamedTuple):
    """The parts of an URL that is to be asked."""

    scheme: str
    host: str
    port: int
    path: str


def parse_allowed(text: str) -> AllowedHost:
    """Return an entry: `HOST`, `*.HOST`, an address or network, each with a scheme before and a port behind if need be.

    Raises:
        ValueError: it is none; the text says why.
    """
    found = _SCHEME.fullmatch(text.strip().lower())
    scheme, rest = (found[1] or "", found[2]) if found else ("", "")
    if scheme and scheme not in DEFAULT_PORTS:
        raise ValueError(f"`{scheme}` is neither http nor https")
    network = _network(rest)
    if network is not None:
        return AllowedHost(scheme, "", network, None)
    host, port = _host_and_port(rest)
    network = _network(host)
    if network is not None:
        return AllowedHost(scheme, "", network, port)
    name = _ascii(host)
    if not _NAME.fullmatch(name):
        raise ValueError("a host is a name, `*.` and a name, or an address: no path, no user, no other star")
    return AllowedHost(scheme, name, None, port)


def parse_url(text: str) -> UrlParts:
    """Return the parts of an URL.

    Raises:
        ValueError: it is no URL of http or https; the text says why.
    """
    if not text.isprintable() or any(each in text for each in " \\"):
        raise ValueError("no URL")
    parts = urlsplit(text)
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError("an URL begins with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an URL has no user and no password here")
    host = _ascii((parts.hostname or "").removesuffix("."))
    if not host:
        raise ValueError("the URL names no host")
    path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
    return UrlParts(parts.scheme, host, parts.port or DEFAULT_PORTS[parts.scheme], path)


class AllowList:
    """The hosts that may be reached, and nothing else.

    Args:
        entries: of the list.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = [parse_allowed(each) for each in entries]
        # Private addresses that names may lead to: the listed ones.
        self._networks = [each.network for each in self._entries if each.network is not None]
        if any(each.name == "localhost" for each in self._entries):
            self._networks += _LOOPBACK

    def allows(self, url: UrlParts) -> bool:
        """Return whether an URL is of a listed host, with its scheme and port."""
        return any(each.holds(url.scheme, url.host, url.port) for each in self._entries)

    def reachable(self, address: str) -> bool:
        """Return whether a host may be at an address: a public one, or one that is listed itself."""
        found = _address(address)
        if found is None:
            return False
        return (found.is_global and not found.is_multicast) or any(found in each for each in self._networks)


def _address(text: str) -> Address | None:
    """Return an address, one of IPv4 in IPv6 as itself; None where the text is none."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    within = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
    return address.ipv4_mapped or address.sixtofour or within or address


def _network(text: str) -> Network | None:
    try:
        return ip_network(text.removeprefix("[").removesuffix("]"), strict=False)
    except ValueError:
        return None


def _host_and_port(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text, None
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError("a port is a number from 1 to 65535")
    return host, int(port)


def _ascii(host: str) -> str:
    """Return a host as it is looked up: in small letters, other scripts in their ASCII form."""
    if host.isascii():
        return host.lower()
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        raise ValueError(f"`{host}` is no name of a host") from None
