"""Commands about one entity, such as a customer: erase all rows of it, or give them out.

Regulation (EU) 2016/679 (GDPR): article 17 (erasure), 15 and 20 (a copy of the data). Models that
were trained on erased rows stay usable; the certificate lists them, for the owner to decide.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from cyclopts import Parameter

from falaj.context import EXIT_DATA, Context, DryRun, Here, Shown, acting, row
from falaj.models import open_registry
from falaj.state import location_of
from flows.config import read_pipeline_config
from infra.orchestration.embedded import only_run
from tasks.features.online.materialization import forget_entities
from tasks.features.tables.build import published_path
from tasks.governance import erasure
from tasks.governance.journal import Journal, process_identity
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import private_folder, scratch_folder, write_atomically
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.signed import signed
from tasks.kernel.location import Location
from tasks.kernel.settings import Settings, children, put
from tasks.predictions import schema as log
from tasks.predictions.segments import folder_held, remove_replaced
from tasks.registry.mlflow_registry import SNAPSHOT_TAG
from tasks.state import erase as state

Entity = Annotated[
    list[str], Parameter(help="Join key and value, as NAME=VALUE; repeat it for a composite key.")
]


def erase(
    *, entity: Entity, backups: list[str] | None = None, dry_run: DryRun = False, context: Here
) -> Shown:
    """Erase all rows of one entity, for good: state, online store, prediction log, backups.

    A certificate says what was done, what was left, and what cannot be built again. Where it was
    killed, the same command goes on.

    Args:
        entity: `subject=ana@example.org` is who requested predictions.
        backups: Location of backups; may be repeated.

    Raises:
        ConfigurationError: the entity is not written as NAME=VALUE, or a run is under way.

    Examples:
        falaj erase --entity customer=17 --dry-run
        falaj erase --entity customer=17 --backups /mnt/backups --yes
    """
    values, places = _values(entity), [location_of(where) for where in backups or []]
    acting(context.settings, "administer", None)
    if not dry_run:
        context.confirm(f"Erase all rows of {' '.join(entity)}, for good?")
    with _eraser(context, values, alone=not dry_run) as (eraser, known):
        digest, folder = known.entity(values).digest, context.home / erasure.FOLDER
        progress = folder / f"{digest[:16]}.progress.json"
        for columns, ids in json.loads(progress.read_text()) if progress.exists() else ():
            eraser.theirs.keys.setdefault(tuple(columns), set()).update(ids)
        for place in _places(eraser, places):
            eraser.learn(place)
        columns_there = sorted({*eraser.columns, "subject"})
        unknown = [name for name in values if name not in columns_there]
        if unknown and not progress.exists():  # else an erasure that was cut off goes on
            near = get_close_matches(unknown[0], columns_there) or columns_there[:5]
            raise ConfigurationError(
                f"no table of the state or the backups has a column {unknown[0]}; expected a key "
                f"such as {', '.join(near)}. Nothing was changed"
            )
        if dry_run:
            rows = Counter(forget_entities(eraser.theirs, context.settings, count_only=True))
            for place in _places(eraser, places):
                rows.update(_by_folder((name, num) for name, num, _, _ in eraser.find(place)))
            lines = [row(str(num), name) for name, num in sorted(rows.items())]
            return Shown({"rows": rows}, [*(lines or ["no rows"]), "Nothing was changed"])
        erasure.write_entities(context.home, known)
        ids = [(c, sorted(each)) for c, each in eraser.theirs.keys.items() if c in eraser.ids]
        write_atomically(progress, json.dumps(ids).encode(), private=True)
        with Journal(context.home / "audit").recorded("erase", subject={"entity": digest}) as act:
            found = {"entity": digest, "keys": [*values], **_erased(eraser, context, places)}
            act.update(rows=sum(found["rows"].values()), left=len(found["still_found"]))
        file = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{digest[:16]}.json"
        put(file, signed(key_store(context.home), found))
        put(file.with_suffix(".txt"), "".join(f"{n}: {json.dumps(v)}\n" for n, v in found.items()))
        progress.unlink()
    lines = [row(str(num), name) for name, num in found["rows"].items()]
    lines += [row("Named", digest), row("Written", file)]
    left = [*found["not_readable"].items(), *found["still_found"].items()]
    lines += [row("Left", f"{name}: {what}") for name, what in left]
    return Shown(found, lines, EXIT_DATA if left else 0)


def _erased(eraser: state.Eraser, context: Context, backups: list[Location]) -> dict[str, Any]:
    """Do it; what the certificate says."""
    settings, home = context.settings, context.home
    forgotten = forget_entities(eraser.theirs, settings, count_only=False)
    online = {f"online: {view}": num for view, num in forgotten.items()}
    with ExitStack() as held:
        for model in log.logged_models(home):
            folder = log.model_folder(home, model)
            held.enter_context(folder_held(folder, exclusive=True))
            for day in children(folder):
                remove_replaced(day)
        eraser.erase(state.Folder(home))
    if settings.location is not None:
        state.erase_builds(eraser, settings.location)
    generations = [state.erase_backups(eraser, location) for location in backups]
    places = _places(eraser, backups)
    found = {f"{p.label}: {name}": num for p in places for name, num, _, _ in eraser.find(p)}
    tables = read_pipeline_config(settings.feature_repo).features.raw_tables
    keys = {name for columns in eraser.theirs.keys for name in columns} - {*sum(eraser.ids, ())}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "who": process_identity(),
        "rows": _by_folder(eraser.erased.items()) | online,
        "files_changed_in_backups": generations,
        "searched": "rows and values" if eraser.marks else "rows; the value is too short for more",
        "still_found": found,
        "not_readable": eraser.unread,
        "to_be_erased_by_their_owner": [t.uri for t in tables if keys <= t.columns.keys()],
        "cannot_be_rebuilt": eraser.changed,
        "models_trained_with_it": [*_models(settings, {*eraser.changed.values()})],
    }


def _models(settings: Settings, changed: set[str]) -> Iterator[str]:
    """Registered versions whose training sets were changed."""
    if not changed or (registry := open_registry(settings)) is None:
        return
    for version in (each for name in registry.names() for each in registry.versions(name)):
        if version.tags.get(SNAPSHOT_TAG) in changed:
            yield str(version)


def export_subject(folder: Path, /, *, entity: Entity, context: Here) -> Shown:
    """Write all rows of one entity to a new folder, as JSON lines, with where they come from.

    Args:
        folder: It is made; its owner alone may enter it.

    Raises:
        ConfigurationError: the folder exists, or the entity is not written as NAME=VALUE.

    Examples:
        falaj export-subject customer-17 --entity customer=17
    """
    acting(context.settings, "administer", None)
    if folder.exists():
        raise ConfigurationError(f"{folder} exists; expected a new folder. Nothing was written")
    values, written, held = _values(entity), Counter[str](), list[tuple[str, int]]()
    published = published_path(context.settings.features_home).parent.name
    private_folder(folder)
    with _eraser(context, values, alone=False) as (eraser, _):
        eraser.learn(state.Folder(context.home))
        for name, num, file, masks in eraser.find(state.Folder(context.home)):
            held.append((name, num))
            if not num or not (published in name.split("/") or name.startswith("predictions/")):
                continue
            # Months of a published table, and days of the log, are one file.
            table = f"{'.'.join(Path(name).parts[-3:-1])}.jsonl"
            written[table] += num
            with pq.ParquetFile(file) as source, (folder / table).open("a") as given:
                for number, mask in enumerate(masks):
                    rows = source.read_row_group(number).filter(pa.array(mask)).to_pylist()
                    given.writelines(json.dumps(each, default=str) + "\n" for each in rows)
    tables = read_pipeline_config(context.settings.feature_repo).features.raw_tables
    sources = {table.name: table.uri for table in tables}
    index = {"entity": values, "files": written, "sources": sources, "rows_held": _by_folder(held)}
    (folder / "index.json").write_text(json.dumps(index, indent=1))
    lines = [row(str(num), name) for name, num in sorted(written.items())]
    return Shown(index, [*lines, row("Written", folder)])


def _values(entity: list[str]) -> dict[str, str]:
    found = dict(sorted(text.partition("=")[::2] for text in entity))
    if not all((*found, *found.values())) or len(found) < len(entity):
        raise ConfigurationError(
            f"--entity {' '.join(entity)} names no entity, or several; write each key of one once, "
            "as NAME=VALUE. Nothing was changed"
        )
    return found


@contextmanager
def _eraser(
    context: Context, values: dict[str, str], *, alone: bool
) -> Iterator[tuple[state.Eraser, erasure.ErasedEntities]]:
    """What looks for an entity, and the list of erased ones with it."""
    home, every = context.home, [values]
    if log.mask_key_file(home).exists():  # as the prediction log may have it
        mask = log.open_mask(home)
        every.append({name: mask.text(value) for name, value in values.items()})
    texts = {erasure.SEPARATOR.join(each.values()) for each in every}
    theirs = erasure.Theirs(keys={tuple(values): texts})
    held, near = (only_run(home), home) if alone else (nullcontext(), None)
    with held, scratch_folder(state.ASIDE, near) as scratch:
        known = (erasure.read_entities(home) or erasure.new_entities()).with_entities(every)
        yield state.Eraser(context.settings, theirs, tuple(values.values()), scratch), known


def _places(eraser: state.Eraser, backups: list[Location]) -> Iterator[state.Place]:
    """All that hold files of the state."""
    settings, scratch = eraser.settings, eraser.scratch
    yield state.Folder(settings.home)
    if settings.location is not None:
        yield from state.builds_of(settings.location, scratch)
    for location in backups:
        yield from (place for _, place in state.backups_of(settings, location, scratch))


def _by_folder(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    found = Counter[str]()
    for name, num in rows:
        found["/".join(name.split("/")[:2])] += num
    return dict(found)
