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
        """Return whether the entry covers a URL with these parts."""
        if self.scheme not in ("", scheme) or port != (self.port or DEFAULT_PORTS[scheme]):
            return False
        if self.network is not None:
            address = _address(host)
            return address is not None and address in self.network
        return host.endswith(self.name[1:]) if self.name.startswith("*.") else host == self.name


class UrlParts(NamedTuple):
    """The parts of a requested URL."""

    scheme: str
    host: str
    port: int
    path: str


def parse_allowed(text: str) -> AllowedHost:
    """Parse an entry: `HOST`, `*.HOST`, an address or a network, each with an optional scheme and port.

    Raises:
        ValueError: it is not valid; the text says why.
    """
    match = _SCHEME.fullmatch(text.strip().lower())
    scheme, rest = (match[1] or "", match[2]) if match else ("", "")
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
        raise ValueError("a host is a name, `*.` and a name, or an address, without path, user or further wildcards")
    return AllowedHost(scheme, name, None, port)


def parse_url(text: str) -> UrlParts:
    """Parse a URL.

    Raises:
        ValueError: it is not a URL of http or https; the text says why.
    """
    if not text.isprintable() or any(character in text for character in " \\"):
        raise ValueError("no URL")
    parts = urlsplit(text)
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError("a URL begins with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL may not contain a user name or password here")
    host = _ascii((parts.hostname or "").removesuffix("."))
    if not host:
        raise ValueError("the URL has no host")
    path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
    return UrlParts(parts.scheme, host, parts.port or DEFAULT_PORTS[parts.scheme], path)


class AllowList:
    """An allow list of hosts.

    Args:
        entries: the entries of the list.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = [parse_allowed(entry) for entry in entries]
        # Private addresses that names may lead to: the listed ones.
        self._networks = [entry.network for entry in self._entries if entry.network is not None]
        if any(entry.name == "localhost" for entry in self._entries):
            self._networks += _LOOPBACK

    def allows(self, url: UrlParts) -> bool:
        """Return whether the host, scheme and port of a URL are on the list."""
        return any(entry.holds(url.scheme, url.host, url.port) for entry in self._entries)

    def reachable(self, address: str) -> bool:
        """Return whether an address may be reached: public, or listed itself."""
        parsed = _address(address)
        if parsed is None:
            return False
        return (parsed.is_global and not parsed.is_multicast) or any(parsed in network for network in self._networks)


def _address(text: str) -> Address | None:
    """Return an address, unwrapping IPv4 in IPv6; None if the text is not an address."""
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
    """Return a host in the form used for lookups: lower case, other scripts in ASCII (IDNA)."""
    if host.isascii():
        return host.lower()
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        raise ValueError(f"`{host}` is not a valid host name") from None
