"""Requests that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType


class RequestError(Exception):
    """A request that is not answered with a turn.

    Attributes:
        status: the status of the answer.
        headers: the headers of the answer.
    """

    def __init__(self, status: HTTPStatus, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers)


def bad_request(message: str) -> RequestError:
    """Return the error of a request that is not understood."""
    return RequestError(HTTPStatus.BAD_REQUEST, message)
