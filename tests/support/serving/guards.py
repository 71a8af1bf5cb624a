"""A guard of the tests."""

from serving.errors import ForbiddenError, TooManyRequestsError, UnauthorizedError
from serving.interfaces import Action, Headers, Principal


class StrictGuard:
    """Knows who says `x-who`, and of them admits `me` alone, and not too often."""

    def __init__(self) -> None:
        self.asked: list[tuple[Action, str | None]] = []

    def recognise(self, headers: Headers, address: str) -> Principal:
        assert address == "127.0.0.1"
        if b"x-who" not in dict(headers):
            raise UnauthorizedError("nobody")
        return Principal("me", "", {}, 1e12)

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        self.asked.append((action, model))
        assert address == "127.0.0.1"
        who = dict(headers).get(b"x-who")
        if who == b"broken":
            raise LookupError("a fault of ours")
        if who == b"often":
            raise TooManyRequestsError("come later", 2.2)
        if who != b"me":
            raise ForbiddenError("not you")
        return Principal("me", "", {"*": frozenset({action})}, 1e12)
