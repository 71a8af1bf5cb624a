"""What the driver and one rank send each other: JSON lines over the rank's stdin and stdout.

So the messages of a rank on another host go through its SSH session: authenticated, encrypted, and
on no port of its own. Nothing is pickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

# Horovod's numbers of a rank.
SLOT_FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, kw_only=True, tag_field="kind", tag=str.lower):
    """A line; `kind` is its class in small letters."""


class Start(Message):
    """To a rank: take part in this group."""

    group: Count
    rank: Count
    size: Count
    local_rank: Count
    local_size: Count
    cross_rank: Count
    cross_size: Count
    address: str
    """Of the group's rendezvous server."""
    port: Count
    sync: bool
    """True where not all ranks hold the same commit: rank 0 hands out its own."""
    fresh: bool
    """True where no rank holds any: all take a snapshot first."""


class Regroup(Message):
    """To a rank: another waits to join; end the group at the next check."""


class Broken(Message):
    """To a rank: another of its group is lost or has failed; the group cannot go on."""

    group: Count


class Leave(Message):
    """To a rank: your host is no longer offered; commit and leave."""


class End(Message):
    """To a rank: all is done."""


class Stop(Message):
    """To a rank: end at once."""


class Ping(Message):
    """To a rank: answer at once, with the same number."""

    sent_s: float


class Ready(Message):
    """From a rank: it can take part in the next group."""

    commit: Count
    """Number of the commit that it holds; 0 for none."""
    failed: str = ""
    """The error that ended its last group; empty where it ended as planned."""


class Running(Message):
    """From a rank: it has met the others, has the state, and begins to train."""

    group: Count


class Pulse(Message):
    """From a rank, at each check: its progress."""

    group: Count
    commit: Count
    busy_s: float
    """Mean seconds of a step in which this rank itself worked."""


class Pong(Message):
    """From a rank: the answer to a ping."""

    sent_s: float


class Left(Message):
    """From a rank, last of all: it leaves because its host is taken away."""

    committed: bool
    """False where it had no time for it; the others resume from the commit before."""


class Finished(Message):
    """From a rank: training has come to its end."""


class Failed(Message):
    """From a rank, last of all: the error that ends it."""

    error: str
    """Name of its class."""
    message: str
    traceback: str
    infrastructure: bool
    """True where another host may do better."""


ToRank = Start | Regroup | Broken | Leave | End | Stop | Ping
FromRank = Ready | Running | Pulse | Pong | Left | Finished | Failed

_TO_RANK = msgspec.json.Decoder(ToRank)
_FROM_RANK = msgspec.json.Decoder(FromRank)


def encoded(message: ToRank | FromRank) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def to_rank(line: bytes) -> ToRank:
    """The driver's message in a line."""
    message: ToRank = _TO_RANK.decode(line)
    return message


def from_rank(line: bytes) -> FromRank | None:
    """A rank's message in a line; None where it is none: a library printed it."""
    if not line.startswith(b'{"kind":'):
        return None
    try:
        message: FromRank = _FROM_RANK.decode(line)
    except msgspec.DecodeError:
        return None
    return message
