"""What users and other programs rely on, one line each.

`python -m tests.support.suite.surfaces FOLDER` writes it to files; a test compares them.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from tasks.metadata.tables import metadata

ROOT = Path(__file__).resolve().parents[3]


def deployments() -> Iterator[str]:
    """Name, pool and queue of each deployment, and its schedules."""
    for entry in _prefect_file()["deployments"]:
        pool = entry["work_pool"]
        yield f"{_flow(entry).name}/{entry['name']} {pool['name']}/{pool['work_queue_name']}"
        for schedule in entry.get("schedules", ()):
            yield f"{_flow(entry).name}/{entry['name']} {schedule['slug']} {schedule['cron']}"


def parameters() -> Iterator[str]:
    """Every parameter of every deployed flow with type and default, and each field of it; those of
    the use case's configuration once."""
    for flow in (_flow(entry) for entry in _prefect_file()["deployments"]):
        schema = flow.parameters.model_dump()
        schema["$defs"] = schema.pop("definitions")
        for line in fields(schema):
            if not line.startswith("config."):
                yield f"{flow.name}: {line}"
            elif flow.name == "pipeline":
                yield line


def report() -> Iterator[str]:
    """Every field of report.json."""
    from tasks.contracts.run import RunRecord

    yield from fields(RunRecord.model_json_schema(mode="serialization"))


def tables() -> Iterator[str]:
    """Every column of every table of the control plane."""
    for table in metadata.tables.values():
        for column in table.columns:
            key = " key" if column.primary_key else ""
            null = "" if column.nullable else " not null"
            yield f"{table.name}.{column.name} {type(column.type).__name__}{null}{key}"


def http() -> Iterator[str]:
    """Every path of the serving API with its statuses, and every field of its messages."""
    from serving.protocol.http import openapi

    document = openapi.document()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path} {' '.join(sorted(operation['responses']))}"
    for name, schema in document["components"]["schemas"].items():
        yield from (f"{name}.{field}" for field in sorted(schema.get("properties", ())))


def fields(schema: dict[str, Any]) -> Iterator[str]:
    """Path, type and default of each field of a JSON schema, through its references."""
    yield from _fields(schema, schema.get("$defs", {}), "", ())


def _fields(
    schema: dict[str, Any], definitions: dict[str, Any], path: str, above: tuple[str, ...]
) -> Iterator[str]:
    for name, field in sorted(schema.get("properties", {}).items()):
        here = f"{path}.{name}" if path else name
        kinds = sorted(set(_kinds(field)))
        given = field.get("default", {})
        yield f"{here} {'|'.join(kinds)}" + ("" if isinstance(given, dict) else f" = {given}")
        for kind in kinds:
            if kind in definitions and kind not in above:
                yield from _fields(definitions[kind], definitions, here, (*above, kind))


def _kinds(field: dict[str, Any]) -> Iterator[str]:
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2]
    elif isinstance(field.get("type"), str):
        yield field["type"]
    for part in (*field.get("anyOf", ()), *field.get("oneOf", ()), *field.get("allOf", ())):
        yield from _kinds(part)
    for part in (
        *field.get("prefixItems", ()),
        field.get("items"),
        field.get("additionalProperties"),
    ):
        if isinstance(part, dict):
            yield from _kinds(part)


def _prefect_file() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "prefect.yaml").read_text())  # type: ignore[no-any-return]


def _flow(entry: dict[str, Any]) -> Any:
    module, _, name = entry["entrypoint"].rpartition(".")
    return getattr(import_module(module), name)


SURFACES = {each.__name__: each for each in (deployments, parameters, report, tables, http)}


def lines_of(name: str) -> list[str]:
    """The lines of a surface, sorted, each once."""
    return sorted(set(SURFACES[name]()))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or SURFACES:
        (folder / f"{name}.txt").write_text("\n".join(lines_of(name)) + "\n")
