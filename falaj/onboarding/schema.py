"""What `use_case.yaml` says, and each mistake in it with its line."""

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from falaj.onboarding.findings import Finding, Findings, did_you_mean, nearest
from flows.config import PipelineConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import USE_CASE_FILE, no_project
from tasks.kernel.values import mistakes

CHECK = "schema"
MANY = 12
LISTED = r"'?(\w+)'?(?:, which is not among [^(]*\(|; there are )([\w, ]+)"
"""A name that is not known, and those that are."""


def check_schema(findings: Findings) -> None:
    """Find everything in `use_case.yaml` that cannot be.

    Raises:
        ConfigurationError: there is no such file.
    """
    file = findings.repo / USE_CASE_FILE
    try:
        PipelineConfig.model_validate(read_yaml(file, USE_CASE_FILE))
    except FileNotFoundError as exc:
        raise ConfigurationError(f"{no_project(findings.repo)}. Nothing was checked") from exc
    except ConfigurationError as exc:
        findings.add_error(exc, CHECK, (USE_CASE_FILE, None))
    except ValidationError as exc:
        for path, error in mistakes(exc):
            # A rule over several entries names the one that it is about.
            named = path or re.match(r"[a-z_.]*", error["msg"])[0].split(".")  # type: ignore[index]
            place, line = findings.declared(error["msg"], *named)
            seen, expected, action = _in_words(path, error)
            findings.found.append(
                Finding(CHECK, "configuration", place, seen, action, expected, line)
            )


def _in_words(path: Sequence[str | int], error: dict[str, Any]) -> tuple[str, str, str]:
    """What was seen and expected, and what to do."""
    kind, message, shown = error["type"], error["msg"], ".".join(map(str, path))
    name, parent = str(path[-1]) if path else "", ".".join(map(str, path[:-1])) or "the use case"
    if kind == "extra_forbidden":
        known = sorted(_fields_at(path))
        near = nearest(name, known)
        listed = ", ".join(known) if len(known) <= MANY else "one of its settings (docs/reference)"
        action = f"write {near} in its place" if near else "take it out, or mend its name"
        return f"{name} is no setting of {parent}", near or listed, action
    if kind == "missing":
        meant = _fields_at(path).get(name) or "it is needed"
        return f"{parent} has no {name}", f"{name}: {meant}", f"add the line `{name}: ...` there"
    seen = f"{shown} is {error['input']!r}" if isinstance(error["input"], str | int | float) else ""
    if kind == "literal_error":
        expected = str(error["ctx"]["expected"])
        near = did_you_mean(str(error["input"]), re.findall(r"'([^']+)'", expected))
        return seen, expected, f"{near}write one of these"
    sentence, *more = re.split(r"; |\. ", message, maxsplit=1)
    said = f"{seen or shown}: {sentence}".removeprefix(": ")
    if others := re.search(LISTED, message):
        near = did_you_mean(others[1], others[2].split(", "))
        return said, others[2], f"{near}name one of these"
    rest, mend = "".join(more).removesuffix(". Nothing was touched"), f"mend {shown or 'the entry'}"
    if rest.startswith("expected "):
        return said, rest.removeprefix("expected "), mend
    is_advice = rest and not re.match(r"[\w.]+: ", rest)
    return said, "", rest if is_advice else mend


def _fields_at(path: Sequence[str | int]) -> dict[str, str]:
    """Settings that may stand where the last step of a path does, with what each means."""
    schema = PipelineConfig.model_json_schema()
    parts = [schema]
    for step in path[:-1]:
        given = json.dumps([part.get("properties", {}).get(step) for part in parts])
        inner = [schema["$defs"][name] for name in re.findall(r"#/\$defs/(\w+)", given)]
        parts = inner or parts
    return {
        name: field.get("description", "")
        for part in parts
        for name, field in part.get("properties", {}).items()
    }
