"""Why a request is not answered, each with its HTTP status; the text is meant for the client."""

from http import HTTPStatus

from tasks.kernel.errors import FalajError


class ServingError(FalajError):
    """A request that is not answered."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    reason = "internal"
    """A word for counters and logs."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Sent as `Retry-After`; None where trying again does not help."""


class BadRequestError(ServingError):
    """What was sent is not what the model takes."""

    status, reason = HTTPStatus.BAD_REQUEST, "bad_request"


class NotComputedError(BadRequestError):
    """The version fails on what was sent, and answers other inputs.

    Seldom the client's fault alone: where another version answers them, a release says whose.
    """

    reason = "not_computed"


class UnauthorizedError(ServingError):
    """Nobody is known by what was presented."""

    status, reason = HTTPStatus.UNAUTHORIZED, "unauthorized"


class EndedError(UnauthorizedError):
    """What was presented was issued here, or by an issuer that is known, and its time is over."""


class ForbiddenError(ServingError):
    """Who asks may not do this with this model."""

    status, reason = HTTPStatus.FORBIDDEN, "forbidden"


class UnknownModelError(ServingError):
    """There is no such model or version here."""

    status, reason = HTTPStatus.NOT_FOUND, "unknown_model"


class TooLargeError(ServingError):
    """The request is larger than this server takes."""

    status, reason = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large"


class FeaturesRefusedError(ServingError):
    """Features of an entity are missing or too old, and the policy is to refuse."""

    status, reason = HTTPStatus.UNPROCESSABLE_ENTITY, "features_refused"


class TooManyRequestsError(ServingError):
    """A client asks more often than it may."""

    status, reason = HTTPStatus.TOO_MANY_REQUESTS, "rate_limited"


class OverloadedError(ServingError):
    """The queue is full; nothing was computed."""

    status, reason = HTTPStatus.SERVICE_UNAVAILABLE, "overloaded"


class NotReadyError(ServingError):
    """The model is known and no version of it can answer now."""

    status, reason = HTTPStatus.SERVICE_UNAVAILABLE, "not_ready"


class DeadlineError(ServingError):
    """The request's time was over before it was computed."""

    status, reason = HTTPStatus.GATEWAY_TIMEOUT, "deadline"


class ClientGoneError(ServingError):
    """The client closed its connection; nobody reads the answer. Never sent."""

    status, reason = HTTPStatus.BAD_REQUEST, "client_gone"


class BackendError(ServingError):
    """Every backend that could answer failed."""

    status, reason = HTTPStatus.INTERNAL_SERVER_ERROR, "backend"


class RequestTimeoutError(ServingError):
    """A request did not arrive whole in its time."""

    status, reason = HTTPStatus.REQUEST_TIMEOUT, "request_timeout"


class HeadersTooLargeError(ServingError):
    """Request line and headers are larger than this server takes."""

    status, reason = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large"


class UnsupportedBodyError(ServingError):
    """The body is compressed, or in a form that is not read here."""

    status, reason = HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_body"
