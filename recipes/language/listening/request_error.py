"""Errors of refused requests."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType


class RequestError(Exception):
    """An error that refuses a request.

    Attributes:
        status: the status of the response.
        headers: the headers of the response.
    """

    def __init__(self, status: HTTPStatus, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers)


def bad_request(message: str) -> RequestError:
    """Return the error for an invalid request."""
    return RequestError(HTTPStatus.BAD_REQUEST, message)
