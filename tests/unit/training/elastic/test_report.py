from __future__ import annotations

from tasks.training.elastic.report import LOOKS, StragglerWatch


def look(watch: StragglerWatch, busy_s: dict[str, float]) -> dict[str, str]:
    watch.busy_s |= busy_s
    return watch.look()


def test_a_rank_that_is_slow_again_and_again_is_named_once() -> None:
    watch = StragglerWatch()
    values = {"h1-0": 0.010, "h2-0": 0.011, "h3-0": 0.050}
    found = [look(watch, values) for _ in range(2 * LOOKS)]
    assert [set(named) for named in found if named] == [{"h3-0"}]
    assert "h3-0 is a straggler: it works 50.0 ms a step itself, 4.8 times" in found[2]["h3-0"]


def test_a_rank_that_is_slow_once_quick_anyway_or_alone_is_not_named() -> None:
    watch = StragglerWatch()
    for number in range(20):
        slow = 0.05 if number % LOOKS == 0 else 0.01
        assert look(watch, {"h1-0": 0.01, "h2-0": slow}) == {}
    quick = StragglerWatch()
    assert not any(look(quick, {"h1-0": 1e-5, "h2-0": 1e-3}) for _ in range(10))
    alone = StragglerWatch()
    assert not any(look(alone, {"h1-0": 5.0}) for _ in range(10))


def test_a_rank_that_is_gone_is_compared_with_no_more() -> None:
    watch = StragglerWatch()
    for _ in range(LOOKS - 1):
        look(watch, {"h1-0": 0.01, "h2-0": 0.05})
    watch.forget("h1-0")
    assert look(watch, {"h2-0": 0.05}) == {}
