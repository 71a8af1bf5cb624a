"""`falaj catalogue`: every feature view, whose it is, how good and fresh, who uses it, who may."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from falaj.context import EXIT_FAILED, DryRun, Here, Shown, row
from falaj.governance.evidence import run_command
from falaj.models import open_registry
from tasks.features.catalogue import APPLIED, catalogued_views, written
from tasks.features.tables.tenants import environment_of
from tasks.governance import journal
from tasks.governance.duties import acting
from tasks.governance.grants import read_grants
from tasks.kernel import settings as state
from tasks.kernel.errors import FalajError
from tasks.kernel.settings import VALUE, ArtifactStore, Settings, features_home_of
from tasks.kernel.tenants import home_of, name_of, own_tenant, read_tenants
from tasks.lineage.journal import Journal
from tasks.lineage.trace import Chain, Data, Origin, known_origins
from tasks.registry.mlflow_registry import CHAMPION

PAGE, RESULT = Path("catalogue") / "index.html", "validation.json"
AT_A_TIME = 4
"""Tenants' states that are read side by side."""
Facts = dict[str, Any]
Origins = Mapping[Data, Origin]


def catalogue(*, dry_run: DryRun = False, context: Here) -> Shown:
    """Show every feature view: whose, of what data, how fresh and good, who uses it, who may.

    Of an installation also its tenants' views, as far as who asks may read them. What cannot be
    read is named, and the exit code is 1. The page is `catalogue/index.html` of the state folder.

    Raises:
        ConfigurationError: the list of tenants says what cannot be.
        StorageError: the disk refused the page.

    Examples:
        falaj catalogue
        FALAJ_TENANT=red falaj catalogue
    """
    from tasks.reporting.page import page_environment

    home, tenants = context.home, read_tenants(context.home)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        theirs = pool.map(lambda name: _of_tenant(home, name, tenants[name].contact), tenants)
        found = to_jsonable_python(_of_state(context.settings))
        found += [entry for entries in theirs for entry in entries]
    found.sort(key=lambda entry: (not entry["views"], not entry["trouble"]))
    now, page = f"{datetime.now(UTC):%FT%TZ}", None if dry_run else home / PAGE
    lines = [line for entry in found for line in _lines(entry)]
    if page:
        template = page_environment().get_template("catalogue.html.j2")
        state.put(page, template.render(now=now, use_cases=found, own=name_of(home)))
        lines.append(row("Page", page))
    code = EXIT_FAILED if any(entry["trouble"] for entry in found) else 0
    return Shown({"time": now, "page": page, "use_cases": found}, lines, code)


def _of_tenant(home: Path, name: str, contact: str) -> list[Facts]:
    """As a process finds it that works with the tenant's own servers, keys and mounts."""
    answer = run_command("falaj catalogue --dry-run", environment_of(home_of(home, name)))
    if isinstance(answer.document, dict):
        return list(answer.document["use_cases"])
    return [_entry(name, contact, trouble=answer.said or f"it ended with {answer.code}")]


def _entry(tenant: str, contact: str, use_case: str = "", **found: Any) -> Facts:
    named = {"tenant": tenant, "contact": contact, "use_case": use_case}
    return {**named, "trouble": "", "models": [], "views": [], **found}


def _of_state(settings: Settings) -> list[Facts]:
    """The use cases of one state; one without a name where there is none yet."""
    home, found = settings.home, []
    tenant, contact = name_of(home), own_tenant(home).contact
    others = (folder.name for folder in state.children(home / state.USE_CASES))
    for name in (state.DEFAULT_FEATURE_REPO.name, *others):
        if state.bring(features_home_of(home, name) / APPLIED).exists():
            try:
                acting(home, "read", name)
                facts = _use_case(name, settings)
            except (FalajError, OSError) as exc:
                facts = {"trouble": str(exc)}
            found.append(_entry(tenant, contact, name, **facts))
    return found or [_entry(tenant, contact)]


