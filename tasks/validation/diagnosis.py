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
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.validation.blessed import DAYS
from tasks.validation.expectations import Check, compile_suite
from tasks.validation.screen import can_screen, failing
from tasks.validation.subject import Subject, open_subject
from tasks.validation.suites import SUBJECT, Suite
from tasks.validation.units import Mistake, conversions, scalings

logger = logging.getLogger(__name__)

BUDGET_S = 20.0
MOST_LEFT = 0.34  # of the failed expectations may still fail where a repair is believed
MIN_FAILED = 2
MOST_SWAPPED = 8
IMPOSSIBLE = 1_000_000
CLOCK_SHIFTS_H = (1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 24, -24)


@dataclass(frozen=True)
class Repair:
    """A way to take a mistake back: column to the SQL that gives its right value."""

    fault: str
    columns: Mapping[str, str]
    is_weak: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The believed repair.

    Args:
        fault: kind of fault, in words.
        before: expectations that fail as the table is.
        after: those that fail after the repair.
    """

    fault: str
    before: int
    after: int

    @property
    def sentence(self) -> str:
        """The fault with its evidence."""
        left = "all hold" if not self.after else f"{self.after} of {self.before} still fail"
        return f"{self.fault} (taken back, {left})"


def diagnose(
    path: Path,
    name: str,
    suite: Suite,
    window: TimeWindow,
    failed: Sequence[Check],
    references: Mapping[str, Path],
) -> Diagnosis | None:
    """The simple mistake that explains most of what failed, None where none does.

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
    best: Diagnosis | None = None
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
            limit = best.after - 1 if best else int(MOST_LEFT * before)
            # What a repair mends here it may break elsewhere, so the whole is asked too.
            if _failures_after(repair, narrow, references) > limit:
                continue
            after = _failures_after(repair, whole, references)
            if after <= limit:
                best = Diagnosis(repair.fault, before, after)
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
    blessed = suite.blessed
    if blessed and DAYS in needed:
        columns = {name for check in failed if check.rule.table == DAYS for name in check.columns}
        blessed = blessed.only(columns)
        rules = [
            rule if rule.table != DAYS else rule.model_copy(update={"for_columns": blessed.columns})
            for rule in rules
        ]
    return suite.model_copy(
        update={
            "aggregates": {n: sql for n, sql in suite.aggregates.items() if n in needed},
            "blessed": blessed if DAYS in needed else None,
            "expectations": tuple(rules),
        }
    )


def involved_columns(suite: Suite, failed: Sequence[Check]) -> tuple[str, ...]:
    """Stored columns that the failed checks are about, directly or through SQL."""
    stored = [name for names in suite.columns.values() for name in names]
    sources = {**suite.derived, **suite.aggregates}
    asked = [name for check in failed for name in _asked(check)]
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
        for mistake in conversions(unit):
            yield from _in_columns(mistake, hit, integers)
    yield from _swaps(suite, involved)
    for mistake in scalings():
        for name in measured:
            for repair in _in_columns(mistake, [name], integers):
                yield replace(repair, is_weak=True)
    for name in involved:
        if name in suite.columns.get("timestamp", ()):
            yield from _clocks(name)


def _in_columns(mistake: Mistake, columns: Sequence[str], integers: set[str]) -> Iterator[Repair]:
    """The mistake in all these columns together, then in each alone."""
    groups = [columns] if len(columns) < 2 else [columns, *[[name] for name in columns]]
    for group in groups:
        if group:
            sql = {name: _repaired(mistake, name, name in integers) for name in group}
            yield Repair(f"{', '.join(group)}: {mistake.name}", sql)


def _repaired(mistake: Mistake, name: str, integer: bool) -> str:
    sql = mistake.repair(_q(name))
    return f"round({sql})::BIGINT" if integer else sql


def _swaps(suite: Suite, involved: Sequence[str]) -> Iterator[Repair]:
    for kinds in (("text",), ("integer", "number")):
        names = [n for kind in kinds for n in suite.columns.get(kind, ()) if n in involved]  # type: ignore[call-overload]
        for one, other in combinations(names[:MOST_SWAPPED], 2):
            sql = {one: _q(other), other: _q(one)}
            yield Repair(f"swapped columns {one} and {other}", sql, is_weak=True)


def _clocks(name: str) -> Iterator[Repair]:
    for hours in CLOCK_SHIFTS_H:
        told = (
            f"{name}: a day off" if abs(hours) == 24
            else f"{name}: the clock {abs(hours)} h off, as in another time zone"
        )  # fmt: skip
        yield Repair(told, {name: f"{_q(name)} + INTERVAL ({hours}) HOURS"})


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


def _asked(check: Check) -> tuple[str, ...]:
    table = check.rule.table
    return check.columns if table in (SUBJECT, DAYS) else (table,)


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
