"""`falaj retry` on the embedded default: a run that failed or was killed goes on, moved or not."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.host.processes import processes_of, wait_until
from tests.support.platform.loops import Loop, loop_repository

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

WINDOW = ("2013-01-03T05:00Z", "2013-01-06T05:00Z")


def built(loop: Loop) -> list[str]:
    journal = loop.home / "artifacts" / "builds.jsonl"
    return [json.loads(line)["key"] for line in journal.read_text().splitlines()]


def test_a_run_that_failed_and_then_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "home", loop_repository(tmp_path))
    good = loop.repository.read("flights")
    loop.repository.write("flights", good.assign(origin="XXX"))
    code, said = loop.run("features", "refresh", *WINDOW)
    assert code == 4, said
    assert "raw_flights" in said
    landed = built(loop) if (loop.home / "artifacts").exists() else []

    loop.repository.write("flights", good)
    with loop.start("retry", "refresh-flights-20130103-20130106") as killed:
        wait_until(lambda: len(built(loop)) > len(landed), "a first step is finished", 300)
        killed.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes_of(loop.home), "no process is left", 60)
    loop = Loop(loop.home.rename(tmp_path / "moved"), loop.repository)

    assert "in this process" in loop.succeed("retry", "refresh-flights-20130103-20130106")
    assert len(built(loop)) == len(set(built(loop))), "nothing was built twice"
