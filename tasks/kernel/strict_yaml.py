"""YAML files in which nothing is lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.kernel.errors import ConfigurationError

# The loader of libyaml reads the same language ten times faster, where it was built in.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(file: Path, name: str) -> dict[str, Any]:
    """The names and values that a file holds; sentences call it by `name`.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigurationError: it cannot be read, is no YAML or no UTF-8, writes a name twice in one
            mapping, or holds something other than names with values.
    """
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_Loader)
        content = yaml.load(text, Loader=_Loader)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ConfigurationError(f"{name} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{name} is no YAML: {exc}; save it as UTF-8") from exc
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"{name} is no YAML: {' '.join(str(exc).split())}") from exc
    if twice := _written_twice(root):
        line = twice.start_mark.line + 1
        raise ConfigurationError(f"{name}, line {line}: {twice.value} is written twice there")
    if not isinstance(content, dict):
        held = "nothing" if content is None else f"a {type(content).__name__}"
        raise ConfigurationError(f"{name} holds {held}; expected names with values, `name: value`")
    return content


def _written_twice(root: yaml.Node | None) -> yaml.ScalarNode | None:
    """A name that one mapping writes twice, before `<<` brings in what it may replace."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))  # an alias is its anchor's node once more
        if isinstance(node, yaml.MappingNode):
            names = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in names:
                    return key
                names.add((key.tag, str(key.value)))
                waiting.append(value)
        else:
            waiting += node.value
    return None
