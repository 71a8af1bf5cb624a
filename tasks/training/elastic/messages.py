"""What the driver and one rank say to each other: JSON lines over the rank's stdin and stdout.

So the talk of a rank on another host goes through its SSH session: authenticated, encrypted, and on
no port of its own. Nothing is pickled.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from tasks.contracts.base import Contract

MAX_LINE_BYTES = 1 << 20


class Start(Contract):
    """To a rank: take part in this group."""

    kind: Literal["start"] = "start"
    group: PositiveInt
    rank: NonNegativeInt
    size: PositiveInt
    local_rank: NonNegativeInt
    local_size: PositiveInt
    cross_rank: NonNegativeInt
    cross_size: PositiveInt
    address: str
    """Of the group's rendezvous server."""
    port: PositiveInt
    sync: bool
    """True where not all ranks hold the same commit: rank 0 hands out its own."""
    fresh: bool
    """True where no rank holds any: all take a snapshot first."""


class Regroup(Contract):
    """To a rank: another waits to join; end the group at the next check."""

    kind: Literal["regroup"] = "regroup"


class Broken(Contract):
    """To a rank: another of its group is lost or has failed; the group cannot go on."""

    kind: Literal["broken"] = "broken"
    group: PositiveInt


class Leave(Contract):
    """To a rank: your host is no longer offered; commit and leave."""

    kind: Literal["leave"] = "leave"


class End(Contract):
    """To a rank: all is done."""

    kind: Literal["end"] = "end"


class Stop(Contract):
    """To a rank: end at once."""

    kind: Literal["stop"] = "stop"


class Ping(Contract):
    """To a rank: answer at once, with the same number."""

    kind: Literal["ping"] = "ping"
    sent_s: float


class Ready(Contract):
    """From a rank: it can take part in the next group."""

    kind: Literal["ready"] = "ready"
    commit: NonNegativeInt
    """Number of the commit that it holds; 0 for none."""
    failed: str = ""
    """The error that ended its last group; empty where it ended as planned."""


class Running(Contract):
    """From a rank: it has met the others, has the state, and begins to train."""

    kind: Literal["running"] = "running"
    group: PositiveInt


class Pulse(Contract):
    """From a rank, at each check: how it gets on."""

    kind: Literal["pulse"] = "pulse"
    group: PositiveInt
    commit: NonNegativeInt
    busy_s: float
    """Mean seconds of a step in which this rank itself worked."""


class Pong(Contract):
    """From a rank: the answer to a ping."""

    kind: Literal["pong"] = "pong"
    sent_s: float


class Left(Contract):
    """From a rank, last of all: it was told that its host is taken away."""

    kind: Literal["left"] = "left"
    committed: bool
    """False where it had no time for it; the others go on from the commit before."""


class Finished(Contract):
    """From a rank: training has come to its end."""

    kind: Literal["finished"] = "finished"


class Failed(Contract):
    """From a rank, last of all: the error that ends it."""

    kind: Literal["failed"] = "failed"
    error: str
    """Name of its class."""
    message: str
    traceback: str
    infrastructure: bool
    """True where another host may do better."""


ToRank = Start | Regroup | Broken | Leave | End | Stop | Ping
FromRank = Ready | Running | Pulse | Pong | Left | Finished | Failed

_TO_RANK: TypeAdapter[ToRank] = TypeAdapter(Annotated[ToRank, Field(discriminator="kind")])
_FROM_RANK: TypeAdapter[FromRank] = TypeAdapter(Annotated[FromRank, Field(discriminator="kind")])


def encoded(message: ToRank | FromRank) -> bytes:
    """One line."""
    return message.model_dump_json().encode() + b"\n"


def to_rank(line: bytes) -> ToRank:
    """The driver's message in a line."""
    return _TO_RANK.validate_json(line)


def from_rank(line: bytes) -> FromRank | None:
    """A rank's message in a line; None where it is none: a library printed it."""
    if not line.startswith(b'{"kind":'):
        return None
    try:
        return _FROM_RANK.validate_json(line)
    except ValidationError:
        return None
