"""Refusals that belong to HTTP alone."""

from __future__ import annotations

from http import HTTPStatus

from serving.errors import ServingError


class RequestTimeoutError(ServingError):
    """A request did not arrive whole in its time."""

    status, reason = HTTPStatus.REQUEST_TIMEOUT, "request_timeout"


class HeadersTooLargeError(ServingError):
    """Request line and headers are larger than this server takes."""

    status, reason = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large"


class UnsupportedBodyError(ServingError):
    """The body is compressed, or in a form that is not read here."""

    status, reason = HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_body"


class NoSuchPageError(ServingError):
    """Nothing is at this path."""

    status, reason = HTTPStatus.NOT_FOUND, "no_such_page"


class WrongMethodError(ServingError):
    """The path does not take this method."""

    status, reason = HTTPStatus.METHOD_NOT_ALLOWED, "wrong_method"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed
        """Value of the header `Allow`."""
