from __future__ import annotations

from tasks.training.elastic.stragglers import LOOKS, NUM_PINGS, Straggler, StragglerWatch


def look(watch: StragglerWatch, busy_s: dict[str, float]) -> list[Straggler]:
    for place, value in busy_s.items():
        watch.note_busy(place, value)
    return watch.look()


def test_a_rank_that_is_slow_again_and_again_is_named_once() -> None:
    watch = StragglerWatch()
    values = {"h1-0": 0.010, "h2-0": 0.011, "h3-0": 0.050}
    found = [look(watch, values) for _ in range(2 * LOOKS)]
    named = [straggler for looked in found for straggler in looked]
    assert [straggler.place for straggler in named] == ["h3-0"]
    assert found[LOOKS - 1] == named
    assert "h3-0 is a straggler: it works 50.0 ms a step itself, 4.8 times" in named[0].text
    assert "leave it out of the hosts" in named[0].text


def test_a_rank_that_is_slow_once_is_not_named() -> None:
    watch = StragglerWatch()
    for number in range(20):
        slow = 0.05 if number % LOOKS == 0 else 0.01
        assert look(watch, {"h1-0": 0.01, "h2-0": slow}) == []


def test_a_rank_between_the_bounds_keeps_its_name_and_a_quick_one_loses_it() -> None:
    watch = StragglerWatch()
    for _ in range(LOOKS):
        look(watch, {"h1-0": 0.01, "h2-0": 0.05})
    for _ in range(10):
        assert look(watch, {"h2-0": 0.018}) == []
    recovered = [s for _ in range(LOOKS) for s in look(watch, {"h2-0": 0.010})]
    assert recovered == [Straggler("h2-0", False, "h2-0 has caught up")]


def test_what_is_quick_anyway_is_never_named() -> None:
    watch = StragglerWatch()
    for _ in range(10):
        assert look(watch, {"h1-0": 1e-5, "h2-0": 1e-3}) == []


def test_one_rank_alone_has_nobody_to_wait_for() -> None:
    watch = StragglerWatch()
    for _ in range(10):
        assert look(watch, {"h1-0": 5.0}) == []


def test_a_slow_link_is_named_by_late_answers() -> None:
    watch = StragglerWatch()
    found = []
    for _ in range(NUM_PINGS + LOOKS):
        for place, seconds in (("h1-0", 0.001), ("h2-0", 0.002), ("h3-0", 0.120)):
            watch.note_link(place, seconds)
        found += watch.look()
    assert [straggler.place for straggler in found] == ["h3-0"]
    assert "answers after 120.0 ms" in found[0].text
    assert "look at its network link" in found[0].text


def test_one_late_answer_says_nothing() -> None:
    watch = StragglerWatch()
    for number in range(40):
        watch.note_link("h1-0", 0.001)
        watch.note_link("h2-0", 3.0 if number % NUM_PINGS == 0 else 0.001)
        assert watch.look() == []


def test_a_rank_that_is_gone_is_compared_with_no_more() -> None:
    watch = StragglerWatch()
    for _ in range(LOOKS - 1):
        look(watch, {"h1-0": 0.01, "h2-0": 0.05})
    watch.forget("h1-0")
    assert look(watch, {"h2-0": 0.05}) == []
