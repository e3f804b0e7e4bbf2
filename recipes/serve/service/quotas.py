"""Quotas of tenants: requests and tokens a minute, and bytes of saved weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from recipes.language.listening.request_error import RequestError
from recipes.serve.config import ServerConfig

_MINUTE: Final = 60.0
_MIB: Final = 1 << 20


class Quotas:
    """The quotas of all tenants. Each has allowances of its own, which fill up again within a minute.

    Args:
        limits: section `server` of the file.
        clock: the monotonic clock, in seconds.
    """

    def __init__(self, limits: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = {
            "server.max_requests_per_minute": limits.max_requests_per_minute,
            "server.max_tokens_per_minute": limits.max_tokens_per_minute,
        }
        self._stored = limits.max_stored_mib
        self._clock = clock
        # By tenant and key: what is left, and when that was so.
        self._left: dict[tuple[str, str], tuple[float, float]] = {}

    def take(self, tenant: str, tokens: int) -> None:
        """Take a request with its tokens from the allowances of a tenant.

        One that is larger than a whole allowance is let through once that is full.

        Raises:
            RequestError: too little is left; the client waits and asks again.
        """
        amounts = dict(zip(self._limits, (1, tokens), strict=True))
        now = self._clock()
        left: dict[tuple[str, str], tuple[float, float]] = {}
        for key, limit in self._limits.items():
            if limit is None:
                continue
            before, since = self._left.get((tenant, key), (float(limit), now))
            filled = min(float(limit), before + (now - since) * limit / _MINUTE)
            missing = min(amounts[key], limit) - filled
            if missing > 0:
                seconds = math.ceil(missing * _MINUTE / limit)
                message = f"the quota of {limit} is used up (`{key}`): try again in {seconds} s"
                raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, {"Retry-After": str(seconds)})
            left[tenant, key] = (filled - amounts[key], now)
        self._left |= left

    def check_stored(self, folder: Path) -> None:
        """Check that a tenant may save weights besides those in its folder.

        Raises:
            RequestError: too many bytes are there.
        """
        if self._stored is None:
            return
        files = (path for path in folder.rglob("*") if path.is_file())
        stored = sum(path.stat().st_size for path in files) / _MIB
        if stored >= self._stored:
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{stored:.0f} MiB of weights are saved, and `server.max_stored_mib` is {self._stored}: save with"
                " ttl_seconds so that they expire, or raise the limit",
            )
