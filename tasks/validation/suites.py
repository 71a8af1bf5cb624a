"""Expectation suites as data: one YAML file a suite, read and checked before any row is.

A suite says which columns a table must have, which columns and small tables are derived from it by
SQL, and what Great Expectations must find in each. Reading a suite imports no heavy library, so a
flow can read suites and hand their content to its tasks.

A rule that no suite has to write: no number is absurdly large against the baseline window.
"""

import fnmatch
import importlib.util
import re
from collections.abc import Collection
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ColumnKind as ColumnKind
from tasks.kernel.errors import ConfigurationError, SignatureError
from tasks.kernel.files import digest_of, read_yaml
from tasks.kernel.settings import Settings
from tasks.kernel.values import Described, checked, mistakes
from tasks.validation.baseline import DAYS, Baseline, Statistic, literal, quoted

Unit = Literal[
    "fahrenheit", "mile", "mile_per_hour", "minute", "inch", "millibar", "foot", "per_cent"
]
"""Units in which a drift check knows the mistakes that people make."""

SUBJECT = "subject"
"""Name under which a suite's SQL and expectations know the table that is checked."""

FOLDER = "expectations"
BASELINE_FOLDER = "baseline"
FOLDERS = (BASELINE_FOLDER, "blessed")
"""Where generated bands are looked for; the second is the name that earlier versions gave."""

Severity = Literal["critical", "warning"]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]
ColumnName = Annotated[str, Field(min_length=1, max_length=120)]

# Arguments of expectations that name columns; a rule's frame holds these columns and no others.


def _is_one_sentence(text: str) -> str:
    plain = " ".join(text.split())
    if not plain or plain.endswith("."):
        raise ValueError(
            f"{text!r} is no sentence without its full stop, such as 'a distance is positive'"
        )
    return plain


Sentence = Annotated[str, AfterValidator(_is_one_sentence)]


class Rule(Described):
    """One expectation, or one for each of several columns, in GX's terms and in plain words."""

    type: str = Field(pattern=r"^expect_[a-z0-9_]+$", description="Great Expectations type.")
    kwargs: dict[str, JsonValue] = Field(default={}, description="Its arguments.")
    for_columns: tuple[ColumnName, ...] = ()
    """Columns, or patterns with `*`: one expectation for each."""
    table: Identifier = Field(default=SUBJECT, description=f"`{SUBJECT}` or one of `aggregates`.")
    shows: tuple[ColumnName, ...] = ()
    """Columns of its table that tell which row an example is from."""
    says: Sentence
    """What must hold, in words for the person who reads a failure."""
    severity: Severity = "critical"
    """`critical` stops the flow, `warning` is only reported."""
    min_rows: PositiveInt = 1
    """Not judged where its table has fewer rows, such as a share."""
    fault: Sentence | None = None
    """What kind of fault a failure looks like, such as `frozen feed`."""

    @field_validator("type")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in _known_types():
            raise ValueError(f"Great Expectations knows no expectation {kind!r}")
        return kind

    @model_validator(mode="after")
    def _names_its_columns_once(self) -> Self:
        if self.for_columns and self.named_columns():
            raise ValueError("names columns both in `kwargs` and in `for_columns`; use one of them")
        return self

    def named_columns(self) -> tuple[str, ...]:
        """Columns that the arguments name, in order, each once."""
        names: dict[str, None] = {}
        for value in map(self.kwargs.get, ("column", "column_A", "column_B", "column_list")):
            texts = value if isinstance(value, list) else [value]
            names.update(dict.fromkeys(text for text in texts if isinstance(text, str)))
        return tuple(names)


@cache
def _known_types() -> frozenset[str]:
    """Types of expectations, by their modules; importing those takes seconds."""
    package = importlib.util.find_spec("great_expectations")
    assert package is not None
    folder = Path(str(package.origin)).parent / "expectations" / "core"
    return frozenset(file.stem for file in folder.glob("expect_*.py"))


