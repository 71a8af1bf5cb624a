"""The driver of elastic training: starts ranks where hosts are, and forms them into groups.

A group trains until one of its ranks is lost, is to leave, or another is to join. Its ranks then
come back here, and those that are there form the next group, with what was last committed.

Horovod's own elastic driver is not used: it puts the whole environment on command lines, unpickles
what the network hands it, takes a clean leave for the end of the job, gives up a whole host for one
lost rank, and leaves remote workers behind. Of Horovod there is the rendezvous server alone.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Self

from pydantic import NonNegativeFloat, PositiveInt

from tasks.contracts.base import Contract
from tasks.kernel.errors import TrainingError, TransientError
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.training.elastic import link, process
from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.discovery import SHORTEST_REST_S, Cooldown, HostWatch, discovery_of
from tasks.training.elastic.tunnel import Tunnel
from tasks.training.launch.rank_group import error_of_rank
from tasks.training.launch.rendezvous import SLOT_FIELDS, Rendezvous, address_of, assignments

LOGGER = logging.getLogger(__name__)
EventKind = Literal["lost", "left"]
# A run of months with a host that comes and goes must not fill the memory.
MAX_RECORDS = 10_000


class ElasticEvent(Contract):
    """One thing that happened."""

    at_s: NonNegativeFloat
    """Seconds since the start of the run."""
    kind: EventKind
    place: str
    """Which rank's slot."""
    text: str


class GroupRecord(Contract):
    """One group of ranks that trained together."""

    number: PositiveInt
    size: PositiveInt
    places: tuple[str, ...]
    """Slots in rank order."""
    reason: str
    started_s: NonNegativeFloat
    """Seconds since the start of the run until its ranks were asked to begin."""


class ElasticReport(Contract):
    """The life of one run."""

    groups: tuple[GroupRecord, ...]
    events: tuple[ElasticEvent, ...]
    num_commits: int
    seconds: NonNegativeFloat


