"""What every value that travels is built on: frozen, small, JSON-serializable."""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from html import escape
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from tasks.kernel.errors import ConfigurationError

Model = TypeVar("Model", bound=BaseModel)

UNITS = {"s": "s", "ms": "ms", "h": "hours", "mb": "MB"}
"""Ends of names that say in what a number is counted."""

SPELLED = {
    **{word: word.upper() for word in ("auc", "r2", "psi", "ks", "ssh", "s3", "sql", "uri", "url")},
    **{word: word.upper() for word in ("onnx", "fsdp", "mig", "gpu", "id")},
    **{"gpus": "GPUs", "kwh": "kWh", "powersgd": "PowerSGD", "pytorch": "PyTorch"},
}


def field_title(name: str, _: object) -> str:
    """Label of a field in a form: its name in words, and its unit: `wait_s` is `Wait, s`.

    Without it, a field that holds a model is labelled with that model's class, so that three
    windows would all be called `TimeWindow`.
    """
    words = name.split("_")
    unit = UNITS.get(words[-1]) if len(words) > 1 else None
    text = " ".join(SPELLED.get(word, word) for word in (words[:-1] if unit else words))
    return f"{text[:1].upper()}{text[1:]}" + (f", {unit}" if unit else "")


def retired(*names: str) -> Any:
    """A validator, to be assigned in a model: leaves out fields that earlier releases wrote."""

    def leave_out(cls: type, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name not in names}

    return model_validator(mode="before")(leave_out)


_SPECIAL = str.maketrans({c: f"&#{ord(c)};" for c in "\\`*_[]|~"})


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: object) -> str:
    """The text without control characters, which neither XML nor a reader can take."""
    return _UNPRINTABLE.sub("\ufffd", str(text))


def plain(text: object) -> str:
    """Text that neither Markdown nor HTML reads as anything else, on one line."""
    return escape(" ".join(printable(text).split()), quote=False).translate(_SPECIAL)


def first_of(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """The first few, and how many there are beside: `a, b and 3 more`."""
    shown, rest = between.join(texts[:most]), len(texts) - most
    return f"{shown}{between.rstrip(' ,')} and {rest} more" if rest > 0 else shown


def flattened(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested configuration as rows: names joined by dots, words as they are, the rest as JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{name}", text


def items_of(value: object) -> Iterable[tuple[Any, Any]]:
    """Names and values of a model or a mapping, places and values of a list; of others none."""
    if isinstance(value, BaseModel):
        return ((name, getattr(value, name)) for name in type(value).model_fields)
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, tuple | list) else ()


class Frozen(BaseModel):
    """Base of values that are read back from where another release may have written more names."""

    model_config = ConfigDict(frozen=True)


class Contract(Frozen):
    """Base of every value that travels: frozen, and unknown names are refused."""

    model_config = ConfigDict(extra="forbid", field_title_generator=field_title)


class Described(Contract):
    """Base of settings and results whose fields say below themselves what they mean.

    Schemas and forms show these words. `Field(description=...)` says the same, where it is shorter.
    They are read when a schema is asked for: pydantic itself would read them at each import.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for kind in cls.__mro__[: cls.__mro__.index(Described)]:
            words = _words_below(kind.__module__).get(kind.__name__, {})
            for name in words.keys() & fields.keys():
                fields[name].setdefault("description", words[name])
        return schema


@cache
def _words_below(module: str) -> dict[str, dict[str, str]]:
    """What a module says below the fields of its classes, by class and field, each on one line."""
    found: dict[str, dict[str, str]] = {}
    parts = ast.parse(inspect.getsource(sys.modules[module])).body
    for kind in (part for part in parts if isinstance(part, ast.ClassDef)):
        for pair in pairwise(kind.body):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found.setdefault(kind.name, {})[name] = " ".join(text.split())
    return found


class Artifact(Contract):
    """One file or folder in the artifact store."""

    uri: str = Field(description="`artifact:<kind>/<key>/<path>`, relative to the store's root.")
    sha256: str = Field(min_length=64, max_length=64, description="Digest of the content.")
    num_bytes: NonNegativeInt


def checked(kind: type[Model], content: object, where: str, undone: str) -> Model:
    """Plain data as a value of its kind; sentences say where it is from, and what was not done.

    Raises:
        ConfigurationError: it says something that cannot be.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as exc:
        raise ConfigurationError(f"{where}: {faults(exc)}. {undone}") from exc


def seen_from(folder: Path, value: Model) -> Model:
    """The same value, its relative paths in this folder."""
    return value.model_copy(update={n: folder / v for n, v in value if isinstance(v, Path)})


def in_utc(moment: datetime) -> datetime:
    """The same moment in UTC; one without a zone counts as UTC, as everywhere in Feast."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def faults(exc: ValidationError) -> str:
    """What a validation found, in one line: where, and what is wrong there.

    Each mistake is told once, with all its places; never what was written there, which may be a
    secret.
    """
    found: dict[str, list[str]] = {}
    for place, error in mistakes(exc):
        found.setdefault(error["msg"], []).append(".".join(map(str, place)) or "it")
    return "; ".join(f"{', '.join(names)}: {message}" for message, names in found.items())


def mistakes(exc: ValidationError) -> Iterator[tuple[tuple[int | str, ...], dict[str, Any]]]:
    """Place and mistake, without those that follow from another one.

    pydantic counts only the right items of a list, and calls a default missing that it would have
    made from what is wrong.
    """
    errors = exc.errors()
    places = [error["loc"] for error in errors]
    for error in errors:
        place = tuple(step for step in error["loc"] if step != "[key]")
        inside = any(len(p) > len(place) and p[: len(place)] == place for p in places)
        follows = error["type"] == "too_short" and inside
        if not follows and error["type"] != "default_factory_not_called":
            message = error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
            yield place, {**error, "msg": message}


def is_loopback(host: str) -> bool:
    """Whether nothing that is sent to a host, as URLs name it, leaves this machine."""
    with suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return host == "localhost"
