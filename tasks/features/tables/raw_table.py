"""What a feature repository says about a table as it comes from outside."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from zoneinfo import available_timezones

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from tasks.contracts.base import field_title

ColumnType = Literal["BIGINT", "INTEGER", "DOUBLE", "FLOAT", "VARCHAR", "BOOLEAN", "TIMESTAMPTZ"]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]


class FrozenConfig(BaseModel):
    """Base of the configurations of this room."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)


def _is_column(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name):
        own = re.sub(r"[^a-z0-9]+", "_", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
        raise ValueError(
            f"{name!r} is no column name here: expected lower-case letters, digits and _, a letter "
            f"first. Call it {own.strip('_') or 'column'}, and say so with rename: "
            f"{{{name}: {own.strip('_') or 'column'}}}"
        )
    return name


# A file's own column names are free; inside, one form passes through SQL, Feast and suites.
ColumnName = Annotated[
    str,
    AfterValidator(_is_column),
    WithJsonSchema({"type": "string", "pattern": r"^[a-z][a-z0-9_]*$", "maxLength": 60}),
]


class RawTable(FrozenConfig):
    """One table as it comes from outside."""

    name: Identifier = Field(description="Table that the queries read.")
    uri: str = Field(
        min_length=1,
        description="`package://<package>/<file>`, or the path of a CSV, zipped CSV or Parquet "
        "file, relative to the feature repository.",
    )
    columns: dict[ColumnName, ColumnType] = Field(min_length=1, description="Name to type.")
    rename: dict[str, ColumnName] = Field(
        default={},
        description="Name that the file gives a column to the name in `columns`, such as "
        "`{userId: user_id, Order Date: order_date}`; the others are called alike.",
    )
    key: tuple[ColumnName, ...] = Field(min_length=1, description="Columns that name one row.")
    time_column: ColumnName | None = Field(
        default=None,
        description="Column that places a row in a window; none for a table without history.",
    )
    time_zone: str | None = Field(
        default=None,
        description="Zone of times that the file writes without one, such as America/Chicago; "
        "none: such times are refused. A repeated hour counts once, as the earlier one.",
    )
    null_text: str | tuple[str, ...] = Field(
        default="NA",
        description="Text of a CSV that stands for a missing value, or several of them; an empty "
        'cell is "".',
    )
    suite: str = Field(min_length=1, description="Expectation suite for its rows.")

    @model_validator(mode="after")
    def _columns_are_declared(self) -> Self:
        named = {*self.key, *([self.time_column] if self.time_column else [])}
        if unknown := sorted(named - self.columns.keys()):
            raise ValueError(
                f"raw table {self.name}: key or time column {', '.join(unknown)} is not among its "
                "columns"
            )
        if self.time_column and self.columns[self.time_column] != "TIMESTAMPTZ":
            raise ValueError(
                f"raw table {self.name}: time column {self.time_column} must be TIMESTAMPTZ, a "
                "moment with its time zone"
            )
        return self

    @model_validator(mode="after")
    def _renamed_columns_are_declared_once(self) -> Self:
        names = list(self.rename.values())
        if unknown := sorted(set(names) - self.columns.keys()):
            raise ValueError(
                f"raw table {self.name}: rename gives {', '.join(unknown)}, which is not among its "
                f"columns ({', '.join(self.columns)})"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"raw table {self.name}: rename gives {', '.join(twice)} to several columns"
            )
        return self

    @model_validator(mode="after")
    def _zone_exists(self) -> Self:
        if self.time_zone is not None and self.time_zone not in available_timezones():
            raise ValueError(
                f"raw table {self.name}: there is no time zone {self.time_zone!r}; name one of the "
                "IANA data base, such as America/Chicago"
            )
        return self
