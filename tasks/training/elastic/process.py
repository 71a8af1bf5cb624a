"""The processes of all ranks of an elastic run: started here or over SSH, heard, and ended."""

import enum
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from tasks.kernel import guard
from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.elastic import link
from tasks.training.elastic.agent import EXIT_CUT_OFF
from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.discovery import LOCAL_HOST
from tasks.training.launch import rank_group
from tasks.training.launch.rendezvous import network_variables

NUM_LAST_LINES = 5
# A rank that answers no ping is given up; a remote rank that gets none ends.
SILENCE_LIMIT_S = 15.0
SSH_EXIT_CODE = 255
MAX_WAITING_BYTES = 1 << 20


@dataclass(frozen=True)
class ElasticSpec:
    """What every rank is started with.

    Args:
        module: run as `python -m module run_path`; it calls `rank.run_elastic`.
        run_path: the run directory; the same path on all hosts.
        variables: environment of the ranks, such as the number of threads; no secrets.
        lock_descriptor: of the lock on the run directory; local guards hold it too.
    """

    module: str
    run_path: Path
    variables: Mapping[str, str]
    lock_descriptor: int | None = None

    def environment(self, host: str, config: ElasticConfig) -> dict[str, str]:
        """What a rank has beside its host's own few variables."""
        network = network_variables(host, config.interface, config.gloo_timeout_s)
        return {**self.variables, **network}