class History:
    """Takes what happens, in order."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._groups: deque[GroupRecord] = deque(maxlen=MAX_RECORDS)
        self._events: deque[ElasticEvent] = deque(maxlen=MAX_RECORDS)
        self.num_groups = 0
        self.num_commits = 0

    def note(self, kind: EventKind, place: str, text: str) -> None:
        """Something happened; `text` is a sentence."""
        LOGGER.log(logging.INFO if kind == "left" else logging.WARNING, "%s", text)
        self._events.append(ElasticEvent(at_s=self._now(), kind=kind, place=place, text=text))

    def group_starts(self, places: tuple[str, ...], reason: str) -> None:
        """Ranks are asked to form a group; `places` are theirs in rank order."""
        self.num_groups += 1
        number, size, slots = self.num_groups, len(places), ", ".join(places)
        LOGGER.info("group %d: %d rank(s) (%s): %s", number, size, slots, reason)
        self._groups.append(
            GroupRecord(
                number=number, size=size, places=places, reason=reason, started_s=self._now()
            )
        )

    @property
    def losses(self) -> list[str]:
        """Sentences about ranks that were lost, in order."""
        return [event.text for event in self._events if event.kind == "lost"]

    def report(self) -> ElasticReport:
        """All of it."""
        return ElasticReport(
            groups=tuple(self._groups),
            events=tuple(self._events),
            num_commits=self.num_commits,
            seconds=self._now(),
        )

    def _now(self) -> float:
        return time.monotonic() - self._started


PING_EVERY_S = 1.0
# Ranks that are still starting are waited for so long before the others begin or regroup.
GATHER_S = 10.0
JOIN_GATHER_S = 3.0
# From starting a rank until it can take part: slow imports on a busy machine are waited for.
START_TIMEOUT_S = 180.0
# After a loss, how long a rank may go on computing until it notices; above the longest step.
REGROUP_TIMEOUT_S = 60.0
# How long ranks may take to end when all is done.
SETTLE_S = 5.0
# Groups in a row that break although no rank is lost, and commit nothing: it will go on so.
FRUITLESS_LIMIT = 3
# Losses of ranks in one run before it ends: more is no accident.
RESET_LIMIT = 100
# Ranks that end before a first group has run: nothing will come of it.
FIRST_FAILURES_LIMIT = 3


def in_rank_order(candidates: Sequence[process.Member]) -> list[process.Member]:
    """Candidates by rank: the newest commit first, since rank 0 hands out its state.

    Ranks of one host follow each other, as Horovod numbers them.
    """
    ordered = sorted(candidates, key=lambda member: (-member.commit, member.seniority))
    hosts = list(dict.fromkeys(member.host for member in ordered))
    return sorted(ordered, key=lambda member: hosts.index(member.host))


class ElasticDriver:
    """All ranks of one elastic run. A context: when it is left, every process here is gone.

    To be entered, looked after and left in one thread that stays: a guard stops its rank when the
    thread that started it ends.

    Args:
        spec: what ranks run.
        config: hosts, limits and manners.
        on_line: takes what ranks print.
        shortest_rest_s: rest of a slot or host after a first failure; each further doubles it.
    """

    def __init__(
        self,
        spec: process.ElasticSpec,
        config: ElasticConfig,
        on_line: process.OnLine,
        shortest_rest_s: float = SHORTEST_REST_S,
    ) -> None:
        self._config = config
        self._spec, self._on_line = spec, on_line
        self._fleet = process.Fleet(spec, config, on_line)
        self._address = address_of(config.interface)
        self._tunnel: Tunnel | None = None
        self._hosts = HostWatch(discovery_of(config))
        self._cooldown = Cooldown(shortest_rest_s)
        self._history = History()
        self._rendezvous: Rendezvous | None = None
        self._num_resets = 0
        self._fruitless = 0
        self._commit_at_start = 0
        self._broken_since: float | None = None
        self._regroup_sent = self._break_sent = False
        self._lost_in_group = False
        self._reason = "start"
        self._waiting_since = time.monotonic()
        self._pinged_s = 0.0
        self._done_since: float | None = None

    def __enter__(self) -> Self:
        asked = self._config.encrypted or bool(os.environ.get(ENCRYPTION))
        if asked and self._config.discovery != "local":
            self._tunnel = Tunnel(self._config)
            self._address = self._tunnel.address
            inside = self._config.model_copy(update={"interface": self._tunnel.interface})
            self._fleet = process.Fleet(self._spec, inside, self._on_line)
        self._hosts.look()
        self._hosts.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.stop()
        self._fleet.close()
        self._close_rendezvous()
        if self._tunnel is not None:
            self._tunnel.close()

    @property
    def members(self) -> tuple[process.Member, ...]:
        """Ranks that live, whatever they do."""
        return tuple(self._fleet)

    @property
    def report(self) -> ElasticReport:
        """What has happened so far."""
        return self._history.report()

    def run(self, on_look: Callable[[], None] = lambda: None) -> ElasticReport:
        """Look after the ranks until training is done and all ranks are gone.

        Args:
            on_look: called in this thread several times a second.

        Raises:
            TransientError: too few ranks for too long, or too many were lost.
            FalajError: a rank's own error that will repeat; of its kind.
        """
        while self._done_since is None or len(self._fleet):
            self._look(0.2)
            on_look()
        return self.report

    def _look(self, wait_s: float) -> None:
        """Hear the ranks and do what is to be done now; waits for a while where nothing comes."""
        self._fleet.hear(wait_s, self._take)
        now = time.monotonic()
        for member in self._fleet.take_ended():
            self._part_with(member, now)
        if self._done_since is not None:
            self._finish(now, self._done_since)
            return
        self._give_up_silent(now)
        self._follow_hosts(now)
        self._form_groups(now)
        if now - self._pinged_s >= PING_EVERY_S:
            self._pinged_s = now
            for member in self._fleet:
                member.send(link.Ping())

    # Hearing the ranks

    def _take(self, member: process.Member, message: link.FromRank) -> None:
        member.heard_s = now = time.monotonic()
        match message:
            case link.Ready():
                if member.state is process.MemberState.IN_GROUP:
                    self._group_ends(now, broken=bool(message.failed))
                member.ready_s = member.ready_s or now
                member.state = process.MemberState.READY
                member.commit, member.failed = message.commit, message.failed
            case link.Pulse():
                member.commit = message.commit
                self._history.num_commits = max(self._history.num_commits, message.commit)
            case link.Left():
                member.left = True
            case link.Finished():
                member.state = process.MemberState.FINISHED
                if member.rank == 0:
                    self._done_since = now
            case link.Failed():
                member.error = message

    # Ranks that end

    def _part_with(self, member: process.Member, now: float) -> None:
        """A rank is gone: decide what that means.

        Raises:
            FalajError: its error will repeat.
            TransientError: too many ranks were lost.
        """
        if self._done_since is not None:
            return
        if member.error is not None and not member.error.infrastructure:
            error = member.error
            raise error_of_rank(member.label, error.error, error.message, error.traceback)
        if member.state in (process.MemberState.IN_GROUP, process.MemberState.FINISHED):
            self._group_ends(now, broken=not (member.left and member.left_in_good_order))
            self._close_rendezvous()
        if member.left_in_good_order:
            self._cooldown.rest(member.place, link.NOTICE_S, now)
            self._reason = f"{member.place} left"
            self._history.note("left", member.place, f"{member.place} left before its host ended")
        else:
            self._note_loss(member, now)

    def _group_ends(self, now: float, *, broken: bool) -> None:
        """A rank of the group is gone or back: the others cannot go on without it."""
        self._broken_since = self._broken_since or now
        if broken and not self._break_sent:
            self._break_sent = True
            for member in self._fleet.those(process.MemberState.IN_GROUP):
                member.send(link.Broken(group=member.group))

    def _note_loss(self, member: process.Member, now: float) -> None:
        place = member.host if member.lost_host else member.place
        rest_s = self._cooldown.punish(place, now)
        text = f"{member.label} ({member.place}) {member.end_in_words()}"
        self._history.note("lost", member.place, f"{text}. {place} rests for {rest_s:.0f} s")
        if member.group:
            self._lost_in_group = True
            self._reason = f"{member.place} was lost"
            self._num_resets += 1
        if self._num_resets > RESET_LIMIT:
            raise TransientError(
                f"{self._num_resets} ranks were lost, more than the limit of {RESET_LIMIT}; the "
                f"last one: {text}. A new attempt resumes from the newest checkpoint"
            )
        losses, is_first = self._history.losses, not self._history.num_groups
        losses = losses[-FIRST_FAILURES_LIMIT:]
        if is_first and not len(self._fleet) and len(losses) == FIRST_FAILURES_LIMIT:
            raise TransientError(f"no rank could be started: {'; '.join(losses)}")

    def _give_up(self, member: process.Member, why: str) -> None:
        """End a rank that no longer answers; it counts as lost at once."""
        self._fleet.give_up(member, why)
        self._part_with(member, time.monotonic())

    def _give_up_silent(self, now: float) -> None:
        for member in self._fleet:
            silent_s = now - member.heard_s
            if member.state is process.MemberState.STARTING:
                if now - member.started_s > START_TIMEOUT_S:
                    self._give_up(member, f"could not take part within {START_TIMEOUT_S:g} s")
            elif silent_s > process.SILENCE_LIMIT_S:
                self._give_up(member, f"has not answered for {silent_s:.0f} s")

    # Where ranks run

    def _follow_hosts(self, now: float) -> None:
        slots = self._hosts.slots
        for member in self._fleet:
            if member.slot >= slots.get(member.host, 0) and not member.asked_to_leave:
                member.asked_to_leave = True
                member.send(link.Leave())
                LOGGER.info("%s is no longer offered; it is asked to leave", member.place)
        if self._tunnel is not None:
            self._tunnel.follow(slots)
            slots = {host: n for host, n in slots.items() if self._tunnel.stands(host)}
        for host, count in slots.items():
            for slot in range(count):
                place = f"{host}-{slot}"
                resting = any(self._cooldown.is_resting(name, now) for name in (host, place))
                full = len(self._fleet) >= self._config.max_ranks
                if not (full or resting or self._fleet.has(place)):
                    self._fleet.start(host, slot)

    # Groups

    def _form_groups(self, now: float) -> None:
        in_group = self._fleet.those(process.MemberState.IN_GROUP)
        if not in_group:
            self._form_group(now)
            return
        self._waiting_since = now
        if self._broken_since is not None:
            self._await_the_rest(in_group, now - self._broken_since)
        elif not self._regroup_sent and self._somebody_joins(now):
            self._regroup_sent = True
            for member in in_group:
                member.send(link.Regroup())

    def _await_the_rest(self, in_group: list[process.Member], waited_s: float) -> None:
        """Others of the group are lost or back: give up those that never notice."""
        if self._fleet.those(process.MemberState.FINISHED) or waited_s < REGROUP_TIMEOUT_S:
            return
        for member in in_group:
            self._give_up(member, f"did not come back within {waited_s:.0f} s of its group's end")

    def _somebody_joins(self, now: float) -> bool:
        """True where ranks wait to join, and no other one is about to."""
        ready = [m for m in self._fleet.those(process.MemberState.READY) if not m.asked_to_leave]
        if not ready or self._fleet.those(process.MemberState.FINISHED):
            return False
        starting = self._fleet.those(process.MemberState.STARTING)
        return not starting or now - min(m.ready_s for m in ready) > JOIN_GATHER_S

    def _form_group(self, now: float) -> None:
        free = self._fleet.those(process.MemberState.READY, process.MemberState.FINISHED)
        candidates = [member for member in free if not member.asked_to_leave]
        if len(candidates) < self._config.min_ranks:
            self._wait_for_ranks(len(candidates), now - self._waiting_since)
            return
        starting = self._fleet.those(process.MemberState.STARTING)
        waited_s = now - min(m.ready_s for m in candidates)
        if not self._history.num_groups and starting and waited_s < GATHER_S:
            return
        self._check_fruit(candidates)
        self._start_group(in_rank_order(candidates), now)

    def _wait_for_ranks(self, num_ready: int, waited_s: float) -> None:
        if waited_s > self._config.gather_timeout_s:
            reasons = [self._hosts.trouble, *self._history.losses[-3:]]
            reasons += [f"tunnel: {self._tunnel.trouble}"] if self._tunnel else []
            known = "; ".join(reason for reason in reasons if reason)
            raise TransientError(
                f"{num_ready} rank(s) are ready after {waited_s:.0f} s, min_ranks="
                f"{self._config.min_ranks} are needed; hosts found: "
                f"{', '.join(self._hosts.slots) or 'none'}. {known or 'No rank has failed'}"
            )

    def _check_fruit(self, candidates: list[process.Member]) -> None:
        """Refuse to go on where group after group breaks by itself."""
        failures = [m.failed for m in candidates if m.failed]
        committed = max(m.commit for m in candidates) > self._commit_at_start
        is_fruitless = failures and not self._lost_in_group and not committed
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        if self._fruitless >= FRUITLESS_LIMIT:
            raise TrainingError(
                f"{self._fruitless} groups in a row broke although no rank was lost, and committed "
                f"nothing: {failures[0]}. Do all ranks exchange the same tensors in the same order?"
            )

    def _start_group(self, members: list[process.Member], now: float) -> None:
        self._close_rendezvous()
        slots = assignments([member.host for member in members])
        self._rendezvous = rendezvous = Rendezvous(slots, self._address)
        newest = max(member.commit for member in members)
        joined = [m.place for m in members if not m.group]
        if self._history.num_groups and joined and not self._lost_in_group:
            self._reason = f"{', '.join(joined)} joined"
        self._history.group_starts(tuple(m.place for m in members), self._reason)
        for member, slot in zip(members, slots, strict=True):
            member.state, member.rank = process.MemberState.IN_GROUP, slot.rank
            member.group, member.heard_s = self._history.num_groups, now
            member.send(
                link.Start(
                    group=self._history.num_groups,
                    **{field: getattr(slot, field) for field in SLOT_FIELDS},
                    address=rendezvous.address,
                    port=rendezvous.port,
                    sync=newest == 0 or any(member.commit != newest for member in members),
                    fresh=newest == 0,
                )
            )
        self._commit_at_start = newest
        self._broken_since = None
        self._regroup_sent = self._break_sent = self._lost_in_group = False
        self._waiting_since = now

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _finish(self, now: float, done_since: float) -> None:
        """Rank 0 has written the result: the others need not have noticed."""
        for member in self._fleet:
            if not member.asked_to_leave:
                member.asked_to_leave = True
                member.send(link.End())
            if now - done_since > SETTLE_S:
                self._give_up(member, "did not end")
