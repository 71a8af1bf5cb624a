from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.process import ElasticSpec, Lines, Member, RankProcess, ssh_command
from tests.support.host.processes import wait_until

REMOTE = ElasticConfig.model_validate(
    {
        "discovery": "ssh",
        "place": "/shared/hosts",
        "interface": "eth0",
        "ssh_key_file": "/keys/id",
        "ssh_known_hosts_file": "/keys/known hosts",
        "ssh_user": "trainer",
        "ssh_port": 2222,
    }
)


def test_only_known_hosts_are_reached_by_key_and_nothing_is_asked() -> None:
    command = ssh_command("h1", ["/usr/bin/python", "-S", "/with space/agent.py"], REMOTE)
    options = {o.partition("=")[0]: o.partition("=")[2] for o in command if "=" in o}
    assert options["BatchMode"] == options["StrictHostKeyChecking"] == "yes"
    assert options["UserKnownHostsFile"] == "/keys/known hosts"
    assert options["GlobalKnownHostsFile"] == "/dev/null"
    assert options["IdentityFile"] == "/keys/id"
    assert options["Port"] == "2222"
    assert int(options["ServerAliveInterval"]) * int(options["ServerAliveCountMax"]) <= 10
    assert command[:3] == ["ssh", "-F", "none"]
    assert command[-6:-3] == ["--", "h1", "exec"]
    assert shlex.split(" ".join(command[-4:])) == [
        *("exec", "/usr/bin/python", "-S", "/with space/agent.py")
    ]


def test_a_pipe_is_split_into_lines_as_they_come() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe:
        lines = Lines(pipe)
        assert lines.read() == []
        os.write(write_end, b"one\ntw")
        assert lines.read() == [b"one"]
        os.write(write_end, b"o\nthree")
        os.close(write_end)
        assert lines.read() == [b"two"]
        assert lines.is_open
        assert lines.read() == [b"three"]
        assert not lines.is_open


def test_a_rank_that_cannot_begin_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    process = RankProcess("localhost", ElasticSpec("no_such_module", tmp_path, {}), ElasticConfig())
    member = Member(process, "localhost", slot=1, seniority=0, started_s=0.0)
    try:
        wait_until(lambda: process.exit_code is not None, "the rank has ended")
        member.process.last_lines.extend(
            line.decode() for line in member.process.prints.read() if line
        )
        assert member.place == "localhost-1"
        assert member.label == "localhost joining"
        assert "ended with exit code 1 and without a report (" in member.end_in_words()
        assert "No module named" in member.end_in_words()
        assert not member.lost_host
        assert not member.left_in_good_order
    finally:
        member.process.end()


class EndedProcess:
    """A process that has ended."""

    def __init__(self, exit_code: int, is_remote: bool) -> None:
        self.exit_code = exit_code
        self.is_remote = is_remote
        self.last_lines = ["Permission denied (publickey)."]


def ended(exit_code: int, is_remote: bool = False) -> Member:
    process = EndedProcess(exit_code, is_remote)
    return Member(process, "h1", slot=0, seniority=0, started_s=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (ended(137), "was killed (signal 9; out of memory?) (Permission"),
        (ended(134), "was ended by signal 6 (Aborted) (Permission denied (publickey).)"),
        (ended(255, is_remote=True), "is out of reach: its SSH session broke off (Permission"),
    ],
)
def test_the_end_of_a_rank_is_put_into_words(member: Member, words: str) -> None:
    assert member.end_in_words().startswith(words)


def test_a_rank_that_was_given_up_has_not_left_though_its_guard_ends_by_a_signal() -> None:
    member = ended(143, is_remote=True)
    member.given_up = "has not answered for 15 s"
    assert not member.left_in_good_order
    assert member.lost_host
    assert member.end_in_words() == "has not answered for 15 s"
