"""YAML files in which nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tasks.errors import ConfigurationError

# The loader of libyaml reads the same language ten times faster, where it was built in.
_SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_SafeLoader):  # type: ignore[misc, valid-type]
    """Safe YAML in which a name written twice is an error instead of a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "a name is written twice in one mapping", node.start_mark
            )
        return mapping


def read_yaml(file: Path, name: str) -> dict[str, Any]:
    """The names and values that a file holds; sentences call it by `name`.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigurationError: it is no YAML or no UTF-8, writes a name twice in one mapping, or holds
            something other than names with values.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{name} is no YAML: {exc}; save it as UTF-8") from exc
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"{name} is no YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(content, dict):
        held = "nothing" if content is None else f"a {type(content).__name__}"
        raise ConfigurationError(f"{name} holds {held}; expected names with values, `name: value`")
    return content
