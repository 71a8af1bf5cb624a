"""How data is to be treated: its class, its homes, its purpose; and which settings are addresses.

Declared on raw tables, and kept with what is made of them: the strictest class, all homes. Nothing
declared is class `internal` without a home, of which nobody is asked anything.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, Field, model_validator

from tasks.kernel.values import Described, Frozen, items_of

DataClass = Literal["public", "internal", "personal", "sensitive"]
"""The strictest is last. `personal`: data about persons; `sensitive`: special categories of it."""
Zone = Annotated[str, Field(pattern=r"^[a-z]{2,3}(-[a-z0-9]+)*$", max_length=40)]
"""A jurisdiction: `uae`, `uae-difc`, `uae-adgm`, `eu`, or a country by ISO 3166-1, as `de`."""
Purpose = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=60)]
PERSONAL = ("personal", "sensitive")
RAW = "raw rows"


class Declared(Described):
    """What a use case declares of a raw table."""

    data_class: DataClass = Field(default="internal", description="The strictest of its rows.")
    home: tuple[Zone, ...] = ()
    """Jurisdictions whose rules the rows are under, as `uae`, `uae-difc`, `uae-adgm`, `eu` or a
    country's code; none: nobody is asked where the rows, and what is made of them, may be."""
    purposes: tuple[Purpose, ...] = Field(default=(), description="Personal rows are for these.")

    @model_validator(mode="after")
    def _persons_have_a_home(self) -> Self:
        if self.data_class in PERSONAL and not self.home:
            raise ValueError(f"data_class {self.data_class} needs a home, such as home: [uae]")
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

    def lacking(self, declared: Self) -> list[str]:
        """What a declaration must say besides what it says, to be no weaker than this."""
        order = get_args(DataClass).index
        own, given = {*self.purposes}, {*declared.purposes}
        wider = self.data_class in PERSONAL and (not given <= own or bool(given) != bool(own))
        faults = {
            f"data_class: {self.data_class}": order(declared.data_class) < order(self.data_class),
            f"home: [{', '.join(self.homes)}]": not {*self.homes} <= {*declared.homes},
            f"purposes: [{', '.join(self.purposes)}]": wider,
        }
        return [wanted for wanted, is_lacking in faults.items() if is_lacking]

    @property
    def tags(self) -> dict[str, str]:
        """Tags of a model version; none where nothing was declared."""
        kept = {"data_class": self.data_class, "data_purpose": self.purpose}
        return {**kept, "data_homes": " ".join(self.homes)} if self.homes else {}


@dataclass(frozen=True)
class Address:
    """Marks a field of a configuration that says where something goes.

    Attributes:
        what: goes there.
        prefix: put before the value, for names that are no network address, such as `pool:`, and
            `https://` where whatever is behind the address has TLS, or is on loopback.
        variable: the value is the name of an environment variable that holds the address.
        path: a value without a scheme is a path, relative to the project.
    """

    what: str
    prefix: str = ""
    variable: bool = False
    path: bool = False


VARIABLES = {
    **dict.fromkeys(("FALAJ_STATE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), "state"),
    **dict.fromkeys(("FALAJ_DATABASE_URL", "FALAJ_PLATFORM_DATABASE_URL"), "metadata"),
    **dict.fromkeys(("FALAJ_REGISTRY_URL", "FALAJ_REDIS"), "features"),
    **dict.fromkeys(("FALAJ_PLATFORM_REDIS_URL", "PREFECT_API_URL"), "metadata"),
    **dict.fromkeys(("FALAJ_NOTIFY_WEBHOOK", "FALAJ_NOTIFY_SLACK"), "messages"),
    **{"FALAJ_NOTIFY_EMAIL": "messages", "FALAJ_AUDIT": "journal", "OPENLINEAGE_URL": "lineage"},
    **dict.fromkeys(("FALAJ_OIDC_DISCOVERY_URL", "FALAJ_KEYS"), ""),
}
"""Environment variables that hold an address, and what goes there; to an issuer goes nothing, to a
key store digests and random keys. Any
other `FALAJ_..._URL` is that of a raw table."""


@dataclass(frozen=True)
class Placement:
    """What goes where, by which setting."""

    what: str
    where: str
    setting: str = ""


def variables(environment: Mapping[str, str]) -> Iterator[Placement]:
    """All that the environment places."""
    for name, value in environment.items():
        what = VARIABLES.get(name, RAW if re.fullmatch(r"FALAJ_\w+_URL", name) else "")
        if what and value:
            yield Placement(what, value, name)


def addresses(config: object, environment: Mapping[str, str], name: str = "") -> list[Placement]:
    """All that a configuration places: its fields marked as `Address`, at any depth.

    Args:
        config: a model, or what one holds.
        environment: where a field names a variable, its value.
        name: of the configuration, for people.
    """
    fields = type(config).model_fields if isinstance(config, BaseModel) else {}
    marks = {n: m for n, f in fields.items() for m in f.metadata if isinstance(m, Address)}
    found = []
    for key, value in items_of(config):
        path = f"{name}.{key}".lstrip(".")
        if mark := marks.get(key):
            texts = map(str, value if isinstance(value, tuple) else [value or ""])
            named = [environment.get(t, "") if mark.variable else t for t in texts]
            prefixes = {t: "file:" if mark.path and "://" not in t else mark.prefix for t in named}
            found += [Placement(mark.what, prefixes[t] + t, path) for t in named if t]
        else:
            found += addresses(value, environment, path)
    return found
