"""A process has one name, and another process' number or container is not mistaken for it."""

from __future__ import annotations

import re
import subprocess

from tasks.kernel.process import TOKEN, ProcessName, start_of
from tests.support.host.processes import wait_until


def test_a_process_is_known_by_its_start_and_not_by_its_number_alone() -> None:
    me = ProcessName.of_this()
    assert not me.has_ended()
    assert me.model_copy(update={"start": me.start - 1}).has_ended()
    assert not me.model_copy(update={"space": "another"}).is_visible_to(me)


def test_a_process_that_has_ended_and_was_not_reaped_has_ended() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        start = start_of(child.pid)
        assert start is not None
        name = ProcessName.of_this().model_copy(update={"pid": child.pid, "start": start})
        assert not name.has_ended()
        child.kill()
        wait_until(name.has_ended, "the end, unreaped")
    finally:
        child.kill()
        child.wait()


def test_a_token_names_a_process_to_those_who_can_see_it_and_to_nobody_else() -> None:
    me = ProcessName.of_this()
    assert re.fullmatch(TOKEN, me.token)
    assert me.sees_alive(me.token) is True
    assert me.sees_alive(me.model_copy(update={"start": me.start + 1}).token) is False
    for other in ({"space": "pid:[1]"}, {"boot": "another"}):
        assert me.sees_alive(me.model_copy(update=other).token) is None
