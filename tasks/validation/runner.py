"""Run suites on tables, keep the whole result, and vouch for the table or refuse it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import duckdb
import great_expectations as gx

from tasks.contracts.base import Artifact, Contract, TimeWindow
from tasks.contracts.data import (
    DatasetSchema,
    DataSplits,
    FeatureSnapshot,
    FeatureTables,
    LandedRows,
    TableRef,
    ValidatedDataset,
    ValidatedRows,
    ValidationResult,
)
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.validation.baseline import DAYS, faults_in, literal, quoted
from tasks.validation.expectations import Judged, compile_suite, run_checks
from tasks.validation.outcome import (
    CheckOutcome,
    Status,
    SuiteOutcome,
    failure_in_words,
    observed_in_words,
    read_outcome,
    unexpected_values,
)
from tasks.validation.subject import open_subject
from tasks.validation.suites import Suite

logger = logging.getLogger(__name__)

RESULT_FILE = "validation.json"
MAX_FAULTS_IN_MESSAGE = 12
MOST_NAMED = 10
Show = Callable[[SuiteOutcome], None]


class RefusedTable(Contract):
    """A failed validation, kept so that it can be read after the run has stopped."""

    message: str
    result: Artifact


def validate_rows(
    landed: LandedRows, suites: Mapping[str, Suite], store: ArtifactStore, show: Show | None = None
) -> ValidatedRows:
    """Vouch for landed rows: every table against its suite.

    Args:
        landed: the raw tables of one window.
        suites: suite by table name.
        store: holds the tables; the results are kept there too.
        show: called with every outcome, good or bad, before anything is raised.

    Raises:
        DataContractError: one or more tables fail; all of them are named.
        ConfigurationError: a table has no suite, or a suite is wrong.
    """
    validations = _validate_all(
        landed.tables, suites, landed.window, store, show, "No feature table was changed"
    )
    return ValidatedRows(landed=landed, validations=validations)


def validate_tables(
    tables: FeatureTables,
    window: TimeWindow,
    suites: Mapping[str, Suite],
    store: ArtifactStore,
    show: Show | None = None,
) -> tuple[ValidationResult, ...]:
    """Vouch for a version of the feature tables before anyone reads it.

    Args:
        tables: the version.
        window: the window that was refreshed.
        suites: suite by table name.
        store: holds the tables; the results are kept there too.
        show: called with every outcome, good or bad, before anything is raised.

    Raises:
        DataContractError: one or more tables fail; all of them are named.
        ConfigurationError: a table has no suite, or a suite is wrong.
    """
    return _validate_all(
        tables.tables, suites, window, store, show, "Nothing was published or materialized"
    )


def validate_snapshot(
    snapshot: FeatureSnapshot,
    suite: Suite,
    store: ArtifactStore,
    show: Show | None = None,
    splits: DataSplits | None = None,
) -> ValidatedDataset:
    """Vouch for a training set; training takes nothing else.

    Args:
        snapshot: the training set.
        suite: what must hold.
        store: holds the snapshot; the result is kept there too.
        show: called with the outcome, good or bad, before anything is raised.
        splits: windows that a model is to be trained and judged on; None where none is.

    Raises:
        DataContractError: an expectation fails, the snapshot does not hold what it says, or a
            window of the splits cannot be learned from.
        ConfigurationError: the suite is wrong.
    """
    subject = TableRef(name="snapshot", artifact=snapshot.data, num_rows=snapshot.num_rows)
    undone = "Nothing was trained"
    if faults := _faults_of_roles(snapshot, suite):
        raise DataContractError(
            f"suite {suite.suite!r} does not fit the snapshot of {snapshot.feature_service}: "
            f"{'; '.join(faults)}. {undone}"
        )
    result = validate_table(subject, suite, snapshot.window, store, undone, show)
    if splits and (
        faults := _faults_of_windows(store.path(snapshot.data), snapshot.columns, splits)
    ):
        raise DataContractError(
            f"training set of {snapshot.feature_service}: {'; '.join(faults)}. {undone}"
        )
    return ValidatedDataset(snapshot=snapshot, validation=result)


def validate_table(
    table: TableRef,
    suite: Suite,
    window: TimeWindow,
    store: ArtifactStore,
    left_undone: str,
    show: Show | None = None,
    references: Mapping[str, TableRef] | None = None,
) -> ValidationResult:
    """Run a whole suite on one table and keep the full result in the store.

    The same table, suite, window and code give the same result, so a finished one is not repeated.

    Args:
        table: name, rows and Parquet file (or folder of Parquet files).
        suite: what must hold.
        window: the time window that is checked; the suite's SQL can ask for it.
        store: holds the table, and keeps results under `validations` or `failed_validations`.
        left_undone: what a failure prevents, as a sentence without its full stop.
        show: called with the outcome, good or bad, before anything is raised.
        references: other tables, of which the suite's SQL reads those that it names.

    Raises:
        DataContractError: the table lacks a column, has wrong types, no or other rows than it
            claims, or breaks a critical expectation. The message says where the full result is.
        ConfigurationError: the suite is wrong.
    """
    needed = {n: ref for n, ref in (references or {}).items() if n in suite.references}
    key = content_key(
        code_digest(__file__), gx.__version__, suite, table, window, sorted(needed.items())
    )

    def build(folder: StagedFolder) -> ValidationResult:
        outcome = _judge(table, suite, window, store, needed)
        if not outcome.passed:
            _refuse(outcome, key, store, left_undone, show)
        return ValidationResult(
            suite=suite.suite,
            subject=table.name,
            subject_sha256=table.artifact.sha256,
            num_rows=outcome.num_rows,
            num_expectations=outcome.num_judged,
            result=_keep(outcome, folder),
            warnings=tuple(check.sentence for check in outcome.with_status("warned")),
        )

    result = store.build_once("validations", key, ValidationResult, build)
    outcome = read_outcome(store.path(result.result))
    for check in outcome.with_status("warned"):
        logger.warning("%s, suite %s: %s", table.name, suite.suite, check.sentence)
    if show:
        show(outcome)
    return result


def _validate_all(
    tables: Sequence[TableRef],
    suites: Mapping[str, Suite],
    window: TimeWindow,
    store: ArtifactStore,
    show: Show | None,
    left_undone: str,
) -> tuple[ValidationResult, ...]:
    """Validate every table, then speak of all that failed: one run finds all faults."""
    if without := [table.name for table in tables if table.name not in suites]:
        raise ConfigurationError(
            f"table(s) {', '.join(without)} have no expectation suite; name one for each. "
            f"{left_undone}"
        )
    results, refusals = [], []
    others = {table.name: table for table in tables}
    for table in tables:
        suite = suites[table.name]
        try:
            results.append(validate_table(table, suite, window, store, left_undone, show, others))
        except DataContractError as exc:
            refusals.append(str(exc))
    if refusals:
        raise DataContractError("\n".join(refusals))
    return tuple(results)


def _judge(
    table: TableRef,
    suite: Suite,
    window: TimeWindow,
    store: ArtifactStore,
    references: Mapping[str, TableRef],
) -> SuiteOutcome:
    """The outcome of a suite on a table; what the data does wrong is in it, never raised."""
    path = store.path(table.artifact)
    others = {name: store.path(ref.artifact) for name, ref in references.items()}
    faults: list[str] = []
    judged: list[Judged] = []
    num_rows, column_types = 0, {}
    try:
        with open_subject(path, table.name, suite, window) as subject:
            num_rows, column_types = subject.num_rows, subject.column_types
            faults = subject.table_faults()
            if num_rows != table.num_rows:
                faults.append(f"{table.name} claims {table.num_rows} rows and has {num_rows}")
            if not faults:
                judged = run_checks(compile_suite(suite, subject.derive(others)), subject, suite)
                if all(item.result is None for item in judged):
                    faults = [f"{num_rows} rows are too few for any of {len(judged)} expectations"]
    except DataContractError as exc:
        faults = [str(exc)]
    checks = tuple(_check_outcome(item) for item in judged)
    broken = [item for item, check in zip(judged, checks, strict=True) if check.status == "failed"]
    return SuiteOutcome(
        suite=suite.suite,
        subject=table.name,
        subject_sha256=table.artifact.sha256,
        window=window,
        num_rows=num_rows,
        passed=not faults and all(check.status != "failed" for check in checks),
        great_expectations_version=gx.__version__,
        column_types=column_types,
        table_faults=tuple(faults),
        looks_like=_pointed_to(broken),
        checks=checks,
        results=tuple(item.result for item in judged if item.result is not None),
    )


def _pointed_to(broken: Sequence[Judged]) -> tuple[str, ...]:
    """Kinds of fault that the failed rules themselves point to, each once."""
    found: dict[str, None] = {}
    for item in broken:
        if item.check.rule.fault:
            found[item.check.rule.fault] = None
        elif item.check.rule.table == DAYS and item.result:
            for result in unexpected_values(item.result):
                found.update(dict.fromkeys(faults_in(str(result))))
    return tuple(found)


def _check_outcome(judged: Judged) -> CheckOutcome:
    check, rule, result = judged.check, judged.check.rule, judged.result
    status: Status = "passed"
    sentence = ""
    if result is None:
        status = "skipped"
    elif not result["success"]:
        status = "failed" if rule.severity == "critical" else "warned"
        sentence = f"{failure_in_words(result)} ({rule.says})"
    few = f"{judged.num_rows} rows, judged from {rule.min_rows} on"
    return CheckOutcome(
        entry=check.entry,
        type=rule.type,
        table=rule.table,
        columns=check.columns,
        says=rule.says,
        severity=rule.severity,
        status=status,
        observed=few if result is None else observed_in_words(result),
        sentence=sentence,
    )


def _keep(outcome: SuiteOutcome, folder: StagedFolder) -> Artifact:
    text = outcome.model_dump_json(indent=1)
    (folder.path / RESULT_FILE).write_text(text + "\n", encoding="utf-8")
    return folder.artifact(RESULT_FILE)


def _refuse(
    outcome: SuiteOutcome, key: str, store: ArtifactStore, left_undone: str, show: Show | None
) -> None:
    """Keep the result of a failed suite apart from the good ones, then raise its message."""
    message = _refusal(outcome)

    def build(folder: StagedFolder) -> RefusedTable:
        return RefusedTable(message=message, result=_keep(outcome, folder))

    refused = store.build_once("failed_validations", key, RefusedTable, build)
    if show:
        show(outcome)
    kept: Path = store.path(refused.result, verify=False)
    raise DataContractError(f"{message}. {left_undone}. Full result: {kept}")


def _refusal(outcome: SuiteOutcome) -> str:
    about = f"{outcome.num_rows} rows of {outcome.subject} ({outcome.window})"
    if outcome.table_faults:
        return f"suite {outcome.suite!r} cannot judge {about}: {'; '.join(outcome.table_faults)}"
    failed = outcome.with_status("failed")
    sentences = [check.sentence for check in failed[:MAX_FAULTS_IN_MESSAGE]]
    if (more := len(failed) - len(sentences)) > 0:
        sentences.append(f"and {more} more")
    looks = f" (looks like: {', or '.join(outcome.looks_like)})" if outcome.looks_like else ""
    return (
        f"suite {outcome.suite!r}: {len(failed)} of {outcome.num_judged} expectations failed on "
        f"{about}{looks}: {'; '.join(sentences)}"
    )


def _faults_of_roles(snapshot: FeatureSnapshot, suite: Suite) -> list[str]:
    """Where the snapshot's columns and the suite's declaration of them do not agree."""
    columns = snapshot.columns
    roles = [columns.row_id, columns.event_time, columns.label]
    named = Counter([*roles, *columns.categorical, *columns.numeric])
    faults = []
    if twice := sorted(name for name, count in named.items() if count > 1):
        faults.append(
            f"column(s) {', '.join(twice)} have more than one role, such as label and feature"
        )
    wrong = [name for name in columns.categorical if suite.kind_of(name) != "text"]
    wrong += [n for n in columns.numeric if suite.kind_of(n) not in ("number", "integer")]
    if wrong:
        faults.append(f"{', '.join(wrong)} are features that the suite lists as another kind")
    return faults


def _faults_of_windows(path: Path, columns: DatasetSchema, splits: DataSplits) -> list[str]:
    """What makes training or judgement impossible, each with the column and its cure.

    Args:
        path: Parquet of the training set.
        columns: which column is what.
        splits: windows for training, validation and test.
    """
    named = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    inside = {name: _inside(columns.event_time, window) for name, window in named.items()}
    label = quoted(columns.label)
    facts = [
        f"{fact} FILTER ({condition})"
        for condition in inside.values()
        for fact in ("count(*)", f"min({label})", f"max({label})")
    ]
    known = [
        *(f"count(nullif({quoted(name)}, '')) FILTER ({inside['training']})"
          for name in columns.categorical),
        *(f"count(*) FILTER ({inside['training']} AND NOT isnan({quoted(name)}::DOUBLE))"
          for name in columns.numeric),
    ]  # fmt: skip
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        rows = con.execute(
            f"SELECT {', '.join([*facts, *known])} FROM read_parquet({literal(path)})"
        ).fetchall()[0]
    faults = [
        fault
        for place, (name, window) in enumerate(named.items())
        if (fault := _fault(name, window, columns, *rows[3 * place : 3 * place + 3]))
    ]
    inputs = (*columns.categorical, *columns.numeric)
    unknown = [name for name, count in zip(inputs, rows[9:], strict=True) if not count]
    if unknown and rows[0]:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        faults.append(
            f"{', '.join(unknown[:MOST_NAMED])}{more} have no known value in any of the "
            f"{rows[0]:,} rows of the training window {splits.train}; look at the query and at the "
            "ttl of the feature view, or take them out of the feature service"
        )
    return faults


def _fault(
    name: str, window: TimeWindow, columns: DatasetSchema, num_rows: int, low: object, high: object
) -> str | None:
    if not num_rows:
        return f"no row lies in the {name} window {window}; move splits.{name} to where rows are"
    if low != high:
        return None
    return (
        f"label {columns.label} is {low} in all {num_rows:,} rows of the {name} window {window}, "
        "expected more than one value; widen the window, or mend the label's query"
    )


def _inside(column: str, window: TimeWindow) -> str:
    moment = quoted(column)
    return f"{moment} >= {literal(window.start)} AND {moment} < {literal(window.end)}"
