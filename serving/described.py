"""Every setting with its default and meaning, as the JSON schema of its class has them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from serving.config import SERVING_FILE, ServingConfig
from serving.security.config import SECURITY_FILE, SecurityConfig

WIDTH = 100
_INDENT = " " * 4
Node = Mapping[str, Any]


def all_settings() -> list[str]:
    """Every setting of serving, by the file in which it stands."""
    return [
        *lines_of(f"{SERVING_FILE}, in the feature repository", ServingConfig),
        *lines_of(f"{SECURITY_FILE}, in the state folder", SecurityConfig),
    ]


def lines_of(heading: str, kind: type[BaseModel]) -> list[str]:
    """Settings as text: YAML-like `name: default`, and what it means below.

    In a name, `[]` stands for each entry of a list and `<name>` for each key of a mapping.
    """
    schema = kind.model_json_schema()
    lines = [heading, "=" * len(heading)]
    for name, default, meaning in _settings(schema, schema, "", {}):
        lines.append(f"{name}: {default}")
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return [*lines, ""]


def _settings(schema: Node, kind: Node, before: str, given: Node) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each setting of a class; `given` has the group's defaults."""
    meanings = _attributes(kind.get("description", ""))
    for name, field in kind["properties"].items():
        full, default = f"{before}{name}", given.get(name, field.get("default", {}))
        inner, mark = _inner(schema, field)
        if inner is None or "$ref" not in field or name in kind.get("required", ()):
            is_absent = name in kind.get("required", ()) and name not in given
            text = "(has to be given)" if is_absent else _yaml(default)
            meaning = field.get("description") or meanings.get(name, "")
            yield full, text, f"{_choices(field)}{meaning[:1].upper()}{meaning[1:]}"
        if inner is not None:
            group = default if isinstance(default, Mapping) and not mark else {}
            yield from _settings(schema, inner, f"{full}{mark}.", group)


def _inner(schema: Node, field: Node) -> tuple[Node | None, str]:
    """Class of settings within a field, and how its name goes on."""
    if (ref := field.get("$ref")) is not None:
        found = schema["$defs"][ref.rpartition("/")[2]]
        return (found, "") if "properties" in found else (None, "")
    below = [(option, "") for option in field.get("anyOf", ())]
    below += [(field["items"], "[]")] if "items" in field else []
    keyed = [field.get("additionalProperties"), *field.get("patternProperties", {}).values()]
    below += [(node, ".<name>") for node in keyed if isinstance(node, Mapping)]
    for node, mark in below:
        inner, deeper = _inner(schema, node)
        if inner is not None:
            return inner, f"{mark}{deeper}"
    return None, ""


def _choices(field: Node) -> str:
    options = [field, field.get("items", {}), *field.get("anyOf", ())]
    words = [str(word) for option in options for word in option.get("enum", ())]
    return f"{' | '.join(words)}. " if words else ""


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def _attributes(docstring: str) -> dict[str, str]:
    """Meanings that stand in the section `Attributes` of a class's docstring."""
    _, _, section = docstring.partition("Attributes:")
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}
