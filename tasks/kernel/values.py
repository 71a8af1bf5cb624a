"""What every value that travels is built on: frozen, small, JSON-serializable."""

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

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


def flattened(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested configuration as rows: names joined by dots, words as they are, the rest as JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{name}", text


class Contract(BaseModel):
    """Base of every value that travels: frozen, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)


class Artifact(Contract):
    """One file or folder in the artifact store."""

    uri: str = Field(description="`artifact:<kind>/<key>/<path>`, relative to the store's root.")
    sha256: str = Field(min_length=64, max_length=64, description="Digest of the content.")
    num_bytes: NonNegativeInt
