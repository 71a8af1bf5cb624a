"""What kind of fault a refused table looks like: try simple repairs, and see which one heals it.

A bound that broke says where, not what. So the values are taken back as if somebody had written
them in another unit, ten times too large, with the sign flipped, in the wrong column or an hour
off, and the suite's rules are asked again by SQL. The repair after which the fewest fail names the
fault. Where none heals, the rules' own word for the fault is all there is to say.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.validation.baseline import DAYS
from tasks.validation.expectations import Check, can_screen, compile_suite, failing
from tasks.validation.sql import quoted
from tasks.validation.subject import Subject, open_subject
from tasks.validation.suites import CONVERSIONS, SCALINGS, SUBJECT, Mistake, Suite

logger = logging.getLogger(__name__)

BUDGET_S = 20.0
MOST_LEFT = 0.34  # of the failed expectations may still fail where a repair is believed
MIN_FAILED = 2
MOST_SWAPPED = 8
IMPOSSIBLE = 1_000_000
CLOCK_SHIFTS_H = (1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 24, -24)


class Repair(NamedTuple):
    """A way to take a mistake back: column to the SQL that gives its right value."""

    fault: str
    columns: Mapping[str, str]
    is_weak: bool = False


def diagnose(
    path: Path,
    name: str,
    suite: Suite,
    window: TimeWindow,
    failed: Sequence[Check],
    references: Mapping[str, Path],
) -> str | None:
    """The simple mistake that explains most of what failed, with its evidence, else None.

    Args:
        path: Parquet of the table.
        name: what the table is called.
        suite: what it broke.
        window: the window that was checked.
        failed: the critical checks that failed.
        references: other tables that the suite's SQL reads.
    """
    started = time.monotonic()
    before = sum(can_screen(check) for check in failed)
    # One bound alone is healed by many a scaling or swap, so these are not believed then.
    alone = before < MIN_FAILED and not any(check.rule.table == DAYS for check in failed)
    best: str | None = None
    limit = int(MOST_LEFT * before)
    with (
        open_subject(path, name, narrowed(suite, failed), window) as narrow,
        open_subject(path, name, suite, window) as whole,
    ):
        for repair in repairs(suite, involved_columns(suite, failed)):
            if time.monotonic() - started > BUDGET_S:
                logger.warning("%s: the search for a repair ended after %s s", name, BUDGET_S)
                break
            if alone and repair.is_weak:
                continue
            # What a repair mends here it may break elsewhere, so the whole is asked too.
            if _failures_after(repair, narrow, references) > limit:
                continue
            after = _failures_after(repair, whole, references)
            if after <= limit:
                left = f"{after} of {before} still fail" if after else "all hold"
                best, limit = f"{repair.fault} (taken back, {left})", after - 1
            if not after:
                break
    return best


def narrowed(suite: Suite, failed: Sequence[Check]) -> Suite:
    """The suite with only what the failed checks need: quick to ask again and again."""
    entries = {check.entry for check in failed}
    rules = [r for n, r in enumerate(suite.expectations, start=1) if n in entries]
    needed = {rule.table for rule in rules}
    for name in reversed(suite.aggregates):  # a query reads only those before it
        if name in needed:
            needed |= set(_words(suite.aggregates[name])) & suite.aggregates.keys()
    baseline = suite.baseline if DAYS in needed else None
    if baseline:
        columns = {name for check in failed if check.rule.table == DAYS for name in check.columns}
        baseline = baseline.only(columns)
        judged = {"for_columns": baseline.columns}
        rules = [r.model_copy(update=judged) if r.table == DAYS else r for r in rules]
    return suite.model_copy(
        update={
            "aggregates": {n: sql for n, sql in suite.aggregates.items() if n in needed},
            "baseline": baseline,
            "expectations": tuple(rules),
        }
    )


def involved_columns(suite: Suite, failed: Sequence[Check]) -> tuple[str, ...]:
    """Stored columns that the failed checks are about, directly or through SQL."""
    stored = [name for names in suite.columns.values() for name in names]
    sources = {**suite.derived, **suite.aggregates}
    asked = [
        name
        for check in failed
        for name in (check.columns if check.rule.table in (SUBJECT, DAYS) else (check.rule.table,))
    ]
    seen: set[str] = set()
    while asked:
        name = asked.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in sources:
            asked += [w for w in _words(sources[name]) if w in sources or w in stored]
    return tuple(name for name in stored if name in seen)


def repairs(suite: Suite, involved: Sequence[str]) -> Iterator[Repair]:
    """Mistakes worth trying, the likeliest first."""
    integers = set(suite.columns.get("integer", ()))
    numbers = integers | set(suite.columns.get("number", ()))
    measured = [name for name in involved if name in numbers]
    for unit, columns in suite.units.items():
        hit = [name for name in columns if name in measured]
        for mistake in CONVERSIONS[unit]:
            yield from _in_columns(mistake, hit, integers)
    yield from _swaps(suite, involved)
    for mistake in SCALINGS:
        for name in measured:
            for repair in _in_columns(mistake, [name], integers):
                yield repair._replace(is_weak=True)
    for name in involved:
        if name in suite.columns.get("timestamp", ()):
            yield from _clocks(name)


def _in_columns(mistake: Mistake, columns: Sequence[str], integers: set[str]) -> Iterator[Repair]:
    """The mistake in all these columns together, then in each alone."""
    for group in ([columns] if len(columns) > 1 else []) + [[name] for name in columns]:
        sql = {name: mistake.repair(quoted(name), name in integers) for name in group}
        yield Repair(f"{', '.join(group)}: {mistake.name}", sql)


def _swaps(suite: Suite, involved: Sequence[str]) -> Iterator[Repair]:
    for kinds in (("text",), ("integer", "number")):
        names = [n for kind in kinds for n in suite.columns.get(kind, ()) if n in involved]  # type: ignore[call-overload]
        for one, other in combinations(names[:MOST_SWAPPED], 2):
            sql = {one: quoted(other), other: quoted(one)}
            yield Repair(f"swapped columns {one} and {other}", sql, is_weak=True)


def _clocks(name: str) -> Iterator[Repair]:
    for hours in CLOCK_SHIFTS_H:
        clock = f"the clock {abs(hours)} h off, as in another time zone"
        fault = f"{name}: {'a day off' if abs(hours) == 24 else clock}"
        yield Repair(fault, {name: f"{quoted(name)} + INTERVAL ({hours}) HOURS"})


def _failures_after(repair: Repair, subject: Subject, references: Mapping[str, Path]) -> int:
    """Critical checks that fail after a repair; `IMPOSSIBLE` where it cannot be applied."""
    try:
        columns = subject.derive(references, repair.columns)
        checks = [
            check
            for check in compile_suite(subject.suite, columns)
            if check.rule.severity == "critical" and can_screen(check)
        ]
        return len(failing(checks, subject))
    except (ConfigurationError, DataContractError):  # the repaired values do not fit the SQL
        return IMPOSSIBLE


def _words(sql: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", sql))
