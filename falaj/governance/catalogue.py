"""`falaj catalogue`: every feature view, whose it is, how good and fresh, who uses it, who may."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from pydantic_core import to_jsonable_python

from falaj.context import EXIT_FAILED, DryRun, Here, Shown, row
from falaj.governance.evidence import run_command
from falaj.models import open_registry
from tasks.features.catalogue import APPLIED, catalogued_views
from tasks.governance.duties import acting
from tasks.governance.handling import DataClass, Handling
from tasks.kernel.errors import ArtifactError, FalajError
from tasks.kernel.files import digest_of
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.settings import (
    DEFAULT_FEATURE_REPO,
    DEFAULT_PROFILE,
    SERVER_NAMES,
    USE_CASES,
    VALUE,
    ArtifactStore,
    Settings,
    bring,
    children,
    put,
)
from tasks.kernel.tenants import TENANT, own_tenant, read_tenants, tenant_of
from tasks.lineage.journal import Journal
from tasks.lineage.trace import Chain, Data, Origin, known_origins
from tasks.registry.mlflow_registry import CHAMPION
from tasks.validation.docs import CURRENT, FOLDER
from tasks.validation.outcome import SuiteOutcome, read_outcome

PAGE = Path("catalogue") / "index.html"
OWN = {*SERVER_NAMES.values(), "FALAJ_PROFILE", ENCRYPTION}
"""Variables that are of one state alone; another tenant's are in its `server.yaml`."""
AT_A_TIME = 4
RESULT_FILE = "validation.json"
Facts = dict[str, Any]


def catalogue(*, dry_run: DryRun = False, context: Here) -> Shown:
    """Show every feature view: whose, of what data, how fresh and good, who uses it, who may.

    Of an installation with its tenants' views, as far as who asks may read them; what cannot be
    read is named, and the exit code is 1. The page is `catalogue/index.html` of the state folder.

    Raises:
        ConfigurationError: the list of tenants says what cannot be.

    Examples:
        falaj catalogue
        FALAJ_TENANT=red falaj catalogue
    """
    from tasks.reporting.page import page_environment

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        known = read_tenants(context.home)
        theirs = pool.map(lambda name: _of_tenant(context.home, name, known[name].contact), known)
        own = to_jsonable_python(_entries(context.settings))
        found = [*own, *(entry for each in theirs for entry in each)]
    facts: Facts = {"time": f"{datetime.now(UTC):%FT%TZ}", "use_cases": found}
    if not dry_run:
        template = page_environment().get_template("catalogue.html.j2")
        put(context.home / PAGE, template.render(now=facts["time"], use_cases=found))
        facts["page"] = context.home / PAGE
    lines = [line for entry in found for line in _lines(entry)]
    lines += [] if dry_run else [row("Page", context.home / PAGE)]
    return Shown(facts, lines, EXIT_FAILED if any(each["trouble"] for each in found) else 0)


def _of_tenant(home: Path, name: str, contact: str) -> list[Facts]:
    """As a process with the tenant's servers, keys and mounts finds it."""
    kept = {n: value for n, value in os.environ.items() if n not in OWN}
    command = "falaj catalogue --dry-run"
    answer = run_command(command, {**kept, "FALAJ_HOME": str(home), TENANT: name})
    if not isinstance(answer.document, dict):
        return [{**_entry(name, contact), "trouble": answer.said or f"exit code {answer.code}"}]
    own = f"../tenants/{name}/"
    return [{**each, "folder": own} for each in answer.document["use_cases"]]


def _entry(tenant: str, contact: str) -> Facts:
    nothing: Facts = {"use_case": "", "trouble": "", "views": [], "models": []}
    return {"tenant": tenant, "contact": contact, "folder": "../", **nothing}


def _entries(settings: Settings) -> list[Facts]:
    """The use cases of one state; one without a name where there is none yet."""
    home, found = settings.home, []
    nothing = _entry(tenant_of(home), own_tenant(home).contact)
    for folder in (home, *children(home / USE_CASES)):
        if not bring(folder / APPLIED).exists():
            continue
        name = DEFAULT_FEATURE_REPO.name if folder == home else folder.name
        try:
            acting(home, "read", name)
            facts = _use_case(name, folder, settings)
        except (FalajError, OSError) as exc:
            facts = {"trouble": str(exc)}
        found.append({**nothing, "use_case": name, **facts})
    return found or [nothing]


