"""The processes of all ranks of an elastic run: started, heard, and ended for certain."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator
from typing import cast

from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.members import Member, MemberState
from tasks.training.elastic.messages import FromRank, ToRank, from_rank
from tasks.training.elastic.process import ElasticSpec, Lines, RankProcess

OnLine = Callable[[str, str], None]
"""(host and rank, line): takes a line that a rank printed."""


class Fleet:
    """Ranks by their place. To be used in one thread that stays, see `launch.guard`."""

    def __init__(self, spec: ElasticSpec, config: ElasticConfig, on_line: OnLine) -> None:
        self._spec = spec
        self._config = config
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._members: dict[str, Member] = {}
        self._ending: list[Member] = []
        self._num_started = 0

    def __iter__(self) -> Iterator[Member]:
        """The ranks that live; some may go while they are gone through."""
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def those(self, *states: MemberState) -> list[Member]:
        """Ranks in any of some states, the oldest first."""
        return [member for member in self if member.state in states]

    def tell_all(self, message: ToRank) -> None:
        """Send every rank the same."""
        for member in self:
            member.process.send(message)

    def has(self, place: str) -> bool:
        """True where a rank is at a place, be it one that is just ending."""
        return place in self._members or any(member.place == place for member in self._ending)

    def start(self, host: str, slot: int) -> None:
        """Start a rank."""
        process = RankProcess(host, self._spec, self._config)
        member = Member(process, host, slot, self._num_started, time.monotonic())
        self._num_started += 1
        self._members[member.place] = member
        for lines in (process.messages, process.prints):
            self._selector.register(lines.pipe, selectors.EVENT_READ, (member, lines))

    def hear(self, wait_s: float, take: Callable[[Member, FromRank], None]) -> None:
        """Pass on what ranks print, and hand their messages to `take`; waits for a while."""
        for key, _ in self._selector.select(wait_s):
            member, lines = cast(tuple[Member, Lines], key.data)
            for line in lines.read():
                message = from_rank(line) if lines is member.process.messages else None
                if message is not None:
                    take(member, message)
                else:
                    self._print(member, line.decode(errors="replace"))
            if not lines.is_open:
                self._selector.unregister(lines.pipe)

    def _print(self, member: Member, text: str) -> None:
        member.process.last_lines.append(text)
        self._on_line(member.label, text)

    def take_ended(self) -> list[Member]:
        """Ranks that have ended since the last call; they no longer belong to the fleet."""
        for member in [m for m in self._ending if m.has_ended]:
            member.process.end()
            self._ending.remove(member)
        ended = [member for member in self if member.has_ended]
        for member in ended:
            member.process.end()
            del self._members[member.place]
        return ended

    def give_up(self, member: Member, why: str) -> None:
        """End a rank, wherever it is; returns before it is gone, but it no longer belongs here."""
        member.given_up = why
        member.process.begin_to_end()
        for lines in (member.process.messages, member.process.prints):
            if lines.is_open:
                self._selector.unregister(lines.pipe)
                lines.is_open = False
        del self._members[member.place]
        self._ending.append(member)

    def close(self) -> None:
        """End all ranks and wait until their processes here are gone."""
        everyone = [*self._members.values(), *self._ending]
        for member in everyone:
            member.process.begin_to_end()
        for member in everyone:
            member.process.end()
        self._selector.close()
