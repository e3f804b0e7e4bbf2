"""The handshake: both ends of a connection prove that they know the cluster's secret before anything else is read.

    dialer -> acceptor   greeting, nonce
    acceptor -> dialer   greeting, nonce
    dialer -> acceptor   proof over both nonces and its identity, identity
    acceptor -> dialer   verdict, proof over both nonces and both identities, identity

The dialer proves first, so that a stranger learns only that the port is open. Both nonces are fresh, so recorded
proofs cannot be replayed. A proof covers the role, so a proof cannot be reflected to its sender. Identities are JSON:
nothing is unpickled here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from dataclasses import asdict, dataclass, field
from enum import IntEnum

from rlinf_core.errors import AuthenticationError
from rlinf_core.foreign.strict_json import load_json_object


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """The shared secret with which the processes of a cluster prove membership. Its repr omits the key."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 16:
            raise ValueError("a cluster's secret needs at least 16 bytes")

    @classmethod
    def generate(cls) -> ClusterSecret:
        return cls(secrets.token_bytes(32))

    def sign(self, *fields: bytes) -> bytes:
        """Return a 32-byte MAC over the length-prefixed fields."""
        mac = hmac.new(self.key, digestmod=hashlib.sha256)
        for part in fields:
            mac.update(len(part).to_bytes(4, "big"))
            mac.update(part)
        return mac.digest()

    def verify(self, proof: bytes, *fields: bytes) -> bool:
        return hmac.compare_digest(proof, self.sign(*fields))


_GREETING = b"rlinf data plane 1\n"
_NONCE = 32
_PROOF = 32
_LENGTH = struct.Struct("<H")
_LARGEST_IDENTITY = 4096


class Admission(IntEnum):
    """The acceptor's answer to an authenticated dialer."""

    WELCOME = 1
    DUPLICATE = 2  # another connection between the two exists, or is being made
    STALE = 3  # the endpoint that the dialer seeks is no longer here


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The identity of one end of a connection.

    Attributes:
        seeks: the incarnation that it expects at the other end.
        connection: the name of the connection, chosen by the dialer.
        replaces: the name of the last connection to the same endpoint that the dialer lost, or empty.
    """

    incarnation: str
    seeks: str
    connection: str
    replaces: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> PeerIdentity:
        fields = load_json_object(data)
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


class _Line:
    """A socket whose reads share one deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the handshake took too long")
            self._sock.settimeout(left)
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("the other side hung up during the handshake")
            data += piece
        return bytes(data)

    def read_identity(self) -> bytes:
        (size,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if size > _LARGEST_IDENTITY:
            raise AuthenticationError("the other side's handshake is malformed")
        return self.read(size)

    def write(self, data: bytes) -> None:
        self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
        self._sock.sendall(data)


def dial(
    sock: socket.socket, secret: ClusterSecret, mine: PeerIdentity, deadline: float
) -> tuple[Admission, PeerIdentity]:
    """Do the dialer's part of the handshake; return the acceptor's verdict and identity.

    Raises:
        AuthenticationError: the listener does not belong to this cluster, or refuses this process.
        OSError: the connection broke, or the deadline passed.
    """
    line = _Line(sock, deadline)
    nonce = secrets.token_bytes(_NONCE)
    line.write(_GREETING + nonce)
    if line.read(len(_GREETING)) != _GREETING:
        raise AuthenticationError("the listener does not speak this version of the data plane")
    theirs = line.read(_NONCE)
    identity = mine.encode()
    line.write(secret.sign(b"dial", nonce, theirs, identity) + _LENGTH.pack(len(identity)) + identity)
    try:
        verdict = line.read(1)
    except ConnectionResetError:
        raise AuthenticationError(
            "the other side hung up on our proof of membership",
            help="both processes must hold the secret of the same cluster",
        ) from None
    proof = line.read(_PROOF)
    answer = line.read_identity()
    if not secret.verify(proof, b"accept", nonce, theirs, identity, verdict, answer):
        raise AuthenticationError("the listener does not belong to this cluster")
    return Admission(verdict[0]), PeerIdentity.decode(answer)


class Acceptance:
    """The acceptor's part of the handshake: reads the dialer's proof, and answers with a verdict."""

    def __init__(self, sock: socket.socket, secret: ClusterSecret, deadline: float) -> None:
        """Read the dialer's proof.

        Raises:
            AuthenticationError: the dialer does not belong to this cluster.
            OSError: the connection broke, or the deadline passed.
        """
        self._line = _Line(sock, deadline)
        self._secret = secret
        if self._line.read(len(_GREETING)) != _GREETING:
            raise AuthenticationError("an unknown peer connected that does not speak this protocol")
        self._theirs = self._line.read(_NONCE)
        self._nonce = secrets.token_bytes(_NONCE)
        self._line.write(_GREETING + self._nonce)
        proof = self._line.read(_PROOF)
        self._identity = self._line.read_identity()
        if not secret.verify(proof, b"dial", self._theirs, self._nonce, self._identity):
            raise AuthenticationError("an unknown peer connected without this cluster's secret")
        try:
            self.dialer = PeerIdentity.decode(self._identity)
        except (ValueError, TypeError, KeyError) as error:
            raise AuthenticationError("the dialer's identity is malformed") from error

    def answer(self, verdict: Admission, mine: PeerIdentity) -> None:
        identity = mine.encode()
        answer = bytes([verdict])
        proof = self._secret.sign(b"accept", self._theirs, self._nonce, self._identity, answer, identity)
        self._line.write(answer + proof + _LENGTH.pack(len(identity)) + identity)
