"""Which runs are lost and what is done about each, from facts alone."""

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.control.config import RecoveryConfig
from tasks.control.recovery import judge

CONFIG = RecoveryConfig()


def fact(state: judge.RunState, age_s: float = 1000, **more: Any) -> judge.RunFact:
    described: dict[str, Any] = {"id": "r", "name": "n", "flow": "pipeline", "process": "unknown"}
    return judge.RunFact(state=state, age_s=age_s, **(described | more))


def judged(*facts: judge.RunFact) -> judge.Repair | None:
    repairs = [r for r in judge.judge(facts, CONFIG) if r.run == "r"]
    return repairs[0] if repairs else None


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        (fact("running", process="gone"), "crash"),
        (fact("running", age_s=5, process="gone"), None),
        (fact("running", process="alive", heartbeat_age_s=9999), None),
        (fact("running", process="unknown"), None),
        (fact("running", age_s=100_000, process="unknown"), None),
        (fact("running", process="unknown", pids=(7,), heartbeat_age_s=9999), None),
        (fact("running", process="elsewhere", heartbeat_age_s=30), None),
        (fact("running", process="elsewhere", heartbeat_age_s=500), "crash"),
        (fact("running", age_s=20, process="elsewhere", heartbeat_age_s=500), None),
        (fact("running", process="elsewhere", beats_s=30), "crash"),
        (fact("running", age_s=100, process="elsewhere", beats_s=30), None),
        (fact("running", process="elsewhere", heartbeat_age_s=500, beats_s=180), None),
        (fact("cancelling", age_s=5, pids=(7,)), None),
        (fact("cancelling", pids=(7,)), "cancel"),
        (fact("cancelling", process="gone"), "cancel"),
        (fact("cancelling", process="elsewhere", heartbeat_age_s=10), None),
        (fact("cancelling", process="elsewhere", heartbeat_age_s=500), "cancel"),
        (fact("pending", age_s=60), None),
        (fact("pending"), "crash"),
        (fact("pending", pids=(7,)), None),
        (fact("pending", pool_type="kubernetes"), None),
        (fact("pending", age_s=4000, pool_type="kubernetes"), "crash"),
        (fact("scheduled"), None),
        (fact("paused", age_s=1e7, process="gone", heartbeat_age_s=1e7), None),
        (fact("completed", pids=(7,)), "end processes"),
        (fact("cancelled", age_s=3, pids=(7,)), None),
        (fact("crashed"), "retry"),
        (fact("crashed", attempts=3), None),
        (fact("crashed", attempts=0, restarts=1), "retry"),
        (fact("crashed", attempts=0, restarts=2), None),
        (fact("crashed", age_s=4000), None),
        (fact("crashed", retried=False), None),
        (fact("crashed", deployed=False), None),
        (fact("crashed", parent="p"), None),
        (fact("failed"), None),
        (fact("cancelled"), None),
    ],
    ids=lambda value: value if isinstance(value, str | None) else f"{value.state}-{value.process}",
)
def test_each_kind_of_run_gets_what_it_needs_and_no_more(
    seen: judge.RunFact, action: str | None
) -> None:
    repair = judged(seen)
    assert (repair.action if repair else None) == action


def test_only_a_missing_heartbeat_needs_a_second_look_and_orphans_end_with_their_run() -> None:
    elsewhere = judged(fact("running", process="elsewhere", heartbeat_age_s=500))
    here = judged(fact("running", process="gone", pids=(5, 6)))
    assert (elsewhere.certain, here.certain, here.pids) == (False, True, (5, 6))


