"""The rank's side of elastic training: join a group, train, and when it breaks join the next."""

import logging
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

from tasks.kernel.errors import TransientError
from tasks.training.elastic import link as messages
from tasks.training.elastic.commits import CheckedSteps, Commits, ElasticSession, Regroup
from tasks.training.elastic.config import ElasticConfig
from tasks.training.launch.rendezvous import address_of, slot_variables
from tasks.training.strategies.base import Communicator

LOGGER = logging.getLogger(__name__)
# What another host, or a later attempt, may not meet.
INFRASTRUCTURE_ERRORS = (TransientError, MemoryError, ConnectionError, TimeoutError)
EXIT_FAILED = 1


def run_elastic(
    build: Callable[[], ElasticSession],
    config: ElasticConfig,
    join_ranks: Callable[[], Communicator],
) -> None:
    """Be one rank of an elastic run, from its start to its end; does not return.

    To be called in the main thread, as early as can be, by a program that `ElasticDriver` started.

    Args:
        build: makes the session of this rank; may take long, the others train meanwhile.
        config: as the driver has it.
        join_ranks: joins the group that the environment names.
    """
    sockets = messages.GroupSockets()
    link = messages.RankLink(sockets)
    link.watch_for_notice()
    code = 0
    try:
        address_of(config.interface)
        ElasticRank(link, build(), join_ranks, sockets).run()
    except Exception as exc:
        traceback.print_exc()
        link.send(
            messages.Failed(
                error=type(exc).__name__,
                message=str(exc),
                traceback=traceback.format_exc(),
                infrastructure=isinstance(exc, INFRASTRUCTURE_ERRORS),
            )
        )
        code = EXIT_FAILED
    messages.end_process(code)  # Horovod's own end may wait for ranks that are gone


@dataclass
class ElasticRank:
    """Takes part in one group of ranks after the other until training has ended."""

    link: messages.RankLink
    session: ElasticSession
    join_ranks: Callable[[], Communicator]
    sockets: messages.GroupSockets
    _commits: Commits = field(default_factory=Commits)
    _ranks: Communicator | None = None

    def run(self) -> None:
        """Train with whoever the driver names; returns when the driver says that all is done."""
        self.link.send(messages.Ready(commit=self._commits.number))
        while True:
            match self.link.next_order():
                case messages.Start() as start:
                    self._take_part(start)
                case messages.End():
                    self._leave_group()
                    return
                case messages.Left():
                    self.link.leave_now()

    def _take_part(self, start: messages.Start) -> None:
        failed = ""
        try:
            self._join(start)
            assert self._ranks is not None
            self.session.run(CheckedSteps(self.link, self._ranks, self.session, self._commits))
            self.link.send(messages.Finished())
            return
        except Regroup:
            LOGGER.debug("group %d ends as planned", start.group)
        except HorovodInternalError as exc:
            failed = f"{type(exc).__name__}: {exc}"
            LOGGER.debug("group %d is broken: %s", start.group, exc)
            self.sockets.break_up(start.group)  # so that the others notice as well
        self._leave_group()
        if not self.link.leave_asked:
            self.link.send(messages.Ready(commit=self._commits.number, failed=failed))

    def _join(self, start: messages.Start) -> None:
        self._leave_group()
        os.environ.update(slot_variables(start, start.address, start.port))
        try:
            with self.sockets.joining(start.group):
                self._ranks = self.join_ranks()
        except ValueError as exc:  # how Horovod says that a rank was lost while they met
            hvd.shutdown()  # or the next start would fail as well
            raise HorovodInternalError(str(exc)) from exc
        self.session.rejoin(self._ranks)
        if start.fresh:
            self._commits.keep(self.session.snapshot())
        if start.sync:
            self._commits.receive(self._ranks)
        self.session.restore(self._commits.state())

    def _leave_group(self) -> None:
        if self._ranks is not None:
            with suppress(HorovodInternalError):
                self._ranks.shut_down()
            self.sockets.left()
            self._ranks = None
