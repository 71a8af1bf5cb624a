"""Two real serving processes behind a real Envoy: nobody notices that one is lost or replaced."""

from collections.abc import Iterator

import pytest

from infra.bench.serving.clients import Answers
from infra.bench.serving.http_request import UNLOGGED
from infra.bench.serving.replicas import Replicas, during, kill_one, replace_all, replicas
from tests.support.host.processes import run_falaj

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(tmp_path_factory.mktemp("replicas") / "home", 2, **UNLOGGED) as made:
        yield made


def lost(answers: Answers) -> list[bytes]:
    return [head for _, head in answers if not head.startswith(b"http/1.1 200")]


def test_a_process_that_is_killed_under_load_loses_no_answer(two: Replicas) -> None:
    answers = during(two, kill_one)
    assert len(answers) > 500
    assert not lost(answers)


def test_while_all_are_replaced_nobody_is_refused(two: Replicas) -> None:
    before = {*two.pids}
    answers = during(two, replace_all)
    assert not lost(answers)
    assert not before & {*two.pids}
    assert len(two.pids) == 2


def test_a_second_supervisor_is_refused(two: Replicas) -> None:
    code, said = run_falaj("--home", str(two.home), "serve", "--replicas", "2")
    assert code == 2
    assert "supervises this state folder" in said
