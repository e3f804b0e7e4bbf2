"""The secret that the processes of one cluster share, and that nobody else knows."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """Proves membership of a cluster without being shown: no text form of it holds the key."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 16:
            raise ValueError("a cluster's secret needs at least 16 bytes")

    @classmethod
    def generate(cls) -> ClusterSecret:
        return cls(secrets.token_bytes(32))

    def sign(self, *fields: bytes) -> bytes:
        """Return a 32-byte proof over the fields, which cannot be shifted into one another."""
        mac = hmac.new(self.key, digestmod=hashlib.sha256)
        for one in fields:
            mac.update(len(one).to_bytes(4, "big"))
            mac.update(one)
        return mac.digest()

    def verify(self, proof: bytes, *fields: bytes) -> bool:
        return hmac.compare_digest(proof, self.sign(*fields))