Columns = dict[ColumnKind, tuple[ColumnName, ...]]


class Profiling(Described):
    """How a baseline window of this table is profiled."""

    time_column: ColumnName | None = None
    """Places a row in a day; none for a table without history."""
    skip: tuple[ColumnName, ...] = ()
    """Columns without bands, such as the parts of a date."""
    also: tuple[ColumnName, ...] = ()
    """Derived columns of numbers that get bands too."""
    relations: dict[ColumnName, tuple[ColumnName, ...]] = Field(default={})
    """Column to the columns that decide its value."""
    only: tuple[Statistic, ...] = ()
    """Statistics that get bands; none named: all. Fewer cost less."""


class Suite(Described):
    """What must hold for one kind of table."""

    suite: Identifier
    subject: Sentence = Field(description="What a row of the table is.")
    columns: dict[ColumnKind, tuple[ColumnName, ...]] = Field(min_length=1)
    """Columns that the table must have, by kind."""
    references: dict[Identifier, Columns] = Field(default={})
    """Other tables of the same landing that its SQL may read, with the columns that it needs. Such
    a table is there without rows where it was not landed."""
    units: dict[Unit, tuple[ColumnName, ...]] = Field(default={})
    """Unit to columns: a drift check counts a change of it as a fault of the data."""
    profiling: Profiling = Profiling()
    baseline: Baseline | None = None
    """What days of a clean window were like; kept in its own file."""
    derived: dict[Identifier, str] = Field(default={})
    """Further columns as SQL expressions over those and each other."""
    aggregates: dict[Identifier, str] = Field(
        default={},
        description=f"Small tables as SQL queries over `{SUBJECT}`; the window is at hand as "
        "getvariable('window_start') and getvariable('window_end').",
    )
    expectations: tuple[Rule, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_fit_together(self) -> Self:
        declared = [name for names in self.columns.values() for name in names]
        every = [*declared, *self.derived]
        if twice := sorted({name for name in every if every.count(name) > 1}):
            raise ValueError(f"column(s) {', '.join(twice)} are declared twice")
        if SUBJECT in self.aggregates:
            raise ValueError(f"an aggregate cannot be called {SUBJECT!r}: that is the table itself")
        if both := sorted(({SUBJECT, DAYS} | self.aggregates.keys()) & self.references.keys()):
            raise ValueError(
                f"{', '.join(both)} is the name of a reference and of a table of its own"
            )
        measured = {name for names in self.units.values() for name in names}
        if unknown := sorted(measured - set(declared)):
            raise ValueError(f"units name column(s) {', '.join(unknown)}, which are not declared")
        for entry, rule in enumerate(self.expectations, start=1):
            self._check_names(entry, rule, set(every))
        return self

    def _check_names(self, entry: int, rule: Rule, every: set[str]) -> None:
        tables = [SUBJECT, *([DAYS] if self.baseline else []), *self.aggregates]
        if rule.table not in tables:
            raise ValueError(
                f"expectation {entry} ({rule.type}) is about table {rule.table!r}, which is not "
                f"among {', '.join(tables)}"
            )
        if rule.table == SUBJECT:
            rule_columns(rule, entry, every)

    def kind_of(self, column: str) -> ColumnKind | None:
        """Declared kind of a column, None where it is not declared."""
        return next((kind for kind, names in self.columns.items() if column in names), None)


def rule_columns(rule: Rule, entry: int, known: set[str]) -> list[tuple[str, ...]]:
    """Column sets that a rule is about: one set for each expectation it stands for.

    Args:
        rule: the rule.
        entry: its place in the suite, from 1.
        known: columns of its table.

    Raises:
        ValueError: it names a column, or a pattern, that nothing in the table matches.
    """
    named = rule.named_columns()
    matched = {pattern: sorted(fnmatch.filter(known, pattern)) for pattern in rule.for_columns}
    unknown = sorted({*rule.shows, *named} - known) + [
        p for p, names in matched.items() if not names
    ]
    if unknown:
        raise ValueError(
            f"expectation {entry} ({rule.type}) names column(s) {', '.join(unknown)}, which "
            f"{rule.table} does not have; it has {', '.join(sorted(known))}"
        )
    if not rule.for_columns:
        return [named]
    return [(name,) for name in dict.fromkeys(chain.from_iterable(matched.values()))]


def has_suite(repo: Path, name: str) -> bool:
    """True where a feature repository has a file of that suite."""
    return (repo / FOLDER / f"{name}.yaml").exists()


def read_suite(repo: Path, name: str, base: Suite | None = None) -> Suite:
    """Read `expectations/<name>.yaml` of a feature repository.

    Args:
        repo: the feature repository.
        name: of the suite.
        base: what holds where there is no such file; None: it must be there.

    Raises:
        ConfigurationError: there is no such file, it is no YAML, or an entry of it is wrong.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigurationError(
            f"{name!r} is no suite name; expected lower case letters, digits and underscores"
        )
    path = repo / FOLDER / f"{name}.yaml"
    where = f"suite file {FOLDER}/{name}.yaml"
    try:
        content = read_yaml(path, where)
    except FileNotFoundError as exc:
        if base is not None:
            return _with_own_baseline(base, repo, name)
        present = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ConfigurationError(
            f"{where} does not exist in {repo}; it has the suites {present}. Write it, or name one "
            "of these"
        ) from exc
    try:
        suite = Suite.model_validate(content)
    except ValidationError as exc:
        found = "; ".join(f"{_place(place)}{error['msg']}" for place, error in mistakes(exc))
        raise ConfigurationError(f"{where}: {found}. Mend the file") from exc
    if suite.suite != name:
        raise ConfigurationError(
            f"{where} calls itself {suite.suite!r}; expected {name!r}, the name of the file"
        )
    return _with_own_baseline(suite, repo, name)


def with_baseline(suite: Suite, baseline: Baseline) -> Suite:
    """The hand-written suite and, after its rules, those that the baseline gave.

    Raises:
        ConfigurationError: the baseline names columns that the suite does not know.
    """
    rules = Rule(
        type="expect_column_values_to_be_null",
        table=DAYS,
        for_columns=baseline.columns,
        shows=("period",),
        says="a day is like those of the baseline, within the stated margins",
    )
    known = {*suite.derived, *(c for names in suite.columns.values() for c in names)}
    if unknown := sorted(baseline.needed_columns - known):
        raise ConfigurationError(
            f"the baseline of suite {suite.suite} names column(s) {', '.join(unknown)}, which the "
            "suite does not have. Profile it again with `falaj baseline`"
        )
    fields = {name: getattr(suite, name) for name in Suite.model_fields}
    return Suite(**{**fields, "baseline": baseline, "expectations": (*suite.expectations, rules)})


def _with_own_baseline(suite: Suite, repo: Path, name: str) -> Suite:
    for folder in FOLDERS:
        path = repo / FOLDER / folder / f"{name}.yaml"
        where = f"suite file {FOLDER}/{folder}/{name}.yaml"
        if path.exists():
            content = read_yaml(path, where)
            return with_baseline(suite, checked(Baseline, content, where, "Profile it again"))
    return suite


def sign_baseline(settings: Settings, use_case: str, name: str) -> None:
    """Sign the bands of a suite as they are: who approved them did not mean others.

    Raises:
        TransientError, StorageError, ConfigurationError: the key store or the disk refuses.
    """
    from tasks.governance.signing import sign

    sign(settings.home, f"suites/{use_case}/{name}", _baseline_files(settings.feature_repo, name))


def check_baseline(settings: Settings, use_case: str, name: str) -> None:
    """See that the bands of a suite are those that were approved.

    Bands that were never signed count, as all of the feature repository does; where
    `FALAJ_TRUSTED_KEYS` is set they do not.

    Raises:
        SignatureError: they were changed, or signed by nobody who is trusted.
    """
    from tasks.governance import signing

    subject = f"suites/{use_case}/{name}"
    files = _baseline_files(settings.feature_repo, name)
    try:
        if files or signing.read(signing.record_path(settings.home, subject)) is not None:
            signing.check_record(settings.home, subject, files or {f"{name}.yaml": ""})
    except SignatureError as exc:
        raise SignatureError(
            f"{exc}. Nothing was validated; `falaj baseline --reviewed` makes and signs others"
        ) from exc


def _baseline_files(repo: Path, name: str) -> dict[str, str]:
    found = (repo / FOLDER / folder / f"{name}.yaml" for folder in FOLDERS)
    return next(({path.name: digest_of(path)} for path in found if path.exists()), {})


def _place(location: tuple[int | str, ...]) -> str:
    match location:
        case ():
            return ""
        case ("expectations", int(number), *rest):
            return ": ".join([f"expectation {number + 1}", *map(str, rest), ""])
    return ".".join(map(str, location)) + ": "


MAGNITUDES = "baseline_magnitudes"
MOMENT = "event_timestamp"
USUAL = 0.99
MOST_TIMES = 1000
MIN_VALUES = 100


def with_magnitudes(suite: Suite, baseline: TimeWindow, spared: Collection[str]) -> Suite:
    """The suite of a feature table with history, and that rule where it has columns to judge.

    What numbers are usually like is the 99th percentile of those of the baseline that are not
    zero, by amount. A column with fewer than `MIN_VALUES` of them is not judged.

    Args:
        suite: as the feature repository says it.
        baseline: a clean window; its rows are in the table where it was ever refreshed.
        spared: columns that are no measurements, or may have any magnitude.
    """
    numbers = [*suite.columns.get("number", ()), *suite.columns.get("integer", ())]
    judged = [name for name in numbers if name not in spared]
    if not judged or suite.kind_of(MOMENT) != "timestamp" or MAGNITUDES in suite.aggregates:
        return suite
    each = " UNION ALL ".join(_magnitude(name, baseline) for name in judged)
    rule = Rule(
        type="expect_column_values_to_be_between",
        table=MAGNITUDES,
        kwargs={"column": "times_the_usual", "max_value": MOST_TIMES},
        shows=("feature", "largest", "usual", "baseline_values"),
        says=f"no number of the window is more than {MOST_TIMES:,} times as large as those of the "
        "baseline usually are; mend it, or name the column among `unbounded` of the feature table",
        fault="change of unit or scale, or a denominator near zero",
    )
    query = (
        f"SELECT *, largest / usual AS times_the_usual FROM ({each}) WHERE usual > 0 "
        f"AND largest IS NOT NULL AND baseline_values >= {MIN_VALUES}"
    )
    aggregates = {**suite.aggregates, MAGNITUDES: query}
    rules = (*suite.expectations, rule)
    return suite.model_copy(update={"aggregates": aggregates, "expectations": rules})


def _magnitude(name: str, baseline: TimeWindow) -> str:
    column = quoted(name)
    known = f"isfinite({column}::DOUBLE) AND {column} <> 0"
    before, after = literal(baseline.start), literal(baseline.end)
    usual = f"{known} AND {MOMENT} >= {before} AND {MOMENT} < {after}"
    start, end = "getvariable('window_start')", "getvariable('window_end')"
    inside = f"{known} AND {MOMENT} >= {start} AND {MOMENT} < {end}"
    return (
        f"SELECT {literal(name)} AS feature, "
        f"max(abs({column}::DOUBLE)) FILTER ({inside}) AS largest, "
        f"quantile_cont(abs({column}::DOUBLE), {USUAL}) FILTER ({usual}) AS usual, "
        f"count(*) FILTER ({usual}) AS baseline_values FROM {SUBJECT}"
    )