def _local(spec: ElasticSpec, config: ElasticConfig) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a rank on this machine."""
    environment = rank_group.inherited_environment(os.environ) | spec.environment(
        LOCAL_HOST, config
    )
    return guard.python("-m", spec.module, str(spec.run_path)), environment


def _remote(
    host: str, spec: ElasticSpec, config: ElasticConfig
) -> tuple[list[str], dict[str, str], bytes]:
    """SSH command and its environment, and the first line of its stdin: see `agent`."""
    root = str(PROJECT_ROOT)  # the same path on all hosts, like Python's
    order = {
        "command": guard.python("-m", spec.module, str(spec.run_path)),
        "directory": str(spec.run_path),
        "environment": {
            "PYTHONPATH": root,
            "PYTHONUNBUFFERED": "1",
            **{name: os.environ[name] for name in rank_group.KEY_VARIABLES if name in os.environ},
            **spec.environment(host, config),
        },
        "inherit": rank_group.INHERITED_VARIABLES,
        "silence_limit_s": SILENCE_LIMIT_S,
        "grace_s": link.NOTICE_S,
    }
    agent = f"{root}/tasks/training/elastic/agent.py"
    command = ssh_command(host, [sys.executable, "-S", agent], config)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return command, environment, json.dumps(order).encode() + b"\n"


def ssh_command(host: str, remote: list[str], config: ElasticConfig) -> list[str]:
    """`remote` on `host`, through the system's SSH client, whatever the user's own settings say."""
    options = {
        "BatchMode": "yes",  # never asks
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": str(config.ssh_known_hosts_file),
        "GlobalKnownHostsFile": "/dev/null",
        "IdentityFile": str(config.ssh_key_file),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "ForwardAgent": "no",
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",
        "Port": str(config.ssh_port),
        # A link that is cut ends the session within six seconds.
        "ServerAliveInterval": "2",
        "ServerAliveCountMax": "3",
        "ConnectTimeout": "5",
        "LogLevel": "ERROR",
    }
    user = ["-l", config.ssh_user] if config.ssh_user else []
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    quoted = [shlex.quote(word) for word in remote]
    return ["ssh", "-F", "none", "-T", *user, *settings, "--", host, "exec", *quoted]


# Nobody but the host's own end sends it to a rank.
ENDED_BY_NOTICE = 128 + signal.SIGTERM


class MemberState(enum.Enum):
    """Where a rank is in its life."""

    STARTING = "starting"
    READY = "ready"
    IN_GROUP = "in a group"
    FINISHED = "finished"


class Member:
    """One rank: its guarded process, here or behind an SSH session, and what is known of it.

    To be started in a thread that stays, see `kernel.guard`. Times are of the monotonic clock.
    """

    def __init__(
        self, host: str, slot: int, seniority: int, spec: ElasticSpec, config: ElasticConfig
    ) -> None:
        self.host, self.slot, self.seniority = host, slot, seniority
        self.started_s = time.monotonic()
        self.state = MemberState.STARTING
        self.ready_s = 0.0
        self.heard_s = 0.0
        """When it last answered a ping or said anything."""
        self.commit = 0
        self.rank: int | None = None
        self.group = 0
        """Number of the last group that it was in."""
        self.failed = ""
        self.error: link.Failed | None = None
        self.left = False
        self.asked_to_leave = False
        self.given_up = ""
        """Why the driver ended it; empty where it did not."""
        self.is_remote = host != LOCAL_HOST
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._waiting = b""
        command, environment = _local(spec, config)
        if self.is_remote:
            command, environment, self._waiting = _remote(host, spec, config)
        self._guard = subprocess.Popen(
            guard.guarded(command, link.NOTICE_S),
            cwd=spec.run_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=() if spec.lock_descriptor is None else (spec.lock_descriptor,),
        )
        self._input = cast(IO[bytes], self._guard.stdin)
        os.set_blocking(self._input.fileno(), False)
        self.messages = rank_group.Lines(cast(IO[bytes], self._guard.stdout))
        self.prints = rank_group.Lines(cast(IO[bytes], self._guard.stderr))
        self._write()

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
    def pid(self) -> int:
        """Of the guard; the rank, or its SSH session, is below it."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """128 plus n where signal n ended it; None while it runs."""
        code = self._guard.poll()
        return None if code is None else guard.shell_code(code)

    @property
    def has_ended(self) -> bool:
        """True where nothing more is to come from it."""
        is_open = self.messages.is_open or self.prints.is_open
        return self.exit_code is not None and not is_open

    @property
    def left_in_good_order(self) -> bool:
        """True where its host is taken away, and it went."""
        went = self.left or self.exit_code in (link.EXIT_LEFT, ENDED_BY_NOTICE)
        return went and not self.given_up  # its guard ends by SIGTERM then

    @property
    def lost_host(self) -> bool:
        """True where its whole host cannot be reached."""
        cut_off = self.exit_code in (SSH_EXIT_CODE, EXIT_CUT_OFF) or bool(self.given_up)
        return self.is_remote and cut_off

    def end_in_words(self) -> str:
        """Why it is gone, as a clause."""
        if self.given_up:
            return self.given_up
        if self.error is not None:
            return f"ended with {self.error.error}: {self.error.message}"
        code = self.exit_code or 0
        if self.is_remote and code == SSH_EXIT_CODE:
            clause = "is out of reach: its SSH session broke off"
        elif self.is_remote and code == EXIT_CUT_OFF:
            clause = "was cut off: no ping of the driver has reached its host for too long"
        else:
            clause = rank_group.end_in_words(code)
        lines = [line for line in self.last_lines if line.strip()]
        return f"{clause} ({' | '.join(lines)})" if lines else clause

    def send(self, message: link.ToRank) -> None:
        """Send the rank a message; what a stuck rank does not take is dropped in the end."""
        if len(self._waiting) < MAX_WAITING_BYTES:
            self._waiting += link.encoded(message)
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._input.fileno(), self._waiting) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._waiting = b""

    def begin_to_end(self) -> None:
        """End the rank at once, wherever it is; returns before it is gone."""
        if self._input.closed:
            return
        self.send(link.Stop())
        self._input.close()  # ends a remote rank even where its link is slow
        self._guard.terminate()

    def end(self) -> None:
        """End the rank and wait until all processes of it here are gone."""
        self.begin_to_end()
        rank_group.end_guard(self._guard, guard.GRACE_S)
        self.messages.pipe.close()
        self.prints.pipe.close()


OnLine = Callable[[str, str], None]
"""(host and rank, line): takes a line that a rank printed."""


class Fleet:
    """Ranks by their place. To be used in one thread that stays, see `kernel.guard`."""

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

    def has(self, place: str) -> bool:
        """True where a rank is at a place, be it one that is just ending."""
        return place in self._members or any(member.place == place for member in self._ending)

    def start(self, host: str, slot: int) -> None:
        """Start a rank."""
        member = Member(host, slot, self._num_started, self._spec, self._config)
        self._num_started += 1
        self._members[member.place] = member
        for lines in (member.messages, member.prints):
            self._selector.register(lines.pipe, selectors.EVENT_READ, (member, lines))

    def hear(self, wait_s: float, take: Callable[[Member, link.FromRank], None]) -> None:
        """Pass on what ranks print, and hand their messages to `take`; waits for a while."""
        for key, _ in self._selector.select(wait_s):
            member, lines = cast(tuple[Member, rank_group.Lines], key.data)
            for line in lines.read():
                message = link.from_rank(line) if lines is member.messages else None
                if message is not None:
                    take(member, message)
                else:
                    text = line.decode(errors="replace")
                    member.last_lines.append(text)
                    self._on_line(member.label, text)
            if not lines.is_open:
                self._selector.unregister(lines.pipe)

    def take_ended(self) -> list[Member]:
        """Ranks that have ended since the last call; they no longer belong to the fleet."""
        for member in [m for m in self._ending if m.has_ended]:
            member.end()
            self._ending.remove(member)
        ended = [member for member in self if member.has_ended]
        for member in ended:
            member.end()
            del self._members[member.place]
        return ended

    def give_up(self, member: Member, why: str) -> None:
        """End a rank, wherever it is; returns before it is gone, but it no longer belongs here."""
        member.given_up = why
        member.begin_to_end()
        for lines in (member.messages, member.prints):
            if lines.is_open:
                self._selector.unregister(lines.pipe)
                lines.is_open = False
        del self._members[member.place]
        self._ending.append(member)

    def close(self) -> None:
        """End all ranks and wait until their processes here are gone."""
        everyone = [*self._members.values(), *self._ending]
        for member in everyone:
            member.begin_to_end()
        for member in everyone:
            member.end()
        self._selector.close()
