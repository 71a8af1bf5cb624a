"""Run suites on tables, keep the whole result, and vouch for the table or refuse it."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import duckdb
import great_expectations as gx

from tasks.contracts import data
from tasks.contracts.base import Artifact, TimeWindow
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.kernel.values import first_of
from tasks.validation import outcome as outcomes
from tasks.validation.baseline import DAYS, faults_in, literal, quoted
from tasks.validation.expectations import Judged, compile_suite, run_checks
from tasks.validation.subject import open_subject
from tasks.validation.suites import Suite

logger = logging.getLogger(__name__)

RESULT_FILE = "validation.json"
MAX_FAULTS_IN_MESSAGE = 12
MOST_NAMED = 10
AT_ONCE = 2
"""Tables that are judged side by side; each takes up to a gigabyte."""
Show = Callable[[outcomes.SuiteOutcome], None]


def validate_tables(
    tables: Sequence[data.TableRef],
    suites: Mapping[str, Suite],
    window: TimeWindow,
    store: ArtifactStore,
    left_undone: str,
    show: Show | None = None,
) -> tuple[data.ValidationResult, ...]:
    """Vouch for tables, each against its suite.

    Args:
        tables: all of one landing, or of one version of the feature tables.
        suites: suite by table name.
        window: the window that was landed or refreshed.
        store: holds the tables; the results are kept there too.
        left_undone: what a failure prevents, as a sentence without its full stop.
        show: called with every outcome, good or bad, before anything is raised.

    Raises:
        DataContractError: one or more tables fail; all of them are named.
        ConfigurationError: a table has no suite, or a suite is wrong.
    """
    if without := [table.name for table in tables if table.name not in suites]:
        raise ConfigurationError(
            f"table(s) {', '.join(without)} have no expectation suite; name one for each. "
            f"{left_undone}"
        )
    others = {table.name: table for table in tables}

    def judge(table: data.TableRef) -> data.ValidationResult | DataContractError:
        try:
            suite = suites[table.name]
            return validate_table(table, suite, window, store, left_undone, show, others)
        except DataContractError as exc:
            return exc

    # DuckDB computes beside Great Expectations, which is Python; `show` knows its run by context.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = [pool.submit(copy_context().run, judge, table) for table in tables]
        try:
            results = [one.result() for one in begun]
        except BaseException:  # a time limit or an interruption, too: no further table is begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if refusals := [str(one) for one in results if isinstance(one, DataContractError)]:
        raise DataContractError("\n".join(refusals))
    return tuple(one for one in results if isinstance(one, data.ValidationResult))


def validate_snapshot(
    snapshot: data.FeatureSnapshot,
    suite: Suite,
    store: ArtifactStore,
    show: Show | None = None,
    splits: data.DataSplits | None = None,
) -> data.ValidatedDataset:
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
    subject = data.TableRef(name="snapshot", artifact=snapshot.data, num_rows=snapshot.num_rows)
    undone = "Nothing was trained"
    if faults := _faults_of_roles(snapshot.columns, suite):
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
    return data.ValidatedDataset(snapshot=snapshot, validation=result)


def validate_table(
    table: data.TableRef,
    suite: Suite,
    window: TimeWindow,
    store: ArtifactStore,
    left_undone: str,
    show: Show | None = None,
    references: Mapping[str, data.TableRef] | None = None,
) -> data.ValidationResult:
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

    def build(folder: StagedFolder) -> data.ValidationResult:
        outcome = _judge(table, suite, window, store, needed)
        if not outcome.passed:
            # Kept apart from the good ones, so that it can be read after the run has stopped.
            refused = store.build_once(
                "failed_validations", key, Artifact, lambda folder: _keep(outcome, folder)
            )
            if show:
                show(outcome)
            kept = store.path(refused, verify=False)
            raise DataContractError(f"{_refusal(outcome)}. {left_undone}. Full result: {kept}")
        return data.ValidationResult(
            suite=suite.suite,
            subject=table.name,
            subject_sha256=table.artifact.sha256,
            num_rows=outcome.num_rows,
            num_expectations=outcome.num_judged,
            result=_keep(outcome, folder),
            warnings=tuple(check.sentence for check in outcome.with_status("warned")),
        )

    result = store.build_once("validations", key, data.ValidationResult, build)
    for sentence in result.warnings:
        logger.warning("%s, suite %s: %s", table.name, suite.suite, sentence)
    if show:
        show(outcomes.read_outcome(store.path(result.result)))
    return result


def _judge(
    table: data.TableRef,
    suite: Suite,
    window: TimeWindow,
    store: ArtifactStore,
    references: Mapping[str, data.TableRef],
) -> outcomes.SuiteOutcome:
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
    checks = tuple(map(_check_outcome, judged))
    broken = [item for item, check in zip(judged, checks, strict=True) if check.status == "failed"]
    return outcomes.SuiteOutcome(
        suite=suite.suite,
        subject=table.name,
        subject_sha256=table.artifact.sha256,
        window=window,
        num_rows=num_rows,
        passed=not faults and not broken,
        great_expectations_version=gx.__version__,
        column_types=column_types,
        table_faults=tuple(faults),
        looks_like=tuple(dict.fromkeys(fault for item in broken for fault in _pointed_to(item))),
        checks=checks,
        results=tuple(item.result for item in judged if item.result is not None),
    )


def _pointed_to(broken: Judged) -> list[str]:
    """Kinds of fault that a failed rule itself points to."""
    rule = broken.check.rule
    if rule.fault:
        return [rule.fault]
    values = outcomes.unexpected_values(broken.result or {}) if rule.table == DAYS else []
    return [fault for value in values for fault in faults_in(str(value))]


def _check_outcome(judged: Judged) -> outcomes.CheckOutcome:
    check, rule, result = judged.check, judged.check.rule, judged.result
    status: outcomes.Status = "passed"
    observed, sentence = f"{judged.num_rows} rows, judged from {rule.min_rows} on", ""
    if result is None:
        status = "skipped"
    else:
        observed = outcomes.observed_in_words(result)
        if not result["success"]:
            status = "failed" if rule.severity == "critical" else "warned"
            sentence = f"{outcomes.failure_in_words(result)} ({rule.says})"
    return outcomes.CheckOutcome(
        entry=check.entry,
        type=rule.type,
        table=rule.table,
        columns=check.columns,
        says=rule.says,
        severity=rule.severity,
        status=status,
        observed=observed,
        sentence=sentence,
    )


def _keep(outcome: outcomes.SuiteOutcome, folder: StagedFolder) -> Artifact:
    text = outcome.model_dump_json(indent=1)
    (folder.path / RESULT_FILE).write_text(text + "\n", encoding="utf-8")
    return folder.artifact(RESULT_FILE)


def _refusal(outcome: outcomes.SuiteOutcome) -> str:
    about = f"{outcome.num_rows} rows of {outcome.subject} ({outcome.window})"
    if outcome.table_faults:
        return f"suite {outcome.suite!r} cannot judge {about}: {'; '.join(outcome.table_faults)}"
    faults = outcome.faults
    looks = f" (looks like: {', or '.join(outcome.looks_like)})" if outcome.looks_like else ""
    return (
        f"suite {outcome.suite!r}: {len(faults)} of {outcome.num_judged} expectations failed on "
        f"{about}{looks}: {first_of(faults, MAX_FAULTS_IN_MESSAGE, '; ')}"
    )


def _faults_of_roles(columns: data.DatasetSchema, suite: Suite) -> list[str]:
    """Where the snapshot's columns and the suite's declaration of them do not agree."""
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


def _faults_of_windows(
    path: Path, columns: data.DatasetSchema, splits: data.DataSplits
) -> list[str]:
    """What makes training or judgement impossible, each with the column and its cure.

    Args:
        path: Parquet of the training set.
        columns: which column is what.
        splits: windows for training, validation and test.
    """
    label, moment = quoted(columns.label), quoted(columns.event_time)
    cases = " ".join(
        f"WHEN {moment} >= {literal(w.start)} AND {moment} < {literal(w.end)} THEN {literal(name)}"
        for name, w in splits
    )
    known = [f"count(nullif({quoted(name)}, ''))" for name in columns.categorical]
    known += [f"count(nullif({quoted(name)}::DOUBLE, 'nan'))" for name in columns.numeric]
    facts = ", ".join(["count(*)", f"min({label})", f"max({label})", *known])
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        rows = con.execute(
            f"SELECT CASE {cases} END, {facts} FROM read_parquet({literal(path)}) GROUP BY 1"
        ).fetchall()
    found = {row[0]: row[1:] for row in rows}
    inputs = (*columns.categorical, *columns.numeric)
    faults = []
    for name, window in splits:
        num_rows, low, high, *counts = found.get(name, (0, None, None))
        if not num_rows:
            faults.append(
                f"no row lies in the {name} window {window}; move splits.{name} to where rows are"
            )
        elif low == high:
            faults.append(
                f"label {columns.label} is {low} in all {num_rows:,} rows of the {name} window "
                f"{window}, expected more than one value; widen the window, or mend the label's "
                "query"
            )
        unknown = [column for column, count in zip(inputs, counts, strict=False) if not count]
        if unknown and name == "train":
            faults.append(
                f"{first_of(unknown, MOST_NAMED)} have no known value in any of the "
                f"{num_rows:,} rows of the train window {window}; look at the query and at the "
                "ttl of the feature view, or take them out of the feature service"
            )
    return faults
