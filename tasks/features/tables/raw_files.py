"""What a feature repository says about a table as it comes from outside."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from tasks.contracts.clock import TimeZone
from tasks.governance.grants import shared_views
from tasks.governance.handling import RAW, Address, Declared
from tasks.kernel.errors import ConfigurationError

ColumnType = Literal["BIGINT", "INTEGER", "DOUBLE", "FLOAT", "VARCHAR", "BOOLEAN", "TIMESTAMPTZ"]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]


def column_name(text: str) -> str:
    """The name of a column here that comes nearest to a text, such as order_date of Order Date."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", text).lower()
    own = re.sub(r"[^a-z0-9]+", "_", words).strip("_") or "column"
    return (own if own[0].isalpha() else f"column_{own}")[:60]


def _is_column(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name):
        own = column_name(name)
        raise ValueError(
            f"{name!r} is no column name here: expected lower-case letters, digits and _, a letter "
            f"first. Call it {own}, and say so with rename: {{{name}: {own}}}"
        )
    return name


# A file's own column names are free; inside, one form passes through SQL, Feast and suites.
ColumnName = Annotated[
    str,
    AfterValidator(_is_column),
    WithJsonSchema({"type": "string", "pattern": r"^[a-z][a-z0-9_]*$", "maxLength": 60}),
]


def _address(uri: str) -> str:
    shared_views([uri])  # refuses what is of a tenant and names no feature view
    if "://" in uri and urlsplit(uri).password is not None:
        raise ValueError(
            "a uri with a password would stand in every copy of this file; leave it out, and give "
            "it as PGPASSWORD, or as all of the address in FALAJ_<TABLE>_URL"
        )
    return uri


class RawTable(Declared):
    """One table as it comes from outside; of one without `columns` all are read."""

    name: Identifier = Field(description="Table that the queries read.")
    uri: Annotated[str, AfterValidator(_address), Address(RAW, path=True)] = Field(min_length=1)
    """Path of a Parquet, CSV or JSON file, packed or not, relative to the feature repository; a
    folder of them, or a pattern such as data/*.parquet; `package://`, `s3://`, `https://`,
    `postgres://`, `delta+file://`, `delta+s3://`, `iceberg+catalog://`, `iceberg+file://`,
    `iceberg+s3://`, or `tenant://` for a feature view of another tenant."""
    columns: dict[ColumnName, ColumnType] = Field(min_length=1, description="Name to type.")
    rename: dict[str, ColumnName] = Field(default={})
    """Name that the file gives a column to the name in `columns`, such as `{userId: user_id, Order
    Date: order_date}`; the others are called alike."""
    key: tuple[ColumnName, ...] = Field(min_length=1, description="Columns that name one row.")
    time_column: ColumnName | None = None
    """Column that places a row in a window; none for a table without history."""
    time_zone: TimeZone | None = None
    """Zone of times that the file writes without one, such as America/Chicago; none: such times are
    refused. A repeated hour counts once, as the earlier one."""
    null_text: str | tuple[str, ...] = "NA"
    """Text that stands for a missing value in a CSV or JSON, or several; an empty cell is ""."""
    suite: str = Field(default_factory=lambda given: f"raw_{given.get('name')}", min_length=1)
    """Expectation suite for its rows; by default raw_<name>."""

    @model_validator(mode="after")
    def _columns_are_declared(self) -> Self:
        given = list(self.rename.values())
        named = [*self.key, *([self.time_column] if self.time_column else [])]
        for what, columns in (("key or time column is", named), ("rename gives", given)):
            if unknown := sorted(set(columns) - self.columns.keys()):
                raise ValueError(
                    f"raw table {self.name}: {what} {', '.join(unknown)}, which is not among its "
                    f"columns ({', '.join(self.columns)})"
                )
        if twice := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(
                f"raw table {self.name}: rename gives {', '.join(twice)} to several columns"
            )
        if self.time_column and self.columns[self.time_column] != "TIMESTAMPTZ":
            raise ValueError(
                f"raw table {self.name}: time column {self.time_column} must be TIMESTAMPTZ, a "
                "moment with its time zone"
            )
        return self


def undeclared(name: str, uri: str) -> RawTable:
    """A table of which only the address is known yet.

    Raises:
        ConfigurationError: the address has a password, or is none.
    """
    try:
        return RawTable.model_construct(name=name, uri=_address(uri), columns={}, key=())
    except ValueError as exc:
        raise ConfigurationError(str(exc)) from exc
