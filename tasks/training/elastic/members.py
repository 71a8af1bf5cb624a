"""The ranks that an elastic driver holds, from their start to their end."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from tasks.training.elastic.agent import EXIT_CUT_OFF
from tasks.training.elastic.link import EXIT_LEFT
from tasks.training.elastic.messages import Failed
from tasks.training.elastic.process import SSH_EXIT_CODE, RankProcess

# Nobody but the host's own end sends it to a rank.
ENDED_BY_NOTICE = 128 + signal.SIGTERM


class MemberState(enum.Enum):
    """Where a rank is in its life."""

    STARTING = "starting"
    READY = "ready"
    IN_GROUP = "in a group"
    FINISHED = "finished"


@dataclass
class Member:
    """One rank's process, and what is known of it. Times are of the monotonic clock."""

    process: RankProcess
    host: str
    slot: int
    seniority: int
    started_s: float
    state: MemberState = MemberState.STARTING
    ready_s: float = 0.0
    heard_s: float = 0.0
    """When it last answered a ping or said anything."""
    commit: int = 0
    rank: int | None = None
    group: int = 0
    """Number of the last group that it was in."""
    trains: bool = False
    failed: str = ""
    error: Failed | None = None
    left: bool = False
    asked_to_leave: bool = False
    given_up: str = ""
    """Why the driver ended it; empty where it did not."""

    @property
    def place(self) -> str:
        """Its slot, such as `h1-0`."""
        return f"{self.host}-{self.slot}"

    @property
    def label(self) -> str:
        """How its lines are marked in the log."""
        number = "joining" if self.rank is None else f"rank {self.rank}"
        return f"{self.host} {number}"

    @property
    def has_ended(self) -> bool:
        """True where nothing more is to come from it."""
        return (
            self.process.exit_code is not None
            and not self.process.messages.is_open
            and not self.process.prints.is_open
        )

    @property
    def left_in_good_order(self) -> bool:
        """True where it was told that its host is taken away, and went."""
        went = self.left or self.process.exit_code in (EXIT_LEFT, ENDED_BY_NOTICE)
        return went and not self.given_up  # its guard ends by SIGTERM then

    @property
    def lost_host(self) -> bool:
        """True where its whole host cannot be reached."""
        code = self.process.exit_code
        cut_off = code in (SSH_EXIT_CODE, EXIT_CUT_OFF) or bool(self.given_up)
        return self.process.is_remote and cut_off

    def end_in_words(self) -> str:
        """Why it is gone, as a clause."""
        code = self.process.exit_code or 0
        if self.given_up:
            return self.given_up
        if self.error is not None:
            return f"ended with {self.error.error}: {self.error.message}"
        if self.process.is_remote and code == SSH_EXIT_CODE:
            return f"is out of reach: its SSH session broke off{self._last_words()}"
        if self.process.is_remote and code == EXIT_CUT_OFF:
            return "was cut off: no ping of the driver has reached its host for too long"
        if code == 128 + signal.SIGKILL:
            return "was killed (signal 9; out of memory?)"
        if code > 128:
            return f"was ended by signal {code - 128}{self._last_words()}"
        return f"ended with exit code {code} and without a report{self._last_words()}"

    def _last_words(self) -> str:
        lines = [line for line in self.process.last_lines if line.strip()]
        return f" ({' | '.join(lines)})" if lines else ""
