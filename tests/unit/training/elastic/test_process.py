import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.training.elastic.config import ElasticConfig
from tasks.training.elastic.process import ElasticSpec, Member, _local, ssh_command
from tests.support.host.processes import wait_until
from tests.support.ranks.elastic import REMOTE


def test_only_known_hosts_are_reached_by_key_and_nothing_is_asked() -> None:
    more = {"ssh_known_hosts_file": "/keys/known hosts", "ssh_user": "trainer", "ssh_port": 2222}
    config = ElasticConfig.model_validate({**REMOTE, **more})
    command = ssh_command("h1", ["/usr/bin/python", "-S", "/with space/agent.py"], config)
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


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    """A rank on this host that cannot begin."""
    member = Member("localhost", 1, 0, ElasticSpec("no_such_module", tmp_path, {}), ElasticConfig())
    yield member
    member.end()


def test_a_rank_that_cannot_begin_is_described_with_its_last_words(member: Member) -> None:
    wait_until(lambda: member.exit_code is not None, "the rank has ended")
    member.last_lines.extend(line.decode() for line in member.prints.read() if line)
    assert (member.place, member.label) == ("localhost-1", "localhost joining")
    assert "ended with exit code 1 and without a report (" in member.end_in_words()
    assert "No module named" in member.end_in_words()
    assert not member.lost_host
    assert not member.left_in_good_order


def test_a_rank_of_this_host_is_given_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_DATABASE_PASSWORD", "a-secret")
    spec = ElasticSpec("module", tmp_path, {"OMP_NUM_THREADS": "1"})
    command, environment = _local(spec, ElasticConfig())
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "a-secret" not in str((command, environment))