def _use_case(name: str, settings: Settings) -> Facts:
    origins, readers = known_origins(Journal(settings.home / "lineage")), _readers(settings.home)
    models, checks = list(_models(name, settings, origins)), _newest_checks(settings.store)
    today = datetime.now(UTC).date()
    grants = [g for g in read_grants(settings.home) if g.until is None or g.until >= today]
    views = catalogued_views(name, settings)
    for view in views:
        made = f"features/{view['table']}"
        start = next((d for d in origins if (d.name, d.version) == (made, view["sha256"])), None)
        behind = _behind(start, origins) if start else set()
        view["sources"] = sorted(n.removeprefix("raw/") for n in behind if n.startswith("raw/"))
        view["quality"] = checks.get(view["sha256"])
        view["consumers"] = [
            {**model, "versions": numbers}
            for model, made_from in models
            if (numbers := [n for n, names in made_from.items() if made in names])
        ]
        view["grants"] = [g for g in grants if (g.use_case, g.view) == (name, view["table"])]
        view["readers"] = readers.get(f"{name}/{view['table']}", [])
    return {"models": [model for model, _ in models], "views": views}


def _models(use_case: str, settings: Settings, origins: Origins) -> Iterator[Any]:
    """The use case's registered models, and the names of all that each version was made from."""
    registry = open_registry(settings)
    made = {data.name: data for data in origins}
    for name in registry.names() if registry else ():
        if registry and registry.owner(name) == use_case:
            numbers = [version.number for version in registry.versions(name)]
            known = {n: made[key] for n in numbers if (key := f"models/{name}/{n}") in made}
            champion = registry.aliases(name).get(CHAMPION)
            model = {"model": name, "versions": numbers, "champion": champion}
            yield model, {n: _behind(data, origins) for n, data in known.items()}


def _behind(start: Data, origins: Origins) -> set[str]:
    """Names of what something was made from, without the files from outside."""
    chain = (origin.data for origin in Chain(start, origins))
    return {data.name for data in chain if data.namespace == start.namespace}


def _readers(home: Path) -> dict[str, list[Facts]]:
    """Feature view to the use cases of other tenants that read it, and when they did so last."""
    found: dict[str, dict[object, Facts]] = {}
    for line in journal.Journal(home / "audit").lines():
        if b'"read-view"' in line.text and (said := line.content).get("outcome") == "ok":
            reader = {"to": said["subject"]["to"], "use_case": said["who"]["use_case"]}
            known = found.setdefault(said["subject"]["view"], {})
            known[(*reader.values(),)] = {**reader, "last": said["time"]}
    return {view: [*known.values()] for view, known in found.items()}


def _newest_checks(store: ArtifactStore) -> dict[str, Facts]:
    """What the newest validation of each table saw, by the table's digest."""
    refused, found = dict[str, datetime](), dict[str, Facts]()
    for folder in sorted(store.folders("failed_validations"), key=lambda f: written(f / VALUE)):
        outcome = json.loads(store.file(folder, RESULT).read_text("utf-8"))
        refused[outcome["suite"]] = written(folder / VALUE)
    for folder in sorted(store.folders("validations"), key=lambda f: written(f / VALUE)):
        value, checked = json.loads((folder / VALUE).read_text("utf-8")), written(folder / VALUE)
        later = refused.get(value["suite"], checked)
        found[value["subject_sha256"]] = {
            "expectations": value["num_expectations"],
            "held": value["num_expectations"] - len(value["warnings"]),
            "checked": checked,
            "refused_later": later if later > checked else None,
            "page": f"data_docs/current/{value['result']['sha256'][:24]}.html",
        }
    return found


def _lines(entry: Facts) -> Iterator[str]:
    """An entry for people."""
    yield f"{entry['tenant']}/{entry['use_case']}  {entry['contact']}".strip("/ ")
    if not entry["views"]:
        yield f"  cannot be read: {entry['trouble']}" if entry["trouble"] else "  no feature view"
    for view in entry["views"]:
        check, handling = view["quality"], view["handling"] or {"data_class": "unknown"}
        held = f"{check['held']} of {check['expectations']} hold" if check else "not checked"
        users = [f"{m['model']} {m['versions'][-1]}" for m in view["consumers"]]
        users += [f"granted to {grant['to']}" for grant in view["grants"]]
        cells = [view["name"], ", ".join(view["entities"]), handling["data_class"]]
        cells += [str(view["newest_event"] or "no event")[:16], held]
        yield ("  " + "".join(f"{cell:<22}" for cell in cells) + ", ".join(users)).rstrip()
