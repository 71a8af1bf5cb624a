"""Base suites: what must hold of a table by its columns alone, where a use case wrote no suite."""

from pydantic import JsonValue

from tasks.contracts.data import TableShape
from tasks.validation.baseline import quoted
from tasks.validation.suites import ColumnKind, Profiling, Rule, Suite

OUTSIDE, EARLY, ENDLESS = "outside_window", "before_event", "label_is_no_number"


def base_suite(name: str, shape: TableShape) -> Suite:
    """Kinds of columns, keys and moments that are there, times in the window, a label that is one.

    What is worth more than that only a person knows; a file `expectations/<name>.yaml` says it.
    """
    columns: dict[ColumnKind, tuple[str, ...]] = {}
    derived: dict[str, str] = {}
    for column, kind in shape.columns.items():
        columns[kind] = (*columns.get(kind, ()), column)
    rules = [_unique(shape), _present(shape)]
    # A feature table holds more than the rows of one window.
    has_history = {"created", "event_timestamp"} <= set(shape.present)
    if shape.time_column and not has_history:
        time = quoted(shape.time_column)
        start, end = "getvariable('window_start')", "getvariable('window_end')"
        derived[OUTSIDE] = f"{time} < {start} OR {time} >= {end}"
        rules.append(_never(OUTSIDE, "every row lies inside the window"))
    if has_history:
        derived[EARLY] = "created < event_timestamp"
        rules.append(_never(EARLY, "a row is in the store from its own moment on, not before"))
    if shape.label and shape.task == "regression":
        derived[ENDLESS] = f"NOT isfinite({quoted(shape.label)}::DOUBLE)"
        rules.append(_never(ENDLESS, "a label is a finite number"))
    elif shape.label:
        numbers = list(range(shape.num_labels))
        says = "a label is 0 or 1" if len(numbers) == 2 else "a label is the number of a class"
        rules.append(_among(shape.label, [*numbers], says))
    return Suite(
        suite=name,
        subject=f"a row with its {' and '.join(shape.key)}",
        columns=columns,
        # Of columns of the key that only name a row, bands would say nothing.
        profiling=Profiling(
            time_column=shape.time_column,
            skip=tuple(c for c in shape.key if c != shape.time_column),
        ),
        derived=derived,
        expectations=tuple(rules),
    )


def _unique(shape: TableShape) -> Rule:
    says = f"a row is named by its {' and '.join(shape.key)}"
    if len(shape.key) == 1:
        return _rule("expect_column_values_to_be_unique", says, column=shape.key[0])
    return _rule("expect_compound_columns_to_be_unique", says, column_list=list(shape.key))


def _present(shape: TableShape) -> Rule:
    columns = tuple(dict.fromkeys(shape.present))
    says = f"{', '.join(columns)} are always there"
    return Rule(type="expect_column_values_to_not_be_null", for_columns=columns, says=says)


def _never(column: str, says: str) -> Rule:
    return _among(column, [False], says)


def _among(column: str, values: list[JsonValue], says: str) -> Rule:
    return _rule("expect_column_values_to_be_in_set", says, column=column, value_set=values)


def _rule(kind: str, says: str, **arguments: JsonValue) -> Rule:
    return Rule(type=kind, kwargs=arguments, says=says)
