"""A rank's end of the connection to the driver, and the sockets of the group that it is in.

Gloo notices a lost rank only on the connection that it waits on: a rank that waits for another one,
which has noticed and left, waits until Gloo's time-out. A rank that has noticed, or hears of it
from the driver, therefore breaks all its connections of the group; the others then notice at once.

What the driver and one rank send each other: JSON lines over the rank's stdin and stdout.

So the messages of a rank on another host go through its SSH session: authenticated, encrypted, and
on no port of its own. Nothing is pickled.
"""

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, NoReturn

import msgspec
import psutil

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
    """To a rank: answer at once."""


class Ready(Message):
    """From a rank: it can take part in the next group."""

    commit: Count
    """Number of the commit that it holds; 0 for none."""
    failed: str = ""
    """The error that ended its last group; empty where it ended as planned."""


class Pulse(Message):
    """From a rank, at each check: its progress."""

    commit: Count


class Pong(Message):
    """From a rank: the answer to a ping."""


class Left(Message):
    """From a rank, last of all: it leaves because its host is taken away."""


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
FromRank = Ready | Pulse | Pong | Left | Finished | Failed


def encoded(message: ToRank | FromRank) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def to_rank(line: bytes) -> ToRank:
    """The driver's message in a line."""
    message: ToRank = msgspec.json.decode(line, type=ToRank)
    return message


def from_rank(line: bytes) -> FromRank | None:
    """A rank's message in a line; None where it is none: a library printed it."""
    if not line.startswith(b'{"kind":'):
        return None
    try:
        message: FromRank = msgspec.json.decode(line, type=FromRank)
    except msgspec.DecodeError:
        return None
    return message


Ends = tuple[object, object]


class GroupSockets:
    """Knows which TCP connections of this process belong to the group that it is in.

    May be used by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group = 0
        self._broken_group = 0
        self._ends: frozenset[Ends] = frozenset()

    @contextmanager
    def joining(self, group: int) -> Iterator[None]:
        """Take the connections that are made in this context for those of a group.

        They are broken up at its end where it has become known meanwhile that the group is broken.
        """
        before = frozenset(tcp_sockets())
        yield
        with self._lock:
            self._group = group
            self._ends = frozenset(tcp_sockets()) - before
            if group == self._broken_group:
                self._shut_down()

    def left(self) -> None:
        """Forget the group: its connections are closed."""
        with self._lock:
            self._ends = frozenset()

    def break_up(self, group: int) -> None:
        """Shut a group's connections down; whoever waits on one, here or there, gets an error.

        Args:
            group: number of the group that is broken; nothing happens where this process has left
                it, and where it is still about to join it, the end of `joining` does it.
        """
        with self._lock:
            self._broken_group = max(group, self._broken_group)
            if group == self._group:
                self._shut_down()

    def _shut_down(self) -> None:
        found = tcp_sockets()
        for ends in self._ends & found.keys():
            with suppress(OSError), socket.socket(fileno=os.dup(found[ends])) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def tcp_sockets() -> dict[Ends, int]:
    """Descriptors of this process's connected TCP sockets, by their two addresses."""
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr, each.raddr): each.fd for each in found if each.raddr}


# Exit codes of a rank that ends on purpose.
EXIT_STOPPED = 76
EXIT_LEFT = 77
# After SIGTERM a rank commits, writes a checkpoint and is gone within this: less than clouds and
# Kubernetes give.
NOTICE_S = 25.0
# Of the notice, what is left for the end of the process itself.
NOTICE_SHARE = 0.8


def end_process(code: int) -> NoReturn:
    """End this process at once, whatever libraries would do at exit; what was printed is out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class RankLink:
    """Talks to the driver over what was stdin and stdout; from then on prints go to stderr.

    A thread answers pings and notes what is asked for, so that a rank that computes or waits for
    others still answers. The process ends at once when the driver is gone or tells it to.

    Args:
        sockets: of the group; broken up where the driver says that it cannot go on.
    """

    def __init__(self, sockets: GroupSockets) -> None:
        self._sockets = sockets
        self._input = os.fdopen(os.dup(0), "rb")
        self._output = os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        sys.stdout.flush()
        os.dup2(2, 1)
        self._sending = threading.Lock()
        self._orders: queue.Queue[Start | End | Left] = queue.Queue()
        self.regroup_asked = False
        """True where another rank waits to join."""
        self.leave_asked = False
        """True where this rank is to leave."""
        threading.Thread(target=self._listen, name="link", daemon=True).start()

    def send(self, message: FromRank) -> None:
        """Tell the driver something; ends the process where the driver is gone."""
        line = memoryview(encoded(message))
        try:
            with self._sending:
                while line:
                    line = line[os.write(self._output, line) :]
        except OSError:
            os._exit(EXIT_STOPPED)

    def next_order(self) -> Start | End | Left:
        """Wait for what to do next: join a group, end, or (`Left`) leave as was asked."""
        return Left() if self.leave_asked else self._orders.get()

    def watch_for_notice(self) -> None:
        """From now on leave in good order after SIGTERM. To be called in the main thread."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        # Python runs a handler only between two of its own instructions, and the main thread may be
        # inside an exchange for long; the wake-up byte comes at once.
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGTERM, lambda *_: None)

        def wait_for_signal() -> None:
            while signal.SIGTERM not in os.read(read_end, 64):
                pass
            self._ask_to_leave()
            time.sleep(NOTICE_S * NOTICE_SHARE)
            self.leave_now()  # no check came within the notice

        threading.Thread(target=wait_for_signal, name="notice", daemon=True).start()

    def leave_now(self) -> None:
        """Say goodbye and end the process."""
        self.send(Left())
        end_process(EXIT_LEFT)

    def _ask_to_leave(self) -> None:
        self.leave_asked = True
        self._orders.put(Left())

    def _listen(self) -> None:
        for line in self._input:
            match to_rank(line):
                case Ping():
                    self.send(Pong())
                case Regroup():
                    self.regroup_asked = True
                case Broken(group=group):
                    self._sockets.break_up(group)
                case Leave():
                    self._ask_to_leave()
                case Start() as start:
                    self.regroup_asked = False
                    self._orders.put(start)
                case End() as end:
                    self._orders.put(end)
                case Stop():
                    break
        os._exit(EXIT_STOPPED)
