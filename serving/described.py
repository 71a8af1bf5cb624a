"""Every setting with its default and meaning, as the classes that check them say it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from serving.config import SERVING_FILE, ServingConfig
from serving.security.config import SECURITY_FILE, SecurityConfig

WIDTH = 100
_INDENT = " " * 4


@dataclass(frozen=True)
class Setting:
    """One setting: `name` with dots, `[]` for each entry of a list, `<name>` of a mapping."""

    name: str
    default: str
    choices: tuple[str, ...]
    meaning: str


def all_settings() -> list[str]:
    """Every setting of serving, by the file in which it stands."""
    return [
        *lines_of(f"{SERVING_FILE}, in the feature repository", settings_of(ServingConfig)),
        *lines_of(f"{SECURITY_FILE}, in the state folder", settings_of(SecurityConfig)),
    ]


def settings_of(
    kind: type[BaseModel], before: str = "", given: BaseModel | None = None
) -> Iterator[Setting]:
    """All settings of a class, in its order.

    Args:
        kind: the class.
        before: stands before each name.
        given: holds the defaults; None for those of the class.
    """
    attributes = _attributes(kind)
    for name, field in kind.model_fields.items():
        full = f"{before}{name}"
        default = _default(field) if given is None else getattr(given, name)
        inner, mark = _inner(field.annotation)
        if inner is None or mark or not _is_section(field):
            meaning = field.description or attributes.get(name, "")
            choices = _choices(field.annotation)
            yield Setting(full, _text(default), choices, f"{meaning[:1].upper()}{meaning[1:]}")
        if inner is not None:
            group = default if isinstance(default, BaseModel) else None
            yield from settings_of(inner, f"{full}{mark}.", group)


def lines_of(heading: str, settings: Iterator[Setting]) -> list[str]:
    """Settings as text: YAML-like `name: default`, and what it means below."""
    lines = [heading, "=" * len(heading)]
    for one in settings:
        choices = f"{' | '.join(one.choices)}. " if one.choices else ""
        lines.append(f"{one.name}: {one.default}")
        lines += textwrap.wrap(
            f"{choices}{one.meaning}", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    return [*lines, ""]


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Class of settings within a type, and how its name goes on."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    mark = {tuple: "[]", list: "[]", dict: ".<name>"}.get(get_origin(annotation), "")
    for argument in get_args(annotation):
        inner, deeper = _inner(argument)
        if inner is not None:
            return inner, f"{mark}{deeper}"
    return None, ""


def _is_section(field: FieldInfo) -> bool:
    """Whether a field only groups others: it is there without being named."""
    return isinstance(field.annotation, type) and not field.is_required()


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return PydanticUndefined
    return field.get_default(call_default_factory=True, validated_data={})


def _text(value: Any) -> str:
    if value is PydanticUndefined:
        return "(has to be given)"
    kind = type(value)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    elif kind is tuple:
        value = [v.model_dump(mode="json") if isinstance(v, BaseModel) else v for v in value]
    elif kind not in (str, int, float, bool, dict, list, type(None)):
        value = str(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(choice for inner in get_args(annotation) for choice in _choices(inner))


def _attributes(kind: type[BaseModel]) -> dict[str, str]:
    """Meanings that stand in the section `Attributes` of a class's docstring."""
    _, _, section = (kind.__doc__ or "").partition("Attributes:")
    found = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", section, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}