def _use_case(name: str, folder: Path, settings: Settings) -> Facts:
    shared = None if settings.profile == DEFAULT_PROFILE else os.environ.get("FALAJ_REGISTRY_URL")
    origins = known_origins(Journal(settings.home / "lineage"))
    models = list(_models(name, settings, origins))
    (newest, refused), landed = _checks(settings.store), _handlings(settings.store)
    views = []
    for view in catalogued_views(folder, shared, settings.store):
        table = f"features/{view.table}"
        start = next((d for d in origins if (d.name, d.version) == (table, view.sha256)), None)
        behind = [origin.data for origin in Chain(start, origins)] if start else []
        handlings = [landed[d.version] for d in behind if d.version in landed]
        facts = {
            "sources": sorted({d.name[4:] for d in behind if d.name.startswith("raw/")}),
            "data_class": max((h.data_class for h in handlings), key=CLASSES.index, default=None),
            "homes": sorted({zone for h in handlings for zone in h.homes}),
            "quality": _quality(newest[view.sha256], refused, settings)
            if view.sha256 in newest
            else None,
            "consumers": [m for each in models if (m := _consumer(each, table))],
        }
        views.append({**view.model_dump(), **facts})
    shown = [{n: value for n, value in each.items() if n != "reads"} for each in models]
    return {"views": views, "models": shown}


CLASSES = get_args(DataClass)


def _models(use_case: str, settings: Settings, origins: dict[Data, Origin]) -> Iterator[Facts]:
    """The use case's registered models, and what each version was made from."""
    registry = open_registry(settings)
    made = {data.name: data for data in origins if data.name.startswith("models/")}
    for name in registry.names() if registry else ():
        if registry is None or registry.owner(name) != use_case:
            continue
        numbers = [version.number for version in registry.versions(name)]
        starts = {n: made[key] for n in numbers if (key := f"models/{name}/{n}") in made}
        reads = {n: {o.data.name for o in Chain(d, origins)} for n, d in starts.items()}
        champion = registry.aliases(name).get(CHAMPION)
        yield {"model": name, "versions": numbers, "champion": champion, "reads": reads}


def _consumer(model: Facts, table: str) -> Facts | None:
    """The versions of a model that were made from a table; None where none was."""
    numbers = [n for n, names in model["reads"].items() if table in names]
    champion = model["champion"] if model["champion"] in numbers else None
    return {**model, "versions": numbers, "champion": champion, "reads": None} if numbers else None


def _handlings(store: ArtifactStore) -> dict[str, Handling]:
    """How landed tables are to be treated, by their digests."""
    found = {}
    for folder in store.folders("landed"):
        value = json.loads((folder / VALUE).read_text("utf-8"))
        handling = Handling.model_validate(value.get("handling", {}))
        found |= {table["artifact"]["sha256"]: handling for table in value["tables"]}
    return found


def _checks(store: ArtifactStore) -> tuple[dict[str, Path], dict[str, datetime]]:
    """Newest validation of each table, by its digest; and when each suite last refused one."""
    refused = {}
    for folder in sorted(store.folders("failed_validations"), key=_written):
        if (outcome := _outcome(folder, store)) is not None:
            refused[outcome.suite] = _written(folder)
    folders = sorted(store.folders("validations"), key=_written)
    values = {folder: json.loads((folder / VALUE).read_text("utf-8")) for folder in folders}
    return {value["subject_sha256"]: folder for folder, value in values.items()}, refused


def _quality(folder: Path, refused: dict[str, datetime], settings: Settings) -> Facts | None:
    """What the newest validation saw; None where this release cannot read it."""
    if (outcome := _outcome(folder, settings.store)) is None:
        return None
    page = f"{FOLDER}/{CURRENT}/{digest_of(folder / RESULT_FILE)[:24]}.html"
    later, checked = refused.get(outcome.suite), _written(folder)
    return {
        "expectations": outcome.num_judged,
        "warned": len(outcome.with_status("warned")),
        "failed": len(outcome.with_status("failed")),
        "window": str(outcome.window),
        "checked": checked,
        "refused_later": later if later and later > checked else None,
        "page": page if (settings.home / page).exists() else None,
    }


def _outcome(folder: Path, store: ArtifactStore) -> SuiteOutcome | None:
    with suppress(ArtifactError, FileNotFoundError):
        return read_outcome(store.file(folder, RESULT_FILE))
    return None


def _written(folder: Path) -> datetime:
    return datetime.fromtimestamp((folder / VALUE).stat().st_mtime, UTC)


def _lines(entry: Facts) -> Iterator[str]:
    """An entry for people."""
    name = "/".join(filter(None, [entry["tenant"] or "installation", entry["use_case"]]))
    yield f"{name}  {entry['contact']}".rstrip()
    if entry["trouble"] or not entry["views"]:
        yield f"  {'cannot be read: ' + entry['trouble'] if entry['trouble'] else 'no feature view'}"
    for view in entry["views"]:
        found, event = view["quality"], str(view["newest_event"] or "nothing")[:16]
        quality = (
            f"{found['expectations']} checked, {found['failed']} failed" if found else "unchecked"
        )
        users = [f"{m['model']} {', '.join(map(str, m['versions']))}" for m in view["consumers"]]
        yield (
            f"  {view['name']:<22}{len(view['features']):>3} of {', '.join(view['entities']):<16}"
            f"{view['data_class'] or 'unknown':<10}{event:<18}{quality:<24}{'; '.join(users)}"
        ).rstrip()
