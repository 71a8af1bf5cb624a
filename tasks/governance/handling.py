"""How data is to be treated: its class, its homes, its purpose; and which settings are addresses.

Declared on raw tables, and kept with what is made of them: the strictest class, all homes. Nothing
declared is class `internal` without a home, of which nobody is asked anything.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, model_validator

from tasks.kernel.values import Described, Frozen

DataClass = Literal["public", "internal", "personal", "sensitive"]
"""The strictest is last. `personal`: data about persons; `sensitive`: special categories of it."""
Zone = Annotated[str, Field(pattern=r"^[a-z]{2,3}(-[a-z0-9]+)*$", max_length=40)]
"""A jurisdiction: `uae`, `uae-difc`, `uae-adgm`, `eu`, or a country by ISO 3166-1, as `de`."""
Purpose = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=60)]
PERSONAL = ("personal", "sensitive")
RAW = "raw rows"


class Declared(Described):
    """What a use case declares of a raw table."""

    data_class: DataClass = "internal"
    """`personal`: about persons; `sensitive`: special categories of personal data."""
    home: tuple[Zone, ...] = ()
    """Jurisdictions whose rules the rows are under, as `uae`, `uae-difc`, `uae-adgm`, `eu` or a
    country's code; none: nobody is asked where the rows, and what is made of them, may be."""
    purposes: tuple[Purpose, ...] = ()
    """What personal rows were collected for; `features.purpose` has to be among them."""

    @model_validator(mode="after")
    def _persons_have_a_home(self) -> Self:
        if self.data_class in PERSONAL and not self.home:
            raise ValueError(
                f"data_class {self.data_class} needs a home, such as home: [uae], which says whose "
                "law holds"
            )
        return self


class Handling(Frozen):
    """How one thing is to be treated, by what it was made from."""

    data_class: DataClass = "internal"
    homes: tuple[Zone, ...] = ()
    purposes: tuple[Purpose, ...] = ()
    purpose: Purpose | Literal[""] = ""

    @classmethod
    def of(cls, tables: Iterable[Declared], purpose: str) -> Self:
        """That of what is made from raw tables, for a purpose."""
        found = list(tables)
        persons = [set(table.purposes) for table in found if table.data_class in PERSONAL]
        return cls(
            data_class=max((table.data_class for table in found), key=get_args(DataClass).index),
            homes=tuple(sorted({zone for table in found for zone in table.home})),
            purposes=tuple(sorted(set.intersection(*persons))) if persons else (),
            purpose=purpose,
        )

    @property
    def tags(self) -> dict[str, str]:
        """Tags of a model version; none where nothing was declared."""
        if not self.homes:
            return {}
        found = {"data_class": self.data_class, "data_homes": " ".join(self.homes)}
        return found | {"data_purpose": self.purpose} if self.purpose else found


ORDINARY = Handling()
"""Of what nobody declared anything: it may be anywhere."""


@dataclass(frozen=True)
class Address:
    """Marks a field of a configuration that says where something goes.

    Attributes:
        what: goes there.
        prefix: put before the value, for names that are no network address, such as `pool:`.
        variable: the value is the name of an environment variable that holds the address.
        path: a value without a scheme is a path, relative to the project.
    """

    what: str
    prefix: str = ""
    variable: bool = False
    path: bool = False


VARIABLES = {
    "FALAJ_STATE": "state",
    "FALAJ_AUDIT": "journal heads",
    "FALAJ_DATABASE_URL": "metadata",
    "FALAJ_REGISTRY_URL": "feature definitions",
    "FALAJ_REDIS": "online features",
    "FALAJ_PLATFORM_DATABASE_URL": "metadata",
    "FALAJ_PLATFORM_REDIS_URL": "events",
    "PREFECT_API_URL": "metadata",
    "OPENLINEAGE_URL": "lineage",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "traces",
    "FALAJ_NOTIFY_WEBHOOK": "messages",
    "FALAJ_NOTIFY_SLACK": "messages",
    "FALAJ_NOTIFY_EMAIL": "messages",
    "AWS_ENDPOINT_URL": "state",
    "AWS_ENDPOINT_URL_S3": "state",
}
"""Environment variables that hold an address, and what goes there."""


@dataclass(frozen=True)
class Placement:
    """What goes where, by which setting."""

    what: str
    where: str
    setting: str = ""


def addresses(config: BaseModel, environment: Mapping[str, str]) -> Iterator[Placement]:
    """All that a configuration places: its fields marked as `Address`, at any depth."""
    yield from _marked(config, type(config).__name__, environment)


def variables(environment: Mapping[str, str]) -> Iterator[Placement]:
    """All that the environment places."""
    for name, what in VARIABLES.items():
        if value := environment.get(name):
            yield Placement(what, value, name)


def _marked(value: Any, name: str, environment: Mapping[str, str]) -> Iterator[Placement]:
    if isinstance(value, BaseModel):
        for field, info in type(value).model_fields.items():
            found, path = getattr(value, field), f"{name}.{field}"
            if mark := next((m for m in info.metadata if isinstance(m, Address)), None):
                for each in found if isinstance(found, tuple) else (found,):
                    text = environment.get(str(each), "") if mark.variable else str(each or "")
                    prefix = "file:" if mark.path and "://" not in text else mark.prefix
                    if text:
                        yield Placement(mark.what, prefix + text, path)
            else:
                yield from _marked(found, path, environment)
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _marked(each, f"{name}[{number}]", environment)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _marked(each, f"{name}.{key}", environment)