@pytest.mark.parametrize(
    ("parent", "child", "action"),
    [
        (fact("cancelled", id="p"), fact("running", process="alive", parent="p"), "ask to cancel"),
        (fact("failed", id="p"), fact("scheduled", parent="p"), "cancel"),
        (fact("cancelled", id="p", age_s=5), fact("running", process="alive", parent="p"), None),
        (fact("completed", id="p"), fact("running", process="alive", parent="p"), None),
        (fact("running", id="p"), fact("running", process="alive", parent="p"), None),
        # The loop will be retried, and takes its stage up again.
        (fact("crashed", id="p"), fact("running", process="alive", parent="p"), None),
        (
            fact("crashed", id="p", attempts=3),
            fact("running", process="alive", parent="p"),
            "ask to cancel",
        ),
        (
            fact("crashed", id="p", attempts=3),
            fact("running", process="gone", parent="p", deployed=False),
            "crash",
        ),
    ],
)
def test_a_stage_is_ended_when_its_loop_is_gone_for_good(
    parent: judge.RunFact, child: judge.RunFact, action: str | None
) -> None:
    repair = judged(parent, child)
    assert (repair.action if repair else None) == action


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (fact("scheduled", pool="empty"), "falaj worker empty"),
        (fact("scheduled", pool="empty", age_s=100), None),
        (fact("scheduled", pool="served"), None),
        (fact("running", age_s=100_000), "never sent a heartbeat"),
        (fact("running", age_s=100_000, heartbeat_age_s=5), None),
        (fact("running", age_s=100_000, process="alive"), None),
        (fact("running"), None),
        (fact("crashed", attempts=3), "cut off 3 times.*retry n"),
        (fact("crashed", attempts=0, restarts=2), "cut off 3 times"),
        (fact("crashed", attempts=2), None),
        (fact("crashed", attempts=3, retried=False), None),
        (fact("crashed", attempts=3, age_s=4000), None),
    ],
)
def test_what_no_repair_helps_is_left_to_a_person(seen: judge.RunFact, said: str | None) -> None:
    why = judge.needs_a_person(seen, CONFIG, {"empty"})
    assert (why is None) if said is None else re.search(said, why or "")
    assert why is None or judged(seen) is None


facts = st.builds(
    judge.RunFact,
    id=st.just("r"),
    name=st.just("n"),
    flow=st.just("pipeline"),
    state=st.sampled_from(get_args(judge.RunState)),
    age_s=st.floats(0, 1e6),
    process=st.sampled_from(get_args(judge.ProcessState)),
    pids=st.sampled_from([(), (1,), (1, 2)]),
    heartbeat_age_s=st.none() | st.floats(0, 1e6),
    attempts=st.integers(0, 5),
    restarts=st.integers(0, 5),
    retried=st.booleans(),
    deployed=st.booleans(),
)


@given(facts)
def test_what_lives_is_never_crashed_and_what_waits_for_a_person_is_left(
    seen: judge.RunFact,
) -> None:
    repair = judged(seen)
    if repair is None:
        return
    assert seen.state != "paused"
    if repair.action == "crash":
        assert seen.process != "alive" or seen.state == "pending"
        assert seen.state in {"running", "pending"}
    if repair.action == "retry":
        assert seen.state == "crashed"
        assert seen.retried
        assert seen.attempts <= CONFIG.max_retries
        assert seen.restarts < CONFIG.max_retries
    if repair.action == "end processes":
        assert seen.state in judge.ENDED
        assert repair.pids == seen.pids


def test_a_slot_is_leaked_only_if_both_looks_say_so() -> None:
    def slots(taken: int, holders: int) -> tuple[judge.SlotFact, ...]:
        return (judge.SlotFact(limit="deployment:1", taken=taken, num_holders=holders),)

    assert judge.leaked_slots(slots(1, 0), slots(1, 0)) == slots(1, 0)
    assert judge.leaked_slots(slots(1, 0), slots(1, 1)) == ()
    assert judge.leaked_slots(slots(1, 1), slots(1, 0)) == ()
    assert judge.leaked_slots(slots(2, 1), slots(2, 1)) == slots(2, 1)
    assert judge.leaked_slots((), slots(1, 0)) == ()


def task_run(**more: Any) -> judge.TaskRunFact:
    described: dict[str, Any] = {"id": "t", "name": "task", "age_s": 1000, "attempt": 1, "run": "r"}
    living = {"run_state": "running", "run_age_s": 1000, "run_attempts": 1}
    return judge.TaskRunFact(**(described | living | more))


@pytest.mark.parametrize(
    ("seen", "is_dead"),
    [
        (task_run(), False),
        (task_run(run_state="scheduled"), False),
        (task_run(run_state="crashed"), True),
        (task_run(run_state="cancelled"), True),
        (task_run(run_state="completed", run_age_s=5), False),
        (task_run(run_state="completed", age_s=5), False),
        (task_run(run_attempts=2), True),
        (task_run(run_attempts=2, run_age_s=5), False),
        (task_run(run_attempts=2, stands_for_run=True), False),
        (task_run(run_state="paused"), False),
    ],
)
def test_a_task_run_is_ended_only_when_its_attempt_is_over_for_long(
    seen: judge.TaskRunFact, is_dead: bool
) -> None:
    assert judge.dead_task_runs([seen]) == ((seen,) if is_dead else ())


def test_a_second_look_later_than_the_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing is ever confirmed"):
        RecoveryConfig(heartbeat_limit_s=60, second_look_s=90)
